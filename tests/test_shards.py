"""Parts of a matrix on several machines: who has which program, and what comes of it together."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import assert_refused, invoke, run
from hlo_audit import shard as shards
from hlo_audit.errors import UsageError
from hlo_audit.manifest import Manifest, write_manifest
from hlo_audit.program import Lowering, Recorded, Subject
from hlo_audit.report.formats import FORMATS
from hlo_audit.report.json import program_to_json
from hlo_audit.report.stored import read_stored, read_times
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects
from hlo_audit.shard import RecordedTime, Shard, deal, parse_shard, take_part, way_of

TOP = Path.cwd()

MODULE = """HloModule jit_{name}, is_scheduled=true, num_partitions=4

FileNames
1 "/elsewhere/src/layers.py"

FunctionNames
1 "step"
2 "state"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=2 end_line=2 column=1 end_column=1}}
2 {{file_name_id=1 function_name_id=2 line=7 end_line=7 column=1 end_column=1}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

ENTRY %e (p: f32[{size},512], q: f32[512,512]) -> (f32[{size},512], f32[512,512]) {{
  %p = f32[{size},512]{{1,0}} parameter(0), metadata={{op_name="p"}}
  %q = f32[512,512]{{1,0}} parameter(1), metadata={{op_name="q"}}
  %a = f32[{size},512]{{0,1}} copy(%p), metadata={{op_name="jit(step)/tanh" stack_frame_id=2}}
  %r = f32[512,512]{{1,0}} all-reduce(%q), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  ROOT %t = (f32[{size},512]{{0,1}}, f32[512,512]{{1,0}}) tuple(%a, %r)
}}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}}
"""

LAYERS = """def step(p, q):
    return state(p, q)


def state(p, q):
    return (
        tanh(p).T,
        sin(q).T,
    )
