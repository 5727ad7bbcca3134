"""The command line in a process of its own, as users and CI jobs start it; and in this one, where
nothing of a process is tested."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

COMMAND = (sys.executable, "-m", "hlo_audit")

PATIENCE_SECONDS = 60.0
"""How long a test waits for something that takes a moment on a busy machine."""


def start(
    *arguments: object,
    command: Sequence[object] = COMMAND,
    cwd: Path | None = None,
    columns: int = 200,
    env: Mapping[str, str | None] | None = None,
    stdin: IO[str] | int = subprocess.DEVNULL,
    user: int | None = None,
) -> subprocess.Popen[str]:
    """Start it in a session of its own, so that all it starts can be found and ended.

    Args:
        command: what ``arguments`` are given to.
        columns: the width of the terminal; wide enough that few lines are broken.
        env: variables that differ from those of this process; ``None`` for one that is not set.
    """
    environment: dict[str, str | None] = {
        **os.environ,
        "COLUMNS": str(columns),
        "NO_COLOR": "1",
        **(env or {}),
    }
    return subprocess.Popen(
        [*map(str, command), *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        start_new_session=True,
        user=user,
        extra_groups=None if user is None else [],
    )


def run(
    *arguments: object,
    command: Sequence[object] = COMMAND,
    cwd: Path | None = None,
    columns: int = 200,
    env: Mapping[str, str | None] | None = None,
    stdin: IO[str] | int = subprocess.DEVNULL,
    text: str | None = None,
    most_seconds: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; see :func:`start`.

    Args:
        text: what it reads from standard input.
        most_seconds: how long it may take.
    """
    given = stdin if text is None else subprocess.PIPE
    process = start(*arguments, command=command, cwd=cwd, columns=columns, env=env, stdin=given)
    with process:
        try:
            out, err = process.communicate(text, most_seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def invoke(
    *arguments: object,
    cwd: Path | None = None,
    columns: int = 200,
    env: Mapping[str, str | None] | None = None,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """As :func:`run`, in this process, which saves the start of another: for what is read and
    written, not for signals, imports, the search path or what the end of a process does.

    A warning is an error here, as in every test.
    """
    from hlo_audit.cli import main

    out, err = io.BytesIO(), io.BytesIO()
    changed = {"COLUMNS": str(columns), "NO_COLOR": "1", **(env or {})}
    with (
        mock.patch.dict(os.environ, {n: v for n, v in changed.items() if v is not None}),
        mock.patch.object(sys, "argv", ["hlo-audit", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", _stream(io.BytesIO(text.encode()))),
        mock.patch.object(sys, "stdout", _stream(out)),
        mock.patch.object(sys, "stderr", _stream(err)),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        for name in [name for name, value in changed.items() if value is None]:
            os.environ.pop(name, None)
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Here: a stream that nobody has any more closes what it writes to.
        written = out.getvalue().decode(), err.getvalue().decode()
    return subprocess.CompletedProcess(["hlo-audit", *map(str, arguments)], code, *written)


def _stream(buffer: io.BytesIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(buffer, encoding="utf-8")


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It ended with exit code 2 and one line, in which these words are."""
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("hlo-audit: error: ")
    for word in words:
        assert word in line
    assert done.stdout == ""


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait for what is true of a condition."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie of a container without an init is dead, too
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
