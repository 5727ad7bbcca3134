"""What a run meets besides programs: a compiler that dies, a disk that is full, a user without a
home. Each ends with a clear line and the right exit code, and leaves no process behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import start

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs" / "hardships.py"
COMPILE = ("--mesh", "x=1", "--platform", "cpu", "--mode", "auto")
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def end(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = run.communicate(timeout=120)
    return run.returncode, out, err


def left(run: subprocess.Popen[str]) -> list[str]:
    """The command lines of its processes that are still there, after a moment's grace."""
    deadline = time.monotonic() + 5
    while (found := list(alive(run.pid))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def alive(session: int) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if its == str(session) and state != "Z":
                yield (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue


def functions(*names: str) -> list[str]:
    return [f"{PROGRAMS}:{name}" for name in names]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("aborts", (), "the tracing of the program crashed"),
        ("is_killed", (), "the tracing of the program was killed"),
        ("hangs", ("--timeout", "3"), "the tracing of the program did not finish within 3 s"),
    ],
)
def test_a_compiler_that_ends_takes_no_other_program_with_it(
    tmp_path: Path, name: str, options: tuple[str, ...], words: str
) -> None:
    run = start(
        *("check", *functions(name, "works"), *COMPILE, *options, "--no-cache", "-q"),
        *("--format", "json"),
        cwd=tmp_path,
    )
    code, out, err = end(run)
    assert code == 3
    (line, *log) = err.splitlines()
    assert words in line
    assert all(one.startswith("  | ") for one in log)
    failed, audited = json.loads(out)["programs"]
    assert words in failed["error"]["message"]
    assert audited["counts"]["HLA002"] == 0
    assert left(run) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("old")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = start(
        *("check", *functions("works", "hangs"), *COMPILE, "--no-cache", "--output", report),
        *("--format", "json"),
        cwd=tmp_path,
        env={"TMPDIR": str(temporary)},
    )
    assert run.stderr is not None
    assert "compiled" in run.stderr.readline()  # the other one hangs
    run.send_signal(signal.SIGINT)
    code, out, err = end(run)
    assert code == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert left(run) == []
    assert report.read_text() == "old"
    assert list(temporary.iterdir()) == []


def test_a_libtpu_that_is_none_fails_the_programs_for_tpu_alone(tmp_path: Path) -> None:
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"no library")
    run = start(
        *("check", *functions("works"), "--mesh", "x=-1", "--platform", "tpu", "--no-cache"),
        *("--mode", "auto", "-q"),
        cwd=tmp_path,
        env={"TPU_LIBRARY_PATH": str(library)},
    )
    code, _, err = end(run)
    assert code in (2, 3)
    assert "libtpu" in err.splitlines()[0]
    assert "Traceback" not in err
    assert left(run) == []


# -- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 100 KiB: less than the dump of the smallest program takes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_for_dumps_is_an_error_of_the_program(tmp_path: Path, small_disk: Path) -> None:
    run = start(
        *("check", *functions("works"), *COMPILE, "--no-cache", "-q"),
        cwd=tmp_path,
        env={"TMPDIR": str(small_disk)},
    )
    code, _, err = end(run)
    assert code == 3
    program = f"{functions('works')[0]}/auto"
    said = "the dump cannot be completed: No space left on device"
    assert err == f"hlo-audit: error: {program}: {said}\n"
    assert left(run) == []
    assert list(small_disk.iterdir()) == []


def test_a_full_disk_for_dumps_leaves_the_cache_right(tmp_path: Path, small_disk: Path) -> None:
    cache = tmp_path / "cache"
    program = (*functions("works"), *COMPILE, "-q", "--cache-dir", cache)
    onto_full = ("lower", *program, "--output", small_disk / "dumps")
    assert end(start(*onto_full, cwd=tmp_path))[0] == 3
    assert not list(cache.rglob("*.zip"))  # nothing cut short is kept
    assert end(start("check", *program, cwd=tmp_path))[0] == 0
    (entry,) = cache.rglob("*.zip")
    (small_disk / "filler").write_bytes(bytes(80 << 10))
    code, _, err = end(start(*onto_full, cwd=tmp_path))
    assert code == 3
    assert "the dump cannot be completed: No space left on device" in err
    assert entry.exists()  # what is whole is no less so where it cannot be unpacked
    assert not list(small_disk.rglob("*.txt"))


