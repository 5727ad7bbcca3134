"""What one snapshot has in common with the one before, found by comparing text.

A pass changes little: most computations stand in two snapshots on end to the letter, often many in
a row, and those that do not begin and end alike. Comparing text is many times as fast as
reading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hlo_audit.hlo.module import Computation, Pieces
from hlo_audit.hlo.shape import Shape

NEXT_LINE = "\n  "
"""What starts the line of an instruction; lines that continue one start otherwise."""


class Record(NamedTuple):
    """A computation that was read.

    Attributes:
        computation: the graph.
        is_entry: whether ``ENTRY`` stands before its name.
        body: where its lines start and end, counted from the computation's start; ``None`` where
            it was not read the plain way.
    """

    computation: Computation
    is_entry: bool
    body: tuple[int, int] | None


class Common(NamedTuple):
    """What a body has in common with its namesake's in the snapshot before, in whole lines.

    Attributes:
        head_lines: the instructions with which both begin.
        tail_lines: those with which both end.
        head: the characters that the former take.
        tail: those that the latter take.
        head_reads: the indices of the operands of each of the former.
        head_shapes: their shapes.
    """

    head_lines: Sequence[Pieces] = ()
    tail_lines: Sequence[Pieces] = ()
    head: int = 0
    tail: int = 0
    head_reads: Sequence[tuple[int, ...]] = ()
    head_shapes: Sequence[Shape] = ()


NOTHING = Common()


class Memo:
    """The snapshot read before; empty at first.

    Attributes:
        records: its computations, in the order of the text.
        offsets: where each starts in the text, and where the text ends.
        lines: the line of each, counted from 1.
    """

    __slots__ = ("_index", "_text", "lines", "offsets", "records")

    def __init__(self) -> None:
        self.remember("", [], [0], [])

    def remember(
        self, text: str, records: Sequence[Record], offsets: Sequence[int], lines: Sequence[int]
    ) -> None:
        """Take this snapshot in place of the one before."""
        self._text = text
        self.records, self.offsets, self.lines = records, offsets, lines
        self._index: Mapping[str, int] = {
            record.computation.name: index for index, record in enumerate(records)
        }

    def index_of(self, name: str) -> int | None:
        """The place of a computation among the :attr:`records`."""
        return self._index.get(name)

    def run(self, text: str, position: int, first: int) -> int:
        """How far the computations from ``first`` on stand at ``position`` of ``text`` as well.

        Returns:
            the index behind the last of them; ``first`` where not even that one stands there.
        """
        offsets, last, step = self.offsets, first, 1
        while last < len(self.records):
            end = min(last + step, len(self.records))
            if text.startswith(self._text[offsets[last] : offsets[end]], position):
                position += offsets[end] - offsets[last]
                last, step = end, 2 * step
            elif step == 1:
                break
            else:
                step = 1
        return last

    def in_common(self, name: str, text: str, start: int, end: int) -> Common:
        """Compare the body between ``start`` and ``end`` of ``text`` with its namesake's."""
        index = self._index.get(name)
        if index is None or (place := self.records[index].body) is None:
            return NOTHING
        offset = self.offsets[index]
        before, body = self._text[offset + place[0] : offset + place[1]], text[start:end]
        # What is shared is cut at the start of the last line in it, or of the first.
        head = max(before.rfind(NEXT_LINE, 0, _common_prefix(before, body)), 0)
        most = min(len(before), len(body)) - head
        tail_start = before.find(NEXT_LINE, len(before) - _common_suffix(before, body, most))
        tail = len(before) - tail_start if tail_start >= 0 else 0
        computation = self.records[index].computation
        head_count = before.count(NEXT_LINE, 0, head)
        tail_count = before.count(NEXT_LINE, len(before) - tail)
        return Common(
            computation._lines[:head_count],
            computation._lines[len(computation) - tail_count :],
            head,
            tail,
            computation._reads[:head_count],
            computation._shapes[:head_count],
        )


def _common_prefix(a: str, b: str) -> int:
    """The number of characters in which ``a`` and ``b`` begin alike."""
    known, possible = 0, min(len(a), len(b))
    while known < possible:
        middle = (known + possible + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            possible = middle - 1
    return known


def _common_suffix(a: str, b: str, most: int) -> int:
    """The number of characters, up to ``most``, in which ``a`` and ``b`` end alike."""
    known, possible = 0, most
    while known < possible:
        middle = (known + possible + 1) // 2
        if a[len(a) - middle : len(a) - known] == b[len(b) - middle : len(b) - known]:
            known = middle
        else:
            possible = middle - 1
    return known
