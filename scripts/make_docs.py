"""Write ``docs/rules/``, a page for each rule, out of the rules themselves."""

from __future__ import annotations

from pathlib import Path

from hlo_audit.rule import Rule
from hlo_audit.rules import ALL_RULES

FOLDER = Path(__file__).parent.parent / "docs" / "rules"


def page(rule: Rule) -> str:
    """The page of a rule, as Markdown."""
    lines = [f"# {rule.code} {rule.slug}", "", rule.documentation.strip(), ""]
    if rule.options:
        lines += ["## Options", "", "| option | default |", "|---|---|"]
        lines += [f"| `{rule.slug}.{name}` | {value} |" for name, value in rule.options.items()]
        lines.append("")
    lines += ["## Fixes", ""]
    for fix in rule.fixes:
        lines += [
            f"**{fix.name}**: {fix.change}.",
            "",
            f"- Shown by: `{fix.model}`, layout `{fix.before}` against `{fix.name}`",
            f"- Cost: {fix.cost}",
            *(f"- {name}: {text}" for name, text in fix.claims.items()),
            "",
        ]
    lines += ["## Examples", ""]
    for example in rule.examples:
        lines += [f"{example.title[0].upper()}{example.title[1:]}: {example.reports} findings.", ""]
        for stage, text in example.hlo.items():
            lines += [f"`{stage}`:", "", "```", text.strip(), "```", ""]
    return "\n".join(lines)


def index() -> str:
    """The list of the rules, as Markdown."""
    rows = [
        f"| [{rule.code}]({rule.slug}.md) | `{rule.slug}` | {rule.summary} |" for rule in ALL_RULES
    ]
    return "\n".join(["# Rules", "", "| code | slug | reports |", "|---|---|---|", *rows, ""])


def pages() -> dict[Path, str]:
    """Every page by its path."""
    found = {FOLDER / f"{rule.slug}.md": page(rule) for rule in ALL_RULES}
    return {FOLDER / "README.md": index(), **found}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
