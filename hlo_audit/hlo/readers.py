"""Which instructions of a computation read which.

To go through a large computation for its readers takes longer than what most questions do with
them. A pass leaves most as they are: those of the next snapshot are made of those before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import merge
from typing import TYPE_CHECKING

from hlo_audit.hlo.attributes import is_number
from hlo_audit.hlo.row import NAME, READS, Edit, Row

if TYPE_CHECKING:
    from hlo_audit.hlo.module import Instruction

Readers = dict[str, list[str]]
"""``%name`` -> the ``%name`` of each operand's instruction that reads it, in the order of the text:
who reads it twice stands there twice. A list is never changed: versions share it."""


def find_readers(rows: Sequence[Row]) -> Readers:
    """The readers in a computation."""
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        reader = row[NAME]
        for name in row[READS]:
            readers[name].append(reader)
    return dict(readers)


def update_readers(
    readers: Readers,
    before: Sequence[Row],
    after: Sequence[Row],
    edits: Sequence[Edit],
    places_of: Callable[[Sequence[str]], Sequence[int]],
) -> None:
    """Make the readers in a later version of those in an earlier one.

    Args:
        readers: those of ``before``, which become those of ``after``.
        places_of: gives the places that instructions of ``after`` have by their ``%name``; called
            where an order is to be found out.
    """
    gone: set[str] = set()
    touched: set[str] = set()
    fresh: Readers = {}
    for edit in edits:
        for row in before[edit.gone]:
            gone.add(row[NAME])
            touched.update(row[READS])
        for row in after[edit.fresh]:
            reader = row[NAME]
            for name in row[READS]:
                fresh.setdefault(name, []).append(reader)
    for name in touched.union(fresh):
        kept = [reader for reader in readers.get(name, ()) if reader not in gone]
        new = fresh.get(name, [])
        if kept and new:
            both = kept + new
            ordered = sorted(zip(places_of(both), both, strict=True))
            readers[name] = [reader for _, reader in ordered]
        elif kept or new:
            readers[name] = kept or new
        else:
            readers.pop(name, None)


class ElementUses:
    """The uses of a tuple by the element that they read."""

    def __init__(self, uses: Sequence[tuple[Instruction, int]]) -> None:
        self._of_all: list[tuple[int, tuple[Instruction, int]]] = []
        self._of_one: dict[int, list[tuple[int, tuple[Instruction, int]]]] = {}
        for place, (user, number) in enumerate(uses):
            read_index = user.read_index(number)
            text = user.attributes.get("index", "") if user.opcode == "get-tuple-element" else ""
            if read_index:
                self._of_one.setdefault(read_index[0], []).append((place, (user, number)))
            elif is_number(text):
                self._of_one.setdefault(int(text), []).append((place, (user, number)))
            else:
                self._of_all.append((place, (user, number)))

    def of(self, element: int) -> Sequence[tuple[Instruction, int]]:
        return [use for _, use in merge(self._of_all, self._of_one.get(element, ()), key=_place)]


def _place(use: tuple[int, tuple[Instruction, int]]) -> int:
    return use[0]
