"""Where a finding is, for a reader in the repository: its Python line, and its line in a dump.

File names come out of a dump and are as trustworthy as that is: they are compared with what is in
the repository, and never opened for more than counting their lines and finding the comments that
suppress findings.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from hlo_audit.hlo import SourceLocation
from hlo_audit.rule import Finding

MOST_DUMP_BYTES = 512 << 20
"""Dumps larger than this are not searched for the line of an instruction."""

UNREADABLE = (OSError, ValueError, RuntimeError)
"""Of a path out of a dump: there is none, it holds a NUL, or it is a loop of links."""

_MOST_PARTS = 64
_MOST_SOURCE_BYTES = 16 << 20
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Place:
    """A line of a file.

    Attributes:
        path: with ``/``; relative to the repository's root if ``in_repository``, else as given.
        line: counted from 1.
        function: empty where it is not known.
        in_repository: whether it is a file of the repository, and none of an installed package.
    """

    path: str
    line: int
    function: str
    in_repository: bool

    def __str__(self) -> str:
        function = f" in {self.function}" if self.function else ""
        return f"{self.path}:{self.line}{function}"


class Repository:
    """The checkout that reports are read in.

    Attributes:
        root: its top folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The repository that ``folder`` lies in: the nearest parent with a ``.git``; where there
        is none, ``folder`` itself."""
        folder = folder.resolve()
        tops = (parent for parent in (folder, *folder.parents) if (parent / ".git").exists())
        return cls(next(tops, folder))

    def place(self, source: SourceLocation) -> Place:
        """Where ``source`` is.

        A dump may have been made in another folder or on another machine. So a file that is not
        below the root is looked for under the end of its path, two names or more, and taken where
        the repository has such a file and that file has such a line.
        """
        line = max(1, source.line)
        inside = self._inside(source.file, line)
        path = inside if inside is not None else source.file.replace(os.sep, "/")
        return Place(path, line, source.function, inside is not None)

    def frames(self, finding: Finding) -> list[SourceLocation]:
        """The line to show for a finding, then its callers.

        The first is the innermost line that is in the repository: what traced it may be a library.
        Where there is none, the innermost of all. Empty where the module does not say.
        """
        frames = ([finding.source] if finding.source else []) + list(finding.stack)
        named = [frame for frame in frames if frame.file]
        first = next((n for n, frame in enumerate(named) if self.place(frame).in_repository), 0)
        return named[first:]

    def places(self, finding: Finding) -> list[Place]:
        """Where the :meth:`frames` of a finding are."""
        return list(map(self.place, self.frames(finding)))

    def relative(self, path: Path) -> str | None:
        """``path`` relative to the root, with ``/``; ``None`` where it is not below it."""
        with contextlib.suppress(*UNREADABLE):
            resolved = path.resolve()
            if resolved.is_relative_to(self._top):
                return resolved.relative_to(self._top).as_posix()
        return None

    @cached_property
    def _top(self) -> Path:
        return self.root.resolve()

    @cached_property
    def _inside(self) -> Callable[[str, int], str | None]:
        return cache(self._look_up)  # many findings are of few lines

    def _look_up(self, file: str, line: int) -> str | None:
        parts = PurePosixPath(file).parts
        if _INSTALLED.intersection(parts) or ".." in parts or len(parts) > _MOST_PARTS:
            return None
        relative = self.relative(Path(file) if Path(file).is_absolute() else self.root / file)
        if relative is not None and (Path(file).is_absolute() or self._has(relative, line)):
            return relative
        ends = (PurePosixPath(*parts[n:]) for n in range(1, len(parts) - 1))
        found = (self.relative(self.root / end) for end in ends if self._has(str(end), line))
        return next(found, None)

    def _has(self, path: str, line: int) -> bool:
        """Whether the repository has such a file, and that has ``line`` lines."""
        return self.relative(self.root / path) is not None and line <= self._line_count(path)

    @cached_property
    def _line_count(self) -> Callable[[str], int]:
        return cache(self._count_lines)

    def _count_lines(self, path: str) -> int:
        with contextlib.suppress(*UNREADABLE):
            file = self.root / path
            if file.is_file() and file.stat().st_size <= _MOST_SOURCE_BYTES:
                text = file.read_bytes()
                return text.count(b"\n") + (not text.endswith(b"\n"))
        return 0


def shown(source: SourceLocation) -> str:
    """``source`` for a reader in the working directory: a short path, the line, the function."""
    path = Path(source.file)
    if path.is_absolute():
        with contextlib.suppress(OSError):  # the working directory may be gone
            path = Path(min(os.path.relpath(path), str(path), key=len))
    name = str(path)
    if "site-packages/" in name:
        name = name.rpartition("site-packages/")[2]
    function = f" in {source.function}" if source.function else ""
    return f"{name}:{source.line}{function}"


_HEADER = re.compile(r"(?:ENTRY )?%?([A-Za-z_][\w.-]*+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s++(?:ROOT )?%?([\w.-]++) = ")


class DumpLines:
    """Finds instructions in the text of dumps; each file is read once."""

    def __init__(self) -> None:
        self._lines: dict[Path, dict[tuple[str, str], int]] = {}

    def line_of(self, path: Path, computation: str, instruction: str) -> int | None:
        """The line of an instruction, counted from 1; ``None`` where ``path`` is no plain text, is
        larger than :data:`MOST_DUMP_BYTES`, or does not show it."""
        if path not in self._lines:
            self._lines[path] = dict(_statements(path))
        return self._lines[path].get((computation, instruction))


def _statements(path: Path) -> Iterator[tuple[tuple[str, str], int]]:
    """Computation and instruction, and the line it stands on."""
    computation = ""
    with contextlib.suppress(*UNREADABLE):
        if path.suffix not in (".txt", ".hlo") or not path.is_file():
            return
        if path.stat().st_size > MOST_DUMP_BYTES:
            return
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if statement := _INSTRUCTION.match(line):
                    yield (computation, statement[1]), number
                elif header := _HEADER.match(line):
                    computation = header[1]
