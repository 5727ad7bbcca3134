"""Proofs of layout fixes: how they are judged, that runs are compared, and what holds of ours."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import command_line
from hlo_audit.cache import Cache, default_folder
from hlo_audit.cli import cli
from hlo_audit.compiler import available_platform
from hlo_audit.compiling import Compiling
from hlo_audit.cost import Cost
from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.models import ALL_MODELS, lm_head
from hlo_audit.numerics import Compared, compare_layouts
from hlo_audit.numerics_worker import Comparison, Difference, compare
from hlo_audit.program import MODES, Layout, Model
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.proof import (
    Best,
    Plan,
    Proof,
    ProofReport,
    find_cases,
    judge_proofs,
    make_plan,
    prove,
)
from hlo_audit.report import environment
from hlo_audit.report.proof_json import proof_to_json
from hlo_audit.report.proof_text import print_proof
from hlo_audit.rule import Agreement, Finding, LayoutFix, Rule, Target, bit_for_bit
from hlo_audit.rules import ALL_RULES

PROGRAMS = Path(__file__).parent / "programs"
V5P, V6E = "v5p:2x2x1", "v6e:2x2"

needs_libtpu = pytest.mark.skipif(
    available_platform() != "tpu", reason="libtpu is made for Linux x86-64 only"
)


# A rule and a model of our own, and audits as a compile of it would give


@dataclass(frozen=True)
class Sizes:
    size: int = 8


def a_fix(name: str, *, clears: tuple[Target, ...] = (), **changes: Any) -> LayoutFix:
    fix = LayoutFix(name, "change it", "shifts", "baseline", bit_for_bit("it is the same"), "none")
    return replace(fix, clears=clears, **changes)


EXPLICIT = (Target("explicit", (V5P,)),)


def a_rule(*fixes: LayoutFix, code: str = "XYZ001") -> Rule:
    return Rule(
        code=code,
        slug=f"rule-{code.lower()}",
        summary="",
        documentation="",
        reads=("final",),
        check=lambda module, context: iter(()),
        tally="kind",
        examples=(),
        fixes=fixes,
    )


LAYOUTS = ("baseline", "same", "rounds", "wrong", "impossible", "crashes", "hangs")

SHIFTS = Model(
    name="shifts",
    summary="",
    config=Sizes,
    layouts=tuple(Layout(name, "") for name in LAYOUTS),
    mesh={"x": -1},
    topologies={"tpu": V5P, "cpu": "4"},
    build="",
    run=f"{PROGRAMS / 'shifts.py'}:run",
)


def findings(
    count: int, *fixes: str, rule: str = "XYZ001", severity: Any = "warning"
) -> tuple[Finding, ...]:
    finding = Finding(
        rule=rule,
        slug="",
        severity=severity,
        message="",
        instruction="",
        computation="",
        opcode="copy",
        shape="f32[8]",
        bytes=32,
        executions=1,
        estimated_cycles=None,
        op_name="",
        source=None,
        stack=(),
        details={"kind": "any"},
        fixes=fixes,
    )
    return (finding,) * count


Found = tuple[tuple[Finding, ...], int | None] | HloAuditError
"""Findings and cycles of a program, or why it was not compiled."""


def judged(
    plan: Plan, programs: Mapping[str, Found], compared: Sequence[Compared] = ()
) -> ProofReport:
    """Judge a plan; ``programs`` are by layout, or by ``mode/layout`` where that matters."""
    rules = tuple({case.rule.code: case.rule for case in plan.cases}.values())
    audits = []
    for lowering in plan.lowerings:
        layout = lowering.layout or ""
        found = programs.get(f"{lowering.mode}/{layout}") or programs[layout]
        audit = ProgramAudit(
            lowering.program,
            mode=lowering.mode,
            layout=layout,
            platform=lowering.platform,
            topology=lowering.topology,
            rules=rules,
        )
        if isinstance(found, HloAuditError):
            audits.append(replace(audit, error=found))
        else:
            cost = None if found[1] is None else Cost(found[1], 0)
            audits.append(replace(audit, findings=found[0], cost=cost))
    return judge_proofs(plan, audits, compared)


def a_plan(*rules: Rule, **how: Any) -> Plan:
    return make_plan(find_cases((), rules, [SHIFTS]), **{"modes": ("explicit",), **how})


def proof_of(fix: LayoutFix, before: Found, after: Found, **how: Any) -> Proof:
    """The one proof of a fix in explicit mode on v5p."""
    report = judged(a_plan(a_rule(fix), **how), {"baseline": before, fix.name: after})
    (proof,) = report.proofs
    assert report.passed is proof.passed
    return proof


SHOWN = (findings(6, "same"), 1000)
CLEAN: Found = ((), 900)


# How a proof is judged


def test_a_fix_that_clears_what_names_it_holds() -> None:
    proof = proof_of(a_fix("same", clears=EXPLICIT), SHOWN, CLEAN)
    assert (proof.verdict, proof.claims, proof.passed) == ("clears", True, True)
    assert proof.before is not None
    assert proof.after is not None
    assert (proof.before.findings, proof.before.bytes, proof.before.estimated_cycles) == (
        6,
        192,
        1000,
    )
    assert (proof.after.findings, proof.after.bytes, proof.after.estimated_cycles) == (0, 0, 900)


def test_a_fix_that_does_not_clear_where_it_claims_to_fails() -> None:
    proof = proof_of(a_fix("same", clears=EXPLICIT), SHOWN, (findings(2, "same"), 900))
    assert (proof.verdict, proof.passed) == ("does-not-clear", False)
    assert proof.failures == ("claims to clear here, but 2 of 6 findings are left",)


@pytest.mark.parametrize(
    "how", [{"modes": ("auto",)}, {"topologies": (V6E,)}, {"settings": {"size": "16"}}], ids=str
)
def test_where_a_fix_claims_nothing_it_is_only_measured(how: Any) -> None:
    proof = proof_of(a_fix("same", clears=EXPLICIT), SHOWN, SHOWN, **how)
    assert (proof.verdict, proof.claims, proof.passed) == ("does-not-clear", False, True)


def test_a_flag_takes_the_claims_away_as_a_setting_does() -> None:
    rule = a_rule(a_fix("same", clears=EXPLICIT))
    assert a_plan(rule).claimed
    assert a_plan(rule, settings={"size": "8"}).claimed
    assert not a_plan(rule, settings={"size": "16"}).claimed
    assert not a_plan(rule, xla_flags={"xla_some_flag": "true"}).claimed


def test_what_turns_up_as_another_finding_is_not_cleared() -> None:
    proof = proof_of(a_fix("same", clears=EXPLICIT), SHOWN, (findings(6), 900))
    assert proof.verdict == "does-not-clear"
    other = (findings(6, "same") + findings(3), 1000)
    assert proof_of(a_fix("same"), other, (findings(3), 900)).verdict == "clears"


def test_notes_are_nothing_to_clear_unless_they_name_the_fix() -> None:
    notes = findings(90, severity="note")
    proof = proof_of(a_fix("same"), (notes + SHOWN[0], 1000), (notes, 900))
    assert proof.verdict == "clears"
    assert proof.after is not None
    assert proof.after.findings == 0
    named = (findings(1, "same", severity="note"), 1000)
    assert proof_of(a_fix("same"), named, CLEAN).verdict == "clears"


def test_a_claim_on_a_baseline_that_shows_no_fault_fails() -> None:
    proof = proof_of(a_fix("same", clears=EXPLICIT), CLEAN, CLEAN)
    assert proof.verdict == "nothing-to-clear"
    assert proof.failures == ("claims to clear here, but baseline has no such finding",)
    assert proof_of(a_fix("same"), CLEAN, CLEAN).passed


def test_a_fix_that_costs_more_without_saying_so_fails() -> None:
    dear: Found = ((), 1001)
    proof = proof_of(a_fix("same", clears=EXPLICIT), SHOWN, dear)
    assert proof.failures == ("costs 1,001 estimated cycles, 1,000 before, and does not say so",)
    assert proof_of(a_fix("same", clears=EXPLICIT, slower=EXPLICIT), SHOWN, dear).passed


def test_a_fix_answers_for_both_modes_of_the_topologies_it_names() -> None:
    dear: Found = ((), 1001)
    fix = a_fix("same", clears=EXPLICIT)
    assert not proof_of(fix, CLEAN, dear, modes=("auto",)).passed
    assert proof_of(fix, CLEAN, dear, modes=("auto",), topologies=(V6E,)).passed
    saying = replace(fix, slower=(Target("auto", (V5P,)),))
    assert proof_of(saying, CLEAN, dear, modes=("auto",)).passed


def test_faults_of_other_rules_that_a_fix_brings_are_shown() -> None:
    before, after = SHOWN, (findings(2, rule="XYZ002"), 900)
    plan = a_plan(a_rule(a_fix("same")), a_rule(code="XYZ002"))
    (proof,) = judged(plan, {"baseline": before, "same": after}).proofs
    assert proof.brings == {"XYZ002": 2}


def test_a_layout_that_the_settings_rule_out_is_refused() -> None:
    refusal = UsageError("size=9 cannot be", hint="take 8")
    fix = a_fix("same", clears=EXPLICIT)
    proof = proof_of(fix, SHOWN, refusal, settings={"size": "9"})
    assert (proof.verdict, proof.reason, proof.error) == ("refused", str(refusal), None)
    assert proof.passed
    assert not proof_of(fix, SHOWN, refusal).passed


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_compile_that_fails_is_an_error_and_no_verdict(side: str) -> None:
    error = CompileError("the compiler crashed with SIGABRT")
    sides: tuple[Found, Found] = (error, CLEAN) if side == "before" else (SHOWN, error)
    programs = {"baseline": sides[0], "same": sides[1]}
    report = judged(a_plan(a_rule(a_fix("same", clears=EXPLICIT))), programs)
    (proof,) = report.proofs
    assert (proof.verdict, proof.error, proof.failures) == ("failed", error, ())
    assert not report.passed
    assert report.errors == (error,)


def test_a_rule_that_could_not_look_has_counted_nothing() -> None:
    plan = a_plan(a_rule(a_fix("same", clears=EXPLICIT)))
    audits = [
        ProgramAudit(
            "shifts",
            mode="explicit",
            layout=layout,
            topology=V5P,
            skipped={"XYZ001": "needs a snapshot"},
        )
        for layout in ("baseline", "same")
    ]
    (proof,) = judge_proofs(plan, audits, ()).proofs
    assert (proof.verdict, proof.before, proof.passed) == ("not-counted", None, False)
    assert "needs a snapshot" in proof.failures[0]


# Which fix is best


def best_of(programs: Mapping[str, Found], *rules: Rule) -> Best:
    (best,) = judged(a_plan(*rules), programs).best
    return best


def test_the_best_fix_is_the_one_of_fewest_cycles() -> None:
    shown = findings(1, "same", "rounds", "wrong")
    rule = a_rule(a_fix("same"), a_fix("rounds"), a_fix("wrong"))
    programs: dict[str, Found] = {
        "baseline": (shown, 1000),
        "same": ((), 800),
        "rounds": (findings(1, rule="XYZ002"), 700),
        "wrong": (shown, 100),  # fastest, but it clears nothing
    }
    best = best_of(programs, rule, a_rule(code="XYZ002"))
    assert [candidate.layout for candidate in best.candidates] == ["rounds", "same"]
    assert best.fix is not None
    assert (best.fix.estimated_cycles, best.fix.saved_cycles) == (700, 300)
    assert (best.fix.clears, best.fix.leaves) == (("XYZ001",), {"XYZ002": 1})


def test_of_fixes_that_cost_the_same_the_one_that_clears_more_is_best() -> None:
    shown = findings(1, "same", "rounds") + findings(1, "rounds", rule="XYZ002")
    rules = a_rule(a_fix("same"), a_fix("rounds")), a_rule(a_fix("rounds"), code="XYZ002")
    programs: dict[str, Found] = {
        "baseline": (shown, 1000),
        "same": (findings(1, "rounds", rule="XYZ002"), 900),
        "rounds": CLEAN,
    }
    best = best_of(programs, *rules)
    assert best.fix is not None
    assert (best.fix.layout, best.fix.clears) == ("rounds", ("XYZ001", "XYZ002"))


def test_a_layout_that_leaves_one_of_its_findings_is_not_best() -> None:
    shown = findings(1, "same") + findings(1, "same", rule="XYZ002")
    rules = a_rule(a_fix("same")), a_rule(a_fix("same"), code="XYZ002")
    left = (findings(1, "same", rule="XYZ002"), 900)
    best = best_of({"baseline": (shown, 1000), "same": left}, *rules)
    assert (best.fix, best.reason) == (None, "no fix clears all the findings that name it")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (CLEAN, CLEAN, "nothing to clear"),
        (SHOWN, ((), 1001), "each fix that clears its findings costs more than baseline"),
        ((SHOWN[0], None), ((), None), "the tpu compiler gives no estimated cycles"),
        (CompileError("it crashed"), CLEAN, "baseline could not be compiled"),
    ],
)
def test_why_no_fix_is_best(before: Found, after: Found, reason: str) -> None:
    best = best_of({"baseline": before, "same": after}, a_rule(a_fix("same")))
    assert (best.fix, best.reason) == (None, reason)


# What is to be proven


def names_of(*names: str) -> set[tuple[str, str]]:
    return {(case.rule.code, case.fix.name) for case in find_cases(names, ALL_RULES, ALL_MODELS)}


def test_fixes_are_found_by_rule_and_by_model() -> None:
    every = {(rule.code, fix.name) for rule in ALL_RULES for fix in rule.fixes}
    assert names_of() == names_of("lm-head", "mhc", "moe-gmm") == every
    of_one = {(code, name) for code, name in every if code == "HLA004"}
    assert names_of("HLA004") == names_of("missed-reduce-scatter", "lm-head") == of_one
    assert names_of("mhc") == {("HLA005", "split")}
    assert names_of("moe-gmm") == {("HLA003", "transposed-rhs")}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no rule or model is called 'lm-hed'.*'lm-head'"):
        names_of("lm-hed")
    with pytest.raises(UsageError, match="no fix belongs to XYZ002"):
        find_cases(["XYZ002"], [a_rule(a_fix("same")), a_rule(code="XYZ002")], [SHIFTS])


def test_every_layout_is_compiled_once_for_each_topology_and_mode() -> None:
    cases = find_cases(("lm-head",), ALL_RULES, ALL_MODELS)
    plan = make_plan(cases, topologies=(V5P, V6E, V5P))
    programs = [(one.topology, one.mode, one.layout) for one in plan.lowerings]
    fixes = [fix for rule in ALL_RULES for fix in rule.fixes if fix.model == "lm-head"]
    layouts = {fix.name for fix in fixes} | {"embed-vocab"}
    assert len(programs) == len(set(programs)) == 2 * len(MODES) * len(layouts)
    assert {one.topology for one in make_plan(cases).lowerings} == {V5P}
    ran = [(one.mode, one.after) for one in plan.comparisons]
    assert len(ran) == len(set(ran)) == len(MODES) * (len(layouts) - 1)
    assert {one.settings["embed"] for one in plan.comparisons} == {64}


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.slug)
def test_every_fix_claims_a_target_and_bits_where_no_sum_rounds(rule: Rule) -> None:
    for fix in rule.fixes:
        assert fix.clears
        assert {agreement.inputs for agreement in fix.numerics} == {"exact", "random"}
        for agreement in fix.numerics:
            assert agreement.reason
            assert agreement.tolerance == 0 or agreement.inputs == "random"


# Comparing what ran


def compared_arrays(before: Any, after: Any) -> Difference:
    return compare({"exact": {"x": before}}, {"exact": {"x": after}})["exact"]["x"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (np.ones(3), np.ones(3), Difference(True, 0.0)),
        (np.full(3, 4.0), np.array([4.0, 5.0, 4.0]), Difference(False, 0.25)),
        (np.zeros(2), np.array([0.0, -0.0]), Difference(False, 0.0)),
        (np.ones(2, np.float32), np.ones(2, np.float64), Difference(False, 0.0)),
        (np.zeros(2), np.ones(2), Difference(False, None)),
        (np.ones(2), np.ones((2, 1)), Difference(False, None)),
        (np.array([np.nan]), np.array([np.nan]), Difference(True, None)),
        (np.array([1.0]), np.array([np.inf]), Difference(False, None)),
        (np.ones((2, 3)).T, np.ones((3, 2)), Difference(True, 0.0)),
    ],
)
def test_how_far_two_arrays_are_apart(before: Any, after: Any, expected: Difference) -> None:
    assert compared_arrays(before, after) == expected


def test_an_array_that_one_layout_lacks_differs() -> None:
    differences = compare({"exact": {"x": np.ones(2)}}, {"random": {"x": np.ones(2)}})
    assert differences == {inputs: {"x": Difference(False, None)} for inputs in ("exact", "random")}


@pytest.fixture(scope="module")
def ran() -> dict[tuple[str, str], Compared]:
    """What came of each wrong layout of the model above, in two workers as one crashes."""

    def comparison(after: str, mode: Any = "auto") -> Comparison:
        settings = {"size": 8}
        run = SHIFTS.run or ""
        return Comparison("shifts", run, mode, "baseline", after, settings, SHIFTS.mesh, 4)

    wanted = [comparison(after) for after in LAYOUTS[1:-1]]
    wanted += [comparison("same", "explicit"), comparison("hangs", "explicit")]
    told: list[Compared] = []
    done = compare_layouts(wanted, timeout_seconds=5, on_done=told.append)
    assert told == done
    assert [one.comparison for one in done] == wanted
    return {(one.comparison.mode, one.comparison.after): one for one in done}


def test_a_run_tells_each_array_apart_on_the_devices_of_the_mesh(ran: Any) -> None:
    same = {inputs: {"sum": Difference(True, 0.0)} for inputs in ("exact", "random")}
    for mode in MODES:
        assert ran[mode, "same"].differences == same
    rounds = ran["auto", "rounds"].differences
    assert rounds["exact"] == same["exact"]
    assert 0 < rounds["random"]["sum"].largest < 2**-19
    assert ran["auto", "wrong"].differences["exact"]["sum"].largest == 1 / 8


def test_what_goes_wrong_in_one_run_is_its_own_error(ran: Any) -> None:
    impossible = ran["auto", "impossible"]
    assert isinstance(impossible.error, UsageError)
    assert str(impossible.error) == "size=8 cannot be (take another)"
    assert impossible.failed_layout == "impossible"
    crashed = ran["auto", "crashes"].error
    assert isinstance(crashed, CompileError)
    assert "SIGABRT" in str(crashed)
    assert "these are the last words" in crashed.log
    hung = ran["explicit", "hangs"].error
    assert isinstance(hung, CompileError)
    assert "did not finish within 5 s" in str(hung)


def numerics_of(ran: Any, name: str, numerics: tuple[Agreement, ...], **how: Any) -> ProofReport:
    fix = a_fix(name, numerics=numerics, clears=EXPLICIT)
    plan = a_plan(a_rule(fix), **how)
    compared = replace(ran["auto", name], comparison=plan.comparisons[0])
    before = (findings(6, name), 1000)
    return judged(plan, {"baseline": before, name: CLEAN}, [compared])


EXACTLY = bit_for_bit("it is the same")
ABOUT = (EXACTLY[0], Agreement("random", 1e-5, "it rounds"))


@pytest.mark.parametrize(
    ("layout", "numerics", "failures"),
    [
        ("same", EXACTLY, []),
        ("rounds", EXACTLY, ["sum: not bit for bit, 9.5e-07 apart"]),
        ("rounds", ABOUT, []),
        ("rounds", (Agreement("random", 1e-8, "why"),), ["sum: 9.5e-07 apart, claimed 1e-08"]),
        ("wrong", ABOUT, ["sum: not bit for bit, 1.2e-01 apart"]),
    ],
)
def test_a_fix_that_changes_numbers_more_than_it_says_fails(
    ran: Any, layout: str, numerics: tuple[Agreement, ...], failures: list[str]
) -> None:
    report = numerics_of(ran, layout, numerics)
    assert [failure for run in report.runs for failure in run.failures] == failures
    assert report.passed is not bool(failures)


def test_the_closest_claim_of_any_rule_is_held(ran: Any) -> None:
    loose, strict = a_fix("rounds", numerics=ABOUT), a_fix("rounds", numerics=EXACTLY)
    plan = a_plan(a_rule(loose), a_rule(strict, code="XYZ002"))
    compared = replace(ran["auto", "rounds"], comparison=plan.comparisons[0])
    report = judged(plan, {"baseline": CLEAN, "rounds": CLEAN}, [compared])
    assert [run.agreement.tolerance for run in report.runs] == [0, 0]
    assert not report.passed


def test_a_layout_that_cannot_be_run_with_these_settings_is_refused(ran: Any) -> None:
    report = numerics_of(ran, "impossible", EXACTLY, settings={"size": "9"})
    assert report.passed
    assert all(run.reason for run in report.runs)
    assert not numerics_of(ran, "impossible", EXACTLY).passed


def test_a_crash_or_a_model_that_cannot_be_run_proves_nothing(ran: Any) -> None:
    report = numerics_of(ran, "crashes", EXACTLY)
    assert not report.passed
    assert report.errors == (ran["auto", "crashes"].error,)
    model = replace(SHIFTS, run=None)
    plan = make_plan(find_cases((), [a_rule(a_fix("same"))], [model]), modes=("auto",))
    report = judged(plan, {"baseline": CLEAN, "same": CLEAN})
    assert [run.failures for run in report.runs] == [("shifts cannot be run",)] * 2


# The exact inputs of the LM head


def test_no_sum_of_a_step_on_exact_inputs_rounds() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    settings: dict[str, Any] = {**lm_head.LM_HEAD.configure({}), **lm_head.LM_HEAD.run_settings}
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    found = lm_head.run(mesh, layout="embed-vocab", **settings)["exact"]
    kernel, batch = lm_head._exact_inputs(lm_head.LMHeadConfig(**settings))
    # In float64, where there is room for much larger sums.
    kernel, hidden = kernel.astype(np.float64), batch.hidden.astype(np.float64)
    logits = hidden @ kernel
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    labels = np.eye(settings["vocab"])[batch.targets]
    softmax = np.where(shifted < np.finfo(np.float32).tiny, 0, shifted)
    assert set(np.unique(softmax)) == {0.0, 1.0}
    tokens = settings["batch"] * settings["seq"]
    grad = np.einsum("bse,bsv->ev", hidden, (softmax - labels) / tokens)
    assert found["loss"] == (logits.max(axis=-1) - (logits * labels).sum(axis=-1)).mean()
    np.testing.assert_array_equal(
        found["hidden gradient"], ((softmax - labels) / tokens) @ kernel.T
    )
    first = np.float32(1 - settings["b1"]) * grad.astype(np.float32)
    np.testing.assert_array_equal(found["first moment"], first)
    assert np.count_nonzero(grad) > grad.size / 3


# Reports


def schema() -> Any:
    text = resources.files("hlo_audit.report").joinpath("proof.schema.json").read_text()
    return json.loads(text)


def as_json(report: ProofReport) -> dict[str, Any]:
    data = proof_to_json(report, environment())
    jsonschema.Draft202012Validator(schema()).validate(data)
    return data


def as_text(report: ProofReport) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with console.capture() as capture:
        print_proof(console, report, environment())
    text = capture.get()
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_every_outcome_follows_the_schema_and_fits_the_terminal(ran: Any) -> None:
    fixes = [a_fix(name, clears=EXPLICIT) for name in LAYOUTS[1:6]]
    plan = a_plan(a_rule(*fixes), a_rule(code="XYZ002"), modes=MODES)
    programs: dict[str, Found] = {
        "baseline": (findings(6, *LAYOUTS), 1000),
        "same": (findings(1, rule="XYZ002"), 700),
        "rounds": ((), 1001),
        "wrong": (findings(2, "wrong"), 900),
        "impossible": UsageError("size=8 cannot be", hint="take another"),
        "crashes": CompileError("the compiler crashed with SIGABRT", log=("last words",)),
        "auto/baseline": CompileError("[bold]\x1b[31mred"),
    }
    compared = [replace(ran["auto", one.after], comparison=one) for one in plan.comparisons]
    report = judged(plan, programs, compared)
    data = as_json(report)
    assert {proof["verdict"] for proof in data["proofs"]} == {
        "clears",
        "does-not-clear",
        "refused",
        "failed",
    }
    assert data["passed"] is False
    text = as_text(report)
    for words in (
        "same  700 est. cycles, 300 (30.0%) less",
        "clears, as claimed",
        "brings 1 more of XYZ002",
        "fails: claims to clear here, but 2 of 6 findings are left",
        "fails: costs 1,001 estimated cycles, 1,000 before, and does not say so",
        "the compiler crashed with SIGABRT",
        "none: baseline could not be compiled",
        "same  700, 300 (30.0%) less; leaves 1 XYZ002",
        "explicit, exact: sum: not bit for bit",
        "not proven",
    ):
        assert words in text, words
    assert "\x1b[31m" not in text
    assert "[bold]" in text


def test_the_schema_refuses_a_proof_without_a_verdict() -> None:
    data = as_json(judged(a_plan(a_rule(a_fix("same"))), {"baseline": SHOWN, "same": CLEAN}))
    del data["proofs"][0]["verdict"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(data)


# The real fixes, on two topologies, under the real compiler


@pytest.fixture(scope="session")
def proven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of ``prove`` of the LM head for v5p and v6e as JSON, with its text."""
    plan = make_plan(find_cases(("lm-head",), ALL_RULES, ALL_MODELS), topologies=(V5P, V6E))
    return proven_once(tmp_path_factory, "proofs.json", plan)


