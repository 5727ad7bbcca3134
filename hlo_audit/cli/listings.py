"""``hlo-audit explain``, ``rules`` and ``models``: what there is, in the terminal."""

from __future__ import annotations

import click

from hlo_audit.cli.options import completes
from hlo_audit.cli.output import console


@click.command()
@click.argument("rule", shell_complete=completes("rules"))
def explain(rule: str) -> None:
    """Print the documentation of a rule, given by code or slug."""
    from hlo_audit.report.listing import print_explanation
    from hlo_audit.rule import find_rule
    from hlo_audit.rules import ALL_RULES

    print_explanation(console(), find_rule(ALL_RULES, rule))


@click.command()
def rules() -> None:
    """List the rules."""
    from hlo_audit.report.listing import print_rules
    from hlo_audit.rules import ALL_RULES

    print_rules(console(), ALL_RULES)


@click.command()
def models() -> None:
    """List the reference models, their layouts and their settings."""
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.report.listing import print_models

    print_models(console(), ALL_MODELS)
