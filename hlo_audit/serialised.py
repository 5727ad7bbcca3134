"""Serialised modules (``.hlo.pb``) -> HLO text, by XLA's own reader in a process of its own.

A damaged proto can make XLA abort or hang, and one of 1.3 KB was seen to make it take 6.4 GB. So
:mod:`hlo_audit.serialised_worker` reads them under limits of memory and of CPU time that grow with
the proto. It is started for the first proto, serves all that follow, and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hlo_audit.ending_signals import signal_name
from hlo_audit.errors import DumpError

_WORKER = Path(__file__).with_name("serialised_worker.py")

# XLA takes 25 to 45 bytes for a byte of a real proto, and 0.4 seconds for a megabyte (measured on
# modules of 20,000 and 40,000 instructions, with and without metadata; jax 0.10).
_MEMORY_BYTES = 1 << 30
_MEMORY_TIMES = 128
_SECONDS = 30
_SECONDS_PER_MB = 5

_START_SECONDS = 120
"""How long the process may take to start, and to import jaxlib, on a busy machine."""

# numpy, which jaxlib imports, starts a thread a core, whose stacks would count as memory.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_READ_BYTES = 1 << 20
_MOST_HEADER_BYTES = 1 << 16
_LONGEST_REASON = 300


def text_of_proto(data: bytes, path: Path) -> str:
    """The text of a serialised ``HloProto`` or ``HloModuleProto``.

    Memory and time of the process that reads it are limited in proportion to ``data``.

    Args:
        path: where it came from, for errors.

    Raises:
        DumpError: where it is no module, where XLA fails, crashes, hangs or takes too much memory
            on it, and where there is no jaxlib.
    """
    with _lock:
        return _reader_of_this_process().read(data, path)


class _Ended(Exception):
    """The process has ended, or has been ended."""


class _Reader:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Not from the working directory, where a dump may lie with a file called jaxlib.py.
        here = {"", os.curdir}
        with contextlib.suppress(OSError):  # it may be gone
            here.add(str(Path.cwd()))
        folders = [entry for entry in sys.path if entry not in here]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(folders)},
            )
        except OSError as error:
            raise DumpError(
                f"no process can be started to read a proto: {error.strerror}"
            ) from None

    @property
    def is_alive(self) -> bool:
        # After a fork the pipes are those of the other process.
        return self.owner == os.getpid() and self.process.poll() is None

    def read(self, data: bytes, path: Path) -> str:
        seconds = _SECONDS + _SECONDS_PER_MB * len(data) // 1_000_000
        memory_bytes = _MEMORY_BYTES + _MEMORY_TIMES * len(data)
        request = {"bytes": len(data), "memory_bytes": memory_bytes, "cpu_seconds": seconds}
        deadline = time.monotonic() + _START_SECONDS + seconds
        try:
            self._send(json.dumps(request).encode() + b"\n" + data)
            header, rest = self._header(deadline)
            if "error" not in header:
                return self._text(header["bytes"], rest, deadline)
        except _Ended:
            raise DumpError(f"XLA cannot read {path}: {self._how_it_ended(deadline)}") from None
        except BaseException:  # an interrupt: what is left in the pipes is no answer to the next
            self.close()
            raise
        if header["error"] != "proto":  # what it could not import whole may crash it later
            self.close()
        raise _error(header, path, memory_bytes)

    def _send(self, request: bytes) -> None:
        assert self.process.stdin is not None
        view = memoryview(request)
        try:
            while view:
                view = view[self.process.stdin.write(view) :]
        except BrokenPipeError:
            raise _Ended from None

    def _header(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        got = b""
        while b"\n" not in got:
            if len(got) > _MOST_HEADER_BYTES:
                raise _Ended
            got += self._receive(deadline)
        line, _, rest = got.partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        return header, rest

    def _text(self, length: int, start: bytes, deadline: float) -> str:
        parts = [start]
        got = len(start)
        while got < length:
            parts.append(self._receive(deadline))
            got += len(parts[-1])
        return b"".join(parts).decode("utf-8", "replace")

    def _receive(self, deadline: float) -> bytes:
        pipe = self.process.stdout
        assert pipe is not None
        with _waiting_for(pipe) as selector:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                self.process.kill()
                raise _Ended
        chunk = os.read(pipe.fileno(), _READ_BYTES)
        if not chunk:
            raise _Ended
        return chunk

    def _how_it_ended(self, deadline: float) -> str:
        late = time.monotonic() >= deadline
        self.close()
        code = self.process.returncode
        if late or code == -signal.SIGXCPU:
            return "it does not come to an end"
        if code >= 0:
            return f"it ended with exit code {code}"
        return f"it crashed with {signal_name(-code)}"

    def close(self) -> None:
        """End the process, at once where it is at work."""
        if self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


@contextlib.contextmanager
def _waiting_for(pipe: IO[bytes]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        yield selector


def _error(header: dict[str, Any], path: Path, memory_bytes: int) -> DumpError:
    match header["error"]:
        case "jaxlib":
            return DumpError(
                f"{path} needs jaxlib to be read", hint="pip install jaxlib, or dump as text"
            )
        case "memory":
            return DumpError(f"XLA cannot read {path}: it takes more than {memory_bytes:,} bytes")
    reason = header["reason"][:_LONGEST_REASON]
    return DumpError(f"{path} holds no serialised HLO module: {reason}")


_lock = threading.Lock()
_reader: _Reader | None = None


def _reader_of_this_process() -> _Reader:
    global _reader
    if _reader is None or not _reader.is_alive:
        _close()
        _reader = _Reader()
    return _reader


@atexit.register
def _close() -> None:
    global _reader
    if _reader is not None:
        _reader.close()
        _reader = None
