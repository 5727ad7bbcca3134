"""Which questions are asked again after which changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hlo_audit.hlo import Instruction, Memo, Module, parse_module
from hlo_audit.hlo.answers import Answers
from hlo_audit.hlo.changes import Changes
from hlo_audit.hlo.module import kept_by_module

TEXT = """\
HloModule jit_f

%square (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} multiply(%x, %x)
}

%twice (v: f32[8]) -> f32[8] {
  %v = f32[8]{0} parameter(0)
  %w = f32[8]{0} add(%v, %v)
}

ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %negate = f32[8]{0} negate(%q)
  %copy = f32[8]{0} copy(%p)
  %add = f32[8]{0} add(%copy, %p)
  %fusion = f32[8]{0} fusion(%add), kind=kLoop, calls=%square
  %call = f32[8]{0} call(%fusion), to_apply=%twice
  ROOT %sum = f32[8]{0} add(%call, %negate)
}
"""

OTHER = parse_module(TEXT)


@kept_by_module
def copies(module: Module) -> int:
    return len(module.entry.of_opcodes(("copy",)))


Question = Callable[[Instruction, Module], object]

QUESTIONS: dict[str, Question] = {
    "its line": lambda one, _: (one.opcode, one.shape, one.attribute_text, one.custom_call_target),
    "its operands": lambda one, _: [operand.opcode for operand in one.operands],
    "its readers": lambda one, _: [user.opcode for user in one.users],
    "its uses": lambda one, _: [number for _, number in one.uses()],
    "whether it is the root": lambda one, _: one.is_root,
    "its place": lambda one, _: one.index,
    "its computation": lambda one, _: "negate" in one.computation,
    "its callers": lambda one, module: module.callers(one.computation),
    "whether it is fused": lambda one, module: module.is_fused(one.computation),
    "the root of what it calls": lambda one, module: [c.root.opcode for c in module.called(one)],
    "the parameters of that": lambda one, module: [len(c.parameters) for c in module.called(one)],
    "what it calls": lambda one, module: len(module.called(one)),
    "the module": lambda _, module: sum(1 for _ in module.of_opcodes(("copy",))),
    "all computations": lambda _, module: len(module.computations),
    "its rows": lambda one, _: len(one.computation.rows),
    "what is kept of the module": lambda _, module: copies(module),
    "another module": lambda _, module: [operand.operands for operand in OTHER.entry.root.operands],
}


def asked_again(question: str, opcode: str, *texts: str) -> list[list[str]]:
    """Who is asked in each further snapshot."""
    answers: Answers[object] = Answers((opcode,))
    memo, before = Memo(), None
    asked: list[list[str]] = []
    for text in texts:
        module = parse_module(text, memo=memo)
        names: list[str] = []

        def ask(one: Instruction, module: Module = module, names: list[str] = names) -> object:
            names.append(one.name)
            return QUESTIONS[question](one, module)

        answers.update(Changes(before, module, (opcode,)), ask)
        asked.append(names)
        before = module
    return asked[1:]


def edited(before: str, after: str) -> str:
    assert TEXT.count(before) == 1
    return TEXT.replace(before, after)


def moved(line: str, before: str) -> str:
    without = edited(f"  {line}\n", "")
    return without.replace(f"  {before}\n", f"  {line}\n  {before}\n")


COPY = "%copy = f32[8]{0} copy(%p)"
COPY_IN_S1 = edited(COPY, "%copy = f32[8]{0:S(1)} copy(%p)")
P_IN_S1 = edited("%p = f32[8]{0} parameter(0)", "%p = f32[8]{0:S(1)} parameter(0)")
READER_MORE = edited(COPY, f"{COPY}\n  %tanh = f32[8]{{0}} tanh(%copy)")
READER_LESS = edited("add(%copy, %p)", "add(%p, %p)")
NEGATE_MOVED = moved("%negate = f32[8]{0} negate(%q)", "ROOT %sum = f32[8]{0} add(%call, %negate)")
OTHER_KIND = edited("kind=kLoop", "kind=kOutput")
OTHER_CALL = edited("calls=%square", "calls=%twice")
OTHER_SQUARE = edited("multiply(%x, %x)", "add(%x, %x)")
PARAMETER_MORE = edited("multiply(%x, %x)", "multiply(%x, %x)").replace(
    "  %x = f32[8]{0} parameter(0)\n",
    "  %x = f32[8]{0} parameter(0)\n  %z = f32[8]{0} parameter(1)\n",
)
LAST_IS_ROOT = edited(
    "%w = f32[8]{0} add(%v, %v)", "%w = f32[8]{0} add(%v, %v)\n  %u = f32[8]{0} tanh(%w)"
)
SQUARE = TEXT[TEXT.index("%square (") : TEXT.index("%twice (")]
SQUARE_LAST = TEXT.replace(SQUARE, "").replace("ENTRY", SQUARE + "ENTRY")
WITHOUT_SQUARE = TEXT.replace(SQUARE, "")

CASES = [
    ("its line", "copy", TEXT, []),
    ("its line", "copy", COPY_IN_S1, ["copy"]),
    ("its line", "copy", P_IN_S1, []),
    ("its line", "copy", READER_MORE, []),
    ("its line", "add", COPY_IN_S1, []),
    ("its operands", "copy", P_IN_S1, ["copy"]),
    ("its operands", "add", COPY_IN_S1, ["add"]),
    ("its operands", "add", READER_MORE, []),
    ("its operands", "negate", COPY_IN_S1, []),
    ("its readers", "copy", READER_MORE, ["copy"]),
    ("its readers", "copy", READER_LESS, ["copy"]),
    ("its readers", "copy", P_IN_S1, []),
    ("its readers", "copy", OTHER_KIND, []),
    ("its readers", "negate", NEGATE_MOVED, ["negate"]),
    ("its uses", "copy", READER_MORE, ["copy"]),
    ("its uses", "copy", OTHER_KIND, []),
    ("whether it is the root", "copy", READER_MORE, []),
    ("whether it is the root", "add", LAST_IS_ROOT, ["w"]),
    ("its place", "copy", P_IN_S1, ["copy"]),
    ("its place", "multiply", P_IN_S1, []),
    ("its computation", "copy", P_IN_S1, ["copy"]),
    ("its computation", "multiply", P_IN_S1, []),
    ("its callers", "multiply", OTHER_KIND, ["y"]),
    ("its callers", "multiply", OTHER_CALL, ["y"]),
    ("its callers", "multiply", COPY_IN_S1, []),
    ("its callers", "multiply", SQUARE_LAST, ["y"]),
    ("whether it is fused", "multiply", OTHER_CALL, ["y"]),
    ("whether it is fused", "multiply", COPY_IN_S1, []),
    ("the root of what it calls", "fusion", OTHER_SQUARE, ["fusion"]),
    ("the root of what it calls", "fusion", COPY_IN_S1, []),
    ("the root of what it calls", "call", OTHER_SQUARE, []),
    ("the root of what it calls", "call", LAST_IS_ROOT, ["call"]),
    ("the parameters of that", "fusion", PARAMETER_MORE, ["fusion"]),
    ("the parameters of that", "fusion", OTHER_SQUARE, []),
    ("what it calls", "fusion", OTHER_SQUARE, []),
    ("what it calls", "fusion", WITHOUT_SQUARE, ["fusion"]),
    ("the module", "negate", OTHER_SQUARE, ["negate"]),
    ("the module", "negate", TEXT, []),
    ("all computations", "negate", OTHER_SQUARE, ["negate"]),
    ("its rows", "negate", COPY_IN_S1, ["negate"]),
    ("its rows", "negate", OTHER_SQUARE, []),
    ("what is kept of the module", "negate", COPY_IN_S1, ["negate"]),
    # Only the first of them finds it out.
    ("what is kept of the module", "add", COPY_IN_S1, ["add", "sum", "w"]),
    ("another module", "negate", COPY_IN_S1, []),
]


@pytest.mark.parametrize(
    ("question", "opcode", "text", "asked"),
    [pytest.param(*case, id=f"{case[0]}, {number}") for number, case in enumerate(CASES)],
)
def test_a_question_is_asked_again_where_what_it_looked_at_changed(
    question: str, opcode: str, text: str, asked: list[str]
) -> None:
    assert asked_again(question, opcode, TEXT, text) == [asked]
    assert asked_again(question, opcode, text, TEXT) == [asked]  # and on the way back


def test_who_is_new_is_asked_and_who_is_gone_is_not() -> None:
    without = edited(f"  {COPY}\n", "").replace("add(%copy, %p)", "add(%p, %p)")
    assert asked_again("its line", "copy", TEXT, without, TEXT) == [[], ["copy"]]


def test_answers_of_who_is_gone_and_of_who_is_asked_again_no_longer_hold() -> None:
    answers: Answers[str] = Answers(("copy", "add"))
    memo = Memo()
    first, second = parse_module(TEXT, memo=memo), parse_module(READER_LESS, memo=memo)

    def ask(one: Instruction) -> str:
        return f"{one.name}: {[operand.name for operand in one.operands]}"

    opcodes = ("copy", "add")
    gone, fresh = answers.update(Changes(None, first, opcodes), ask)
    assert (gone, sorted(fresh)) == (
        [],
        [
            *("add: ['copy', 'p']", "copy: ['p']", "sum: ['call', 'negate']", "w: ['v', 'v']"),
        ],
    )
    gone, fresh = answers.update(Changes(first, second, opcodes), ask)
    assert (gone, fresh) == (["add: ['copy', 'p']"], ["add: ['p', 'p']"])


def test_changes_are_told_of_snapshots_that_are_not_neighbours_too() -> None:
    """Where a version in between was read, all from the first other line to the last is fresh."""
    memo = Memo()
    texts = (TEXT, COPY_IN_S1, COPY_IN_S1.replace("add(%call, %negate)", "add(%negate, %call)"))
    first, _, third = (parse_module(text, memo=memo) for text in texts)
    changes = Changes(first, third, ("copy", "add", "negate"))
    fresh = {opcode: [row[1] for *_, row in rows] for opcode, rows in changes.fresh.items()}
    assert fresh == {"copy": ["%copy"], "add": ["%add", "%sum"]}
    assert changes.stale(("instruction", "main")) >= {"%copy", "%add", "%sum"}
    assert changes.stale(("instruction", "square")) == set()


def test_the_readers_in_a_later_version_are_in_its_order() -> None:
    memo = Memo()
    first = parse_module(TEXT, memo=memo)
    for one in first.entry.of_opcodes(("parameter", "copy", "add", "negate", "fusion", "call")):
        _ = one.users  # by so many questions all readers are known
    texts = {
        "one more before": edited(COPY, f"%tanh = f32[8]{{0}} tanh(%p)\n  {COPY}"),
        "one more behind": edited(COPY, f"{COPY}\n  %tanh = f32[8]{{0}} tanh(%p)"),
        "one less": edited("add(%copy, %p)", "add(%copy, %copy)"),
        "one in another place": moved("%add = f32[8]{0} add(%copy, %p)", COPY).replace(
            "add(%copy, %p)", "add(%p, %q)"
        ),
    }
    readers = {}
    for name, text in texts.items():
        later = parse_module(text, memo=memo)
        readers[name] = [user.name for user in later.entry["p"].users]
        assert [number for _, number in later.entry["p"].uses()] == [
            number
            for user in later.entry["p"].users
            for number, operand in enumerate(user.operands)
            if operand.name == "p"
        ]
    assert readers == {
        "one more before": ["tanh", "copy", "add"],
        "one more behind": ["copy", "tanh", "add"],
        "one less": ["copy"],
        "one in another place": ["add", "copy"],
    }
