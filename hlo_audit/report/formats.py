"""The formats of a report, and what goes where: to the terminal, or into which file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.report import Report
from hlo_audit.report.sources import Repository

Format = Literal["text", "json", "sarif", "junit", "markdown", "github"]

FORMATS: tuple[Format, ...] = get_args(Format)

_SHARE_THE_TERMINAL: set[Format] = {"text", "github"}
"""Lines to be read, or to be picked out of a log; the others are documents."""

_NAMED = re.compile(r"([\w.-]+)=(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Destination:
    """A format, and the file it goes to; ``None`` is the terminal."""

    format: Format
    path: Path | None


def plan_outputs(
    formats: Sequence[Format], outputs: Sequence[str], *, quiet: bool = False
) -> list[Destination]:
    """What each ``--format`` and each ``--output`` of a command asks for together.

    An output ``FORMAT=PATH`` says its format. A bare ``PATH`` takes the one of ``--format``; text,
    where none is given. A format that goes to no file goes to the terminal; where all go to files
    that say their format, text does, unless ``quiet``. The path ``-`` is the terminal.

    Args:
        formats: as given, in any order; none for text.
        outputs: as given, each ``PATH`` or ``FORMAT=PATH``.
        quiet: whether the terminal shows nothing that is not asked for.

    Raises:
        UsageError: where it is not clear which format a file is to have, two are to go to one file,
            or two documents are to go to the terminal.
    """
    asked = list(dict.fromkeys(formats))
    files: list[Destination] = []
    to_terminal: list[Format] = []
    bare: list[str] = []
    for output in outputs:
        if not output:
            raise UsageError("--output is empty", hint="is a variable not set?")
        named = _NAMED.fullmatch(output)
        if named is None:
            bare.append(output)
            continue
        format_ = next((known for known in FORMATS if known == named[1]), None)
        if format_ is None:
            error = unknown_name("format", named[1], FORMATS)
            raise UsageError(
                f"--output {output}: {error.message}",
                hint=f"{error.hint}; or ./{output} for a file of that name",
            )
        if not named[2]:
            raise UsageError(f"--output {output}: no file is named", hint="is a variable not set?")
        if named[2] == "-":
            to_terminal.append(format_)
        else:
            files.append(Destination(format_, Path(named[2])))
    if len(bare) > 1:
        raise UsageError(
            f"--output {bare[0]} and --output {bare[1]} do not say their formats",
            hint="write --output FORMAT=PATH",
        )
    if bare and len(asked) > 1:
        raise UsageError(
            f"--output {bare[0]}: which of the formats {', '.join(asked)}?",
            hint=f"write --output {asked[-1]}={bare[0]}",
        )
    in_files = {destination.format for destination in files}
    if bare and bare[0] == "-":
        to_terminal.append(asked[0] if asked else "text")
    elif bare:
        files.append(Destination(asked[0] if asked else "text", Path(bare[0])))
    else:
        to_terminal += [format_ for format_ in asked if format_ not in in_files]
        if not to_terminal and not (quiet and files):
            to_terminal = ["text"]
    shown = list(dict.fromkeys(to_terminal))
    _refuse_two_in_one(files, shown)
    return [*(Destination(format_, None) for format_ in shown), *files]


def _refuse_two_in_one(files: Sequence[Destination], shown: Sequence[Format]) -> None:
    paths: dict[Path, Format] = {}
    for destination in files:
        assert destination.path is not None
        path = Path(destination.path.absolute())
        if path in paths:
            raise UsageError(
                f"--output {destination.path} would hold both {paths[path]} and "
                f"{destination.format}",
                hint="name two files",
            )
        paths[path] = destination.format
    documents = [format_ for format_ in shown if format_ not in _SHARE_THE_TERMINAL]
    if documents and len(shown) > 1:
        other = next(format_ for format_ in shown if format_ != documents[0])
        raise UsageError(
            f"the formats {other} and {documents[0]} cannot both go to the terminal",
            hint=f"write --output {documents[0]}=PATH",
        )


def render(
    format_: Format,
    report: Report,
    repository: Repository,
    *,
    show_all: bool = False,
    exit_code: int | None = None,
) -> str:
    """The report as text in one of the :data:`FORMATS`.

    Args:
        repository: what the Python lines are relative to.
        show_all: lists notes too, where a format does not list all findings.
        exit_code: of the command, where it is another than the report's.
    """
    match format_:
        case "text":
            return as_text(report, show_all=show_all)
        case "json":
            from hlo_audit.report.json import render_json

            return render_json(report)
        case "sarif":
            from hlo_audit.report.sarif import render_sarif

            return render_sarif(report, repository, show_all=show_all, exit_code=exit_code)
        case "junit":
            from hlo_audit.report.junit import render_junit

            return render_junit(report, repository, show_all=show_all)
        case "markdown":
            from hlo_audit.report.markdown import render_markdown

            return render_markdown(report, repository, show_all=show_all)
        case "github":
            from hlo_audit.report.github import render_github

            return render_github(report, repository, show_all=show_all)


def as_text(report: Report, *, show_all: bool = False) -> str:
    """The report as it stands on a terminal of 100 columns, without colours."""
    from hlo_audit.report.console import plain_console
    from hlo_audit.report.text import print_report

    console = plain_console()
    with console.capture() as capture:
        print_report(console, report, show_all=show_all)
    return capture.get()
