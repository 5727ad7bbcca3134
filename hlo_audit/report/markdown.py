"""A report as GitHub Markdown, for a job summary or a comment on a pull request.

The verdict comes first, then what is over the gate and by how much, the counts, and the findings,
folded away. What a dump says stands in code, where nothing is a mention, a link, an image or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_letters, digits

from hlo_audit._version import __version__
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.report.listed import Listed, alike, by_program, listed, offered_fixes
from hlo_audit.report.sources import Repository
from hlo_audit.report.violations import known_heading, violation_rows
from hlo_audit.report.wording import (
    clip,
    format_cost,
    headline_with_failed,
    not_audited,
    plain,
    suppressed_said,
)
from hlo_audit.rule import Rule

MARKER = "<!-- hlo-audit -->"
"""The first line, by which a comment is found again."""

MOST_BYTES = 65_000
"""GitHub takes 65,536 characters in a comment, and 1 MiB in the summary of a step."""

_MOST_CHARACTERS = 300
_ROOM_FOR_END = 2_000


def render_markdown(
    report: Report,
    repository: Repository,
    *,
    show_all: bool = False,
    most_bytes: int = MOST_BYTES,
) -> str:
    """The report as text, with a line end, in no more than ``most_bytes`` bytes of UTF-8.

    Args:
        repository: what the Python lines are relative to.
        show_all: lists notes too.
        most_bytes: at least 4,000.
    """
    text = _Limited(most_bytes - _ROOM_FOR_END)
    text.add(_opening(report))
    tables = (
        _violations(report),
        _notices(report),
        _failed(report),
        _counts(report),
    )
    for table in tables:
        text.add_lines(table, "\nMore rows did not fit.\n")
    entries = by_program(listed(report, show_all=show_all))
    left_out = 0
    for audit in report.programs:
        if mine := entries.get(id(audit)):
            left_out += _findings(text, audit, mine, repository)
    if left_out:
        text.add(f"\n{left_out} more findings did not fit here.\n", always=True)
    text.add(_closing(report), always=True)
    return str(text)


class _Limited:
    """Text that takes only what still fits."""

    def __init__(self, most_bytes: int) -> None:
        self._parts: list[str] = []
        self._left_bytes = most_bytes

    def __str__(self) -> str:
        return "".join(self._parts)

    def has_room_for(self, *parts: str) -> bool:
        return sum(len(part.encode("utf-8", "replace")) for part in parts) <= self._left_bytes

    def add(self, part: str, *, always: bool = False) -> bool:
        """Append a part, or nothing of it; return whether it was appended."""
        if not always and not self.has_room_for(part):
            return False
        self._parts.append(part)
        self._left_bytes -= len(part.encode("utf-8", "replace"))
        return True

    def add_lines(self, lines: Sequence[str], or_else: str) -> None:
        """Append as many lines as fit; ``or_else`` stands for the others."""
        for line in lines:
            if not self.has_room_for(line, or_else):
                self.add(or_else)
                return
            self.add(line)


def span(text: str) -> str:
    """``text`` as inline code outside of a table: behind more backticks than it holds."""
    shown = clip(plain(text), _MOST_CHARACTERS) or "-"
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    # A blank at either end is taken off again where both are there.
    return f"{fence} {shown} {fence}" if longest or shown != shown.strip() else f"`{shown}`"


def cell(text: str) -> str:
    """``text`` as inline code in a table, where a ``|`` would end it."""
    return in_html(text) if set("|\\`") & set(text) else span(text)


def in_html(text: str) -> str:
    """``text`` as code where Markdown is not read: in a summary. Harmless where it is, too."""
    shown = clip(plain(text), _MOST_CHARACTERS) or "-"
    safe = set(ascii_letters + digits + " ")
    # Spelt out, a character is text to every reader of Markdown and never a sign.
    return f"<code>{''.join(c if c in safe else f'&#{ord(c)};' for c in shown)}</code>"


def _opening(report: Report) -> str:
    sign = {True: ":white_check_mark:", False: ":x:"}
    passed = report.gate.passed and not not_audited(report)
    mark = sign[passed] if report.gate.held or not passed else ":information_source:"
    return f"{MARKER}\n### {mark} hlo-audit: {headline_with_failed(report)}\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    if not rows:
        return []
    rule = ["---" if n < numbers_from else "--:" for n in range(len(headings))]
    return ["\n" + _row(headings) + _row(rule), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _violations(report: Report) -> list[str]:
    rows = [
        (cell(row.program), row.rule, row.known, row.found, row.difference)
        for row in violation_rows(report)
    ]
    known = known_heading(report.gate)
    return _table(("program", "rule", known, "found", "difference"), rows, 2)


def _notices(report: Report) -> list[str]:
    lines = [
        f"- {'**fails**: ' if notice.fails else ''}{span(notice.message)}\n"
        for notice in report.gate.notices
    ]
    if suppressed := suppressed_said(report):
        lines.append(f"- {suppressed}\n")
    return ["\n", *lines] if lines else []


def _failed(report: Report) -> list[str]:
    rows = [
        (cell(audit.label), audit.error.kind, cell(str(audit.error)))
        for audit in report.programs
        if audit.error is not None
    ]
    return _table(("not audited", "kind", "error"), rows, 3)


def _counts(report: Report) -> list[str]:
    audited = [audit for audit in report.programs if audit.error is None]
    rules = {rule.code: rule for audit in audited for rule in audit.rules}
    if not rules:
        return []
    rows = [
        (
            cell(audit.label),
            cell(audit.target or audit.platform or ""),
            *(_count(audit, rules[code]) for code in sorted(rules)),
            f"{audit.cost.estimated_cycles:,}" if audit.cost else "",
        )
        for audit in audited
    ]
    headings = ("program", "target", *sorted(rules), "est. cycles")
    return _table(headings, rows, 2)


def _count(audit: ProgramAudit, rule: Rule) -> str:
    """All findings, as the gate counts them, and how many of them are notes."""
    if rule.code not in audit.counts:
        return "not applied"
    count = audit.counts[rule.code]
    if count is None:
        return "not counted"
    notes = sum(f.rule == rule.code and f.severity == "note" for f in audit.findings)
    some = "1 note" if notes == 1 else f"{notes} notes"
    return f"{count} ({some})" if notes else str(count)


def _findings(
    text: _Limited, audit: ProgramAudit, entries: Sequence[Listed], repository: Repository
) -> int:
    """Add the findings of a program, and return how many did not fit."""
    findings = "1 finding" if len(entries) == 1 else f"{len(entries)} findings"
    head = f"\n<details><summary>{findings} in {in_html(audit.label)}</summary>\n\n"
    tail = "\n</details>\n"
    fixes = [
        f"- fix **{fix.name}** for {', '.join(fix.counts)}: {span(fix.change)}\n"
        for fix in offered_fixes(audit)
    ]
    lines = [(_finding(group, repository), len(group)) for group in alike(entries)]
    end = "".join(["\n", *fixes, tail]) if fixes else tail
    if not text.has_room_for(head, lines[0][0], end):
        return len(entries)
    text.add(head)
    left_out = 0
    for line, count in lines:
        if not text.has_room_for(line, end) or left_out:
            left_out += count
        else:
            text.add(line)
    text.add(end)
    return left_out


def _finding(group: Sequence[Listed], repository: Repository) -> str:
    entry, finding = group[0], group[0].finding
    times = f"{len(group)} times " if len(group) > 1 else ""
    over = ", over the gate" if entry.breaks_gate else ""
    facts = [
        *(f"at {span(str(place))}" for place in repository.places(finding)[:1]),
        format_cost([one.finding for one in group]),
        f"{span('%' + finding.instruction)}",
    ]
    head = f"- **{finding.rule} {finding.slug}**{over}: {times}{span(finding.message)}"
    return f"{head}  \n  {'; '.join(fact for fact in facts if fact)}\n"


def _closing(report: Report) -> str:
    compiled_with = {tuple(audit.versions.items()) for audit in report.programs}
    versions = compiled_with.pop() if len(compiled_with) == 1 else ()
    found = [f"hlo-audit {__version__}"]
    found += [f"{name} {version}" for name, version in versions if version]
    return f"\n{span(', '.join(found))}\n"
