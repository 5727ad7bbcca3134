"""``hlo-audit check``: apply the rules, judge, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.compared import plan_comparison, suppressor_of
from hlo_audit.cli.options import (
    How,
    cache_of,
    completes,
    progress_of,
    read_count,
    read_pairs,
    takes_config,
    takes_how,
)
from hlo_audit.cli.output import complain, console, put
from hlo_audit.cli.planned import is_narrowed, plan
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.budget import Budget
    from hlo_audit.config import Config
    from hlo_audit.program import Subject
    from hlo_audit.program_audit import ProgramAudit, RuleOptions
    from hlo_audit.report import Report
    from hlo_audit.report.formats import Destination, Format
    from hlo_audit.rule import Rule


@click.command()
@click.argument(
    "programs",
    nargs=-1,
    metavar="[PROGRAM]...",
    shell_complete=completes("programs", files=True),
)
@takes_how
@click.option(
    "--select",
    multiple=True,
    metavar="RULE",
    shell_complete=completes("rules"),
    help="Apply this rule; may be repeated.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="RULE",
    shell_complete=completes("rules"),
    help="Leave it out; may be repeated.",
)
@click.option(
    "--rule-option",
    "rule_options",
    multiple=True,
    metavar="RULE.NAME=N",
    shell_complete=completes("rule_options"),
    help="Set a threshold, such as relayout-copy.min_bytes=0; may be repeated.",
)
@click.option(
    "--max",
    "budgets",
    multiple=True,
    metavar="RULE=LIMIT",
    shell_complete=completes("rule_budgets"),
    help="Fail where a program has more of a rule, notes too: findings (0), bytes (64MiB), or more "
    "than the baseline has (+1, +8MiB, +10%); may be repeated.",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Fail on findings that are not in this file.",
)
@click.option("--update-baseline", is_flag=True, help="Write what is found to the baseline.")
@click.option(
    "--against",
    metavar="REV|PATH",
    help="Fail on findings that are not in this git revision of the programs, or in this dump or "
    "JSON report.",
)
@click.option(
    "--strict/--no-strict",
    default=None,
    help="Fail too where the baseline could be tightened, or a suppression suppresses nothing.",
)
@click.option(
    "--introduced-by",
    is_flag=True,
    help="Look through all passes for the one that brought each finding.",
)
@takes_config
@click.option("--exit-zero", is_flag=True, help="Exit 0 even where the gate fails.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["text", "json", "sarif", "junit", "markdown", "github"]),
    help="Form of the report; may be repeated.  [default: text]",
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="[FORMAT=]PATH",
    shell_complete=completes("output_formats", files=True),
    help="Write the report to this file, in the form of --format or in the one named; may be "
    "repeated. With FORMAT=PATH the terminal still shows the text, unless --quiet.",
)
@click.option("--verbose", "-v", is_flag=True, help="List every finding, notes too.")
def check(
    programs: tuple[str, ...],
    how: How,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    rule_options: tuple[str, ...],
    budgets: tuple[str, ...],
    baseline: Path | None,
    update_baseline: bool,
    against: str | None,
    strict: bool | None,
    introduced_by: bool,
    config: Config,
    exit_zero: bool,
    formats: tuple[Format, ...],
    outputs: tuple[str, ...],
    verbose: bool,
) -> None:
    """Apply the rules to programs, and gate on what they find.

    With no PROGRAM, those of the config (see "hlo-audit init"), or else the reference models in all
    their layouts. These are held against the counts that this version knows of them, unless there
    is a baseline or a budget; other programs without one are only reported.
    """
    from hlo_audit.budget import override
    from hlo_audit.gate import judge, refuse_relative
    from hlo_audit.program_audit import tell_apart
    from hlo_audit.reference import read_references
    from hlo_audit.report import Report, environment
    from hlo_audit.report.formats import plan_outputs
    from hlo_audit.rule import select_rules
    from hlo_audit.rules import ALL_RULES
    from hlo_audit.run import audit_subjects

    rules = select_rules(
        ALL_RULES, select or config.select, ignore or (() if select else config.ignore)
    )
    if not rules:
        raise UsageError("no rule is left to apply", hint="--select and --ignore exclude all")
    options = _over(config.options, _read_rule_options(rule_options, ALL_RULES))
    limits = _read_budgets(budgets, ALL_RULES)
    for budget in limits:
        if all(rule.code != budget.rule for rule in rules):
            message = f"--max {budget.rule}: that rule is not applied"
            raise UsageError(message, hint="select it, or drop --max")
    strict = config.strict if strict is None else strict
    compared = plan_comparison(
        config, baseline=baseline, update=update_baseline, against=against, strict=strict
    )
    if not compared.has_baseline:
        refuse_relative(
            budget
            for program in (None, *config.programs)
            for budget in override(config.budgets_of(program), limits)
        )
    destinations = plan_outputs(formats, outputs, quiet=how.quiet)
    subjects = plan(programs, how, config)
    inputs = [*programs, *(str(path) for path in (compared.baseline_path, config.path) if path)]
    for path in (destination.path for destination in destinations if destination.path):
        if any(_is_input(path, name) for name in inputs):
            raise UsageError(f"{path} is what is read", hint="write the report to another file")

    cache = cache_of(how)

    def audit(subjects: Sequence[Subject]) -> list[ProgramAudit]:
        with progress_of(subjects, how) as on_compiled:
            audits = audit_subjects(
                subjects,
                rules,
                options,
                jobs=how.jobs,
                timeout_seconds=how.timeout_seconds,
                cache=cache,
                on_compiled=on_compiled,
                introduced_by=introduced_by,
            )
        return [_without_ignored(one, config) for one in tell_apart(audits)]

    narrowed = is_narrowed(how)
    suppressor = suppressor_of(config, ALL_RULES, Path.cwd(), strict=strict)
    audits = suppressor.apply(audit(subjects))
    comparison = compared.against(
        audits, subjects, audit, whole=not programs and not narrowed, quiet=how.quiet
    )

    def budgets_of(one: ProgramAudit) -> Sequence[Budget]:
        return override(config.budgets_of(config.program(one.program)), limits)

    gate = judge(audits, budgets_of, read_references(), comparison)
    all_there = not narrowed and (not programs or not config.programs)
    notices = (*gate.notices, *compared.notices, *suppressor.notices(audits, whole=all_there))
    report = Report(audits, replace(gate, notices=notices), environment())
    errors = {str(audit.error): audit.error for audit in audits if audit.error is not None}
    for error in errors.values():
        complain(error)
    exit_code = 0 if exit_zero and not errors else report.exit_code
    _render(report, destinations, show_all=verbose, exit_code=exit_code)
    sys.exit(exit_code)


def _without_ignored(audit: ProgramAudit, config: Config) -> ProgramAudit:
    """The audit without the rules that the config does not apply to this program."""
    program = config.program(audit.program)
    if program is None or not program.ignore:
        return audit
    return replace(
        audit,
        rules=tuple(rule for rule in audit.rules if rule.code not in program.ignore),
        findings=tuple(one for one in audit.findings if one.rule not in program.ignore),
        skipped={code: why for code, why in audit.skipped.items() if code not in program.ignore},
    )


def _over(options: RuleOptions, by: RuleOptions) -> RuleOptions:
    return {
        code: {**options.get(code, {}), **by.get(code, {})}
        for code in dict.fromkeys((*options, *by))
    }


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


def _read_rule_options(texts: Sequence[str], rules: Sequence[Rule]) -> RuleOptions:
    from hlo_audit.errors import unknown_name
    from hlo_audit.rule import find_rule

    options: dict[str, dict[str, int]] = {}
    for path, value in read_pairs("--rule-option", texts).items():
        rule_name, dot, name = path.partition(".")
        rule = find_rule(rules, rule_name)
        if not dot or name not in rule.options:
            raise unknown_name(f"option of {rule.slug}", name, rule.options or ["(it has none)"])
        options.setdefault(rule.code, {})[name] = read_count("--rule-option", path, value)
    return options


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
