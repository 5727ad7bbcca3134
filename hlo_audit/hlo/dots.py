"""What a dot makes of its operands' dimensions."""

from __future__ import annotations

from hlo_audit.hlo.attributes import parse_integers
from hlo_audit.hlo.module import Instruction


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
