"""Modules, manifests and paths that are made to hurt: no rule crashes or hangs on them, and one bad
program does not take the others with it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import assert_refused, run
from hlo_audit.errors import DumpError, InternalError
from hlo_audit.hlo import Module
from hlo_audit.manifest import Manifest, read_manifest
from hlo_audit.program_audit import audit_recorded
from hlo_audit.rule import Context, Finding
from hlo_audit.rules import ALL_RULES

pytestmark = pytest.mark.slow

SLICED = """\
HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (g: f32[512,32000]) -> f32[128,32000] {
  %g = f32[512,32000]{1,0} parameter(0)
  %i = u32[] partition-id()
  %z = u32[] constant(0)
  %ar = f32[512,32000]{1,0} all-reduce(%g), replica_groups={{0,1,2,3}}
  ROOT %ds = f32[128,32000]{1,0} dynamic-slice(%ar, %i, %z), dynamic_slice_sizes={128,32000}
}
"""
LOOP = """\
HloModule m, is_scheduled=true

%cond (t: (s32[], f32[512,512])) -> pred[] {
  %t = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(10)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (t: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %t = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%t), index=1
  %c = f32[512,512]{0,1} copy(%x)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %r = (s32[], f32[512,512]{0,1}) tuple(%j, %c)
}

ENTRY %main (p: f32[512,512]) -> (s32[], f32[512,512]) {
  %p = f32[512,512]{1,0} parameter(0)
  %z = s32[] constant(0)
  %in = (s32[], f32[512,512]{1,0}) tuple(%z, %p)
  ROOT %w = (s32[], f32[512,512]{1,0}) while(%in), condition=%cond, body=%body
}
"""
ANNOTATED = """\
HloModule m

