"""Files, folders and links that are made to hurt, given to the command itself: each ends with a
right result, or with exit code 2 and one line; in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import command_line
from command_line import assert_refused
from hlo_audit.dump import MAX_UNPACKED_TIMES, UNPACKED_BYTES_ALLOWED, read_module
from hlo_audit.errors import DumpError
from hlo_audit.manifest import read_manifest

pytestmark = pytest.mark.slow

MODULE = """\
HloModule m, is_scheduled=true

ENTRY %e (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  ROOT %copy = f32[512,512]{0,1} copy(%p)
}
"""

SECRET = "root-of-all-evil"


# Between, as the peak of a process counts what its parent held when it was started.
LAUNCHER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


def run(
    *arguments: object, cwd: Path, most_seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-c", LAUNCHER, cwd.parent / "peak", *command_line.COMMAND)
    return command_line.run(*arguments, command=launcher, cwd=cwd, most_seconds=most_seconds)


def peak_bytes(cwd: Path) -> int:
    """The most memory that the last run in ``cwd`` took."""
    unit = 1 if sys.platform == "darwin" else 1024
    return int((cwd.parent / "peak").read_text()) * unit


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def bind_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def dump_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for stage in ("before_optimizations", "after_codegen"):
        (folder / f"module_0001.m.{stage}.txt").write_text(MODULE)
    return folder


@pytest.mark.parametrize("piece", ["a", "{", '"', "%p, ", " "])
def test_a_line_of_50_mb(here: Path, piece: str, pytestconfig: pytest.Config) -> None:
    # What is not plain takes a minute at that size: a tenth of it tells as much.
    full = piece == "a" or pytestconfig.getoption("--full-size")
    count = (50_000_000 if full else 5_000_000) // len(piece)
    text = MODULE.replace("copy(%p)", "copy(%p), x=" + piece * count)
    (here / "step.txt").write_text(text)
    ended = run("check", "step.txt", cwd=here, most_seconds=120)
    if ended.returncode:
        assert_refused(ended, "step.txt")
    # A list of 50 million brackets is the worst: 80 bytes for each that is open.
    assert peak_bytes(here) < 400_000_000 + 120 * len(text)


def test_a_gzip_bomb_is_given_up_early(here: Path) -> None:
    bomb = here / "step.txt.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(512):
            file.write(b" " * (1 << 20))
    assert bomb.stat().st_size < 1 << 20
    ended = run("check", bomb, cwd=here)
    assert_refused(ended, "step.txt.gz", "gzip -d")
    assert peak_bytes(here) < 200_000_000 + 2 * UNPACKED_BYTES_ALLOWED


def test_a_large_file_may_unpack_to_many_times_its_size_and_no_more(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hlo_audit.dump.UNPACKED_BYTES_ALLOWED", 1000)
    path = here / "step.txt.gz"
    path.write_bytes(gzip.compress(MODULE.encode()))
    assert read_module(path).name == "m"
    path.write_bytes(gzip.compress(MODULE.encode() + b"\n" * 50_000))
    assert path.stat().st_size * MAX_UNPACKED_TIMES < 50_000
    with pytest.raises(DumpError, match="64 times its size"):
        read_module(path)


def test_links_lead_nowhere_out_of_a_dump(here: Path) -> None:
    secret = here / "secret.txt"
    secret.write_text(f"HloModule {SECRET}\n")
    dump = dump_in(here / "dump")
    (dump / "module_0002.x.before_optimizations.txt").symlink_to(secret)
    (dump / "module_0003.x.before_optimizations.txt").symlink_to("/etc/passwd")
    (dump / "hlo-audit.json").symlink_to(secret)
    (dump / "folder").symlink_to(here)
    (dump / "loop").symlink_to(dump)
    (dump / "one").symlink_to("two")
    (dump / "two").symlink_to("one")
    assert_refused(run("check", "dump", cwd=here), "hlo-audit.json is no manifest")
    (dump / "hlo-audit.json").unlink()
    ended = run("check", "dump", "--format", "json", cwd=here)
    assert ended.returncode == 0
    assert ended.stdout.count('"program":') == 1
    assert SECRET not in ended.stdout + ended.stderr


def test_a_manifest_that_is_a_link_is_not_read(here: Path) -> None:
    secret = here / "secret"
    secret.write_text(json.dumps({"schema_version": SECRET}))
    (here / "hlo-audit.json").symlink_to(secret)
    with pytest.raises(DumpError) as caught:
        read_manifest(here)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "option", [[], ["--baseline"], ["--config"], ["--against"]], ids=lambda option: "".join(option)
)
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "loop", "folder", "nothing"])
def test_what_is_no_file_is_refused_in_a_line(here: Path, option: list[str], kind: str) -> None:
    (here / "step.txt").write_text(MODULE)
    path = here / "special.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            bind_socket(path)
        case "device":
            path = Path("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "folder":
            path.mkdir()
    arguments: Sequence[str | Path] = ["step.txt", *option, path] if option else [path]
    ended = run("check", *arguments, cwd=here, most_seconds=30)
    assert_refused(ended)


def test_a_dump_of_special_files_reads_the_others(here: Path) -> None:
    dump = dump_in(here / "dump")
    os.mkfifo(dump / "module_0002.m.before_optimizations.txt")
    bind_socket(dump / "module_0003.m.before_optimizations.txt")
    ended = run("check", "dump", "--format", "json", cwd=here, most_seconds=30)
    assert ended.returncode == 0
    assert ended.stdout.count('"program":') == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_one_line_that_says_so(here: Path) -> None:
    dump = dump_in(here / "dump")
    (dump / "module_0001.m.after_codegen.txt").chmod(0)
    ended = run("check", "dump", cwd=here)
    assert_refused(ended, "after_codegen.txt", "Permission denied")
    dump.chmod(0)
    ended = run("check", "dump", cwd=here)
    dump.chmod(0o700)
    assert_refused(ended, "dump", "Permission denied")


def test_a_folder_of_100_000_files(here: Path) -> None:
    dump = dump_in(here / "dump")
    for number in range(100_000):
        (dump / f"other_{number:06}.bin").touch()
    ended = run("check", "dump", cwd=here)
    assert ended.returncode == 0, ended.stderr
    assert peak_bytes(here) < 300_000_000
    shutil.rmtree(dump)


def test_folders_very_deep_and_names_very_odd(here: Path) -> None:
    deepest = here
    for _ in range(300):
        deepest = deepest / "deep"
    deepest.mkdir(parents=True)
    dump_in(deepest)
    odd = dump_in(here / "\x1b[31m\n\u202e'\"")
    (odd / os.fsdecode(b"module_0001.\xff\xfe.after_codegen.txt")).write_text(MODULE)
    ended = run("check", ".", cwd=here)
    assert ended.returncode == 0, ended.stderr
    assert all(char.isprintable() or char == "\n" for char in ended.stdout)


def test_a_folder_that_vanishes_while_it_is_read(here: Path) -> None:
    dump = here / "dump"
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            dump_in(dump)
            shutil.rmtree(dump, ignore_errors=True)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(6):
            ended = run("check", "dump", cwd=here)
            if ended.returncode:  # a line for each module, of which there is one at most
                assert_refused(ended)
    finally:
        stop.set()
        thread.join()


def test_protos_that_take_too_much_are_refused_and_the_command_stays_small(here: Path) -> None:
    # A shape of a trillion elements, and the ids of instructions far apart.
    huge = b"\xff\xff\xff\xff\xff\xff\xff\x7f"
    proto = b"\x0a\x01m\x12\x01e\x1a" + bytes([40]) + b"\x0a\x01e\x12\x20\x0a\x01p\x12\x09parameter"
    proto += b"\x1a\x0c\x10\x0b\x1a\x08" + huge
    (here / "step.hlo.pb").write_bytes(proto)
    ended = run("check", "step.hlo.pb", cwd=here)
    assert_refused(ended, "step.hlo.pb")
    assert peak_bytes(here) < 200_000_000
