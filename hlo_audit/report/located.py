"""A line of Python in the terminal, opened by a click where the terminal can (OSC 8 links)."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

from rich.style import Style
from rich.text import Text

from hlo_audit.hlo import SourceLocation
from hlo_audit.report.sources import Repository, shown
from hlo_audit.report.wording import plain

_UNREADABLE = (OSError, ValueError, RuntimeError)  # no such path; a NUL in it; a loop of links


def located(source: SourceLocation, style: str = "dim") -> Text:
    """``source`` as :func:`~hlo_audit.report.sources.shown` writes it, linked where it is a Python
    file of the repository around the working directory.

    A dump names what files it likes, and a click may run what it opens: no other file is linked.
    rich writes links to terminals alone, and terminals without them show the plain text.
    """
    text = Text(plain(shown(source)), style)
    with contextlib.suppress(*_UNREADABLE):
        if uri := _uri(source.file, Path.cwd()):
            # The line as a fragment: editors and terminals that know it go there, others drop it.
            text.stylize(Style(link=f"{uri}#{source.line}"))
    return text


@cache
def _uri(file: str, folder: Path) -> str | None:
    path = (folder / file).resolve()
    top = _repository(folder).root.resolve()
    is_ours = path.suffix == ".py" and path.is_relative_to(top) and path.is_file()
    return path.as_uri() if is_ours else None


_repository = cache(Repository.around)  # many findings are of few lines
