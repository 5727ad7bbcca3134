"""A report for the terminal: the counts as a table, then what costs time and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import (
    Console,
    ConsoleOptions,
    OverflowMethod,
    RenderableType,
    RenderResult,
)
from rich.table import Table
from rich.text import Text

from hlo_audit._version import __version__
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.report.listed import breaking_findings, offered_fixes
from hlo_audit.report.located import located
from hlo_audit.report.wording import (
    brought_by,
    format_bytes,
    format_cost,
    headline,
    not_audited,
    plain,
    suppressed_said,
)
from hlo_audit.rule import Finding, Rule

MOST_FINDINGS = 12
"""How many different findings of a rule are listed for a program, unless all are asked for."""

_OP_NAME_WIDTH = 70
_NAME_WIDTH = len("explicit")


def print_report(console: Console, report: Report, *, show_all: bool = False) -> None:
    """Print a run: counts, findings by program and rule, and the verdict.

    Notes are counted, but listed only if ``show_all`` or where they break a budget.
    """
    for block in report_blocks(report, show_all=show_all):
        console.print(block)


def report_blocks(report: Report, *, show_all: bool = False) -> Iterator[RenderableType]:
    """What :func:`print_report` prints, one after the other."""
    yield _versions(report)
    broken = {(violation.program, violation.rule) for violation in report.gate.violations}
    new = {one.program for one in report.gate.violations if one.new}
    for subject, programs in groupby(report.programs, key=_subject):
        audits = list(programs)
        yield Text()
        title, _, settings = subject.partition("\n")
        yield Text(title, style="bold", overflow="fold")
        if settings:
            yield Text(settings, style="dim")
        audited = [audit for audit in audits if audit.error is None]
        if audited:
            yield _counts_table(audited)
            yield from _legend(audited)
        for audit in audits:
            codes = {rule for program, rule in broken if program == audit.label}
            ones = breaking_findings(audit, report) if audit.label in new else frozenset()
            yield from _program(audit, show_all, codes, ones)
    yield Text()
    if any(audit.findings for audit in report.programs):
        yield Text("hlo-audit explain RULE says more of a rule and its fixes", style="dim")
    yield verdict(report)


class Indented:
    """Text with a margin, further lines under the first, and no blanks at their ends."""

    def __init__(self, text: Text, by: int, hanging: int = 0, *, cut: bool = False) -> None:
        self.text = text
        self.by = by
        self.hanging = hanging
        self.cut = cut

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - self.by - self.hanging)
        how: OverflowMethod = "ellipsis" if self.cut else "fold"
        lines = self.text.wrap(console, width, overflow=how, no_wrap=self.cut)
        for number, line in enumerate(lines):
            line.rstrip()
            yield Text(" " * (self.by + (self.hanging if number else 0))) + line


def verdict(report: Report) -> Text:
    """The last lines: whether the gate holds, and what was not audited."""
    gate = report.gate
    style = "bold red" if not gate.passed else "bold green" if gate.held else "dim"
    lines = [Text(headline(report, named=True), style=style)]
    lines += [Text(f"  {plain(violation.message)}") for violation in gate.violations]
    lines += [
        Text(f"  {plain(notice.message)}", style="" if notice.fails else "dim")
        for notice in gate.notices
    ]
    if suppressed := suppressed_said(report):
        lines.append(Text(suppressed, style="dim"))
    if rest := not_audited(report):
        lines.append(Text(rest, style="bold red"))
    return Text("\n").join(lines)


# -- the counts


def _versions(report: Report) -> Text:
    """Of this tool, and of what compiled the programs where they say so."""
    compiled_with = {
        tuple((name, version) for name, version in audit.versions.items() if version)
        for audit in report.programs
    }
    found = compiled_with.pop() if len(compiled_with) == 1 else ()
    parts = [f"hlo-audit {__version__}", *(f"{name} {version}" for name, version in found)]
    return Text(plain("  ".join(parts)), style="dim")


def _subject(audit: ProgramAudit) -> str:
    parts = [audit.program]
    if audit.target:
        parts.append(audit.target)
    mesh = ",".join(f"{axis}={size}" for axis, size in audit.mesh.items())
    if mesh and mesh in audit.variant:  # else it tells nothing apart
        parts.append(f"mesh {mesh}")
    parts += [f"--xla-flag {name}={value}" for name, value in audit.xla_flags.items()]
    settings = "  ".join(f"{key}={value}" for key, value in audit.settings.items())
    return plain("  ".join(parts)) + (f"\n{plain(settings)}" if settings else "")


def _counts_table(audits: Sequence[ProgramAudit]) -> Table:
    # Two blanks between columns: all rules and the longest names fit 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    named = any(audit.mode or audit.layout for audit in audits)
    for heading in ("mode", "layout") if named else ("module",):
        table.add_column(heading, overflow="fold", vertical="bottom", min_width=_NAME_WIDTH)
    for rule in audits[0].rules:
        table.add_column(rule.code, justify="right", no_wrap=True, vertical="bottom")
    has_cost = any(audit.cost for audit in audits)
    if has_cost:
        table.add_column("est.\ncycles", justify="right", no_wrap=True)
    for audit in audits:
        names = (audit.mode or "-", audit.layout or "-") if named else (audit.module or "-",)
        row = [Text(plain(name)) for name in names]
        row += [_count(audit, rule) for rule in audit.rules]
        if has_cost:
            row.append(Text(f"{audit.cost.estimated_cycles:,}" if audit.cost else "-"))
        table.add_row(*row)
    return table


def _count(audit: ProgramAudit, rule: Rule) -> Text:
    """Warnings, and notes apart: ``1 (+89)``."""
    count = audit.counts[rule.code]
    if count is None:
        return Text("-", style="dim")
    warnings = sum(f.rule == rule.code and f.severity == "warning" for f in audit.findings)
    found = Text(str(warnings), style="bold red" if warnings else "green")
    return found + Text(f" (+{count - warnings})", style="dim") if count > warnings else found


def _legend(audits: Sequence[ProgramAudit]) -> Iterator[RenderableType]:
    notes = any(finding.severity == "note" for audit in audits for finding in audit.findings)
    if notes:
        yield Text("(+n): notes, which --verbose lists", style="dim")
    reasons: dict[str, list[str]] = {}
    for code, reason in {c: r for audit in audits for c, r in audit.skipped.items()}.items():
        reasons.setdefault(reason, []).append(code)
    for reason, codes in reasons.items():
        yield Text(plain(f"-: {', '.join(codes)} {reason}"), style="dim")


# -- the findings


def _program(
    audit: ProgramAudit, show_all: bool, broken: set[str], new: frozenset[int]
) -> Iterator[RenderableType]:
    name = "/".join(part for part in (audit.mode, audit.layout) if part)
    if audit.error is not None:
        yield Text()
        yield Text(f"{plain(name or audit.label)}: {plain(str(audit.error))}", style="bold red")
        for line in audit.error.log:
            yield Text(f"  | {plain(line)}", style="dim")
        return
    blocks = [
        block
        for rule in audit.rules
        for block in _rule(audit, rule, show_all, new, show_notes=rule.code in broken)
    ]
    if blocks:
        yield Text()
        yield Text(plain(name or audit.module or audit.label), style="bold")
        yield from blocks
        yield from _fixes(audit)


def _rule(
    audit: ProgramAudit, rule: Rule, show_all: bool, new: frozenset[int], *, show_notes: bool
) -> Iterator[RenderableType]:
    found = [finding for finding in audit.findings if finding.rule == rule.code]
    with_notes = show_all or show_notes
    listed = found if with_notes else [f for f in found if f.severity == "warning"]
    if not listed:
        return
    yield _heading(audit, rule, found)
    alike: dict[tuple[object, ...], list[Finding]] = {}
    # What is new first: the rest is there to compare it with.
    for finding in listed:
        identity = (
            id(finding) in new,
            finding.message,
            finding.source,
            finding.op_name,
            finding.executions,
        )
        alike.setdefault(identity, []).append(finding)
    groups = sorted(
        alike.values(),
        key=lambda group: (id(group[0]) in new, sum(map(audit.seconds_of, group))),
        reverse=True,
    )
    for group in groups if show_all else groups[:MOST_FINDINGS]:
        yield from _finding(group, is_new=id(group[0]) in new)
    rest = sum(map(len, groups[MOST_FINDINGS:]))
    if rest and not show_all:
        yield Indented(Text(f"and {rest} more (--verbose lists all)", "dim"), 4)


def _heading(audit: ProgramAudit, rule: Rule, found: Sequence[Finding]) -> Indented:
    tallies = audit.tallies[rule.code]
    classes = ", ".join(f"{count} {name}" for name, count in sorted(tallies.items()))
    costs = [format_cost(found)]
    text = Text.assemble(
        (f"{rule.code} {rule.slug}", "bold"),
        f"  {len(found)}: {plain(classes)}" + "".join(f"; {cost}" for cost in costs if cost),
    )
    return Indented(text, 2, hanging=2)


def _finding(group: Sequence[Finding], *, is_new: bool) -> Iterator[RenderableType]:
    """One entry for findings that differ in nothing but their instruction."""
    finding = group[0]
    color = "red" if finding.severity == "warning" else "dim"
    times = f"{len(group)} times: " if len(group) > 1 else ""
    mark = ("new: ", "bold red") if is_new else ""
    message = times + plain(finding.message)
    yield Indented(Text.assemble(("- ", color), mark, message), 4, hanging=2)
    instructions = ", ".join(f"%{plain(one.instruction)}" for one in group[:4])
    more = f" and {len(group) - 4} more" if len(group) > 4 else ""
    facts = [f"{instructions}{more}", format_cost(group)]
    if finding.executions is None:
        facts.append("in a loop of unknown trips")
    elif finding.executions != 1:
        once = f"{format_bytes(finding.bytes)} " if finding.bytes else ""
        facts.append(f"{once}x {finding.executions} runs")
    yield Indented(Text("; ".join(fact for fact in facts if fact), "dim"), 6, hanging=2)
    if finding.source is not None:
        yield Indented(located(finding.source), 6, hanging=2)
        # Much is traced in a layer that all of a model shares: its caller says which part it is.
        outside = (frame for frame in finding.stack if frame.file != finding.source.file)
        caller = next(outside, None)
        if caller is not None:
            yield Indented(Text("from ", "dim") + located(caller), 6, hanging=2)
    if finding.introduced_by is not None:
        yield Indented(Text(brought_by(finding.introduced_by), "dim"), 6, hanging=2)
    if "/" in finding.op_name:  # an argument's name stands in the message
        name = plain(finding.op_name)
        if len(name) > _OP_NAME_WIDTH:  # the end tells most
            name = "..." + name[-_OP_NAME_WIDTH:]
        yield Indented(Text(name, "dim"), 6, cut=True)


def _fixes(audit: ProgramAudit) -> Iterator[RenderableType]:
    """Each fix once, with how many of which rule's findings it is for."""
    for fix in offered_fixes(audit):
        parts = (("fix ", "green"), (fix.name, "green bold"), f" for {', '.join(fix.counts)}: ")
        yield Indented(Text.assemble(*parts, fix.change), 2, hanging=2)
