"""A diff as JSON, version 1: the contract with other tools, held by ``diff.schema.json``.

Within a version keys are added, never changed or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from typing import Any

from hlo_audit._version import __version__
from hlo_audit.diff import Both, Diff, RuleDiff, Side, Total
from hlo_audit.hlo import Instruction
from hlo_audit.parting import Bulk
from hlo_audit.report.diff_wording import fixes, parted, summary
from hlo_audit.report.json import finding_to_json

SCHEMA_VERSION = 1


def render_diff_json(diff: Diff, environment: Mapping[str, str | None]) -> str:
    """The diff as text, two spaces a level, with a line end.

    Args:
        environment: see :func:`hlo_audit.report.environment`.
    """
    return dumps(diff_to_json(diff, environment), indent=2, allow_nan=False) + "\n"


def diff_to_json(diff: Diff, environment: Mapping[str, str | None]) -> dict[str, Any]:
    """The diff as plain data."""
    compared = bool(diff.rules)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "hlo-audit", "version": __version__},
        "environment": dict(environment),
        "a": _side(diff.a),
        "b": _side(diff.b),
        "comparable": diff.comparable,
        "obstacles": list(diff.obstacles),
        "notes": list(diff.notes),
        "identical": diff.identical,
        "summary": [*summary(diff), *(parted(diff) if compared else ())],
        "fixes": [
            {"side": side, "name": fix.name, "for": list(fix.counts), "change": fix.change}
            for side, fix in fixes(diff)
        ],
        "rules": [_rule(diff, one) for one in diff.rules],
        "copies": _totals(diff, diff.copies),
        "collectives": _totals(diff, diff.collectives),
        "opcodes": {name: _both(both) for name, both in diff.opcodes.items()},
        "entry": [
            {
                "kind": row.kind,
                "name": row.name,
                "a": None if row.a is None else str(row.a),
                "b": None if row.b is None else str(row.b),
            }
            for row in diff.entry
        ],
        "partings": [
            {
                "label": one.label,
                "pipeline": one.pipeline,
                "after": one.after,
                "step": one.step,
                "only_a": _bulk(one.only_a),
                "only_b": _bulk(one.only_b),
            }
            for one in diff.partings
        ],
        "no_parting": diff.no_parting or None,
        "instructions": _instructions(diff),
    }


def _side(side: Side) -> dict[str, Any]:
    audit = side.audit
    return {
        "name": side.name,
        "program": audit.program,
        "label": audit.label,
        "mode": audit.mode,
        "layout": audit.layout,
        "platform": audit.platform,
        "topology": audit.topology,
        "settings": dict(audit.settings),
        "xla_flags": dict(audit.xla_flags),
        "versions": dict(audit.versions),
        "module": side.module.name,
        "devices": side.module.device_count,
        "while_loops": audit.while_loops,
        "estimated_cycles": audit.cost and audit.cost.estimated_cycles,
        "estimated_seconds": audit.cost and audit.cost.seconds(audit.hardware),
    }


def _both(both: Both) -> dict[str, int | None]:
    return {"a": both.a, "b": both.b}


def _rule(diff: Diff, one: RuleDiff) -> dict[str, Any]:
    return {
        "rule": one.rule.code,
        "slug": one.rule.slug,
        "counts": _both(one.counts),
        "bytes": _both(one.bytes),
        "only_a": [finding_to_json(diff.a.audit, finding) for finding in one.only_a],
        "only_b": [finding_to_json(diff.b.audit, finding) for finding in one.only_b],
    }


def _totals(diff: Diff, totals: Mapping[str, tuple[Total, Total]]) -> dict[str, Any]:
    return {
        name: {"a": _total(diff.a, a), "b": _total(diff.b, b)} for name, (a, b) in totals.items()
    }


def _total(side: Side, total: Total) -> dict[str, Any]:
    return {
        "count": total.count,
        **asdict(total.traffic),
        "seconds": total.traffic.seconds(side.audit.hardware),
    }


def _bulk(found: Bulk) -> list[dict[str, Any]]:
    return [
        {"what": what, "shape": shape, "count": count}
        for (what, shape), count in sorted(found.items())
    ]


def _instructions(diff: Diff) -> dict[str, Any] | None:
    if diff.matching is None:
        return None
    found = diff.matching
    return {
        "matched": len(found.pairs),
        "relaid": [{"a": _instruction(a), "b": _instruction(b)} for a, b in found.relaid],
        "reshaped": [{"a": _instruction(a), "b": _instruction(b)} for a, b in found.reshaped],
        "only_a": [_instruction(one) for one in found.only_a],
        "only_b": [_instruction(one) for one in found.only_b],
    }


def _instruction(one: Instruction) -> dict[str, str]:
    return {
        "name": one.name,
        "computation": one.computation.name,
        "opcode": one.opcode,
        "shape": str(one.shape),
        "op_name": one.op_name,
    }
