"""Proofs as JSON, version 1: the contract with other tools, held by ``proof.schema.json``.

Within a version keys are added, never changed or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from typing import Any

from hlo_audit._version import __version__
from hlo_audit.errors import HloAuditError
from hlo_audit.proof import Best, Candidate, Proof, ProofReport, Run

SCHEMA_VERSION = 1


def render_proof_json(report: ProofReport, environment: Mapping[str, str | None]) -> str:
    """The proofs as text, two spaces a level, with a line end.

    Args:
        environment: see :func:`hlo_audit.report.environment`.
    """
    return dumps(proof_to_json(report, environment), indent=2, allow_nan=False) + "\n"


def proof_to_json(report: ProofReport, environment: Mapping[str, str | None]) -> dict[str, Any]:
    """The proofs as plain data."""
    plan = report.plan
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "hlo-audit", "version": __version__},
        "environment": dict(environment),
        "settings": {model: dict(values) for model, values in plan.settings.items()},
        "xla_flags": dict(plan.xla_flags),
        "claims_held": plan.claimed,
        "proofs": [_proof(proof) for proof in report.proofs],
        "best": [_best(best) for best in report.best],
        "numerics": [_run(run) for run in report.runs],
        "passed": report.passed,
    }


def _proof(proof: Proof) -> dict[str, Any]:
    return {
        "rule": proof.rule.code,
        "slug": proof.rule.slug,
        "fix": proof.fix.name,
        "model": proof.fix.model,
        "platform": proof.platform,
        "topology": proof.topology,
        "mode": proof.mode,
        "verdict": proof.verdict,
        "claims_to_clear": proof.claims,
        "before": proof.before and asdict(proof.before),
        "after": proof.after and asdict(proof.after),
        "brings": dict(proof.brings),
        "passed": proof.passed,
        "failures": list(proof.failures),
        "reason": proof.reason,
        "error": _error(proof.error),
    }


def _best(best: Best) -> dict[str, Any]:
    fix = best.fix
    return {
        "model": best.model,
        "platform": best.platform,
        "topology": best.topology,
        "mode": best.mode,
        "before": best.before,
        "before_estimated_cycles": best.estimated_cycles,
        "fix": fix and fix.layout,
        "estimated_cycles": fix and fix.estimated_cycles,
        "saved_cycles": fix and fix.saved_cycles,
        "reason": best.reason,
        "candidates": [_candidate(candidate) for candidate in best.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": candidate.layout,
        "estimated_cycles": candidate.estimated_cycles,
        "saved_cycles": candidate.saved_cycles,
        "clears": list(candidate.clears),
        "leaves": dict(candidate.leaves),
    }


def _run(run: Run) -> dict[str, Any]:
    comparison, agreement = run.comparison, run.agreement
    return {
        "model": comparison.model,
        "fix": comparison.after,
        "before": comparison.before,
        "mode": comparison.mode,
        "devices": comparison.devices,
        "settings": dict(comparison.settings),
        "inputs": agreement.inputs,
        "tolerance": agreement.tolerance,
        "claim": agreement.reason,
        "differences": {name: asdict(found) for name, found in run.differences.items()},
        "passed": run.passed,
        "failures": list(run.failures),
        "reason": run.reason,
        "error": _error(run.error),
    }


def _error(error: HloAuditError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "kind": error.kind,
        "message": error.message,
        "hint": error.hint,
        "log": list(getattr(error, "log", ())),
    }
