"""JSON that this tool has written, read back: the kind of a file, and its values, of their types.

Such a file comes from another machine or another version, and may be damaged or made up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

_KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("a baseline", frozenset({"schema_version", "entries"})),
    ("a report", frozenset({"schema_version", "tool", "programs", "gate"})),
    ("a report of the passes", frozenset({"schema_version", "tool", "programs"})),
    ("a diff", frozenset({"schema_version", "tool", "a", "b"})),
    ("a report of proofs", frozenset({"schema_version", "tool", "proofs"})),
    ("SARIF", frozenset({"version", "runs"})),
)

MOST_REPORT_BYTES = 1 << 30
"""Larger files are no reports."""

_MOST_DEPTH = 64
_MOST_SECONDS = 1e9
_LONGEST_SHOWN = 40
_LONGEST_KEY = 80


def kind_of(data: object) -> str | None:
    """What parsed JSON is, such as ``a baseline``; ``None`` for none of ours."""
    if not isinstance(data, dict):
        return None
    return next((kind for kind, keys in _KINDS if keys <= data.keys()), None)


def kind_of_text(text: str) -> str | None:
    """What a text is, if it is JSON at all; ``JSON`` for an object that is none of ours."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return kind_of(data) or "JSON"


class Value:
    """A value of a file, and where it stands there; every access checks its type.

    Raises:
        ValueError: says where the file has what cannot be.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        self.value = value
        self.where = where

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.where or 'it'} {problem}")

    def _refuse_value(self) -> NoReturn:
        self.refuse(f"is {repr(self.value)[:_LONGEST_SHOWN]}")

    def _typed(self, *kinds: type) -> Any:
        if type(self.value) not in kinds:  # by exact type: a bool is an int to isinstance
            expected = " or ".join(kind.__name__ for kind in kinds)
            self.refuse(f"is {repr(self.value)[:_LONGEST_SHOWN]}, not of type {expected}")
        return self.value

    def _inner(self, name: str, value: Any) -> Value:
        name = name[:_LONGEST_KEY]
        return Value(value, f"{self.where}.{name}" if self.where else name)

    def mapping(self) -> dict[str, Value]:
        return {name: self._inner(name, value) for name, value in self._typed(dict).items()}

    def __getitem__(self, name: str) -> Value:
        found = self._typed(dict)
        if name not in found:
            self.refuse(f"has no {name!r}")
        return self._inner(name, found[name])

    def get(self, name: str) -> Value:
        """The value of a key that may be left out: then it is ``None``."""
        return self._inner(name, self._typed(dict).get(name))

    def items(self) -> list[Value]:
        values = enumerate(self._typed(list))
        return [Value(value, f"{self.where}[{number}]") for number, value in values]

    def text(self) -> str:
        return str(self._typed(str))

    def text_or_none(self) -> str | None:
        return None if self.value is None else self.text()

    def texts(self) -> dict[str, str]:
        return {name: one.text() for name, one in self.mapping().items()}

    def texts_or_none(self) -> dict[str, str | None]:
        return {name: one.text_or_none() for name, one in self.mapping().items()}

    def flag(self) -> bool:
        return bool(self._typed(bool))

    def integer(self, least: int = -(1 << 63)) -> int:
        number: int = self._typed(int)
        if not least <= number < 1 << 63:
            self._refuse_value()
        return number

    def integers(self) -> dict[str, int]:
        return {name: one.integer() for name, one in self.mapping().items()}

    def count(self) -> int:
        return self.integer(least=0)

    def count_or_none(self) -> int | None:
        return None if self.value is None else self.count()

    def seconds(self) -> float:
        number = self._typed(int, float)
        if not 0 <= number <= _MOST_SECONDS:
            self._refuse_value()
        return float(number)

    def one_of(self, choices: Sequence[str]) -> Any:
        text = self.text()
        if text not in choices:
            self.refuse(f"is {text[:_LONGEST_SHOWN]!r}, not one of {', '.join(choices)}")
        return text

    def digest(self) -> str:
        text = self.text()
        if not re.fullmatch(r"[0-9a-f]{64}", text):
            self.refuse("is no digest")
        return text

    def settings(self) -> dict[str, int | float | bool | str]:
        """What a program was built with."""
        found = self.mapping()
        for one in found.values():
            one._typed(int, float, bool, str)
        return {name: one.plain() for name, one in found.items()}

    def plain(self, depth: int = 0) -> Any:
        """Any value, as far as it is printable: no number that is none, no endless nesting."""
        if depth > _MOST_DEPTH:
            self.refuse("is nested too deeply")
        if isinstance(self.value, dict):
            return {name: one.plain(depth + 1) for name, one in self.mapping().items()}
        if isinstance(self.value, list):
            return [one.plain(depth + 1) for one in self.items()]
        if isinstance(self.value, float) and not math.isfinite(self.value):
            self.refuse("is no number")
        if type(self.value) is int:
            return self.integer()
        return self.value

    def refuse_other_version(self, version: int) -> None:
        """Refuse a file whose ``schema_version`` is another one."""
        found = self.mapping().get("schema_version")
        if found is None or found.value != version or isinstance(found.value, bool):
            said = "missing" if found is None else repr(found.value)[:_LONGEST_SHOWN]
            raise ValueError(f"schema_version is {said}, not {version}")


def parse(text: str) -> Value:
    """The value that a whole file holds.

    Raises:
        json.JSONDecodeError: where it is no JSON.
        ValueError: says what else is wrong.
    """
    try:
        return Value(json.loads(text, parse_constant=_refuse_constant))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
