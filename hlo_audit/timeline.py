"""What the passes of a compilation do to what the rules count and to chosen opcodes.

A count at one pass is no verdict: the partitioner turns annotations into copies that the next
passes take away again, copy insertion adds two hundred and removes them. So every change is held
against the later ones of the same opcode and shape: what a later pass undoes is a swing, and only
what is left after all of them is put down to a pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hlo_audit.dump import AuditStage, ModuleDump, Snapshot
from hlo_audit.errors import DumpError
from hlo_audit.hlo import Computation, Module, Shape
from hlo_audit.hlo.collector import no_collection
from hlo_audit.rule import Context, Phase, Rule

DEFAULT_OPCODES = ("transpose", "copy", "all-reduce", "reduce-scatter", "all-gather")

_PARTITIONING = re.compile(r"(?:tpu-)?spmd-partitioning")
_PARTITIONERS = ("xla-partitioner", "spmd-partitioner")

# jax 0.12 counts these through the process, so that two compiles of one program differ.
_NUMBERED = re.compile(r"(apply-xla-transforms)-\d+")

_NO_BOUNDARY = "the dump does not show where this snapshot stands in the compilation"


def stable_label(snapshot: Snapshot) -> str:
    """Name a pass the same in every compile: ``simplification-1: algsimp``."""
    return _NUMBERED.sub(r"\1", snapshot.label)


class Passes:
    """The snapshots of one module, read.

    Computations that a pass left as they are stand in several modules as one object: what is found
    out of one holds for all of them.

    Attributes:
        dump: where they are from.
        snapshots: first to last.
        modules: one for each.
    """

    def __init__(self, dump: ModuleDump) -> None:
        """Read all of them.

        Raises:
            DumpError, ParseError: where one cannot be read.
            DumpError: where the dump has no pass.
        """
        if not dump.passes:
            raise DumpError(
                f"{dump.folder} holds no snapshot of a pass",
                hint="dump them with compiler option xla_dump_hlo_pass_re=.*",
            )
        self.dump = dump
        with no_collection():
            read = list(dump.read_all())
        self.snapshots = tuple(snapshot for snapshot, _ in read)
        self.modules = tuple(module for _, module in read)

    def __len__(self) -> int:
        return len(self.snapshots)

    def position(self, snapshot: Snapshot | None) -> int | None:
        """The place of a snapshot among them; ``None`` for one that is not there."""
        return None if snapshot is None else self.snapshots.index(snapshot)

    def stage(self, stage: AuditStage) -> int | None:
        """The place of a snapshot that rules read; ``None`` where it is not there."""
        return self.position(self.dump.audited.get(stage))

    def changes_module(self, position: int) -> bool:
        """Whether any computation differs from the snapshot before, to the letter."""
        if position == 0:
            return True
        before, after = self.modules[position - 1 : position + 1]
        # Computations are equal only to themselves.
        return list(before.computations.values()) != list(after.computations.values())

    def pass_name(self, position: int) -> str:
        """The pass that made a snapshot what it is.

        A snapshot from within a pass is charged to that pass, also where it is of a pipeline that
        the pass runs. Where a pipeline starts with another module than the one before ended with,
        and nothing says what came in between, the name is ``before PIPELINE``.
        """
        snapshot = self.snapshots[position]
        if snapshot.stage != "pass":
            return stable_label(snapshot)
        if snapshot.step:
            return self._named_next(position, "") or stable_label(snapshot)
        if snapshot.after != "pipeline-start":
            return stable_label(snapshot)
        outer = next(
            (
                s.pipeline
                for s in self.snapshots[:position][::-1]
                if s.pipeline != snapshot.pipeline
            ),
            "",
        )
        named = self._named_next(position, outer) if outer else None
        return named or f"before {snapshot.pipeline}"

    def _named_next(self, position: int, pipeline: str) -> str | None:
        """The pass that the next snapshot to name one has just run, of this pipeline if it is
        given; a pipeline that was run in the place of a pass is none."""
        inner = {self.snapshots[position].pipeline}
        for later in self.snapshots[position + 1 :]:
            if later.stage != "pass":
                break
            if later.after == "pipeline-start":
                inner.add(later.pipeline)
            elif later.after and (later.pipeline == pipeline if pipeline else not later.step):
                return None if later.after in inner and pipeline else stable_label(later)
        return None

    @cached_property
    def phases(self) -> tuple[Phase | None, ...]:
        """The part of the compilation that each snapshot is of; ``None`` where the dump does not
        show it."""
        laid_out = self._first_laid_out()
        partitioned = self._first_partitioned()
        phases: list[Phase | None] = []
        for position, snapshot in enumerate(self.snapshots):
            if snapshot.stage in ("after_optimizations", "after_codegen"):
                phases.append("laid-out")
            elif partitioned is not None and position < partitioned:
                phases.append("unpartitioned")
            elif laid_out is not None and position >= laid_out:
                phases.append("laid-out")
            elif laid_out is not None and partitioned is not None:
                phases.append("partitioned")
            elif snapshot.stage == "before_optimizations":
                phases.append("unpartitioned")
            else:
                phases.append(None)
        return tuple(phases)

    def _first_laid_out(self) -> int | None:
        last = self.position(self.dump.before_layout_assignment)
        return None if last is None else last + 1

    def _first_partitioned(self) -> int | None:
        if self.modules[0].header.get("num_partitions", "1") == "1":
            return 0
        for position in range(len(self)):
            if _PARTITIONING.fullmatch(self.pass_name(position).rpartition(": ")[2]):
                return position
        # The pass may have found nothing to change.
        of_pipeline = [p for p, s in enumerate(self.snapshots) if s.pipeline in _PARTITIONERS]
        return of_pipeline[-1] + 1 if of_pipeline else None


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


_Key = tuple[str, str, int]
"""Opcode, shape without layouts, and the logical bytes of one."""


@dataclass
class _Tally:
    """What one series counts in each snapshot, by opcode and shape."""

    counts: list[Counter[_Key] | None] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.reasons[len(self.counts)] = reason
        self.counts.append(None)


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
    names = tuple(dict.fromkeys(opcodes))
    with no_collection():
        series = [
            _series(rule.code, rule.slug, "rule", rule.watch.counts, tally)
            for rule in rules
            if rule.watch is not None
            for tally in (_tally_rule(passes, rule, (options or {}).get(rule.code)),)
        ]
        tallies = _tally_opcodes(passes, names)
    series += [
        _series(name, name, "opcode", f"{name} instructions", tallies[name]) for name in names
    ]
    return Timeline(passes, tuple(series))


class PerComputation:
    """Finds something out of each computation once, as long as it stands in snapshot after
    snapshot."""

    def __init__(self, find: Callable[[Computation], Counter[_Key]]) -> None:
        self._find = find
        self._known: dict[Computation, Counter[_Key]] = {}
        self._sum: Counter[_Key] = Counter()
        self._of: list[Computation] = []

    def total(self, module: Module) -> Counter[_Key]:
        """What is found in all computations of a module."""
        before, self._of = self._of, list(module.computations.values())
        if self._of == before:
            return self._sum
        total = self._sum = self._sum.copy()
        known = self._known
        for gone in set(before).difference(self._of):
            total.subtract(known.pop(gone))
        for new in self._of:
            if new not in known:
                known[new] = found = self._find(new)
                total.update(found)
        for key in [key for key, count in total.items() if not count]:
            del total[key]
        return total


def _tally_opcodes(passes: Passes, names: Sequence[str]) -> dict[str, _Tally]:
    wanted = {f"{name}-start": name for name in names if name != "copy"}  # which moves, no more
    wanted |= {name: name for name in names}

    def find(computation: Computation) -> Counter[_Key]:
        return Counter(
            _key(name, shape)
            for opcode, name in wanted.items()
            if opcode in computation.places
            for shape in computation.shapes_of(opcode)
        )

    counted = PerComputation(find)
    tallies = {name: _Tally() for name in names}
    previous: Counter[_Key] | None = None
    here: dict[str, Counter[_Key]] = {}
    for module in passes.modules:
        total = counted.total(module)
        if total is not previous:
            here = {name: Counter[_Key]() for name in names}
            for key, count in total.items():
                here[key[0]][key] = count
        for name, tally in tallies.items():
            tally.counts.append(here[name])
        previous = total
    return tallies


def _tally_rule(passes: Passes, rule: Rule, options: Mapping[str, int] | None) -> _Tally:
    watch = rule.watch
    assert watch is not None
    stages = {stage: passes.stage(stage) for stage in rule.reads[1:]}
    others = {stage: passes.modules[place] for stage, place in stages.items() if place is not None}
    counted = None
    if watch.seen_in is not None:
        counted = PerComputation(_finder(rule, Context(rule, others, options)))
    tally = _Tally()
    for position, (module, phase) in enumerate(zip(passes.modules, passes.phases, strict=True)):
        if phase is None and len(watch.phases) < 3:
            tally.skip(_NO_BOUNDARY)
        elif phase is not None and phase not in watch.phases:
            tally.skip(watch.elsewhere)
        elif counted is not None:
            tally.counts.append(counted.total(module))
        elif len(others) < len(stages):
            tally.skip("a snapshot that the rule reads beside this one is not in the dump")
        elif tally.counts and tally.counts[-1] is not None and not passes.changes_module(position):
            tally.counts.append(tally.counts[-1])
        else:
            _tally_module(tally, rule, module, others, options)
    return tally


def _finder(rule: Rule, context: Context) -> Callable[[Computation], Counter[_Key]]:
    watch = rule.watch
    assert watch is not None
    assert watch.seen_in is not None
    seen_in = watch.seen_in

    def find(computation: Computation) -> Counter[_Key]:
        return Counter(_key(rule.code, one.shape) for one in seen_in(computation, context))

    return find


def _key(name: str, shape: Shape) -> _Key:
    return name, shape.without_layout, shape.logical_bytes


def _tally_module(
    tally: _Tally,
    rule: Rule,
    module: Module,
    others: Mapping[AuditStage, Module],
    options: Mapping[str, int] | None,
) -> None:
    """Apply the rule to one snapshot as if it were the one that it reads."""
    assert rule.watch is not None
    assert rule.watch.seen is not None
    context = Context(rule, {rule.reads[0]: module, **others}, options)
    try:
        counts = Counter(_key(rule.code, value.shape) for value in rule.watch.seen(module, context))
    # The rule is made for another snapshot: what this one lacks must not stop the timeline.
    except Exception as error:
        tally.skip(f"the rule fails on this snapshot: {type(error).__name__}")
        return
    tally.counts.append(counts)


def _series(name: str, title: str, kind: str, counts: str, tally: _Tally) -> Series:
    readings = tuple(
        None
        if keys is None
        else Reading(keys.total(), sum(key[2] * count for key, count in keys.items()))
        for keys in tally.counts
    )
    return Series(name, title, kind, counts, readings, tally.reasons, _changes(tally.counts))


@dataclass
class _Open:
    """A change of one opcode and shape that nothing has undone yet."""

    position: int
    count: int


def _changes(counts: Sequence[Counter[_Key] | None]) -> tuple[Change, ...]:
    """The changes, each held against the later ones of the same opcode and shape: the last that is
    still open is undone first."""
    added: Counter[int] = Counter()
    removed: Counter[int] = Counter()
    moved: Counter[int] = Counter()
    undone: dict[int, Counter[int]] = {}
    undoing: dict[int, Counter[int]] = {}
    open_: dict[_Key, list[_Open]] = {}
    # What stands in the first snapshot is the program's own. Where counting starts later, there
    # was nothing before.
    before = Counter[_Key]() if counts[0] is None else counts[0]
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
