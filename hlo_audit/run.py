"""Audit programs: compile those that are to be compiled, read the others, apply the rules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hlo_audit.cache import Cache
from hlo_audit.compiler import DEFAULT_TIMEOUT_SECONDS, Outcome, compile_programs
from hlo_audit.errors import HloAuditError, RefusedReshapeError
from hlo_audit.history import trace_lowered, trace_recorded
from hlo_audit.program import Lowering, Recorded, Subject
from hlo_audit.program_audit import (
    ProgramAudit,
    RuleOptions,
    audit_lowered,
    audit_recorded,
    audit_refused,
    described_by,
)
from hlo_audit.rule import Rule


def audit_subjects(
    subjects: Sequence[Subject],
    rules: Sequence[Rule],
    options: RuleOptions | None = None,
    *,
    jobs: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    cache: Cache | None = None,
    on_compiled: Callable[[Lowering, Outcome], None] | None = None,
    introduced_by: bool = False,
) -> list[ProgramAudit]:
    """Audit each subject; what cannot be compiled or read is an audit with an error.

    Dumps are audited while other programs compile, and deleted then. A dump folder gives an audit
    for each of its modules; otherwise the order is that of ``subjects``.

    Args:
        cache: where dumps are kept; ``None`` compiles each program anew.
        on_compiled: called with each program that was to be compiled and its outcome.
        introduced_by: whether to look through the passes for the one that brought each finding.
    """
    options = options or {}
    audits: dict[int, list[ProgramAudit]] = {}
    lowerings = {i: s for i, s in enumerate(subjects) if isinstance(s, Lowering)}
    positions = {id(lowering): index for index, lowering in lowerings.items()}

    def done(lowering: Lowering, outcome: Outcome) -> None:
        audit = _audit(lowering, outcome, rules, options, introduced_by)
        audits[positions[id(lowering)]] = [audit]
        if on_compiled is not None:
            on_compiled(lowering, outcome)

    for index, subject in enumerate(subjects):
        if isinstance(subject, Recorded):
            try:
                audits[index] = audit_recorded(subject.path, rules, options)
                if introduced_by:
                    audits[index] = trace_recorded(audits[index], subject.path, options)
            except HloAuditError as error:
                audits[index] = [ProgramAudit(subject.label, error=error)]
    if lowerings:
        with tempfile.TemporaryDirectory(prefix="hlo-audit-") as folder:
            compile_programs(
                list(lowerings.values()),
                into=Path(folder),
                jobs=jobs,
                timeout_seconds=timeout_seconds,
                cache=cache,
                on_done=done,
            )
    return [audit for index in range(len(subjects)) for audit in audits[index]]


def _audit(
    lowering: Lowering,
    outcome: Outcome,
    rules: Sequence[Rule],
    options: RuleOptions,
    introduced_by: bool,
) -> ProgramAudit:
    error: HloAuditError
    if isinstance(outcome, RefusedReshapeError):
        return audit_refused(lowering, outcome, rules)
    if isinstance(outcome, HloAuditError):
        error = outcome
    else:
        try:
            audit = audit_lowered(lowering, outcome.folder, rules, options)
            return trace_lowered(audit, outcome.folder, options) if introduced_by else audit
        except HloAuditError as caught:
            error = caught
    return replace(described_by(lowering), error=error)
