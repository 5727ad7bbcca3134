"""What fails the gate as rows of a table, alike in the formats that have one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hlo_audit.gate import Gate
from hlo_audit.report import Report
from hlo_audit.report.wording import format_difference, format_limit


@dataclass(frozen=True)
class ViolationRow:
    """A violation in words.

    Attributes:
        program: its label.
        rule: code and slug.
        known: what is allowed, or what the gate holds it against has: see :func:`known_heading`.
        found: what there is.
        difference: by how much it is off; ``""`` where it was not counted.
        remark: what else there is to say; mostly ``""``.
    """

    program: str
    rule: str
    known: str
    found: str
    difference: str
    remark: str


def violation_rows(report: Report) -> Iterator[ViolationRow]:
    """A row for each violation, in the order of the gate."""
    slugs = {rule.code: rule.slug for audit in report.programs for rule in audit.rules}
    for violation in report.gate.violations:
        most = "at most " if violation.against == "budget" else ""
        yield ViolationRow(
            violation.program,
            f"{violation.rule} {slugs.get(violation.rule, '')}".strip(),
            most + format_limit(violation, violation.limit),
            format_limit(violation, violation.count),
            format_difference(violation),
            violation.remark,
        )


def known_heading(gate: Gate) -> str:
    """What :attr:`ViolationRow.known` is of."""
    return "allowed" if gate.against == "budget" else gate.against
