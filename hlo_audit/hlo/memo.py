"""What one snapshot has in common with the one before, found by comparing text.

A pass changes little: most computations stand in two snapshots on end to the letter, often many in
a row; of the others most lines do (see ``body.py``). Comparing text is many times as fast as
reading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hlo_audit.hlo.body import Body
from hlo_audit.hlo.module import Computation, Module


class Place(NamedTuple):
    """Where the lines of a body start and end, counted from the start of its computation, and how
    many of them continue one above."""

    start: int
    end: int
    continued: int


class Memo:
    """The snapshot read before; empty at first.

    Attributes:
        names: of its computations, in the order of the text.
        computations: the graphs.
        places: where the lines of each are; ``None`` where they were not read the plain way.
        offsets: where each starts in the text, and where the text ends.
        lines: the line of each, counted from 1.
        entry_name: the name of the one with ``ENTRY`` before it.
        tables: the text of the source tables.
        size: how many instructions it has.
        dropped: how many instructions the computations have that no later snapshot has, so far, and
            that refer to themselves: they stay until they are collected.
    """

    __slots__ = (
        *("_index", "_module", "_text", "computations", "dropped", "entry_name", "lines", "names"),
        *("offsets", "places", "size", "tables"),
    )

    def __init__(self) -> None:
        self._text = self.tables = ""
        self.names: Sequence[str] = ()
        self.computations: Sequence[Computation] = ()
        self.places: Sequence[Place | None] = ()
        self.offsets: Sequence[int] = (0,)
        self.lines: Sequence[int] = ()
        self.entry_name: str | None = None
        self.size = self.dropped = 0
        self._index: Mapping[str, int] = {}
        self._module: Module | None = None

    def module_of(self, text: str) -> Module | None:
        """The module, if the snapshot has this text: many a pass changes nothing."""
        return self._module if text == self._text else None

    def remember(
        self, text: str, module: Module, offsets: Sequence[int], places: Sequence[Place | None]
    ) -> None:
        """Take this snapshot in place of the one before."""
        computations = list(module.computations.values())
        before, after = set(self.computations), set(computations)
        dropped = before - after
        self.dropped += sum(len(one) for one in dropped if one.refers_to_itself)
        self.size += sum(map(len, after - before)) - sum(map(len, dropped))
        self._text, self._module, self.tables = text, module, module.frame_tables
        self.names = list(module.computations)
        self.computations = computations
        self.lines = list(module.lines.values())
        self.entry_name = module.entry_name
        self.offsets, self.places = offsets, places
        self._index = dict(zip(self.names, range(len(self.names)), strict=True))

    def index_of(self, name: str) -> int | None:
        """The place of a computation among the :attr:`names`."""
        return self._index.get(name)

    def run(self, text: str, position: int, first: int) -> int:
        """How far the computations from ``first`` on stand at ``position`` of ``text`` as well.

        Returns:
            the index behind the last of them; ``first`` where not even that one stands there.
        """
        offsets, last, step = self.offsets, first, 1
        while last < len(self.names):
            end = min(last + step, len(self.names))
            if text.startswith(self._text[offsets[last] : offsets[end]], position):
                position += offsets[end] - offsets[last]
                last, step = end, 2 * step
            elif step == 1:
                break
            else:
                step = 1
        return last

    def body_of(self, name: str) -> Body | None:
        """The body of a computation; ``None`` where there is none, or none read the plain way."""
        index = self._index.get(name)
        if index is None or (place := self.places[index]) is None:
            return None
        start = self.offsets[index]
        text = self._text[start + place.start : start + place.end]
        return Body(text, self.computations[index], place.continued)
