"""What changed from one snapshot to a later one: which rows are gone, which are fresh, and which
lookups may give something else now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from hlo_audit.hlo.calls import called_by
from hlo_audit.hlo.lookups import Where
from hlo_audit.hlo.module import Computation, Module
from hlo_audit.hlo.row import NAME, OPCODE, READS, Row

_name, _reads = itemgetter(NAME), itemgetter(READS)

_Found = TypeVar("_Found", tuple[str, Row], tuple[Computation, int, Row])

_NOTHING: frozenset[str] = frozenset()


class _Changed:
    """A computation of which two snapshots have not the same version.

    Attributes:
        before, after: the versions; ``None`` where a snapshot has none.
        gone: the rows that only the earlier one has, in stretches.
        fresh: the rows that only the later one has, in stretches.
        places: of the first of each of the fresh stretches.
    """

    def __init__(self, before: Computation | None, after: Computation | None) -> None:
        self.before = before
        self.after = after
        self.gone: Sequence[Sequence[Row]] = () if before is None else (before.rows,)
        self.fresh: Sequence[Sequence[Row]] = () if after is None else (after.rows,)
        self.places: Sequence[int] = (0,)
        if before is not None and after is not None:
            edits = after.edits_since(before)
            self.gone = [before.rows[edit.gone] for edit in edits]
            self.fresh = [after.rows[edit.fresh] for edit in edits]
            self.places = [edit.fresh.start for edit in edits]

    @property
    def rows(self) -> Iterator[Row]:
        """The rows that only the one has, and those that only the other has."""
        return chain(*self.gone, *self.fresh)

    @cached_property
    def instructions(self) -> AbstractSet[str]:
        """The ``%name`` of each instruction whose line changed, or that is a root no more or now:
        where no line says so, that is the last one."""
        roots = [one.root_name for one in (self.before, self.after) if one is not None]
        return {*map(_name, self.rows), *roots}

    @cached_property
    def readers(self) -> AbstractSet[str]:
        """The ``%name`` of each instruction whose readers changed."""
        return set(chain.from_iterable(map(_reads, self.rows)))


class Changes:
    """What changed from one snapshot to a later one.

    Attributes:
        before: the earlier one; ``None`` where all is fresh.
        after: the later one.
        gone: opcode -> the rows that only the earlier one has, with the name of their computation.
        fresh: opcode -> the rows that only the later one has, with their computation and place.
    """

    def __init__(self, before: Module | None, after: Module, opcodes: Collection[str]) -> None:
        """Compare two snapshots.

        Args:
            opcodes: those whose rows are told apart.
        """
        self.before = before
        self.after = after
        self._changed = {} if before is after else _compare(before, after)
        self.gone: Mapping[str, Sequence[tuple[str, Row]]] = _by_opcode(
            [
                (name, row)
                for name, changed in self._changed.items()
                for rows in changed.gone
                for row in rows
                if row[OPCODE] in opcodes
            ]
        )
        self.fresh: Mapping[str, Sequence[tuple[Computation, int, Row]]] = _by_opcode(
            [
                (changed.after, place, row)
                for changed in self._changed.values()
                if changed.after is not None
                for first, rows in zip(changed.places, changed.fresh, strict=True)
                for place, row in enumerate(rows, first)
                if row[OPCODE] in opcodes
            ]
        )

    @property
    def gone_computations(self) -> Iterator[Computation]:
        """The versions of computations that only the earlier one has."""
        return (one.before for one in self._changed.values() if one.before is not None)

    @property
    def fresh_computations(self) -> Iterator[Computation]:
        """The versions of computations that only the later one has."""
        return (one.after for one in self._changed.values() if one.after is not None)

    def stale(self, where: Where) -> AbstractSet[str]:
        """The names under which something else may be found there now."""
        kind, computation = where
        if computation:
            changed = self._changed.get(computation)
            if changed is None:
                return _NOTHING
            return changed.readers if kind == "readers" else changed.instructions
        if kind == "existence":
            return self._come_or_gone
        if kind == "callers":
            return self._called
        if kind == "parameters":
            return self._of_other_parameters
        if kind == "module":
            return {""} if self._changed or self._is_reordered else _NOTHING
        return self._changed.keys()

    @cached_property
    def _is_reordered(self) -> bool:
        """Whether the computations that both have stand in another order."""
        old = () if self.before is None else self.before.computations
        new = self.after.computations
        return [name for name in old if name in new] != [name for name in new if name in old]

    @cached_property
    def _come_or_gone(self) -> AbstractSet[str]:
        return {
            name
            for name, changed in self._changed.items()
            if changed.before is None or changed.after is None
        }

    @cached_property
    def _called(self) -> AbstractSet[str]:
        if self._is_reordered:  # callers are in the order of the text
            return self.after.computations.keys()
        rows = chain.from_iterable(changed.rows for changed in self._changed.values())
        return {name for _, name in called_by(rows)}

    @cached_property
    def _of_other_parameters(self) -> AbstractSet[str]:
        return {
            name
            for name, changed in self._changed.items()
            if any(row[OPCODE] == "parameter" for row in changed.rows)
        }


def _by_opcode(found: Sequence[_Found]) -> Mapping[str, Sequence[_Found]]:
    by_opcode: defaultdict[str, list[_Found]] = defaultdict(list)
    for one in found:
        by_opcode[one[-1][OPCODE]].append(one)
    return dict(by_opcode)


def _compare(before: Module | None, after: Module) -> dict[str, _Changed]:
    """The computations of which two snapshots have not the same version, by name."""
    old = {} if before is None else before.computations
    new = after.computations
    changed = {
        name: _Changed(old.get(name), one) for name, one in new.items() if old.get(name) is not one
    }
    changed |= {name: _Changed(old[name], None) for name in old.keys() - new.keys()}
    return changed
