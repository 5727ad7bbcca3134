"""Each rule on its own examples, and what holds of all rules together."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import get_args

import pytest

import hlo_audit.rules
from hlo_audit.cost import collectives, estimate_cost
from hlo_audit.dump import AuditStage
from hlo_audit.errors import UsageError
from hlo_audit.hlo import parse_module, parse_shape
from hlo_audit.hlo.dots import swaps_two_blocks
from hlo_audit.models import ALL_MODELS
from hlo_audit.rule import Context, Example, Rule, find_rule, select_rules
from hlo_audit.rules import ALL_RULES
from hlo_audit.rules.relayout_copy import is_relayout
from hlo_audit.testing import check_example, examples

RULE_FILES = sorted(
    path for path in Path(hlo_audit.rules.__path__[0]).glob("*.py") if path.stem[0] != "_"
)


@pytest.mark.parametrize(
    ("rule", "example"),
    [pytest.param(r, e, id=f"{r.slug}: {e.title}") for r, e in examples(ALL_RULES)],
)
def test_a_rule_reports_what_its_example_says(rule: Rule, example: Example) -> None:
    check_example(rule, example)


@pytest.mark.parametrize(
    ("rule", "example"),
    [
        pytest.param(r, e, id=f"{r.slug}: {e.title}")
        for r, e in examples(ALL_RULES)
        if r.watch is not None and r.watch.reach == "module"
    ],
)
def test_what_is_counted_in_a_snapshot_is_what_is_found(rule: Rule, example: Example) -> None:
    modules = {stage: parse_module(text) for stage, text in example.hlo.items()}
    module, context = modules[rule.reads[0]], Context(rule, modules)
    assert rule.watch is not None
    counted = [
        (seen.shape.without_layout, seen.shape.logical_bytes)
        for instruction in module.of_opcodes(rule.watch.opcodes, rule.watch.holding)
        for seen in rule.watch.sees(instruction, context)
    ]
    assert counted == [(found.shape, found.bytes) for found in rule.check(module, context)]


def test_instructions_that_no_rule_looks_at_are_not_made() -> None:
    fused = "".join(
        f"%fused.{n} (x: f32[512,512]) -> f32[512,512] {{\n"
        "  %x = f32[512,512]{1,0} parameter(0)\n"
        "  ROOT %add = f32[512,512]{1,0} add(%x, %x)\n}\n\n"
        for n in range(5)
    )
    fusions = "".join(
        f"  %fusion.{n} = f32[512,512]{{1,0}} fusion(%p), kind=kLoop, calls=%fused.{n}\n"
        for n in range(5)
    )
    module = parse_module(
        f"HloModule m, is_scheduled=true\n\n{fused}"
        "ENTRY %e (p: f32[512,512]) -> f32[512,512] {\n"
        "  %p = f32[512,512]{1,0} parameter(0)\n"
        f"{fusions}  ROOT %copy = f32[512,512]{{0,1}} copy(%p)\n}}\n"
    )
    stages = get_args(AuditStage)
    found = [
        finding
        for rule in ALL_RULES
        for finding in rule.check(module, Context(rule, dict.fromkeys(stages, module)))
    ]
    assert [finding.rule for finding in found] == ["HLA002"]
    assert (estimate_cost(module), list(collectives(module))) == (None, [])
    made = {one.name: one.made_count for one in module.computations.values() if one.made_count}
    assert made == {"e": 2}  # the copy and what it reads


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.slug)
def test_a_rule_has_an_example_that_reports_and_a_near_miss(rule: Rule) -> None:
    assert any(example.reports for example in rule.examples)
    assert any(example.title.startswith("near miss") for example in rule.examples)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.slug)
def test_a_rule_has_a_fix_that_a_model_shows(rule: Rule) -> None:
    assert rule.fixes
    for fix in rule.fixes:
        model = next(model for model in ALL_MODELS if model.name == fix.model)
        layouts = {layout.name for layout in model.layouts}
        assert {fix.before, fix.name} <= layouts


def test_files_slugs_and_the_tuple_of_rules_agree() -> None:
    assert [path.stem for path in RULE_FILES] == sorted(
        rule.slug.replace("-", "_") for rule in ALL_RULES
    )
    codes = [rule.code for rule in ALL_RULES]
    assert codes == sorted(set(codes))
    for rule in ALL_RULES:
        assert Path(inspect.getfile(rule.check)).stem == rule.slug.replace("-", "_")


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.slug)
def test_the_documentation_says_what_why_and_limits_and_names_every_option(rule: Rule) -> None:
    for section in ("## What it reports", "## Why it matters", "## Limits"):
        assert section in rule.documentation
    for option in rule.options:
        assert option in rule.documentation or option == "min_minor_extent_bytes"


def test_rules_are_found_by_code_and_by_slug() -> None:
    assert find_rule(ALL_RULES, "hla002").slug == "relayout-copy"
    assert find_rule(ALL_RULES, "relayout-copy").code == "HLA002"
    with pytest.raises(UsageError, match="did you mean 'HLA002'"):
        find_rule(ALL_RULES, "HLA02")


def test_selecting_and_ignoring_rules() -> None:
    assert [r.code for r in select_rules(ALL_RULES, ["HLA002", "missed-reduce-scatter"])] == [
        "HLA002",
        "HLA004",
    ]
    assert [r.code for r in select_rules(ALL_RULES, [], ["HLA001", "HLA003"])] == [
        "HLA002",
        "HLA004",
        "HLA005",
    ]


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ("f32[128,32000]{1,0:T(8,128)}", "f32[128,32000]{0,1:T(8,128)}", True),
        ("f32[128,32000]{1,0:T(8,128)}", "f32[128,32000]{0,1:T(8,128)S(1)}", True),
        ("f32[128,32000]{1,0:T(8,128)}", "f32[128,32000]{1,0:T(8,128)S(1)}", False),
        ("f32[1,2048]{1,0}", "f32[1,2048]{0,1}", False),
        ("f32[128,32000]{1,0:T(8,128)}", "bf16[128,32000]{1,0:T(8,128)(2,1)}", False),
        ("f32[128,32000]{1,0:T(8,128)}", "bf16[128,32000]{0,1:T(8,128)(2,1)}", True),
        ("f32[4,512]{1,0:T(4,128)}", "bf16[4,512]{1,0:T(4,128)(2,1)}", False),
        ("f32[1,512]{1,0:T(1,128)}", "bf16[1,512]{1,0:T(2,128)(2,1)}", False),
        ("f32[128,1,384]{2,1,0:T(1,128)}", "bf16[128,1,384]{2,0,1:T(8,128)(2,1)}", True),
        ("bf16[1,128,2048]{2,0,1:T(2,128)(2,1)}", "bf16[1,128,2048]{2,1,0:T(8,128)(2,1)}", True),
        ("f32[1,128,2048]{2,1,0:T(8,128)}", "f32[1,128,2048]{2,0,1:T(8,128)}", True),
        ("f32[]{:T(128)}", "f32[]{:T(128)S(6)}", False),
    ],
)
def test_a_relayout_changes_order_or_tiles_not_memory_or_type(
    before: str, after: str, moves: bool
) -> None:
    assert is_relayout(parse_shape(before), parse_shape(after)) is moves


def test_a_threshold_is_an_option_of_its_rule() -> None:
    rule = find_rule(ALL_RULES, "relayout-copy")
    module = parse_module(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %e (p: f32[16,64]) -> f32[16,64] {\n"
        "  %p = f32[16,64]{1,0:T(8,128)} parameter(0)\n"
        "  ROOT %copy = f32[16,64]{0,1:T(8,128)} copy(%p)\n"
        "}\n"
    )
    assert not list(rule.check(module, Context(rule, {"final": module})))
    assert len(list(rule.check(module, Context(rule, {"final": module}, {"min_bytes": 0})))) == 1


def test_a_transposed_result_is_reported_as_what_the_program_asks_for() -> None:
    rule = find_rule(ALL_RULES, "relayout-copy")
    module = parse_module(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %e (p: f32[512,512]) -> f32[512,512] {\n"
        "  %p = f32[512,512]{1,0:T(8,128)} parameter(0)\n"
        "  %copy = f32[512,512]{0,1:T(8,128)} copy(%p), "
        'metadata={op_name="jit(f)/transpose"}\n'
        "  ROOT %bitcast = f32[512,512]{1,0:T(8,128)} bitcast(%copy)\n"
        "}\n"
    )
    (finding,) = rule.check(module, Context(rule, {"final": module}))
    assert finding.details["requested_by"] == "transpose"
    assert finding.severity == "note"
    assert finding.fixes == ()


@pytest.mark.parametrize("rank", range(6))
def test_two_blocks_that_change_places_are_told_from_other_permutations(rank: int) -> None:
    """Only such a transpose of a dot's result is what exchanging its operands gives."""
    swaps = {
        (*range(batch), *range(batch + left, rank), *range(batch, batch + left))
        for batch in range(rank)
        for left in range(1, rank - batch)
    }
    permutations = set(itertools.permutations(range(rank)))
    assert {one for one in permutations if swaps_two_blocks(one)} == swaps
    assert not swaps_two_blocks((3, 1, 2))  # nor is there any in damaged text
    assert not swaps_two_blocks((0, 7))
