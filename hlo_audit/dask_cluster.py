"""The workers of a dask cluster as an executor: the extra ``hlo-audit[dask]``.

dask gives a task to another worker where one has died with it, so that nothing is lost. What would
never end is ended here: tasks of a cluster that has no workers any more, or no scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from typing import Any, ParamSpec, TypeVar

from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.lazy_import import lazy_import

distributed = lazy_import("distributed")

CONNECT_SECONDS = 10.0
"""How long a scheduler may take to answer."""

PATIENCE_SECONDS = 120.0
"""How long tasks wait where there is no worker at all: new ones may be on their way."""

_WATCH_SECONDS = 1.0
_CLOSE_SECONDS = 2.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextlib.contextmanager
def connected(address: str, *, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Executor]:
    """The workers of the scheduler at ``address``, such as ``tcp://10.0.0.1:8786``, as an executor.

    Args:
        patience_seconds: how long tasks may wait where there is no worker at all.

    Raises:
        UsageError: where dask is not installed, or no scheduler answers.
    """
    try:
        # One that could not connect would be closed again as it is deleted, in vain and at length.
        client_class = type("Client", (distributed.Client,), {"__del__": lambda _: None})
    except ImportError:
        raise UsageError(
            "dask.distributed is not installed", hint='pip install "hlo-audit[dask]"'
        ) from None
    # What goes wrong is told as an error, once; dask would also log it at length.
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":  # each has a level and a handler of its own
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        client = client_class(address, timeout=CONNECT_SECONDS, set_as_default=False)
    # An address may be wrong in as many ways as there are transports.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"no dask scheduler answers at {address[:200]}: {reason}") from None
    executor = _DaskExecutor(client, address, patience_seconds)
    try:
        yield executor
    finally:
        executor.stop_watching()
        with contextlib.suppress(Exception):  # the scheduler may be gone
            client.close(timeout=_CLOSE_SECONDS)


class _DaskExecutor(Executor):
    """dask's own executor; but its futures end, whatever becomes of the cluster."""

    def __init__(self, client: Any, address: str, patience_seconds: float) -> None:
        self._client = client
        self._address = address
        self._patience_seconds = patience_seconds
        self._executor: Executor = client.get_executor(pure=False)
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(
        self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        ours: Future[_T] = Future()
        with self._lock:
            self._waiting.add(ours)
        theirs = self._executor.submit(function, *args, **kwargs)
        theirs.add_done_callback(lambda done: self._end(ours, done))
        ours.add_done_callback(lambda done: theirs.cancel() if done.cancelled() else None)
        return ours

    def stop_watching(self) -> None:
        """No more is expected of the cluster."""
        self._stopped.set()

    def _end(self, ours: Future[Any], theirs: Future[Any]) -> None:
        if theirs.cancelled():
            self._fail(ours, CompileError(f"the dask scheduler at {self._address} has gone"))
            return
        error = theirs.exception()
        if isinstance(error, distributed.KilledWorker):
            count = error.allowed_failures + 1
            died = "a dask worker has" if count == 1 else f"{count} dask workers have"
            error = CompileError(
                f"{died} died at this program, and it was given up",
                hint="most often the memory is too small: use smaller sizes, or larger workers",
            )
        if error is not None:
            self._fail(ours, error)
        else:
            self._settle(ours, lambda: ours.set_result(theirs.result()))

    def _fail(self, ours: Future[Any], error: BaseException) -> None:
        self._settle(ours, lambda: ours.set_exception(error))

    def _settle(self, ours: Future[Any], settle: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.discard(ours)
        # It may be settled already: cancelled by whoever waits, or given up a moment ago.
        with contextlib.suppress(InvalidStateError):
            settle()

    def _watch(self) -> None:
        """Give up where there is no worker for too long."""
        last_seen = time.monotonic()
        while not self._stopped.wait(_WATCH_SECONDS):
            # A scheduler that is gone cancels the futures by itself.
            with contextlib.suppress(Exception):
                if self._client.nthreads() or not self._waiting:
                    last_seen = time.monotonic()
            if time.monotonic() - last_seen > self._patience_seconds:
                error: HloAuditError = CompileError(
                    f"the dask scheduler at {self._address} has no workers, or does not answer",
                    hint="start some, or see why they ended",
                )
                with self._lock:
                    waiting = list(self._waiting)
                for ours in waiting:
                    self._fail(ours, error)
