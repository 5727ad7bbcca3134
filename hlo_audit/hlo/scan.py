"""Finding where a piece of HLO text ends, past nested brackets and quoted strings.

Everything here is one pass over the text: possessive regular expressions step over plain text, over
strings and over what is nested a little, and deeper nesting is a list, so neither long nor deeply
nested text can backtrack or recurse.
"""

from __future__ import annotations

import re

_OPEN = {"{": "}", "(": ")", "[": "]"}
_QUOTED = r'"(?:[^"\\]++|\\.)*+"'


def _brackets(inside: str) -> str:
    """A pair of brackets of any kind around such pieces."""
    return "|".join(rf"\{opening}(?:{inside})*+\{closing}" for opening, closing in _OPEN.items())


# Most brackets stand in no more than one other: those are stepped over whole.
_INSIDE = rf'[^"{{}}()\[\]]++|{_QUOTED}'
_SHALLOW = _brackets(f"{_INSIDE}|{_brackets(_INSIDE)}")

# A sharding is three deep: {mesh['x'=2], [{'x'}, {}]}.
PLAIN_ITEM = (
    rf'(?:[^"{{}}()\[\],\n]++|{_QUOTED}|\{{(?:{_INSIDE}|{_SHALLOW})*+\}}|{_brackets(_INSIDE)})*+'
)
"""A regular expression for an item on one line without deep brackets, up to a comma or what is not
plain; for DOTALL."""

_PLAIN = re.compile(r'[^"{}()\[\],\n]*+')
_WHOLE = re.compile(PLAIN_ITEM, re.DOTALL)
_WHOLE_IN_BRACKETS = re.compile(rf"(?:{_INSIDE}|{_SHALLOW})*+", re.DOTALL)
_STRING = re.compile(_QUOTED, re.DOTALL)


class Unbalanced(ValueError):
    """A bracket or quote that is not closed, or closes what is not open.

    Attributes:
        position: the offset of the bracket or quote in the text.
    """

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


def end_of_item(text: str, start: int, end: int, stops: str) -> int:
    """Return the offset of the first of ``stops`` outside brackets and strings, or ``end``.

    ``->`` and ``<=`` are read as plain text. A closing bracket is a stop only where it is one of
    ``stops``.

    Raises:
        Unbalanced: for a bracket or a string that is not closed, or is closed but was not opened.
    """
    return _scan(text, start, end, stops)


def end_of_brackets(text: str, start: int) -> int:
    """Return the offset after the bracket that closes the one at ``start``.

    Raises:
        Unbalanced: as :func:`end_of_item`.
    """
    return _scan(text, start, len(text), None)


def _scan(text: str, start: int, end: int, stops: str | None) -> int:
    closers: list[tuple[str, int]] = []
    position = start
    # Where the end of a pair of brackets is looked for, that pair must not be stepped over.
    outside = _PLAIN if stops is None else _WHOLE
    while True:
        whole = _WHOLE_IN_BRACKETS if closers else outside
        position = whole.match(text, position, end).end()  # type: ignore[union-attr]  # matches ""
        if position >= end:
            break
        char = text[position]
        if char == '"':
            string = _STRING.match(text, position, end)
            if string is None:
                raise Unbalanced("string is not closed", position)
            position = string.end()
            continue
        if not closers and stops is not None and char in stops:
            return position
        position += 1
        if char in _OPEN:
            closers.append((_OPEN[char], position - 1))
        elif char not in ",\n":
            if not closers:
                raise Unbalanced(f"{char!r} closes nothing", position - 1)
            if closers[-1][0] != char:
                break
            closers.pop()
            if not closers and stops is None:
                return position
    if closers:  # whatever follows it, the innermost one is the bracket that is wrong
        closer, position = closers[-1]
        raise Unbalanced(f"{text[position]!r} is not closed by {closer!r}", position)
    return end


def split_items(text: str, start: int = 0, end: int | None = None) -> list[str]:
    """Split at the commas outside brackets and strings; ``""`` has no items.

    Raises:
        Unbalanced: as :func:`end_of_item`.
    """
    end = len(text) if end is None else end
    items = []
    while start < end:
        stop = end_of_item(text, start, end, ",")
        items.append(text[start:stop].strip())
        start = stop + 1
    return items
