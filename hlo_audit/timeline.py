"""What the passes of a compilation do to what the rules count and to chosen opcodes.

A count at one pass is no verdict: the partitioner turns annotations into copies that the next
passes take away again, copy insertion adds two hundred and removes them. So every change is held
against the later ones of the same opcode and shape: what a later pass undoes is a swing, and only
what is left after all of them is put down to a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlo_audit.hlo.collector import no_collection
from hlo_audit.passes import Passes
from hlo_audit.rule import Rule
from hlo_audit.tally import Key, OpcodeCounter, RuleCounter, Tally, count_all

DEFAULT_OPCODES = ("transpose", "copy", "all-reduce", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class Reading:
    """What stands in one snapshot.

    Attributes:
        count: how many.
        bytes: the logical size of their results, each counted once, loops not unrolled.
    """

    count: int
    bytes: int


@dataclass(frozen=True)
class Change:
    """What one pass adds and removes.

    Attributes:
        position: of the snapshot after it.
        added, removed: how many.
        bytes: by how much the bytes change, together.
        undone_by: position -> how many of these a later pass takes back.
        undoes: position -> how many of an earlier pass's this one takes back.
        lasting_added, lasting_removed: how many of the added and of the removed are neither
            undone nor undo.
    """

    position: int
    added: int
    removed: int
    bytes: int
    undone_by: Mapping[int, int]
    undoes: Mapping[int, int]
    lasting_added: int
    lasting_removed: int

    @property
    def count(self) -> int:
        """By how much the count changes."""
        return self.added - self.removed

    @property
    def lasting(self) -> int:
        """How many of the added and the removed are neither undone nor undo."""
        return self.lasting_added + self.lasting_removed

    @property
    def lasting_count(self) -> int:
        """By how much the count changes for good: where a pass adds three that are undone and
        removes one that is not, the count goes up by two and this is -1."""
        return self.lasting_added - self.lasting_removed

    @property
    def swings(self) -> int:
        """How many of the added and the removed are undone or undo."""
        return self.added + self.removed - self.lasting


@dataclass(frozen=True)
class Series:
    """One thing counted in every snapshot.

    Attributes:
        name: the code of a rule, or an opcode.
        title: the slug of the rule, or the opcode.
        kind: ``rule`` or ``opcode``.
        counts: what is counted, in words.
        readings: one for each snapshot; ``None`` where counting means nothing.
        reasons: position -> why there is no reading.
        changes: by position.
    """

    name: str
    title: str
    kind: str
    counts: str
    readings: tuple[Reading | None, ...]
    reasons: Mapping[int, str]
    changes: tuple[Change, ...]

    @property
    def first(self) -> Reading | None:
        """The first reading there is."""
        return next((reading for reading in self.readings if reading is not None), None)

    @property
    def last(self) -> Reading | None:
        """The last reading there is."""
        return next((reading for reading in reversed(self.readings) if reading is not None), None)

    @property
    def most(self) -> int:
        """The largest count."""
        return max((reading.count for reading in self.readings if reading is not None), default=0)


@dataclass(frozen=True)
class Timeline:
    """The series of one module.

    Attributes:
        passes: what they were counted in.
        series: the rules by code, then the opcodes as asked for.
    """

    passes: Passes
    series: tuple[Series, ...]

    def changes_at(self, position: int) -> list[tuple[Series, Change]]:
        """What changes with one snapshot."""
        return [
            (series, change)
            for series in self.series
            for change in series.changes
            if change.position == position
        ]


def make_timeline(
    passes: Passes,
    rules: Sequence[Rule],
    opcodes: Sequence[str] = DEFAULT_OPCODES,
    options: Mapping[str, Mapping[str, int]] | None = None,
) -> Timeline:
    """Count each rule and each opcode in every snapshot.

    Args:
        rules: those that can be counted in any snapshot; the others are left out.
        opcodes: an asynchronous collective counts as its opcode, once, by its start.
        options: rule code -> option -> value.
    """
    of_rules = [
        RuleCounter(passes, rule, rule.watch, (options or {}).get(rule.code))
        for rule in rules
        if rule.watch is not None
    ]
    of_opcodes = [OpcodeCounter(opcode) for opcode in dict.fromkeys(opcodes)]
    with no_collection():
        count_all(passes, [*of_rules, *of_opcodes])
    series = [
        _series(one.rule.code, one.rule.slug, "rule", one.watch.counts, one.tally)
        for one in of_rules
    ]
    series += [
        _series(one.opcode, one.opcode, "opcode", f"{one.opcode} instructions", one.tally)
        for one in of_opcodes
    ]
    return Timeline(passes, tuple(series))


def _series(name: str, title: str, kind: str, counts: str, tally: Tally) -> Series:
    readings: list[Reading | None] = []
    for before, here in zip((None, *tally.counts), tally.counts, strict=False):
        if here is None:
            readings.append(None)
        elif here is before:
            readings.append(readings[-1])
        else:
            size = sum(key[2] * count for key, count in here.items())
            readings.append(Reading(here.total(), size))
    changes = _changes(tally.counts)
    return Series(name, title, kind, counts, tuple(readings), tally.reasons, changes)


@dataclass
class _Open:
    """A change of one opcode and shape that nothing has undone yet."""

    position: int
    count: int


def _changes(counts: Sequence[Counter[Key] | None]) -> tuple[Change, ...]:
    """The changes, each held against the later ones of the same opcode and shape: the last that is
    still open is undone first."""
    added: Counter[int] = Counter()
    removed: Counter[int] = Counter()
    moved: Counter[int] = Counter()
    undone: dict[int, Counter[int]] = {}
    undoing: dict[int, Counter[int]] = {}
    open_: dict[Key, list[_Open]] = {}
    # What stands in the first snapshot is the program's own. Where counting starts later, there
    # was nothing before.
    before = Counter[Key]() if counts[0] is None else counts[0]
    for position, here in enumerate(counts):
        if here is None or here is before:
            continue
        for key in dict.fromkeys((*before, *here)):  # not a set: its order is new in every run
            difference = here[key] - before[key]
            if not difference:
                continue
            (added if difference > 0 else removed)[position] += abs(difference)
            moved[position] += key[2] * difference
            stack = open_.setdefault(key, [])
            while difference and stack and (stack[-1].count > 0) != (difference > 0):
                last = stack[-1]
                taken = min(abs(last.count), abs(difference))
                undone.setdefault(last.position, Counter())[position] += taken
                undoing.setdefault(position, Counter())[last.position] += taken
                sign = 1 if difference > 0 else -1
                difference -= sign * taken
                last.count += sign * taken
                if not last.count:
                    stack.pop()
            if difference:
                stack.append(_Open(position, difference))
        before = here
    lasting_added, lasting_removed = Counter[int](), Counter[int]()
    for stack in open_.values():
        for one in stack:
            (lasting_added if one.count > 0 else lasting_removed)[one.position] += abs(one.count)
    changes = (
        Change(
            position,
            added[position],
            removed[position],
            moved[position],
            dict(sorted(undone.get(position, {}).items())),
            dict(sorted(undoing.get(position, {}).items())),
            lasting_added[position],
            lasting_removed[position],
        )
        for position in sorted({*added, *removed})
    )
    return tuple(one for one in changes if one.count or one.bytes or one.lasting)
