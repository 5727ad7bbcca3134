"""Tests for rules, made out of the rules themselves.

A rule is tested by the examples in its own file. In a test module::

    from hlo_audit.testing import check_example, examples

    @pytest.mark.parametrize(("rule", "example"), examples(ALL_RULES))
    def test_example(rule, example):
        check_example(rule, example)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hlo_audit.hlo import parse_module
from hlo_audit.rule import Context, Example, Finding, Rule


def examples(rules: Iterable[Rule]) -> list[tuple[Rule, Example]]:
    """Every rule with each of its examples."""
    return [(rule, example) for rule in rules for example in rule.examples]


def run_example(rule: Rule, example: Example) -> list[Finding]:
    """The findings of ``rule`` in an example.

    Raises:
        ParseError: where the example's text is not HLO.
        KeyError: where the example lacks a snapshot that the rule reads.
    """
    modules = {
        stage: parse_module(example.hlo[stage], path=f"{rule.slug}: {example.title}")
        for stage in rule.reads
    }
    return list(rule.check(modules[rule.reads[0]], Context(rule, modules)))


def check_example(rule: Rule, example: Example) -> None:
    """Run a rule on an example.

    Raises:
        AssertionError: where it reports other findings than the example says.
    """
    findings = run_example(rule, example)
    messages = [finding.message for finding in findings]
    assert len(findings) == example.reports, f"{example.title}: {messages}"
    if example.tallies is not None:
        tallies = Counter(str(finding.details.get(rule.tally)) for finding in findings)
        assert tallies == Counter(example.tallies), f"{example.title}: {messages}"
    known = {fix.name for fix in rule.fixes}
    for finding in findings:
        assert rule.tally in finding.details, f"{rule.slug}: no {rule.tally!r} in {finding}"
        assert set(finding.fixes) <= known, f"{rule.slug}: unknown fix in {finding.fixes}"
