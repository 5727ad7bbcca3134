"""The passes for the terminal: a line for each count, the passes that change one, who brought what,
and the way of one instruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hlo_audit._version import __version__
from hlo_audit.history import History
from hlo_audit.passes import Passes
from hlo_audit.report.listed import numbered
from hlo_audit.report.passes import Followed
from hlo_audit.report.passes_wording import format_byte_change, not_counted, snapshots_said
from hlo_audit.report.text import MOST_FINDINGS, Indented
from hlo_audit.report.wording import brought_by, format_bytes, format_cost, plain
from hlo_audit.rule import Finding
from hlo_audit.timeline import Change, Series, Timeline

_BARS = "▁▂▃▄▅▆▇█"
_NOT_COUNTED = "·"

_MOST_BARS = 64

# Name and counts of a series beside its sparkline.
_WIDTH_OF_REST = 58


def print_passes(
    console: Console,
    histories: Sequence[History],
    labels: Sequence[str],
    followed: Sequence[Followed] | None,
    *,
    show_all: bool = False,
) -> None:
    """Print the timelines, or the ways of the instructions that are followed.

    Args:
        labels: what to call the programs.
        followed: the instructions to follow; ``None`` for the timelines.
        show_all: every snapshot, and every finding.
    """
    console.print(Text(f"hlo-audit {__version__}", style="dim"))
    for index, (history, label) in enumerate(zip(histories, labels, strict=True)):
        if history.timeline is None:
            continue
        mine = [one for one in followed or () if one.program == index]
        if followed is not None and not mine:
            continue
        console.print()
        console.print(_heading(history, history.timeline, label))
        if mine:
            for one in mine:
                for block in _walk(history.timeline.passes, one):
                    console.print(block)
        else:
            for block in _timeline(history, history.timeline, console.width, show_all):
                console.print(block)


def _heading(history: History, timeline: Timeline, label: str) -> Text:
    passes = timeline.passes
    changing = sum(map(passes.changes_module, range(1, len(passes))))
    audit = history.audit
    facts = [fact for fact in (audit.target, audit.module) if fact]
    return Text.assemble(
        (plain(label), "bold"),
        "".join(f"  {plain(fact)}" for fact in facts),
        (f"  {snapshots_said(len(passes), changing)}", "dim"),
    )


# -- the timeline


def _timeline(
    history: History, timeline: Timeline, width: int, show_all: bool
) -> Iterator[RenderableType]:
    yield _series_table(timeline, max(8, min(_MOST_BARS, width - _WIDTH_OF_REST)))
    yield from _not_counted(timeline)
    rows = list(_rows(timeline, show_all))
    yield Text()
    if not rows:
        yield Text("no pass changes any of these counts", style="dim")
    else:
        title = "every snapshot" if show_all else "passes that change a count"
        yield Text(title, style="bold")
        yield _passes_table(rows)
        if any(change.swings for _, changes in rows for _, change in changes):
            yield Text("~N: N of these a later pass undoes, or undo an earlier one's", style="dim")
    yield from _findings(numbered(history.audit), show_all)


def _series_table(timeline: Timeline, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", max_width=28)
    table.add_column("", no_wrap=True)
    for heading in ("first", "most", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for series in timeline.series:
        name = series.name if series.name == series.title else f"{series.name} {series.title}"
        first, last = series.first, series.last
        size = format_bytes(last.bytes) if last is not None and last.bytes else ""
        table.add_row(
            Text(plain(name)),
            Text(sparkline(series, width), style="cyan"),
            Text("-" if first is None else str(first.count)),
            Text(str(series.most) if first is not None else "-"),
            Text("-" if last is None else str(last.count)),
            Text(size, style="dim"),
        )
    return table


def sparkline(series: Series, width: int) -> str:
    """The counts as bars, the highest of the snapshots that share one; a dot where none of them is
    counted. Bars of zero are the lowest."""
    count = len(series.readings)
    width = min(width, count)
    bars = []
    for bar in range(width):
        share = series.readings[bar * count // width : (bar + 1) * count // width]
        counts = [reading.count for reading in share if reading is not None]
        if not counts:
            bars.append(_NOT_COUNTED)
        elif max(counts) == 0:
            bars.append(_BARS[0])
        else:
            # Whatever is there is seen beside nothing.
            height = round(max(counts) / series.most * (len(_BARS) - 1))
            bars.append(_BARS[max(1, height)])
    return "".join(bars)


def _not_counted(timeline: Timeline) -> Iterator[RenderableType]:
    for reason, names in not_counted(timeline.series).items():
        text = Text(f"{_NOT_COUNTED}: {', '.join(names)}: {reason}", style="dim")
        yield Indented(text, 0, hanging=3)


_Row = tuple[tuple[str, str, bool], Sequence[tuple[Series, Change]]]
"""Number, pass and whether the module changes; what changes with it."""


def _rows(timeline: Timeline, show_all: bool) -> Iterator[_Row]:
    passes = timeline.passes
    for position, snapshot in enumerate(passes.snapshots):
        changes = timeline.changes_at(position)
        if changes or show_all:
            number = "" if snapshot.number is None else str(snapshot.number)
            name = passes.pass_name(position)
            yield (number, name, passes.changes_module(position)), changes


def _passes_table(rows: Sequence[_Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold", ratio=1)
    table.add_column(overflow="fold", ratio=1)
    for (number, name, changes_module), changes in rows:
        lasting = any(change.lasting for _, change in changes)
        what = Text("\n").join(_change(series, change) for series, change in changes)
        if not changes:
            what = Text("" if changes_module else "as before", style="dim")
        table.add_row(number, Text(plain(name), style="" if lasting else "dim"), what)
    return table


def _change(series: Series, change: Change) -> Text:
    reading = series.readings[change.position]
    after = "" if reading is None else f" to {reading.count}"
    by = f"{change.count:+d}" if change.count else f"+{change.added} -{change.removed}"
    moved = f", {format_byte_change(change.bytes)}" if change.bytes else ""
    style = "" if change.lasting else "dim"
    if change.lasting_count:
        style = "red" if change.lasting_count > 0 else "green"
    return Text.assemble(
        (f"{plain(series.name)} {by}", style),
        (f"{after}{moved}", "dim"),
        (f" ~{change.swings}" if change.swings else "", "dim"),
    )


# -- the findings


def _findings(findings: Sequence[Finding], show_all: bool) -> Iterator[RenderableType]:
    """By number, so that one can be asked for; the most costly first."""
    entries = list(enumerate(findings, 1))
    listed = [entry for entry in entries if show_all or entry[1].severity == "warning"]
    if not listed:
        return
    yield Text()
    yield Text("findings, and the pass that brought each", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for number, finding in listed if show_all else listed[:MOST_FINDINGS]:
        cost = format_cost([finding])
        lines = [
            Text.assemble((finding.rule, "bold"), f" {plain(finding.message)}"),
            Text.assemble(
                (brought_by(finding.introduced_by), "yellow"),
                (f"; %{plain(finding.instruction)}; ", "dim"),
                (f"{cost}; " if cost else "", "dim"),
                (finding.fingerprint, "dim"),
            ),
        ]
        table.add_row(str(number), Text("\n").join(lines))
    yield table
    rest = len(listed) - MOST_FINDINGS
    if rest > 0 and not show_all:
        yield Text(f"and {rest} more (--all lists all)", style="dim")
    yield Text("--finding N tells the way of one through the passes", style="dim")


# -- the way of one instruction


def _walk(passes: Passes, followed: Followed) -> Iterator[RenderableType]:
    walk, finding = followed.walk, followed.finding
    instruction = walk.instruction
    if finding is not None:
        title = f"{followed.number}  {finding.rule} {finding.slug}: {plain(finding.message)}"
        yield Indented(Text(title, style="bold"), 0, hanging=2)
    name = f"%{instruction.name}"
    where = f"%{instruction.computation.name}"
    yield Indented(
        Text.assemble(
            (plain(name), "bold"),
            plain(f" {instruction.opcode} "),
            plain(instruction.shape.without_layout),
            plain(f" in {where}"),
        ),
        2,
        hanging=2,
    )
    by = finding.introduced_by if finding is not None else walk.introduced_by
    count = walk.last - walk.first + 1
    until = passes.pass_name(walk.last)
    snapshots = "1 snapshot" if count == 1 else f"{count} snapshots on end"
    said = f"{brought_by(by)}; stands in {snapshots}, the last: {plain(until)}"
    yield Indented(Text(said, style="yellow"), 2, hanging=2)
    yield Text()
    for position, steps in groupby(walk.steps, key=lambda step: step.position):
        number = passes.snapshots[position].number
        shown = "" if number is None else str(number)
        yield Text.assemble((f"{shown:>5}  ", "dim"), (plain(passes.pass_name(position)), "bold"))
        for step in steps:
            runs = "" if step.times == 1 else f" ({step.times} runs)"
            how = f" [{step.how}]" if step.how else ""
            style = {"not-folded": "red", "copies": "red", "folded": "green"}.get(step.kind, "")
            text = Text.assemble((plain(step.text) + runs, style), (how, "dim"))
            yield Indented(text, 7, hanging=2)
    if any(step.how for step in walk.steps):
        yield Text("[...]: by what it was recognised from one snapshot to the next", style="dim")
