"""The lines of Python around the one that a finding comes from.

Which file that is a dump says, and a report is passed on: a dump must not be able to name a file
whose text its reader should not see. So only Python files are shown, which are in the repository
that the report is written in, or are the reference models of this package; no hidden file or file
in a hidden folder, and none to which a link leads out of there. All others are named, not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hlo_audit.hlo import SourceLocation
from hlo_audit.report.sources import UNREADABLE, Repository

LINES_AROUND = 3
"""How many lines are shown before the one that is meant, and after it."""

_MOST_SOURCE_BYTES = 4 << 20
_MODELS = Repository(Path(__file__).parent.parent / "models")


@dataclass(frozen=True)
class Snippet:
    """Some lines of a file.

    Attributes:
        place: the file and the line that is meant, for a reader.
        first: the number of the first of ``lines``, from 1.
        line: the number of the one that is meant.
        lines: without their ends.
    """

    place: str
    first: int
    line: int
    lines: tuple[str, ...]


class SourceReader:
    """Reads snippets; each file once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._files: dict[Path, tuple[str, ...]] = {}

    def snippet(self, frames: Iterable[SourceLocation]) -> Snippet | None:
        """The lines around the first of ``frames`` that may be shown and is there.

        The text is the file's as it is now, which may be another than the one that was traced.
        """
        for frame in frames:
            found = self._path(frame)
            lines = self._lines(found[0]) if found else ()
            if found and 1 <= frame.line <= len(lines):
                start = max(1, frame.line - LINES_AROUND)
                shown = lines[start - 1 : frame.line + LINES_AROUND]
                return Snippet(f"{found[1]}:{frame.line}", start, frame.line, shown)
        return None

    def _path(self, frame: SourceLocation) -> tuple[Path, str] | None:
        """The file of a frame, with no links in its path, and its name for a reader."""
        place = self._repository.place(frame)
        if place.in_repository:
            return self._below(self._repository, self._repository.root / place.path)
        return self._below(_MODELS, Path(frame.file), prefix="hlo_audit/models/")

    @staticmethod
    def _below(folder: Repository, file: Path, prefix: str = "") -> tuple[Path, str] | None:
        relative = folder.relative(file) if file.is_absolute() else None
        if relative is None:
            return None
        path = PurePosixPath(relative)
        hidden = any(part.startswith(".") for part in path.parts)
        if path.suffix != ".py" or hidden:
            return None
        return folder.root.resolve() / path, prefix + relative

    def _lines(self, path: Path) -> tuple[str, ...]:
        if path not in self._files:
            lines: tuple[str, ...] = ()
            with contextlib.suppress(*UNREADABLE):
                if path.is_file() and path.stat().st_size <= _MOST_SOURCE_BYTES:
                    text = path.read_bytes().decode("utf-8", errors="replace")
                    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
                    lines = lines[:-1] if lines[-1] == "" else lines
            self._files[path] = lines
        return self._files[path]
