"""Findings as a pandas data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.rule import Finding

if TYPE_CHECKING:
    import pandas

_NUMBERS = ("bytes", "executions", "estimated_cycles", "line")

COLUMNS = (
    *("program", "mode", "layout", "topology", "rule", "slug", "severity", "message", "shape"),
    *("bytes", "executions", "estimated_cycles", "file", "line", "function", "op_name"),
    *("instruction", "computation", "opcode", "fixes", "fingerprint"),
)
"""The columns, in order. ``bytes`` is the logical size once, ``executions`` how often it runs in a
step, ``estimated_cycles`` the cost of one run; ``fixes`` is a tuple of names."""


def findings_frame(report: Report) -> pandas.DataFrame:
    """A row for each finding of each program, in the order of the report.

    What is not known is missing (``pandas.NA`` in the whole numbers).
    """
    import pandas

    rows = [_row(audit, finding) for audit in report.programs for finding in audit.findings]
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(_NUMBERS, "Int64"))


def _row(audit: ProgramAudit, finding: Finding) -> dict[str, Any]:
    source = finding.source
    return {
        "program": audit.program,
        "mode": audit.mode,
        "layout": audit.layout,
        "topology": audit.topology,
        "rule": finding.rule,
        "slug": finding.slug,
        "severity": finding.severity,
        "message": finding.message,
        "shape": finding.shape,
        "bytes": finding.bytes,
        "executions": finding.executions,
        "estimated_cycles": finding.estimated_cycles,
        "file": source.file if source else None,
        "line": source.line if source else None,
        "function": source.function if source else None,
        "op_name": finding.op_name,
        "instruction": finding.instruction,
        "computation": finding.computation,
        "opcode": finding.opcode,
        "fixes": audit.fixes_of(finding),
        "fingerprint": finding.fingerprint,
    }
