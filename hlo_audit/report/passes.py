"""Which instructions a report of the passes follows."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_audit.errors import UsageError
from hlo_audit.follow import Walk, identity_of_finding, locate, look_up, walk
from hlo_audit.history import History
from hlo_audit.passes import Passes
from hlo_audit.report.listed import numbered
from hlo_audit.rule import Finding

_FINGERPRINT_DIGITS = 16


@dataclass(frozen=True)
class Followed:
    """The way of one instruction.

    Attributes:
        program: the place of its program among the histories.
        number: of the finding; ``None`` where an instruction was asked for.
        finding: which it is.
        walk: its way.
    """

    program: int
    number: int | None
    finding: Finding | None
    walk: Walk


def follow_finding(program: int, history: History, name: str) -> Followed:
    """Follow the instruction of a finding.

    Args:
        program: its place among the histories.
        name: the finding's fingerprint, or its number from 1.

    Raises:
        UsageError: where there is no such finding.
    """
    findings = numbered(history.audit)
    number = _number(findings, name)
    if number is None:
        raise UsageError(
            f"there is no finding {name}", hint="hlo-audit passes PROGRAM numbers them"
        )
    finding = findings[number - 1]
    rule = next(rule for rule in history.audit.rules if rule.code == finding.rule)
    passes = _passes(history)
    place = locate(passes, rule, finding)
    if place is None:
        raise UsageError(f"the snapshots do not hold the instruction of finding {name}")
    return Followed(program, number, finding, walk(passes, *place, identity_of_finding(finding)))


def _number(findings: list[Finding], name: str) -> int | None:
    for number, finding in enumerate(findings, 1):
        if finding.fingerprint == name.lower():
            return number
    # Longer than any number of findings: digits alone may be a fingerprint of another program.
    if not (name.isascii() and name.isdecimal() and len(name) < _FINGERPRINT_DIGITS):
        return None
    return int(name) if 1 <= int(name) <= len(findings) else None


def follow_instruction(program: int, history: History, name: str) -> Followed:
    """Follow an instruction from the last snapshot that has one of this name.

    Raises:
        UsageError: where none has.
    """
    passes = _passes(history)
    return Followed(program, None, None, walk(passes, *look_up(passes, name)))


def _passes(history: History) -> Passes:
    if history.timeline is None:
        raise ValueError("the passes of this program were not read")
    return history.timeline.passes
