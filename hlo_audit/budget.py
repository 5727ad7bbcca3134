"""Budgets: the most that a program may have of a rule, as ``--max`` and the config write them.

``4``, ``64MiB`` are absolute; ``+1``, ``+8MiB``, ``+10%`` come on top of what the baseline has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from hlo_audit.errors import UsageError
from hlo_audit.rule import Rule, find_rule

Unit = Literal["findings", "bytes", "percent"]

_UNIT_BYTES = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}

_BUDGET = re.compile(r"(\+?)([0-9]{1,18}(?:\.[0-9]{1,6})?)(%|[A-Za-z]+)?", re.ASCII)

FORMS = "a count (0), bytes (64MiB), or more than the baseline has (+1, +8MiB, +10%)"


@dataclass(frozen=True)
class Budget:
    """The most that a program may have of one rule.

    Attributes:
        rule: the code.
        amount: findings, bytes or percent; whole but for percent.
        unit: percent is of the findings' bytes, and of their number for rules without bytes.
        relative: whether it comes on top of what the baseline has.
    """

    rule: str
    amount: Decimal
    unit: Unit
    relative: bool

    def __str__(self) -> str:
        amount = f"{self.amount.normalize():f}"
        unit = {"findings": "", "bytes": "B", "percent": "%"}[self.unit]
        return f"{'+' if self.relative else ''}{amount}{unit}"

    def limit(self, known: int) -> int:
        """The number of findings or bytes allowed.

        Args:
            known: what the baseline has of it; without meaning for an absolute budget.
        """
        if self.unit == "percent":
            return math.floor(known * (1 + self.amount / 100))
        return int(self.amount) + (known if self.relative else 0)


def parse_budget(rule: Rule, text: str) -> Budget:
    """Read a budget.

    Raises:
        UsageError: for what is none; percent must come after a ``+``.
    """
    found = _BUDGET.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text[:40]!r} is no budget", hint=f"write {FORMS}")
    plus, number, unit = found.groups()
    amount = Decimal(number)
    if unit == "%":
        if not plus:
            raise UsageError(
                f"{text!r} is no budget: percent of what?",
                hint=f"+{text} is that much more than the baseline has",
            )
        return Budget(rule.code, amount, "percent", relative=True)
    if unit is not None:
        factor = _UNIT_BYTES.get(unit.lower())
        if factor is None:
            raise UsageError(
                f"{text!r} is no budget: the unit {unit[:20]!r} is not known",
                hint="B, kB, MB, GB, TB, or KiB, MiB, GiB, TiB",
            )
        return Budget(rule.code, Decimal(int(amount * factor)), "bytes", bool(plus))
    if "." in number:
        raise UsageError(f"{text!r} is no budget: findings are whole", hint=f"write {FORMS}")
    return Budget(rule.code, amount, "findings", bool(plus))


def read_budgets(pairs: Iterable[tuple[str, str]], rules: Sequence[Rule]) -> tuple[Budget, ...]:
    """Read ``RULE``, budget pairs. Of two for one rule that limit the same the last one counts;
    a rule may have one on its findings and one on its bytes.

    Raises:
        UsageError: for an unknown rule, and what is no budget.
    """
    budgets: dict[tuple[str, bool, bool], Budget] = {}
    for name, text in pairs:
        budget = parse_budget(find_rule(rules, name), text)
        kind = (budget.rule, budget.relative, budget.unit == "findings")
        budgets.pop(kind, None)
        budgets[kind] = budget
    return tuple(budgets.values())


def override(budgets: Sequence[Budget], by: Sequence[Budget]) -> tuple[Budget, ...]:
    """``budgets``, those of a rule that ``by`` names replaced by the ones there."""
    named: Mapping[str, None] = dict.fromkeys(budget.rule for budget in by)
    return (*(budget for budget in budgets if budget.rule not in named), *by)
