"""What the page shows, as plain data: the template lays it out and decides nothing.

All text in it may come out of a dump. It is made harmless where it is put into the page, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlo_audit.examination import Examined, Pair, finding_key
from hlo_audit.report import Report
from hlo_audit.report.html.charts import chart_data
from hlo_audit.report.html.comparison import Comparison, comparison_of
from hlo_audit.report.html.entries import Entry, entries_of
from hlo_audit.report.html.findings import (
    FindingView,
    Note,
    finding_view,
    note_of,
    reason_of,
    shares_of,
)
from hlo_audit.report.html.fixes import FixView, fix_views
from hlo_audit.report.html.limits import MOST_FINDINGS, MOST_NOTES, MOST_PAIRS, MOST_PROGRAMS
from hlo_audit.report.html.overview import (
    ProgramRow,
    Verdict,
    program_rows,
    rules_of,
    verdict,
    versions_of,
)
from hlo_audit.report.html.passes import PassesView, passes_of
from hlo_audit.report.listed import alike, listed, suppressed
from hlo_audit.report.snippets import SourceReader
from hlo_audit.report.sources import Repository
from hlo_audit.report.wording import headline_with_failed


@dataclass(frozen=True)
class Counted:
    """How many there are, and how many different ones, as they are listed: see :func:`alike`."""

    all: int
    different: int

    @property
    def said(self) -> str:
        """``56 (38 different)``."""
        if self.all == self.different:
            return f"{self.all:,}"
        return f"{self.all:,} ({self.different:,} different)"


def _counted(groups: Sequence[Sequence[object]]) -> Counted:
    return Counted(sum(map(len, groups)), len(groups))


@dataclass(frozen=True)
class Page:
    """All of it, and the numbers of the charts."""

    title: str
    verdict: Verdict
    codes: tuple[tuple[str, str, str], ...]
    programs: tuple[ProgramRow, ...]
    has_cycles: bool
    comparisons: tuple[Comparison, ...]
    pairs_left_out: int
    findings: tuple[FindingView, ...]
    findings_in_all: Counted
    notes: tuple[Note, ...]
    notes_in_all: Counted
    suppressed: tuple[Note, ...]
    suppressed_in_all: Counted
    passes: tuple[PassesView, ...]
    programs_left_out: int
    fixes: tuple[FixView, ...]
    entries: tuple[Entry, ...]
    versions: tuple[tuple[str, str], ...]
    charts: Mapping[str, Any]


def page_of(
    report: Report, examined: Sequence[Examined], pairs: Sequence[Pair], repository: Repository
) -> Page:
    """Everything that the page shows.

    Args:
        examined: one for each program of ``report``, in its order.
        pairs: of these, by their places.
        repository: what the Python lines are relative to, and whose files are quoted.
    """
    reader = SourceReader(repository)
    entries = listed(report, show_all=True)
    groups = alike(entry for entry in entries if entry.level != "note")
    notes = alike(entry for entry in entries if entry.level == "note")
    places = {id(audit): place for place, audit in enumerate(report.programs)}
    shares = shares_of(groups)
    views = tuple(
        finding_view(
            f"finding-{number}",
            group,
            examined[places[id(group[0].audit)]],
            sorted({places[id(entry.audit)] + 1 for entry in group}),
            repository,
            reader,
            share,
        )
        for number, (group, share) in enumerate(
            zip(groups[:MOST_FINDINGS], shares, strict=False), start=1
        )
    )
    anchors = {
        (entry.audit.label, finding_key(entry.finding)): view.anchor
        for group, view in zip(groups, views, strict=False)
        for entry in group
    }
    rules = rules_of(report.programs)
    quiet = suppressed(report)
    timelines = tuple(
        passes_of(f"passes-{number}", audit.label, one)
        for number, (audit, one) in enumerate(
            zip(report.programs[:MOST_PROGRAMS], examined, strict=False), start=1
        )
        if audit.error is None
    )
    compared = [comparison_of(pair, report.programs, anchors) for pair in pairs[:MOST_PAIRS]]
    return Page(
        title=f"hlo-audit: {headline_with_failed(report)}",
        verdict=verdict(report, examined),
        codes=tuple((rule.code, rule.slug, rule.summary) for rule in rules.values()),
        programs=tuple(program_rows(report, tuple(rules))),
        has_cycles=any(audit.cost for audit in report.programs),
        comparisons=tuple(compared),
        pairs_left_out=max(0, len(pairs) - MOST_PAIRS),
        findings=views,
        findings_in_all=_counted(groups),
        notes=tuple(note_of(group, repository) for group in notes[:MOST_NOTES]),
        notes_in_all=_counted(notes),
        suppressed=tuple(note_of([one], repository, reason_of(one)) for one in quiet[:MOST_NOTES]),
        suppressed_in_all=Counted(len(quiet), len(quiet)),
        passes=timelines,
        programs_left_out=max(0, len(report.programs) - MOST_PROGRAMS),
        fixes=tuple(fix_views(report.programs)),
        entries=tuple(entries_of(report.programs, examined, pairs)),
        versions=versions_of(report),
        charts=chart_data(report, examined, rules),
    )
