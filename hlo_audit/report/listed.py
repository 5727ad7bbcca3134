"""Which findings a report lists, in which order, and which fixes it offers.

Every format but JSON, which holds all findings, lists the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hlo_audit.program_audit import ProgramAudit, Suppressed
from hlo_audit.report import Report
from hlo_audit.rule import Finding

Level = Literal["error", "warning", "note"]

_LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Listed:
    """A finding of a program.

    Attributes:
        breaks_gate: whether it is one of more findings of its rule than the gate allows, or one
            that the baseline does not have.
        suppressed: by what, if it is.
    """

    audit: ProgramAudit
    finding: Finding
    breaks_gate: bool
    suppressed: Suppressed | None = None

    @property
    def level(self) -> Level:
        """``error`` for what fails the gate, else the severity of the finding."""
        return "error" if self.breaks_gate else self.finding.severity


def listed(report: Report, *, show_all: bool = False) -> list[Listed]:
    """What fails the gate, then warnings, then notes; of each the most costly first.

    Notes are left out unless ``show_all``, or where they fail the gate; what is suppressed is left
    out.
    """
    entries = []
    for audit in report.programs:
        breaking = breaking_findings(audit, report)
        entries += [Listed(audit, one, id(one) in breaking) for one in audit.findings]
    chosen = [entry for entry in entries if show_all or entry.level != "note"]
    return sorted(chosen, key=_order)


def by_program(entries: Iterable[Listed]) -> Mapping[int, Sequence[Listed]]:
    """The entries of each program, by its audit's ``id``; none for one that has none."""
    found: dict[int, list[Listed]] = {}
    for entry in entries:
        found.setdefault(id(entry.audit), []).append(entry)
    return found


def numbered(audit: ProgramAudit) -> list[Finding]:
    """The findings of a program in the order in which they are numbered from 1."""
    return most_costly_first(audit, audit.findings)


def most_costly_first(audit: ProgramAudit, findings: Iterable[Finding]) -> list[Finding]:
    """Findings of a program: warnings, then notes."""
    return sorted(findings, key=lambda one: (one.severity == "note", -audit.seconds_of(one)))


def breaking_findings(audit: ProgramAudit, report: Report) -> frozenset[int]:
    """The ``id`` of each finding of a program that fails the gate: all of a rule that has more than
    is allowed; against a baseline, those that are new."""
    mine = report.gate.violations_of(audit)
    over = {
        one.rule
        for one in mine
        if one.against != "baseline" and one.count is not None and one.count > one.limit
    }
    new = Counter((one.rule, fingerprint) for one in mine for fingerprint in one.new)
    breaking = set()
    for finding in sorted(audit.findings, key=audit.seconds_of, reverse=True):
        name = (finding.rule, finding.fingerprint) if new else ("", "")
        if finding.rule in over or new[name] > 0:
            breaking.add(id(finding))
        new[name] -= 1
    return frozenset(breaking)


def suppressed(report: Report) -> list[Listed]:
    """What somebody has given a reason to leave, by program."""
    return [
        Listed(audit, one.finding, False, one)
        for audit in report.programs
        for one in audit.suppressed
    ]


def _order(entry: Listed) -> tuple[int, float]:
    return _LEVELS.index(entry.level), -entry.audit.seconds_of(entry.finding)


def alike(entries: Iterable[Listed]) -> list[list[Listed]]:
    """The entries that differ in nothing but their instruction and their program, together.

    The groups are sorted as the entries were: by level, then by what all of a group cost together.
    """
    groups: dict[tuple[object, ...], list[Listed]] = {}
    for entry in entries:
        finding = entry.finding
        identity = (
            entry.level,
            finding.rule,
            finding.message,
            finding.source,
            finding.op_name,
            finding.executions,
        )
        groups.setdefault(identity, []).append(entry)
    return sorted(groups.values(), key=_order_of_all)


def _order_of_all(group: Sequence[Listed]) -> tuple[int, float]:
    together = sum(entry.audit.seconds_of(entry.finding) for entry in group)
    return _LEVELS.index(group[0].level), -together


@dataclass(frozen=True)
class OfferedFix:
    """A layout fix for some findings of a program.

    Attributes:
        name: of the fix.
        counts: for how many of which rule's warnings it is, such as ``4 of 6 HLA002``.
        findings: for how many it is in all.
        change: what to change, in words.
    """

    name: str
    counts: tuple[str, ...]
    findings: int
    change: str


def offered_fixes(audit: ProgramAudit) -> Iterator[OfferedFix]:
    """Each fix once, in the order of the rules."""
    counts: dict[str, list[str]] = {}
    findings = Counter[str]()
    changes: dict[str, str] = {}
    for rule in audit.rules:
        found = [f for f in audit.findings if f.rule == rule.code and f.severity == "warning"]
        for fix in rule.fixes:
            count = sum(fix.name in audit.fixes_of(finding) for finding in found)
            if count:
                modes = sorted({target.mode for target in fix.clears})
                only = f" (in {modes[0]} mode)" if len(modes) == 1 and audit.mode is None else ""
                # In another program it is what the model's layout stands for that is to be done.
                as_shown = "" if audit.program == fix.model else f"as {fix.model} shows, "
                changes.setdefault(fix.name, f"{as_shown}{fix.change}{only}")
                counts.setdefault(fix.name, []).append(f"{count} of {len(found)} {rule.code}")
                findings[fix.name] += count
    for name, of_rules in counts.items():
        yield OfferedFix(name, tuple(of_rules), findings[name], changes[name])


def programs_of(entries: Sequence[Listed]) -> str:
    """The labels of the programs, each once, four at the most."""
    labels = list(dict.fromkeys(entry.audit.label for entry in entries))
    more = f" and {len(labels) - 4} more" if len(labels) > 4 else ""
    return ", ".join(labels[:4]) + more
