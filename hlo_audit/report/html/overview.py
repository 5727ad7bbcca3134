"""The verdict, the programs, and what they were made with."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hlo_audit.errors import CompileError
from hlo_audit.examination import Examined
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.report.diff_wording import format_seconds
from hlo_audit.report.html.limits import MOST_ROWS, cut
from hlo_audit.report.violations import ViolationRow, known_heading, violation_rows
from hlo_audit.report.wording import (
    cost_of,
    format_bytes,
    headline_with_failed,
    not_audited,
)
from hlo_audit.rule import Finding, Rule

Status = Literal["passed", "failed", "none"]


@dataclass(frozen=True)
class Count:
    """A rule in a program: ``warnings`` and ``notes``, or why it was not counted."""

    warnings: int
    notes: int
    bytes: str
    breaks: bool
    why_not: str = ""


@dataclass(frozen=True)
class ProgramRow:
    """A program of the overview.

    Attributes:
        share: of the most cycles that any of them has, 0 to 100; ``None`` where not estimated.
        seconds: the cycles as time; ``""`` where the clock is not known.
    """

    label: str
    target: str
    module: str
    settings: str
    cycles: str
    share: float | None
    seconds: str
    counts: tuple[Count, ...]
    error: str
    log_title: str
    log: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The verdict and why; ``text`` leads with the programs that were not audited.

    Attributes:
        notices: whether it fails the gate, and what it says.
    """

    status: Status
    text: str
    known_heading: str
    violations: tuple[ViolationRow, ...]
    violations_left_out: int
    notices: tuple[tuple[bool, str], ...]
    notices_left_out: int


def damage_said(label: str, one: Examined) -> str:
    """That a snapshot cannot be read which no rule reads; ``""`` where all could be."""
    if one.damage is None:
        return ""
    return f"{label} has no timeline, as its dump is damaged: {one.damage}"


def verdict(report: Report, examined: Sequence[Examined]) -> Verdict:
    gate = report.gate
    status: Status = (
        "failed" if not_audited(report) or not gate.passed else "passed" if gate.held else "none"
    )
    text = headline_with_failed(report)
    violations = tuple(violation_rows(report))
    notices = [(notice.fails, notice.message) for notice in gate.notices]
    notices += [
        (False, cut(said))
        for audit, one in zip(report.programs, examined, strict=True)
        if (said := damage_said(audit.label, one))
    ]
    return Verdict(
        status,
        text[0].upper() + text[1:],
        known_heading(gate),
        violations[:MOST_ROWS],
        max(0, len(violations) - MOST_ROWS),
        tuple(notices[:MOST_ROWS]),
        max(0, len(notices) - MOST_ROWS),
    )


def program_rows(report: Report, codes: Sequence[str]) -> Iterator[ProgramRow]:
    most = max((audit.cost.estimated_cycles for audit in report.programs if audit.cost), default=0)
    broken = {(one.program, one.rule) for one in report.gate.violations}
    for audit in report.programs:
        cycles = audit.cost.estimated_cycles if audit.cost else None
        seconds = audit.cost.seconds(audit.hardware) if audit.cost else None
        settings = {**audit.settings, **{f"--xla-flag {k}": v for k, v in audit.xla_flags.items()}}
        mesh = ",".join(f"{axis}={size}" for axis, size in audit.mesh.items())
        said = [f"mesh {mesh}"] if mesh else []
        yield ProgramRow(
            label=audit.label,
            target=target_of(audit),
            module=audit.module or "",
            settings="  ".join([*said, *(f"{name}={value}" for name, value in settings.items())]),
            cycles="" if cycles is None else f"{cycles:,}",
            share=None if cycles is None else share_of(cycles, most),
            seconds="" if not seconds else f"about {format_seconds(seconds)}",
            counts=tuple(_counts(audit, codes, broken)),
            error="" if audit.error is None else str(audit.error),
            log_title="What the compiler wrote last"
            if isinstance(audit.error, CompileError)
            else "Traceback",
            log=() if audit.error is None else tuple(audit.error.log),
        )


def share_of(value: float, most: float) -> float:
    return round(100 * value / most, 1) if most > 0 else 0.0


def _counts(
    audit: ProgramAudit, codes: Sequence[str], broken: Container[tuple[str, str]]
) -> Iterator[Count]:
    """Of each rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in audit.findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    applied = {rule.code for rule in audit.rules}
    for code in codes:
        breaks = (audit.label, code) in broken
        if audit.error is not None:
            yield Count(0, 0, "", False, "not audited")
        elif code not in applied:
            yield Count(0, 0, "", False, "not applied")
        elif code in audit.skipped:
            yield Count(0, 0, "", breaks, f"not counted: {audit.skipped[code]}")
        else:
            mine = by_rule.get(code, ())
            warnings = [finding for finding in mine if finding.severity == "warning"]
            moved = sum(cost_of(finding)[1] for finding in warnings)
            size = format_bytes(moved) if moved else ""
            yield Count(len(warnings), len(mine) - len(warnings), size, breaks)


def versions_of(report: Report) -> tuple[tuple[str, str], ...]:
    """What the programs were compiled with, where all say the same; nothing of this machine, so
    that a report of a dump is the same wherever it is made."""
    compiled_with = {tuple(audit.versions.items()) for audit in report.programs if audit.versions}
    if len(compiled_with) != 1:
        return ()
    return tuple((name, version) for name, version in compiled_with.pop() if version)


def rules_of(audits: Sequence[ProgramAudit]) -> dict[str, Rule]:
    """The rules that were applied, by code."""
    found = {rule.code: rule for audit in audits for rule in audit.rules}
    return {code: found[code] for code in sorted(found)}


def target_of(audit: ProgramAudit) -> str:
    """The chips that a program is for, or what else is known of them."""
    return audit.target or audit.platform or ""
