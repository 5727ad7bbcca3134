"""The rules on a real trainer's dumps (MaxText's llama2, fsdp 4, v5p), against counts made by an
independent script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hlo_audit.dump import read_dump
from hlo_audit.hlo import Module
from hlo_audit.hlo.collectives import is_reduce_scatter
from hlo_audit.program_audit import ProgramAudit, audit_recorded
from hlo_audit.rules import ALL_RULES

ANY_SIZE = {"HLA002": {"min_bytes": 0}}


@pytest.fixture(scope="module", params=["auto", "explicit"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(dumps: Callable[[str], Path], mode: str) -> Path:
    return dumps(f"llama2_{mode}_fsdp4")


@pytest.fixture(scope="module")
def audit(folder: Path) -> ProgramAudit:
    (found,) = audit_recorded(folder, ALL_RULES, {})
    assert found.error is None
    return found


@pytest.fixture(scope="module")
def final(folder: Path) -> Module:
    (module,) = read_dump(folder).modules
    assert module.final is not None
    return module.final.read()


def test_every_sharding_annotation_is_counted(audit: ProgramAudit, mode: str) -> None:
    assert audit.counts["HLA001"] == {"auto": 98, "explicit": 1325}[mode]


def test_only_explicit_mode_annotates_between_a_dot_and_its_transpose(
    audit: ProgramAudit, mode: str
) -> None:
    between = audit.tallies["HLA001"].get("between-dot-and-transpose", 0)
    assert between == {"auto": 0, "explicit": 9}[mode]


def test_relayout_copies_of_any_size_by_where_they_stand(folder: Path, mode: str) -> None:
    (found,) = audit_recorded(folder, ALL_RULES, ANY_SIZE)
    copies = [finding for finding in found.findings if finding.rule == "HLA002"]
    entry = sum(copy.computation.startswith("main") for copy in copies)
    expected = {"auto": (5, 8, 0), "explicit": (11, 9, 0)}[mode]
    fused = sum(copy.details["place"] == "fused" for copy in copies)
    assert (entry, len(copies) - entry - fused, fused) == expected


def test_the_six_copies_of_the_lm_head_are_told_apart_and_traced_to_their_arguments(
    audit: ProgramAudit, mode: str
) -> None:
    head = [
        finding
        for finding in audit.findings
        if finding.rule == "HLA002" and finding.details["place"] in ("parameter", "result")
    ]
    if mode == "auto":
        assert head == []
        return
    assert [finding.shape for finding in head] == ["f32[128,32000]"] * 6
    kernel = "['decoder']['logits_dense']['kernel'].value"
    arguments = Counter(
        (finding.details["place"], str(finding.details["argument"])) for finding in head
    )
    assert arguments == Counter(
        (place, f"state{part}{kernel}")
        for place in ("parameter", "result")
        for part in (
            "['model']",
            "['optimizer']['opt_state'][0]['mu']",
            "['optimizer']['opt_state'][0]['nu']",
        )
    )
    assert sum(finding.bytes or 0 for finding in head) == 98_304_000


def test_an_unfolded_transpose_is_reported_in_explicit_mode_only(
    audit: ProgramAudit, mode: str
) -> None:
    found = [finding for finding in audit.findings if finding.rule == "HLA003"]
    head = [finding for finding in found if finding.shape == "f32[128,32000]"]
    assert len(found) == {"auto": 0, "explicit": 4}[mode]
    assert [finding.details["copies"] for finding in head] == {"auto": [], "explicit": [6]}[mode]


def test_the_lost_reduce_scatter_is_one_value_of_a_variadic_all_reduce(
    audit: ProgramAudit, mode: str
) -> None:
    head = [
        finding
        for finding in audit.findings
        if finding.rule == "HLA004" and finding.shape == "bf16[32000,512]"
    ]
    if mode == "auto":
        assert head == []
        return
    (finding,) = head
    assert finding.opcode == "all-reduce"
    assert finding.details["element"] == 1
    assert finding.details["reason"] == "minor-extent"
    assert finding.details["minor_extent_bytes"] == 256


def test_all_reduces_inside_a_reduce_scatter_are_not_all_reduces(final: Module, mode: str) -> None:
    all_reduces = [i for i in final.instructions if i.opcode == "all-reduce"]
    scattering = [i for i in all_reduces if is_reduce_scatter(final, i)]
    assert (len(all_reduces), len(scattering)) == {"auto": (8, 3), "explicit": (6, 1)}[mode]


def test_costs_count_loop_bodies_by_their_trips(audit: ProgramAudit, mode: str) -> None:
    assert audit.cost is not None
    assert audit.cost.estimated_cycles == {"auto": 5_215_456, "explicit": 5_462_510}[mode]
    assert audit.cost.unknown_loops == 0
    in_loops = [finding for finding in audit.findings if finding.computation.startswith("wide.")]
    assert in_loops
    assert {finding.executions for finding in in_loops} == {2}


def test_the_caller_of_a_shared_layer_tells_what_it_was_called_for(
    audit: ProgramAudit, mode: str
) -> None:
    head = [f for f in audit.findings if f.rule == "HLA003" and f.shape == "f32[128,32000]"]
    for finding in head:
        assert finding.source is not None
        assert finding.source.function == "_compute_dot_general_nnx"
        assert "NNXDecoder.apply_output_head" in [frame.function for frame in finding.stack]
    assert len(head) == {"auto": 0, "explicit": 1}[mode]


def test_findings_name_the_python_line_they_come_from(audit: ProgramAudit) -> None:
    warnings = [finding for finding in audit.findings if finding.severity == "warning"]
    sources = [finding.source for finding in warnings if finding.source]
    assert len(sources) >= 0.9 * len(warnings)
    assert all(source.file.endswith(".py") and source.line > 0 for source in sources)
