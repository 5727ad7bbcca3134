"""Compile or read programs, and look through all of their passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hlo_audit.compiler import Outcome
from hlo_audit.compiling import Compiling, handled
from hlo_audit.dump import ModuleDump, read_dump
from hlo_audit.errors import DumpError, HloAuditError
from hlo_audit.follow import Provenance
from hlo_audit.hlo.collector import no_collection
from hlo_audit.passes import Passes
from hlo_audit.program import Lowering, Recorded, Subject
from hlo_audit.program_audit import (
    ProgramAudit,
    RuleOptions,
    audit_lowered,
    audit_recorded,
    described_by,
    step_of,
)
from hlo_audit.rule import Rule
from hlo_audit.timeline import DEFAULT_OPCODES, Timeline, make_timeline


@dataclass(frozen=True)
class History:
    """The passes of one program.

    Attributes:
        audit: what the rules found, each finding with the pass that brought it; or the error that
            kept the passes from being read.
        timeline: ``None`` where there is an error.
    """

    audit: ProgramAudit
    timeline: Timeline | None = None


def read_histories(
    subjects: Sequence[Subject],
    rules: Sequence[Rule],
    options: RuleOptions | None = None,
    how: Compiling | None = None,
    *,
    opcodes: Sequence[str] = DEFAULT_OPCODES,
) -> list[History]:
    """Audit each subject, and count its rules and opcodes in every snapshot.

    A dump folder gives a history for each of its modules; otherwise the order is that of
    ``subjects``. What cannot be compiled or read is a history with an error.

    Args:
        opcodes: as for :func:`hlo_audit.timeline.make_timeline`.
    """
    options, how = options or {}, how or Compiling()

    def compiled(lowering: Lowering, outcome: Outcome) -> list[History]:
        try:
            if isinstance(outcome, HloAuditError):
                raise outcome
            audit = audit_lowered(lowering, outcome.folder, rules, options)
            return [_history(audit, step_of(read_dump(outcome.folder)), options, opcodes)]
        except HloAuditError as error:
            return [History(replace(described_by(lowering), error=error))]

    def recorded(subject: Recorded) -> list[History]:
        return _recorded(subject, rules, options, opcodes)

    with handled(subjects, how, compiled=compiled, recorded=recorded) as histories:
        return [history for group in histories for history in group]


def _recorded(
    subject: Recorded, rules: Sequence[Rule], options: RuleOptions, opcodes: Sequence[str]
) -> list[History]:
    try:
        if not subject.path.is_dir():
            raise DumpError(
                f"{subject.label} is a single snapshot, which has no passes",
                hint="give the folder of a dump",
            )
        audits = audit_recorded(subject.path, rules, options)
        modules = read_dump(subject.path).modules
    except HloAuditError as error:
        return [History(ProgramAudit(subject.label, error=error))]
    return [
        _history(audit, module, options, opcodes)
        for audit, module in zip(audits, modules, strict=True)
    ]


@no_collection()
def _history(
    audit: ProgramAudit, module: ModuleDump, options: RuleOptions, opcodes: Sequence[str]
) -> History:
    if audit.error is not None:
        return History(audit)
    try:
        passes = Passes(module)
    except HloAuditError as error:
        return History(replace(audit, error=error))
    timeline = make_timeline(passes, audit.rules, opcodes, options)
    return History(traced(audit, passes, options), timeline)


# -- for an audit alone


def trace_lowered(audit: ProgramAudit, folder: Path, options: RuleOptions) -> ProgramAudit:
    """Give each finding of a compiled program the pass that brought it."""
    return _trace(audit, step_of(read_dump(folder)), options)


def trace_recorded(
    audits: Sequence[ProgramAudit], path: Path, options: RuleOptions
) -> list[ProgramAudit]:
    """Give each finding of a dump folder's modules the pass that brought it; a single file has
    none."""
    if not path.is_dir():
        return list(audits)
    modules = read_dump(path).modules
    return [_trace(audit, module, options) for audit, module in zip(audits, modules, strict=True)]


@no_collection()
def _trace(audit: ProgramAudit, module: ModuleDump, options: RuleOptions) -> ProgramAudit:
    if not audit.findings or not module.passes:
        return audit
    return traced(audit, Passes(module), options)


def traced(audit: ProgramAudit, passes: Passes, options: RuleOptions) -> ProgramAudit:
    """Give each finding the pass that brought it."""
    provenance = Provenance(passes, audit.rules, options)
    with no_collection():
        return replace(
            audit,
            findings=tuple(
                replace(finding, introduced_by=provenance.introduced_by(finding))
                for finding in audit.findings
            ),
        )
