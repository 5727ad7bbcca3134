"""``hlo-audit lower``: keep what the compiler writes."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hlo_audit.cli.options import How, cache_of, completes, find_programs, progress_of, takes_how
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
    with progress_of(lowerings, how) as on_compiled:
        outcomes = compile_programs(
            lowerings,
            into=folder,
            jobs=how.jobs,
            timeout_seconds=how.timeout_seconds,
            cache=cache_of(how),
            on_done=on_compiled,
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
