"""The hyper-connections under the real TPU compiler: what flattening costs, and what is left of it.

The programs are compiled once a run and shared by all tests.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import Compiled, available_platform, compile_programs
from hlo_audit.dump import read_dump
from hlo_audit.gate import judge
from hlo_audit.hlo import Module
from hlo_audit.models import ALL_MODELS, mhc
from hlo_audit.program import MODES, Lowering, Mode, find_subjects
from hlo_audit.program_audit import audit_lowered
from hlo_audit.report import Report, environment
from hlo_audit.report.json import to_json
from hlo_audit.rules import ALL_RULES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.oldest_jax,
    pytest.mark.skipif(
        available_platform() != "tpu", reason="libtpu is made for Linux x86-64 only"
    ),
]

CHIPS = 8
MAPS = 24  # 4 + 4 + 4 * 4, for each token

TOPOLOGY = "v6e:2x4"

PROGRAMS: dict[str, tuple[dict[str, str], tuple[Mode, ...], str]] = {
    "small": ({}, MODES, TOPOLOGY),
    # Takes the compiler six times as long: with --full-size only.
    "wide": ({"seq": "4096", "embed": "4096"}, ("auto",), TOPOLOGY),
    "sharded alphas": ({"alpha_sharding": "embed"}, MODES, TOPOLOGY),
    "a sequence a chip": ({}, ("auto",), "v6e:4x4"),
}
SMALL_AND_WIDE = [("small", "auto"), ("small", "explicit"), ("wide", "auto")]

Find = Callable[..., dict[str, Any]]
"""Finds the audit of one program, as JSON, by its name in PROGRAMS, mode and layout."""


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Any]:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    saved = folder / "mhc-report.json"
    with Path(f"{saved}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not saved.exists():
            wide = pytestconfig.getoption("--full-size")
            names = [name for name in PROGRAMS if wide or name != "wide"]
            saved.write_text(json.dumps(audit_all(folder / "mhc-dumps", names)))
    found: dict[str, Any] = json.loads(saved.read_text())
    return found


def audit_all(folder: Path, names: list[str]) -> dict[str, Any]:
    """Each program by its name, mode and layout, with the values that it all-reduces."""
    subjects = {
        f"{name}/{subject.mode}/{subject.layout}": subject
        for name in names
        for settings, modes, topology in [PROGRAMS[name]]
        for subject in find_subjects(
            ["mhc"],
            ALL_MODELS,
            layouts=["all"],
            modes=modes,
            settings=settings,
            topology=topology,
        )
        if isinstance(subject, Lowering)
    }
    cache = Cache(default_folder(os.environ))
    outcomes = compile_programs(list(subjects.values()), into=folder, cache=cache)
    found: dict[str, Any] = {}
    for (key, subject), outcome in zip(subjects.items(), outcomes, strict=True):
        assert isinstance(outcome, Compiled), outcome
        audit = audit_lowered(subject, outcome.folder, ALL_RULES, {})
        (program,) = to_json(Report([audit], judge([audit], {}), environment()))["programs"]
        final = read_dump(outcome.folder).modules[-1].final
        assert final is not None
        found[key] = {**program, "all_reduces": all_reduced(final.read())}
    return found


def all_reduced(module: Module) -> list[str]:
    """The shapes that the module reduces over chips, one for each value."""
    return [
        one.without_layout
        for instruction in module.instructions
        if instruction.opcode in ("all-reduce", "all-reduce-start")
        for one in (instruction.shape.elements or (instruction.shape,))
    ]


@pytest.fixture(scope="session")
def find(report: dict[str, Any]) -> Find:
    def find_program(name: str, mode: str, layout: str) -> dict[str, Any]:
        if name == "wide" and f"{name}/{mode}/{layout}" not in report:
            pytest.skip("compiled with --full-size only")
        program = report[f"{name}/{mode}/{layout}"]
        assert "error" not in program, program["error"]
        return dict(program)

    return find_program


def flattens(program: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in program["findings"] if finding["rule"] == "HLA005"]


def cycles(program: dict[str, Any]) -> int:
    return int(program["cost"]["estimated_cycles"])


def line_of(text: str) -> int:
    """The line of the model that ``text`` stands on."""
    lines = Path(mhc.__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
    return number


@pytest.mark.parametrize(("name", "mode"), SMALL_AND_WIDE)
def test_a_flattened_norm_and_projection_gather_the_streams(
    find: Find, name: str, mode: str
) -> None:
    seq, embed = {"small": (128, 1024), "wide": (4096, 4096)}[name]
    (finding,) = flattens(find(name, mode, "flat"))
    assert finding["opcode"].removesuffix("-start") == "all-gather"
    assert finding["shape"] == f"bf16[2,{seq},4,{embed}]"
    assert "parameter x" in finding["message"]
    streams_bytes = 2 * seq * 4 * embed * 2
    assert finding["bytes"] == finding["executed_bytes"] == streams_bytes
    # A ring sends what the others hold to each: seven parts of eight.
    assert finding["details"]["wire_bytes"] == streams_bytes // 8 * 7
    # Of each token the maps in bf16, and two float32 sums of the norm: forward and backward.
    sums_bytes = 2 * seq * (MAPS * 2 + 2 * 4)
    assert finding["details"]["reduction_wire_bytes"] == 2 * sums_bytes // 8 * 7
    assert finding["details"]["chips"] == CHIPS
    assert finding["details"]["merged"] == [4, embed]


@pytest.mark.parametrize(("name", "mode"), SMALL_AND_WIDE)
def test_contracting_the_axes_apart_leaves_the_reductions_that_were_foretold(
    find: Find, name: str, mode: str
) -> None:
    flat, split = find(name, mode, "flat"), find(name, mode, "split")
    assert flattens(split) == []
    seq = flat["settings"]["seq"]
    maps, norm = f"bf16[2,{seq},{MAPS}]", f"f32[2,{seq}]"
    # Norms sum forward and backward; that of the MLP's input does so in both layouts.
    assert (split["all_reduces"].count(maps), split["all_reduces"].count(norm)) == (1, 2 + 2)
    assert maps not in flat["all_reduces"]
    left_bytes = 2 * seq * MAPS * 2 + 2 * (2 * seq * 4)
    (finding,) = flattens(flat)
    assert finding["details"]["reduction_wire_bytes"] == 2 * left_bytes * (CHIPS - 1) // CHIPS


def test_at_real_widths_the_step_costs_a_third(find: Find) -> None:
    assert cycles(find("wide", "auto", "split")) < 0.4 * cycles(find("wide", "auto", "flat"))


def test_a_batch_that_is_cut_down_to_one_for_each_chip_is_gathered_too(find: Find) -> None:
    (finding,) = flattens(find("a sequence a chip", "auto", "flat"))
    assert finding["shape"] == "bf16[1,128,4,1024]"
    assert finding["details"]["wire_bytes"] == 128 * 4 * 1024 * 2 // 8 * 7
    assert finding["details"]["reduction_wire_bytes"] == 2 * 128 * (MAPS * 2 + 2 * 4) // 8 * 7
    assert finding["details"]["chips"] == CHIPS
    assert flattens(find("a sequence a chip", "auto", "split")) == []


@pytest.mark.parametrize("mode", MODES)
def test_the_finding_names_the_line_of_the_reshape(find: Find, mode: str) -> None:
    # The collective itself carries the name of the norm's conversion, or of the parameter.
    line = line_of("x = x.reshape(*x.shape[:2], config.rate * config.embed)")
    for name in ("small", "sharded alphas"):
        for finding in flattens(find(name, mode, "flat")):
            assert Path(finding["source"]["file"]).name == "mhc.py"
            assert finding["source"]["line"] == line
            assert finding["op_name"].endswith("reshape")
            assert finding["fixes"] == ["split"]


def test_with_sharded_alphas_the_streams_are_exchanged(find: Find) -> None:
    found = flattens(find("sharded alphas", "auto", "flat"))
    kinds = Counter(finding["details"]["kind"] for finding in found)
    assert kinds == {"all-to-all": 2, "collective-permute": 2}  # forward and backward
    shard_bytes = 2 * 128 * 4 * 1024 * 2 // CHIPS
    for finding in found:
        assert finding["bytes"] == shard_bytes
        # The exchange is among four chips, of which each keeps its own part.
        sent = {"all-to-all": shard_bytes * 3 // 4, "collective-permute": shard_bytes}
        assert finding["details"]["wire_bytes"] == sent[finding["details"]["kind"]]
        assert finding["details"]["chips"] == CHIPS


def test_with_sharded_alphas_and_named_shardings_they_are_gathered_twice(find: Find) -> None:
    program = find("sharded alphas", "explicit", "flat")
    expected = ["bf16[2,128,4,1024]", "bf16[2,128,4096]"]  # backward, of the merged axis' gradient
    if program["versions"]["libtpu"].startswith("0.0.23"):  # starts and ends that by custom calls
        expected.pop()
    assert [finding["shape"] for finding in flattens(program)] == expected
    for mode in MODES:
        assert flattens(find("sharded alphas", mode, "split")) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_hyper_connections_is_offered_no_layout_of_a_head(find: Find, mode: str) -> None:
    for layout in ("flat", "split"):
        program = find("small", mode, layout)
        offered = {fix for finding in program["findings"] for fix in finding["fixes"]}
        assert offered == ({"split"} if layout == "flat" else set())
