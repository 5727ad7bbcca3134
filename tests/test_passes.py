"""What each pass does, and the way of single instructions, on real dumps of several compilers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pytest
from click.testing import CliRunner

from hlo_audit.cli import cli
from hlo_audit.dump import read_dump
from hlo_audit.errors import DumpError, UsageError, unknown_name
from hlo_audit.follow import Walk, find_in, identity_of, look_up, walk
from hlo_audit.history import History, read_histories
from hlo_audit.hlo import Module, parse_module
from hlo_audit.hlo.opcodes import is_opcode
from hlo_audit.passes import Passes
from hlo_audit.program import Recorded
from hlo_audit.report.listed import numbered
from hlo_audit.report.passes import follow_finding
from hlo_audit.report.passes_text import sparkline
from hlo_audit.rule import Context
from hlo_audit.rules import ALL_RULES
from hlo_audit.timeline import Reading, Series, Timeline, make_timeline

VERSIONS = ("0.7.2", "0.8.0", "0.8.3", "0.9.2", "0.10.2", "0.11.0", "0.12.0")

LAYOUT_ASSIGNMENT = "Layout_assignment: layout-assignment"
PARTITIONER = "xla-partitioner: tpu-spmd-partitioning"


def history_of(folder: Path) -> History:
    (history,) = read_histories([Recorded(folder)], ALL_RULES)
    assert history.audit.error is None
    return history


def timeline_of(history: History) -> Timeline:
    assert history.timeline is not None
    return history.timeline


def series_of(history: History, name: str) -> Series:
    return next(one for one in timeline_of(history).series if one.name == name)


def lasting(history: History, name: str) -> dict[str, int]:
    """By how much each pass changes a count for good."""
    passes = timeline_of(history).passes
    found: Counter[str] = Counter()
    for change in series_of(history, name).changes:
        if change.lasting:
            found[passes.pass_name(change.position)] += change.count
    return dict(found)


def steps_of(passes: Passes, way: Walk, kind: str) -> list[tuple[str, str]]:
    return [(passes.pass_name(one.position), one.text) for one in way.steps if one.kind == kind]


@pytest.fixture(scope="module", params=VERSIONS)
def explicit(request: pytest.FixtureRequest, dumps: Callable[[str], Path]) -> History:
    return history_of(dumps("lm_head_versions") / f"jax-{request.param}-explicit")


@pytest.fixture(scope="module", params=VERSIONS)
def auto(request: pytest.FixtureRequest, dumps: Callable[[str], Path]) -> History:
    return history_of(dumps("lm_head_versions") / f"jax-{request.param}-auto")


@pytest.fixture(scope="module")
def newest(dumps: Callable[[str], Path]) -> Path:
    return dumps("lm_head_versions") / "jax-0.12.0-explicit"


# -- the counts of an LM head


def test_layout_assignment_brings_the_copies_of_the_explicit_head(explicit: History) -> None:
    found = [one for one in explicit.audit.findings if one.rule == "HLA002"]
    assert [one.shape for one in found] == ["f32[128,32000]"] * 4
    assert {one.introduced_by for one in found} == {LAYOUT_ASSIGNMENT}
    assert lasting(explicit, "HLA002")[LAYOUT_ASSIGNMENT] >= 4


def test_the_annotations_go_at_the_partitioner(explicit: History) -> None:
    series = series_of(explicit, "HLA001")
    passes = timeline_of(explicit).passes
    gone = next(place for place, one in enumerate(series.readings) if one and one.count == 0)
    assert passes.pass_name(gone) == "xla-partitioner: shardy-xla"
    assert series.first is not None
    assert series.first.count > 50


def test_what_the_partitioner_makes_of_annotations_is_a_swing(explicit: History) -> None:
    passes = timeline_of(explicit).passes
    (rise,) = [
        change
        for change in series_of(explicit, "copy").changes
        if passes.pass_name(change.position) == "xla-partitioner: shardy-xla"
    ]
    assert rise.added > 50
    assert rise.lasting == 0
    assert sum(rise.undone_by.values()) == rise.added


def test_the_lasting_changes_are_the_difference_of_the_ends(explicit: History) -> None:
    for series in timeline_of(explicit).series:
        if series.kind == "opcode":
            assert series.first is not None
            assert series.last is not None
            total = sum(change.count for change in series.changes)
            assert total == series.last.count - series.first.count
            kept = sum(change.lasting for change in series.changes)
            assert kept >= abs(total)


def test_a_rule_is_counted_where_it_means_something(explicit: History) -> None:
    timeline = timeline_of(explicit)
    phases = timeline.passes.phases
    in_order = ("unpartitioned", "partitioned", "laid-out")
    assert list(dict.fromkeys(phases)) == list(in_order)
    assert list(phases) == sorted(phases, key=lambda phase: in_order.index(phase or "laid-out"))
    counted = {
        series.name: {
            phase for phase, one in zip(phases, series.readings, strict=True) if one is not None
        }
        for series in timeline.series
    }
    assert counted["HLA001"] == {"unpartitioned", "partitioned", "laid-out"}
    assert counted["HLA002"] == {"laid-out"}
    assert counted["HLA003"] == {"unpartitioned", "partitioned"}
    assert counted["HLA004"] == counted["HLA005"] == {"partitioned", "laid-out"}
    for series in timeline.series:
        gaps = {place for place, one in enumerate(series.readings) if one is None}
        assert gaps == set(series.reasons)
        assert all(series.reasons.values())


def test_counting_makes_no_findings(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = timeline_of(history_of(newest))

    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a finding is made of what is only counted")

    monkeypatch.setattr(Context, "finding", fail)
    assert make_timeline(counted.passes, ALL_RULES).series == counted.series


def test_the_last_reading_is_what_the_rules_find(explicit: History) -> None:
    for code in ("HLA002", "HLA004", "HLA005"):
        last = series_of(explicit, code).last
        assert last is not None
        assert last.count == explicit.audit.counts[code]
        assert last.bytes == explicit.audit.bytes.get(code, 0)


def test_auto_has_no_copies_and_folds_the_transpose_at_simplification(auto: History) -> None:
    passes = timeline_of(auto).passes
    assert series_of(auto, "HLA002").last == Reading(0, 0)
    series = series_of(auto, "HLA003")
    assert series.first is not None
    assert series.first.count == 1
    assert series.last == Reading(0, 0)
    (fold,) = [change for change in series.changes if change.lasting]
    assert passes.pass_name(fold.position) == "simplification-1: algsimp"
    transpose = next(one for one in passes.modules[0].instructions if one.opcode == "transpose")
    way = walk(passes, 0, transpose)
    ((where, text),) = steps_of(passes, way, "folded")
    assert where == "simplification-1: algsimp"
    assert "exchanged" in text
    assert "f32[512,32000] dot" in text
    assert steps_of(passes, way, "not-folded") == []
    assert steps_of(passes, way, "copies") == []


# -- the way of a copy


def test_the_way_of_a_copy_tells_why_the_transpose_was_not_folded(explicit: History) -> None:
    passes = timeline_of(explicit).passes
    for number, finding in enumerate(numbered(explicit.audit), 1):
        if finding.rule != "HLA002":
            continue
        way = follow_finding(0, explicit, str(number)).walk
        assert way.introduced_by == LAYOUT_ASSIGNMENT
        (appears,) = steps_of(passes, way, "appears")
        assert appears[0] == LAYOUT_ASSIGNMENT
        first = steps_of(passes, way, "not-folded")[0]
        assert first[0] == "simplification-1: algsimp"
        assert "Sharding call" in first[1]
        (gone,) = [
            where for where, text in steps_of(passes, way, "pair") if ": Sharding call" in text
        ]
        assert gone == "xla-partitioner: shardy-xla"
        ((where, copies),) = steps_of(passes, way, "copies")
        assert where == LAYOUT_ASSIGNMENT
        assert copies.startswith("4 copies turn buffers of f32[128,32000]")
        order = [step.position for step in way.steps]
        assert order == sorted(order)


def test_the_program_itself_has_the_annotation_and_the_transpose(explicit: History) -> None:
    for finding in explicit.audit.findings:
        if finding.rule in ("HLA001", "HLA003"):
            assert finding.introduced_by == "before_optimizations"


def test_a_fingerprint_names_a_finding_too(explicit: History) -> None:
    finding = numbered(explicit.audit)[0]
    followed = follow_finding(0, explicit, finding.fingerprint)
    assert followed.finding == finding
    assert followed.number == 1
    for name in ("0", "9999", "-1", "f" * 16, "", "1.0"):
        with pytest.raises(UsageError, match="there is no finding"):
            follow_finding(0, explicit, name)


def test_every_step_of_a_way_is_generated_from_the_dump(explicit: History) -> None:
    """Each instruction that a step names stands in its snapshot or in the one before."""
    passes = timeline_of(explicit).passes
    for number, _ in enumerate(numbered(explicit.audit)[:6], 1):
        for step in follow_finding(0, explicit, str(number)).walk.steps:
            near = passes.modules[max(step.position - 1, 0) : step.position + 1]
            names = {one.name for module in near for one in module.instructions}
            said = {
                word.strip(",:;()").removeprefix("%")
                for word in step.text.split()
                if word.startswith("%")
            }
            assert said <= names | {c for module in near for c in module.computations}


# -- a trainer, and other platforms


def test_every_finding_of_a_trainer_has_its_pass(dumps: Callable[[str], Path]) -> None:
    history = history_of(dumps("llama2_explicit_fsdp4"))
    by_rule: dict[str, Counter[str | None]] = {}
    for finding in history.audit.findings:
        by_rule.setdefault(finding.rule, Counter())[finding.introduced_by] += 1
    assert set(by_rule["HLA001"]) == {"before_optimizations"}
    assert set(by_rule["HLA003"]) == {"before_optimizations"}
    assert set(by_rule["HLA004"]) == {PARTITIONER}
    assert by_rule["HLA002"][LAYOUT_ASSIGNMENT] == 11
    head = [
        one
        for one in history.audit.findings
        if one.rule == "HLA002" and one.details["place"] in ("parameter", "result")
    ]
    assert [one.introduced_by for one in head] == [LAYOUT_ASSIGNMENT] * 6
    copies = series_of(history, "copy")
    assert copies.most > 1000
    assert copies.last is not None
    assert copies.last.count == 29
    passes = timeline_of(history).passes
    insertion = [
        change
        for change in copies.changes
        if passes.pass_name(change.position) == "Global_Copy_Insertion: copy-insertion"
    ]
    assert max(change.added for change in insertion) > 150
    assert sum(change.lasting for change in insertion) < 10


def test_the_head_of_a_trainer_waits_for_nine_transposes(dumps: Callable[[str], Path]) -> None:
    history = history_of(dumps("llama2_auto_fsdp4"))
    series = series_of(history, "HLA003")
    assert series.first is not None
    assert series.first.count > 0
    assert series.last == Reading(0, 0)
    names = {
        timeline_of(history).passes.pass_name(change.position)
        for change in series.changes
        if change.lasting
    }
    assert "simplification-1: algsimp" in names


@pytest.mark.parametrize("platform", ["cpu", "gpu-h100"])
def test_the_passes_of_other_platforms(dumps: Callable[[str], Path], platform: str) -> None:
    history = history_of(dumps("lm_head_platforms") / f"{platform}-explicit")
    assert None not in timeline_of(history).passes.phases
    found = {one.introduced_by for one in history.audit.findings if one.rule == "HLA004"}
    assert found == {"spmd-partitioner: spmd-partitioning"}
    assert series_of(history, "HLA001").last == Reading(0, 0)


# -- swings, and names


def module_with(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "HloModule jit_f\n\nENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
        f"  %p = f32[8,4]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def write_dump(folder: Path, *passes: tuple[str, str]) -> Passes:
    for number, (suffix, text) in enumerate(passes):
        (folder / f"module_0001.jit_f.{number:04}.{suffix}.txt").write_text(text)
    (dump,) = read_dump(folder).modules
    return Passes(dump)


COPY = "%copy.{0} = f32[8,4]{{1,0}} copy(%p)"
ROOT = "ROOT %n = f32[8,4]{1,0} negate(%p)"


def test_a_later_pass_undoes_the_last_change_first(tmp_path: Path) -> None:
    counts = [0, 2, 5, 3, 1, 2]
    passes = write_dump(
        tmp_path,
        *(
            (f"p.after_pass{i}.before_x", module_with(*map(COPY.format, range(count)), ROOT))
            for i, count in enumerate(counts)
        ),
    )
    (copies,) = make_timeline(passes, (), ("copy",)).series
    assert [one.count for one in copies.readings if one] == counts
    changes = {change.position: change for change in copies.changes}
    assert {place: change.count for place, change in changes.items()} == {
        1: 2,
        2: 3,
        3: -2,
        4: -2,
        5: 1,
    }
    assert changes[2].undone_by == {3: 2, 4: 1}
    assert changes[3].undoes == {2: 2}
    assert changes[4].undoes == {2: 1, 1: 1}
    assert {place: change.lasting for place, change in changes.items()} == {
        1: 1,
        2: 0,
        3: 0,
        4: 0,
        5: 1,
    }
    assert [(changes[at].lasting_added, changes[at].lasting_removed) for at in (1, 2, 5)] == [
        (1, 0),
        (0, 0),
        (1, 0),
    ]
    assert changes[1].bytes == 2 * 8 * 4 * 4


def test_one_shape_does_not_undo_another(tmp_path: Path) -> None:
    other = "%other = f32[4,8]{1,0} transpose(%p), dimensions={1,0}"
    same = "%same = f32[8,4]{1,0} transpose(%p), dimensions={0,1}"
    passes = write_dump(
        tmp_path,
        ("p.after_a.before_b", module_with(ROOT)),
        ("p.after_b.before_c", module_with(other, ROOT)),
        ("p.after_c.before_d", module_with(same, ROOT)),
    )
    (series,) = make_timeline(passes, (), ("transpose",)).series
    first, second = series.changes
    assert (first.lasting, first.undone_by) == (0, {2: 1})
    # As many come as go, of as many bytes, and yet there is one that was not there before.
    assert (second.lasting_added, second.lasting_removed, second.swings) == (1, 0, 1)
    assert (second.count, second.bytes, second.lasting, second.undoes) == (0, 0, 1, {1: 1})


def test_numbered_passes_have_one_name(tmp_path: Path) -> None:
    text = module_with(ROOT)
    passes = write_dump(tmp_path, ("p.after_apply-xla-transforms-17.before_x", text))
    assert passes.pass_name(0) == "p: apply-xla-transforms"


def test_a_pipeline_within_a_pass_is_that_pass(tmp_path: Path) -> None:
    passes = write_dump(
        tmp_path,
        ("outer.after_pipeline-start.before_big", module_with(ROOT)),
        ("inner.after_pipeline-start.before_dce", module_with(COPY.format(1), ROOT)),
        ("inner.after_dce.before_pipeline-end", module_with(ROOT)),
        ("outer.after_big.before_next", module_with(ROOT)),
        ("later.after_pipeline-start.before_y", module_with(ROOT)),
    )
    names = [passes.pass_name(place) for place in range(len(passes))]
    assert names == ["before outer", "outer: big", "inner: dce", "outer: big", "before later"]


def parsed(*lines: str) -> Module:
    return parse_module(module_with(*lines))


def test_matching_says_how() -> None:
    named = 'metadata={op_name="jit(f)/a"}'
    before = parsed(f"%a.1 = f32[8,4]{{1,0}} copy(%p), {named}", "ROOT %r = f32[8,4] negate(%a.1)")
    same = parsed(f"%a.1 = f32[8,4]{{0,1}} copy(%p), {named}", "ROOT %r = f32[8,4] negate(%a.1)")
    renamed = parsed(f"%b = f32[8,4]{{1,0}} copy(%p), {named}", "ROOT %r = f32[8,4] negate(%b)")
    other = parsed("%a.1 = f32[8,4]{1,0} negate(%p)", "ROOT %r = f32[8,4] negate(%a.1)")
    copy = before.entry["a.1"]
    identity = identity_of(copy)
    for module, name, how in ((same, "a.1", "name"), (renamed, "b", "op_name and shape")):
        match = find_in(module, copy, identity)
        assert match is not None
        assert (match.instruction.name, match.how) == (name, how)
    assert find_in(other, copy, identity) is None


def test_several_alike_are_told_apart_by_what_reads_them() -> None:
    def two(first: str, second: str) -> Module:
        named = 'metadata={op_name="jit(f)/a"}'
        return parsed(
            f"%{first} = f32[8,4]{{1,0}} copy(%p), {named}",
            f"%{second} = f32[8,4]{{1,0}} copy(%p), {named}",
            f"%s = f32[8,4]{{1,0}} sine(%{second})",
            f"ROOT %r = f32[8,4]{{1,0}} add(%{first}, %s)",
        )

    one, other = two("a", "b"), two("y", "x")
    for name, expected in (("a", "y"), ("b", "x")):
        match = find_in(other, one.entry[name], identity_of(one.entry[name]))
        assert match is not None
        assert (match.instruction.name, match.how) == (expected, "op_name, shape and neighbours")


def test_an_instruction_that_is_nowhere(explicit: History) -> None:
    with pytest.raises(UsageError, match="instruction"):
        look_up(timeline_of(explicit).passes, "no-such-name")


def test_a_bar_shows_whatever_is_there() -> None:
    counts = [None, 0, 1000, 1]
    readings = tuple(None if one is None else Reading(one, 0) for one in counts)
    series = Series("copy", "copy", "opcode", "copies", readings, {0: "why"}, ())
    assert sparkline(series, 10) == "·▁█▂"
    assert sparkline(series, 2) == "▁█"


# -- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["passes", *arguments])


def schema() -> Any:
    file = resources.files("hlo_audit.report").joinpath("passes.schema.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("more", [[], ["--finding", "1"], ["--instruction", "%copy"]])
def test_json_follows_its_schema(newest: Path, more: list[str]) -> None:
    result = run(str(newest), "--format", "json", *more)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema()).validate(report)
    (program,) = report["programs"]
    assert all(len(one["readings"]) == len(program["snapshots"]) for one in program["series"])
    assert len(program["walks"]) == (1 if more else 0)


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("more", [[], ["--all"], ["--finding", "1"]])
def test_the_text_fits(
    newest: Path, columns: int, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run(str(newest), *more)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "layout-assignment" in result.stdout


def test_all_shows_every_snapshot_and_the_default_only_changes(newest: Path) -> None:
    few, every = run(str(newest)).stdout, run(str(newest), "--all").stdout
    assert "as before" not in few
    assert every.count("as before") > 50
    assert "~60" in few


def test_chosen_opcodes(newest: Path) -> None:
    result = run(str(newest), "--op", "dot,fusion", "--op", "while", "--format", "json")
    (program,) = json.loads(result.stdout)["programs"]
    names = [one["name"] for one in program["series"] if one["kind"] == "opcode"]
    assert names == ["dot", "fusion", "while"]
    fusions = next(one for one in program["series"] if one["name"] == "fusion")
    assert fusions["readings"][0] == {"count": 0, "bytes": 0}
    assert fusions["readings"][-1]["count"] > 0


def test_check_names_the_pass_when_asked(newest: Path) -> None:
    def findings(*more: str) -> list[dict[str, Any]]:
        result = CliRunner().invoke(
            cli, ["check", str(newest), "--no-config", "--format", "json", *more]
        )
        (program,) = json.loads(result.stdout)["programs"]
        found: list[dict[str, Any]] = program["findings"]
        return found

    assert {one["introduced_by"] for one in findings()} == {None}
    named = findings("--introduced-by")
    assert {one["introduced_by"] for one in named if one["rule"] == "HLA002"} == {LAYOUT_ASSIGNMENT}
    assert [one["fingerprint"] for one in named] == [one["fingerprint"] for one in findings()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--finding", "99"], "there is no finding 99"),
        (["--instruction", "nope"], "instruction"),
        (["--finding", "1", "--instruction", "copy"], "exclude each other"),
        (["--select", "HLA999"], "HLA999"),
    ],
)
def test_what_cannot_be_is_said(newest: Path, arguments: list[str], message: str) -> None:
    result = run(str(newest), *arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_a_misspelt_opcode_is_none_that_does_not_occur(newest: Path) -> None:
    for name, near in (("trnspose", "transpose"), ("all_reduce", "all-reduce")):
        refused = run(str(newest), "--op", f"copy,{name}")
        assert isinstance(refused.exception, UsageError)
        said = f"no opcode is called {name!r} (did you mean {near!r}?)"
        assert str(refused.exception) == said
    absent = run(str(newest), "--op", "cholesky", "--op", "ragged-all-to-all-start")
    assert absent.exit_code == 0
    assert "cholesky" in absent.stdout


def test_every_opcode_of_a_dump_is_known(newest: Path) -> None:
    passes = Passes(read_dump(newest).modules[0])
    found = {one.opcode for module in passes.modules for one in module.instructions}
    assert len(found) > 20
    assert all(map(is_opcode, found)), found


def test_few_of_many_names_are_listed(newest: Path) -> None:
    refused = run(str(newest), "--instruction", "nope")
    (hint,) = re.findall(r"\(one of [0-9,]+, such as (.*)\)$", str(refused.exception))
    assert len(hint.split(", ")) == 4
    started = time.monotonic()
    error = unknown_name("thing", "nope" * 100, (f"fusion.{n}" for n in range(100_000)))
    assert len(str(error)) < 300
    assert time.monotonic() - started < 10
    assert unknown_name("thing", "x", "abc").hint == "one of: a, b, c"


def test_a_file_and_a_dump_without_passes(newest: Path, tmp_path: Path) -> None:
    (final,) = newest.glob("*after_codegen.txt")
    result = run(str(final))
    assert result.exit_code == 2
    assert "a single snapshot" in result.stderr
    (tmp_path / final.name).write_bytes(final.read_bytes())
    result = run(str(tmp_path))
    assert result.exit_code == 2
    assert "no snapshot of a pass" in result.stderr
    (dump,) = read_dump(tmp_path).modules
    with pytest.raises(DumpError):
        Passes(dump)


def test_names_in_a_dump_stay_text(tmp_path: Path) -> None:
    evil = '%c = f32[8,4]{1,0} copy(%p), metadata={op_name="[red]\x1b[31m"}'
    write_dump(
        tmp_path,
        ("p.after_a.before_b", module_with(ROOT)),
        ("p.after_[bold]b\x1b[2J.before_c", module_with(evil, ROOT)),
    )
    for more in ([], ["--all"], ["--instruction", "c"]):
        result = run(str(tmp_path), *more)
        assert result.exit_code == 0, result.output
        assert "[bold]b" in result.stdout
        assert "\x1b" not in result.output


@pytest.mark.slow
def test_a_program_is_compiled_and_its_passes_read() -> None:
    sizes = [part for size in ("embed=128", "vocab=512", "seq=16") for part in ("--set", size)]
    result = run("lm-head", "--platform", "cpu", *sizes, "--quiet", "--finding", "1")
    assert result.exit_code == 0, result.output
    assert "lm-head/explicit/embed-vocab  4 CPU devices" in result.stdout
    assert "brought by " in result.stdout
    result = run("lm-head", "--platform", "cpu", *sizes, "--quiet", "--format", "json")
    auto, explicit = json.loads(result.stdout)["programs"]
    assert (auto["mode"], explicit["mode"]) == ("auto", "explicit")
    annotations = [one["series"][0]["readings"][0]["count"] for one in (auto, explicit)]
    assert annotations[0] < annotations[1]


def test_the_passes_are_read_without_jax(newest: Path) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom hlo_audit.cli import cli\n"
        f"result = CliRunner().invoke(cli, ['passes', {str(newest)!r}])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not {'jax', 'jaxlib', 'pandas'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
