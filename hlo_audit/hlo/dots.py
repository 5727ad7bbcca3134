"""What a dot makes of its operands' dimensions."""

from __future__ import annotations

from typing import NamedTuple

from hlo_audit.hlo.attributes import parse_integers
from hlo_audit.hlo.module import Instruction
from hlo_audit.hlo.shape import Shape

# A gradient passes a handful of these.
_LONGEST_CHAIN = 100

# A gradient passes these between its dot and its transpose, and keeps its dimensions.
_PASSED = frozenset(
    {
        *("convert", "copy", "negate", "all-reduce", "reduce-scatter", "dynamic-slice", "slice"),
        *("multiply", "divide", "add", "subtract", "select", "get-tuple-element", "custom-call"),
    }
)


class Chain(NamedTuple):
    """A dot, a transpose of its result, and what stands between them.

    Attributes:
        dot: whose operands would be exchanged.
        between: from the dot on; each keeps the dimensions of the result.
        transpose: of the result.
    """

    dot: Instruction
    between: tuple[Instruction, ...]
    transpose: Instruction


def swaps_operands(dot: Instruction, permutation: tuple[int, ...]) -> bool:
    """Whether transposing the result of ``dot`` by ``permutation`` gives that of the dot with its
    operands exchanged, so that the simplifier can fold the two.

    A dot's result has the batch dimensions, then those of the left operand, then those of the right
    that are not contracted; the exchange swaps the latter two blocks.
    """
    if len(dot.operands) != 2:
        return False
    try:
        batch = len(parse_integers(dot.attributes.get("lhs_batch_dims", "")))
        left, right = (
            operand.shape.rank
            - batch
            - len(parse_integers(dot.attributes.get(f"{side}_contracting_dims", "")))
            for side, operand in zip(("lhs", "rhs"), dot.operand_values, strict=True)
        )
    except ValueError:  # attributes of no known form
        return False
    swapped = (
        *range(batch),
        *range(batch + left, batch + left + right),
        *range(batch, batch + left),
    )
    return permutation == swapped and left > 0 and right > 0


def swaps_two_blocks(permutation: tuple[int, ...]) -> bool:
    """Whether some first dimensions stay, and the others are two blocks that change places."""
    first = next((d for d, moved in enumerate(permutation) if d != moved), len(permutation))
    rest = permutation[first:]
    return bool(rest) and rest == (
        *range(rest[0], len(permutation)),
        *range(first, min(rest[0], len(permutation))),
    )


def spared_by_exchange(transpose: Instruction) -> Chain | None:
    """The dot that would give what ``transpose`` gives if its operands were exchanged; ``None``
    where there is no such dot.

    The transpose is followed back through conversions, sums over chips, slices, annotations and
    arithmetic with constants.
    """
    if transpose.opcode != "transpose" or not transpose.operands:
        return None
    # Most transposes, such as those of attention, need not be followed.
    if not swaps_two_blocks(transpose.dimensions):
        return None
    between: list[Instruction] = []
    value = transpose.operands[0]
    for _ in range(_LONGEST_CHAIN):
        if value.opcode not in _PASSED or not value.operands:
            break
        if value.opcode == "custom-call" and value.custom_call_target != "Sharding":
            return None
        whole = [
            operand
            for operand in value.operands
            if operand.shape.rank == value.shape.rank and not _is_constant(operand)
        ]
        if value.opcode in ("all-reduce", "get-tuple-element") and value.operands[0].shape.is_tuple:
            return None
        if len(whole) != 1:
            return None
        between.append(value)
        value = whole[0]
    if value.opcode != "dot" or not swaps_operands(value, transpose.dimensions):
        return None
    if len(transpose.dimensions) != transpose.shape.rank:
        return None
    return Chain(value, tuple(reversed(between)), transpose)


def _is_constant(instruction: Instruction) -> bool:
    if instruction.opcode != "broadcast" or not instruction.operands:
        return instruction.opcode == "constant"
    source = instruction.operands[0]
    return source.shape.rank == 0 or source.opcode == "constant"


def turns_back(copy: Instruction, transpose: Instruction) -> bool:
    """Whether a copy turns a buffer of the transpose's shape between the order of its operand and
    that of its result.

    Dimensions of size 1 are left out: layer stacks slice with a leading one.
    """
    before, after = copy.operand_values[0].shape, copy.shape
    if before.is_tuple or squeezed(after) != squeezed(transpose.shape):
        return False
    rank = transpose.shape.rank
    untransposed = [transpose.dimensions.index(d) for d in reversed(range(rank))]
    sizes = transpose.shape.dimensions
    turned = [sum(sizes[e] != 1 for e in range(d)) for d in untransposed if sizes[d] != 1]
    orders = [_squeezed_order(before), _squeezed_order(after)]
    return turned in orders and orders[0] != orders[1]


def squeezed(shape: Shape) -> list[int]:
    """The sizes of its dimensions, less those of size 1."""
    return [size for size in shape.dimensions if size != 1]


def _squeezed_order(shape: Shape) -> list[int]:
    """``moving_order`` in numbers of the dimensions that are left without those of size 1."""
    return [sum(size != 1 for size in shape.dimensions[:d]) for d in shape.moving_order]
