"""A line of Python in the terminal, opened by a click where the terminal can (OSC 8 links)."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

from rich.style import Style
from rich.text import Text

from hlo_audit.hlo import SourceLocation
from hlo_audit.report.sources import UNREADABLE, Repository, shown
from hlo_audit.report.wording import plain


def located(source: SourceLocation, style: str = "dim") -> Text:
    """``source`` as :func:`~hlo_audit.report.sources.shown` writes it, linked where it is a Python
    file of the repository around the working directory.

    A dump names what files it likes, and a click may run what it opens: no other file is linked.
    rich writes links to terminals alone, and terminals without them show the plain text.
    """
    text = Text(plain(shown(source)), style)
    with contextlib.suppress(*UNREADABLE):
        if uri := _uri(source.file, Path.cwd()):
            # The line as a fragment: editors and terminals that know it go there, others drop it.
            text.stylize(Style(link=f"{uri}#{source.line}"))
    return text


@cache
def _uri(file: str, folder: Path) -> str | None:
    repository = _repository(folder)
    relative = repository.relative(folder / file)
    if relative is None:
        return None
    path = repository.root / relative
    return path.as_uri() if path.suffix == ".py" and path.is_file() else None


_repository = cache(Repository.around)  # many findings are of few lines
