"""``hlo-audit diff``: two programs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.options import (
    How,
    compiling,
    completes,
    takes_config,
    takes_how,
)
from hlo_audit.cli.output import print_out, put
from hlo_audit.cli.paths import OUTPUT_FILE
from hlo_audit.cli.planned import plan
from hlo_audit.errors import EXIT_GATE_FAILED

if TYPE_CHECKING:
    from hlo_audit.config import Config


@click.command()
@click.argument(
    "programs",
    nargs=-1,
    required=True,
    metavar="PROGRAM [PROGRAM]",
    shell_complete=completes("programs", files=True),
)
@takes_how
@takes_config
@click.option(
    "--module", metavar="NAME", help="The module to take from a dump folder that holds several."
)
@click.option("--force", is_flag=True, help="Compare what is not comparable too.")
@click.option("--exit-code", is_flag=True, help="Exit 1 where anything differs.")
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--output", "-o", type=OUTPUT_FILE, help="Write the diff to this file; - is standard output."
)
def diff(
    programs: tuple[str, ...],
    how: How,
    config: Config,
    module: str | None,
    force: bool,
    exit_code: bool,
    format_: str,
    output: Path | None,
) -> None:
    """Say what differs between two programs, and from which pass on.

    One model or function: its auto against its explicit mode, or two of its layouts in one --mode.
    Two dumps or files: the first against the second. Programs that take other arguments, run on
    other chips or under other flags, or have another number of while loops are not comparable:
    then it says why.
    """
    from hlo_audit.diff import diff_subjects
    from hlo_audit.report import environment
    from hlo_audit.rules import ALL_RULES

    subjects = plan(programs, how, config)
    with compiling(subjects, how) as compiles:
        found = diff_subjects(
            subjects, ALL_RULES, config.options, compiles, module=module, force=force
        )
    if format_ == "json":
        from hlo_audit.report.diff_json import render_diff_json

        put(render_diff_json(found, environment()), output)
    else:
        from hlo_audit.report.diff_text import print_diff

        print_out(lambda console: print_diff(console, found), output)
    if exit_code and not found.identical:
        sys.exit(EXIT_GATE_FAILED)
