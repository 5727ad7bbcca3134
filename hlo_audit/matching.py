"""Instructions of two modules, paired by what they mean: their names are new in every compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hlo_audit.hlo import Instruction, Module, Shape


class Pair(NamedTuple):
    """An instruction, and the one that means the same on the other side."""

    a: Instruction
    b: Instruction


@dataclass(frozen=True)
class Matching:
    """The instructions of both final modules, paired by :func:`match`.

    Attributes:
        pairs: in the order of ``a``.
        only_a, only_b: those without a partner.
        relaid: pairs of the same shape in another layout; memory spaces do not count.
        reshaped: pairs of another shape.
    """

    pairs: tuple[Pair, ...]
    only_a: tuple[Instruction, ...]
    only_b: tuple[Instruction, ...]
    relaid: tuple[Pair, ...]
    reshaped: tuple[Pair, ...]


def match(a: Module, b: Module) -> Matching:
    """Pair the instructions that mean the same in both modules.

    From the most to the least that two have in common; what is paired stays so, and of several
    alike the first in each module are taken together:

    1. opcode, shape, op_name, traced function, the same of their operands and users, and of theirs;
    2. the same without the outer ring of neighbours;
    3. the same without any neighbours;
    4. opcode, shape, and the opcodes of their operands;
    5. opcode, element type, op_name, and the sizes of the dimensions in any order;
    6. opcode and shape.
    """
    nodes = [list(module.instructions) for module in (a, b)]
    left = [dict.fromkeys(range(len(found))) for found in nodes]
    pairs: list[tuple[int, int]] = []
    labels = [_labels(module, found) for module, found in zip((a, b), nodes, strict=True)]
    for level in range(len(labels[0])):
        waiting: dict[Hashable, list[int]] = {}
        for index in left[1]:
            if (key := labels[1][level][index]) is not None:
                waiting.setdefault(key, []).append(index)
        for queue in waiting.values():
            queue.reverse()
        for index in list(left[0]):
            queue = waiting.get(labels[0][level][index], [])
            if queue:
                other = queue.pop()
                pairs.append((index, other))
                del left[0][index], left[1][other]
    paired = tuple(Pair(nodes[0][one], nodes[1][other]) for one, other in sorted(pairs))
    return Matching(
        paired,
        tuple(nodes[0][index] for index in left[0]),
        tuple(nodes[1][index] for index in left[1]),
        tuple(p for p in paired if _is_relaid(p.a.shape, p.b.shape)),
        tuple(p for p in paired if p.a.shape.without_layout != p.b.shape.without_layout),
    )


def _is_relaid(a: Shape, b: Shape) -> bool:
    if a.is_tuple or b.is_tuple or a.without_layout != b.without_layout:
        return False
    if a.moving_order != b.moving_order:
        return True
    tiles = [shape.layout.tiles if shape.layout is not None else () for shape in (a, b)]
    return tiles[0] != tiles[1]


def _labels(module: Module, nodes: Sequence[Instruction]) -> list[list[Hashable]]:
    """For each of the ways of :func:`match`, what each instruction must have in common."""
    functions: dict[int | str, str] = {}
    own: list[Hashable] = []
    loose: list[Hashable] = []
    turned: list[Hashable] = []
    bare: list[Hashable] = []
    index_of: dict[Instruction, int] = {}
    for index, node in enumerate(nodes):
        index_of[node] = index
        metadata = node.metadata
        frame = metadata.stack_frame_id or metadata.source_file
        if frame not in functions:
            source = module.source(node)
            functions[frame] = source.function if source is not None else ""
        shape, opcode, op_name = node.shape, node.opcode, metadata.op_name
        text = shape.without_layout
        own.append(hash((opcode, text, op_name, functions[frame])))
        loose.append(hash((opcode, text, tuple(operand.opcode for operand in node.operands))))
        bare.append(hash((opcode, text)))
        has_name = bool(op_name) and not shape.is_tuple
        turned.append(
            hash((opcode, shape.element_type, op_name, tuple(sorted(shape.dimensions))))
            if has_name
            else None
        )
    inner = _with_neighbours(nodes, index_of, own)
    return [_with_neighbours(nodes, index_of, inner), inner, own, loose, turned, bare]


def _with_neighbours(
    nodes: Sequence[Instruction], index_of: Mapping[Instruction, int], labels: Sequence[Hashable]
) -> list[Hashable]:
    """One round of colour refinement: each label with those of its operands and users."""
    users: list[list[Hashable]] = [[] for _ in nodes]
    reads = [[index_of[operand] for operand in node.operands] for node in nodes]
    for index, operands in enumerate(reads):
        for operand in operands:
            users[operand].append(labels[index])
    return [
        hash((labels[n], tuple(labels[o] for o in reads[n]), frozenset(Counter(users[n]).items())))
        for n in range(len(nodes))
    ]
