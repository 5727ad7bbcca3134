"""The types of parameters that are paths: one place for what no path is, and for what ``-`` is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import click

from hlo_audit.cli.output import refuse_unwritable
from hlo_audit.errors import UsageError

_DASH = "-"


class PathType(click.Path):
    """A path that is not empty: an unset variable would be the working directory else.

    ``-`` is what it is to other tools, standard output or standard input, and never a file; that
    of this name is ``./-``.

    Args:
        kind: what it is for.
        dash: whether ``-`` stands for a stream. Standard output becomes ``None``, as where the
            option is left out; standard input stays ``Path("-")``.
    """

    def __init__(self, kind: Literal["input", "output", "folder"], *, dash: bool) -> None:
        super().__init__(
            path_type=Path,
            file_okay=kind != "folder",
            dir_okay=kind == "folder" or (kind == "input" and dash),
            readable=kind != "output",
        )
        self.kind = kind
        self.dash = dash

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Turn a text into a path.

        Raises:
            UsageError: where it is empty, or ``-`` and that stands for nothing here; for an output
                that cannot be written whatever is in it.
        """
        text = os.fspath(value)
        if not text:
            raise UsageError(f"{_name_of(param)} is empty", hint="is a variable not set?")
        if text == _DASH:
            if not self.dash:
                what = "folder" if self.kind == "folder" else "file"
                raise UsageError(
                    f"{_name_of(param)} is -, which stands for no {what} here",
                    hint=f"./- is a {what} of that name",
                )
            return None if self.kind == "output" else Path(_DASH)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self.kind == "output":
            refuse_unwritable(path)
        # "./-" is a file; its path is written "-" too.
        return Path(text).absolute() if str(path) == _DASH else path


INPUT_FILE = PathType("input", dash=False)
INPUT_OR_STREAM = PathType("input", dash=True)
OUTPUT_FILE = PathType("output", dash=True)
FOLDER = PathType("folder", dash=False)


def _name_of(param: click.Parameter | None) -> str:
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.human_readable_name.removesuffix("...") if param is not None else "a path"
