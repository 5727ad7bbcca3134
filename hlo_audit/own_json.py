"""What a JSON file is that this tool may have written, to say so where another kind is wanted."""

from __future__ import annotations

import json

_KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("a baseline", frozenset({"schema_version", "entries"})),
    ("a report", frozenset({"schema_version", "tool", "programs", "gate"})),
    ("a report of the passes", frozenset({"schema_version", "tool", "programs"})),
    ("a diff", frozenset({"schema_version", "tool", "a", "b"})),
    ("a report of proofs", frozenset({"schema_version", "tool", "proofs"})),
    ("SARIF", frozenset({"version", "runs"})),
)


def kind_of(data: object) -> str | None:
    """What parsed JSON is, such as ``a baseline``; ``None`` for none of ours."""
    if not isinstance(data, dict):
        return None
    return next((kind for kind, keys in _KINDS if keys <= data.keys()), None)


def kind_of_text(text: str) -> str | None:
    """What a text is, if it is JSON at all; ``JSON`` for an object that is none of ours."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return kind_of(data) or "JSON"
