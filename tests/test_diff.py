"""Two programs side by side: real dumps of both modes, and small ones that show one thing each."""

from __future__ import annotations

import io
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

import command_line
from hlo_audit.compiler import available_platform
from hlo_audit.diff import Diff, diff_subjects
from hlo_audit.errors import HloAuditError, UsageError
from hlo_audit.hlo import parse_module
from hlo_audit.manifest import Manifest, write_manifest
from hlo_audit.matching import match
from hlo_audit.models import ALL_MODELS
from hlo_audit.parting import bulk
from hlo_audit.program import Lowering, Recorded, find_subjects
from hlo_audit.report.diff_json import diff_to_json
from hlo_audit.report.diff_text import print_diff
from hlo_audit.report.diff_wording import exact_bytes, fixes, parted, summary
from hlo_audit.rules import ALL_RULES

VERSIONS = ["0.7.2", "0.8.0", "0.8.3", "0.9.2", "0.10.2", "0.11.0", "0.12.0"]


def diff(a: Path, b: Path, **options: Any) -> Diff:
    return diff_subjects([Recorded(a), Recorded(b)], ALL_RULES, **options)


def text_of(found: Diff, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as capture:
        print_diff(console, found)
    return capture.get()


def validated(found: Diff) -> dict[str, Any]:
    data = json.loads(json.dumps(diff_to_json(found, {"python": "3"}), allow_nan=False))
    schema = resources.files("hlo_audit.report").joinpath("diff.schema.json").read_text()
    jsonschema.Draft202012Validator(json.loads(schema)).validate(data)
    return dict(data)


run = partial(command_line.invoke, "diff", columns=100)


# -- the LM head at its own sizes


@pytest.fixture(scope="module")
def lm_head(dumps: Callable[[str], Path]) -> Diff:
    folder = dumps("forms_versions") / "jax-0.10.2"
    return diff(folder / "tpu-lm-head-auto", folder / "tpu-lm-head-explicit")


def test_explicit_adds_six_entry_copies_and_loses_the_reduce_scatter(lm_head: Diff) -> None:
    copies, reduce_scatters = lm_head.copies["entry"], lm_head.collectives["reduce-scatter"]
    assert [total.count for total in copies] == [0, 6]
    assert copies[1].traffic.hbm_bytes == 196_608_000
    assert [total.count for total in reduce_scatters] == [1, 0]
    said = summary(lm_head)
    assert said[0].startswith("B adds 6 relayout copies of entry parameters and results: 196.6 MB")
    assert said[1].startswith("B loses 1 reduce-scatter and adds 1 all-reduce: the wire carries")


def test_the_first_screen_says_it_all(lm_head: Diff) -> None:
    screen = text_of(lm_head).splitlines()
    assert max(map(len, screen)) <= 100
    first = " ".join(line.strip() for line in screen[:24])
    for part in (
        "adds 6 relayout copies of entry parameters and results",
        "196.6 MB",
        "loses 1 reduce-scatter",
        "they part at ",
        "fix kernel-order-grad for 1 of 1 HLA001, 6 of 6 HLA002",
        "run the forward dot under jax.sharding.auto_axes",
    ):
        assert part in first


def test_the_fix_of_most_findings_comes_first(lm_head: Diff) -> None:
    names = [(side, fix.name) for side, fix in fixes(lm_head)]
    assert names[0] == ("B", "kernel-order-grad")
    assert {side for side, _ in names} == {"B"}


def test_json_follows_its_schema(lm_head: Diff) -> None:
    data = validated(lm_head)
    copies = next(one for one in data["rules"] if one["rule"] == "HLA002")
    assert (copies["counts"], len(copies["only_b"])) == ({"a": 0, "b": 6}, 6)
    assert data["opcodes"]["copy"] == {"a": 1, "b": 7}
    assert data["copies"]["entry"]["b"]["hbm_bytes"] == 196_608_000
    assert data["comparable"] is True
    assert len(data["entry"]) == 12
    matched = data["instructions"]["matched"]
    total = sum(both["a"] for both in data["opcodes"].values())
    assert matched + len(data["instructions"]["only_a"]) == total


# -- the pass at which they part


@pytest.mark.parametrize("version", VERSIONS)
def test_the_modes_part_where_auto_folds_the_transpose(
    dumps: Callable[[str], Path], version: str
) -> None:
    folder = dumps("lm_head_versions")
    found = diff(folder / f"jax-{version}-auto", folder / f"jax-{version}-explicit")
    (parting,) = found.partings
    assert (parting.pipeline, parting.after) == ("simplification-1", "algsimp")
    assert dict(parting.only_a) == {("dot", "f32[512,32000]"): 1}
    assert dict(parting.only_b) == {
        ("dot", "f32[32000,512]"): 1,
        ("transpose", "f32[512,32000]"): 1,
    }
    validated(found)


def test_a_trainers_modes_part_at_the_same_pass(dumps: Callable[[str], Path]) -> None:
    found = diff(dumps("llama2_auto_fsdp4"), dumps("llama2_explicit_fsdp4"))
    assert found.comparable
    assert (found.partings[0].pipeline, found.partings[0].after) == ("simplification-1", "algsimp")
    assert found.partings[0].only_b["transpose", "bf16[512,32000]"] == 1
    assert found.copies["entry"][1].count - found.copies["entry"][0].count == 6
    assert found.matching is not None
    assert len(found.matching.pairs) > 0.9 * sum(both.a or 0 for both in found.opcodes.values())
    assert max(map(len, text_of(found).splitlines())) <= 100


def test_two_compilers_that_do_the_same_do_not_part(dumps: Callable[[str], Path]) -> None:
    folder = dumps("lm_head_versions")
    found = diff(folder / "jax-0.10.2-auto", folder / "jax-0.12.0-auto")
    assert found.partings == ()
    assert parted(found)[0].startswith("no pass parts them: in every pass both do the same in bulk")


def module_text(*opcodes: str) -> str:
    lines = [
        f"  %i{n} = f32[512,512]{{1,0}} "
        + (
            "transpose(%p), dimensions={1,0}"
            if opcode == "transpose"
            else f"dot(%p, %p), lhs_contracting_dims={{{n % 2}}}, rhs_contracting_dims={{0}}"
        )
        for n, opcode in enumerate(opcodes)
    ]
    return (
        "HloModule jit_step\n\nENTRY %main (p: f32[512,512]) -> f32[512,512] {\n"
        "  %p = f32[512,512]{1,0} parameter(0)\n"
        + "".join(f"{line}\n" for line in lines)
        + "  ROOT %n = f32[512,512]{1,0} negate(%p)\n}\n"
    )


def write_dump(folder: Path, passes: Sequence[tuple[str, str]]) -> Path:
    """A dump: for each pass, by its name, the module as it stands after it."""
    folder.mkdir()
    start, *others = passes
    stem = "module_0000.jit_step.cl_1"
    (folder / f"{stem}.before_optimizations.txt").write_text(start[1])
    for number, (name, text) in enumerate(others):
        pipeline, after = name.split("/")
        file = f"{stem}.{number:04}.{pipeline}.after_{after}.before_dce.txt"
        (folder / file).write_text(text)
    final = passes[-1][1].replace("jit_step\n", "jit_step, is_scheduled=true\n", 1)
    (folder / f"{stem}.after_codegen.txt").write_text(final)
    return folder


def test_a_difference_that_is_gone_again_parts_nothing(tmp_path: Path) -> None:
    plain, turned = module_text("dot"), module_text("dot", "transpose")
    a = write_dump(tmp_path / "a", [("", plain), ("p/one", plain), ("p/two", plain)])
    b = write_dump(tmp_path / "b", [("", plain), ("p/one", turned), ("p/two", plain)])
    assert diff(a, b).partings == ()


def test_they_part_at_the_first_pass_after_which_they_never_agree(tmp_path: Path) -> None:
    plain, turned = module_text("dot"), module_text("dot", "transpose")
    names = ["", "p/one", "p/two", "p/three", "p/four"]
    a = write_dump(tmp_path / "a", [(name, plain) for name in names])
    texts = [plain, turned, plain, turned, turned]
    b = write_dump(tmp_path / "b", list(zip(names, texts, strict=True)))
    (parting,) = diff(a, b).partings
    assert (parting.label, parting.step) == ("p: three", 3)
    assert (dict(parting.only_a), dict(parting.only_b)) == (
        {},
        {("transpose", "f32[512,512]"): 1},
    )


def test_passes_are_aligned_by_name_not_by_number(tmp_path: Path) -> None:
    """One side has a snapshot more, and the numbers of a repeated pipeline differ."""
    plain, turned = module_text("dot"), module_text("dot", "transpose")
    a = write_dump(
        tmp_path / "a", [("", plain), ("p/apply-xla-transforms-3", plain), ("q/late", plain)]
    )
    b = write_dump(
        tmp_path / "b",
        [
            ("", plain),
            ("p/extra", plain),
            ("p/apply-xla-transforms-7", plain),
            ("q/late", turned),
        ],
    )
    (parting,) = diff(a, b).partings
    assert parting.label == "q: late"
    assert parting.step == 3


def test_where_they_differ_from_the_start_the_next_change_is_told_too(tmp_path: Path) -> None:
    plain, turned = module_text("dot"), module_text("dot", "transpose")
    twice = module_text("dot", "dot", "transpose")
    a = write_dump(tmp_path / "a", [("", plain), ("p/one", plain), ("p/two", plain)])
    b = write_dump(tmp_path / "b", [("", turned), ("p/one", turned), ("p/two", twice)])
    start, then = diff(a, b).partings
    assert (start.label, then.label) == ("before_optimizations", "p: two")
    assert dict(then.only_b) == {("dot", "f32[512,512]"): 1}
    said = parted(diff(a, b))
    assert said[0].startswith("they differ from the start")
    assert said[1].startswith("and from p, two on")


def test_annotations_and_their_copies_are_nothing_in_bulk() -> None:
    module = parse_module(
        "HloModule m\n\nENTRY %main (p: f32[512,512]) -> f32[512,512] {\n"
        "  %p = f32[512,512]{1,0} parameter(0)\n"
        '  %s = f32[512,512]{1,0} custom-call(%p), custom_call_target="Sharding"\n'
        "  %c = f32[512,512]{1,0} copy(%s)\n"
        "  %t = f32[512,1,512]{2,1,0} reshape(%c)\n"
        "  %u = f32[1,512,512]{2,1,0} transpose(%t), dimensions={1,0,2}\n"
        "  ROOT %r = f32[512,512]{0,1} copy(%c)\n}\n"
    )
    assert dict(bulk(module.entry)) == {("copy {1,0} to {0,1}", "f32[512,512]"): 1}


# -- whether they can be compared


def test_dumps_of_different_models_are_not_comparable(dumps: Callable[[str], Path]) -> None:
    a, b = dumps("llama2_auto_fsdp4"), dumps("lm_head_versions") / "jax-0.12.0-auto"
    found = diff(a, b)
    assert not found.comparable
    assert found.rules == ()
    assert "the number of while loops differs: 2 and 0" in found.obstacles
    assert any(one.startswith("they take other arguments: A ") for one in found.obstacles)
    assert validated(found)["instructions"] is None
    text = text_of(found)
    assert "not comparable" in text
    assert "HLA002" not in text
    forced = diff(a, b, force=True)
    assert forced.rules
    assert not forced.identical
    assert forced.obstacles == found.obstacles


def test_an_array_stored_in_another_shape_is_the_same_argument(tmp_path: Path) -> None:
    text = module_text("dot")
    a = write_dump(tmp_path / "a", [("", text), ("p/one", text)])
    flat = (
        "HloModule jit_step\n\nENTRY %main (p: f32[262144]) -> f32[262144] {\n"
        "  %p = f32[262144]{0} parameter(0)\n  ROOT %n = f32[262144]{0} negate(%p)\n}\n"
    )
    b = write_dump(tmp_path / "b", [("", flat), ("p/one", flat)])
    found = diff(a, b)
    assert found.comparable
    assert [(str(row.a), str(row.b)) for row in found.entry if row.kind == "parameter"] == [
        ("f32[512,512]{1,0}", "f32[262144]{0}")
    ]
    other = write_dump(
        tmp_path / "c", [("", flat.replace("262144", "99")), ("p/one", flat.replace("262144", "9"))]
    )
    assert not diff(a, other).comparable


def with_manifest(folder: Path, **changes: Any) -> Path:
    manifest = Manifest(
        program="step",
        mode="auto",
        layout=None,
        platform="tpu",
        topology="v5p:2x2x1",
        mesh={"fsdp": 4},
        settings={},
        xla_flags={},
        versions={"jax": "0.10.2"},
        module="jit_step",
        devices=4,
        lower_seconds=0.0,
        compile_seconds=0.0,
        digest="",
    )
    write_manifest(replace(manifest, **changes), folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"topology": "v6e:2x2"}, "the topology differs: v5p:2x2x1 and v6e:2x2"),
        ({"xla_flags": {"xla_f": "1"}}, "the flag xla_f differs: not set and 1"),
        ({"platform": "cpu"}, "the platform differs: tpu and cpu"),
    ],
)
def test_what_was_compiled_otherwise_is_not_comparable(
    tmp_path: Path, changes: dict[str, Any], obstacle: str
) -> None:
    text = module_text("dot")
    folders = [write_dump(tmp_path / name, [("", text), ("p/one", text)]) for name in "ab"]
    found = diff(with_manifest(folders[0]), with_manifest(folders[1], **changes))
    assert found.obstacles == (obstacle,)
    assert not found.identical


