"""Programs that are compiled and audited through a ``concurrent.futures`` executor.

A task is one program. Where it runs, it starts a process of its own for the compiler
(:mod:`hlo_audit.compiler`), which may abort or hang without taking the executor's process with it.
The dump is audited there, and deleted; the audit alone comes back. So no file system is shared. But
hlo-audit, jax and the program's own code must be there, the last at the same path.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from hlo_audit._version import __version__
from hlo_audit.cache import Cache, default_folder, file_digest
from hlo_audit.compiler import Outcome, compile_programs
from hlo_audit.errors import CompileError, HloAuditError, RefusedReshapeError, UsageError
from hlo_audit.history import trace_lowered
from hlo_audit.program import Lowering
from hlo_audit.program_audit import (
    ProgramAudit,
    RuleOptions,
    Timing,
    audit_lowered,
    audit_refused,
    described_by,
)
from hlo_audit.rule import Rule


def audit_outcome(
    lowering: Lowering,
    outcome: Outcome,
    rules: Sequence[Rule],
    options: RuleOptions,
    introduced_by: bool,
) -> ProgramAudit:
    """Audit what came of a compile; an error is an audit with an error."""
    if isinstance(outcome, RefusedReshapeError):
        return audit_refused(lowering, outcome, rules)
    if isinstance(outcome, HloAuditError):
        return replace(described_by(lowering), error=outcome)
    timing = Timing(
        outcome.manifest.lower_seconds,
        # A compile takes more than no time: it is a dump that another program brought.
        outcome.manifest.compile_seconds or None,
        outcome.from_cache,
    )
    try:
        audit = audit_lowered(lowering, outcome.folder, rules, options)
        if introduced_by:
            audit = trace_lowered(audit, outcome.folder, options)
    except HloAuditError as error:
        audit = replace(described_by(lowering), error=error)
    return replace(audit, timing=timing)


@dataclass(frozen=True)
class Task:
    """One program to compile and audit, with all that must be known of it elsewhere.

    Attributes:
        here: the working directory of whoever asks, where the program's code is.
        source_digest: SHA-256 of the file that the program is in; ``None`` where it is in none.
        cached: whether to keep the dump, and to take one that is kept.
        cache_folder: where; ``None`` for the usual folder of the machine that does it.
        version: of hlo-audit.
    """

    lowering: Lowering
    rules: tuple[Rule, ...]
    options: RuleOptions
    timeout_seconds: float
    introduced_by: bool
    here: Path
    source_digest: str | None
    cached: bool
    cache_folder: Path | None
    version: str = __version__


@dataclass(frozen=True)
class Answer:
    """What came of a task; the folder of the outcome is no more.

    Attributes:
        audit: without the rules, which whoever asked knows.
    """

    outcome: Outcome
    audit: ProgramAudit


def run_task(task: Task) -> Answer:
    """Compile and audit a program in a process of its own; what an executor calls."""
    lowering = task.lowering
    outcome: Outcome
    with tempfile.TemporaryDirectory(prefix="hlo-audit-") as folder:
        try:
            _refuse_other_code(task)
            (outcome,) = compile_programs(
                [lowering],
                into=Path(folder),
                jobs=1,
                timeout_seconds=task.timeout_seconds,
                cache=_cache_of(task),
                here=task.here if task.here.is_dir() else None,
            )
        except HloAuditError as error:
            outcome = error
        audit = audit_outcome(lowering, outcome, task.rules, task.options, task.introduced_by)
    return Answer(outcome, replace(audit, rules=()))


def _refuse_other_code(task: Task) -> None:
    if task.version != __version__:
        raise UsageError(
            f"the worker on {platform.node()} has hlo-audit {__version__}, not {task.version}",
            hint="install the same version on each worker",
        )
    file = task.lowering.build.rpartition(":")[0]
    if task.source_digest is not None and file_digest(file) != task.source_digest:
        there = "another" if Path(file).is_file() else "no"
        raise UsageError(
            f"the worker on {platform.node()} has {there} file {file}",
            hint="the program's code must be on each worker, at the same path",
        )


def _cache_of(task: Task) -> Cache | None:
    return Cache(task.cache_folder or default_folder(os.environ)) if task.cached else None


def audit_through(
    executor: Executor,
    lowerings: Sequence[Lowering],
    rules: Sequence[Rule],
    options: RuleOptions,
    *,
    timeout_seconds: float,
    cache: Cache | None,
    on_done: Callable[[Lowering, Outcome, ProgramAudit], None],
    introduced_by: bool = False,
) -> None:
    """Compile and audit each program through ``executor``, which is left open.

    Whatever goes wrong with a task is the error of its program. An executor that does a task again
    where a worker has died, as dask's does, loses none.

    Args:
        timeout_seconds: how long each program may take, from the start of its task.
        cache: where dumps are kept, on the machines of the executor; the usual folder stands for
            the usual one of each.
        on_done: called in this thread with each program, its outcome and its audit, as they are
            done. The folder of an outcome is not on this machine.
    """
    waiting: dict[Future[Answer], Lowering] = {}
    try:
        for lowering in lowerings:
            task = _task(lowering, rules, options, timeout_seconds, introduced_by, cache)
            try:
                waiting[executor.submit(run_task, task)] = lowering
            # The boundary to an engine that is not ours: it may raise anything.
            except Exception as error:
                on_done(lowering, *_failed(lowering, _as_audit_error(error)))
        for future in as_completed(list(waiting)):
            lowering = waiting.pop(future)
            on_done(lowering, *_answer_of(future, lowering, rules))
    finally:
        for future in waiting:
            future.cancel()


def _task(
    lowering: Lowering,
    rules: Sequence[Rule],
    options: RuleOptions,
    timeout_seconds: float,
    introduced_by: bool,
    cache: Cache | None,
) -> Task:
    where, _, function = lowering.build.rpartition(":")
    here = Path.cwd()
    digest = None
    if where.endswith(".py"):
        file = here / where
        digest = file_digest(str(file))
        lowering = replace(lowering, build=f"{file}:{function}")
    usual = cache is None or cache.folder == default_folder(os.environ).absolute()
    return Task(
        lowering=lowering,
        # What documents and tests a rule is not needed to apply it, and is the most of it.
        rules=tuple(replace(rule, documentation="", examples=()) for rule in rules),
        options=options,
        timeout_seconds=timeout_seconds,
        introduced_by=introduced_by,
        here=here,
        source_digest=digest,
        cached=cache is not None,
        cache_folder=None if usual or cache is None else cache.folder,
    )


def _answer_of(
    future: Future[Answer], lowering: Lowering, rules: Sequence[Rule]
) -> tuple[Outcome, ProgramAudit]:
    try:
        answer = future.result()
    except CancelledError:
        error = CompileError("the executor has dropped the program: it was shut down, or has gone")
        return _failed(lowering, error)
    # The boundary to an engine that is not ours: it may raise anything.
    except Exception as caught:
        return _failed(lowering, _as_audit_error(caught))
    audited = answer.audit.error is None
    return answer.outcome, replace(answer.audit, rules=tuple(rules) if audited else ())


def _failed(lowering: Lowering, error: HloAuditError) -> tuple[Outcome, ProgramAudit]:
    return error, replace(described_by(lowering), error=error)


def _as_audit_error(error: Exception) -> HloAuditError:
    if isinstance(error, HloAuditError):
        return error
    reason = " ".join(str(error).split())[:300]
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    if isinstance(error, BrokenExecutor):
        return CompileError(f"a process of the executor has died: {text}")
    return CompileError(
        f"the executor could not do the task: {text}",
        hint="each worker needs the same Python, hlo-audit and jax as this process",
    )
