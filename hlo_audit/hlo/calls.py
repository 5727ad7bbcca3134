"""Who calls a computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from hlo_audit.hlo.attributes import called_names
from hlo_audit.hlo.row import ATTRIBUTES, OPCODE, Row

if TYPE_CHECKING:
    from hlo_audit.hlo.module import Computation, Instruction

# Most of a module calls no computation: skipping these opcodes makes looking for callers fast.
_CALL_NOTHING = frozenset(
    {
        *("parameter", "constant", "iota", "broadcast", "reshape", "bitcast", "bitcast-convert"),
        *("transpose", "copy", "copy-start", "copy-done", "convert", "tuple", "get-tuple-element"),
        *("slice", "dynamic-slice", "dynamic-update-slice", "gather", "pad", "concatenate"),
        *("reverse", "dot", "convolution", "partition-id", "replica-id", "optimization-barrier"),
        *("all-gather", "all-to-all", "collective-permute", "add", "subtract", "multiply"),
        *("divide", "remainder", "power", "maximum", "minimum", "and", "or", "xor", "not"),
        *("compare", "select", "clamp", "negate", "abs", "sign", "floor", "ceil", "sqrt", "rsqrt"),
        *("exponential", "log", "logistic", "tanh", "sine", "cosine"),
    }
)

# Of a module whose calls are asked for oftener than this, all of them are looked up at once.
_FEW_QUESTIONS = 4


def called_by(rows: Iterable[Row]) -> Iterator[tuple[int, str]]:
    """The names of the computations that rows call, each with the place of the row among them."""
    for place, row in enumerate(rows):
        if row[OPCODE] not in _CALL_NOTHING:
            for name in called_names(row[ATTRIBUTES]):
                yield place, name


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