@pytest.fixture(scope="session")
def others_proven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of the other models, each for its own topology."""
    plan = make_plan(find_cases(("mhc", "moe-gmm"), ALL_RULES, ALL_MODELS))
    return proven_once(tmp_path_factory, "other-proofs.json", plan)


def proven_once(tmp_path_factory: pytest.TempPathFactory, name: str, plan: Plan) -> dict[str, Any]:
    """The report of a plan, made once a run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    saved = folder / name
    with Path(f"{saved}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not saved.exists():
            report = prove(plan, ALL_RULES, Compiling(cache=Cache(default_folder(os.environ))))
            saved.write_text(json.dumps({**as_json(report), "text": as_text(report)}))
    found: dict[str, Any] = json.loads(saved.read_text())
    return found


@pytest.mark.slow
@pytest.mark.oldest_jax
@needs_libtpu
def test_every_claim_of_every_fix_holds(
    proven: dict[str, Any], others_proven: dict[str, Any]
) -> None:
    claimed = []
    for report in (proven, others_proven):
        parts = [*report["proofs"], *report["numerics"]]
        assert [part["failures"] for part in parts if not part["passed"]] == []
        assert report["passed"] is True
        claimed += [proof for proof in report["proofs"] if proof["claims_to_clear"]]
    assert {proof["verdict"] for proof in claimed} == {"clears"}
    fixes = {(rule.code, fix.name) for rule in ALL_RULES for fix in rule.fixes}
    assert {(proof["rule"], proof["fix"]) for proof in claimed} == fixes


def verdicts(proven: dict[str, Any], topology: str, mode: str, rule: str) -> dict[str, str]:
    return {
        proof["fix"]: proof["verdict"]
        for proof in proven["proofs"]
        if (proof["topology"], proof["mode"], proof["rule"]) == (topology, mode, rule)
    }


@pytest.mark.slow
@pytest.mark.oldest_jax
@needs_libtpu
def test_a_fix_holds_for_a_target(proven: dict[str, Any]) -> None:
    fixes = ("vocab-embed", "kernel-order-grad", "free-entry-layout")
    assert verdicts(proven, V5P, "explicit", "HLA002") == dict.fromkeys(fixes, "clears")
    assert verdicts(proven, V5P, "auto", "HLA002") == dict.fromkeys(fixes, "nothing-to-clear")
    for mode in MODES:
        on_v6e = verdicts(proven, V6E, mode, "HLA002")
        assert on_v6e == {
            "vocab-embed": "clears",
            "kernel-order-grad": "does-not-clear",
            "free-entry-layout": "clears",
        }


@pytest.mark.slow
@pytest.mark.oldest_jax
@needs_libtpu
def test_the_transposed_kernel_costs_more_under_auto_on_v5p_and_says_so(
    proven: dict[str, Any],
) -> None:
    proof = next(
        proof
        for proof in proven["proofs"]
        if (proof["fix"], proof["topology"], proof["mode"]) == ("vocab-embed", V5P, "auto")
    )
    assert proof["after"]["estimated_cycles"] > proof["before"]["estimated_cycles"]
    assert proof["brings"] == {"HLA004": 1}
    assert proof["passed"]
    assert "under auto mode, where the transpose is folded, it is slower" in " ".join(
        proven["text"].split()
    )


@pytest.mark.slow
@pytest.mark.oldest_jax
@needs_libtpu
def test_the_best_fix_is_named_for_each_topology_and_mode(proven: dict[str, Any]) -> None:
    best = {(one["topology"], one["mode"]): one for one in proven["best"]}
    assert best[V5P, "auto"]["fix"] is None
    assert best[V5P, "auto"]["reason"] == "nothing to clear"
    assert best[V5P, "explicit"]["fix"] == "kernel-order-grad"
    for mode in MODES:
        one = best[V6E, mode]
        assert {candidate["layout"] for candidate in one["candidates"]} == {
            "vocab-embed",
            "free-entry-layout",
        }
        assert one["fix"] == one["candidates"][0]["layout"]
        assert one["saved_cycles"] > 0.2 * one["before_estimated_cycles"]
    for one in proven["best"]:
        cycles = [candidate["estimated_cycles"] for candidate in one["candidates"]]
        assert cycles == sorted(cycles)


@pytest.mark.slow
@pytest.mark.oldest_jax
@needs_libtpu
def test_layouts_agree_bit_for_bit_where_no_sum_rounds(proven: dict[str, Any]) -> None:
    names = {"loss", "hidden gradient", "kernel gradient", "kernel", "first moment"}
    assert len(proven["numerics"]) == 3 * len(MODES) * 2
    for run in proven["numerics"]:
        assert names < set(run["differences"])
        assert run["devices"] == 4
        if run["inputs"] == "exact":
            assert run["tolerance"] == 0
            assert all(difference["identical"] for difference in run["differences"].values())


# The command


SMALL = [f"--set={name}={size}" for name, size in (("embed", 64), ("vocab", 256), ("seq", 16))]


@pytest.mark.slow
@pytest.mark.oldest_jax
def test_on_cpu_fixes_are_measured_and_none_is_best(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    how = ("--platform", "cpu", "--mode", "explicit", "--format", "json", "--output", str(path))
    result = command_line.run("prove", "HLA001", "lm-head", *how, *SMALL)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "jit" not in result.stderr
    data = json.loads(path.read_text())
    jsonschema.Draft202012Validator(schema()).validate(data)
    assert data["claims_held"] is False
    assert {proof["fix"]: proof["verdict"] for proof in data["proofs"]} == {
        "kernel-order-grad": "clears",
        "vocab-embed": "clears",
    }
    (best,) = data["best"]
    assert (best["fix"], best["reason"]) == (None, "the cpu compiler gives no estimated cycles")


@pytest.mark.slow
@pytest.mark.oldest_jax
@needs_libtpu
def test_a_fix_that_fails_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(rule for rule in ALL_RULES if rule.code == "HLA004")
    fix = replace(rule.fixes[0], clears=(Target("auto", (V5P,)),))
    monkeypatch.setattr("hlo_audit.rules.ALL_RULES", (replace(rule, fixes=(fix,)),))
    result = CliRunner().invoke(cli, ["prove", "HLA004", "--mode", "auto", "--quiet"])
    assert result.exit_code == 1, result.output
    assert "fails: claims to clear here, but embed-vocab has no such finding" in result.output
    assert "not proven: 1 claims fail" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["HLA9"], ["'HLA9'", "HLA00"]),
        (["lm-hed"], ["'lm-hed'", "did you mean 'lm-head'"]),
        (["--topology", ""], ["topology is empty"]),
        (["--topology", "v5p-8", "--platform", "tpu"], ["v5p-8", "v5p:2x2x1"]),
        (["lm-head", "--set", "embd=4"], ["'embd'", "'embed'"]),
        (["lm-head", "--set", "embed=30", "--platform", "cpu"], ["embed=30 is no multiple of 4"]),
        (["--layout", "all"], ["--layout"]),
        (["--platform", "cpu", "--topology", "v5p:2x2x1"], ["no number of CPU devices"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], words: list[str]) -> None:
    result = command_line.invoke("prove", *arguments, "--quiet")
    assert (result.returncode, result.stdout) == (2, ""), result
    (line,) = result.stderr.splitlines()
    assert line.startswith("hlo-audit: error: ")
    for word in words:
        assert word in line


def test_making_a_plan_imports_no_jax() -> None:
    code = (
        "import sys\n"
        "from hlo_audit.models import ALL_MODELS\n"
        "from hlo_audit.proof import find_cases, make_plan\n"
        "from hlo_audit.rules import ALL_RULES\n"
        "make_plan(find_cases((), ALL_RULES, ALL_MODELS))\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