def test_modes_layouts_and_compilers_are_compared_and_name_the_sides(tmp_path: Path) -> None:
    text = module_text("dot")
    folders = [write_dump(tmp_path / name, [("", text), ("p/one", text)]) for name in "ab"]
    found = diff(
        with_manifest(folders[0]),
        with_manifest(folders[1], mode="explicit", versions={"jax": "0.12.0"}),
    )
    assert found.obstacles == ()
    assert (found.a.name, found.b.name) == ("auto", "explicit")
    assert found.notes == ("the jax differs: 0.10.2 and 0.12.0",)


# -- the same program


def test_names_and_metadata_make_no_other_program(
    dumps: Callable[[str], Path], tmp_path: Path
) -> None:
    source = dumps("lm_head_versions") / "jax-0.12.0-explicit"
    target = tmp_path / "renamed"
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".txt":
            text = path.read_text()
            text = re.sub(r"%(copy|fusion|constant)\b", r"%other_\1", text)
            (target / path.name).write_text(re.sub(r"stack_frame_id=\d+ ?", "", text))
    found = diff(source, target)
    assert summary(found)[0].startswith("the same program")
    assert found.identical
    assert found.partings == ()
    validated(found)


def test_a_single_changed_operand_makes_another_program(tmp_path: Path) -> None:
    text = module_text("dot", "dot")
    a = write_dump(tmp_path / "a", [("", text), ("p/one", text)])
    changed = text.replace("lhs_contracting_dims={1}", "lhs_contracting_dims={0}")
    assert changed != text
    b = write_dump(tmp_path / "b", [("", changed), ("p/one", changed)])
    found = diff(a, b)
    assert not found.identical
    assert summary(found)[-1].startswith("the rules find the same in both")


