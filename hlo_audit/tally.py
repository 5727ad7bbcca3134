"""Counting in snapshot after snapshot: what a rule sees, and the instructions of an opcode.

A pass changes little. So a count is that of the snapshot before, less what is gone and with what is
fresh, and a rule looks again only at instructions of which it looked at something that has changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from hlo_audit.hlo import Computation, Instruction, Module, Shape
from hlo_audit.hlo.answers import Answers
from hlo_audit.hlo.changes import Changes
from hlo_audit.hlo.row import SHAPE, SHAPE_TEXT, Row
from hlo_audit.passes import Passes
from hlo_audit.rule import Context, Rule, Watch

_NO_BOUNDARY = "the dump does not show where this snapshot stands in the compilation"

Key = tuple[str, str, int]
"""Opcode or rule, shape without layouts, and the logical bytes of one."""

Counted = tuple[Key, str | None]
"""What is counted, and its name if it is counted once for several that it is seen for."""


class Tally:
    """What one series counts in each snapshot, by opcode and shape.

    Attributes:
        counts: one for each snapshot; the same object where it is as in the one before.
        reasons: position -> why there is none.
    """

    def __init__(self) -> None:
        self.counts: list[Counter[Key] | None] = []
        self.reasons: dict[int, str] = {}
        self.forget()

    def forget(self) -> None:
        """Count from nothing again."""
        self._total: Counter[Key] = Counter()
        self._seen_once: dict[str, Counter[Key]] = {}

    def skip(self, reason: str) -> None:
        """Count nothing in the next snapshot."""
        self.reasons[len(self.counts)] = reason
        self.counts.append(None)

    def count(self, gone: Sequence[Counted], fresh: Sequence[Counted]) -> None:
        """Count in the next snapshot what was counted last, less what is gone and with what is
        fresh."""
        if not gone and not fresh:
            self.counts.append(self._total)
            return
        difference: defaultdict[Key, int] = defaultdict(int)
        for counted, by in ((gone, -1), (fresh, 1)):
            for key, once in counted:
                if once is None:
                    difference[key] += by
                else:
                    self._count_once(difference, once, key, by)
        if any(difference.values()):
            total = self._total = self._total.copy()
            for key, by in difference.items():
                total[key] += by
                if not total[key]:
                    del total[key]
        self.counts.append(self._total)

    def _count_once(self, difference: dict[Key, int], once: str, key: Key, by: int) -> None:
        """Of what several instructions are seen for, the first in order stands for all."""
        several = self._seen_once.setdefault(once, Counter())
        before = min(several, default=None)
        several[key] += by
        if not several[key]:
            del several[key]
        after = min(several, default=None)
        if before is not None:
            difference[before] -= 1
        if after is not None:
            difference[after] += 1


def _key(name: str, shape: Shape) -> Key:
    return name, shape.without_layout, shape.logical_bytes


class OpcodeCounter:
    """Counts the instructions of one opcode.

    Attributes:
        opcode: as it was asked for.
        opcodes: how it is spelt: a collective that is asynchronous counts by its start.
        tally: the counts.
    """

    def __init__(self, opcode: str) -> None:
        self.opcode = opcode
        # A copy-start moves, no more.
        self.opcodes = (opcode,) if opcode == "copy" else (opcode, f"{opcode}-start")
        self._known: dict[str, Counted] = {}  # by the shape's text
        self.tally = Tally()

    def count(self, _: int, changes: Changes) -> None:
        """Count in the next snapshot."""
        gone: list[Counted] = []
        fresh: list[Counted] = []
        for opcode in self.opcodes:
            if opcode in changes.gone:
                gone += [self._counted(row) for _, row in changes.gone[opcode]]
            if opcode in changes.fresh:
                fresh += [self._counted(row) for _, _, row in changes.fresh[opcode]]
        self.tally.count(gone, fresh)

    def _counted(self, row: Row) -> Counted:
        counted = self._known.get(row[SHAPE_TEXT])
        if counted is None:
            counted = self._known[row[SHAPE_TEXT]] = _key(self.opcode, row[SHAPE]), None
        return counted


class RuleCounter:
    """Counts what one rule sees.

    Attributes:
        rule: the rule.
        watch: its own.
        opcodes: of the instructions that it looks at.
        others: the snapshots that it reads beside each, as far as the dump has them.
        tally: the counts.
    """

    def __init__(
        self, passes: Passes, rule: Rule, watch: Watch, options: Mapping[str, int] | None
    ) -> None:
        self._passes = passes
        self.rule = rule
        self.watch = watch
        self.opcodes = watch.opcodes
        self._options = options
        stages = {stage: passes.stage(stage) for stage in rule.reads[1:]}
        self.others = {s: passes.modules[at] for s, at in stages.items() if at is not None}
        self.tally = Tally()
        self._start_anew()

    def _start_anew(self) -> None:
        watch = self.watch
        alone = watch.reach == "instruction"
        self._answers: Answers[Sequence[Counted]] = Answers(
            watch.opcodes, holding=watch.holding, alone=alone
        )
        self._last: Module | None = None
        self.tally.forget()

    def count(self, position: int, changes: Changes) -> None:
        """Count in the next snapshot; those in which it means nothing are left out."""
        reason = self._reason_to_skip(position)
        if reason is not None:
            self.tally.skip(reason)
            return
        module = changes.after
        if self.watch.reach == "module" and not _have_one_head(self._last or module, module):
            self._start_anew()
        if self._last is module:
            self.tally.count((), ())
            return
        if self._last is not changes.before:
            changes = Changes(self._last, module, self.opcodes)
        context = Context(self.rule, {self.rule.reads[0]: module, **self.others}, self._options)

        def ask(instruction: Instruction) -> Sequence[Counted]:
            seen = self.watch.sees(instruction, context)
            return [(_key(self.rule.code, shape), once) for shape, once in seen]

        try:
            gone, fresh = self._answers.update(changes, ask)
        # The rule is made for another snapshot: what this one lacks must not stop the timeline.
        except Exception as error:
            self._start_anew()
            self.tally.skip(f"the rule fails on this snapshot: {type(error).__name__}")
            return
        self._last = module
        self.tally.count([*chain(*gone)], [*chain(*fresh)])

    def _reason_to_skip(self, position: int) -> str | None:
        phase, phases = self._passes.phases[position], self.watch.phases
        if phase is None and len(phases) < 3:
            return _NO_BOUNDARY
        if phase is not None and phase not in phases:
            return self.watch.elsewhere
        if self.watch.reach == "module" and len(self.others) < len(self.rule.reads) - 1:
            return "a snapshot that the rule reads beside this one is not in the dump"
        return None


def count_all(passes: Passes, counters: Sequence[RuleCounter | OpcodeCounter]) -> None:
    """Fill the tally of each."""
    opcodes = frozenset(opcode for one in counters for opcode in one.opcodes)
    kept = [m for one in counters if isinstance(one, RuleCounter) for m in one.others.values()]
    looked_through = _LookedThrough(kept)
    before: Module | None = None
    for position, module in enumerate(passes.modules):
        changes = Changes(before, module, opcodes)
        looked_through.come_to(changes)
        for one in counters:
            one.count(position, changes)
        looked_through.leave(changes)
        before = module
    if before is not None and before not in kept:
        looked_through.leave_last(before)


class _LookedThrough:
    """Lets go of the instructions that were made for counting alone: a large dump has many versions
    of a large entry."""

    def __init__(self, kept: Iterable[Module]) -> None:
        """Take the snapshots that are read beside each."""
        self._kept = set(kept)
        self._of_kept = {one for module in self._kept for one in module.computations.values()}
        self._ours: set[Computation] = set()

    def come_to(self, changes: Changes) -> None:
        """Take the computations of which nobody has an instruction yet."""
        for one in changes.fresh_computations:
            if not one.refers_to_itself and one not in self._of_kept:
                self._ours.add(one)

    def leave(self, changes: Changes) -> None:
        """Let go of those that are only in the snapshot before."""
        module = changes.before
        if module is None or module is changes.after or module in self._kept:
            return
        module.let_go()
        for one in self._ours.intersection(changes.gone_computations):
            one.let_go()
            self._ours.discard(one)

    def leave_last(self, module: Module) -> None:
        """Let go of those that are left."""
        module.let_go()
        for one in self._ours:
            one.let_go()


def _have_one_head(one: Module, other: Module) -> bool:
    """Whether what is not of an instruction or computation is the same in both: the entry, what it
    takes and returns, the number of devices."""
    return (one.header_text, one.entry_name) == (other.header_text, other.entry_name)
