"""Following values: to where they are made, across fusions and calls, and to what they evaluate.

A :class:`Site` is a value together with the calls that lead to it, so that a parameter of a fused
computation is the operand of the very fusion it was reached through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from hlo_audit.hlo.attributes import is_number
from hlo_audit.hlo.module import Instruction, Module, Value

MOVES = frozenset({"bitcast", "copy", "copy-start", "copy-done", "optimization-barrier"})
"""Opcodes that hand on their operand's elements as they are, though perhaps laid out anew.

:func:`origin` treats ``Sharding`` annotations as moves wherever copies are.
"""

# Real chains of moves are a dozen long; the rules follow one for each instruction they look at.
_MAX_STEPS = 200

# Expressions of real slice indices are a dozen deep; hostile ones must not exhaust the stack.
_MAX_DEPTH = 100

# What is read by very many is followed no further, however few places lead there.
_USES_A_PLACE = 10

_INTEGER = re.compile(r"-?\d{1,18}")
_CALLS_THROUGH = ("fusion", "call")


def _divide(a: int, b: int) -> int:
    """Towards zero, as XLA does."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: _divide(a, b),
    "remainder": lambda a, b: a - b * _divide(a, b),
    "maximum": max,
    "minimum": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shift-left": lambda a, b: a << min(max(b, 0), 64),
    "shift-right-logical": lambda a, b: a >> min(max(b, 0), 64),
    "shift-right-arithmetic": lambda a, b: a >> min(max(b, 0), 64),
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}


class Site(NamedTuple):
    """A value, and the fusions and calls it was reached through, outermost first."""

    value: Value
    calls: tuple[Instruction, ...] = ()

    @property
    def instruction(self) -> Instruction:
        return self.value.instruction


def origin(module: Module, site: Site, *, through: frozenset[str] = MOVES) -> Site:
    """Follow a value back through ``through``, tuples, fusions and calls to what makes it.

    The result is the first instruction on the way that is none of these; a parameter of the entry,
    of a loop body or of a computation that was not reached through a call is such a one.
    """
    for place in trace_back(module, site, through=through):
        site = place
    return site


def origin_before_prefetch(module: Module, site: Site, *, through: frozenset[str]) -> Site:
    """As :func:`origin`, past prefetches that were made in pieces as well.

    The TPU compiler prefetches a large buffer so: as bytes, cut into slices that are moved side by
    side, and joined again by a custom call to ConcatBitcast. libtpu 0.0.23 runs a gather beside
    others so: custom calls start and end it, which both read it.
    """
    source = origin(module, site, through=through)
    for _ in range(_MAX_STEPS):
        target, operands = source.instruction.custom_call_target, source.instruction.operand_values
        if target == "ConcatBitcast":
            pieces = {
                origin(module, Site(piece, source.calls), through=MOVES | {"slice"})
                for piece in operands
            }
        elif target in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
            pieces = {
                Site(piece, source.calls)
                for piece in operands
                if piece.instruction.opcode in through & {"all-gather"}
            }
        else:
            break
        if len(pieces) != 1:
            break
        source = origin(module, pieces.pop(), through=through)
    return source


def origin_outside_loops(module: Module, site: Site, *, through: frozenset[str]) -> Site:
    """As :func:`origin_before_prefetch`, and out of each loop that hands the value on unchanged.

    What a loop changes from turn to turn ends at the parameter of its body.
    """
    source = origin_before_prefetch(module, site, through=through)
    for _ in range(_MAX_STEPS):
        initial = _before_the_loop(module, source.value)
        if initial is None:
            break
        source = origin_before_prefetch(module, Site(initial), through=through)
    return source


def _before_the_loop(module: Module, value: Value) -> Value | None:
    """What an element of a loop's tuple was at first, if each turn hands it on as it is."""
    parameter, index = value
    if parameter.opcode != "parameter" or not index:
        return None
    callers = module.callers(parameter.computation)
    if len(callers) != 1 or callers[0].opcode != "while" or not callers[0].operands:
        return None
    handed_on = origin(module, Site(Value(parameter.computation.root, index)))
    return Value(callers[0].operands[0], index) if handed_on == Site(value) else None


