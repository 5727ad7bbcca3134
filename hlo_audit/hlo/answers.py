"""Questions asked of instructions in snapshot after snapshot, where most have the same answer.

A pass changes little: a question is asked again only of an instruction of which it looked at
something that has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from hlo_audit.hlo import lookups
from hlo_audit.hlo.changes import Changes
from hlo_audit.hlo.module import Instruction, Module
from hlo_audit.hlo.row import ATTRIBUTES, NAME

_Answer = TypeVar("_Answer")

_Asked = tuple[str, str]
"""Of whom: the name of the computation, and the ``%name`` of the instruction."""


class Answers(Generic[_Answer]):
    """The answers to one question, of every instruction of some opcodes.

    The question may look at all of the module that it can get to from the instruction, and at other
    modules, which must stay the same.
    """

    def __init__(
        self,
        opcodes: Collection[str],
        *,
        holding: str = "",
        alone: bool = False,
    ) -> None:
        """Take those that are asked.

        Args:
            holding: leave out instructions whose attributes, as printed, do not hold this text.
            alone: whether the question looks at nothing but the instruction's own line.
        """
        self._opcodes = opcodes
        self._holding = holding
        self._alone = alone
        self._answers: dict[_Asked, _Answer] = {}
        # Where an instruction is asked again, what only its answer before rested on stays here: it
        # may be asked once too often, never too seldom.
        self._rest_on: dict[lookups.Where, dict[str, set[_Asked]]] = {}

    def update(
        self, changes: Changes, ask: Callable[[Instruction], _Answer]
    ) -> tuple[list[_Answer], list[_Answer]]:
        """Go on to a later snapshot.

        Args:
            ask: puts the question to an instruction of it.
            changes: since the snapshot before; since none for the first. They tell the opcodes
                apart.

        Returns:
            the answers that do not hold any more, and the new ones.
        """
        module, answers = changes.after, self._answers
        stale = {asked for asked in self._stale(changes) if asked in answers}
        gone: set[_Asked] = set()
        fresh: list[Instruction] = []
        for opcode in self._opcodes:
            if opcode in changes.gone:
                gone.update([(name, row[NAME]) for name, row in changes.gone[opcode]])
            if opcode in changes.fresh:
                fresh += [
                    computation.at(place)
                    for computation, place, row in changes.fresh[opcode]
                    if self._holding in row[ATTRIBUTES]
                ]
        # In an order that is the same in every run.
        again = [module.computations[name][one[1:]] for name, one in sorted(stale - gone)]
        old = [answers.pop(asked) for asked in sorted(stale | gone) if asked in answers]
        return old, [self._asked(one, ask, module) for one in (*fresh, *again)]

    def _stale(self, changes: Changes) -> set[_Asked]:
        """Whose answers may not hold any more, those of instructions that are gone among them."""
        stale: set[_Asked] = set()
        for where, resting in tuple(self._rest_on.items()):
            for name in resting.keys() & changes.stale(where):
                stale |= resting.pop(name)
            if not resting:
                del self._rest_on[where]
        return stale

    def _asked(
        self, instruction: Instruction, ask: Callable[[Instruction], _Answer], module: Module
    ) -> _Answer:
        asked = (instruction.computation.name, "%" + instruction.name)
        if self._alone:
            answer = self._answers[asked] = ask(instruction)
            return answer
        outer = lookups.recording
        lookups.recording = recorded = lookups.Lookups(module)
        try:
            answer = self._answers[asked] = ask(instruction)
        finally:
            lookups.recording = outer
        for where, names in recorded:
            resting = self._rest_on.setdefault(where, {})
            for name in names:
                if name in resting:
                    resting[name].add(asked)
                else:
                    resting[name] = {asked}
        return answer
