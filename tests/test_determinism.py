"""The same programs give the same bytes: wherever, however often, on however busy a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command_line import run

PROGRAMS = Path(__file__).parent / "programs"
RUNS = 10
FILES = ("json", "sarif")

SPIN = "while True: pass"


def written(*arguments: object, cwd: Path, seed: int) -> str:
    """What a command writes; each with its own seed of the hashes that sets are ordered by."""
    done = run(*arguments, cwd=cwd, env={"PYTHONHASHSEED": str(seed)}, columns=100)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def without_volatile(text: str) -> str:
    """A report less the one key that may differ."""
    data = json.loads(text)
    assert set(data["volatile"]) == {"timings"}
    del data["volatile"]
    return json.dumps(data, indent=2)


@contextmanager
def a_busy_machine() -> Iterator[None]:
    """All CPUs at work, and one process more."""
    count = (os.cpu_count() or 1) + 1
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Working directories of different depths."""
    top = tmp_path_factory.mktemp("determinism")
    made = [top / f"{number}" / ("a/" * number) for number in range(RUNS)]
    for folder in made:
        folder.mkdir(parents=True)
    return made


@pytest.fixture(scope="module")
def ten_runs(dumps: Callable[[str], Path], folders: list[Path]) -> dict[str, list[str]]:
    """What ten runs write, each in a folder of its own, by the format."""
    options = ("--output", "json=report.json", "--output", "sarif=report.sarif", "--verbose")
    check = ("check", dumps("lm_head_platforms") / "cpu-explicit", *options, "--max", "HLA001=0")
    with ThreadPoolExecutor(4) as pool:  # more than there are CPUs
        texts = list(
            pool.map(
                lambda seed: written(*check, "--no-config", cwd=folders[seed], seed=seed),
                range(RUNS),
            )
        )
    files = {name: [(at / f"report.{name}").read_text() for at in folders] for name in FILES}
    return {"text": texts, **files}


@pytest.mark.parametrize("format_", ["text", *FILES])
def test_a_dump_is_reported_alike_ten_times(
    ten_runs: dict[str, list[str]], folders: list[Path], format_: str
) -> None:
    texts = ten_runs[format_]
    assert "HLA001" in texts[0]
    if format_ == "sarif":  # it says where it was written
        texts = [text.replace(str(at), "HERE") for text, at in zip(texts, folders, strict=True)]
    if format_ == "text":  # it shows the shorter of two paths to a file
        texts = [text.split("\n\n", 1)[1] for text in texts]
    assert len(set(texts)) == 1


def test_passes_and_differences_are_told_alike(
    dumps: Callable[[str], Path], tmp_path: Path
) -> None:
    auto, explicit = (dumps("lm_head_platforms") / f"cpu-{mode}" for mode in ("auto", "explicit"))
    for command in (
        ("diff", auto, explicit, "--format", "json"),
        ("passes", explicit, "--all", "--format", "json"),
        ("check", explicit, "--introduced-by", "--format", "json"),
    ):
        first, second = (written(*command, cwd=tmp_path, seed=seed) for seed in (1, 2))
        assert first == second
        assert json.loads(first)


LINES = """{head}
FileNames
{files}

FunctionNames
1 "step"

FileLocations
{locations}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

ENTRY %e (p: f32[512,512]) -> f32[512,512] {{
  %p = f32[512,512]{{1,0}} parameter(0), metadata={{op_name="p"}}
  ROOT %a = f32[512,512]{{0,1}} copy(%p), metadata={{op_name="jit(step)/tanh" stack_frame_id=1}}
}}
"""


def test_unused_suppressions_are_told_in_the_order_of_their_lines(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    names = [f"layer_{number}.py" for number in range(12)]
    for name in names:
        comment = "# hlo-audit: ignore[HLA004] not needed\n"
        (tmp_path / name).write_text(
            f"x = 1  {comment}y = 2  {comment}z = 3  # hlo-audit: ignore\n"
        )
    rows = [(file, line) for file in range(1, 13) for line in (1, 2)]
    text = LINES.format(
        head="HloModule jit_step, is_scheduled=true\n",
        files="\n".join(f'{n} "{tmp_path / name}"' for n, name in enumerate(names, start=1)),
        locations="\n".join(
            f"{n} {{file_name_id={file} function_name_id=1 line={line} end_line={line} column=1 "
            "end_column=1}"
            for n, (file, line) in enumerate(rows, start=1)
        ),
    )
    (tmp_path / "step.after_codegen.hlo").write_text(text)
    command = ("check", "step.after_codegen.hlo", "--format", "json")
    texts = [written(*command, cwd=tmp_path, seed=seed) for seed in range(3)]
    assert len(set(texts)) == 1
    notices = [one["message"] for one in json.loads(texts[0])["gate"]["notices"]]
    bad = [f"{name}:3: suppresses" for name in sorted(names)]
    unused = [f"{name}:{line}: suppresses" for name in sorted(names) for line in (1, 2)]
    assert [message[: message.index(" nothing")] for message in notices] == [*bad, *unused]


@pytest.mark.slow
def test_a_program_is_compiled_and_reported_alike(tmp_path: Path) -> None:
    programs = [f"{PROGRAMS}/forms.py:control_flow"]
    options = ("--mesh", "x=2,y=2", "--platform", "cpu", "--no-config", "--no-cache", "--quiet")
    check = ("check", *programs, *options, "--introduced-by", "--format", "json")
    folders = [tmp_path / "one", tmp_path / "an" / "other"]
    for folder in folders:
        folder.mkdir(parents=True)
    alone = written(*check, "--jobs", "1", cwd=folders[0], seed=1)
    with a_busy_machine():
        busy = written(*check, "--jobs", "2", cwd=folders[1], seed=2)
    report = json.loads(alone)
    assert without_volatile(busy) == without_volatile(alone)
    assert [len(program["counts"]) for program in report["programs"]] == [5] * 2
    assert sum(len(program["findings"]) for program in report["programs"]) > 10

    # Two machines do the same together, and part the programs by the times of the first run.
    timings: list[Any] = report["volatile"]["timings"]
    assert all(0 < timing["compile_seconds"] < 300 and not timing["cached"] for timing in timings)
    (tmp_path / "timings.json").write_text(alone)
    paths = []
    for index, folder in enumerate(folders, start=1):
        paths.append(tmp_path / f"{index}.json")
        shard = ("--shard", f"{index}/2", "--timings", tmp_path / "timings.json")
        paths[-1].write_text(written(*check, *shard, cwd=folder, seed=index))
    sizes = [len(json.loads(path.read_text())["programs"]) for path in paths]
    assert sizes == [1, 1]
    merged = written("merge", *paths, "--no-config", "--format", "json", cwd=tmp_path, seed=3)
    assert without_volatile(merged) == without_volatile(alone)