# -- instructions by meaning


def matched(a: str, b: str) -> tuple[set[tuple[str, str]], set[str], set[str]]:
    found = match(parse_module(a), parse_module(b))
    pairs = {(one.name, other.name) for one, other in found.pairs}
    return pairs, {one.name for one in found.only_a}, {one.name for one in found.only_b}


def entry(*lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}}}\n"


def test_twins_are_told_apart_by_their_neighbours() -> None:
    a = entry(
        "%p = f32[8]{0} parameter(0)",
        "%n1 = f32[8]{0} negate(%p)",
        "%n2 = f32[8]{0} negate(%p)",
        "%sin = f32[8]{0} sine(%n1)",
        "%cos = f32[8]{0} cosine(%n2)",
        "ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%sin, %cos)",
    )
    b = entry(
        "%q = f32[8]{0} parameter(0)",
        "%first = f32[8]{0} negate(%q)",
        "%second = f32[8]{0} negate(%q)",
        "%c = f32[8]{0} cosine(%first)",
        "%s = f32[8]{0} sine(%second)",
        "ROOT %u = (f32[8]{0}, f32[8]{0}) tuple(%s, %c)",
    )
    pairs, only_a, only_b = matched(a, b)
    assert {("n1", "second"), ("n2", "first"), ("sin", "s"), ("cos", "c")} <= pairs
    assert (only_a, only_b) == (set(), set())


