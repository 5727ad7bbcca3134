"""``hlo-audit merge``: the reports of all shards, judged as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hlo_audit.cli.judged import conclude, judged, read_asked
from hlo_audit.cli.options import (
    GateOptions,
    OutputOptions,
    takes_config,
    takes_gate,
    takes_outputs,
)
from hlo_audit.cli.paths import INPUT_OR_STREAM
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.config import Config
    from hlo_audit.program import Subject


@click.command()
@click.argument(
    "reports",
    nargs=-1,
    required=True,
    metavar="REPORT...",
    type=INPUT_OR_STREAM,
)
@takes_gate(compiles=False)
@takes_config
@takes_outputs
@click.option("--quiet", "-q", is_flag=True, help="Say nothing on standard error of what is done.")
def merge(
    reports: tuple[Path, ...],
    gate: GateOptions,
    config: Config,
    shown: OutputOptions,
    quiet: bool,
) -> None:
    """Join the reports of all shards, and gate on what they find together.

    REPORT is what "hlo-audit check --shard I/N --format json" wrote; "-" reads one from standard
    input. All N must be there, in any order. The config, the baseline and the budgets are those of
    this command. The report is the one that a run without --shard would have made.
    """
    from hlo_audit.report.merge import merge as merge_reports
    from hlo_audit.report.stored import read_stored
    from hlo_audit.rules import ALL_RULES

    if reports.count(Path("-")) > 1:
        raise UsageError("- is given more than once", hint="standard input is one report")
    asked = read_asked(config, gate, shown, applied=None, quiet=quiet)
    asked.refuse_overwriting([str(path) for path in reports])
    if asked.compared.other is not None and asked.compared.known is None:
        raise UsageError(
            f"--against {gate.against} is no JSON report",
            hint="merge compiles nothing: give a report that --format json wrote",
        )
    merged = merge_reports([read_stored(path, ALL_RULES) for path in reports])

    def audit(_: Sequence[Subject]) -> NoReturn:
        raise AssertionError("what is compared with is a report")

    comparison = asked.compared.against(merged.audits, (), audit, whole=merged.whole, quiet=quiet)
    report = judged(
        asked,
        merged.audits,
        merged.environment,
        comparison=comparison,
        suppressions=merged.suppressions,
        all_there=True,
    )
    conclude(asked, report)
