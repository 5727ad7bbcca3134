"""A diff for the terminal: what matters on the first screen, then the lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hlo_audit._version import __version__
from hlo_audit.diff import Diff, EntryRow, Side
from hlo_audit.hlo import Instruction
from hlo_audit.matching import Pair
from hlo_audit.report.diff_wording import (
    fixes,
    format_seconds,
    largest,
    number_rows,
    parted,
    stored,
    summary,
)
from hlo_audit.report.listed import most_costly_first
from hlo_audit.report.located import located
from hlo_audit.report.text import Indented
from hlo_audit.report.wording import clip, format_cost, plain
from hlo_audit.rule import Finding

MOST_LISTED = 12
"""How many entries of a list are shown; JSON has all of them."""

_NAME_WIDTH = 44


def print_diff(console: Console, diff: Diff) -> None:
    """Print a diff: the two programs, what differs in sentences, then tables and lists."""
    for block in _blocks(diff):
        console.print(block)


def _blocks(diff: Diff) -> Iterator[RenderableType]:
    yield Text(f"hlo-audit {__version__}", style="dim")
    yield from _sides(diff)
    yield Text()
    if diff.obstacles:
        yield Text("not comparable", style="bold red")
        yield from (_bullet(obstacle) for obstacle in diff.obstacles)
    yield from (_dim(f"note: {note}") for note in diff.notes)
    if not diff.rules:
        yield _dim("--force compares them all the same")
        return
    if diff.identical:
        yield Text(summary(diff)[0], style="bold green")
        return
    yield from (_bullet(sentence) for sentence in summary(diff))
    yield from (_bullet(sentence) for sentence in parted(diff))
    for name, fix in fixes(diff):
        parts = (("fix ", "green"), (fix.name, "green bold"))
        text = f" for {', '.join(fix.counts)} in {name}: {fix.change}"
        yield Indented(Text.assemble(*parts, plain(text)), 0, hanging=2)
    yield Text()
    yield _numbers(diff)
    yield _dim("costs are estimates, of one step on one device; times as if nothing overlapped")
    yield from _findings(diff)
    yield from _entry(diff)
    yield from _instructions(diff)


def _bullet(sentence: str) -> Indented:
    return Indented(Text.assemble(("- ", "red"), plain(sentence)), 0, hanging=2)


def _dim(text: str) -> Indented:
    return Indented(Text(plain(text), "dim"), 0, hanging=2)


def _sides(diff: Diff) -> Iterator[RenderableType]:
    width = max(len(side.name) for side in (diff.a, diff.b))
    for side in (diff.a, diff.b):
        audit = side.audit
        facts = [audit.label, audit.target, audit.module or ""]
        facts += [f"--xla-flag {name}={value}" for name, value in audit.xla_flags.items()]
        said = plain("  ".join(fact for fact in facts if fact))
        name = Text(plain(side.name).ljust(width), style="bold")
        yield Indented(name + Text(f"  {said}"), 0, hanging=width + 2)


# -- the numbers


def _numbers(diff: Diff) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for side in (diff.a, diff.b):
        table.add_column(Text(plain(side.name)), justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    for row in number_rows(diff):
        change = Text(row.change, style="red" if row.worse else "green")
        table.add_row(Text(row.name), row.a, row.b, change)
    return table


# -- the lists


def _findings(diff: Diff) -> Iterator[RenderableType]:
    for side, only in (
        (diff.a, [f for one in diff.rules for f in one.only_a]),
        (diff.b, [f for one in diff.rules for f in one.only_b]),
    ):
        found = most_costly_first(side.audit, only)
        warnings = [finding for finding in found if finding.severity == "warning"]
        if not found:
            continue
        notes = len(found) - len(warnings)
        more = f" and {notes} {'note' if notes == 1 else 'notes'}" if notes else ""
        yield Text()
        yield _heading(f"only in {side.name}", f"{_count(len(warnings), 'finding')}{more}")
        for finding in warnings[:MOST_LISTED]:
            yield from _finding(side, finding)
        yield from _rest(len(warnings))


def _finding(side: Side, finding: Finding) -> Iterator[RenderableType]:
    parts = (("- ", "red"), (finding.rule, "bold"), f" {plain(finding.message)}")
    yield Indented(Text.assemble(*parts), 2, hanging=2)
    facts = [f"%{finding.instruction}", format_cost([finding])]
    seconds = finding.traffic and finding.traffic.seconds(side.audit.hardware)
    if seconds:
        facts.append(f"about {format_seconds(seconds)}")
    said = Text(plain("; ".join(fact for fact in facts if fact)), "dim")
    if finding.source is not None:
        said += Text("; ", "dim") + located(finding.source)
    yield Indented(said, 4, hanging=2)


def _entry(diff: Diff) -> Iterator[RenderableType]:
    rows = [row for row in diff.entry if stored(row.a) != stored(row.b)]
    if not rows:
        yield Text()
        yield _dim(f"entry: {len(diff.entry)} parameters and results, in the same layouts")
        return
    yield Text()
    yield _heading("entry", f"{len(rows)} of {len(diff.entry)} differ")
    for row in rows[:MOST_LISTED]:
        yield _entry_row(row)
    yield from _rest(len(rows))


def _entry_row(row: EntryRow) -> Indented:
    name = f"{row.kind} {clip(plain(row.name), _NAME_WIDTH) or '?'}"
    text = f"- {name}: {stored(row.a) or 'not there'} | {stored(row.b) or 'not there'}"
    return Indented(Text(plain(text)), 2, hanging=2)


def _instructions(diff: Diff) -> Iterator[RenderableType]:
    matching = diff.matching
    if matching is None:
        return
    yield Text()
    yield _heading(
        "instructions",
        f"{len(matching.pairs):,} matched, {len(matching.only_a):,} only in {diff.a.name}, "
        f"{len(matching.only_b):,} only in {diff.b.name}",
    )
    changed = [(op, both) for op, both in diff.opcodes.items() if both.difference]
    changed.sort(key=lambda one: -abs(one[1].difference or 0))
    if changed:
        listed = [f"{op} {both.a} → {both.b}" for op, both in changed[:MOST_LISTED]]
        more = len(changed) - MOST_LISTED
        listed += [f"and {more} more"] if more > 0 else []
        yield Indented(Text(plain("opcodes: " + ", ".join(listed))), 2, hanging=2)
    for title, pairs in (("other shape", matching.reshaped), ("other layout", matching.relaid)):
        yield from _pairs(title, pairs)
    for side, only in ((diff.a, matching.only_a), (diff.b, matching.only_b)):
        big = largest(only)
        if big:
            yield Indented(Text(f"only in {plain(side.name)}, the largest first:"), 2)
        for one in big[:MOST_LISTED]:
            yield Indented(Text(_described(one), "dim"), 4, cut=True)
        yield from _rest(len(big), by=4)


def _pairs(title: str, pairs: Sequence[Pair]) -> Iterator[RenderableType]:
    of = {pair.a: pair for pair in pairs}
    big = [of[one] for one in largest(list(of))]
    if not big:
        return
    yield Indented(Text(f"matched, {title}: {len(big)}"), 2)
    for a, b in big[:MOST_LISTED]:
        text = plain(f"%{a.name} {a.opcode} {a.shape} → {b.shape}")
        yield Indented(Text(text, "dim"), 4, hanging=2)
    yield from _rest(len(big), by=4)


def _described(one: Instruction) -> str:
    op_name = f"  {one.op_name}" if one.op_name else ""
    return plain(f"%{one.name} = {one.shape} {one.opcode}{op_name}")


def _heading(title: str, text: str) -> Indented:
    return Indented(Text.assemble((plain(title), "bold"), f"  {plain(text)}"), 0, hanging=2)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _rest(count: int, by: int = 2) -> Iterator[RenderableType]:
    if count > MOST_LISTED:
        yield Indented(Text(f"and {count - MOST_LISTED} more (--format json has all)", "dim"), by)
