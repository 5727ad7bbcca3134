"""A report as JUnit XML: a suite a program, a case a rule; what the gate fails is a failure.

The form is that of Jenkins' ``junit-10.xsd``, which GitLab, Azure, CircleCI and Buildkite read too.
No times: the findings take none.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from hlo_audit.errors import HloAuditError
from hlo_audit.gate import Notice, Violation
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.report.listed import Listed, by_program, listed
from hlo_audit.report.sources import Repository
from hlo_audit.report.wording import clip, format_cost, headline, plain
from hlo_audit.rule import Rule

MOST_LISTED = 100
"""How many findings of a rule are listed for a program."""

_MOST_CHARACTERS = 2_000


def render_junit(report: Report, repository: Repository, *, show_all: bool = False) -> str:
    """The report as XML text, with a line end.

    Args:
        repository: what the Python lines are relative to.
        show_all: lists notes too, with the findings of a case.
    """
    entries = by_program(listed(report, show_all=show_all))
    suites = Element("testsuites", name="hlo-audit")
    totals = {"tests": 0, "failures": 0, "errors": 0}
    for audit in report.programs:
        violations = report.gate.violations_of(audit)
        mine = entries.get(id(audit), ())
        suite = _suite(audit, violations, mine, repository, headline(report))
        suites.append(suite)
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    failing = [notice for notice in report.gate.notices if notice.fails]
    if failing:
        suites.append(_gate_suite(failing))
        totals["tests"] += len(failing)
        totals["failures"] += len(failing)
    for name, total in totals.items():
        suites.set(name, str(total))
    indent(suites)
    text: str = tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _gate_suite(notices: Sequence[Notice]) -> Element:
    """What the strict gate fails beside the programs."""
    count = str(len(notices))
    suite = Element("testsuite", name="gate", tests=count, failures=count, errors="0", skipped="0")
    for number, notice in enumerate(notices, start=1):
        name = _text(f"{number} {notice.kind} {notice.program} {notice.rule}".strip())
        case = SubElement(suite, "testcase", classname="gate", name=name)
        failure = SubElement(case, "failure", type=notice.kind, message=_text(notice.message))
        failure.text = _text(notice.message)
    return suite


def _suite(
    audit: ProgramAudit,
    violations: Sequence[Violation],
    entries: Sequence[Listed],
    repository: Repository,
    verdict: str,
) -> Element:
    suite = Element("testsuite", name=_text(audit.label))
    properties = SubElement(suite, "properties")
    facts = {
        "gate": verdict,
        "platform": audit.platform,
        "topology": audit.topology,
        "module": audit.module,
        **{f"set {name}": str(value) for name, value in audit.settings.items()},
        **{f"xla_flag {name}": value for name, value in audit.xla_flags.items()},
        **audit.versions,
    }
    for name, value in facts.items():
        if value is not None:
            SubElement(properties, "property", name=_text(name), value=_text(value))
    if audit.error is not None:
        _error_case(suite, audit.label, audit.error)
    for rule in audit.rules:
        if audit.error is None:
            broken = [v for v in violations if v.rule == rule.code]
            mine = [entry for entry in entries if entry.finding.rule == rule.code]
            _rule_case(suite, audit, rule, broken, mine, repository)
    cases = suite.findall("testcase")
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    return suite


def _error_case(suite: Element, label: str, error: HloAuditError) -> None:
    case = SubElement(suite, "testcase", classname=_text(label), name=error.kind)
    failed = SubElement(case, "error", type=error.kind, message=_text(str(error)))
    failed.text = "\n".join([_text(str(error)), *map(_text, getattr(error, "log", ()))])


def _rule_case(
    suite: Element,
    audit: ProgramAudit,
    rule: Rule,
    broken: Sequence[Violation],
    entries: Sequence[Listed],
    repository: Repository,
) -> None:
    case = SubElement(
        suite, "testcase", classname=_text(audit.label), name=f"{rule.code} {rule.slug}"
    )
    findings = "\n".join(_findings(entries, repository))
    if broken:
        message = _text("; ".join(violation.message for violation in broken))
        failure = SubElement(case, "failure", type=broken[0].against, message=message)
        failure.text = findings or message
    elif rule.code in audit.skipped:
        SubElement(case, "skipped", message=_text(audit.skipped[rule.code]))
    elif findings:
        SubElement(case, "system-out").text = findings


def _findings(entries: Sequence[Listed], repository: Repository) -> list[str]:
    lines = []
    for entry in entries[:MOST_LISTED]:
        finding = entry.finding
        place = next(iter(repository.places(finding)), None)
        at = f"{_text(str(place))}: " if place else ""
        cost = format_cost([finding])
        fixes = ", ".join(entry.audit.fixes_of(finding))
        notes = [f"%{_text(finding.instruction)}", cost, f"fixes: {fixes}" if fixes else ""]
        lines.append(f"{at}{_text(finding.message)} ({'; '.join(note for note in notes if note)})")
    rest = len(entries) - MOST_LISTED
    return [*lines, f"and {rest} more, of less cost"] if rest > 0 else lines


def _text(text: str) -> str:
    """What XML may hold: it knows no control characters, not even escaped."""
    return clip(plain(text), _MOST_CHARACTERS)
