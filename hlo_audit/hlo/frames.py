"""Source positions: the tables at the head of a module that say which Python line traced what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from hlo_audit.hlo.attributes import unquote

_ROW = re.compile(r'^(\d{1,18}+) (?:("(?:[^"\\]++|\\.)*+")|\{([^{}]*+)\})', re.MULTILINE)
_FIELD = re.compile(r"\b(\w++)=(\d{1,18}+)(?!\d)")


MOST_FRAMES = 100


class SourceLocation(NamedTuple):
    """A line of the traced program; ``function`` is empty where the module does not say."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True)
class FrameTables:
    """``StackFrames`` -> ``FileLocations`` -> ``FileNames`` and ``FunctionNames``, by their ids."""

    files: dict[int, str]
    functions: dict[int, str]
    locations: dict[int, dict[str, int]]
    stack_frames: dict[int, dict[str, int]]
    _stacks: dict[int, tuple[SourceLocation, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _lines: dict[int, SourceLocation] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> FrameTables:
        """Read the tables; a row that is none of theirs is left out."""
        tables = dict.fromkeys(("FileNames", "FunctionNames", "FileLocations", "StackFrames"), "")
        titles = re.split(r"^(\w++)$", text, flags=re.MULTILINE)
        tables.update(zip(titles[1::2], titles[2::2], strict=True))
        return cls(
            _names(tables["FileNames"]),
            _names(tables["FunctionNames"]),
            _records(tables["FileLocations"]),
            _records(tables["StackFrames"]),
        )

    def stack(self, frame_id: int) -> tuple[SourceLocation, ...]:
        """The frames from ``frame_id`` outwards, :data:`MOST_FRAMES` at the most; ``()`` for an id
        that is in no table."""
        known = self._stacks.get(frame_id)
        if known is None:  # many instructions are traced by few lines
            known = self._stacks[frame_id] = tuple(self._frames_from(frame_id))
        return known

    def _frames_from(self, frame_id: int) -> list[SourceLocation]:
        stack: list[SourceLocation] = []
        seen: set[int] = set()
        while frame_id in self.stack_frames and frame_id not in seen and len(stack) < MOST_FRAMES:
            seen.add(frame_id)
            frame = self.stack_frames[frame_id]
            stack.append(self._line(frame.get("file_location_id", 0)))
            # XLA prints the parent's id one too high, so that 1 stands for "no parent".
            frame_id = frame.get("parent_frame_id", 0) - 1
        return stack

    @property
    def lines(self) -> frozenset[SourceLocation]:
        """Every line that the tables hold."""
        return frozenset(map(self._line, self.locations))

    def _line(self, location_id: int) -> SourceLocation:
        line = self._lines.get(location_id)
        if line is None:  # most stacks have their outer frames in common
            location = self.locations.get(location_id, {})
            line = self._lines[location_id] = SourceLocation(
                self.files.get(location.get("file_name_id", 0), ""),
                location.get("line", 0),
                self.functions.get(location.get("function_name_id", 0), ""),
            )
        return line


def _names(text: str) -> dict[int, str]:
    return {int(row): unquote(name) for row, name, _ in _ROW.findall(text)}


def _records(text: str) -> dict[int, dict[str, int]]:
    return {
        int(row): {key: int(value) for key, value in _FIELD.findall(fields)}
        for row, _, fields in _ROW.findall(text)
    }