def test_a_copy_more_is_the_one_without_a_partner() -> None:
    a = entry("%p = f32[8,4]{1,0} parameter(0)", "ROOT %n = f32[8,4]{1,0} negate(%p)")
    b = entry(
        "%p = f32[8,4]{1,0} parameter(0)",
        "%c = f32[8,4]{0,1} copy(%p)",
        "ROOT %n = f32[8,4]{0,1} negate(%c)",
    )
    pairs, only_a, only_b = matched(a, b)
    assert pairs == {("p", "p"), ("n", "n")}
    assert (only_a, only_b) == (set(), {"c"})
    found = match(parse_module(a), parse_module(b))
    assert [pair.a.name for pair in found.relaid] == ["n"]


def test_what_came_out_transposed_is_matched_by_its_operation() -> None:
    dot = '%d = f32[{}]{{1,0}} dot(%p, %p), metadata={{op_name="jit(step)/dot_general"}}'
    p = "%p = f32[8,4]{1,0} parameter(0)"
    a, b = (entry(p, "ROOT " + dot.format(sizes)) for sizes in ("8,4", "4,8"))
    found = match(parse_module(a), parse_module(b))
    assert [(str(pair.a.shape), str(pair.b.shape)) for pair in found.reshaped] == [
        ("f32[8,4]{1,0}", "f32[4,8]{1,0}")
    ]


