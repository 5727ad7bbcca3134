"""The counts of a program through its passes, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hlo_audit.examination import Examined
from hlo_audit.report.html.limits import MOST_ROWS, cut
from hlo_audit.report.passes_wording import format_byte_change, not_counted, snapshots_said
from hlo_audit.report.wording import format_bytes
from hlo_audit.timeline import Change, Series


@dataclass(frozen=True)
class SeriesRow:
    """What was counted, in numbers; the texts are ``-`` where nothing was counted."""

    name: str
    title: str
    counts: str
    first: str
    most: str
    last: str
    bytes: str


@dataclass(frozen=True)
class PassChange:
    """What one pass does to one count.

    Attributes:
        mark: whether it adds or takes away: for good, where any of it lasts.
        swings: what of it is undone later or undoes, in words; ``""`` for nothing.
    """

    name: str
    by: str
    after: str
    bytes: str
    mark: str
    swings: str
    lasting: bool


@dataclass(frozen=True)
class PassRow:
    """A pass that changes a count."""

    number: str
    name: str
    changes: tuple[PassChange, ...]
    lasting: bool


@dataclass(frozen=True)
class PassesView:
    """The timeline of a program."""

    anchor: str
    label: str
    said: str
    why_not: str
    series: tuple[SeriesRow, ...]
    not_counted: tuple[tuple[str, str], ...]
    rows: tuple[PassRow, ...]
    left_out: int


def passes_of(anchor: str, label: str, one: Examined) -> PassesView:
    changing = sum(line.changes_module for line in one.passes[1:])
    said = snapshots_said(len(one.passes), changing)
    rows = list(_pass_rows(one))
    kept = rows
    if len(rows) > MOST_ROWS:  # what does not last goes first
        kept = [row for row in rows if row.lasting][:MOST_ROWS]
    return PassesView(
        anchor,
        label,
        said if one.passes else "",
        one.why_no_passes,
        tuple(map(_series_row, one.series)),
        tuple((", ".join(names), reason) for reason, names in not_counted(one.series).items()),
        tuple(kept),
        len(rows) - len(kept),
    )


def _series_row(series: Series) -> SeriesRow:
    first, last = series.first, series.last
    return SeriesRow(
        series.name,
        "" if series.title == series.name else series.title,
        series.counts,
        "-" if first is None else f"{first.count:,}",
        "-" if first is None else f"{series.most:,}",
        "-" if last is None else f"{last.count:,}",
        format_bytes(last.bytes) if last is not None and last.bytes else "",
    )


def _pass_rows(one: Examined) -> Iterator[PassRow]:
    by_position: dict[int, list[tuple[Series, Change]]] = {}
    for series in one.series:
        for change in series.changes:
            by_position.setdefault(change.position, []).append((series, change))
    for position in sorted(by_position):
        line = one.passes[position]
        changes = tuple(_pass_change(series, change) for series, change in by_position[position])
        number = "" if line.number is None else str(line.number)
        yield PassRow(number, cut(line.name), changes, any(change.lasting for change in changes))


def _pass_change(series: Series, change: Change) -> PassChange:
    reading = series.readings[change.position]
    both = change.added and change.removed
    by = f"+{change.added:,} -{change.removed:,}" if both else f"{change.count:+,}"
    net = change.lasting_count if change.lasting else change.count
    return PassChange(
        series.name,
        by,
        "" if reading is None else f"{reading.count:,}",
        format_byte_change(change.bytes),
        "▲" if net > 0 else "▼" if net < 0 else "↕",
        _swings(change),
        bool(change.lasting),
    )


def _swings(change: Change) -> str:
    if not change.swings:
        return ""
    if not change.lasting:
        return "undone later, or undoes"
    kept = [f"+{change.lasting_added:,}"] if change.lasting_added else []
    kept += [f"-{change.lasting_removed:,}"] if change.lasting_removed else []
    verbs = "is undone later, or undoes" if change.swings == 1 else "are undone later, or undo"
    return f"{change.swings:,} of these {verbs}; {' '.join(kept)} lasts"
