"""What commands write: to the terminal, to files, and what went wrong on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.errors import HloAuditError, UsageError
from hlo_audit.whole_file import write_text

if TYPE_CHECKING:
    from rich.console import Console


_LONGEST_LINE = 2_000
"""Of what is said on standard error; a name in a damaged dump can be a megabyte."""


def drop_output() -> None:
    """Nobody reads standard output any more: what is still to come must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: HloAuditError, of: str = "") -> None:
    """Say what went wrong on standard error, with what the compiler wrote last.

    Args:
        of: the program; an error that names it does so once.
    """
    say(f"hlo-audit: error: {of}: {error}" if of else f"hlo-audit: error: {error}")
    for line in error.log:
        say(f"  | {line}")


def complain_of(outcomes: Iterable[tuple[str, str, HloAuditError | None]]) -> None:
    """Say the errors of programs, each once.

    Args:
        outcomes: for each program its name, what tells it from others, and its error, if any.
    """
    alike: dict[str, dict[str, tuple[str, HloAuditError]]] = {}
    for program, label, error in outcomes:
        if error is not None:
            alike.setdefault(str(error), {}).setdefault(label, (program, error))
    for message, failed in alike.items():
        label, (program, error) = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        complain(error, of="" if program in message else f"{label}{more}")


def say(text: str) -> None:
    """Write a line to standard error, with whatever stands in it made printable, and cut."""
    from hlo_audit.report.wording import clip, plain

    click.echo(clip(plain(text), _LONGEST_LINE), err=True)


def print_out(print_to: Callable[[Console], None], output: Path | None) -> None:
    """Print to the terminal, or plainly to a file."""
    from hlo_audit.report.console import plain_console

    if output is None:
        print_to(console())
        return
    page = plain_console()
    with page.capture() as capture:
        print_to(page)
    write_text(output, capture.get())


def refuse_unwritable(path: Path | None) -> None:
    """Refuse a file that cannot be written whatever is in it, before the work for it is done.

    Raises:
        UsageError: for a folder, and for a file in one that is not there.
    """
    if path is None:
        return
    with contextlib.suppress(OSError, ValueError):  # what is wrong besides is told as it is written
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder", hint="name a file in it")
        if not path.parent.exists():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")


def put(text: str, output: Path | None) -> None:
    """Write a text to standard output, or to a file."""
    if output is None:
        try:
            click.echo(text, nl=False)
        except BrokenPipeError:
            drop_output()
    else:
        write_text(output, text)


def console() -> Console:
    """The terminal."""
    from hlo_audit.report.console import TidyConsole

    class ReportConsole(TidyConsole):
        """One that leaves the exit code to the verdict where the reader goes early (``| head``)."""

        def on_broken_pipe(self) -> None:
            drop_output()

    return ReportConsole(highlight=False)