"""


def a_lowering(**changes: Any) -> Lowering:
    lowering = Lowering(
        program="train.py:step",
        build="train.py:step",
        mode="auto",
        layout=None,
        settings={"embed": 512},
        mesh={"fsdp": -1},
        platform="tpu",
        topology="v5p:2x2x1",
    )
    return replace(lowering, **changes)


def described(lowering: Lowering) -> str:
    names = ("program", "mode", "layout", "platform", "topology", "settings", "xla_flags")
    return way_of({name: getattr(lowering, name) for name in names})


# -- who has which program


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "--shard is empty (is a variable not set?)"),
        *(
            (text, "is not of the form I/N")
            for text in ("1", "-1/2", "a/b", "1/2/3", " 1/2", "²/3")
        ),
        ("1/" + "9" * 5000, "is not of the form I/N"),
        ("0/2", "--shard 0/2: I must be from 1 to 2"),
        ("3/2", "--shard 3/2: I must be from 1 to 2"),
        ("1/0", "--shard 1/0: N must be at least 1"),
        ("1/10001", "--shard 1/10001: at most 10,000 shards"),
        ("1/1000000000", "--shard 1/1000000000: at most 10,000 shards"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shard(text)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 120


def test_a_shard_is_counted_from_one() -> None:
    assert parse_shard("2/8") == Shard(2, 8)
    assert parse_shard("1/10000") == Shard(1, 10_000)


ITEMS = st.lists(
    st.tuples(st.text("abc/", max_size=4), st.integers(1, 1000)),
    max_size=40,
    unique_by=lambda one: one[0],
)


@settings(deadline=None)
@given(ITEMS, st.integers(1, 9), st.randoms())
def test_every_item_is_in_one_shard_whatever_the_order(
    items: list[tuple[str, int]], count: int, random: Any
) -> None:
    keys, costs = [key for key, _ in items], [cost for _, cost in items]
    owners = deal(keys, costs, count)
    assert all(1 <= owner <= count for owner in owners)
    assert len(owners) == len(items)
    shuffled = random.sample(items, len(items))
    again = deal([key for key, _ in shuffled], [cost for _, cost in shuffled], count)
    keys_again = [key for key, _ in shuffled]
    assert dict(zip(keys, owners, strict=True)) == dict(zip(keys_again, again, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_no_shard_takes_more_than_four_thirds_of_the_best(costs: list[int], count: int) -> None:
    owners = deal([str(n) for n in range(len(costs))], costs, count)

    def longest(of: tuple[int, ...] | list[int]) -> int:
        return max(
            sum(cost for cost, owner in zip(costs, of, strict=True) if owner == one)
            for one in range(1, count + 1)
        )

    best = min(map(longest, itertools.product(range(1, count + 1), repeat=len(costs))))
    assert 3 * longest(owners) <= 4 * best


def matrix() -> list[Subject]:
    lowerings = [
        a_lowering(mode=mode, settings={"embed": embed})
        for embed in (256, 512, 1024, 2048)
        for mode in ("auto", "explicit")
    ]
    return [*lowerings, Recorded(Path("dump"))]


def labels(subjects: list[Subject], count: int, **options: Any) -> list[set[str]]:
    parts = [take_part(subjects, Shard(n, count), top=TOP, **options) for n in range(1, count + 1)]
    assert len({(part.matrix, part.plan) for part in parts}) == 1
    return [{repr(subjects[position]) for position in part.positions} for part in parts]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_the_shards_of_a_matrix_are_the_matrix(count: int) -> None:
    parts = labels(matrix(), count)
    assert sum(map(len, parts)) == len(matrix())
    assert set().union(*parts) == {repr(subject) for subject in matrix()}
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 + len(matrix()) // count


def test_the_order_in_which_modes_are_given_changes_no_shard() -> None:
    assert labels(matrix(), 3) == labels(matrix()[::-1], 3)
    # But shards that were given different orders do not fit: merged they have one.
    parts = [take_part(one, Shard(1, 3), top=TOP) for one in (matrix(), matrix()[::-1])]
    assert parts[0].matrix != parts[1].matrix


def test_a_program_that_is_there_twice_is_audited_twice() -> None:
    twice = [a_lowering(), a_lowering()]
    parts = [take_part(twice, Shard(n, 2), top=TOP) for n in (1, 2)]
    assert [part.positions for part in parts] == [(0,), (1,)]


def test_what_is_audited_for_is_a_part_of_the_matrix() -> None:
    one, another = (take_part(matrix(), Shard(1, 2), top=TOP, asked=asked) for asked in ("a", "b"))
    assert one.positions == another.positions
    assert one.matrix != another.matrix


def test_the_partition_depends_on_nothing_of_the_machine(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_shards import matrix
from hlo_audit.shard import Shard, take_part
print(take_part(matrix(), Shard(2, 3), top=Path(sys.argv[2])))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "HLO_AUDIT_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for folder, seed in ((tmp_path, "1"), (Path("/"), "2"))
    }
    assert len(found) == 1


def test_a_path_counts_from_the_top_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkouts, in one of which the programs are named from a folder inside."""
    below = tmp_path / "two" / "inside"
    below.mkdir(parents=True)
    names = {tmp_path / "one": ("train.py", "dumps/a"), below: ("../train.py", "../dumps/a")}
    (tmp_path / "one").mkdir()
    parts = set()
    for here, (file, folder) in names.items():
        monkeypatch.chdir(here)
        program = f"{file}:step"
        subjects: list[Subject] = [
            a_lowering(program=program, build=program),
            Recorded(Path(folder)),
        ]
        top = tmp_path / here.relative_to(tmp_path).parts[0]
        parts.add(take_part(subjects, Shard(1, 1), top=top).matrix)
        absolute: list[Subject] = [
            a_lowering(program=f"{top}/train.py:step", build=f"{top}/train.py:step"),
            Recorded(top / "dumps" / "a"),
        ]
        parts.add(take_part(absolute, Shard(1, 1), top=top).matrix)
    assert len(parts) == 1


