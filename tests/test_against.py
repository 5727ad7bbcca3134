"""Comparing with a git revision, a dump or a report, in the place of a baseline file."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import invoke
from hlo_audit import against
from hlo_audit.against import Revision, as_of, checked_out, find_revision, read_report, standing_in
from hlo_audit.errors import UsageError
from hlo_audit.program import Lowering, Recorded

TRAIN = """import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import layers


def train_step(mesh):
    def step(w):
        return layers.state(w)

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(step), (jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=whole),)
"""

STRAIGHT = """import jax.numpy as jnp


def state(w):
    return jnp.tanh(w)
"""

TURNED = STRAIGHT.replace("jnp.tanh(w)", "jnp.tanh(w).T")

PATIENCE_SECONDS = 30.0


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    (folder / "train.py").write_text(TRAIN)
    (folder / "layers.py").write_text(STRAIGHT)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder.resolve()


def worktrees(repository: Path) -> int:
    return git(repository, "worktree", "list", "--porcelain").count("worktree ")


def a_lowering(build: str) -> Lowering:
    return Lowering(
        program=build,
        build=build,
        mode="auto",
        layout=None,
        settings={},
        mesh={"fsdp": 1},
        platform="cpu",
        topology="1",
    )


# -- a revision


def test_what_a_revision_does_not_have_fails(repository: Path) -> None:
    program = ("train.py:train_step", "--mesh", "fsdp=1", "--platform", "cpu", "--mode", "auto")
    check = ("check", *program, "--against", "main")
    same = invoke(*check, cwd=repository)
    assert same.returncode == 0, same.stderr
    assert "gate passed: 1 program with nothing new against the revision main" in same.stdout

    (repository / "layers.py").write_text(TURNED)
    turned = invoke(*check, cwd=repository)
    assert turned.returncode == 1, turned.stderr
    commit = git(repository, "rev-parse", "main")[:10]
    assert f"of them new, main ({commit}) has 0" in turned.stdout
    assert "layers.py:5 in state" in turned.stdout
    assert worktrees(repository) == 1

    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "two")
    assert invoke(*check, cwd=repository).returncode == 0  # main has it now
    # The fix has less: it passes, and says so.
    (repository / "layers.py").write_text(STRAIGHT)
    fixed = invoke(*check, cwd=repository)
    assert fixed.returncode == 0
    assert "gone, the baseline can be tightened" in fixed.stdout


def test_a_program_that_the_revision_lacks_is_a_new_one(repository: Path) -> None:
    (repository / "new.py").write_text(TRAIN)
    check = ("check", "new.py:train_step", "--mesh", "fsdp=1", "--platform", "cpu")
    result = invoke(*check, "--mode", "auto", "--against", "main", cwd=repository)
    assert result.returncode == 0, result.stderr
    assert "does not have this program: there is no file new.py" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lm-head", "--against", "HEAD"], ["lm-head is a reference model", "same at every"]),
        (["--against", "HEAD"], ["is a reference model"]),
        (["step.txt", "--against", "HEAD"], ["step.txt is no program", "--against PATH"]),
        (["step.txt", "--against", "no-such"], ["no-such: there is no such revision"]),
        (["step.txt", "--against", "--all"], ["--all: there is no such revision"]),
        (["step.txt", "--against", ""], ["--against is empty"]),
        (["step.txt", "--against", "train.py"], ["train.py"]),
        (["step.txt", "--against", "other.json"], ["other.json is no report"]),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    repository: Path, arguments: list[str], words: list[str]
) -> None:
    (repository / "step.txt").write_text(
        "HloModule m\n\nENTRY %e (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n"
    )
    (repository / "other.json").write_text('{"programs": [{}]}')
    result = invoke("check", *arguments, "-q", cwd=repository)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert worktrees(repository) == 1


def test_outside_of_a_repository_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="this is no git repository"):
        find_revision("main", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="git is not installed"):
        find_revision("main", tmp_path)


def test_the_worktree_goes_whatever_happens(repository: Path) -> None:
    revision = find_revision("main", repository)
    seen: list[Path] = []

    def interrupted() -> None:
        with checked_out(revision) as worktree:
            assert (worktree / "train.py").is_file()
            (worktree / "left.pyc").write_text("x")
            seen.append(worktree)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not seen[0].parent.exists()
    assert worktrees(repository) == 1


def test_two_runs_have_worktrees_of_their_own(repository: Path) -> None:
    revision = find_revision("HEAD", repository)
    with checked_out(revision) as first, checked_out(revision) as second:
        assert first != second
    with checked_out(revision) as again:
        assert again == first  # so that what was compiled there is found in the cache


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_worktree(repository: Path, number: signal.Signals) -> None:
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from hlo_audit.against import checked_out, find_revision\n"
        "with checked_out(find_revision('main', Path.cwd())) as worktree:\n"
        "    print(worktree, flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    worktree = Path(process.stdout.readline().strip())
    assert worktree.is_dir()
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) != 0
    process.stdout.close()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while worktree.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not worktree.exists()
    assert worktrees(repository) == 1


def test_variables_of_a_git_hook_do_not_reach_the_worktree(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = (repository / ".git" / "index").read_bytes()
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    (repository / "layers.py").write_text(TURNED)
    with checked_out(find_revision("main", repository)) as worktree:
        assert (worktree / "layers.py").read_text() == STRAIGHT
    monkeypatch.delenv("GIT_DIR")
    assert (repository / ".git" / "index").read_bytes() == index


def test_python_imports_from_the_worktree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, worktree = (tmp_path / "top").resolve(), (tmp_path / "tree").resolve()
    for folder in (top / "src", top / "inner", worktree / "src", worktree / "inner"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(top / "inner")
    monkeypatch.setattr(sys, "path", ["", str(top / "src"), "/usr/lib/elsewhere"])
    with standing_in(worktree, top):
        assert Path.cwd() == worktree / "inner"
        assert sys.path == [
            str(worktree / "inner"),
            str(worktree / "src"),
            "/usr/lib/elsewhere",
            str(worktree),
        ]
    assert Path.cwd() == top / "inner"
    assert sys.path == ["", str(top / "src"), "/usr/lib/elsewhere"]


def test_an_absolute_file_is_the_one_in_the_worktree(tmp_path: Path) -> None:
    revision = Revision(tmp_path / "top", "0" * 40, "main (0000000000)")
    subjects = [
        a_lowering(f"{tmp_path}/top/train.py:step"),
        a_lowering("train.py:step"),
        a_lowering("my.module:step"),
    ]
    moved = as_of(subjects, revision, tmp_path / "tree")
    assert [one.build for one in moved] == [
        f"{tmp_path}/tree/train.py:step",
        "train.py:step",
        "my.module:step",
    ]
    assert [one.program for one in moved] == [one.program for one in subjects]
    with pytest.raises(UsageError, match="is no program that could be compiled at main"):
        as_of([Recorded(Path("dump"))], revision, tmp_path)


# -- a path


def test_a_dump_is_compared_with_another(dumps: Callable[[str], Path]) -> None:
    folder = dumps("lm_head_versions")
    auto, explicit = "jax-0.12.0-auto", "jax-0.12.0-explicit"
    worse = invoke("check", explicit, "--against", auto, "--select", "HLA002", cwd=folder)
    assert worse.returncode == 1
    assert f"{explicit}: HLA002 is 4, 4 of them new, {auto} has 0" in worse.stdout
    better = invoke("check", auto, "--against", explicit, "--select", "HLA002", cwd=folder)
    assert better.returncode == 0
    assert "4 gone" in better.stdout
    growth = invoke(
        *("check", explicit, "--against", auto, "--select", "HLA002", "--max", "HLA002=+4"),
        cwd=folder,
    )
    assert growth.returncode == 0


def test_a_report_is_compared_with(dumps: Callable[[str], Path], tmp_path: Path) -> None:
    folder = dumps("lm_head_platforms")
    report = tmp_path / "report.json"
    invoke("check", ".", "--output", f"json={report}", "-q", cwd=folder)
    baseline = read_report(report)
    assert len(baseline.entries) == 4
    same = invoke("check", ".", "--against", report, "--strict", cwd=folder)
    assert same.returncode == 0, same.stdout
    data = json.loads(report.read_text())
    for program in data["programs"]:
        program["findings"] = [f for f in program["findings"] if f["rule"] != "HLA002"]
        program["counts"]["HLA002"] = 0
    report.write_text(json.dumps(data))
    fewer = invoke("check", ".", "--against", report, cwd=folder)
    assert fewer.returncode == 1
    assert re.search(r"cpu-explicit: HLA002 is 2, 2 of them new, .*report.json has 0", fewer.stdout)


def test_dumps_of_many_modules_are_paired_by_their_places(
    dumps: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = dumps("lm_head_platforms")
    (tmp_path / "elsewhere").symlink_to(folder)
    result = invoke("check", folder, "--against", tmp_path / "elsewhere", "--strict", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "4 programs with nothing new" in result.stdout


def test_what_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text('{"programs": []}')
    (tmp_path / "step.txt").write_text(
        "HloModule m\n\nENTRY %e (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n"
    )
    result = invoke("check", "step.txt", "--against", "report.json", cwd=tmp_path)
    assert result.returncode == 2
    assert "report.json holds no program that could be compared with step.txt" in result.stderr
    assert against.is_report(report)
