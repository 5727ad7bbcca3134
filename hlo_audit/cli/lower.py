"""``hlo-audit lower``: keep what the compiler writes."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hlo_audit.cli.options import How, compiling, completes, find_programs, takes_how
from hlo_audit.cli.output import complain_of
from hlo_audit.cli.paths import FOLDER
from hlo_audit.errors import HloAuditError, UsageError


@click.command()
@click.argument("program", shell_complete=completes("programs"))
@takes_how
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=FOLDER,
    help="Folder for the dumps; each program gets one in it.",
)
def lower(program: str, how: How, folder: Path) -> None:
    """Compile a model and keep the dump of every pass."""
    from hlo_audit.compiler import compile_programs
    from hlo_audit.program import Lowering

    subjects = find_programs((program,), how)
    lowerings = [subject for subject in subjects if isinstance(subject, Lowering)]
    if len(lowerings) != len(subjects):
        raise UsageError(f"{program} is a dump already", hint="give a model to compile")
    with compiling(lowerings, how) as compiles:
        outcomes = compile_programs(
            lowerings,
            into=folder,
            jobs=compiles.jobs,
            timeout_seconds=compiles.timeout_seconds,
            cache=compiles.cache,
            on_done=compiles.on_compiled,
        )
    errors: list[HloAuditError] = []
    failed: list[tuple[str, str, HloAuditError | None]] = []
    for lowering, outcome in zip(lowerings, outcomes, strict=True):
        if isinstance(outcome, HloAuditError):
            errors.append(outcome)
            failed.append((lowering.program, lowering.label, outcome))
        else:
            click.echo(outcome.folder)
    complain_of(failed)
    if errors:
        sys.exit(max(error.exit_code for error in errors))
