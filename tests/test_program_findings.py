"""Programs of a user's own under the real TPU compiler: faults in loops, and what only looks like
one.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import available_platform
from hlo_audit.compiling import Compiling
from hlo_audit.program import MODES, Lowering
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.rule import Finding
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

pytestmark = pytest.mark.skipif(
    available_platform() != "tpu", reason="libtpu is made for Linux x86-64 only"
)

PROGRAMS = Path(__file__).parent / "programs"
MESHES = {"merges": {"data": 2, "tensor": 2}, "kernels": {"fsdp": 4}}
LAYERS = 3

slow = pytest.mark.slow
both_modes = pytest.mark.parametrize("mode", ["auto", pytest.param("explicit", marks=slow)])

Mode = Literal["auto", "explicit"]


@cache
def audits(file: str, mode: Mode) -> dict[str, ProgramAudit]:
    """Each program of a file, by its name: one process compiles them all, as jax takes longer to
    import than most of them."""
    text = (PROGRAMS / f"{file}.py").read_text(encoding="utf-8")
    builds = re.findall(r"^def ([a-z]\w*)\(mesh: .*-> Program:$", text, re.MULTILINE)
    subjects = [
        Lowering(
            program=build,
            build=f"{PROGRAMS / file}.py:{build}",
            mode=mode,
            layout=None,
            settings={},
            mesh=MESHES[file],
            platform="tpu",
            topology="v6e:2x2",
        )
        for build in builds
    ]
    how = Compiling(jobs=1, cache=Cache(default_folder(os.environ)))
    return dict(zip(builds, audit_subjects(subjects, ALL_RULES, how=how), strict=True))


def audit(file: str, build: str, mode: Mode) -> ProgramAudit:
    audited = audits(file, mode)[build]
    assert audited.error is None, audited.error
    return audited


def findings(audited: ProgramAudit, code: str) -> list[Finding]:
    return [finding for finding in audited.findings if finding.rule == code]


def line_of(file: str, function: str, text: str) -> int:
    """The line of ``text`` in a function of one of the programs."""
    lines = (PROGRAMS / f"{file}.py").read_text(encoding="utf-8").splitlines()
    start = lines.index(next(line for line in lines if line.startswith(f"def {function}(")))
    return next(n for n, line in enumerate(lines[start:], start=start + 1) if text in line)


# HLA005


@both_modes
def test_a_flatten_in_a_loop_is_counted_once_and_executed_by_its_trips(mode: Mode) -> None:
    (finding,) = findings(audit("merges", "scanned_flatten", mode), "HLA005")
    assert finding.details["kind"] == "all-gather"
    assert finding.shape == "bf16[2,64,4,512]"  # the batch is sharded, too
    assert "a value that a loop carries" in finding.message
    assert finding.executions == LAYERS
    gathered_bytes = 2 * 64 * 4 * 512 * 2
    assert finding.bytes == gathered_bytes
    assert finding.executed_bytes == gathered_bytes * LAYERS
    # Two chips along tensor: half of it is sent, and all of the product's sum, once each way.
    assert finding.details["wire_bytes"] == gathered_bytes // 2
    assert finding.details["reduction_wire_bytes"] == 2 * (2 * 64 * 128 * 2) // 2
    assert finding.source is not None
    assert finding.source.line == line_of("merges", "scanned_flatten", ".reshape(")


@slow
@both_modes
def test_a_step_that_updates_nothing_may_flatten_too(mode: Mode) -> None:
    # Its other weight is sharded along its first axis, as a batch is.
    (finding,) = findings(audit("merges", "flatten_in_use", mode), "HLA005")
    assert "parameter x" in finding.message
    # The mesh lists its chips in another order: groups of two along tensor.
    assert finding.details["chips"] == 2
    assert finding.details["wire_bytes"] == (4 * 64 * 4 * 512 * 2) // 2


@pytest.mark.parametrize(
    "build",
    [
        "scanned_fsdp_weights",
        pytest.param("scanned_fsdp_weights_in_use", marks=slow),
        pytest.param("fsdp_weight", marks=slow),
        pytest.param("fsdp_weight_in_use", marks=slow),
        pytest.param("asked_for_gather", marks=slow),
        pytest.param("asked_for_exchange", marks=slow),
        pytest.param("asked_for_permute", marks=slow),
        pytest.param("merged_heads", marks=slow),
        pytest.param("pipeline", marks=slow),
    ],
)
@both_modes
def test_what_only_looks_like_a_flatten_is_not_reported(build: str, mode: Mode) -> None:
    assert findings(audit("merges", build, mode), "HLA005") == []


# HLA003


@both_modes
def test_a_weight_swapped_in_a_loop_is_followed_out_of_it(mode: Mode) -> None:
    (finding,) = findings(audit("kernels", "scanned_swapped_weights", mode), "HLA003")
    assert finding.details["kind"] == "of-operand"
    assert finding.details["argument"] == "outwards"
    assert finding.executions == LAYERS
    assert finding.bytes == 256 * 512 * 2
    assert finding.executed_bytes == LAYERS * 256 * 512 * 2
    assert finding.source is not None
    # The copy's own metadata is that of the gather before it.
    swapped = line_of("kernels", "scanned_swapped_weights", "swapaxes(0, 1)")
    assert finding.source.line == swapped


@slow
@both_modes
def test_an_argument_that_goes_to_a_kernel_swapped_is_copied(mode: Mode) -> None:
    (finding,) = findings(audit("kernels", "swapped_weight", mode), "HLA003")
    assert (finding.details["kind"], finding.executions) == ("of-operand", 1)
    assert finding.details["argument"] == "weight"
    assert finding.source is not None
    assert finding.source.line == line_of("kernels", "swapped_weight", "weight.T")


@slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", ["scanned_weights_as_they_are", "flash_attention"])
def test_what_a_kernel_reads_as_it_lies_and_activations_are_not_reported(
    build: str, mode: Mode
) -> None:
    audited = audit("kernels", build, mode)
    assert findings(audited, "HLA003") == []
    if build == "flash_attention":  # the turned activations are copied: relayouts, of no weight
        assert findings(audited, "HLA002")
