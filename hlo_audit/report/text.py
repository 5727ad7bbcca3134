"""A report for the terminal: the counts as a table, then what costs time and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hlo_audit._version import __version__
from hlo_audit.audit import ProgramAudit
from hlo_audit.hlo import SourceLocation
from hlo_audit.program import Model
from hlo_audit.report import Report
from hlo_audit.rule import Finding, Rule

MOST_FINDINGS = 12
"""How many findings of a rule are listed for a program, unless all are asked for."""


def print_report(console: Console, report: Report, *, show_all: bool = False) -> None:
    """Print a run: counts, findings by program and rule, and the verdict.

    Notes are counted but listed only if ``show_all``.
    """
    console.print(_versions(report))
    by_subject = groupby(report.programs, key=_subject)
    for subject, programs in by_subject:
        audits = list(programs)
        console.print()
        title, _, settings = subject.partition("\n")
        console.print(Text(title, style="bold"))
        if settings:
            console.print(Text(settings, style="dim"))
        if any(audit.error is None for audit in audits):
            console.print(_counts_table([audit for audit in audits if audit.error is None]))
        for audit in audits:
            for block in _program(audit, show_all):
                console.print(block)
    console.print()
    console.print(_verdict(report))


def plain(text: str) -> str:
    """``text`` with control characters spelt out: names in a dump must not steer a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def format_bytes(count: int) -> str:
    """Bytes in decimal units, three digits: ``98.3 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _versions(report: Report) -> Text:
    found = [f"{name} {version}" for name, version in report.environment.items() if version]
    return Text(f"hlo-audit {__version__}  " + "  ".join(found), style="dim")


def _subject(audit: ProgramAudit) -> str:
    parts = [audit.program]
    if audit.topology:
        on_cpu = audit.platform == "cpu"
        parts.append(f"{audit.topology} CPU devices" if on_cpu else audit.topology)
    parts += [f"--xla-flag {name}={value}" for name, value in audit.xla_flags.items()]
    settings = "  ".join(f"{key}={value}" for key, value in audit.settings.items())
    return plain("  ".join(parts)) + (f"\n{plain(settings)}" if settings else "")


def _counts_table(audits: Sequence[ProgramAudit]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    named = any(audit.mode or audit.layout for audit in audits)
    for heading in ("mode", "layout") if named else ("module",):
        table.add_column(heading, overflow="fold")
    for rule in audits[0].rules:
        table.add_column(rule.code, justify="right")
    has_cost = any(audit.cost for audit in audits)
    if has_cost:
        table.add_column("est. cycles", justify="right")
    for audit in audits:
        names = (audit.mode or "-", audit.layout or "-") if named else (audit.module or "-",)
        row = [Text(plain(name)) for name in names]
        row += [_count(audit, rule) for rule in audit.rules]
        if has_cost:
            row.append(Text(f"{audit.cost.estimated_cycles:,}" if audit.cost else "-"))
        table.add_row(*row)
    return table


def _count(audit: ProgramAudit, rule: Rule) -> Text:
    count = audit.counts[rule.code]
    if count is None:
        return Text("-", style="dim")
    warnings = sum(f.rule == rule.code and f.severity == "warning" for f in audit.findings)
    return Text(str(count), style="bold red" if warnings else "" if count else "green")


def _program(audit: ProgramAudit, show_all: bool) -> Iterable[RenderableType]:
    name = "/".join(part for part in (audit.mode, audit.layout) if part) or audit.module or ""
    if audit.error is not None:
        yield Text()
        yield Text(f"{plain(name)}: {plain(str(audit.error))}", style="bold red")
        for line in getattr(audit.error, "log", ()):
            yield Text(f"  | {plain(line)}", style="dim")
        return
    blocks = [block for rule in audit.rules for block in _rule(audit, rule, show_all)]
    if blocks:
        yield Text()
        yield Text(plain(name), style="bold")
        yield from blocks
        yield from _fixes(audit)


def _rule(audit: ProgramAudit, rule: Rule, show_all: bool) -> Iterable[RenderableType]:
    if rule.code in audit.skipped:
        yield _indented(Text(f"{rule.code} {rule.slug}: {audit.skipped[rule.code]}", "dim"), 2)
        return
    found = [finding for finding in audit.findings if finding.rule == rule.code]
    listed = found if show_all else [f for f in found if f.severity == "warning"]
    if not listed:
        return
    yield _heading(audit, rule, found)
    listed = sorted(listed, key=_cost_of, reverse=True)
    shown = listed if show_all else listed[:MOST_FINDINGS]
    for finding in shown:
        yield from _finding(finding)
    if len(shown) < len(listed):
        rest = f"and {len(listed) - len(shown)} more (--verbose lists all)"
        yield _indented(Text(rest, "dim"), 4)


def _fixes(audit: ProgramAudit) -> Iterable[RenderableType]:
    """Each fix once, with the rules whose findings it clears."""
    clears: dict[str, list[Rule]] = {}
    for rule in audit.rules:
        found = [finding for finding in audit.findings if finding.rule == rule.code]
        for name in dict.fromkeys(name for finding in found for name in finding.fixes):
            clears.setdefault(name, []).append(rule)
    for name, rules in clears.items():
        change = next(fix.change for fix in rules[0].fixes if fix.name == name)
        codes = ", ".join(rule.code for rule in rules)
        parts = (("fix ", "green"), (name, "green bold"), f" for {codes}: {change}")
        yield _indented(Text.assemble(*parts), 2)


def _indented(text: Text, by: int, style: str = "none") -> Padding:
    return Padding(text, (0, 0, 0, by), style=style, expand=False)


def _heading(audit: ProgramAudit, rule: Rule, found: Sequence[Finding]) -> Padding:
    tallies = audit.tallies[rule.code]
    classes = ", ".join(f"{count} {name}" for name, count in sorted(tallies.items()))
    costs = []
    if rule.code in audit.bytes:
        costs.append(format_bytes(audit.bytes[rule.code]))
    cycles = sum(_cost_of(finding)[0] for finding in found)
    if cycles:
        costs.append(f"{cycles:,} est. cycles")
    text = Text.assemble(
        (f"{rule.code} {rule.slug}", "bold"),
        f"  {len(found)}: {classes}" + "".join(f", {cost}" for cost in costs),
    )
    return _indented(text, 2)


def _finding(finding: Finding) -> Iterable[RenderableType]:
    color = "red" if finding.severity == "warning" else "dim"
    yield _indented(Text.assemble(("- ", color), plain(finding.message)), 4)
    where = _location(finding.source) if finding.source else ""
    # Much is traced in a layer that all of a model shares: its caller says which part it is.
    outside = (f for f in finding.stack if finding.source and f.file != finding.source.file)
    caller = next(outside, None)
    if finding.executions is None:
        where += "  (in a loop)"
    elif finding.executions != 1:
        where += f"  ({finding.executions} times a step)"
    if where:
        yield _indented(Text(plain(where.strip()), "dim", overflow="fold"), 6)
    if caller is not None:
        yield _indented(Text(plain(f"from {_location(caller)}"), "dim", overflow="fold"), 6)
    if "/" in finding.op_name:  # an argument's name stands in the message
        name = Text(plain(finding.op_name), "dim", no_wrap=True, overflow="ellipsis")
        yield _indented(name, 6)


def _cost_of(finding: Finding) -> tuple[int, int]:
    """Cycles, then bytes, of all its runs: what lists the most costly first."""
    runs = 1 if finding.executions is None else finding.executions
    return (finding.estimated_cycles or 0) * runs, (finding.bytes or 0) * runs


def _location(source: SourceLocation) -> str:
    path = Path(source.file)
    if path.is_absolute():
        path = Path(min(os.path.relpath(path), str(path), key=len))
    function = f" in {source.function}" if source.function else ""
    return f"{path}:{source.line}{function}"


def _verdict(report: Report) -> Text:
    gate = report.gate
    failed = sum(audit.error is not None for audit in report.programs)
    lines = [Text(f"  {plain(violation.message)}") for violation in gate.violations]
    if gate.violations:
        lines.insert(0, Text("gate failed", style="bold red"))
    elif gate.held:
        programs = "1 program" if gate.held == 1 else f"{gate.held} programs"
        lines.append(Text(f"gate passed: {programs} as expected", style="bold green"))
    else:
        lines.append(Text("no gate: neither budget nor reference counts for this", style="dim"))
    if failed:
        lines.append(Text(f"{failed} of {len(report.programs)} not audited", style="bold red"))
    return Text("\n").join(lines)


def print_rules(console: Console, rules: Sequence[Rule]) -> None:
    """Print a table of the rules."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("code", "slug", "reports"):
        table.add_column(heading)
    for rule in rules:
        table.add_row(rule.code, rule.slug, rule.summary)
    console.print(table)


