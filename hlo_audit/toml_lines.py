"""On which line of a TOML file each key stands, which ``tomllib`` does not tell.

Reads only what ``tomllib`` has read already, so that it need not check anything.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping

KeyPath = tuple[str | int, ...]
"""Keys, and the numbers of elements of arrays, from the top."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SAME_LINE = re.compile(r"[ \t]*")
_KEY = re.compile(r"[A-Za-z0-9_-]+|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2}(?!"))'
    r"|'''.*?'''(?:'{0,2}(?!'))"
    r"|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'",
    re.DOTALL,
)
_OTHER_VALUE = re.compile(r"[^,\]}\n#]+")


def find_lines(text: str) -> Mapping[KeyPath, int]:
    """The line of each key and array element of a valid TOML text, counted from 1.

    A table's line is its header's; of an array of tables each element's is its own header's.
    """
    reader = _Reader(text)
    with contextlib.suppress(_GivenUp):  # a coarser line for the rest is better than no error
        reader.document()
    return reader.lines


def line_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    """The line of ``path``, or of the nearest that it lies in; 1 where none is known."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


class _GivenUp(Exception):
    pass


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self._elements: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        while True:
            self._match(_BLANK)
            if self.at >= len(self.text):
                return
            if self._takes("[["):
                table = self._header(is_array=True)
            elif self._takes("["):
                table = self._header(is_array=False)
            else:
                self._pair(table)

    def _header(self, *, is_array: bool) -> KeyPath:
        line = self._line()
        *outer, last = self._dotted_key()
        path: KeyPath = ()
        for key in outer:
            path = self._innermost((*path, key))
        path = (*path, last)
        if is_array:
            self.lines.setdefault(path, line)
            self._elements[path] = self._elements.get(path, -1) + 1
            path = self._innermost(path)
        self.lines[path] = line
        self._takes("]]" if is_array else "]")
        return path

    def _innermost(self, path: KeyPath) -> KeyPath:
        """The last element, where ``path`` is an array of tables."""
        return (*path, self._elements[path]) if path in self._elements else path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for key in self._dotted_key():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self._takes("=")
        self._match(_SAME_LINE)
        self._value(path)

    def _dotted_key(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._match(_SAME_LINE)
            key = self._match(_KEY)
            if not key:
                raise _GivenUp
            # A quoted key is a string by the same rules.
            quoted = key[0] in "\"'"
            keys.append(tomllib.loads(f"key = {key}")["key"] if quoted else key)
            self._match(_SAME_LINE)
            if not self._takes("."):
                return keys

    def _value(self, path: KeyPath) -> None:
        if self._takes("["):
            self._elements_of_array(path)
        elif self._takes("{"):
            self._inline_table(path)
        elif not self._match(_STRING) and not self._match(_OTHER_VALUE):
            raise _GivenUp

    def _elements_of_array(self, path: KeyPath) -> None:
        number = 0
        while True:
            self._match(_BLANK)
            if self._takes("]"):
                return
            self.lines[(*path, number)] = self._line()
            self._value((*path, number))
            number += 1
            self._match(_BLANK)
            self._takes(",")

    def _inline_table(self, path: KeyPath) -> None:
        while True:
            self._match(_BLANK)
            if self._takes("}"):
                return
            self._pair(path)
            self._match(_BLANK)
            self._takes(",")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _takes(self, sign: str) -> bool:
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]
