"""The consoles that reports are printed on: their lines end in no blanks.

Tables fill their cells up to the width of the column, also in the last one: noise in a file or a
diff, and where lines are copied from a terminal.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment


class TidyConsole(Console):
    """A console that takes the blanks off the ends of lines."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print renderables, as :meth:`rich.console.Console.print` does."""
        super().print(*map(_Tidy, objects), **how)


def plain_console() -> TidyConsole:
    """One of 100 columns without colours, to be captured."""
    return TidyConsole(file=io.StringIO(), width=100, highlight=False)


class _Tidy:
    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self.renderable, options)):
            yield from _without_blanks(line)
            yield Segment.line()


def _without_blanks(line: Sequence[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].control:
        text, style, control = kept.pop()
        if text := text.rstrip(" "):
            kept.append(Segment(text, style, control))
            break
    return kept
