"""Questions asked of drawn snapshots in a row: what is not asked again has the answer that it would
have if it were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256

import pytest
from hypothesis import given, note

from fuzz_cases import tried
from hlo_audit.hlo import Instruction, Memo, Module, Value
from hlo_audit.hlo.answers import Answers
from hlo_audit.hlo.changes import Changes
from hlo_audit.hlo.dataflow import Site, evaluate, follow, trace_back
from snapshot_rows import read, rows

Answer = tuple[str, ...]


def neighbours(one: Instruction, _: Module) -> Iterator[str]:
    for value in one.operand_values:
        yield f"reads {value.instruction.name} {value.tuple_index} {value.instruction.shape}"
    for user in one.users:
        yield f"read by {user.name} {user.attribute_text}"


def far_operands(one: Instruction, _: Module) -> Iterator[str]:
    for operand in one.operands:
        for further in operand.operands:
            yield f"{further.opcode} {[last.name for last in further.operands]}"


def uses(one: Instruction, _: Module) -> Iterator[str]:
    for element in (None, 0, 1):
        yield str([(user.name, number) for user, number in one.uses(element)])
    yield from (f"{user.name} {last.name}" for user in one.users for last in user.users)


def callers(one: Instruction, module: Module) -> Iterator[str]:
    computation = one.computation
    for caller in module.callers(computation):
        yield f"{caller.name} {caller.attribute_text} {[o.opcode for o in caller.operands]}"
    yield f"{module.is_fused(computation)} {sorted(module.fusion_kinds(computation))}"
    yield str([call.opcode for call in module.calls_of(computation)])


def called(one: Instruction, module: Module) -> Iterator[str]:
    for computation in module.called(one):
        yield f"{computation.root.text} {[p.shape for p in computation.parameters]}"


def whither(one: Instruction, module: Module) -> Iterator[str]:
    followed = follow(module, Value(one), limit=30)
    if followed is not None:
        yield from (f"{v.instruction.name} {v.tuple_index}" for v in followed.values)
        yield from (f"{use.user.name} {use.operand}" for use in followed.uses)


def whence(one: Instruction, module: Module) -> Iterator[str]:
    for site in trace_back(module, Site(Value(one))):
        yield f"{site.instruction.name} {site.value.tuple_index} {len(site.calls)}"
    yield str(evaluate(module, Site(Value(one)), (0, 3)))


def place(one: Instruction, _: Module) -> Iterator[str]:
    yield f"{one.is_root}"
    yield f"{one.index} of {len(one.computation)}" if "a" in one.name else ""


def whole(one: Instruction, module: Module) -> Iterator[str]:
    computation = one.computation
    yield f"{'x' in computation} {[other.name for other in computation.of_opcodes(('add',))]}"
    yield f"{sum(1 for _ in module.of_opcodes(('copy', 'tuple')))} {len(computation.calls)}"


QUESTIONS: Sequence[Callable[[Instruction, Module], Iterator[str]]] = (
    *(neighbours, far_operands, uses, callers, called, whither, whence, place, whole),
)


def answer(one: Instruction, module: Module) -> Answer:
    """One of the questions or two, by the instruction's name."""
    drawn = sha256(one.name.encode("utf-8", "replace")).digest()
    first, second = (QUESTIONS[byte % len(QUESTIONS)] for byte in drawn[:2])
    said = [*first(one, module)]
    if drawn[2] % 4 == 0:
        said += second(one, module)
    return one.computation.name, one.name, one.text, *said


def test_what_is_not_asked_again_has_the_same_answer(pytestconfig: pytest.Config) -> None:
    @tried(pytestconfig, share=40)
    @given(rows())
    def holds(row: list[str]) -> None:
        alone = [
            module for module in (read(text, None) for text in row) if not isinstance(module, str)
        ]
        opcodes = {one.opcode for module in alone for one in module.instructions}
        answers: Answers[Answer] = Answers(opcodes)
        known: Counter[Answer] = Counter()
        memo, before = Memo(), None
        for text in row:
            module = read(text, memo)
            if isinstance(module, str):
                continue
            note(text)
            ask = partial(answer, module=module)
            gone, fresh = answers.update(Changes(before, module, opcodes), ask)
            known.subtract(gone)
            known.update(fresh)
            expected = alone.pop(0)
            assert {said: count for said, count in known.items() if count} == Counter(
                answer(one, expected) for one in expected.instructions
            )
            before = module

    holds()


def test_many_answers_are_not_asked_for_again(pytestconfig: pytest.Config) -> None:
    """What the property above is tried on is what it is about."""
    asked = all_in_all = 0

    @tried(pytestconfig, share=10)
    @given(rows())
    def count(row: list[str]) -> None:
        nonlocal asked, all_in_all
        memo, before = Memo(), None
        opcodes = {"add", "negate", "copy", "fusion", "tuple", "get-tuple-element", "parameter"}
        answers: Answers[Answer] = Answers(opcodes)
        for text in row:
            module = read(text, memo)
            if isinstance(module, str):
                continue
            ask = partial(answer, module=module)
            _, fresh = answers.update(Changes(before, module, opcodes), ask)
            if before is not None:
                asked += len(fresh)
                all_in_all += sum(1 for _ in module.of_opcodes(opcodes))
            before = module

    count()
    assert all_in_all / 20 < asked < all_in_all * 0.7, (asked, all_in_all)