def trace_back(module: Module, site: Site, *, through: frozenset[str] = MOVES) -> Iterator[Site]:
    """Every place on the way of :func:`origin`, from ``site`` to what makes the value."""
    value, calls = site
    for _ in range(_MAX_STEPS):
        yield Site(value, calls)
        instruction, index = value
        opcode = instruction.opcode
        operands = instruction.operand_values
        if opcode == "get-tuple-element" and operands:
            element = instruction.attributes.get("index", "")
            if not is_number(element):
                return
            value = _element(operands[0], (int(element), *index))
        elif opcode == "tuple" and index and index[0] < len(operands):
            value = _element(operands[index[0]], index[1:])
        elif opcode == "parameter" and calls:
            number = instruction.parameter_number
            arguments = calls[-1].operand_values
            if number is None or number >= len(arguments):
                return
            value, calls = _element(arguments[number], index), calls[:-1]
        elif opcode in _CALLS_THROUGH and (called := module.called(instruction)):
            if len(calls) == _MAX_DEPTH:
                return
            value, calls = Value(called[0].root, index), (*calls, instruction)
        elif opcode in ("async-done", "async-update") and operands:
            start = _async_start(instruction)
            called = module.called(start) if start is not None else ()
            if start is None or not called or len(calls) == _MAX_DEPTH:
                return
            value, calls = Value(called[0].root, index), (*calls, start)
        elif operands and (opcode in through or _is_annotation(instruction, through)):
            # The elements of copy-start's tuple are the moved array, its source and a context.
            value = _element(operands[0], () if opcode == "copy-start" else index)
        else:
            return
    yield Site(value, calls)


def _async_start(instruction: Instruction) -> Instruction | None:
    """The start of the asynchronous operation that ``instruction`` continues or ends."""
    while instruction.opcode in ("async-done", "async-update") and instruction.operands:
        instruction = instruction.operands[0]
    return instruction if instruction.opcode == "async-start" else None


def _is_annotation(instruction: Instruction, through: frozenset[str]) -> bool:
    return "copy" in through and instruction.custom_call_target == "Sharding"


def _element(value: Value, index: tuple[int, ...]) -> Value:
    return Value(value.instruction, value.tuple_index + index)


_Numbers = list[int | None]
"""What a scalar is on each of some partitions; ``None`` where that is not known."""


def evaluate(module: Module, site: Site, partitions: Sequence[int]) -> list[int | None]:
    """The integer that a scalar has on each of ``partitions``, or ``None`` where it depends on
    anything but constants and the partition's number."""
    return _Evaluation(module, partitions).values(site, 0)


class _Evaluation:
    """One evaluation: what it met before is not evaluated again, and no value leaves 64 bits."""

    def __init__(self, module: Module, partitions: Sequence[int]) -> None:
        self.module = module
        self.partitions = partitions
        self.known: dict[Site, _Numbers] = {}

    def values(self, site: Site, depth: int) -> _Numbers:
        if depth > _MAX_DEPTH:
            return self.unknown()
        site = origin(self.module, site, through=_SCALAR_MOVES)
        if site not in self.known:
            self.known[site] = [
                None if value is None or abs(value) >= 1 << 64 else value
                for value in self.compute(site, depth)
            ]
        return self.known[site]

    def compute(self, site: Site, depth: int) -> _Numbers:
        instruction, opcode = site.instruction, site.instruction.opcode
        if opcode == "partition-id":
            return list(self.partitions)
        if opcode == "constant":
            return _constant_elements(instruction, [0] * len(self.partitions))
        values = instruction.operand_values
        if opcode == "dynamic-slice" and len(values) == 2:  # the partitioner's table of offsets
            table = origin(self.module, Site(values[0], site.calls))
            indices = self.values(Site(values[1], site.calls), depth + 1)
            if table.instruction.opcode == "constant":
                return _constant_elements(table.instruction, indices)
            return self.unknown()
        if opcode not in _OPERAND_COUNTS or len(values) != _OPERAND_COUNTS[opcode]:
            return self.unknown()
        operands = [self.values(Site(value, site.calls), depth + 1) for value in values]
        return [_apply(instruction, row) for row in zip(*operands, strict=True)]

    def unknown(self) -> _Numbers:
        return [None] * len(self.partitions)


def _apply(instruction: Instruction, row: tuple[int | None, ...]) -> int | None:
    opcode = instruction.opcode
    if opcode == "select":
        return None if row[0] is None else row[1 if row[0] else 2]
    operands = [operand for operand in row if operand is not None]
    if len(operands) < len(row):
        return None
    if opcode == "compare":
        holds = _COMPARISONS.get(instruction.attributes.get("direction", ""))
        return None if holds is None else int(holds(*operands))
    if opcode == "clamp":
        low, middle, high = operands
        return max(low, min(middle, high))
    if opcode in ("divide", "remainder") and operands[1] == 0:
        return None
    return _ARITHMETIC[opcode](*operands)


_OPERAND_COUNTS = {**dict.fromkeys(_ARITHMETIC, 2), "compare": 2, "select": 3, "clamp": 3}
_SCALAR_MOVES = MOVES | {"convert", "reshape", "broadcast", "copy", "bitcast-convert", "slice"}


