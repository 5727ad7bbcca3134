"""Two programs side by side, as ``hlo-audit diff`` tells of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlo_audit.diff import Diff
from hlo_audit.examination import FindingKey, Pair, finding_key
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report.diff_wording import (
    NumberRow,
    fixes,
    largest,
    number_rows,
    parted,
    summary,
)
from hlo_audit.report.hlo_text import short_text
from hlo_audit.report.html.limits import MOST_LISTED, MOST_OF_AN_INSTRUCTION, cut
from hlo_audit.report.html.overview import target_of
from hlo_audit.report.listed import most_costly_first
from hlo_audit.report.wording import format_cost
from hlo_audit.rule import Finding

Anchors = Mapping[tuple[str, FindingKey], str]
"""Label and finding -> its id in the page."""


@dataclass(frozen=True)
class Brief:
    """A finding on one line; ``anchor`` is ``""`` for one that the page does not show."""

    anchor: str
    rule: str
    text: str


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its findings that the other has not."""

    name: str
    findings: tuple[Brief, ...]
    more: str
    instructions: tuple[str, ...]
    more_instructions: int


@dataclass(frozen=True)
class Comparison:
    """Two programs side by side.

    Attributes:
        names: tell them apart in a few letters.
        which: name, and label and target, of each.
    """

    title: str
    names: tuple[str, str]
    which: tuple[tuple[str, str], ...]
    obstacles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    identical: bool = False
    sentences: tuple[str, ...] = ()
    partings: tuple[str, ...] = ()
    fixes: tuple[tuple[str, str, str], ...] = ()
    rows: tuple[NumberRow, ...] = ()
    sides: tuple[Side, ...] = ()
    in_both: tuple[Brief, ...] = ()
    in_both_left_out: int = 0
    matched: str = ""
    opcodes: tuple[tuple[str, str, str, str], ...] = ()
    relaid: tuple[tuple[str, str, str], ...] = ()
    error: str = ""


def comparison_of(pair: Pair, audits: Sequence[ProgramAudit], anchors: Anchors) -> Comparison:
    """What the page shows of two programs.

    Args:
        audits: of all programs, by whose places ``pair`` names its own.
    """
    a, b = audits[pair.a], audits[pair.b]
    diff = pair.diff
    names = (diff.a.name, diff.b.name) if diff else ("A", "B")
    which = tuple(
        (name, f"{one.label} {target_of(one)}".strip())
        for name, one in zip(names, (a, b), strict=True)
    )
    title = f"{names[0]} against {names[1]}"
    if diff is None:
        return Comparison(title, names, which, error=str(pair.error) if pair.error else "")
    same = a.program == b.program and a.layout == b.layout
    if same:
        title += f": {' '.join(part for part in (a.program, a.layout, target_of(a)) if part)}"
    shown = bool(diff.rules) and not diff.identical
    in_both = _warnings(a, [f for one in diff.rules for f in one.in_both]) if shown else []
    return Comparison(
        title=title,
        names=names,
        which=which,
        obstacles=diff.obstacles,
        notes=diff.notes,
        identical=diff.identical,
        sentences=tuple(map(cut, summary(diff))) if diff.rules else (),
        partings=tuple(parted(diff)) if shown else (),
        fixes=tuple(
            (fix.name, f"{', '.join(fix.counts)} in {name}", fix.change)
            for name, fix in fixes(diff)
        )
        if shown
        else (),
        rows=tuple(number_rows(diff)) if diff.rules else (),
        sides=tuple(_sides(diff, (a, b), anchors)) if shown else (),
        in_both=_briefly(in_both, a, anchors),
        in_both_left_out=max(0, len(in_both) - MOST_LISTED),
        matched=_matched(diff),
        opcodes=tuple(_opcodes(diff)) if shown else (),
        relaid=tuple(_relaid(diff)) if shown else (),
    )


def _warnings(audit: ProgramAudit, findings: Sequence[Finding]) -> list[Finding]:
    """Those among findings of a program, the most costly first."""
    return [one for one in most_costly_first(audit, findings) if one.severity == "warning"]


def _briefly(
    findings: Sequence[Finding], audit: ProgramAudit, anchors: Anchors
) -> tuple[Brief, ...]:
    """The first findings of a program."""
    return tuple(
        Brief(
            anchors.get((audit.label, finding_key(one)), ""),
            one.rule,
            cut("; ".join(part for part in (one.message, format_cost([one])) if part)),
        )
        for one in findings[:MOST_LISTED]
    )


def _sides(
    diff: Diff, audits: tuple[ProgramAudit, ProgramAudit], anchors: Anchors
) -> Iterator[Side]:
    matching = diff.matching
    for side, audit, only, instructions in (
        (
            diff.a,
            audits[0],
            [f for one in diff.rules for f in one.only_a],
            matching.only_a if matching else (),
        ),
        (
            diff.b,
            audits[1],
            [f for one in diff.rules for f in one.only_b],
            matching.only_b if matching else (),
        ),
    ):
        warnings = _warnings(audit, only)
        left_out = len(warnings) - MOST_LISTED
        rest = [f"{left_out:,} more"] if left_out > 0 else []
        notes = len(only) - len(warnings)
        rest += [f"{notes:,} {'note' if notes == 1 else 'notes'}"] if notes else []
        big = largest(instructions)
        yield Side(
            side.name,
            _briefly(warnings, audit, anchors),
            " and ".join(rest),
            tuple(short_text(one, MOST_OF_AN_INSTRUCTION) for one in big[:MOST_LISTED]),
            max(0, len(big) - MOST_LISTED),
        )


def _matched(diff: Diff) -> str:
    matching = diff.matching
    if matching is None:
        return ""
    return (
        f"{len(matching.pairs):,} instructions of the final modules matched by meaning, "
        f"{len(matching.only_a):,} only in {diff.a.name}, "
        f"{len(matching.only_b):,} only in {diff.b.name}"
    )


def _opcodes(diff: Diff) -> Iterator[tuple[str, str, str, str]]:
    changed = [(name, both) for name, both in diff.opcodes.items() if both.difference]
    changed.sort(key=lambda one: -abs(one[1].difference or 0))
    for name, both in changed[:MOST_LISTED]:
        yield name, f"{both.a:,}", f"{both.b:,}", f"{both.difference or 0:+,}"


def _relaid(diff: Diff) -> Iterator[tuple[str, str, str]]:
    """Matched instructions in another layout or shape."""
    if diff.matching is None:
        return
    pairs = [*diff.matching.reshaped, *diff.matching.relaid]
    of = {pair.a: pair for pair in pairs}
    for one in largest(list(of))[:MOST_LISTED]:
        pair = of[one]
        yield f"%{pair.a.name} {pair.a.opcode}", cut(str(pair.a.shape)), cut(str(pair.b.shape))
