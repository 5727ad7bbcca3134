"""How much the page shows. What is left out is counted in it; the JSON report has all of it."""

from __future__ import annotations

from hlo_audit.report.wording import clip

MOST_FINDINGS = 200
"""Different findings with all that is known of them."""

MOST_NOTES = 100
"""Different notes, and as many suppressed findings, a line each."""

MOST_PROGRAMS = 40
"""Programs with their passes and entry layouts; the overview has all."""

MOST_PAIRS = 12
"""Comparisons of two programs."""

MOST_ROWS = 120
"""Rows of a table, and notices of the gate."""

MOST_LISTED = 12
"""Entries of a list within one of these."""

MOST_FRAMES = 8
"""Callers of a finding's line."""

MOST_OF_A_SOURCE_LINE = 200
"""Characters of a line of Python."""

MOST_OF_AN_INSTRUCTION = 160
"""Characters of an instruction in a comparison."""

MOST_CHARACTERS = 400
"""Of one text out of a dump, where many may stand."""

MOST_OF_ANY_TEXT = 2_000
"""Characters of any text that is put into the page, names of programs and errors too."""


def cut(text: str) -> str:
    """``text``, or its first :data:`MOST_CHARACTERS`."""
    return clip(text, MOST_CHARACTERS)
