"""What reports say alike: names made harmless, sizes, costs, and the verdict, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_audit.gate import Violation
from hlo_audit.report import Report
from hlo_audit.rule import Finding


def plain(text: str) -> str:
    """``text`` with control characters spelt out: names in a dump must not steer a terminal.

    On one line. What stays is printable: no escapes, no direction marks, no surrogates.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def clip(text: str, most: int) -> str:
    """``text``, cut to ``most`` characters; a cut one ends in ``...``."""
    return text if len(text) <= most else text[: most - 3] + "..."


def format_bytes(count: int) -> str:
    """Bytes in decimal units, three digits: ``98.3 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def brought_by(pass_name: str | None) -> str:
    """Says which pass brought a finding, or that the program had it from the start."""
    if pass_name is None:
        return "brought by a pass that is not known"
    if pass_name == "before_optimizations":
        return "in the program before any pass"
    return f"brought by {plain(pass_name)}"


def cost_of(finding: Finding) -> tuple[int, int]:
    """Cycles, then bytes, of all its runs in a step: what lists the most costly first."""
    runs = 1 if finding.executions is None else finding.executions
    return (finding.estimated_cycles or 0) * runs, (finding.bytes or 0) * runs


def format_cost(findings: Sequence[Finding]) -> str:
    """What the findings take in one step, each run of them counted; ``""`` for nothing."""
    cycles, moved = (sum(costs) for costs in zip(*map(cost_of, findings), strict=True))
    parts = [format_bytes(moved)] if moved else []
    if cycles:
        parts.append(f"{cycles:,} est. cycles")
    return f"{', '.join(parts)} a step" if parts else ""


def headline(report: Report, *, named: bool = False) -> str:
    """The verdict in a few words; holds no name of a program.

    Args:
        named: with the name of what programs were compared with, which anybody may have given.
    """
    gate = report.gate
    if not gate.passed:
        return "gate failed"
    if gate.held:
        programs = "1 program" if gate.held == 1 else f"{gate.held:,} programs"
        hows = {
            "budget": "within budget",
            "reference": "as the reference counts",
            "baseline": f"with nothing new against the {gate.source}",
        }
        if named and gate.baseline:
            return f"gate passed: {programs} {hows[gate.against]} {clip(plain(gate.baseline), 200)}"
        return f"gate passed: {programs} {hows[gate.against]}"
    return "no gate: neither baseline, budget nor reference counts for this"


def format_limit(violation: Violation, amount: int | None) -> str:
    """A limit or a count of a violation, for a table."""
    if amount is None:
        return "not counted"
    return format_bytes(amount) if violation.unit == "bytes" else f"{amount:,}"


def format_difference(violation: Violation) -> str:
    """By how much a violation is off, for a table; against a baseline what is new, and what is
    gone."""
    if violation.count is None:
        return ""
    if violation.against == "baseline":
        gone = f", {violation.gone:,} gone" if violation.gone else ""
        return f"{len(violation.new):,} new{gone}"
    difference = violation.count - violation.limit
    if violation.unit == "bytes":
        return f"{'+' if difference > 0 else '-'}{format_bytes(abs(difference))}"
    return f"{difference:+,d}"


def suppressed_said(report: Report) -> str:
    """How many findings are suppressed; ``""`` for none."""
    count = sum(len(audit.suppressed) for audit in report.programs)
    return "" if not count else f"{count} suppressed" if count > 1 else "1 suppressed"


def headline_with_failed(report: Report) -> str:
    """The verdict in a few words, behind how many programs could not be audited: without them a
    gate that passed, or that there is none, says little."""
    failed = sum(audit.error is not None for audit in report.programs)
    if not failed:
        return headline(report)
    of = "1 program" if len(report.programs) == 1 else f"{len(report.programs):,} programs"
    return f"{failed:,} of {of} not audited; {headline(report)}"


def not_audited(report: Report) -> str:
    """How many programs could not be audited; ``""`` where all were."""
    failed = sum(audit.error is not None for audit in report.programs)
    return f"{failed} of {len(report.programs)} not audited" if failed else ""
