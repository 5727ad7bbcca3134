"""``hlo-audit prove``: hold what layout fixes claim."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hlo_audit.cli.options import (
    LAYOUT_OPTION,
    MESH_OPTION,
    TOPOLOGY_OPTION,
    How,
    compiling,
    completes,
    platform_of,
    read_pairs,
    say_platform,
    takes_how_but,
)
from hlo_audit.cli.output import complain_of, print_out, put
from hlo_audit.cli.paths import OUTPUT_FILE
from hlo_audit.errors import EXIT_GATE_FAILED


@click.command()
@click.argument(
    "names",
    nargs=-1,
    metavar="[RULE|MODEL]...",
    shell_complete=completes("rules_and_models"),
)
@takes_how_but(LAYOUT_OPTION, TOPOLOGY_OPTION, MESH_OPTION)
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    metavar="NAME",
    shell_complete=completes("topologies"),
    help="Chips to compile for, such as v5p:2x2x1; may be repeated.  [default: the model's own]",
)
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--output", "-o", type=OUTPUT_FILE, help="Write the report to this file; - is standard output."
)
def prove(
    names: tuple[str, ...],
    how: How,
    topologies: tuple[str, ...],
    format_: str,
    output: Path | None,
) -> None:
    """Compile both sides of each layout fix, run both, and hold what the fix claims.

    RULE is a code or a slug, MODEL the name of a reference model; with neither, every fix of every
    rule. For each topology and mode the report says what each fix clears, what it costs, and which
    is best. Fails where a fix claims a target and does not clear there or costs more without saying
    so, and where it changes numbers more than it says.
    """
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.proof import find_cases, make_plan, prove
    from hlo_audit.report import environment
    from hlo_audit.rules import ALL_RULES

    platform = platform_of(how)
    plan = make_plan(
        find_cases(names, ALL_RULES, ALL_MODELS),
        modes=how.modes,
        settings=read_pairs("--set", how.settings),
        platform=platform,
        topologies=topologies,
        xla_flags=read_pairs("--xla-flag", how.xla_flags),
    )
    say_platform(platform, how)
    with compiling(plan.lowerings, how) as compiles:
        report = prove(plan, ALL_RULES, compiles)
    sides = [(one.fix.model, one.mode, one.fix.name, one.error) for one in report.proofs]
    ran = [(one.comparison, one.error) for one in report.runs]
    sides += [(one.model, one.mode, one.after, error) for one, error in ran]
    complain_of((model, f"{model}/{mode}/{fix}", error) for model, mode, fix, error in sides)
    if format_ == "json":
        from hlo_audit.report.proof_json import render_proof_json

        put(render_proof_json(report, environment()), output)
    elif report.has_compiled:
        from hlo_audit.report.proof_text import print_proof

        print_out(lambda console: print_proof(console, report, environment()), output)
    if report.errors:
        sys.exit(max(error.exit_code for error in report.errors))
    if not report.passed:
        sys.exit(EXIT_GATE_FAILED)
