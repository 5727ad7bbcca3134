"""How often things run: trip counts of ``while`` loops, and executions of computations per step."""

from __future__ import annotations

from collections.abc import Mapping

from hlo_audit.hlo.attributes import is_number
from hlo_audit.hlo.calls import Call
from hlo_audit.hlo.dataflow import Site, evaluate, origin
from hlo_audit.hlo.module import Computation, Instruction, Module, Value, kept_by_module


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often the body of a ``while`` runs; ``None`` where that is not a constant.

    Taken from ``known_trip_count`` where the backend printed it (TPU does not); else inferred for
    loops that count: the condition compares one element of the loop's tuple with a constant, the
    body adds a constant to it, and it starts at a constant.
    """
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict) and is_number(str(known.get("n", ""))):
        return _in_reach(int(known["n"]))
    condition = module.computations.get(_called_as(loop, "condition"))
    body = module.computations.get(_called_as(loop, "body"))
    if condition is None or body is None or not loop.operands:
        return None
    test = origin(module, Site(Value(condition.root)))
    counter = _counter(module, test)
    if counter is None:
        return None
    element, bound_is_left = counter
    bound = _operand(module, test, 0 if bound_is_left else 1)
    start = _constant(module, Site(Value(loop.operands[0], (element,))))
    step = _step(module, body, element)
    if bound is None or start is None or step is None:
        return None
    direction = test.instruction.attributes.get("direction", "")
    if bound_is_left:
        direction = _MIRRORED.get(direction, "")
    trips = _count(direction, start, bound, step)
    return None if trips is None else _in_reach(trips)


def _in_reach(count: int) -> int | None:
    """A count, unless it is larger than any program lives to see: damage, not a number."""
    return count if count < 1 << 63 else None


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def _count(direction: str, start: int, bound: int, step: int) -> int | None:
    if direction in ("GT", "GE"):  # counts down: the same loop with every sign turned
        mirrored = {"GT": "LT", "GE": "LE"}[direction]
        return _count(mirrored, -start, -bound, -step)
    if step <= 0:
        return None
    if direction == "LE":
        bound += 1
    elif direction == "NE":
        if (bound - start) % step or bound < start:
            return None
    elif direction != "LT":
        return None
    return max(0, -(-(bound - start) // step))


def _called_as(instruction: Instruction, attribute: str) -> str:
    return instruction.attributes.get(attribute, "").removeprefix("%")


def _counter(module: Module, test: Site) -> tuple[int, bool] | None:
    """The tuple element that a condition tests, and whether the bound stands left of it."""
    if test.instruction.opcode != "compare" or len(test.instruction.operands) != 2:
        return None
    for number, operand in enumerate(test.instruction.operand_values):
        source = origin(module, Site(operand, test.calls))
        if source.instruction.opcode == "parameter" and len(source.value.tuple_index) == 1:
            return source.value.tuple_index[0], number == 1
    return None


def _operand(module: Module, site: Site, number: int) -> int | None:
    operands = site.instruction.operand_values
    return _constant(module, Site(operands[number], site.calls)) if len(operands) == 2 else None


def _constant(module: Module, site: Site) -> int | None:
    """The integer that a scalar has on the first partition."""
    return evaluate(module, site, [0])[0]


def _step(module: Module, body: Computation, element: int) -> int | None:
    """What the body adds to element ``element`` of the loop's tuple."""
    after = origin(module, Site(Value(body.root, (element,))))
    if after.instruction.opcode not in ("add", "subtract") or len(after.instruction.operands) != 2:
        return None
    for number, operand in enumerate(after.instruction.operand_values):
        source = origin(module, Site(operand, after.calls))
        if source.instruction.opcode == "parameter" and source.value.tuple_index == (element,):
            step = _operand(module, after, 1 - number)
            if step is None or after.instruction.opcode == "add":
                return step
            return -step if number == 0 else None
    return None


@kept_by_module
def executions(module: Module) -> Mapping[str, int | None]:
    """How often each computation runs in one step, by name; ``None`` where a loop on the way has no
    constant trip count. The branches of a conditional count as if each were taken.
    """
    counts: dict[str, int | None] = dict.fromkeys(module.computations, 0)
    if module.entry_name is not None:
        counts[module.entry_name] = 1
    trips: dict[Call, int | None] = {}
    # XLA prints a computation before those that call it, so callers come first here.
    for computation in reversed(list(module.computations.values())):
        if computation.name == module.entry_name:
            continue
        total: int | None = 0
        for call in module.calls_of(computation):
            times = counts[call.computation.name]
            if times and call.opcode == "while":
                if call not in trips:
                    trips[call] = trip_count(module, call.instruction)
                trip = trips[call]
                is_condition = _called_as(call.instruction, "condition") == computation.name
                times = None if trip is None else _in_reach(times * (trip + is_condition))
            total = None if total is None or times is None else _in_reach(total + times)
        counts[computation.name] = total
    return counts
