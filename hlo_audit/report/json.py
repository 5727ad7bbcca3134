"""A report as JSON, version 1: the contract with other tools, held by ``schema.json``.

Within a version keys are added, never changed or removed.

What differs from one run of the same programs to the next stands under the one key ``volatile``;
but for that, and for what a compiler wrote before it failed (``error.log``), two runs write the
same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from typing import Any

from hlo_audit._version import __version__
from hlo_audit.cost import NO_TRAFFIC
from hlo_audit.gate import Gate
from hlo_audit.program_audit import ProgramAudit, Suppressed
from hlo_audit.report import Report, ShardRecord
from hlo_audit.rule import Finding

SCHEMA_VERSION = 1


def render_json(report: Report) -> str:
    """The report as text, two spaces a level, with a line end."""
    return dumps(to_json(report), indent=2, allow_nan=False) + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "hlo-audit", "version": __version__},
        "environment": dict(report.environment),
        **({} if report.shard is None else {"shard": _shard(report.shard)}),
        "programs": [program_to_json(audit) for audit in report.programs],
        "gate": gate_to_json(report.gate),
        "volatile": {"timings": [_timing(audit) for audit in report.programs]},
    }


def _shard(shard: ShardRecord) -> dict[str, Any]:
    return {
        "index": shard.part.shard.index,
        "count": shard.part.shard.count,
        "matrix": shard.part.matrix,
        "plan": shard.part.plan,
        "size": shard.part.size,
        "positions": list(shard.positions),
        "whole": shard.whole,
        "suppressions": [asdict(use) for use in shard.suppressions],
    }


def _timing(audit: ProgramAudit) -> dict[str, Any] | None:
    return None if audit.timing is None else asdict(audit.timing)


def program_to_json(audit: ProgramAudit) -> dict[str, Any]:
    """What was found in a program, or what went wrong, as plain data."""
    subject = {
        "program": audit.program,
        "mode": audit.mode,
        "layout": audit.layout,
        "platform": audit.platform,
        "topology": audit.topology,
        "mesh": dict(audit.mesh),
        "settings": dict(audit.settings),
        "xla_flags": dict(audit.xla_flags),
        "versions": dict(audit.versions),
    }
    if audit.error is not None:
        return {
            **subject,
            "error": {
                "kind": audit.error.kind,
                "message": audit.error.message,
                "hint": audit.error.hint,
                "log": list(audit.error.log),
            },
        }
    return {
        **subject,
        "module": audit.module,
        "devices": audit.devices,
        "files": {stage: str(path) for stage, path in audit.files.items()},
        "while_loops": audit.while_loops,
        "counts": audit.counts,
        "tallies": audit.tallies,
        "bytes": audit.bytes,
        "skipped": dict(audit.skipped),
        "cost": _cost(audit),
        "traffic": _traffic(audit),
        "findings": [
            *(finding_to_json(audit, finding) for finding in audit.findings),
            *(finding_to_json(audit, one.finding, one) for one in audit.suppressed),
        ],
    }


def _cost(audit: ProgramAudit) -> Mapping[str, int | float | None] | None:
    if audit.cost is None:
        return None
    return {
        "estimated_cycles": audit.cost.estimated_cycles,
        "unknown_loops": audit.cost.unknown_loops,
        "estimated_seconds": audit.cost.seconds(audit.hardware),
    }


def _traffic(audit: ProgramAudit) -> dict[str, Any] | None:
    """What the collectives of a step move, by kind."""
    if audit.collectives is None:
        return None
    counts: Counter[str] = Counter()
    totals = {one.kind: NO_TRAFFIC for one in audit.collectives}
    for one in audit.collectives:
        counts[one.kind] += one.count
        totals[one.kind] += one.traffic.times(one.executions)
    return {
        kind: {
            "count": counts[kind],
            "wire_bytes": total.wire_bytes,
            "moved_bytes": total.moved_bytes,
            "asked_bytes": total.asked_bytes,
            "seconds": total.seconds(audit.hardware),
        }
        for kind, total in totals.items()
    }


def finding_cost(audit: ProgramAudit, finding: Finding) -> dict[str, Any] | None:
    """What one run of a finding moves and takes, as plain data."""
    traffic = finding.traffic
    if traffic is None:
        return None
    return {
        "hbm_bytes": traffic.hbm_bytes,
        "wire_bytes": traffic.wire_bytes,
        "moved_bytes": traffic.moved_bytes,
        "asked_bytes": traffic.asked_bytes,
        "seconds": traffic.seconds(audit.hardware),
    }


def finding_to_json(
    audit: ProgramAudit, finding: Finding, suppressed: Suppressed | None = None
) -> dict[str, Any]:
    """A finding of ``audit`` as plain data."""
    return {
        "rule": finding.rule,
        "slug": finding.slug,
        "severity": finding.severity,
        "instruction": finding.instruction,
        "computation": finding.computation,
        "opcode": finding.opcode,
        "message": finding.message,
        "shape": finding.shape,
        "bytes": finding.bytes,
        "executions": finding.executions,
        "executed_bytes": finding.executed_bytes,
        "estimated_cycles": finding.estimated_cycles,
        "cost": finding_cost(audit, finding),
        "details": dict(finding.details),
        "op_name": finding.op_name,
        "source": finding.source._asdict() if finding.source else None,
        "stack": [frame._asdict() for frame in finding.stack],
        "fixes": list(audit.fixes_of(finding)),
        "fingerprint": finding.fingerprint,
        "introduced_by": finding.introduced_by,
        "suppressed": suppressed
        and {"by": suppressed.by, "reason": suppressed.reason, "where": suppressed.where},
    }


def gate_to_json(gate: Gate) -> dict[str, Any]:
    """The verdict as plain data."""
    return {
        "passed": gate.passed,
        "held": gate.held,
        "against": gate.gated_against,
        "baseline": gate.baseline or None,
        "violations": [
            {
                "program": violation.program,
                "rule": violation.rule,
                "limit": violation.limit,
                "count": violation.count,
                "against": violation.against,
                "unit": violation.unit,
                "new": list(violation.new),
                "gone": violation.gone,
                "message": violation.message,
            }
            for violation in gate.violations
        ],
        "notices": [
            {
                "kind": notice.kind,
                "program": notice.program or None,
                "rule": notice.rule or None,
                "fails": notice.fails,
                "message": notice.message,
            }
            for notice in gate.notices
        ],
    }
