"""The layout fixes: what to change, what is claimed of it, what this run measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report.html.limits import MOST_LISTED
from hlo_audit.report.html.overview import rules_of, target_of
from hlo_audit.report.listed import offered_fixes
from hlo_audit.rule import LayoutFix, Rule


@dataclass(frozen=True)
class Measured:
    """A program of this report with a fix in place, and the same one without."""

    program: str
    before: str
    after: str
    change: str
    better: bool
    rules: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Claim:
    """What a fix claims of some rules' findings; see :class:`hlo_audit.rule.LayoutFix`."""

    rules: tuple[str, ...]
    clears: tuple[str, ...]
    slower: tuple[str, ...]
    numerics: str


@dataclass(frozen=True)
class FixView:
    """A layout fix.

    Attributes:
        offered: some programs that it is offered to, and for how many of which findings.
        offered_left_out: to how many more.
    """

    name: str
    change: str
    offered: tuple[tuple[str, str], ...]
    offered_left_out: int
    model: str
    before: str
    cost: str
    claims: tuple[Claim, ...]
    measured: tuple[Measured, ...]
    command: str


def fix_views(audits: Sequence[ProgramAudit]) -> Iterator[FixView]:
    """Each fix that is offered to any program, those of most findings first."""
    offered: dict[str, list[tuple[str, str]]] = {}
    changes: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for audit in audits:
        for one in offered_fixes(audit):
            offered.setdefault(one.name, []).append((audit.label, ", ".join(one.counts)))
            changes.setdefault(one.name, one.change)
            counts[one.name] += one.findings
    rules = rules_of(audits)
    for name in sorted(offered, key=lambda one: -counts[one]):
        known = [(rule, fix) for rule in rules.values() for fix in rule.fixes if fix.name == name]
        fix = known[0][1]
        yield FixView(
            name,
            changes[name],
            tuple(offered[name][:MOST_LISTED]),
            max(0, len(offered[name]) - MOST_LISTED),
            fix.model,
            fix.before,
            fix.cost,
            tuple(_claims(known)),
            tuple(_measured(name, [one for _, one in known], audits)),
            f"hlo-audit prove {fix.model}",
        )


def _claims(known: Sequence[tuple[Rule, LayoutFix]]) -> Iterator[Claim]:
    """The rules of which it claims the same, together."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[str]] = {}
    for rule, fix in known:
        claim = tuple(map(str, fix.clears)), tuple(map(str, fix.slower)), fix.agreement
        alike.setdefault(claim, []).append(f"{rule.code} {rule.slug}")
    for (clears, slower, numerics), rules in alike.items():
        yield Claim(tuple(rules), clears, slower, numerics)


def _measured(
    name: str, fixes_of_it: Sequence[LayoutFix], audits: Sequence[ProgramAudit]
) -> Iterator[Measured]:
    """The programs of this report that show the fix: the layout before beside the one after."""
    befores = {(fix.model, fix.before) for fix in fixes_of_it}
    for before in audits:
        if (before.program, before.layout) not in befores or before.error is not None:
            continue
        for after in audits:
            if after.layout == name and after.error is None and _alike(before, after):
                yield _side_by_side(before, after)


def _alike(a: ProgramAudit, b: ProgramAudit) -> bool:
    return all(
        getattr(a, name) == getattr(b, name)
        for name in ("program", "mode", "platform", "topology", "mesh", "settings", "xla_flags")
    )


def _side_by_side(before: ProgramAudit, after: ProgramAudit) -> Measured:
    cycles = [one.cost.estimated_cycles if one.cost else None for one in (before, after)]
    change = ""
    if cycles[0] and cycles[1] is not None:
        share = 100 * (cycles[1] - cycles[0]) / cycles[0]
        change = f"{share:+.1f}%" if cycles[0] != cycles[1] else "the same"
    of_before, of_after = (
        Counter(finding.rule for finding in one.findings if finding.severity == "warning")
        for one in (before, after)
    )
    in_after = {rule.code for rule in after.rules}
    rows = [
        (rule.code, f"{of_before[rule.code]:,}", f"{of_after[rule.code]:,}")
        for rule in before.rules
        if rule.code in in_after and (of_before[rule.code] or of_after[rule.code])
    ]
    return Measured(
        f"{before.label} {target_of(before)}".strip(),
        "-" if cycles[0] is None else f"{cycles[0]:,}",
        "-" if cycles[1] is None else f"{cycles[1]:,}",
        change,
        bool(cycles[0] and cycles[1] is not None and cycles[1] < cycles[0]),
        tuple(rows),
    )
