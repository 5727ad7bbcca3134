"""What there is, for the terminal: rules, reference models, the documentation of a rule."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from hlo_audit.program import Model
from hlo_audit.report.explanation import explanation
from hlo_audit.report.text import Indented
from hlo_audit.rule import Rule


def print_rules(console: Console, rules: Sequence[Rule]) -> None:
    """Print a table of the rules."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("code", "slug", "reports"):
        table.add_column(heading)
    for rule in rules:
        table.add_row(Text(rule.code), Text(rule.slug), Text(rule.summary))
    console.print(table)


def print_models(console: Console, models: Sequence[Model]) -> None:
    """Print the reference models, their layouts, settings and default topologies."""
    for model in models:
        console.print(Indented(Text.assemble((model.name, "bold"), f"  {model.summary}"), 0, 2))
        console.print(Text("\n  --layout", style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 4), show_header=False)
        for number, layout in enumerate(model.layouts):
            baseline = " (baseline)" if number == 0 else ""
            table.add_row(Text(layout.name), Text(layout.summary + baseline))
        console.print(table)
        settings = "  ".join(f"{name}={value}" for name, value in model.configure({}).items())
        console.print(Text("\n  --set", style="bold"))
        console.print(Indented(Text(settings), 4))
        console.print(Text("\n  --topology", style="bold"))
        for platform, topology in model.topologies.items():
            console.print(Text(f"    {topology} (--platform {platform})"))


def print_explanation(console: Console, rule: Rule) -> None:
    """Print the documentation of a rule, its options and its fixes."""
    heading = f"**{rule.code} {rule.slug}**"
    console.print(Markdown(f"{heading}\n\n{explanation(rule)}"))
