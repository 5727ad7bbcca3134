"""What ``check`` and ``merge`` do alike: judge audits by what the options ask, and report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hlo_audit.cli.compared import Compared, plan_comparison
from hlo_audit.cli.options import GateOptions, OutputOptions, read_pairs
from hlo_audit.cli.output import complain_of, console, put, refuse_unwritable
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.budget import Budget
    from hlo_audit.config import Config
    from hlo_audit.gate import Comparison
    from hlo_audit.program_audit import ProgramAudit
    from hlo_audit.report import Report, ShardRecord
    from hlo_audit.report.formats import Destination
    from hlo_audit.rule import Rule
    from hlo_audit.suppressions import Use


@dataclass(frozen=True)
class Asked:
    """What the options say, over the config, of the gate and of the report.

    Attributes:
        limits: the budgets of the command line.
        compared: what programs are compared with.
        show_all: whether notes are listed.
        quiet: whether nothing is said on standard error of what is done.
    """

    config: Config
    limits: tuple[Budget, ...]
    compared: Compared
    strict: bool
    exit_zero: bool
    destinations: Sequence[Destination]
    show_all: bool
    quiet: bool

    def refuse_overwriting(self, names: Sequence[str], output: Path | None = None) -> None:
        """Refuse to write a report over what is read, or where it cannot be.

        Args:
            names: of the programs or files that are read.
            output: what is written beside the destinations.

        Raises:
            UsageError: names the file.
        """
        paths = (self.compared.baseline_path, self.config.path)
        inputs = [*names, *(str(path) for path in paths if path)]
        for path in (output, *(one.path for one in self.destinations)):
            if path is None:
                continue
            if any(_is_input(path, name) for name in inputs):
                raise UsageError(f"{path} is what is read", hint="write the report to another file")
            refuse_unwritable(path)

    def budgets_of(self, audit: ProgramAudit) -> Sequence[Budget]:
        """The budgets of a program."""
        from hlo_audit.budget import override

        return override(self.config.budgets_of(self.config.program(audit.program)), self.limits)


def read_asked(
    config: Config,
    gate: GateOptions,
    shown: OutputOptions,
    *,
    applied: Sequence[Rule] | None,
    quiet: bool,
) -> Asked:
    """Read the options of the gate and of the report.

    Args:
        applied: the rules that a budget may name; ``None`` for all.

    Raises:
        UsageError: for what cannot be; all that can be told before programs are audited is.
    """
    from hlo_audit.budget import override
    from hlo_audit.gate import refuse_relative
    from hlo_audit.report.formats import plan_outputs
    from hlo_audit.rules import ALL_RULES

    limits = _read_budgets(gate.budgets, ALL_RULES)
    for budget in limits:
        if all(rule.code != budget.rule for rule in (ALL_RULES if applied is None else applied)):
            message = f"--max {budget.rule}: that rule is not applied"
            raise UsageError(message, hint="select it, or drop --max")
    strict = config.strict if gate.strict is None else gate.strict
    compared = plan_comparison(
        config,
        baseline=gate.baseline,
        update=gate.update_baseline,
        against=gate.against,
        strict=strict,
    )
    if not compared.has_baseline:
        refuse_relative(
            budget
            for program in (None, *config.programs)
            for budget in override(config.budgets_of(program), limits)
        )
    destinations = plan_outputs(shown.formats, shown.outputs, quiet=quiet)
    return Asked(
        config, limits, compared, strict, gate.exit_zero, destinations, shown.verbose, quiet
    )


def conclude(asked: Asked, report: Report) -> NoReturn:
    """Write the reports, and exit."""
    exit_code = exit_code_of(asked, report)
    _render(report, asked.destinations, show_all=asked.show_all, exit_code=exit_code)
    sys.exit(exit_code)


def judged(
    asked: Asked,
    audits: Sequence[ProgramAudit],
    environment: Mapping[str, str | None],
    *,
    comparison: Comparison | None,
    suppressions: Sequence[Use],
    all_there: bool,
    shard: ShardRecord | None = None,
) -> Report:
    """Hold audits against the gate, and say on standard error which programs have none.

    Args:
        audits: with their variants, less what is suppressed.
        environment: the versions that they were made with.
        comparison: with what was found before.
        suppressions: what each was good for.
        all_there: whether one that was good for nothing can be told.
        shard: which one this is the report of.
    """
    from hlo_audit.gate import judge
    from hlo_audit.reference import read_references
    from hlo_audit.report import Report
    from hlo_audit.suppressions import notices_of

    gate = judge(audits, asked.budgets_of, read_references(), comparison)
    whole = all_there and all(audit.error is None for audit in audits)
    unused = notices_of(suppressions, whole=whole, strict=asked.strict)
    notices = (*gate.notices, *asked.compared.notices, *unused)
    report = Report(audits, replace(gate, notices=notices), environment, shard)
    complain_of((one.program, one.label, one.error) for one in audits)
    return report


def exit_code_of(asked: Asked, report: Report) -> int:
    """That of the report; with ``--exit-zero`` a gate that failed is none."""
    failed = any(audit.error is not None for audit in report.programs)
    return 0 if asked.exit_zero and not failed else report.exit_code


def _read_budgets(texts: Sequence[str], rules: Sequence[Rule]) -> tuple[Budget, ...]:
    from hlo_audit.budget import read_budgets

    # A name may be there several times, for findings and for bytes.
    pairs = [pair for text in texts for pair in read_pairs("--max", [text]).items()]
    for name, value in pairs:
        try:
            read_budgets([(name, value)], rules)
        except UsageError as error:
            raise UsageError(f"--max {name}={value}: {error.message}", hint=error.hint) from None
    return read_budgets(pairs, rules)


def _is_input(output: Path, program: str) -> bool:
    source = Path(program)
    return source.exists() and output.exists() and output.samefile(source)


def _render(
    report: Report, destinations: Sequence[Destination], *, show_all: bool, exit_code: int
) -> None:
    from hlo_audit.report.formats import render
    from hlo_audit.report.sources import Repository

    audited = any(audit.error is None for audit in report.programs)
    for destination in destinations:
        if destination.format == "text" and destination.path is None:
            from hlo_audit.report.text import print_report

            if audited:  # else the errors have said it all
                print_report(console(), report, show_all=show_all)
        else:
            repository = Repository.around(Path.cwd())
            text = render(
                destination.format, report, repository, show_all=show_all, exit_code=exit_code
            )
            put(text, destination.path)
    if not report.gate.passed and all(destination.path for destination in destinations):
        from hlo_audit.report.text import verdict

        click.echo(verdict(report).plain, err=True)