ENTRY %main (x: f32[4,4]) -> f32[4,4] {{
  %x = f32[4,4] parameter(0)
  {lines}
}}
"""


def doubling_sum(steps: int) -> str:
    lines = ["%a0 = u32[] partition-id()"]
    lines += [f"%a{i + 1} = u32[] add(%a{i}, %a{i})" for i in range(steps)]
    return SLICED.replace("%i = u32[] partition-id()", "\n  ".join(lines)).replace(
        "%i,", f"%a{steps},"
    )


def doubling_calls(depth: int) -> str:
    shape = "f32[512,512]{1,0}"
    parts = [
        f"HloModule m, is_scheduled=true\n\n%f0 (p: f32[512,512]) -> f32[512,512] {{\n"
        f"  ROOT %p = {shape} parameter(0)\n}}\n"
    ]
    for i in range(1, depth):
        parts.append(
            f"\n%f{i} (p: f32[512,512]) -> f32[512,512] {{\n  %p = {shape} parameter(0)\n"
            f"  %a = {shape} call(%p), to_apply=%f{i - 1}\n"
            f"  ROOT %b = {shape} call(%a), to_apply=%f{i - 1}\n}}\n"
        )
    parts.append(
        f"\nENTRY %m (p: f32[512,512]) -> f32[512,512] {{\n  %p = {shape} parameter(0)\n"
        f"  %k = {shape} call(%p), to_apply=%f{depth - 1}\n"
        "  ROOT %c = f32[512,512]{0,1} copy(%k)\n}\n"
    )
    return "".join(parts)


def copy_chain(length: int) -> str:
    lines = ["  %c0 = f32[512,512]{1,0} parameter(0)"]
    for i in range(length):
        order = "{0,1}" if i % 2 == 0 else "{1,0}"
        lines.append(f"  %c{i + 1} = f32[512,512]{order} copy(%c{i})")
    lines[-1] = "  ROOT " + lines[-1].strip()
    head = "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[512,512]) -> f32[512,512] {"
    return "\n".join([head, *lines, "}\n"])


HOSTILE = {
    "an empty group": SLICED.replace("{{0,1,2,3}}", "{{ },{0,1}}"),
    "no operand": SLICED.replace("all-reduce(%g)", "all-reduce()"),
    "a slice of another rank": SLICED.replace(
        "ROOT %ds = f32[128,32000]{1,0}", "ROOT %ds = f32[128]{0}"
    ),
    "a negative shift": SLICED.replace(
        "%i = u32[] partition-id()",
        "%q = u32[] partition-id()\n  %k = s32[] constant(-1)\n  %i = u32[] shift-left(%q, %k)",
    ),
    "a million devices": SLICED.replace("{{0,1,2,3}}", "[1,1048576]<=[1048576]"),
    "an exponential sum": doubling_sum(40),
    "exponential calls": doubling_calls(26),
    "a test of one operand": LOOP.replace("compare(%i, %n)", "compare(%i)"),
    "a step of one operand": LOOP.replace("add(%i, %one)", "add(%i)"),
    "a trip count of 5,000 digits": LOOP.replace(
        "body=%body\n",
        f'body=%body, backend_config={{"known_trip_count":{{"n":"{"9" * 5000}"}}}}\n',
    ),
    "a trip count of 310 digits": LOOP.replace(
        "body=%body\n", f'body=%body, backend_config={{"known_trip_count":{{"n":"{"9" * 310}"}}}}\n'
    ),
    "a broadcast of nothing": ANNOTATED.format(
        lines="%b = f32[4,4] broadcast(), dimensions={}\n  %a = f32[4,4] add(%x, %b)\n  ROOT %s = "
        'f32[4,4] custom-call(%a), custom_call_target="Sharding", sharding={replicated}'
    ),
    "a negative dimension": ANNOTATED.format(
        lines="%d = f32[4,4] dot(%x, %x), lhs_contracting_dims={-1}, rhs_contracting_dims={0}\n"
        '  %s = f32[4,4] custom-call(%d), custom_call_target="Sharding", sharding={replicated}\n'
        "  ROOT %t = f32[4,4] transpose(%s), dimensions={1,0}"
    ),
    "a chain of copies": copy_chain(5_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_rule_crashes_or_hangs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    path.write_text(HOSTILE[name])
    start = time.process_time()
    (audit,) = audit_recorded(path, ALL_RULES, {})
    assert audit.error is None
    assert time.process_time() - start < 10


def test_a_rule_that_fails_is_the_error_of_that_program_alone(tmp_path: Path) -> None:
    def fail(module: Module, context: Context) -> Iterator[Finding]:
        raise IndexError("out of range")

    path = tmp_path / "step.txt"
    path.write_text(SLICED)
    broken = replace(ALL_RULES[1], check=fail)
    (audit,) = audit_recorded(path, [broken], {})
    assert isinstance(audit.error, InternalError)
    assert "the rule HLA002 failed on this module: IndexError: out of range" in str(audit.error)


def plain_manifest() -> dict[str, Any]:
    return Manifest(
        program="p",
        mode="auto",
        layout=None,
        platform="tpu",
        topology="v5p:2x2x1",
        mesh={"fsdp": 4},
        settings={},
        xla_flags={},
        versions={},
        module="m",
        devices=4,
        lower_seconds=0.1,
        compile_seconds=0.2,
        digest="0",
    ).to_json()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**plain_manifest(), "mode": "zzz"}),
        json.dumps({**plain_manifest(), "platform": "vax"}),
        json.dumps({**plain_manifest(), "settings": {"x": float("nan")}}),
        json.dumps(plain_manifest()).replace('"lower_seconds": 0.1', '"lower_seconds": 1e999'),
        json.dumps(plain_manifest()).replace("0.1", "1" + "0" * 400),
        "[" * 100_000,
        json.dumps({**plain_manifest(), "mode": [1] * 100_000}),
        " " * (2 << 20),
    ],
    ids=range(8),
)
def test_a_damaged_manifest_is_one_short_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "hlo-audit.json").write_text(text)
    with pytest.raises(DumpError, match="is no manifest") as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value)) < 600


def test_a_manifest_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hlo-audit.json")
    with pytest.raises(DumpError, match="is no manifest"):
        read_manifest(tmp_path)


def test_a_manifest_is_of_the_module_it_names(tmp_path: Path) -> None:
    (tmp_path / "hlo-audit.json").write_text(json.dumps(plain_manifest()))
    for name in ("m", "jit_convert"):
        text = SLICED.replace("HloModule m", f"HloModule {name}")
        (tmp_path / f"module_0001.{name}.after_optimizations.txt").write_text(text)
    helper, step = audit_recorded(tmp_path, ALL_RULES, {})
    assert (step.module, step.mode, step.program) == ("m", "auto", "p")
    assert (helper.module, helper.mode, helper.program) == ("jit_convert", None, str(tmp_path))


def test_reports_go_into_devices_and_through_links_and_never_over_their_input(
    tmp_path: Path,
) -> None:
    source, target, link = (tmp_path / name for name in ("step.txt", "target", "link"))
    source.write_text(SLICED)
    target.write_text("before")
    link.symlink_to(target)
    assert run("check", source, "--output", link).returncode == 0
    assert link.is_symlink()
    assert "HLA004" in target.read_text()
    assert run("check", source, "--output", "/dev/null").returncode == 0
    assert not Path("/dev/null").is_file()
    assert_refused(run("check", source, "--output", source))
    assert source.read_text() == SLICED


@pytest.mark.parametrize("output", [".", "/", "step.txt/report", "x" * 300])
def test_an_output_that_cannot_be_is_one_line(tmp_path: Path, output: str) -> None:
    (tmp_path / "step.txt").write_text(SLICED)
    assert_refused(run("check", "step.txt", "--output", output, cwd=tmp_path))


@pytest.mark.parametrize("program", ["", "a" * 300, "a/" * 3000])
def test_a_path_that_cannot_be_is_one_line(program: str) -> None:
    assert_refused(run("check", program))


def test_a_name_that_the_terminal_cannot_show_is_spelt_out(tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    path.write_text(SLICED.replace("HloModule m", "HloModule m_é"), encoding="utf-8")
    result = run("check", path, env={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert "m_\\xe9" in result.stdout


def test_the_last_of_two_budgets_for_a_rule_wins_by_either_name(tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    path.write_text(copy_chain(1))
    budgets = ["--max", "relayout-copy=5", "--max", "HLA002=0", "--max", "relayout-copy=5"]
    assert run("check", path, *budgets).returncode == 0
    assert run("check", path, *budgets, "--max", "HLA002=0").returncode == 1
