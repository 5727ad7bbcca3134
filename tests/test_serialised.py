"""Serialised modules are read in a process of their own: whatever XLA does there is one error, and
the next proto is read all the same."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import is_running, run, wait_until
from hlo_audit import serialised
from hlo_audit.dump import read_module
from hlo_audit.errors import DumpError

MODULE = """\
HloModule jit_step

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}
"""

ANSWER = "import json, os, sys, time, signal\nrequest = json.loads(sys.stdin.buffer.readline())\n"
MISBEHAVIOUR = {
    "abort": (ANSWER + "os.abort()", "it crashed with SIGABRT"),
    "crash": (ANSWER + "os.kill(os.getpid(), signal.SIGSEGV)", "it crashed with SIGSEGV"),
    "exit": (ANSWER + "sys.exit(3)", "it ended with exit code 3"),
    "CPU time": (ANSWER + "os.kill(os.getpid(), signal.SIGXCPU)", "it does not come to an end"),
    "hang": (ANSWER + "time.sleep(60)", "it does not come to an end"),
    "half an answer": (
        ANSWER + "sys.stdout.write('{\"bytes\": 100}\\nHlo')",
        "it ended with exit code 0",
    ),
    "prose": (ANSWER + "sys.stdout.write('x' * 100_000); sys.stdout.flush(); time.sleep(60)", ""),
    "dead at once": ("raise SystemExit(4)", "it ended with exit code 4"),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test starts without a process, and leaves none."""
    serialised._close()
    yield
    serialised._close()


def proto(text: str = MODULE) -> bytes:
    try:
        hlo = importlib.import_module("jaxlib._hlo")
    except ImportError:  # jaxlib before 0.8
        hlo = importlib.import_module("jaxlib._jax")
    data: bytes = hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "step.hlo.pb"
    path.write_bytes(proto())
    return path


def test_one_process_reads_all_and_is_not_this_one(path: Path) -> None:
    assert read_module(path).name == "jit_step"
    assert serialised._reader is not None
    first = serialised._reader.process.pid
    assert first != os.getpid()
    path.write_bytes(b"\x0a\x01m\xff")
    with pytest.raises(DumpError, match="holds no serialised HLO module"):
        read_module(path)
    path.write_bytes(proto())
    assert read_module(path).name == "jit_step"
    assert serialised._reader.process.pid == first


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_what_the_process_does_is_one_error(
    name: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, reason = MISBEHAVIOUR[name]
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    with monkeypatch.context() as patched:
        patched.setattr(serialised, "_WORKER", worker)
        patched.setattr(serialised, "_START_SECONDS", 1)
        patched.setattr(serialised, "_SECONDS", 1)
        started = time.monotonic()
        with pytest.raises(DumpError) as caught:
            read_module(path)
        assert time.monotonic() - started < 20
    message = str(caught.value)
    assert message.startswith(f"XLA cannot read {path}: ")
    assert reason in message
    assert "\n" not in message
    assert read_module(path).name == "jit_step"  # a new process


def test_a_proto_may_take_only_so_much_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialised, "_MEMORY_BYTES", 1 << 20)
    with pytest.raises(DumpError, match=r"XLA cannot read .*: it (takes more than|crashed|ended)"):
        read_module(path)
    monkeypatch.undo()
    assert read_module(path).name == "jit_step"


def test_without_jaxlib_it_says_what_is_missing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jaxlib.py").write_text("raise ImportError('none')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DumpError, match="needs jaxlib to be read"):
        read_module(path)


def test_a_file_in_the_working_directory_is_not_imported(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jaxlib", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert read_module(path).name == "jit_step"


def test_a_forked_process_starts_its_own(path: Path) -> None:
    assert read_module(path).name == "jit_step"
    assert serialised._reader is not None
    reader = serialised._reader
    reader.owner = -1  # as it is after a fork
    assert read_module(path).name == "jit_step"
    assert serialised._reader is not reader
    reader.owner = os.getpid()
    reader.close()


READ_AND_DIE = """\
import os, signal, sys
from pathlib import Path
from hlo_audit import serialised
from hlo_audit.dump import read_module
read_module(Path(sys.argv[1]))
print(serialised._reader.process.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "well"])
def test_it_ends_with_the_process_that_started_it(path: Path, how: str) -> None:
    ended = run(path, how, command=(sys.executable, "-c", READ_AND_DIE), most_seconds=60)
    assert ended.stderr == ""
    pid = int(ended.stdout)
    wait_until(lambda: not is_running(pid))