def test_a_full_disk_for_the_cache_only_costs_the_next_compile(
    tmp_path: Path, small_disk: Path
) -> None:
    (small_disk / "filler").write_bytes(bytes(100 << 10))
    command = ("check", *functions("works"), *COMPILE, "-q", "--cache-dir", small_disk / "cache")
    for _ in range(2):
        run = start(*command, cwd=tmp_path)
        code, _, err = end(run)
        assert (code, err) == (0, "")
    assert not list(small_disk.rglob("*.zip"))


def test_a_cache_that_may_not_be_written_is_none(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "cache").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = start(
        *("check", *functions("works"), *COMPILE, "-q", "--cache-dir", small_disk / "cache"),
        cwd=tmp_path,
    )
    code, _, err = end(run)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("command", ["report", "baseline", "lower"])
def test_a_full_disk_for_the_output_leaves_what_was_there(
    tmp_path: Path, small_disk: Path, command: str
) -> None:
    target = small_disk / "target"
    program = (*functions("works"), *COMPILE, "-q", "--cache-dir", tmp_path / "cache")
    check = ("check", *program)
    commands: dict[str, tuple[object, ...]] = {
        "report": (*check, "--format", "json", "--output", target),
        "baseline": (*check, "--baseline", target, "--update-baseline"),
        "lower": ("lower", *program, "--output", target),
    }
    arguments = commands[command]
    if command == "baseline":
        assert end(start(*arguments, cwd=tmp_path))[0] == 0
    elif command == "report":
        target.write_text("old")
    before = target.read_text() if target.exists() else None
    if command == "baseline":  # it has to be another one: the same is not written
        arguments = tuple(one if one != "auto" else "explicit" for one in arguments)
    if command != "lower":
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(bytes(free))
    run = start(*arguments, cwd=tmp_path)
    code, _, err = end(run)
    assert code in (2, 3), err
    assert "No space left on device" in err
    assert "Traceback" not in err
    after = target.read_text() if target.is_file() else None
    assert after == before
    assert {path.name for path in small_disk.iterdir()} <= {"filler", "target"}


# -- users


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that every user may read and change, with the programs in it."""
    with tempfile.TemporaryDirectory(prefix="hlo-audit-test-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "hardships.py").write_text(PROGRAMS.read_text())
        yield folder


@as_root
def test_a_user_without_a_home_is_served(open_folder: Path) -> None:
    try:
        subprocess.run([sys.executable, "-c", "import hlo_audit, jax"], user=NOBODY, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this Python is not for other users to run")
    run = start(
        *("check", "hardships.py:works", *COMPILE, "-q"),
        cwd=open_folder,
        env={"HOME": None, "XDG_CACHE_HOME": None, "HLO_AUDIT_CACHE_DIR": None},
        user=NOBODY,
    )
    code, _, err = end(run)
    assert (code, err) == (0, "")


# -- several at once


def test_two_runs_at_once_share_the_cache_and_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ("check", *functions("works"), *COMPILE, "-q", "--cache-dir", tmp_path / "cache")
    runs = [start(*command, "--format", "json", "--output", report, cwd=tmp_path) for _ in range(3)]
    assert [end(run)[0] for run in runs] == [0, 0, 0]
    assert json.loads(report.read_text())["programs"][0]["counts"]["HLA002"] == 0
    assert [left(run) for run in runs] == [[], [], []]
    assert len(list((tmp_path / "cache").rglob("*.zip"))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "cache"}
