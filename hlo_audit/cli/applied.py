"""Which rules a command applies, with which thresholds, and what they find: the command line over
the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hlo_audit.cli.options import How, RuleChoice, compiling, read_count, read_pairs
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from hlo_audit.config import Config
    from hlo_audit.program import Subject
    from hlo_audit.program_audit import ProgramAudit, RuleOptions
    from hlo_audit.rule import Rule


@dataclass(frozen=True)
class Applied:
    """What is looked for.

    Attributes:
        rules: the rules.
        options: their thresholds, as far as they are not the default ones.
    """

    config: Config
    rules: tuple[Rule, ...]
    options: RuleOptions

    def audited(
        self,
        subjects: Sequence[Subject],
        how: How,
        *,
        introduced_by: bool = False,
        dask: str | None = None,
    ) -> list[list[ProgramAudit]]:
        """What the rules find in each subject, as it is reported; see :func:`run.audit_each`.

        Args:
            dask: the scheduler on whose workers programs are compiled; ``None`` for this machine.
        """
        from hlo_audit.run import audit_each

        with compiling(subjects, how) as compiles, _executor_of(dask, subjects) as executor:
            groups = audit_each(
                subjects,
                self.rules,
                self.options,
                compiles,
                introduced_by=introduced_by,
                executor=executor,
            )
        named = iter(self.named([one for group in groups for one in group]))
        return [[next(named) for _ in group] for group in groups]

    def named(self, audits: Sequence[ProgramAudit]) -> list[ProgramAudit]:
        """The audits as they are reported: each with a label of its own, and without the rules that
        the config does not apply to its program."""
        from hlo_audit.program_audit import tell_apart

        return [_without_ignored(one, self.config) for one in tell_apart(audits)]


def read_applied(config: Config, choice: RuleChoice) -> Applied:
    """Read the options that choose rules.

    Raises:
        UsageError: for what is no rule and no option of one, and where no rule is left.
    """
    from hlo_audit.rule import select_rules
    from hlo_audit.rules import ALL_RULES

    rules = select_rules(
        ALL_RULES,
        choice.select or config.select,
        choice.ignore or (() if choice.select else config.ignore),
    )
    if not rules:
        raise UsageError("no rule is left to apply", hint="--select and --ignore exclude all")
    options = _over(config.options, _read_rule_options(choice.rule_options, ALL_RULES))
    return Applied(config, rules, options)


@contextmanager
def _executor_of(dask: str | None, subjects: Sequence[Subject]) -> Iterator[Executor | None]:
    from hlo_audit.program import Lowering

    if dask is None or not any(isinstance(subject, Lowering) for subject in subjects):
        yield None
        return
    from hlo_audit.dask_cluster import connected

    with connected(dask) as executor:
        yield executor


def _without_ignored(audit: ProgramAudit, config: Config) -> ProgramAudit:
    """The audit without the rules that the config does not apply to this program."""
    program = config.program(audit.program)
    if program is None or not program.ignore:
        return audit
    return replace(
        audit,
        rules=tuple(rule for rule in audit.rules if rule.code not in program.ignore),
        findings=tuple(one for one in audit.findings if one.rule not in program.ignore),
        skipped={code: why for code, why in audit.skipped.items() if code not in program.ignore},
    )


def _over(options: RuleOptions, by: RuleOptions) -> RuleOptions:
    return {
        code: {**options.get(code, {}), **by.get(code, {})}
        for code in dict.fromkeys((*options, *by))
    }


def _read_rule_options(texts: Sequence[str], rules: Sequence[Rule]) -> RuleOptions:
    from hlo_audit.errors import unknown_name
    from hlo_audit.rule import find_rule

    options: dict[str, dict[str, int]] = {}
    for path, value in read_pairs("--rule-option", texts).items():
        rule_name, dot, name = path.partition(".")
        rule = find_rule(rules, rule_name)
        if not dot or name not in rule.options:
            raise unknown_name(f"option of {rule.slug}", name, rule.options or ["(it has none)"])
        options.setdefault(rule.code, {})[name] = read_count("--rule-option", path, value)
    return options