# -- by how long programs took


def test_programs_are_dealt_out_by_how_long_they_took() -> None:
    subjects: list[Subject] = [a_lowering(settings={"embed": embed}) for embed in range(5)]
    times = [
        RecordedTime(described(a_lowering(settings={"embed": embed})), {"fsdp": 4}, milliseconds)
        for embed, milliseconds in enumerate((90_000, 30_000, 30_000, 20_000, 10_000))
    ]
    parts = [take_part(subjects, Shard(n, 2), top=TOP, times=times) for n in (1, 2)]
    assert [part.positions for part in parts] == [(0,), (1, 2, 3, 4)]


def test_a_program_that_is_new_takes_as_long_as_its_like() -> None:
    known = [a_lowering(settings={"embed": embed}) for embed in range(3)]
    new = a_lowering(settings={"embed": 9})
    other = a_lowering(program="other", settings={"embed": 9})
    on_cpu = a_lowering(platform="cpu", topology="4")
    times = [
        RecordedTime(described(one), {"fsdp": 4}, milliseconds)
        for one, milliseconds in zip(known, (1_000, 60_000, 70_000), strict=True)
    ]
    subjects: list[Subject] = [*known, new, other, on_cpu, Recorded(Path("dump"))]
    milliseconds = shards._milliseconds(subjects, times, TOP)
    guessed = shards.GUESSED_MILLISECONDS
    assert milliseconds == [1_000, 60_000, 70_000, 60_000, 60_000, guessed["cpu"], guessed[None]]


def test_a_time_is_of_its_mesh() -> None:
    asked = a_lowering(mesh={"data": 2, "fsdp": -1})
    way = described(asked)
    for mesh, fits in (
        ({"data": 2, "fsdp": 2}, True),
        ({"data": 4, "fsdp": 1}, False),
        ({"fsdp": 2, "data": 2}, False),
    ):
        times = [RecordedTime(way, mesh, 77_000)]
        assert (shards._milliseconds([asked], times, TOP) == [77_000]) is fits


# -- a repository with some dumps in it


def dump(folder: Path, name: str, size: int, **manifest: Any) -> None:
    """A dump folder as hlo-audit writes it, of a module that was made up."""
    folder.mkdir()
    text = MODULE.format(name=name, size=size)
    (folder / f"module_0000.jit_{name}.cl_1.after_codegen.txt").write_text(text)
    if manifest:
        described = {
            "program": "train.py:step",
            "mode": "auto",
            "layout": None,
            "platform": "tpu",
            "topology": "v5p:2x2x1",
            "mesh": {"fsdp": 4},
            "settings": {"size": size},
            "xla_flags": {},
            "versions": {
                "python": "3.11.7",
                "jax": "0.10.2",
                "jaxlib": "0.10.2",
                "libtpu": "0.0.42",
            },
            "module": f"jit_{name}",
            "devices": 4,
            "lower_seconds": 1.0,
            "compile_seconds": 10.0,
            "digest": "0" * 64,
        }
        write_manifest(Manifest(**{**described, **manifest}), folder)


DUMPS = ("dumps/a", "dumps/b", "dumps/c", "dumps/d", "dumps/two", "dumps/broken.hlo")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs with findings, two of one name, one of two modules, one that cannot be read."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / ".git").mkdir()
    (folder / "src").mkdir()
    (folder / "src" / "layers.py").write_text(LAYERS)
    dumps = folder / "dumps"
    dumps.mkdir()
    dump(dumps / "a", "a", 512, mode="auto")
    dump(dumps / "b", "b", 1024, mode="explicit", settings={"size": 1024, "lr": 0.1, "tied": True})
    dump(dumps / "c", "c", 2048)
    dump(dumps / "d", "d", 256, topology="v6e:2x2", xla_flags={"a": "1"})
    dump(dumps / "two", "e", 768)
    text = MODULE.format(name="f", size=640)
    (dumps / "two" / "module_0001.jit_f.cl_1.after_codegen.txt").write_text(text)
    (dumps / "broken.hlo").write_text("HloModule broken\n\nENTRY %e () -> f32[] {\n")
    return folder


