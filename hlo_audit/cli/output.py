"""What commands write: to the terminal, to files, and what went wrong on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.errors import HloAuditError
from hlo_audit.whole_file import write_text

if TYPE_CHECKING:
    from rich.console import Console


_LONGEST_LINE = 2_000
"""Of what is said on standard error; a name in a damaged dump can be a megabyte."""


def drop_output() -> None:
    """Nobody reads standard output any more: what is still to come must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: HloAuditError) -> None:
    """Say what went wrong on standard error, with what the compiler wrote last."""
    say(f"hlo-audit: error: {error}")
    for line in error.log:
        say(f"  | {line}")


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
