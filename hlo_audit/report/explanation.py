"""What a rule says of itself, its options and its fixes, as Markdown."""

from __future__ import annotations

from hlo_audit.rule import Rule


def explanation(rule: Rule) -> str:
    """The documentation of ``rule``, without a heading of its own."""
    parts = [rule.documentation]
    if rule.options:
        parts.append("## Options")
        parts += [
            f"- `{rule.slug}.{name}`: {value:,} by default" for name, value in rule.options.items()
        ]
    if rule.fixes:
        parts.append("## Fixes")
    for fix in rule.fixes:
        claims = "".join(f"\n- {name}: {text}" for name, text in fix.claims.items())
        parts.append(
            f"**{fix.name}**: {fix.change}.\n\n"
            f"- Shown by: {fix.model} (`models/{fix.model.replace('-', '_')}.py`), layout "
            f"`{fix.before}` against `{fix.name}`\n- Cost: {fix.cost}{claims}"
        )
    return "\n\n".join(parts)
