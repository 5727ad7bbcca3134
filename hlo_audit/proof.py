"""Prove layout fixes: compile the layout before and after each, run both, and hold its claims.

For each fix x topology x mode: the findings, their bytes and the estimated cycles on both sides.
For each fix x mode: how far the results of both are apart when they run. Everything is decided from
what was compiled and run; what a fix claims is only held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from hlo_audit.compiling import Compiling
from hlo_audit.errors import HloAuditError, UsageError, unknown_name
from hlo_audit.numerics import Compared, compare_layouts
from hlo_audit.numerics_worker import Comparison, Difference
from hlo_audit.program import (
    MODES,
    Lowering,
    Mode,
    Model,
    Platform,
    Setting,
    Subject,
    find_subjects,
)
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.rule import Agreement, Finding, LayoutFix, Rule
from hlo_audit.run import audit_subjects

Verdict = Literal[
    "clears", "does-not-clear", "nothing-to-clear", "not-counted", "refused", "failed"
]
"""``refused``: the settings rule the layout out. ``failed``: a side could not be compiled."""


class Case(NamedTuple):
    """A fix of a rule, and the model that shows it."""

    rule: Rule
    fix: LayoutFix
    model: Model


@dataclass(frozen=True)
class Plan:
    """What is to be proven, and what must be compiled and run for it, each once.

    Attributes:
        cases: the fixes.
        lowerings: what to compile.
        comparisons: what to run.
        claimed: whether the claims are about this: at the models' own settings, without flags.
        settings: model name -> the settings that it is compiled with.
        xla_flags: compile options.
    """

    cases: tuple[Case, ...]
    lowerings: tuple[Lowering, ...]
    comparisons: tuple[Comparison, ...]
    claimed: bool
    settings: Mapping[str, Mapping[str, Setting]]
    xla_flags: Mapping[str, str]


@dataclass(frozen=True)
class Side:
    """One layout of a proof.

    Attributes:
        layout: its name.
        findings: the rule's warnings, and whatever else names the fix.
        naming_fix: those of them that name the fix.
        bytes: of the findings, summed.
        estimated_cycles: of the whole step; ``None`` where the compiler gives no estimates.
    """

    layout: str
    findings: int
    naming_fix: int
    bytes: int
    estimated_cycles: int | None


@dataclass(frozen=True)
class Proof:
    """What one fix does to one rule's findings, on one topology in one mode.

    Attributes:
        verdict: what was found; see :data:`Verdict`.
        claims: whether the fix claims to clear the findings here.
        before, after: ``None`` where the side could not be counted.
        brings: rule code -> how many warnings of other rules there are more than before.
        failures: what the fix claims and does not keep, as sentences; a proof without any passes.
        reason: why it was refused or could not be counted, or ``""``.
        error: of a side that could not be compiled.
    """

    rule: Rule
    fix: LayoutFix
    platform: str
    topology: str
    mode: str
    verdict: Verdict
    claims: bool
    before: Side | None = None
    after: Side | None = None
    brings: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    reason: str = ""
    error: HloAuditError | None = None

    @property
    def passed(self) -> bool:
        return not self.failures and self.error is None


@dataclass(frozen=True)
class Candidate:
    """A layout that clears every finding that names it, on one topology in one mode.

    Attributes:
        layout: its name.
        estimated_cycles: of the whole step; ``None`` where the compiler gives no estimates.
        saved_cycles: how many less than the layout before.
        clears: the codes of the rules whose findings it clears.
        leaves: rule code -> the warnings that are left, of any rule.
    """

    layout: str
    estimated_cycles: int | None
    saved_cycles: int | None
    clears: tuple[str, ...]
    leaves: Mapping[str, int]


@dataclass(frozen=True)
class Best:
    """Which fix to take on one topology in one mode.

    Attributes:
        before: the layout that shows the faults.
        estimated_cycles: of the layout before.
        candidates: the layouts that clear their findings, the one of fewest cycles first; of those
            that cost the same, the one that clears more rules.
        reason: why there is no best one, or ``""``.
    """

    model: str
    platform: str
    topology: str
    mode: str
    before: str
    estimated_cycles: int | None
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def fix(self) -> Candidate | None:
        """The best one."""
        return None if self.reason else self.candidates[0]


@dataclass(frozen=True)
class Run:
    """How far the results of both layouts of a fix are apart, for one mode and kind of inputs.

    Attributes:
        comparison: what was run, and with what settings.
        agreement: the closest that any rule claims of the fix.
        differences: array -> how far it is apart.
        failures: as of :class:`Proof`.
        reason: why it was refused, or ``""``.
        error: what kept it from being run.
    """

    comparison: Comparison
    agreement: Agreement
    differences: Mapping[str, Difference] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    reason: str = ""
    error: HloAuditError | None = None

    @property
    def passed(self) -> bool:
        return not self.failures and self.error is None


@dataclass(frozen=True)
class ProofReport:
    """The proofs of a run, the best fix for each target, and the numerics."""

    plan: Plan
    proofs: tuple[Proof, ...]
    best: tuple[Best, ...]
    runs: tuple[Run, ...]

    @property
    def passed(self) -> bool:
        parts: tuple[Proof | Run, ...] = (*self.proofs, *self.runs)
        return all(part.passed for part in parts)

    @property
    def has_compiled(self) -> bool:
        """Whether there is anything to show."""
        return any(proof.error is None for proof in self.proofs)

    @property
    def errors(self) -> tuple[HloAuditError, ...]:
        """What kept sides from being compiled or run, each once."""
        parts: tuple[Proof | Run, ...] = (*self.proofs, *self.runs)
        errors = (part.error for part in parts if part.error is not None)
        return tuple({str(error): error for error in errors}.values())


def find_cases(
    names: Sequence[str], rules: Sequence[Rule], models: Sequence[Model]
) -> tuple[Case, ...]:
    """The fixes of the rules and models named; of all, where neither is.

    Args:
        names: codes and slugs of rules, and names of models. Rules alone: all their fixes. Models
            alone: all the fixes that they show. Both: the fixes of these rules shown by these.

    Raises:
        UsageError: for a name that is neither, and where no fix is left.
    """
    by_model = {model.name: model for model in models}
    by_rule = {name: rule for rule in rules for name in (rule.code.lower(), rule.slug)}
    for name in names:
        if name not in by_model and name.lower() not in by_rule:
            known = [known for rule in rules for known in (rule.code, rule.slug)]
            raise unknown_name("rule or model", name, [*known, *by_model])
    chosen_rules = {by_rule[name.lower()].code for name in names if name.lower() in by_rule}
    chosen_models = {name for name in names if name in by_model}
    cases = tuple(
        Case(rule, fix, by_model[fix.model])
        for rule in rules
        for fix in rule.fixes
        if (not chosen_rules or rule.code in chosen_rules)
        and (not chosen_models or fix.model in chosen_models)
    )
    if not cases:
        raise UsageError(f"no fix belongs to {' and '.join(names) or 'any rule'}")
    return cases


def make_plan(
    cases: Sequence[Case],
    *,
    modes: Sequence[Mode] = (),
    settings: Mapping[str, str] | None = None,
    platform: Platform = "tpu",
    topologies: Sequence[str] = (),
    xla_flags: Mapping[str, str] | None = None,
) -> Plan:
    """Say what must be compiled and run to prove ``cases``.

    Args:
        cases: see :func:`find_cases`.
        modes: both, if empty.
        settings: changed settings of the models; they are compiled with these, and run at
            sizes of their own.
        platform: to compile for.
        topologies: the model's own for the platform, if empty.
        xla_flags: compile options.

    Raises:
        UsageError: for a setting or topology that does not fit.
    """
    models = {case.model.name: case.model for case in cases}
    values = {name: model.configure(settings or {}) for name, model in models.items()}
    subjects: list[Subject] = []
    for name, model in models.items():
        layouts = _layouts([case.fix for case in cases if case.model is model])
        for topology in dict.fromkeys(topologies) or (None,):
            subjects += find_subjects(
                [name],
                [model],
                modes=modes,
                layouts=layouts,
                settings=settings,
                platform=platform,
                topology=topology,
                xla_flags=xla_flags,
            )
    changed = any(values[name] != model.configure({}) for name, model in models.items())
    return Plan(
        cases=tuple(cases),
        lowerings=tuple(subject for subject in subjects if isinstance(subject, Lowering)),
        comparisons=_comparisons(cases, values, modes),
        claimed=not changed and not xla_flags,
        settings=values,
        xla_flags=dict(xla_flags or {}),
    )


def _layouts(fixes: Sequence[LayoutFix]) -> list[str]:
    before = [fix.before for fix in fixes]
    return list(dict.fromkeys([*before, *(fix.name for fix in fixes)]))


def _comparisons(
    cases: Sequence[Case],
    settings: Mapping[str, Mapping[str, Setting]],
    modes: Sequence[Mode],
) -> tuple[Comparison, ...]:
    comparisons = [
        Comparison(
            model=case.model.name,
            run=case.model.run or "",
            mode=mode,
            before=case.fix.before,
            after=case.fix.name,
            settings={**settings[case.model.name], **case.model.run_settings},
            mesh=case.model.mesh,
            devices=int(case.model.topologies["cpu"]),
        )
        for case in cases
        for mode in dict.fromkeys(modes or MODES)
    ]
    return tuple({_key(comparison): comparison for comparison in comparisons}.values())


def _key(comparison: Comparison) -> tuple[str, str, str, str]:
    return (comparison.model, comparison.before, comparison.after, comparison.mode)


def prove(plan: Plan, rules: Sequence[Rule], how: Compiling | None = None) -> ProofReport:
    """Compile and run what the plan says, and judge it.

    Args:
        plan: see :func:`make_plan`.
        rules: all that are applied; those without a case show what a fix leaves or brings.
        how: how programs are compiled; a run may take as long as a compile.

    Raises:
        CompileError: where no process can be started at all.
    """
    how = how or Compiling()
    audits = audit_subjects(plan.lowerings, rules, how=how)
    # Where nothing compiles there is nothing to prove, and what is wrong is wrong for runs as well.
    compiled = any(audit.error is None for audit in audits)
    comparisons = [comparison for comparison in plan.comparisons if comparison.run and compiled]
    compared = compare_layouts(comparisons, timeout_seconds=how.timeout_seconds)
    return judge_proofs(plan, audits, compared)


def judge_proofs(
    plan: Plan, audits: Sequence[ProgramAudit], compared: Sequence[Compared]
) -> ProofReport:
    """Judge what was compiled and run for ``plan``: an audit for each of its lowerings, and what
    came of its comparisons; those of a model that cannot be run are missing.
    """
    found = {_target(audit): audit for audit in audits}
    targets = dict.fromkeys((a.program, a.topology or "", a.mode or "") for a in audits)
    proofs = tuple(
        _prove(
            case,
            found[model, topology, mode, case.fix.before],
            found[model, topology, mode, case.fix.name],
            plan.claimed,
        )
        for model, topology, mode in targets
        for case in plan.cases
        if case.model.name == model
    )
    best = tuple(
        _best(before, [p for p in proofs if _proven(p) == (model, topology, mode, layout)], found)
        for (model, topology, mode, layout), before in found.items()
        if any(_proven(proof) == (model, topology, mode, layout) for proof in proofs)
    )
    missing = [Compared(c, {}) for c in plan.comparisons if not c.run]
    runs = tuple(run for one in (*compared, *missing) for run in _judge_run(one, plan))
    return ProofReport(plan, proofs, best, runs)


def _target(audit: ProgramAudit) -> tuple[str, str, str, str]:
    return (audit.program, audit.topology or "", audit.mode or "", audit.layout or "")


def _proven(proof: Proof) -> tuple[str, str, str, str]:
    return (proof.fix.model, proof.topology, proof.mode, proof.fix.before)


# -- one fix, one target


def _prove(case: Case, before: ProgramAudit, after: ProgramAudit, claimed: bool) -> Proof:
    rule, fix = case.rule, case.fix
    topology, mode = before.topology or "", before.mode or ""
    proof = Proof(
        rule=rule,
        fix=fix,
        platform=before.platform or "",
        topology=topology,
        mode=mode,
        verdict="failed",
        claims=claimed and any(target.covers(mode, topology) for target in fix.clears),
    )
    if before.error is not None:
        return replace(proof, error=before.error)
    if isinstance(after.error, UsageError):
        proof = replace(proof, verdict="refused", reason=str(after.error))
    elif after.error is not None:
        return replace(proof, error=after.error)
    elif rule.code in before.skipped or rule.code in after.skipped:
        reason = before.skipped.get(rule.code) or after.skipped[rule.code]
        proof = replace(proof, verdict="not-counted", reason=reason)
    else:
        sides = _side(case, before), _side(case, after)
        brings = _brings(rule, before, after)
        proof = replace(
            proof, verdict=_verdict(*sides), before=sides[0], after=sides[1], brings=brings
        )
    held = claimed and fix.answers_for(topology)
    return replace(proof, failures=tuple(_failures(proof)) if held else ())


def _side(case: Case, audit: ProgramAudit) -> Side:
    found = [f for f in audit.findings if f.rule == case.rule.code and _counts(f, case.fix)]
    return Side(
        layout=audit.layout or "",
        findings=len(found),
        naming_fix=sum(case.fix.name in finding.fixes for finding in found),
        bytes=sum(finding.bytes or 0 for finding in found),
        estimated_cycles=_cycles(audit),
    )


def _cycles(audit: ProgramAudit) -> int | None:
    return None if audit.cost is None else audit.cost.estimated_cycles


def _counts(finding: Finding, fix: LayoutFix) -> bool:
    # Notes are there by the hundred in good programs, and no fix claims to clear them.
    return finding.severity == "warning" or fix.name in finding.fixes


def _verdict(before: Side, after: Side) -> Verdict:
    if before.naming_fix == 0:
        return "nothing-to-clear"
    # What only turns up elsewhere, as an inner copy for one of a parameter, is not cleared.
    gone = before.findings - after.findings
    return "clears" if after.naming_fix == 0 and gone >= before.naming_fix else "does-not-clear"


def _brings(rule: Rule, before: ProgramAudit, after: ProgramAudit) -> dict[str, int]:
    had, has = _warnings(before), _warnings(after)
    return {
        code: count - had[code]
        for code, count in has.items()
        if code != rule.code and count > had[code]
    }


def _warnings(audit: ProgramAudit) -> Counter[str]:
    return Counter(f.rule for f in audit.findings if f.severity == "warning")


def _failures(proof: Proof) -> Iterator[str]:
    fix, before, after = proof.fix, proof.before, proof.after
    if proof.claims and proof.verdict != "clears":
        yield f"claims to clear here, but {_shortfall(proof)}"
    if before is None or after is None:
        return
    says_slower = any(target.covers(proof.mode, proof.topology) for target in fix.slower)
    ours, theirs = before.estimated_cycles, after.estimated_cycles
    if not says_slower and ours is not None and theirs is not None and theirs > ours:
        yield f"costs {theirs:,} estimated cycles, {ours:,} before, and does not say so"


def _shortfall(proof: Proof) -> str:
    before, after = proof.before, proof.after
    if before is None or after is None:
        return proof.reason
    if proof.verdict == "nothing-to-clear":
        return f"{before.layout} has no such finding"
    return f"{after.findings} of {before.findings} findings are left"


# -- the best fix for one target


def _best(
    before: ProgramAudit,
    proofs: Sequence[Proof],
    audits: Mapping[tuple[str, str, str, str], ProgramAudit],
) -> Best:
    cycles = _cycles(before)
    by_layout: dict[str, list[Proof]] = {}
    for proof in proofs:
        by_layout.setdefault(proof.fix.name, []).append(proof)
    model, topology, mode, layout = _target(before)
    candidates = [
        _candidate(audits[model, topology, mode, name], cycles, shown)
        for name, shown in by_layout.items()
        if any(proof.verdict == "clears" for proof in shown)
        and not any(proof.verdict == "does-not-clear" for proof in shown)
    ]
    candidates.sort(key=lambda c: (c.estimated_cycles or 0, -len(c.clears)))
    return Best(
        model=model,
        platform=before.platform or "",
        topology=topology,
        mode=mode,
        before=layout,
        estimated_cycles=cycles,
        candidates=tuple(candidates),
        reason=_no_best(before, proofs, candidates),
    )


def _candidate(
    audit: ProgramAudit, before_cycles: int | None, proofs: Sequence[Proof]
) -> Candidate:
    cycles = _cycles(audit)
    return Candidate(
        layout=audit.layout or "",
        estimated_cycles=cycles,
        saved_cycles=None if cycles is None or before_cycles is None else before_cycles - cycles,
        clears=tuple(proof.rule.code for proof in proofs if proof.verdict == "clears"),
        leaves=dict(sorted(_warnings(audit).items())),
    )


def _no_best(before: ProgramAudit, proofs: Sequence[Proof], candidates: Sequence[Candidate]) -> str:
    if before.error is not None:
        return f"{before.layout} could not be compiled"
    if not candidates:
        nothing = all(proof.verdict in ("nothing-to-clear", "refused") for proof in proofs)
        return "nothing to clear" if nothing else "no fix clears all the findings that name it"
    if any(candidate.saved_cycles is None for candidate in candidates):
        return f"the {before.platform} compiler gives no estimated cycles"
    if candidates[0].saved_cycles is not None and candidates[0].saved_cycles < 0:
        return f"each fix that clears its findings costs more than {before.layout}"
    return ""


# -- numerics


def _judge_run(compared: Compared, plan: Plan) -> Iterator[Run]:
    comparison = compared.comparison
    for agreement in _closest_agreements(comparison, plan.cases):
        run = Run(comparison, agreement, compared.differences.get(agreement.inputs, {}))
        refused = compared.failed_layout == comparison.after
        if not comparison.run:
            yield replace(run, failures=(f"{comparison.model} cannot be run",))
        elif refused and isinstance(compared.error, UsageError):
            reason = str(compared.error)
            yield replace(run, reason=reason, failures=(reason,) if plan.claimed else ())
        elif compared.error is not None:
            yield replace(run, error=compared.error)
        else:
            yield replace(run, failures=tuple(_disagreements(run)))


def _closest_agreements(comparison: Comparison, cases: Sequence[Case]) -> list[Agreement]:
    closest: dict[str, Agreement] = {}
    for _, fix, model in cases:
        if (model.name, fix.before, fix.name) == _key(comparison)[:3]:
            for agreement in fix.numerics:
                known = closest.get(agreement.inputs)
                if known is None or agreement.tolerance < known.tolerance:
                    closest[agreement.inputs] = agreement
    return list(closest.values())


def _disagreements(run: Run) -> Iterator[str]:
    tolerance = run.agreement.tolerance
    if not run.differences:
        yield f"{run.comparison.model} was not run on {run.agreement.inputs} inputs"
    for name, difference in run.differences.items():
        if difference.largest is None:
            yield f"{name}: shapes differ, or values are missing or not finite"
        elif tolerance == 0 and not difference.identical:
            yield f"{name}: not bit for bit, {difference.largest:.1e} apart"
        elif difference.largest > tolerance:
            yield f"{name}: {difference.largest:.1e} apart, claimed {tolerance:g}"
