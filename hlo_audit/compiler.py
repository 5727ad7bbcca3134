"""Ahead-of-time compiles in worker processes: a program becomes a dump folder with every pass.

jax is imported by the workers only (:mod:`hlo_audit.compile_worker`). A crash, an abort or a hang
of the compiler is the error of the one program that met it; the others go on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hlo_audit.cache import Cache
from hlo_audit.compile_worker import GRACE_SECONDS, Job, Stage, is_ours
from hlo_audit.dump import parse_file_name
from hlo_audit.ending_signals import ended_by_signals, signal_name, signals_held, signals_ignored
from hlo_audit.errors import (
    CompileError,
    HloAuditError,
    RefusedReshapeError,
    UsageError,
    error_of_kind,
)
from hlo_audit.manifest import Manifest, write_manifest
from hlo_audit.program import Lowering, Platform
from hlo_audit.topology import parse_cpu_devices, parse_tpu_topology

DEFAULT_TIMEOUT_SECONDS = 600.0

START_TIMEOUT_SECONDS = 120.0
"""How long a worker may take to start and import jax."""

LOG_LINES = 20
"""How many of the compiler's last lines a :class:`CompileError` keeps."""

# -P: the working directory is no place to import from, unless it is in this process too.
_WORKER_COMMAND = (sys.executable, "-P", "-m", "hlo_audit.compile_worker")

_POLL_SECONDS = 0.5
_READ_BYTES = 1 << 16
_LOG_TAIL_BYTES = 1 << 18
_LONGEST_CHECK = 200

_AT_WORK: Mapping[Stage, str] = {
    "start": "the import of jax",
    "topology": "the compiler",
    "build": "the tracing of the program",
    "compile": "the compiler",
}


@dataclass(frozen=True)
class Compiled:
    """A program that was compiled.

    Attributes:
        lowering: what was asked for.
        folder: the dump folder, with a snapshot of every pass and the manifest.
        manifest: what the manifest in the folder says.
        from_cache: whether the compiler had not to run.
    """

    lowering: Lowering
    folder: Path
    manifest: Manifest
    from_cache: bool = False


Outcome = Compiled | HloAuditError


def available_platform() -> Platform:
    """Return ``tpu`` where the TPU compiler can run on this machine, else ``cpu``."""
    return "tpu" if _missing_libtpu() is None else "cpu"


def check_can_compile(platform: Platform) -> None:
    """Refuse a platform that this machine has no compiler for.

    Raises:
        UsageError: says why, and what to do.
    """
    missing = _missing_libtpu() if platform == "tpu" else None
    if missing is not None:
        raise missing


