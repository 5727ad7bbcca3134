"""Reading drawn snapshots in a row, each beside the one before, gives what each alone gives: where
an edit broke one, the same error."""

from __future__ import annotations

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from fuzz_cases import tried
from hlo_audit.hlo import Memo, Module
from snapshot_rows import read, rows


def graph(module: Module) -> object:
    """All that a module holds, by name."""
    return (
        *(module.name, module.entry_name, module.header_text, module.frame_tables),
        str(module.error),
        list(module.lines.items()),
        [
            (
                computation.name,
                computation.root.name if len(computation) else None,
                [
                    (
                        *(one.text, one.index, one.shape, one.is_root, one.attribute_text),
                        [(v.instruction.name, v.tuple_index) for v in one.operand_values],
                        [operand.index for operand in one.operands],
                        [user.name for user in one.users],
                        computation[one.name] is one,
                        one.computation is computation,
                    )
                    for one in computation
                ],
                [(name, call.instruction.name) for name, call in computation.calls],
                dict(computation.places),
            )
            for computation in module.computations.values()
        ],
    )


def test_drawn_snapshots_in_a_row_read_as_each_does_alone(pytestconfig: pytest.Config) -> None:
    @tried(pytestconfig, share=60)
    @given(rows(), st.booleans(), st.booleans())
    def holds(row: list[str], partial: bool, is_late: bool) -> None:
        memo = Memo()
        together: list[Module | str] = []
        expected: list[object] = []
        for text in row:
            alone = read(text, None, partial=partial)
            expected.append(alone if isinstance(alone, str) else graph(alone))
            beside = read(text, memo, partial=partial)
            together.append(beside)
            if not is_late:
                note(f"snapshot {len(together)}:\n{text}")
                assert (beside if isinstance(beside, str) else graph(beside)) == expected[-1]
        # Nor has the reading of a snapshot changed those before it, looked at only now or before.
        for beside, one, text in zip(together, expected, row, strict=True):
            note(f"in the end:\n{text}")
            assert (beside if isinstance(beside, str) else graph(beside)) == one

    holds()


def test_rows_hold_broken_and_whole_snapshots_and_most_of_a_whole_one_is_taken_over(
    pytestconfig: pytest.Config,
) -> None:
    """What the property above is tried on is what it is about."""
    outcomes = {"whole": 0, "broken": 0, "a computation taken over": 0, "one read again": 0}

    @tried(pytestconfig, share=10)
    @given(rows())
    def count(row: list[str]) -> None:
        memo = Memo()
        before: Module | None = None
        for text in row:
            found = read(text, memo, partial=False)
            outcomes["broken" if isinstance(found, str) else "whole"] += 1
            if isinstance(found, str):
                continue
            if before is not None:
                for name, computation in found.computations.items():
                    if name in before.computations:
                        same = before.computations[name] is computation
                        outcomes["a computation taken over" if same else "one read again"] += 1
            before = found

    count()
    assert min(outcomes.values()) > sum(outcomes.values()) // 50, outcomes
