"""An instruction as the parser leaves it, and what two versions of a computation's rows share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hlo_audit.hlo.shape import Shape

Row = tuple[str, str, str, str, str, str, Shape, tuple[str, ...]]
"""An instruction as the parser leaves it. First its text in pieces: ``"ROOT "`` or ``""``,
``%name``, shape, opcode, operands, attributes; then what they are read as: the shape, and the
``%name`` of each operand. It says nothing of its place, so that two snapshots can share it."""

ROOT: Final = 0
NAME: Final = 1
SHAPE_TEXT: Final = 2
OPCODE: Final = 3
OPERANDS: Final = 4
ATTRIBUTES: Final = 5
SHAPE: Final = 6
READS: Final = 7


class Edit(NamedTuple):
    """Rows that stand in the place of others in an earlier version of their computation.

    Attributes:
        gone: which of the rows of the earlier version.
        fresh: which of those of the later one.
    """

    gone: slice
    fresh: slice

    @property
    def size(self) -> int:
        """How many rows are gone and fresh."""
        size: int = self.gone.stop - self.gone.start + self.fresh.stop - self.fresh.start
        return size


def edits_between(before: Sequence[Row], after: Sequence[Row]) -> Sequence[Edit]:
    """The one edit from the first row that two versions do not share to the last; none where they
    share all."""
    first, most = 0, min(len(before), len(after))
    while first < most and before[first] is after[first]:
        first += 1
    last = 0
    while last < most - first and before[-1 - last] is after[-1 - last]:
        last += 1
    edit = Edit(slice(first, len(before) - last), slice(first, len(after) - last))
    return (edit,) if edit.size else ()
