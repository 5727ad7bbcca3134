"""A module as a pandas data frame, to be asked questions that no rule asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlo_audit.hlo.loops import executions
from hlo_audit.hlo.module import Instruction, Module

if TYPE_CHECKING:
    import pandas

_NUMBERS = ("position", "bytes", "executions", "estimated_cycles", "line")

COLUMNS = (
    *("computation", "position", "name", "opcode", "shape", "bytes", "operands", "target"),
    *("executions", "estimated_cycles", "op_name", "file", "line", "function"),
)
"""The columns, in order. ``shape`` is with its layout, ``bytes`` its logical size, ``target`` that
of a custom call, ``executions`` how often it runs in a step, and ``estimated_cycles`` the
compiler's own cost of one run."""


def instructions_frame(module: Module) -> pandas.DataFrame:
    """A row for each instruction, computation by computation.

    What is not known is missing (``pandas.NA`` in the whole numbers).
    """
    import pandas

    runs = executions(module) if module.entry_name in module.computations else {}
    rows = [_row(module, i, runs.get(i.computation.name)) for i in module.instructions]
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(_NUMBERS, "Int64"))


def _in_reach(count: int) -> int | None:
    """A count that fits its column; a larger one is damage."""
    return count if count < 1 << 63 else None


def _row(module: Module, instruction: Instruction, runs: int | None) -> dict[str, Any]:
    source = module.source(instruction)
    return {
        "computation": instruction.computation.name,
        "position": instruction.index,
        "name": instruction.name,
        "opcode": instruction.opcode,
        "shape": str(instruction.shape),
        "bytes": _in_reach(instruction.shape.logical_bytes),
        "operands": tuple(operand.name for operand in instruction.operands),
        "target": instruction.custom_call_target or None,
        "executions": runs,
        "estimated_cycles": instruction.estimated_cycles,
        "op_name": instruction.op_name,
        "file": source.file if source else None,
        "line": source.line if source else None,
        "function": source.function if source else None,
    }
