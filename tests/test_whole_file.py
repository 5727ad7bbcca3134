"""Files are written whole or not at all: a kill leaves the old or the new one, and no litter."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from hlo_audit.baseline import read_baseline
from hlo_audit.errors import UsageError
from hlo_audit.whole_file import delete_left_over, replacing, write_text

LEAST_KILLS = 12
MOST_KILLS = 120
"""Which moment a kill meets is chance: there are more of them until one met a file half written."""

WRITE_ON_AND_ON = """\
import sys
from pathlib import Path
from hlo_audit.baseline import Baseline, Entry, KnownFinding, write_baseline
from hlo_audit.cache import Cache
from hlo_audit.cli.output import put

folder = Path(sys.argv[1])
cache = Cache(folder / "cache")
turn = 0
while True:
    letter = "ab"[turn % 2]
    put(letter * 3_000_000, folder / "report")
    findings = tuple(KnownFinding("HLA002", f"{n:016}", 1, 1, letter) for n in range(2_000))
    entry = Entry("p", *[None] * 5, {}, {}, {}, {}, {"HLA002": 2_000}, findings)
    write_baseline(Baseline("b", (entry,)), folder / "baseline.json")
    assert cache.store("key", folder / letter)
    if turn == 1:
        print("ready", flush=True)
    turn += 1
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    for letter in "ab":
        (tmp_path / letter).mkdir()
        for number in range(3):
            file = tmp_path / letter / f"module_000{number}.m.before_optimizations.txt"
            file.write_text(letter * 300_000)
    rng = random.Random(0)
    seen: set[str] = set()
    left: list[Path] = []
    for number in range(MOST_KILLS):
        if number >= LEAST_KILLS and left and seen == {"a", "b"}:
            break
        command = [sys.executable, "-c", WRITE_ON_AND_ON, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.random() * 0.1)
            process.kill()
        report = (tmp_path / "report").read_text()
        assert report in ("a" * 3_000_000, "b" * 3_000_000)
        (entry,) = read_baseline(tmp_path / "baseline.json").entries
        assert len(entry.findings) == 2_000
        assert len({finding.message for finding in entry.findings}) == 1
        with zipfile.ZipFile(tmp_path / "cache" / "v1" / "entries" / "key.zip") as archive:
            assert archive.testzip() is None
            letters = {chr(archive.read(name)[0]) for name in archive.namelist()}
            assert len(letters) == 1
        seen |= {report[0], entry.findings[0].message} | letters
        left = [path for path in tmp_path.rglob(".hlo-audit-*") if path.is_file()]
    assert seen == {"a", "b"}  # else no kill came in between
    assert left, "no kill met a file that was being written"
    for path in left:
        os.utime(path, (0, 0))
    for folder in {path.parent for path in left}:
        write_text(folder / "other", "text")
        assert [path.name for path in folder.glob(".hlo-audit-*.tmp")] == []


def test_a_file_that_is_being_written_is_not_deleted_as_left_over(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("whole")
        os.utime(temporary, (0, 0))
        delete_left_over(tmp_path)
        assert temporary.exists()
    assert (tmp_path / "a").read_text() == "whole"


def test_what_is_young_or_another_tools_is_left_alone(tmp_path: Path) -> None:
    young, other, link = (tmp_path / name for name in (".hlo-audit-1.tmp", ".x.tmp", "target"))
    for path in (young, other, link):
        path.write_text("")
    os.utime(other, (0, 0))
    os.utime(link, (0, 0))
    (tmp_path / ".hlo-audit-2.tmp").symlink_to(link)
    os.mkfifo(tmp_path / ".hlo-audit-3.tmp")
    os.utime(tmp_path / ".hlo-audit-3.tmp", (0, 0))
    write_text(tmp_path / "a", "text")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *(".hlo-audit-1.tmp", ".x.tmp", "target", ".hlo-audit-2.tmp", ".hlo-audit-3.tmp", "a")
    }


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_the_permissions_of_a_file_stay_as_they_are(mode: int, tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    path.chmod(mode)
    link.symlink_to("a")
    write_text(link, "new")
    with replacing(path) as temporary:
        temporary.write_text("newer")
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "newer"
    assert path.stat().st_mode & 0o777 == mode


def test_a_group_that_cannot_be_kept_is_not_given_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    path = tmp_path / "a"
    for mode, left in ((0o660, 0o600), (0o664, 0o644)):
        path.write_text("old")
        path.chmod(mode)
        write_text(path, "new")
        assert path.stat().st_mode & 0o777 == left


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_loop_of_links_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="cannot write"):
        write_text(tmp_path / "a", "text")


def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left_over = tmp_path / ".hlo-audit-1.tmp"
    left_over.write_text("")
    os.utime(left_over, (0, 0))
    write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
    assert left_over.exists()  # nobody can say that it is not in use


@pytest.mark.slow
def test_a_kill_of_the_command_leaves_the_old_report_or_the_new_one(tmp_path: Path) -> None:
    module = "HloModule m\n\nENTRY %e {\n  ROOT %p = f32[2]{0} parameter(0)\n}\n"
    (tmp_path / "step.txt").write_text(module)
    command = [sys.executable, "-m", "hlo_audit", "check", "step.txt", "--output", "json=r.json"]
    started = time.monotonic()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    seconds = time.monotonic() - started
    rng = random.Random(1)
    for _ in range(5):
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            time.sleep(rng.uniform(0.5, 1.0) * seconds)
            process.send_signal(signal.SIGKILL)
        assert json.loads((tmp_path / "r.json").read_text())["schema_version"] == 1