# -- the command


def test_the_exit_code_says_whether_anything_differs(dumps: Callable[[str], Path]) -> None:
    folder = dumps("lm_head_versions")
    auto, explicit = folder / "jax-0.12.0-auto", folder / "jax-0.12.0-explicit"
    same = run(auto, auto, "--exit-code")
    assert (same.returncode, same.stderr) == (0, "")
    assert "the same program" in same.stdout
    assert run(auto, explicit, "--exit-code").returncode == 1
    assert run(auto, explicit).returncode == 0


def test_json_on_the_command_line(dumps: Callable[[str], Path], tmp_path: Path) -> None:
    folder = dumps("lm_head_versions")
    output = tmp_path / "diff.json"
    result = run(
        folder / "jax-0.12.0-auto",
        folder / "jax-0.12.0-explicit",
        *("--format", "json", "--output", output),
    )
    assert (result.returncode, result.stdout) == (0, "")
    data = json.loads(output.read_text())
    schema = resources.files("hlo_audit.report").joinpath("diff.schema.json").read_text()
    jsonschema.Draft202012Validator(json.loads(schema)).validate(data)


def test_single_files_have_no_passes(dumps: Callable[[str], Path]) -> None:
    folder = dumps("lm_head_versions")
    finals = [
        next((folder / f"jax-0.12.0-{mode}").glob("*after_codegen.txt"))
        for mode in ("auto", "explicit")
    ]
    found = diff(*finals)
    assert found.no_parting == "a single file shows no passes"
    assert found.copies["entry"][1].count == 4
    rule = next(one for one in found.rules if one.rule.code == "HLA001")
    assert (rule.counts.a, rule.counts.b) == (None, None)
    validated(found)


def test_a_diff_takes_two_programs(dumps: Callable[[str], Path]) -> None:
    dump = dumps("lm_head_versions") / "jax-0.12.0-auto"
    others = [dump.with_name(f"jax-0.{minor}.0-auto") for minor in (8, 11)]
    for programs, said in (
        ([dump], f"and this is one: {dump} (give a second dump or file)"),
        ([dump] * 3, f"and this is one: {dump} (give a second dump or file)"),
        ([dump, *others], "and these are 3: "),
        (["lm-head", "lm-head", "--layout", "all"], " and 4 more (choose by"),
        (["lm-head", "--mode", "auto"], "(choose by --mode, --layout or --topology)"),
    ):
        result = run(*programs)
        assert result.returncode == 2
        assert "a diff is of two programs, and " in result.stderr
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_model_that_is_given_twice_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_programs(lowerings: Sequence[Lowering], on_done: Any, **_: Any) -> None:
        for one in lowerings:
            on_done(one, UsageError(" ".join(one.label for one in lowerings)))

    monkeypatch.setattr("hlo_audit.compiling.compile_programs", compile_programs)
    subjects = find_subjects(["lm-head", "lm-head"], ALL_MODELS)
    with pytest.raises(UsageError) as caught:
        diff_subjects(subjects, ALL_RULES)
    assert str(caught.value) == " ".join(one.label for one in subjects[:2])


