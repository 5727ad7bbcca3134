"""``hlo-audit report``: one HTML page that shows all there is to see of some programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.applied import read_applied
from hlo_audit.cli.compared import suppressor_of
from hlo_audit.cli.judged import exit_code_of, judged, read_asked
from hlo_audit.cli.options import (
    GateOptions,
    How,
    OutputOptions,
    RuleChoice,
    completes,
    examining,
    takes_config,
    takes_gate,
    takes_how,
    takes_rule_choice,
)
from hlo_audit.cli.output import put, say
from hlo_audit.cli.paths import OUTPUT_FILE
from hlo_audit.cli.planned import plan, reach_of
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.config import Config
    from hlo_audit.program import Subject
    from hlo_audit.program_audit import ProgramAudit


@click.command()
@click.argument(
    "programs",
    nargs=-1,
    metavar="[PROGRAM]...",
    shell_complete=completes("programs", files=True),
)
@takes_how
@takes_rule_choice
@takes_gate(compiles=True)
@takes_config
@click.option(
    "--output",
    "-o",
    type=OUTPUT_FILE,
    help="Write the page to this file.  [default: standard output, where that is no terminal]",
)
def report(
    programs: tuple[str, ...],
    how: How,
    choice: RuleChoice,
    gate: GateOptions,
    config: Config,
    output: Path | None,
) -> None:
    """Write one HTML page about programs, to look at and to pass on.

    It holds the verdict, the findings with their source lines and HLO, the counts from pass to
    pass, the auto and the explicit mode of each program side by side, entry layouts, and the fixes.
    It needs no network and no other file, and says what it leaves out.

    Programs, rules, and what they are held against are those of "hlo-audit check", with the same
    exit codes. Two programs alone are compared, whatever they are. With no PROGRAM, they are those
    of the config (see "hlo-audit init"), which must name some.
    """
    from hlo_audit.examination import examine_subjects
    from hlo_audit.report import environment
    from hlo_audit.report.html import render_html
    from hlo_audit.report.html.overview import damage_said
    from hlo_audit.report.sources import Repository
    from hlo_audit.report.text import verdict
    from hlo_audit.rules import ALL_RULES

    if not programs and not config.programs:
        raise UsageError(
            "no program is named, neither here nor in a config",
            hint="name one or a dump, as in: hlo-audit report lm-head -o report.html",
        )
    if output is None and sys.stdout.isatty():
        raise UsageError("a page is not for a terminal", hint="write it to a file: -o report.html")
    applied = read_applied(config, choice)
    elsewhere = OutputOptions(formats=(), outputs=(), verbose=False)  # the page alone is written
    asked = read_asked(config, gate, elsewhere, applied=applied.rules, quiet=how.quiet)
    subjects = plan(programs, how, config)
    asked.compared.refuse(subjects)
    asked.refuse_overwriting(programs, output)
    with examining(subjects, how) as (compiles, on_read):
        examined, pairs = examine_subjects(
            subjects, applied.rules, applied.options, compiles, on_read=on_read
        )

    def audit(subjects: Sequence[Subject]) -> list[ProgramAudit]:
        return [one for group in applied.audited(subjects, how) for one in group]

    reach = reach_of(programs, how, config)
    suppressor = suppressor_of(config, ALL_RULES, Path.cwd())
    audits = suppressor.apply(applied.named([one.audit for one in examined]))
    found = judged(
        asked,
        audits,
        environment(),
        comparison=asked.compared.against(
            audits, subjects, audit, whole=reach.whole, quiet=how.quiet
        ),
        suppressions=suppressor.uses(audits, whole=reach.all_used),
        all_there=reach.all_used,
    )
    if any(one.error is None for one in audits):  # else the errors have said it all
        put(render_html(found, examined, pairs, Repository.around(Path.cwd())), output)
        if output is not None and not how.quiet:
            say(f"wrote {output}")
    for one, named in zip(examined, audits, strict=True):
        if warning := damage_said(named.label, one):
            say(f"hlo-audit: warning: {warning}")
    if output is not None and not found.gate.passed:
        click.echo(verdict(found).plain, err=True)
    sys.exit(exit_code_of(asked, found))
