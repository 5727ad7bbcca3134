"""Audit programs: compile those that are to be compiled, read the others, apply the rules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from hlo_audit.cache import Cache
from hlo_audit.compiler import DEFAULT_TIMEOUT_SECONDS, Outcome, compile_programs
from hlo_audit.errors import HloAuditError
from hlo_audit.history import trace_recorded
from hlo_audit.program import Lowering, Recorded, Subject
from hlo_audit.program_audit import ProgramAudit, RuleOptions, audit_recorded
from hlo_audit.remote import audit_outcome, audit_through
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
    executor: Executor | None = None,
) -> list[ProgramAudit]:
    """Audit each subject; what cannot be compiled or read is an audit with an error.

    A dump folder gives an audit for each of its modules; otherwise the order is that of
    ``subjects``. The arguments are those of :func:`audit_each`.
    """
    groups = audit_each(
        subjects,
        rules,
        options,
        jobs=jobs,
        timeout_seconds=timeout_seconds,
        cache=cache,
        on_compiled=on_compiled,
        introduced_by=introduced_by,
        executor=executor,
    )
    return [audit for group in groups for audit in group]


def audit_each(
    subjects: Sequence[Subject],
    rules: Sequence[Rule],
    options: RuleOptions | None = None,
    *,
    jobs: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    cache: Cache | None = None,
    on_compiled: Callable[[Lowering, Outcome], None] | None = None,
    introduced_by: bool = False,
    executor: Executor | None = None,
) -> list[list[ProgramAudit]]:
    """The audits of each subject, in the order of ``subjects``: one, but of a dump folder one for
    each module.

    Dumps are audited while other programs compile, and deleted then.

    Args:
        jobs: how many to compile side by side in this process; without meaning for an executor.
        cache: where dumps are kept; ``None`` compiles each program anew.
        on_compiled: called with each program that was to be compiled and its outcome, as it is
            done; its folder may be gone by then.
        introduced_by: whether to look through the passes for the one that brought each finding.
        executor: where programs are compiled and audited; ``None`` for this machine. Dumps and
            files are read here in any case.
    """
    options = options or {}
    audits: dict[int, list[ProgramAudit]] = {}
    lowerings = {i: s for i, s in enumerate(subjects) if isinstance(s, Lowering)}
    positions = {id(lowering): index for index, lowering in lowerings.items()}

    def done(lowering: Lowering, outcome: Outcome, audit: ProgramAudit) -> None:
        audits[positions[id(lowering)]] = [audit]
        if on_compiled is not None:
            on_compiled(lowering, outcome)

    def compiled(lowering: Lowering, outcome: Outcome) -> None:
        audit = audit_outcome(lowering, outcome, rules, options, introduced_by)
        done(lowering, outcome, audit)

    for index, subject in enumerate(subjects):
        if isinstance(subject, Recorded):
            try:
                audits[index] = audit_recorded(subject.path, rules, options)
                if introduced_by:
                    audits[index] = trace_recorded(audits[index], subject.path, options)
            except HloAuditError as error:
                audits[index] = [ProgramAudit(subject.label, error=error)]
    if lowerings and executor is not None:
        audit_through(
            executor,
            list(lowerings.values()),
            rules,
            options,
            timeout_seconds=timeout_seconds,
            cache=cache,
            on_done=done,
            introduced_by=introduced_by,
        )
    elif lowerings:
        with tempfile.TemporaryDirectory(prefix="hlo-audit-") as folder:
            compile_programs(
                list(lowerings.values()),
                into=Path(folder),
                jobs=jobs,
                timeout_seconds=timeout_seconds,
                cache=cache,
                on_done=compiled,
            )
    return [audits[index] for index in range(len(subjects))]
