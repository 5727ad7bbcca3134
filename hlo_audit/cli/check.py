"""``hlo-audit check``: apply the rules, judge, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.applied import read_applied
from hlo_audit.cli.compared import suppressor_of
from hlo_audit.cli.judged import Asked, conclude, judged, read_asked
from hlo_audit.cli.options import (
    GateOptions,
    How,
    OutputOptions,
    RuleChoice,
    completes,
    takes_config,
    takes_gate,
    takes_how,
    takes_outputs,
    takes_rule_choice,
)
from hlo_audit.cli.paths import INPUT_FILE
from hlo_audit.cli.planned import plan, reach_of
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.config import Config
    from hlo_audit.program import Subject
    from hlo_audit.program_audit import ProgramAudit
    from hlo_audit.shard import Part, Shard


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
@click.option(
    "--introduced-by",
    is_flag=True,
    help="Look through all passes for the one that brought each finding.",
)
@takes_config
@click.option(
    "--shard",
    "shard_text",
    metavar="I/N",
    help="Audit one of N parts of the programs, such as 2/8; see hlo-audit merge.",
)
@click.option(
    "--timings",
    type=INPUT_FILE,
    help="Part the programs by how long they took in this JSON report; the same for all shards.",
)
@click.option(
    "--dask",
    metavar="ADDRESS",
    help="Compile on the workers of this dask scheduler, such as tcp://10.0.0.1:8786.",
)
@takes_outputs
def check(
    programs: tuple[str, ...],
    how: How,
    choice: RuleChoice,
    introduced_by: bool,
    config: Config,
    shard_text: str | None,
    timings: Path | None,
    dask: str | None,
    gate: GateOptions,
    shown: OutputOptions,
) -> None:
    """Apply the rules to programs, and gate on what they find.

    With no PROGRAM, those of the config (see "hlo-audit init"), or else the reference models in all
    their layouts. These are held against the counts that this version knows of them, unless there
    is a baseline or a budget; other programs without one are only reported.
    """
    from hlo_audit.report import ShardRecord, environment
    from hlo_audit.rules import ALL_RULES
    from hlo_audit.shard import parse_shard

    if dask == "":
        raise UsageError("--dask is empty", hint="is a variable not set?")
    if dask is not None and how.jobs is not None:
        raise UsageError("--jobs is for this machine", hint="the workers of dask have threads")
    applied = read_applied(config, choice)
    asked = read_asked(config, gate, shown, applied=applied.rules, quiet=how.quiet)
    if dask is not None and asked.compared.revision is not None:
        raise UsageError(
            f"--against {gate.against}: the workers of dask do not have the code of a revision",
            hint="compare with a report of it: --against PATH",
        )
    subjects = plan(programs, how, config)
    asked.refuse_overwriting([*programs, *([str(timings)] if timings else [])])
    reach = reach_of(programs, how, config)
    part: Part | None = None
    if shard_text is not None:
        ignored = [[program.name, sorted(program.ignore)] for program in config.programs]
        audited_for = [
            [rule.code for rule in applied.rules],
            applied.options,
            ignored,
            introduced_by,
        ]
        part = _part_of(subjects, parse_shard(shard_text), timings, audited_for, asked)
        subjects = [subjects[position] for position in part.positions]
    elif timings is not None:
        raise UsageError("--timings is for --shard", hint="give --shard I/N, or drop it")
    asked.compared.refuse(subjects)

    def audit(subjects: Sequence[Subject]) -> list[list[ProgramAudit]]:
        return applied.audited(subjects, how, introduced_by=introduced_by, dask=dask)

    def audit_others(subjects: Sequence[Subject]) -> list[ProgramAudit]:
        return [one for group in audit(subjects) for one in group]

    suppressor = suppressor_of(config, ALL_RULES, Path.cwd())
    groups = audit(subjects)
    audits = suppressor.apply(one for group in groups for one in group)
    comparison = asked.compared.against(
        audits, subjects, audit_others, whole=reach.whole and part is None, quiet=how.quiet
    )
    suppressions = suppressor.uses(audits, whole=reach.all_used)
    record = None
    if part is not None:
        positions = zip(part.positions, groups, strict=True)
        placed = tuple(position for position, group in positions for _ in group)
        record = ShardRecord(part, placed, reach.whole, tuple(suppressions))
    report = judged(
        asked,
        audits,
        environment(),
        comparison=comparison,
        suppressions=suppressions,
        all_there=reach.all_used and part is None,
        shard=record,
    )
    conclude(asked, report)


def _part_of(
    subjects: Sequence[Subject],
    shard: Shard,
    timings: Path | None,
    audited_for: object,
    asked: Asked,
) -> Part:
    """What a shard has of the programs.

    Raises:
        UsageError: for what no shard can do alone.
    """
    from hlo_audit.report.sources import Repository
    from hlo_audit.report.stored import read_times
    from hlo_audit.shard import take_part

    if asked.compared.update:
        raise UsageError(
            "--update-baseline: a shard knows a part of the programs only",
            hint="give it to hlo-audit merge, which knows all",
        )
    if asked.compared.revision is not None:
        raise UsageError(
            f"--against {asked.compared.revision.name}: shards are not compared with a revision",
            hint="merge the shards of that revision, and give merge that report: --against PATH",
        )
    top = Repository.around(Path.cwd()).root
    times = read_times(timings, top) if timings is not None else ()
    part = take_part(subjects, shard, top=top, asked=audited_for, times=times)
    if not asked.quiet:
        mine, all_ = len(part.positions), len(subjects)
        text = f"{mine} of {all_} programs" if mine else f"nothing to do: it has none of {all_}"
        click.echo(f"shard {shard}: {text}", err=True)
    return part
