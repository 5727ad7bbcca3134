"""Audit programs: compile those that are to be compiled, read the others, apply the rules."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from hlo_audit.compiler import Outcome
from hlo_audit.compiling import Compiling, handled
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
    how: Compiling | None = None,
    *,
    introduced_by: bool = False,
    executor: Executor | None = None,
) -> list[ProgramAudit]:
    """Audit each subject; what cannot be compiled or read is an audit with an error.

    A dump folder gives an audit for each of its modules; otherwise the order is that of
    ``subjects``. The arguments are those of :func:`audit_each`.
    """
    groups = audit_each(
        subjects, rules, options, how, introduced_by=introduced_by, executor=executor
    )
    return [audit for group in groups for audit in group]


def audit_each(
    subjects: Sequence[Subject],
    rules: Sequence[Rule],
    options: RuleOptions | None = None,
    how: Compiling | None = None,
    *,
    introduced_by: bool = False,
    executor: Executor | None = None,
) -> list[list[ProgramAudit]]:
    """The audits of each subject, in the order of ``subjects``: one, but of a dump folder one for
    each module.

    Dumps are audited while other programs compile, and deleted then.

    Args:
        how: how programs are compiled; its jobs have no meaning for an executor.
        introduced_by: whether to look through the passes for the one that brought each finding.
        executor: where programs are compiled and audited; ``None`` for this machine. Dumps and
            files are read here in any case.
    """
    options, how = options or {}, how or Compiling()

    def compiled(lowering: Lowering, outcome: Outcome) -> list[ProgramAudit]:
        return [audit_outcome(lowering, outcome, rules, options, introduced_by)]

    def recorded(subject: Recorded) -> list[ProgramAudit]:
        try:
            audits = audit_recorded(subject.path, rules, options)
            return trace_recorded(audits, subject.path, options) if introduced_by else audits
        except HloAuditError as error:
            return [ProgramAudit(subject.label, error=error)]

    if executor is None:
        with handled(subjects, how, compiled=compiled, recorded=recorded) as audits:
            return audits
    here = {i: recorded(one) for i, one in enumerate(subjects) if isinstance(one, Recorded)}
    lowerings = [subject for subject in subjects if isinstance(subject, Lowering)]
    there: dict[int, list[ProgramAudit]] = {}

    def done(lowering: Lowering, outcome: Outcome, audit: ProgramAudit) -> None:
        there.setdefault(id(lowering), []).append(audit)
        how.told(lowering, outcome)

    audit_through(
        executor,
        lowerings,
        rules,
        options,
        timeout_seconds=how.timeout_seconds,
        cache=how.cache,
        on_done=done,
        introduced_by=introduced_by,
    )
    return [
        here[index] if index in here else [there[id(subject)].pop()]
        for index, subject in enumerate(subjects)
    ]
