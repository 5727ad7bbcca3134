"""The passes as JSON, version 1: the contract with other tools, held by ``passes.schema.json``.

Within a version keys are added, never changed or removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import dumps
from typing import Any

from hlo_audit._version import __version__
from hlo_audit.history import History
from hlo_audit.passes import Passes
from hlo_audit.report.listed import numbered
from hlo_audit.report.passes import Followed
from hlo_audit.rule import Finding
from hlo_audit.timeline import Change, Reading, Series

SCHEMA_VERSION = 1


def render_passes_json(
    histories: Sequence[History], labels: Sequence[str], followed: Sequence[Followed] | None
) -> str:
    """The passes as text, two spaces a level, with a line end.

    Args:
        labels: what to call the programs.
        followed: the instructions to follow; ``None`` where none was asked for.
    """
    report = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "hlo-audit", "version": __version__},
        "programs": [
            _program(history, label, [one for one in followed or () if one.program == index])
            for index, (history, label) in enumerate(zip(histories, labels, strict=True))
        ],
    }
    return dumps(report, indent=2, allow_nan=False) + "\n"


def _program(history: History, label: str, followed: Sequence[Followed]) -> dict[str, Any]:
    audit = history.audit
    subject = {
        "label": label,
        "program": audit.program,
        "mode": audit.mode,
        "layout": audit.layout,
        "platform": audit.platform,
        "topology": audit.topology,
        "module": audit.module,
        "versions": dict(audit.versions),
    }
    if audit.error is not None or history.timeline is None:
        error = audit.error
        return {
            **subject,
            "error": error and {"kind": error.kind, "message": error.message, "hint": error.hint},
        }
    timeline = history.timeline
    passes = timeline.passes
    return {
        **subject,
        "snapshots": [
            {
                "position": position,
                "number": snapshot.number,
                "stage": snapshot.stage,
                "pipeline": snapshot.pipeline or None,
                "pass": passes.pass_name(position),
                "file": snapshot.path.name,
                "phase": passes.phases[position],
                "changes_module": passes.changes_module(position),
            }
            for position, snapshot in enumerate(passes.snapshots)
        ],
        "series": [_series(series) for series in timeline.series],
        "findings": [
            _finding(number, finding) for number, finding in enumerate(numbered(audit), 1)
        ],
        "walks": [_walk(passes, one) for one in followed],
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "title": series.title,
        "kind": series.kind,
        "counts": series.counts,
        "readings": [_reading(reading) for reading in series.readings],
        "not_counted": list(_spans(series)),
        "changes": [_change(change) for change in series.changes],
    }


def _reading(reading: Reading | None) -> dict[str, int] | None:
    return None if reading is None else {"count": reading.count, "bytes": reading.bytes}


def _spans(series: Series) -> Iterator[dict[str, Any]]:
    """Where there are no readings, and why: the positions from one to another, both in it."""
    span: dict[str, Any] | None = None
    for position, reason in sorted(series.reasons.items()):
        if span is not None and span["reason"] == reason and span["to"] == position - 1:
            span["to"] = position
            continue
        if span is not None:
            yield span
        span = {"from": position, "to": position, "reason": reason}
    if span is not None:
        yield span


def _change(change: Change) -> dict[str, Any]:
    return {
        "position": change.position,
        "added": change.added,
        "removed": change.removed,
        "bytes": change.bytes,
        "lasting": change.lasting,
        "undone_by": [
            {"position": position, "count": count} for position, count in change.undone_by.items()
        ],
        "undoes": [
            {"position": position, "count": count} for position, count in change.undoes.items()
        ],
    }


def _finding(number: int, finding: Finding) -> dict[str, Any]:
    return {
        "number": number,
        "rule": finding.rule,
        "severity": finding.severity,
        "instruction": finding.instruction,
        "shape": finding.shape,
        "message": finding.message,
        "fingerprint": finding.fingerprint,
        "introduced_by": finding.introduced_by,
    }


def _walk(passes: Passes, followed: Followed) -> dict[str, Any]:
    walk, finding = followed.walk, followed.finding
    return {
        "finding": followed.number,
        "fingerprint": finding and finding.fingerprint,
        "instruction": walk.instruction.name,
        "opcode": walk.instruction.opcode,
        "shape": walk.instruction.shape.without_layout,
        "computation": walk.instruction.computation.name,
        "position": walk.position,
        "first": walk.first,
        "last": walk.last,
        "introduced_by": finding.introduced_by if finding else walk.introduced_by,
        "steps": [
            {
                "position": step.position,
                "pass": passes.pass_name(step.position),
                "kind": step.kind,
                "text": step.text,
                "instruction": step.instruction or None,
                "matched_by": step.how,
                "times": step.times,
            }
            for step in walk.steps
        ],
    }
