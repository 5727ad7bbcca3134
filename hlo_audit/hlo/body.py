"""The lines between the braces of a computation: where they end, and how two versions differ.

A pass that changes a computation leaves most of its lines as they are. Comparing text is many
times as fast as taking it apart, so only what lies between two stretches in common is read anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from hlo_audit.hlo.row import NAME, Row

if TYPE_CHECKING:
    from hlo_audit.hlo.module import Computation

NEXT_LINE = "\n  "
"""What starts the line of an instruction; lines that continue one start otherwise."""

_FIRST_LOOK = 1024
"""How many characters are compared at first; twice as many each time they are the same."""

_LAST_LOOK = 256
"""In how few characters, not all the same, the first that differs is found at once."""

_END = re.compile(r"\n\}(?:\n|, execution_thread=)").search
_END_LENGTH = len("\n}, execution_thread=")
_NAME_IN_LINE = re.compile(r"\n  (?:ROOT )?(%[^ ]++)").match

# What may follow the brace that closes a body.
_AFTER_BODY = re.compile(r"[ \t]*+(?:\n|\Z|, execution_thread=)").match


def end_of_body(text: str, start: int, limit: int | None = None) -> int:
    """Where the body of plain lines ends that goes on at ``start``: before its last line break.

    Args:
        limit: where to end the search; at the end of the text if not given.

    Returns:
        -1 where no end is found.
    """
    if limit is None:
        limit = len(text)
    if found := _END(text, start, limit):
        return found.start()
    # At the end of the text there may be none. Kernel metadata has lines that start with a brace,
    # too; the body's own stands alone.
    end = text.find("\n}", start) if limit >= len(text) else -1
    while end >= 0 and not _AFTER_BODY(text, end + 2):
        end = text.find("\n}", end + 2)
    return end


class Hunk(NamedTuple):
    """A place at which a body differs from its namesake's in the snapshot before, in whole lines.

    Attributes:
        text: the lines that only it has.
        gone: the rows that the namesake has in their place.
        names: those of the instructions that follow and that both have, up to the next hunk.
        rows: what those were read as.
    """

    text: str
    gone: Sequence[Row] = ()
    names: Sequence[str] = ()
    rows: Sequence[Row] = ()


class Body:
    """The plain lines of a computation that was read.

    Attributes:
        text: from the line break before the first line to the end of the last.
        computation: what was read from it.
        rows: one for each instruction.
        names: those of the instructions.
        continued: how many lines continue one above.
    """

    def __init__(self, text: str, computation: Computation, continued: int) -> None:
        self.text = text
        self.computation = computation
        self.rows = computation.rows
        self.names = list(map(itemgetter(NAME), self.rows))
        self.continued = continued

    def compare(self, text: str, start: int) -> tuple[list[Hunk], int]:
        """Compare it with the body whose first line starts at ``start`` of ``text``. Lines that
        only changed their place count as changed.

        Returns:
            what differs, from the first line to the last, and where the other body ends: -1 where
            it does not.
        """
        old, new, row = 0, start, 0
        fresh, gone, hunks = "", self.rows[:0], []
        while True:
            same = self._in_common(old, text, new)
            old, new = old + same, new + same
            next_row = self._row_at(old, row)
            hunks.append(Hunk(fresh, gone, self.names[row:next_row], self.rows[row:next_row]))
            if old == len(self.text) and _is_end(text, new):
                return hunks, new
            next_old, next_new, gone_count = _next_in_common(self.text, old, text, new)
            if next_new < 0:
                return hunks, -1
            row = next_row + gone_count
            fresh, gone = text[new:next_new], self.rows[next_row:row]
            old, new = next_old, next_new

    def _in_common(self, old: int, text: str, new: int) -> int:
        """How many characters of whole lines from ``old`` on stand at ``new`` of ``text`` too."""
        before = self.text
        count = _common_prefix(before, old, text, new)
        for end in range(count, max(count - 2, -1), -1):  # a next line and an end begin alike
            ends = old + end == len(before) or before.startswith(NEXT_LINE, old + end)
            if ends and (text.startswith(NEXT_LINE, new + end) or _is_end(text, new + end)):
                return end
        # The last line is one that differs further on.
        return max(before.rfind(NEXT_LINE, old, old + count) - old, 0)

    def _row_at(self, position: int, first: int) -> int:
        """The index, from ``first`` on, of the instruction whose line starts at ``position``."""
        if position == len(self.text):
            return len(self.rows)
        name = _NAME_IN_LINE(self.text, position)
        assert name is not None
        return self.names.index(name[1], first)


def _is_end(text: str, position: int) -> bool:
    return end_of_body(text, position, position + _END_LENGTH) == position


def _next_in_common(before: str, old: int, text: str, new: int) -> tuple[int, int, int]:
    """The nearest line that stands both behind ``old`` of a body and behind ``new`` of a text, at
    both of which there is the start of a line or the end of the body.

    Returns:
        where it starts in the one and in the other, and how many lines of the body are before it.
        Without such a line the places are the ends of the bodies; -1 where the text's has none.
    """
    lines_before: dict[str, tuple[int, int]] = {}
    lines: dict[str, int] = {}
    at_end = _is_end(text, new)
    while old < len(before) or not at_end:
        if old < len(before):
            end = before.find(NEXT_LINE, old + 1)
            line = before[old:end] if end >= 0 else before[old:]
            if line in lines:
                return old, lines[line], len(lines_before)
            lines_before[line] = (old, len(lines_before))
            old += len(line)
        if not at_end:
            end = text.find(NEXT_LINE, new + 1)
            line = text[new:end] if end >= 0 else text[new:]
            if end < 0 or "\n}" in line:
                last = end_of_body(text, new, new + len(line) + 1)
                if last < 0 and end < 0:
                    return old, -1, 0
                if last >= 0:
                    line, at_end = text[new:last], True
            if line in lines_before:
                place, count = lines_before[line]
                return place, new, count
            lines[line] = new
            new += len(line)
    return old, new, len(lines_before)


def _common_prefix(a: str, i: int, b: str, j: int) -> int:
    """The number of characters from ``i`` of ``a`` on that stand at ``j`` of ``b`` as well."""
    known, possible, step = 0, min(len(a) - i, len(b) - j), _FIRST_LOOK
    while known < possible:
        size = min(step, (possible - known + 1) // 2)
        ours = a[i + known : i + known + size]
        if b.startswith(ours, j + known):
            known += size
            step *= 2
        elif size > _LAST_LOOK or not ours.isascii():
            possible = known + size - 1
        else:
            return known + _same_ascii(ours, b[j + known : j + known + size])
    return known


def _same_ascii(ours: str, theirs: str) -> int:
    """The number of characters that two short texts, of which one is ASCII, start with alike."""
    one, other = (
        int.from_bytes(text.encode("utf-8", "surrogatepass"), "little") for text in (ours, theirs)
    )
    different = one ^ other
    lowest_bit = (different & -different).bit_length() - 1
    return lowest_bit // 8
