"""``hlo-audit passes``: what each pass does, and the way of one instruction through them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.options import (
    How,
    compiling,
    completes,
    find_programs,
    takes_how,
)
from hlo_audit.cli.output import complain_of, print_out, put
from hlo_audit.cli.paths import OUTPUT_FILE
from hlo_audit.errors import HloAuditError, UsageError, unknown_name

if TYPE_CHECKING:
    from hlo_audit.history import History
    from hlo_audit.report.passes import Followed


@click.command()
@click.argument("program", shell_complete=completes("programs", files=True))
@takes_how
@click.option(
    "--op",
    "opcodes",
    multiple=True,
    metavar="OPCODE[,...]",
    help="Count this opcode; may be repeated.  "
    "[default: transpose,copy,all-reduce,reduce-scatter,all-gather]",
)
@click.option(
    "--select",
    multiple=True,
    metavar="RULE",
    shell_complete=completes("rules"),
    help="Count this rule; may be repeated.  [default: all]",
)
@click.option("--all", "show_all", is_flag=True, help="Show every snapshot.")
@click.option(
    "--finding",
    metavar="FINGERPRINT|N",
    help="Follow the instruction of this finding, by its fingerprint or its number in the list.",
)
@click.option(
    "--instruction",
    metavar="NAME",
    help="Follow this instruction, from the last snapshot that has it.",
)
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--output", "-o", type=OUTPUT_FILE, help="Write the report to this file; - is standard output."
)
def passes(
    program: str,
    how: How,
    opcodes: tuple[str, ...],
    select: tuple[str, ...],
    show_all: bool,
    finding: str | None,
    instruction: str | None,
    format_: str,
    output: Path | None,
) -> None:
    """Show what each compiler pass does to what the rules count.

    PROGRAM is compiled, or the folder of a dump that holds its passes. Every snapshot is counted;
    those in which a count changes are listed. What a later pass takes back is no fault of the pass
    that did it, and is marked. With --finding or --instruction the way of one instruction through
    the passes is told instead.
    """
    from hlo_audit.history import read_histories
    from hlo_audit.program_audit import tell_apart
    from hlo_audit.rule import select_rules
    from hlo_audit.rules import ALL_RULES
    from hlo_audit.timeline import DEFAULT_OPCODES

    if finding is not None and instruction is not None:
        raise UsageError("--finding and --instruction exclude each other")
    rules = select_rules(ALL_RULES, select)
    chosen = [name for text in opcodes for name in text.split(",") if name]
    subjects = find_programs((program,), how)
    with compiling(subjects, how) as compiles:
        histories = read_histories(subjects, rules, how=compiles, opcodes=chosen or DEFAULT_OPCODES)
    told_apart = tell_apart([history.audit for history in histories])
    complain_of((audit.program, audit.label, audit.error) for audit in told_apart)
    errors = [audit.error for audit in told_apart if audit.error is not None]
    followed = _followed(histories, finding, instruction)
    _refuse_misspelt(chosen, histories)
    labels = [audit.label for audit in told_apart]
    if format_ == "json":
        from hlo_audit.report.passes_json import render_passes_json

        put(render_passes_json(histories, labels, followed), output)
    elif len(errors) < len(histories) or not errors:
        from hlo_audit.report.passes_text import print_passes

        print_out(
            lambda console: print_passes(console, histories, labels, followed, show_all=show_all),
            output,
        )
    if errors:
        sys.exit(max(error.exit_code for error in errors))


def _refuse_misspelt(opcodes: Sequence[str], histories: Sequence[History]) -> None:
    """Refuse an opcode that HLO does not have, unless a snapshot has it: a newer compiler's.

    Raises:
        UsageError: names it.
    """
    from hlo_audit.hlo.opcodes import OPCODES, is_opcode

    timelines = [history.timeline for history in histories if history.timeline is not None]
    counted = {
        series.name
        for timeline in timelines
        for series in timeline.series
        if series.kind == "opcode" and series.most
    }
    for name in opcodes if timelines else ():
        if name not in counted and not is_opcode(name):
            raise unknown_name("opcode", name, sorted(OPCODES))


def _followed(
    histories: Sequence[History], finding: str | None, instruction: str | None
) -> list[Followed] | None:
    """The ways asked for, one for each program at the most; ``None`` where none is asked for."""
    from hlo_audit.report.passes import follow_finding, follow_instruction

    if finding is None and instruction is None:
        return None
    followed: list[Followed] = []
    failures: list[HloAuditError] = []
    for index, history in enumerate(histories):
        if history.timeline is None:
            continue
        try:
            if finding is not None:
                followed.append(follow_finding(index, history, finding))
            else:
                followed.append(follow_instruction(index, history, instruction or ""))
        except UsageError as error:
            failures.append(error)
    if not followed and failures:
        raise failures[0]
    return followed
