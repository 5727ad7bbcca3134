"""``hlo-audit check``: apply the rules, judge, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.options import (
    How,
    cache_of,
    completes,
    find_programs,
    progress_of,
    read_count,
    read_pairs,
    takes_how,
)
from hlo_audit.cli.output import complain, console, put
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.program_audit import RuleOptions
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
    metavar="RULE=N",
    shell_complete=completes("rule_budgets"),
    help="Fail where a program has more than N findings of a rule, notes too; may be repeated.",
)
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
    exit_zero: bool,
    formats: tuple[Format, ...],
    outputs: tuple[str, ...],
    verbose: bool,
) -> None:
    """Apply the rules to programs, and gate on the counts.

    With no PROGRAM, the reference models. Without --max these are held against the counts that this
    version knows of them, and other programs are only reported.
    """
    from hlo_audit.gate import judge, read_references
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.report import Report, environment
    from hlo_audit.report.formats import plan_outputs
    from hlo_audit.rule import find_rule, select_rules
    from hlo_audit.rules import ALL_RULES
    from hlo_audit.run import audit_subjects

    rules = select_rules(ALL_RULES, select, ignore)
    if not rules:
        raise UsageError("no rule is left to apply", hint="--select and --ignore exclude all")
    options = _read_rule_options(rule_options, ALL_RULES)
    limits = {
        find_rule(ALL_RULES, name).code: read_count("--max", name, value)
        for name, value in read_pairs("--max", budgets).items()
    }
    for code in limits.keys() - {rule.code for rule in rules}:
        raise UsageError(f"--max {code}: that rule is not applied", hint="select it, or drop --max")
    destinations = plan_outputs(formats, outputs, quiet=how.quiet)
    subjects = find_programs(programs or tuple(model.name for model in ALL_MODELS), how)
    for path in (destination.path for destination in destinations if destination.path):
        if any(_is_input(path, name) for name in programs):
            raise UsageError(f"{path} is what is read", hint="write the report to another file")
    with progress_of(subjects, how) as on_compiled:
        audits = audit_subjects(
            subjects,
            rules,
            options,
            jobs=how.jobs,
            timeout_seconds=how.timeout_seconds,
            cache=cache_of(how),
            on_compiled=on_compiled,
        )
    report = Report(audits, judge(audits, limits, read_references()), environment())
    errors = {str(audit.error): audit.error for audit in audits if audit.error is not None}
    for error in errors.values():
        complain(error)
    exit_code = 0 if exit_zero and not errors else report.exit_code
    _render(report, destinations, show_all=verbose, exit_code=exit_code)
    sys.exit(exit_code)


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
