"""The routed experts under the real TPU compiler: which copy is whose fault.

The programs are compiled once a run and shared by all tests.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import available_platform
from hlo_audit.compiling import Compiling
from hlo_audit.gate import judge
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import MODES, Subject, find_subjects
from hlo_audit.report import Report, environment
from hlo_audit.report.json import to_json
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.oldest_jax,
    pytest.mark.skipif(
        available_platform() != "tpu", reason="libtpu is made for Linux x86-64 only"
    ),
]

LAYOUTS = ("swapaxes", "transposed-rhs")
NARROW = {"experts": "16", "embed": "256", "mlp": "88"}  # wi [16, 256, 176]: no multiple of 128

Find = Callable[..., dict[str, Any]]
"""Finds the audit of one program, as JSON."""


def programs() -> list[Subject]:
    return [
        subject
        for settings in ({}, NARROW)
        for subject in find_subjects(["moe-gmm"], ALL_MODELS, layouts=["all"], settings=settings)
    ]


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    saved = folder / "moe-report.json"
    with Path(f"{saved}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not saved.exists():
            cache = Cache(default_folder(os.environ))
            audits = audit_subjects(programs(), ALL_RULES, how=Compiling(cache=cache))
            saved.write_text(json.dumps(to_json(Report(audits, judge(audits, {}), environment()))))
    found: dict[str, Any] = json.loads(saved.read_text())
    return found


@pytest.fixture(scope="session")
def find(report: dict[str, Any]) -> Find:
    def find_program(mode: str, layout: str, *, experts: int = 128) -> dict[str, Any]:
        (program,) = (
            p
            for p in report["programs"]
            if (p["mode"], p["layout"], p["settings"]["experts"]) == (mode, layout, experts)
        )
        assert "error" not in program, program["error"]
        return dict(program)

    return find_program


def kernel_copies(program: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Kind, argument and shape of each finding of HLA003, in order."""
    return sorted(
        (finding["details"]["kind"], finding["details"]["argument"], finding["shape"])
        for finding in program["findings"]
        if finding["rule"] == "HLA003"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_swapped_weight_is_written_once_for_each_product(find: Find, mode: str) -> None:
    program = find(mode, "swapaxes")
    assert kernel_copies(program) == [
        ("of-operand", "params.wi", "bf16[128,512,768]"),
        ("of-operand", "params.wo", "bf16[128,384,512]"),
    ]
    assert program["tallies"]["HLA003"] == {"of-operand": 2}
    found = {f["details"]["argument"]: f for f in program["findings"] if f["rule"] == "HLA003"}
    assert found["params.wi"]["bytes"] == 128 * 512 * 768 * 2
    assert found["params.wo"]["bytes"] == 128 * 384 * 512 * 2
    for finding in found.values():
        assert finding["executed_bytes"] == finding["bytes"]
        assert finding["fixes"] == ["transposed-rhs"]
        assert finding["details"]["kernels"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_swap_is_named_by_its_own_line_and_the_product_it_is_for(find: Find, mode: str) -> None:
    # The copy itself carries the name of the gather that makes its operand.
    called_at = {}
    for finding in find(mode, "swapaxes")["findings"]:
        if finding["rule"] == "HLA003":
            if finding["stack"]:  # compilers before jax 0.8.3 print one line alone, the caller's
                assert Path(finding["source"]["file"]).name == "grouped_matmul.py"
            assert finding["op_name"].endswith("transpose")
            frames = [f for f in finding["stack"] if Path(f["file"]).name == "moe_gmm.py"]
            if frames:
                lines = Path(frames[0]["file"]).read_text(encoding="utf-8").splitlines()
                called_at[finding["details"]["argument"]] = lines[frames[0]["line"] - 1]
    for argument, line in called_at.items():
        assert argument in line


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_that_reads_the_weight_as_it_lies_costs_no_copy(find: Find, mode: str) -> None:
    swapped, in_place = find(mode, "swapaxes"), find(mode, "transposed-rhs")
    assert in_place["counts"]["HLA003"] == 0
    assert in_place["cost"]["estimated_cycles"] < 0.6 * swapped["cost"]["estimated_cycles"]


@pytest.mark.parametrize("mode", MODES)
def test_a_stored_layout_is_told_from_a_swap(find: Find, mode: str) -> None:
    # XLA stores wi, [16, 256, 176], with 256 minor: each kernel that reads it as it is gets a copy,
    # forward and again in the backward pass, and as it lies it is its own transpose.
    stored = [("stored-layout", "params.wi", "bf16[16,256,176]")] * 2
    swapped = ("of-operand", "params.wo", "bf16[16,88,256]")
    assert kernel_copies(find(mode, "swapaxes", experts=16)) == [swapped, *stored]
    assert kernel_copies(find(mode, "transposed-rhs", experts=16)) == stored
    for layout in LAYOUTS:
        for finding in find(mode, layout, experts=16)["findings"]:
            if finding["rule"] == "HLA003":
                of_operand = finding["details"]["kind"] == "of-operand"
                assert finding["fixes"] == (["transposed-rhs"] if of_operand else [])


@pytest.mark.parametrize("mode", MODES)
def test_arguments_that_xla_stores_otherwise_are_offered_no_layout_of_a_head(
    find: Find, mode: str
) -> None:
    for layout in LAYOUTS:
        program = find(mode, layout, experts=16)
        at_entry = [
            finding
            for finding in program["findings"]
            if finding["rule"] == "HLA002"
            and finding["details"]["place"] in ("parameter", "result")
            and finding["shape"].endswith("[4,256,176]")
        ]
        assert at_entry  # of wi and its momentum, for the optimiser
        assert all(finding["fixes"] == [] for finding in at_entry)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts", [128, 16])
def test_the_copies_of_indices_and_logits_are_no_weights(
    find: Find, mode: str, experts: int
) -> None:
    for layout in LAYOUTS:
        copies = [
            f for f in find(mode, layout, experts=experts)["findings"] if f["opcode"] == "copy"
        ]
        small = {f["instruction"] for f in copies if f["shape"].startswith("s32[")}
        # With many experts they are, padded, over the threshold of relayout copies.
        assert small or experts < 128
        of_weights = {f["instruction"] for f in copies if f["rule"] == "HLA003"}
        assert not small & of_weights
