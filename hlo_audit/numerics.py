"""Run two layouts of a model for real, on CPU devices in a worker, and compare their results.

jax is imported by the worker only (:mod:`hlo_audit.numerics_worker`). A crash or a hang is the
error of the one comparison that met it; the others go on in a new worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from hlo_audit.compiler import (
    DEFAULT_TIMEOUT_SECONDS,
    LOG_LINES,
    START_TIMEOUT_SECONDS,
    worker_environment,
)
from hlo_audit.ending_signals import signal_name
from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.numerics_worker import Comparison, Difference

_WORKER_COMMAND = (sys.executable, "-P", "-m", "hlo_audit.numerics_worker")

_READ_BYTES = 1 << 16
_LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Compared:
    """What came of a comparison.

    Attributes:
        comparison: what was asked for.
        differences: kind of inputs -> array -> how far it is apart; empty where there is an error.
        error: what kept it from being run, if anything did.
        failed_layout: the layout that the error is of, where that is known.
    """

    comparison: Comparison
    differences: Mapping[str, Mapping[str, Difference]]
    error: HloAuditError | None = None
    failed_layout: str | None = None


def compare_layouts(
    comparisons: Sequence[Comparison],
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    on_done: Callable[[Compared], None] | None = None,
) -> list[Compared]:
    """Run each comparison's two layouts and say how far their results are apart.

    Args:
        comparisons: what to run; those next to each other share a worker where they take the same
            number of devices, and what they have in common is run once.
        timeout_seconds: how long each may take, the import of jax left out.
        on_done: called in this thread with each as it is done.

    Returns:
        For each comparison, in order, the differences or what went wrong: a :class:`UsageError` for
        a layout that cannot be, a :class:`CompileError` for a run that crashed or took too long.

    Raises:
        CompileError: where no process can be started at all.
    """
    done: list[Compared] = []
    while len(done) < len(comparisons):
        _, alike = next(groupby(comparisons[len(done) :], key=lambda c: c.devices))
        for compared in _run_in_one_worker(list(alike), timeout_seconds):
            done.append(compared)
            if on_done is not None:
                on_done(compared)
    return done


def _run_in_one_worker(
    comparisons: Sequence[Comparison], timeout_seconds: float
) -> Iterator[Compared]:
    """Yield what came of the first, and of all the others unless the worker ends before."""
    with (
        tempfile.TemporaryFile() as log,
        _worker(comparisons, log) as (process, results),
        selectors.DefaultSelector() as selector,
    ):
        selector.register(results, selectors.EVENT_READ)
        unread = b""
        limit_seconds = START_TIMEOUT_SECONDS + timeout_seconds
        for comparison in comparisons:
            deadline = time.monotonic() + limit_seconds
            while b"\n" not in unread:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    message = f"the run did not finish within {limit_seconds:g} s"
                    yield Compared(comparison, {}, CompileError(message, log=_tail(log)))
                    return
                chunk = os.read(results, _READ_BYTES)
                if not chunk:
                    yield Compared(comparison, {}, _crash(process.wait(), _tail(log)))
                    return
                unread += chunk
            line, _, unread = unread.partition(b"\n")
            yield _compared(comparison, json.loads(line))
            limit_seconds = timeout_seconds


@contextlib.contextmanager
def _worker(
    comparisons: Sequence[Comparison], log: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A worker that has its comparisons, and the pipe it answers on; ended at the end."""
    results_read, results_write = os.pipe()
    # jax does not load libtpu for CPU devices: nothing is written to its folder of logs.
    environment = worker_environment(
        os.environ, Path(tempfile.gettempdir()), comparisons[0].devices
    )
    try:
        process = subprocess.Popen(
            [*_WORKER_COMMAND, str(results_write)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(results_write,),
            # Out of the terminal's reach, and killed with all that it starts.
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        os.close(results_read)
        raise CompileError(f"no worker process can be started: {error.strerror}") from None
    finally:
        os.close(results_write)
    try:
        assert process.stdin is not None
        # A worker that is dead already is found out by its results pipe.
        with contextlib.suppress(BrokenPipeError), process.stdin as jobs:
            jobs.write(json.dumps([comparison.to_json() for comparison in comparisons]).encode())
        yield process, results_read
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(results_read)


def _compared(comparison: Comparison, answer: Mapping[str, Any]) -> Compared:
    if "error" in answer:
        told = answer["error"]
        kind = UsageError if told["kind"] == UsageError.kind else CompileError
        error = kind(told["message"], hint=told["hint"])
        return Compared(comparison, {}, error, answer["layout"])
    differences = {
        inputs: {name: Difference(**difference) for name, difference in arrays.items()}
        for inputs, arrays in answer["differences"].items()
    }
    return Compared(comparison, differences)


def _crash(code: int, log: tuple[str, ...]) -> CompileError:
    if code >= 0:
        return CompileError(f"the run ended the process with exit code {code}", log=log)
    return CompileError(f"the run crashed with {signal_name(-code)}", log=log)


def _tail(log: IO[bytes]) -> tuple[str, ...]:
    """Return the last lines that the worker wrote."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - _LOG_TAIL_BYTES))
    lines = (line.rstrip() for line in log.read().decode(errors="replace").splitlines())
    return tuple(line for line in lines if line)[-LOG_LINES:]
