"""Who calls a computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from hlo_audit.hlo.row import OPCODE

if TYPE_CHECKING:
    from hlo_audit.hlo.module import Computation, Instruction

# Of a module whose calls are asked for oftener than this, all of them are looked up at once.
_FEW_QUESTIONS = 4


class Call(NamedTuple):
    """An instruction that calls a computation, by its place."""

    computation: Computation
    place: int

    @property
    def opcode(self) -> str:
        return self.computation._rows[self.place][OPCODE]

    @property
    def instruction(self) -> Instruction:
        return self.computation._at(self.place)


class Calls:
    """The calls in some computations, by the name of what is called."""

    def __init__(self, computations: Sequence[Computation]) -> None:
        self._computations = computations
        self._questions = 0

    def of(self, name: str) -> Sequence[Call]:
        """The calls of one computation, in order."""
        self._questions += 1
        if self._questions > _FEW_QUESTIONS or "of_all" in self.__dict__:
            return self.of_all.get(name, ())
        calling = [one for one in self._computations if name in one._called_names]
        return [call for one in calling for called, call in one._all_calls if called == name]

    @cached_property
    def of_all(self) -> Mapping[str, Sequence[Call]]:
        """All of them."""
        calls: defaultdict[str, list[Call]] = defaultdict(list)
        for computation in self._computations:
            for name, call in computation._all_calls:
                calls[name].append(call)
        return dict(calls)