def shard_reports(
    repository: Path, into: Path, count: int, *arguments: str, programs: tuple[str, ...] = DUMPS
) -> list[Path]:
    """The reports of all shards, each run as a machine of its own would."""
    paths = []
    for index in range(1, count + 1):
        path = into / f"{index}-of-{count}.json"
        shard = ("--shard", f"{index}/{count}", "--output", f"json={path}", "--quiet")
        done = invoke("check", *programs, *arguments, *shard, cwd=repository)
        assert done.returncode in (0, 1, 2), done.stderr
        assert path.exists(), done.stderr
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def reports(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return shard_reports(repository, tmp_path_factory.mktemp("shards"), 3)


def without_volatile(text: str) -> str:
    data = json.loads(text)
    del data["volatile"]
    return json.dumps(data, indent=2)


@pytest.mark.parametrize("verbose", [(), ("--verbose",)], ids=["warnings", "notes-too"])
def test_merged_reports_are_the_report_of_one_run(
    repository: Path, reports: list[Path], tmp_path: Path, verbose: tuple[str, ...]
) -> None:
    commands: dict[str, tuple[str | Path, ...]] = {
        "whole": ("check", *DUMPS),
        "merged": ("merge", *reports[::-1]),
    }
    texts = []
    for name, command in commands.items():
        (tmp_path / name).mkdir()
        files = {format_: tmp_path / name / format_ for format_ in FORMATS}
        outputs = [f"--output={format_}={path}" for format_, path in files.items()]
        options = ("--max", "relayout-copy=1MiB", "--quiet", *verbose, *outputs)
        done = invoke(*command, *options, cwd=repository)
        assert done.returncode == 2  # one of them cannot be read
        texts.append((done.stderr, {one: path.read_text() for one, path in files.items()}))
    (whole_errors, whole), (merged_errors, merged) = texts
    assert merged_errors == whole_errors
    assert merged == whole  # volatile and all: nothing was compiled
    assert all("HLA002" in text for text in merged.values())


def test_a_shard_says_which_one_it_is(reports: list[Path]) -> None:
    schema = json.loads(resources.files("hlo_audit.report").joinpath("schema.json").read_text())
    positions: list[int] = []
    for index, path in enumerate(reports, start=1):
        data = json.loads(path.read_text())
        jsonschema.Draft202012Validator(schema).validate(data)
        shard = data["shard"]
        assert (shard["index"], shard["count"], shard["size"]) == (index, 3, len(DUMPS))
        assert len(shard["positions"]) == len(data["programs"])
        positions += shard["positions"]
    assert sorted(positions) == [0, 1, 2, 3, 4, 4, 5]  # the dump of two modules


def test_an_empty_shard_says_so_and_passes(repository: Path, tmp_path: Path) -> None:
    done = invoke(
        *("check", "dumps/a", "--shard", "2/2", "--max", "relayout-copy=0"),
        *("--output", f"json={tmp_path / 'r.json'}", "--output", f"sarif={tmp_path / 'r.sarif'}"),
        cwd=repository,
    )
    assert done.returncode == 0
    assert done.stderr == "shard 2/2: nothing to do: it has none of 1\n"
    assert done.stdout == ""
    assert json.loads((tmp_path / "r.json").read_text())["programs"] == []


def test_a_program_that_fails_in_a_shard_fails_the_whole(
    repository: Path, reports: list[Path]
) -> None:
    done = invoke("merge", *reports, cwd=repository)
    assert done.returncode == 2
    assert "broken.hlo" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_budget_of_a_merge_is_that_of_its_command(repository: Path, tmp_path: Path) -> None:
    paths = shard_reports(repository, tmp_path, 2, programs=DUMPS[:4])
    assert invoke("merge", *paths, cwd=repository).returncode == 0
    failed = invoke("merge", *paths, "--max", "relayout-copy=0", cwd=repository)
    assert failed.returncode == 1
    assert "HLA002 is 1, at most 0" in failed.stdout
    assert (
        invoke("merge", *paths, "--max", "HLA002=0", "--exit-zero", cwd=repository).returncode == 0
    )
    unknown = invoke("merge", *paths, "--max", "nothing=0", cwd=repository)
    assert (unknown.returncode, unknown.stdout) == (2, "")


# -- the baseline, the config, suppressions


CONFIG = """programs = ["dumps/a", "dumps/b", "dumps/c", "dumps/d"]
baseline = "baseline.json"

[[suppress]]
rule = "relayout-copy"
program = "train.py:step"
op-name = "*/cos"
reason = "of no use"

[[suppress]]
rule = "relayout-copy"
source = "src/layers.py:state"
program = "*explicit*"
reason = "of use in one shard"
"""


@pytest.fixture
def configured(repository: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "configured"
    shutil.copytree(repository, folder)
    (folder / "hlo-audit.toml").write_text(CONFIG)
    comment = "tanh(p).T,  # hlo-audit: ignore[HLA004] nothing is reduced here"
    bad = "sin(q).T,  # hlo-audit: ignore without a rule"
    text = LAYERS.replace("tanh(p).T,", comment).replace("sin(q).T,", bad)
    (folder / "src" / "layers.py").write_text(text)
    return folder


def test_a_merge_writes_the_baseline_of_the_whole(configured: Path, tmp_path: Path) -> None:
    written = invoke("check", "--update-baseline", "--exit-zero", cwd=configured)
    assert written.returncode == 0, written.stderr
    whole = (configured / "baseline.json").read_bytes()
    paths = shard_reports(configured, tmp_path, 2, programs=())
    (configured / "baseline.json").unlink()
    merged = invoke("merge", *paths, "--update-baseline", cwd=configured)
    assert merged.returncode == 0, merged.stderr
    assert (configured / "baseline.json").read_bytes() == whole


def test_what_is_gone_is_told_by_the_merge_alone(configured: Path, tmp_path: Path) -> None:
    invoke("check", "--update-baseline", "--exit-zero", cwd=configured)
    config = configured / "hlo-audit.toml"
    config.write_text(config.read_text().replace(', "dumps/d"', ""))
    paths = shard_reports(configured, tmp_path, 2, programs=())
    for path in paths:
        gate = json.loads(path.read_text())["gate"]
        assert {one["kind"] for one in gate["notices"]} == {"bad-suppression"}
        assert gate["passed"]
    merged = invoke("merge", *paths, "--format", "json", cwd=configured)
    whole = invoke("check", "--format", "json", "--quiet", cwd=configured)
    assert without_volatile(merged.stdout) == without_volatile(whole.stdout)
    notices = json.loads(merged.stdout)["gate"]["notices"]
    kinds = [one["kind"] for one in notices]
    assert kinds == ["not-audited", "bad-suppression", "unused-suppression", "unused-suppression"]
    strict = invoke("merge", *paths, "--strict", cwd=configured)
    assert strict.returncode == 1
    assert "hlo-audit.toml:4: suppresses nothing" in strict.stdout
    assert "src/layers.py:7: suppresses nothing: no HLA004" in strict.stdout
    assert "hlo-audit.toml:10" not in strict.stdout


def test_a_merge_is_compared_with_a_report(repository: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    invoke("check", *DUMPS[:3], "--output", f"json={before}", "--quiet", cwd=repository)
    paths = shard_reports(repository, tmp_path, 2, programs=DUMPS[:4])
    whole = invoke("check", *DUMPS[:4], "--against", before, "--format", "json", cwd=repository)
    merged = invoke("merge", *paths, "--against", before, "--format", "json", cwd=repository)
    assert merged.returncode == whole.returncode == 1, merged.stderr
    assert without_volatile(merged.stdout) == without_volatile(whole.stdout)


# -- what is refused


def edited(path: Path, into: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    target = into / path.name
    target.write_text(json.dumps(data))
    return target


def test_a_shard_that_is_missing_or_doubled_is_refused(
    repository: Path, reports: list[Path]
) -> None:
    one, two, three = reports
    missing = invoke("merge", one, three, cwd=repository)
    assert_refused(missing, "1 of 3 shards is missing: 2")
    assert_refused(invoke("merge", two, cwd=repository), "2 of 3 shards are missing: 1, 3")
    doubled = invoke("merge", one, two, three, two, cwd=repository)
    assert_refused(doubled, "are both of shard 2/3")


def test_shards_that_do_not_fit_together_are_refused(
    repository: Path, reports: list[Path], tmp_path: Path
) -> None:
    first, second, third = reports

    def merged(change: Callable[[dict[str, Any]], Any]) -> subprocess.CompletedProcess[str]:
        return invoke("merge", first, edited(second, tmp_path, change), third, cwd=repository)

    digest = "0" * 64
    assert_refused(merged(lambda d: d["shard"].update(matrix=digest)), "different matrices")
    assert_refused(merged(lambda d: d["shard"].update(plan=digest)), "--timings")
    assert_refused(merged(lambda d: d["shard"].update(count=4)), "of 3 and of 4 shards")
    assert_refused(merged(lambda d: d["environment"].update(jax="0.1")), "versions: jax")
    assert_refused(merged(lambda d: d["environment"].update(libtpu=None)), "versions: libtpu")
    assert_refused(merged(lambda d: d["tool"].update(version="9.9")), "written by hlo-audit 9.9")
    assert_refused(merged(lambda d: d.update(schema_version=2)), "schema_version is 2")
    assert_refused(merged(lambda d: d.pop("shard")), "of a whole run, not of a shard")
    less = invoke("merge", first, edited(second, tmp_path, drop_a_program), third, cwd=repository)
    assert_refused(less, "programs are in no report")


def drop_a_program(data: dict[str, Any]) -> None:
    position = data["shard"]["positions"][0]
    while data["shard"]["positions"] and data["shard"]["positions"][0] == position:
        for values in (data["shard"]["positions"], data["programs"], data["volatile"]["timings"]):
            values.pop(0)


def test_shards_of_other_programs_rules_or_timings_do_not_fit(
    repository: Path, reports: list[Path], tmp_path: Path
) -> None:
    def second(*arguments: str) -> Path:
        path = tmp_path / "second.json"
        shard = ("--shard", "2/3", "--output", f"json={path}", "--quiet")
        invoke("check", *arguments, *shard, cwd=repository)
        return path

    for arguments in (
        DUMPS[:5],
        DUMPS[::-1],
        (*DUMPS, "--select", "HLA002"),
        (*DUMPS, "--rule-option", "relayout-copy.min_bytes=0"),
        (*DUMPS, "--introduced-by"),
    ):
        done = invoke("merge", reports[0], second(*arguments), reports[2], cwd=repository)
        assert_refused(done, "different matrices")


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "schema_version is missing"),
        ("[]", "it is []"),
        ("null", "it is None"),
        ('{"schema_version": true}', "schema_version is True"),
        ('{"schema_version": 1}', "has no 'tool'"),
        ('{"schema_version": NaN}', "NaN is no number"),
        ('{"schema_version": 1, "tool": ' + DEEP, "nested too deeply"),
        ('{"schema_version": 1' + "0" * 10_000 + "}", ""),
    ],
)
def test_what_is_no_report_is_refused(
    repository: Path, tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    assert_refused(invoke("merge", path, cwd=repository), "is no report of hlo-audit", reason)
    timed = invoke("check", "dumps/a", "--shard", "1/1", "--timings", path, cwd=repository)
    if "tool" not in reason:
        assert_refused(timed, "is no report of hlo-audit", reason)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "r.json is empty (did the command that wrote it fail?)"),
        (" \n", "r.json is empty"),
        ("nonsense", "r.json is no JSON: Expecting value (line 1, column 1)"),
        ('{"a": [', "r.json is no JSON: Expecting value (line 1, column 8)"),
        ('{"schema_version": 1, "entries": []}', "r.json is a baseline, not a report (give it by"),
        ('{"schema_version": 1, "tool": {}, "a": 1, "b": 1}', "r.json is a diff, not a report"),
    ],
)
def test_what_is_no_report_is_called_what_it_is(
    repository: Path, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_stored(path, ALL_RULES)
    assert said in str(caught.value)
    with pytest.raises(UsageError) as caught:
        read_times(path, TOP)
    assert said in str(caught.value)
    if "baseline" in said:
        against = invoke("check", "dumps/a", "--against", path, cwd=repository)
        assert_refused(against, "r.json is a baseline, not a report (give it by --baseline)")


def test_a_report_is_no_baseline(repository: Path, report: Path) -> None:
    done = invoke("check", "dumps/a", "--baseline", report, cwd=repository)
    assert_refused(done, "is a report, not a baseline (give it by --against)")


def test_one_report_may_be_standard_input(repository: Path, reports: list[Path]) -> None:
    one, two, three = reports
    with two.open() as given:
        piped = run("merge", one, "-", three, "--format", "json", cwd=repository, stdin=given)
    merged = invoke("merge", one, two, three, "--format", "json", cwd=repository)
    assert piped.stdout == merged.stdout
    assert json.loads(merged.stdout)["programs"]
    assert_refused(invoke("merge", "-", one, "-", cwd=repository), "- is given more than once")
    with Path(os.devnull).open() as given:
        nothing = run("merge", "-", cwd=repository, stdin=given)
    assert_refused(nothing, "standard input is empty")
    with two.open() as given:
        assert_refused(run("merge", "-", cwd=repository, stdin=given), "2 of 3 shards are missing")


def test_timings_that_were_taken_out_are_missed(
    repository: Path, report: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text(without_volatile(report.read_text()))
    timed = invoke("check", "dumps/a", "--shard", "1/1", "--timings", path, cwd=repository)
    assert_refused(timed, f"{path} holds no timings (key volatile)", "as --format json wrote it")


def test_what_is_no_file_is_refused(repository: Path, tmp_path: Path) -> None:
    assert_refused(invoke("merge", tmp_path, cwd=repository), "it is no regular file")
    assert_refused(invoke("merge", tmp_path / "no.json", cwd=repository), "there is no report")
    os.mkfifo(tmp_path / "fifo.json")
    assert_refused(invoke("merge", tmp_path / "fifo.json", cwd=repository), "it is no regular file")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    assert_refused(invoke("merge", tmp_path / "binary.json", cwd=repository), "it is no UTF-8 text")
    assert invoke("merge", cwd=repository).returncode == 2


@pytest.fixture(scope="module")
def report(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "report.json"
    shard = ("--shard", "1/1", "--output", f"json={path}", "--quiet")
    invoke("check", "dumps/a", "dumps/broken.hlo", *shard, cwd=repository)
    return path


WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "x", [], {}, [{}], 1 << 70, {"a": [[]]})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value in plain data."""
    found = [path]
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            found += places(inner, (*path, key))
    return found


def test_a_report_with_anything_wrong_is_refused_in_a_line(report: Path, tmp_path: Path) -> None:
    original = report.read_text()
    assert len(read_stored(report, ALL_RULES).audits) == 2
    target = tmp_path / "wrong.json"
    messages: list[str] = []
    for place in places(json.loads(original)):
        for wrong in WRONG:
            data = json.loads(original)
            if not place:
                data = wrong
            else:
                at = data
                for key in place[:-1]:
                    at = at[key]
                at[place[-1]] = wrong
            target.write_text(json.dumps(data))
            for read in (lambda: read_stored(target, ALL_RULES), lambda: read_times(target, TOP)):
                try:
                    read()
                except UsageError as error:
                    messages.append(str(error))
    assert len(messages) > 1000
    assert all("\n" not in message and len(message) < 600 for message in messages)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["counts"].update(HLA002=0), "programs[0].counts contradicts"),
        (lambda p: p["counts"].update(HLA999=0), "a rule that this hlo-audit does not have"),
        (lambda p: p["bytes"].update(HLA002=1), "programs[0].bytes contradicts"),
        (lambda p: p["findings"][0].update(fingerprint="0" * 16), "programs[0].findings contra"),
        (lambda p: p["findings"][0].update(rule="HLA999"), "a rule that is not counted"),
        (lambda p: p["findings"].pop(), "programs[0].counts contradicts"),
        (lambda p: p.update(devices=8), "contradicts"),
        (lambda p: p.update(anything=8), "programs[0].anything contradicts"),
    ],
)
def test_a_report_that_was_changed_is_refused(
    report: Path, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    path = edited(report, tmp_path, lambda data: change(data["programs"][0]))
    with pytest.raises(UsageError) as caught:
        read_stored(path, ALL_RULES)
    assert words in str(caught.value)


def test_what_a_shard_cannot_do_alone_is_refused(configured: Path) -> None:
    shard = ("check", "--shard", "1/2")
    update = invoke(*shard, "--update-baseline", cwd=configured)
    assert_refused(update, "--update-baseline", "hlo-audit merge")
    for command in (("init", "-q"), ("config", "user.name", "a"), ("config", "user.email", "a@b")):
        subprocess.run(["git", *command], cwd=configured, check=True)
    subprocess.run(["git", "commit", "-qm", "x", "--allow-empty"], cwd=configured, check=True)
    revision = invoke(*shard, "--against", "HEAD", "--baseline=", cwd=configured)
    assert revision.returncode == 2
    (configured / "hlo-audit.toml").unlink()
    revision = invoke(*shard, "dumps/a", "--against", "HEAD", cwd=configured)
    assert_refused(revision, "not compared with a revision")
    merged = invoke("merge", "x.json", "--against", "HEAD", cwd=configured)
    assert_refused(merged, "--against HEAD is no JSON report")
    assert_refused(invoke("check", "dumps/a", "--shard", "3/2", cwd=configured), "--shard 3/2")
    timings = invoke("check", "dumps/a", "--timings", "x.json", cwd=configured)
    assert_refused(timings, "--timings is for --shard")
    written = invoke("merge", "dumps/a.json", "--output", "dumps/broken.hlo", cwd=configured)
    assert_refused(written, "there is no report dumps/a.json")
    shutil.copy(configured / "dumps" / "broken.hlo", configured / "r.json")
    over = invoke("merge", "r.json", "--output", "json=r.json", cwd=configured)
    assert_refused(over, "r.json is what is read")


# -- real dumps


def test_a_report_of_real_dumps_is_read_back_to_the_letter(
    dumps: Callable[[str], Path], tmp_path: Path
) -> None:
    names = ("jax-0.7.2-explicit", "jax-0.12.0-explicit", "jax-0.12.0-auto")
    folders = [dumps("lm_head_versions") / name for name in names]
    folders.append(dumps("lm_head_platforms") / "gpu-h100-explicit")
    path = tmp_path / "report.json"
    options = ("--introduced-by", "--output", f"json={path}", "--quiet")
    done = invoke("check", *folders, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = read_stored(path, ALL_RULES)
    audits = audit_subjects([Recorded(folder) for folder in folders], ALL_RULES, introduced_by=True)
    assert [program_to_json(one) for one in stored.audits] == [program_to_json(a) for a in audits]
    assert sum(len(audit.findings) for audit in stored.audits) > 100
