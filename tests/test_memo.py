"""Reading a snapshot beside the one before gives what reading it alone gives, whatever changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hlo_audit.errors import ParseError
from hlo_audit.hlo import Memo, Module, parse_module

ONE = """\
HloModule jit_step

%small (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%body (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %a = f32[8]{0} add(%q, %q)
  %b = f32[8]{0} multiply(%a, %q)
  %c = f32[8]{0} subtract(%b, %a)
  ROOT %d = f32[8]{0} fusion(%c), kind=kLoop, calls=%small
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %call = f32[8]{0} call(%x), to_apply=%body
}

"""


def graph(module: Module) -> object:
    """All that a module holds, by name."""
    return (
        module.name,
        module.entry_name,
        dict(module.lines),
        [
            (
                computation.name,
                computation.root.name,
                [
                    (i.text, i.index, [o.name for o in i.operands], [u.name for u in i.users])
                    for i in computation
                ],
                all(i.computation is computation for i in computation),
            )
            for computation in module.computations.values()
        ],
    )


def read(text: str, memo: Memo | None = None) -> object:
    try:
        return graph(parse_module(text, memo=memo))
    except ParseError as error:
        return str(error)


CHANGES = {
    "nothing": lambda text: text,
    "a line in the middle": lambda text: text.replace("multiply(%a, %q)", "divide(%a, %q)"),
    "the first line": lambda text: text.replace("%q = f32[8]{0} p", "%q = f32[8]{0:T(256)} p"),
    "the last line": lambda text: text.replace("fusion(%c)", "fusion(%b)"),
    "a line more": lambda text: text.replace(
        "  %c = ", "  %new = f32[8]{0} negate(%b)\n  %c = "
    ).replace("subtract(%b", "subtract(%new"),
    "a line less": lambda text: text.replace("  %b = f32[8]{0} multiply(%a, %q)\n", "").replace(
        "subtract(%b", "subtract(%a"
    ),
    "lines in several places": lambda text: (
        text.replace("%a = f32[8]{0} add", "%a = f32[8] add")
        .replace("  %c = ", "  %new = f32[8]{0} negate(%b)\n  %c = ")
        .replace("fusion(%c)", "fusion(%a)")
    ),
    "lines in another order": lambda text: text.replace(
        "  %b = f32[8]{0} multiply(%a, %q)\n  %c = f32[8]{0} subtract(%b, %a)\n",
        "  %c = f32[8]{0} subtract(%a, %a)\n  %b = f32[8]{0} multiply(%a, %q)\n",
    ),
    "a definition behind its use": lambda text: text.replace(
        "  %b = f32[8]{0} multiply(%a, %q)\n  %c = f32[8]{0} subtract(%b, %a)\n",
        "  %c = f32[8]{0} subtract(%b, %a)\n  %b = f32[8]{0} multiply(%a, %q)\n",
    ),
    "an element of a tuple": lambda text: text.replace(
        "%a = f32[8]{0} add(%q, %q)", "%a = (f32[8]{0}, f32[8]{0}) custom-call(%q)"
    ).replace("subtract(%b, %a)", "subtract(%b, %a#1)"),
    "an element of a shorter tuple": lambda text: text.replace(
        "%a = f32[8]{0} add(%q, %q)", "%a = (f32[8]{0}) custom-call(%q)"
    ).replace("subtract(%b, %a)", "subtract(%b, %a#1)"),
    "no lines": lambda text: text.replace(text[text.index("  %q") : text.index("}\n\nENTRY")], ""),
    "a thread": lambda text: text.replace("}\n\nENTRY", '}, execution_thread="main"\n\nENTRY'),
    "an operand that is gone": lambda text: text.replace("  %b = f32[8]{0} multiply(%a, %q)\n", ""),
    "an operand before its definition": lambda text: text.replace("add(%q, %q)", "add(%q, %c)"),
    "a name that is there twice": lambda text: text.replace("  %c = ", "  %a = "),
    "two computations the other way round": lambda text: (
        text.replace("%small (p", "%later (p")
        .replace("calls=%small", "calls=%later")
        .replace("%later (p", "%small (p")
    ),
    "a computation moved to the end": lambda text: (
        text[: text.index("%small")]
        + text[text.index("%body") :]
        + text[text.index("%small") : text.index("%body")]
    ),
    "a computation that is there twice": lambda text: text.replace(
        "ENTRY", text[text.index("%small") : text.index("%body")] + "ENTRY"
    ),
    "another entry": lambda text: text.replace("ENTRY %main", "%main").replace(
        "%body (q", "ENTRY %body (q"
    ),
    "two entries": lambda text: text.replace("%body (q", "ENTRY %body (q"),
    "lines before it": lambda text: text.replace("jit_step\n", 'jit_step\n\nFileNames\n1 "a"\n', 1),
    "a brace on a line of its own, inside": lambda text: text.replace(
        "negate(%p)", 'negate(%p), frontend_attributes={kernel={\n"a":"{\\n"\n}}'
    ),
    "a line that goes on": lambda text: text.replace(
        "multiply(%a, %q)", 'multiply(%a, %q), metadata={op_name="a\nb"}'
    ),
    "a complex constant": lambda text: text.replace(
        "%b = f32[8]{0} multiply(%a, %q)",
        "%k = c64[] constant((0, 1))\n  %b = f32[8]{0} negate(%a)",
    ),
    "a comment": lambda text: text.replace("multiply(", "/* as it was */ multiply("),
    "letters beyond ASCII": lambda text: text.replace(
        "multiply(%a, %q)", 'multiply(%a, %q), metadata={op_name="größe/ä"}'
    ),
    "other letters beyond ASCII": lambda text: text.replace(
        "multiply(%a, %q)", 'multiply(%a, %q), metadata={op_name="größe/é"}'
    ),
    "half a letter": lambda text: text.replace(
        "multiply(%a, %q)", 'multiply(%a, %q), metadata={op_name="gr\udcc3"}'
    ),
    "no percent signs": lambda text: text.replace("%", ""),
    "cut off": lambda text: text[: text.index("ROOT %d")],
    "cut off behind a brace": lambda text: text[: text.index("\n\n%body")],
    "no end of line": lambda text: text.rstrip("\n"),
}


def test_the_same_text_again_is_the_same_module() -> None:
    memo = Memo()
    first = parse_module(ONE, memo=memo)
    assert parse_module(ONE, memo=memo) is first
    other = parse_module(ONE.replace("negate", "tanh"), memo=memo)
    assert other is not first
    assert parse_module(ONE, memo=memo) is not first  # only the one before is remembered


@pytest.mark.parametrize("second", CHANGES)
@pytest.mark.parametrize("first", CHANGES)
def test_a_changed_snapshot_reads_as_it_does_alone(first: str, second: str) -> None:
    memo = Memo()
    for text in (ONE, CHANGES[first](ONE), CHANGES[second](ONE), ONE):
        assert read(text, memo) == read(text)


def test_what_did_not_change_is_shared() -> None:
    memo = Memo()
    before = parse_module(ONE, memo=memo)
    after = parse_module(CHANGES["a line in the middle"](ONE), memo=memo)
    shared = {name for name, c in after.computations.items() if before.computations[name] is c}
    assert shared == {"small", "main"}


def test_real_snapshots_with_lines_lost_doubled_and_moved_read_as_they_do_alone(
    dumps: Callable[[str], Path],
) -> None:
    path = next(
        iter(sorted(dumps("lm_head_versions").glob("jax-0.12*-explicit/*after_codegen.txt")))
    )
    lines = path.read_text().split("\n")
    chance = random.Random(0)
    memo = Memo()
    for _ in range(60):
        changed = list(lines)
        for _ in range(chance.randrange(4)):
            place, other = chance.randrange(len(changed)), chance.randrange(len(changed))
            match chance.randrange(3):
                case 0:
                    del changed[place]
                case 1:
                    changed.insert(other, changed[place])
                case 2:
                    changed[place], changed[other] = changed[other], changed[place]
        text = "\n".join(changed)
        assert read(text, memo) == read(text)