def _constant_elements(constant: Instruction, indices: _Numbers) -> _Numbers:
    literal = constant.literal.strip()
    if literal in ("true", "false"):
        return [None if index is None else int(literal == "true") for index in indices]
    end = 1 + max((index for index in indices if index is not None), default=-1)
    # There are no more elements than characters.
    end = max(0, min(end, len(literal)))
    elements: Iterator[re.Match[str]] = islice(_INTEGER.finditer(literal), end)
    found = [int(element[0]) for element in elements]
    return [
        found[index] if index is not None and 0 <= index < len(found) else None for index in indices
    ]


class Use(NamedTuple):
    """An operand through which ``user`` reads a followed value, and the calls around ``user``."""

    user: Instruction
    operand: int
    calls: tuple[Instruction, ...]


class Followed(NamedTuple):
    """Where a value goes: the values on the way that are it, moved, and the uses at the ends."""

    values: list[Value]
    uses: list[Use]


def terminal_uses(
    module: Module,
    value: Value,
    *,
    through: frozenset[str] = MOVES,
    limit: int = 1000,
    wanted: Callable[[Use], bool] = lambda _: True,
) -> list[Use] | None:
    """Follow a value forward through ``through``, tuples, fusions, calls and the ends of
    asynchronous pairs, to the operands that do something with it.

    Where it leaves a computation that nothing known calls (the entry, a loop body), the use is the
    root. ``None`` for a value with more than ``limit`` places on the way, or ten times as many
    readers, and for one with a use that is not ``wanted``: it is followed no further then.
    """
    followed = follow(module, value, through=through, limit=limit, wanted=wanted)
    return None if followed is None else followed.uses


def follow(
    module: Module,
    value: Value,
    *,
    through: frozenset[str] = MOVES,
    limit: int = 1000,
    wanted: Callable[[Use], bool] = lambda _: True,
) -> Followed | None:
    """As :func:`terminal_uses`, with the values on the way."""
    uses: list[Use] = []
    start: _Place = (*value, ())
    waiting, seen = [start], {start: None}  # in order
    looked_at = 0
    while waiting:
        if len(seen) > limit:
            return None
        instruction, index, calls = waiting.pop()
        steps = []
        if instruction.is_root:
            left = _leave(module, instruction, index, calls)
            if left is not None:
                steps.append(left)
            elif wanted(use := Use(instruction, 0, calls)):
                uses.append(use)
            else:
                return None
        readers = instruction.uses(index[0] if index else None)
        looked_at += len(readers)
        if looked_at > _USES_A_PLACE * limit:
            return None
        for user, number in readers:
            read_index = user.read_index(number)
            if index[: len(read_index)] != read_index:
                continue
            rest = index[len(read_index) :]
            step = _enter(module, user, number, rest, calls, through)
            if step:
                steps.append(step)
            elif step is None:
                use = Use(user, number, calls)
                if not wanted(use):
                    return None
                uses.append(use)
        for step in steps:
            if step not in seen:
                seen[step] = None
                waiting.append(step)
    return Followed([Value(instruction, index) for instruction, index, _ in seen], uses)


_Place = tuple[Instruction, tuple[int, ...], tuple[Instruction, ...]]


def _leave(
    module: Module,
    root: Instruction,
    index: tuple[int, ...],
    calls: tuple[Instruction, ...],
) -> _Place | None:
    """Where the value of a root goes on; ``None`` where that is not known."""
    if calls:
        return calls[-1], index, calls[:-1]
    callers = module.callers(root.computation)
    if len(callers) == 1 and callers[0].opcode in (*_CALLS_THROUGH, "async-start"):
        return callers[0], index, ()
    return None


def _enter(
    module: Module,
    user: Instruction,
    number: int,
    index: tuple[int, ...],
    calls: tuple[Instruction, ...],
    through: frozenset[str],
) -> _Place | tuple[()] | None:
    """Where a value read by ``user`` goes on: ``None`` if it is used there, ``()`` if another
    element of its tuple is."""
    opcode = user.opcode
    if opcode == "get-tuple-element":
        element = user.attributes.get("index", "")
        if index and is_number(element):
            return (user, index[1:], calls) if index[0] == int(element) else ()
        return None
    if opcode == "tuple":
        return user, (number, *index), calls
    if opcode == "copy-start":
        return user, (0, *index), calls
    if opcode == "copy-done":
        return user, index[1:], calls
    if opcode.endswith("-done"):
        return user, index, calls
    if opcode in _CALLS_THROUGH and (called := module.called(user)):
        parameters = called[0].parameters
        if number < len(parameters) and len(calls) < _MAX_DEPTH:
            return parameters[number], index, (*calls, user)
        return None
    if opcode in through or _is_annotation(user, through):
        return user, index, calls
    return None