def test_one_of_several_modules_is_chosen_by_name(tmp_path: Path) -> None:
    text = module_text("dot")
    folder = write_dump(tmp_path / "a", [("", text), ("p/one", text)])
    for path in list(folder.iterdir()):
        other = path.with_name(path.name.replace("0000.jit_step", "0001.jit_other"))
        other.write_text(path.read_text().replace("jit_step", "jit_other"))
    with pytest.raises(UsageError, match="holds 2 modules"):
        diff(folder, folder)
    assert diff(folder, folder, module="jit_step").identical
    with pytest.raises(UsageError, match="jit_stop"):
        diff(folder, folder, module="jit_stop")


def test_a_snapshot_that_ends_early_is_one_clear_error(tmp_path: Path) -> None:
    text = module_text("dot")
    a = write_dump(tmp_path / "a", [("", text), ("p/one", text)])
    b = write_dump(tmp_path / "b", [("", text), ("p/one", text[:150])])
    final = next(b.glob("*after_codegen*"))
    final.write_text(
        text.replace("negate", "abs").replace("step\n", "step, is_scheduled=true\n", 1)
    )
    with pytest.raises(HloAuditError, match=r"p\.after_one"):
        diff(a, b)


def test_names_in_a_dump_do_not_steer_the_terminal(tmp_path: Path) -> None:
    text = module_text("dot")
    hostile = text.replace("parameter(0)", 'parameter(0), metadata={op_name="\x1b[31m[bold]x"}')
    a = write_dump(tmp_path / "a", [("", text), ("p/one", text)])
    b = write_dump(tmp_path / "b", [("", hostile), ("p/one", hostile.replace("{1,0}", "{0,1}"))])
    assert "\x1b" not in text_of(diff(a, b))


@pytest.mark.slow
def test_two_large_dumps_take_under_three_seconds_and_no_jax(
    dumps: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of 20 MB each. The seconds of the processor: what else the machine does is not of this."""
    folders = []
    for mode in ("auto", "explicit"):
        folder = tmp_path / mode
        folder.mkdir()
        files = sorted(
            path
            for path in dumps(f"llama2_{mode}_fsdp4").iterdir()
            if path.suffix == ".txt" and path.name.startswith("module_")
        )
        ends = [p for p in files if re.search(r"(before_opt|after_codegen)\w*\.txt$", p.name)]
        size = 0
        for path in [*ends, *files]:
            if size < 20e6 and not (folder / path.name).exists():
                size += path.stat().st_size
                (folder / path.name).hardlink_to(path)
        folders.append(folder)
    program = (
        "import sys\nfrom hlo_audit.cli import cli\n"
        "cli.main(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'jax', 'pandas'} & set(sys.modules)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", program, "diff", *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, result.stderr) == (0, "")
    assert "they part at simplification-1, algsimp" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


@pytest.mark.slow
@pytest.mark.skipif(available_platform() != "tpu", reason="needs the TPU compiler")
def test_a_model_is_diffed_by_its_name_alone() -> None:
    result = run("lm-head", "--quiet")
    assert (result.returncode, result.stderr) == (0, "")
    first = " ".join(line.strip() for line in result.stdout.splitlines()[:24])
    assert "explicit adds 6 relayout copies of entry parameters and results: 196.6 MB" in first
    assert "explicit loses 1 reduce-scatter and adds 1 all-reduce" in first
    assert "they part at simplification-1, algsimp: auto has dot bf16[512,32000]" in first
    assert "fix kernel-order-grad for 1 of 1 HLA001, 6 of 6 HLA002" in first


# -- wording


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (196_608_000, "196.6 MB"),
        (999_960, "1.0 MB"),
        (-16_384_000, "-16.4 MB"),
        (5_000_000_000_000, "5.0 TB"),
        (5_000_000_000_000_000, "5,000.0 TB"),
    ],
)
def test_bytes_are_told_in_four_digits(count: int, text: str) -> None:
    assert exact_bytes(count) == text
