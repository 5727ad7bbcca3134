"""Collectives: what each is, which values it sends, and among how many devices.

An asynchronous collective is known by its start alone: its update and its done are the same one.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from hlo_audit.hlo.module import Instruction, Module

CollectiveKind = Literal[
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
]

_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
_KIND_OF_OPCODE: dict[str, CollectiveKind] = {
    opcode: kind for kind in _KINDS for opcode in (kind, f"{kind}-start")
}
COLLECTIVES = frozenset(_KIND_OF_OPCODE)
"""The opcodes of collectives; of asynchronous ones that of the start alone."""

_PAIR = re.compile(r"\{\s*+(\d++)\s*+,\s*+(\d++)\s*+\}")


def collective_kind(module: Module, instruction: Instruction) -> CollectiveKind | None:
    """What a collective does; ``None`` for any other instruction.

    The all-reduce inside a TPU's fused reduce-scatter is a ``reduce-scatter``.
    """
    kind = _KIND_OF_OPCODE.get(instruction.opcode)
    if kind == "all-reduce" and is_reduce_scatter(module, instruction):
        return "reduce-scatter"
    return kind


def is_reduce_scatter(module: Module, all_reduce: Instruction) -> bool:
    """Whether the all-reduce is the inside of a TPU reduce-scatter."""
    computation = all_reduce.computation
    return computation.name.startswith("all-reduce-scatter") and "kCustom" in module.fusion_kinds(
        computation
    )


def group_size(module: Module, collective: Instruction) -> int | None:
    """How many devices exchange data with each other; of a permute 2, or 1 where each device keeps
    its own. ``None`` where the groups are of no known form."""
    pairs = collective.attributes.get("source_target_pairs")
    if pairs is not None:
        return 2 if any(source != target for source, target in _PAIR.findall(pairs)) else 1
    groups = collective.replica_groups(module.device_count)
    return max(map(len, groups)) if groups else None