def print_models(console: Console, models: Sequence[Model]) -> None:
    """Print the reference models, their layouts and their settings."""
    for model in models:
        console.print(Text.assemble((model.name, "bold"), f"  {model.summary}"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
        for number, layout in enumerate(model.layouts):
            table.add_row(layout.name, layout.summary + (" (baseline)" if number == 0 else ""))
        console.print(table)
        settings = "  ".join(f"{name}={value}" for name, value in model.configure({}).items())
        console.print(Padding(Text(f"--set {settings}", style="dim"), (0, 0, 0, 2)))
        topologies = "  ".join(f"{key}: {value}" for key, value in model.topologies.items())
        console.print(Padding(Text(f"--topology {topologies}", style="dim"), (0, 0, 0, 2)))


def print_explanation(console: Console, rule: Rule) -> None:
    """Print the documentation of a rule, its options and its fixes."""
    console.print(Text.assemble((f"{rule.code} {rule.slug}", "bold")))
    console.print()
    console.print(Markdown(rule.documentation))
    sections: list[RenderableType] = []
    if rule.options:
        sections.append(Markdown("## Options"))
        options = "\n".join(
            f"- `{rule.slug}.{name}`: {value:,} by default" for name, value in rule.options.items()
        )
        sections.append(Markdown(options))
    if rule.fixes:
        sections.append(Markdown("## Fixes"))
        for fix in rule.fixes:
            claims = "".join(f"\n- {name}: {text}" for name, text in fix.claims.items())
            sections.append(
                Markdown(
                    f"**{fix.name}**: {fix.change}.\n\n"
                    f"- Shown by: {fix.model}, layout `{fix.before}` against `{fix.name}`\n"
                    f"- Cost: {fix.cost}{claims}"
                )
            )
    console.print(Group(*sections))