def default_jobs() -> int:
    """Return how many workers to run side by side: the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_programs(
    lowerings: Sequence[Lowering],
    *,
    into: Path,
    jobs: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    cache: Cache | None = None,
    on_done: Callable[[Lowering, Outcome], None] | None = None,
    here: Path | None = None,
) -> list[Outcome]:
    """Compile each program into a dump folder of its own below ``into``.

    The folders are named after the programs and appear when they are complete; nothing half-written
    is left, whatever ends the call. Nothing is printed, and nothing in ``into`` is overwritten.

    Args:
        lowerings: the programs.
        into: the folder for the dump folders; made where it is missing.
        jobs: how many to compile side by side; ``None`` for one a CPU.
        timeout_seconds: how long each program may take, the import of jax left out.
        cache: where dumps are kept; a program that is in it is not compiled again.
        on_done: called in this thread with each program and its outcome, as they are done.
        here: the working directory of the programs; ``None`` for that of this process.

    Returns:
        For each program, in the order of ``lowerings``, its dump or what went wrong: a
        :class:`UsageError` for a program, topology, mesh or flag that cannot be, a
        :class:`CompileError` for a compile that failed, crashed or took too long.

    Raises:
        UsageError: where ``into`` cannot be written to, or ``jobs`` or the timeout is not positive.
        CompileError: where no process can be started at all.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"{jobs} jobs are too few", hint="at least 1")
    if not timeout_seconds > 0:
        raise UsageError(f"a timeout of {timeout_seconds:g} s is too short")
    outcomes: dict[int, Outcome] = {}

    def done(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        if on_done is not None:
            on_done(lowerings[index], outcome)

    with ended_by_signals(), _workspace(into) as workspace:
        tasks = []
        for index, lowering in enumerate(lowerings):
            try:
                task = _task(index, lowering, workspace)
                cached = None if cache is None else _find_cached(cache, task, into, here)
            except HloAuditError as error:
                done(index, error)
                continue
            if cached is None:
                tasks.append(task if cache is None else _with_cache(task, cache))
            else:
                done(index, cached)
        crew = _Crew(tasks, workspace, into, jobs or default_jobs(), timeout_seconds, cache, here)
        try:
            for index, outcome in crew.run():
                done(index, outcome)
            crew.wait()
        finally:
            with signals_ignored():
                crew.kill()
    return [outcomes[index] for index in range(len(lowerings))]


@dataclass(frozen=True)
class _Bench:
    """Which programs one worker can compile: what it holds must not differ between them.

    Attributes:
        cpu_devices: fixed as jax starts; ``None`` for the platform tpu.
        code: the file or module of a user's program, whose import may change jax's settings,
            ``sys.path`` and ``sys.modules``; our own models change nothing, and share a worker.
    """

    cpu_devices: int | None
    code: str


@dataclass(frozen=True)
class _Task:
    index: int
    bench: _Bench
    job: Job


@dataclass
class _Worker:
    """A worker process and what it is at; idle without a task."""

    process: subprocess.Popen[bytes]
    bench: _Bench
    jobs: io.FileIO
    results: io.FileIO
    log: Path
    task: _Task | None = None
    stage: Stage = "start"
    limit_seconds: float = math.inf
    deadline: float = math.inf
    log_start_bytes: int = 0
    unread: bytes = b""

    def give_up_after(self, seconds: float) -> None:
        self.limit_seconds = seconds
        self.deadline = time.monotonic() + seconds


class _Crew:
    """The workers of one call, and the tasks that wait for them."""

    def __init__(
        self,
        tasks: Sequence[_Task],
        workspace: Path,
        into: Path,
        jobs: int,
        timeout_seconds: float,
        cache: Cache | None,
        here: Path | None,
    ) -> None:
        self._cache = cache
        self._here = here
        self._waiting = deque(tasks)
        self._workspace = workspace
        self._into = into
        self._jobs = jobs
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        self._leaving: list[_Worker] = []
        self._started = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> Iterator[tuple[int, Outcome]]:
        """Compile all; yield each task's index and outcome as it is done.

        The workers have their next tasks by then: what is done with an outcome costs no time.
        """
        self._assign()
        while busy := [worker for worker in self._workers if worker.task is not None]:
            outcomes: list[tuple[int, Outcome]] = []
            wait = min(worker.deadline for worker in busy) - time.monotonic()
            for key, _ in self._selector.select(min(max(wait, 0.0), _POLL_SECONDS)):
                outcomes += self._read(key.data)
            for worker in busy:
                outcomes += self._check(worker)
            self._assign()
            yield from outcomes

    def wait(self) -> None:
        """Wait a moment for the workers, all let go, to end by themselves."""
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self._leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0.0))

    def kill(self) -> None:
        """End every worker, and all that it started, at once."""
        for worker in [*self._workers, *self._leaving]:
            _end(worker)
            worker.results.close()
        self._selector.close()

    def _assign(self) -> None:
        for worker in [worker for worker in self._workers if worker.task is None]:
            task = next((task for task in self._waiting if task.bench == worker.bench), None)
            if task is None or worker.process.poll() is not None:
                self._let_go(worker)
            else:
                self._give(worker, task)
        while self._waiting and len(self._workers) < self._jobs:
            task = self._waiting[0]
            # Started and on the list, or not at all: else an interrupt would leave it running.
            with signals_held():
                worker = self._start(task.bench)
                self._workers.append(worker)
            self._selector.register(worker.results, selectors.EVENT_READ, worker)
            self._give(worker, task)

    def _give(self, worker: _Worker, task: _Task) -> None:
        self._waiting.remove(task)
        worker.task = task
        worker.stage = "start"
        worker.give_up_after(START_TIMEOUT_SECONDS)
        worker.log_start_bytes = worker.log.stat().st_size
        line = memoryview(json.dumps(task.job.to_json()).encode() + b"\n")
        # A worker that is dead already is found out by its results pipe.
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[worker.jobs.write(line) :]

    def _start(self, bench: _Bench) -> _Worker:
        self._started += 1
        folder = self._workspace / f"worker-{self._started}"
        folder.mkdir()
        log = folder / "log"
        jobs_read, jobs_write = os.pipe()
        results_read, results_write = os.pipe()
        jobs = io.FileIO(jobs_write, "w")
        results = io.FileIO(results_read)
        os.set_blocking(results_read, False)
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*_WORKER_COMMAND, str(jobs_read), str(results_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(jobs_read, results_write),
                    # Out of the terminal's reach, and killed with all that it starts.
                    start_new_session=True,
                    env=worker_environment(os.environ, folder, bench.cpu_devices),
                    cwd=self._here,
                )
        except OSError as error:
            jobs.close()
            results.close()
            raise CompileError(f"no worker process can be started: {error.strerror}") from None
        finally:
            os.close(jobs_read)
            os.close(results_write)
        return _Worker(process, bench, jobs, results, log)

    def _let_go(self, worker: _Worker) -> None:
        """Let an idle worker end by itself: programs have things to do at their exit."""
        self._leaving.append(worker)
        self._workers.remove(worker)
        self._selector.unregister(worker.results)
        worker.jobs.close()

    def _remove(self, worker: _Worker) -> None:
        # Dead before it is off the list: an interrupt in between must not leave it running.
        _end(worker)
        self._workers.remove(worker)
        self._selector.unregister(worker.results)
        worker.results.close()

    def _read(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        chunk = worker.results.read(_READ_BYTES)
        if chunk == b"":
            yield from self._bury(worker)
            return
        worker.unread += chunk or b""
        *lines, worker.unread = worker.unread.split(b"\n")
        for line in lines:
            answer: dict[str, Any] = json.loads(line)
            if "stage" in answer:
                if worker.stage == "start":
                    worker.give_up_after(self._timeout_seconds)
                worker.stage = answer["stage"]
            elif worker.task is not None:
                task, worker.task = worker.task, None
                outcome = self._outcome(task, answer)
                if outcome is not None:
                    yield task.index, outcome

    def _outcome(self, task: _Task, answer: Mapping[str, Any]) -> Outcome | None:
        """The outcome of a task; ``None`` where it has to be done once more."""
        if "error" in answer:
            return _error_from_json(answer["error"])
        manifest = Manifest.from_json(answer["manifest"])
        if not answer.get("cached"):
            try:
                refuse_cut_short(task.job.dump_to)
            except CompileError as error:
                return error
        if self._cache is not None:
            entry: str = answer["entry"]
            lowering = task.job.lowering
            if not answer["cached"]:
                kept = self._cache.store(entry, task.job.dump_to)
            else:
                try:
                    kept = self._cache.extract(entry, task.job.dump_to)
                except OSError as error:
                    return _not_completed(error)
                if not kept:
                    # It was damaged, or another process has just deleted it.
                    job = replace(task.job, cache_entries=None)
                    self._waiting.appendleft(replace(task, job=job))
                    return None
            if kept:
                settings = compile_environment(lowering, self._here)
                self._cache.record(lowering, settings, entry, manifest, answer["sources"])
        return _complete(task, manifest, self._into, from_cache=bool(answer.get("cached")))

    def _check(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        """Find a hang, and a death that the pipe does not tell as the worker's child holds it."""
        dead = worker.process.poll() is not None
        if worker.task is not None and (dead or time.monotonic() >= worker.deadline):
            # It may have answered while this process was busy with another outcome.
            yield from self._read(worker)
        if worker.task is None:
            return
        if dead:
            yield from self._bury(worker)
        elif time.monotonic() >= worker.deadline:
            self._remove(worker)
            error = CompileError(
                f"{_AT_WORK[worker.stage]} did not finish within {worker.limit_seconds:g} s",
                log=_log_tail(worker),
            )
            yield worker.task.index, error

    def _bury(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        # The pipe closes a moment before the process has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(GRACE_SECONDS)
        self._remove(worker)
        task, worker.task = worker.task, None
        if task is not None:
            yield task.index, _crash(worker, task.job.lowering.platform)


def _with_cache(task: _Task, cache: Cache) -> _Task:
    return replace(task, job=replace(task.job, cache_entries=cache.entries_folder))


def _find_cached(cache: Cache, task: _Task, into: Path, here: Path | None) -> Outcome | None:
    """The outcome of a task whose program and source are as they were; else ``None``."""
    lowering = task.job.lowering
    found = cache.find(lowering, compile_environment(lowering, here))
    if found is None:
        return None
    key, manifest = found
    try:
        if not cache.extract(key, task.job.dump_to):
            return None
    except OSError as error:
        return _not_completed(error)
    return _complete(task, manifest, into, from_cache=True)


def refuse_cut_short(dump: Path) -> None:
    """Refuse a dump that the compiler could not write to its end: it does not say so itself.

    Raises:
        CompileError: where a module is empty, or the disk has no room left.
    """
    try:
        for path in dump.iterdir():
            if parse_file_name(path.name) and path.stat().st_size == 0:
                raise CompileError(f"the dump cannot be completed: {path.name} is empty")
        disk = os.statvfs(dump)
    except OSError as error:
        raise _not_completed(error) from None
    if disk.f_blocks and not disk.f_bavail:
        raise _not_completed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _not_completed(error: OSError) -> CompileError:
    return CompileError(f"the dump cannot be completed: {error.strerror}")


def _complete(task: _Task, manifest: Manifest, into: Path, *, from_cache: bool) -> Outcome:
    """Move a dump to where it is to be."""
    try:
        write_manifest(manifest, task.job.dump_to)
        folder = _move_in(task.job.dump_to, into / _folder_name(task.job.lowering))
    except OSError as error:
        return _not_completed(error)
    return Compiled(task.job.lowering, folder, manifest, from_cache)


def compile_environment(lowering: Lowering, here: Path | None = None) -> dict[str, str | None]:
    """What decides a compile beside the program: versions, the settings that jax reads, and where
    Python finds the program: there may be two checkouts of it.

    A program under other ones is another program to the cache.

    Args:
        here: the working directory of the program; ``None`` for that of this process.
    """
    where = lowering.build.rpartition(":")[0]
    if where.endswith(".py"):
        found_in = Path(here or "", where).resolve()
    else:
        found_in = Path(__file__).parent if is_ours(where) else here or Path.cwd()
    versions = {name: _version(name) for name in ("jax", "jaxlib", "libtpu", "hlo-audit")}
    settings = {
        name: value
        for name, value in worker_environment(os.environ, Path(), None).items()
        if name.startswith(("JAX_", "XLA_")) or name in ("TPU_LIBRARY_PATH", "PYTHONPATH")
    }
    return {"python": platform.python_version(), "found_in": str(found_in), **versions, **settings}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def worker_environment(
    environ: Mapping[str, str], folder: Path, cpu_devices: int | None
) -> dict[str, str]:
    """Return the environment for a worker: ``environ`` without what would change or break compiles.

    Flags are given with the program, where they are recorded, never by the environment: XLA_FLAGS
    and LIBTPU_INIT_ARGS do not reach the worker. The rest of libtpu's variables describe the TPU of
    this machine, which is not the one compiled for.

    Args:
        environ: the environment of this process.
        folder: where libtpu puts its logs.
        cpu_devices: the number of CPU devices, or ``None`` for jax's default.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name == "TPU_LIBRARY_PATH"
        or (name not in _DROPPED and not name.startswith(("TPU_", "LIBTPU_")))
    }
    devices = {} if cpu_devices is None else {"JAX_NUM_CPU_DEVICES": str(cpu_devices)}
    return {
        **kept,
        **_WORKER_SETTINGS,
        **devices,
        "TPU_LOG_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
    }


_DROPPED = frozenset(
    {
        "XLA_FLAGS",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_DISABLE_JIT",
        "JAX_DISABLE_MOST_OPTIMIZATIONS",
        "JAX_NUM_CPU_DEVICES",
        "JAX_PLATFORM_NAME",
    }
)

LIBTPU_SETTINGS = {
    # Without it a second libtpu on this machine aborts.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # libtpu asks the cloud what machine this is, and complains at length, unless it is told.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""What lets libtpu compile on a machine that has no TPU, several processes side by side."""

_WORKER_SETTINGS = {
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a hit would write no dump
    "JAX_PLATFORMS": "cpu",
    **LIBTPU_SETTINGS,
    # What was printed before a crash is in the log.
    "PYTHONUNBUFFERED": "1",
}


def _task(index: int, lowering: Lowering, workspace: Path) -> _Task:
    for flag in lowering.xla_flags:
        if flag.startswith("xla_dump_"):
            raise UsageError(f"the flag {flag} is set by hlo-audit, which dumps every pass")
    bounds, cpu_devices = None, None
    if lowering.platform == "tpu":
        bounds = parse_tpu_topology(lowering.topology).chips_per_host_bounds
        check_can_compile("tpu")
    else:
        cpu_devices = parse_cpu_devices(lowering.topology)
    code = lowering.build.rpartition(":")[0]
    bench = _Bench(cpu_devices, "" if is_ours(code) else code)
    dump_to = workspace / f"program-{index}"
    dump_to.mkdir()
    return _Task(index, bench, Job(lowering, dump_to, bounds))


def _missing_libtpu() -> UsageError | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return UsageError(
            "the TPU compiler runs on Linux on x86-64 only", hint="take the platform cpu here"
        )
    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        return UsageError(
            "the TPU compiler, libtpu, is not installed",
            hint='pip install "jax[tpu]", or take the platform cpu',
        )
    return None


def _folder_name(lowering: Lowering) -> str:
    """Return a name such as ``lm-head.explicit.embed-vocab.v5p-2x2x1``."""
    place = lowering.topology if lowering.platform == "tpu" else f"cpu-{lowering.topology}"
    parts = (lowering.program, lowering.mode, lowering.layout, place)
    name = ".".join(part for part in parts if part)
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    return safe.lstrip("-.") or "program"


def _move_in(folder: Path, wanted: Path) -> Path:
    """Move ``folder`` to ``wanted``, or to ``wanted.2`` and so on where that is taken."""
    number, target = 1, wanted
    while True:
        try:
            if not target.exists():
                return folder.rename(target)
        except OSError:
            # Another process has taken the name this very moment.
            if not target.exists():
                raise
        number += 1
        target = wanted.with_name(f"{wanted.name}.{number}")


def _error_from_json(data: Mapping[str, Any]) -> HloAuditError:
    message, hint, log = data["message"], data["hint"], tuple(data["log"])
    if refused := data.get("refused"):
        return RefusedReshapeError(
            message,
            operand=refused["operand"],
            sizes=tuple(refused["sizes"]),
            frames=tuple((file, line, function) for file, line, function in refused["frames"]),
            hint=hint,
            log=log,
        )
    return error_of_kind(data["kind"], message, hint=hint, log=log)


def _end(worker: _Worker) -> None:
    """Kill the worker and all that it started."""
    # On macOS a group of none but zombies is refused.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    worker.jobs.close()


def _crash(worker: _Worker, on: Platform) -> CompileError:
    log = _log_tail(worker)
    code = worker.process.returncode
    subject = _AT_WORK[worker.stage]
    if code == -signal.SIGKILL:
        return CompileError(
            f"{subject} was killed",
            hint="most often the memory is too small: use fewer jobs, or smaller sizes",
            log=log,
        )
    if code >= 0:
        return CompileError(f"{subject} ended the process with exit code {code}", log=log)
    compiling_for_tpu = on == "tpu" and worker.stage in ("topology", "compile")
    return CompileError(
        f"{subject} crashed with {signal_name(-code)}{_failed_check(log)}",
        hint='libtpu must be the one jax was released with: pip install "jax[tpu]"'
        if compiling_for_tpu
        else None,
        log=log,
    )


def _failed_check(log: Sequence[str]) -> str:
    """Return ``: Check failed: ...`` where the compiler said so before it aborted."""
    for line in log:
        _, found, reason = line.partition("Check failed: ")
        if found:
            return f": {found}{reason[:_LONGEST_CHECK]}"
    return ""


def _log_tail(worker: _Worker) -> tuple[str, ...]:
    """Return the last lines that the worker wrote since it got its task."""
    with worker.log.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(worker.log_start_bytes, end - _LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    lines = (line.rstrip() for line in text.splitlines())
    return tuple(line for line in lines if line and not _is_stack_line(line))[-LOG_LINES:]


def _is_stack_line(line: str) -> bool:
    """Whether it is one of the many lines of a C++ stack, which would push the reason out."""
    return line.startswith(("    @ ", "PC: @ ", "https://symbolize."))


@contextlib.contextmanager
def _workspace(into: Path) -> Iterator[Path]:
    """A folder inside ``into``, on the same file system, for all that is not complete."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        workspace = tempfile.TemporaryDirectory(
            prefix=".hlo-audit-", dir=into.resolve(), ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(f"cannot write to the folder {into}: {error.strerror}") from None
    try:
        yield Path(workspace.name)
    finally:
        with signals_ignored():
            workspace.cleanup()
