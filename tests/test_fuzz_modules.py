"""Drawn HLO modules: read as they were drawn, and near misses of them refused at their place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn_hlo import HloModule, Line, Read, assert_read
from fuzz_cases import Drawn, files_written, hold, run_inside, tried
from hlo_audit.errors import ParseError
from hlo_audit.hlo import Memo, Shape, parse_module
from hlo_modules import Choices, Draw, modules, unused


def test_a_drawn_module_is_read_as_it_was_drawn(pytestconfig: pytest.Config) -> None:
    @tried(pytestconfig, share=30)
    @given(modules(), st.booleans(), st.booleans())
    def holds(drawn: HloModule, has_dos_lines: bool, partial: bool) -> None:
        text = drawn.text
        if has_dos_lines:
            text = text.replace("\n", "\r\n")
        assert_read(parse_module(text, partial=partial), drawn)

    holds()


# -- near misses


@dataclass(frozen=True)
class NearMiss:
    """A module with one fault.

    Attributes:
        whole: the module without it.
        line: of the fault in the text, counted from 1.
        column: of the fault; ``None`` where the reader may find it only behind, even lines later.
        said: what the error must say.
    """

    whole: HloModule
    text: str
    line: int
    column: int | None
    said: str


@st.composite
def near_misses(draw: Draw) -> NearMiss:
    whole = draw(modules())
    c = Choices(draw(st.binary(min_size=16, max_size=16)))
    number = c.number(0, len(whole.bodies) - 1)
    lines = list(whole.bodies[number].lines)
    place, said = c.choose(FAULTS)(lines, c)
    if said == BRACKET:  # inside brackets that are not closed, those in a comment count as well
        lines = [replace(line, oddity="") for line in lines]
    faulty = _with_lines(whole, number, lines)
    printed = faulty.printed()
    line, column = printed.starts[number][place]
    if said != BRACKET:
        return NearMiss(whole, printed.text, line, column, said)
    rows = printed.text.split("\n")
    start = sum(len(row) + 1 for row in rows[: line - 1]) + column - 1
    opened = printed.text.index(f" {lines[place].opcode}(", start) + len(lines[place].opcode) + 1
    if c.one_in(2):  # the parenthesis of the operands is not closed
        closed = printed.text.index(")", opened)
        text = printed.text[:closed] + printed.text[closed + 1 :]
        row = printed.text.count("\n", 0, opened) + 1
        at = opened - printed.text.rfind("\n", 0, opened)
        return NearMiss(whole, text, row, at, "'(' is not closed by ')'")
    text = f"{printed.text[:start]}{{{printed.text[start:]}"
    return NearMiss(whole, text, line, column, "")


def _with_lines(module: HloModule, number: int, lines: list[Line]) -> HloModule:
    bodies = list(module.bodies)
    bodies[number] = replace(bodies[number], lines=tuple(lines))
    return replace(module, bodies=tuple(bodies))


def undefined(lines: list[Line], c: Choices) -> tuple[int, str]:
    """An operand that no line defines, in the place of one or as the only one."""
    place = c.number(0, len(lines) - 1)
    name = unused("nobody", {line.name: line for line in lines})
    return _with_read(lines, place, Read(name), c), f"operand {name} is not defined"


def defined_later(lines: list[Line], c: Choices) -> tuple[int, str]:
    """A line that reads itself, or one behind it."""
    place = c.number(0, len(lines) - 1)
    name = lines[c.number(place, len(lines) - 1)].name
    return _with_read(lines, place, Read(name), c), f"operand {name} is not defined"


def second_of_a_name(lines: list[Line], c: Choices) -> tuple[int, str]:
    """A line, anywhere behind another, that has its name."""
    place = c.number(0, len(lines) - 1)
    name = lines[place].name
    at = c.number(place + 1, len(lines))
    lines.insert(at, Line(name, Shape("f32"), "constant", literal="0"))
    return at, f"a second instruction is called {name}"


def missing_element(lines: list[Line], c: Choices) -> tuple[int, str]:
    """An element that the tuple, or the element of its tuple, or the array, does not have."""
    place = c.number(0, len(lines) - 1)
    source = lines[place]
    shape = source.shape
    element: tuple[int, ...] = ()
    while shape.elements and c.one_in(2):
        index = c.number(0, len(shape.elements) - 1)
        shape, element = shape.elements[index], (*element, index)
    element = (*element, len(shape.elements) + c.choose((0, 0, 1, 90)))
    at = c.number(place + 1, len(lines))
    name = unused("reader", {line.name: line for line in lines})
    lines.insert(at, Line(name, Shape("f32"), "negate", (Read(source.name, element),)))
    return at, f"{source.name} has no element {'#'.join(map(str, element))}"


BRACKET = "bracket"


def open_bracket(lines: list[Line], c: Choices) -> tuple[int, str]:
    """A bracket too much before a line, or one too few behind its operands."""
    place = c.number(0, len(lines))
    name = unused("open", {line.name: line for line in lines})
    lines.insert(place, Line(name, Shape("f32"), "constant", literal="0"))
    return place, BRACKET


def _with_read(lines: list[Line], place: int, read: Read, c: Choices) -> int:
    line = lines[place]
    reads = list(line.reads) or [read]
    reads[c.number(0, len(reads) - 1)] = read
    opcode = line.opcode if line.opcode not in ("parameter", "constant") else "negate"
    lines[place] = replace(line, opcode=opcode, literal="", reads=tuple(reads))
    return place


FAULTS: tuple[Callable[[list[Line], Choices], tuple[int, str]], ...] = (
    *(undefined, defined_later, second_of_a_name, missing_element, open_bracket),
)


def refused(text: str, memo: Memo | None = None) -> ParseError:
    with pytest.raises(ParseError) as caught:
        parse_module(text, memo=memo)
    return caught.value


def test_a_near_miss_is_refused_at_its_line_and_column_alone_and_in_a_row(
    pytestconfig: pytest.Config,
) -> None:
    @tried(pytestconfig, share=30)
    @given(near_misses())
    def holds(drawn: NearMiss) -> None:
        error = refused(drawn.text)
        assert drawn.said in error.reason
        assert (error.line, error.column) == (drawn.line, drawn.column)
        memo = Memo()
        parse_module(drawn.whole.text, memo=memo)
        assert str(refused(drawn.text, memo)) == str(error)
        # What cannot be read leaves the row as it was.
        assert_read(parse_module(drawn.whole.text, memo=memo), drawn.whole)
        rest = parse_module(drawn.text, partial=True)
        assert str(rest.error) == str(error)
        whole = [body.name for body in drawn.whole.bodies]
        assert list(rest.computations) == whole[: len(rest.computations)]

    holds()


# -- through the command line


def checked(text: str, *options: str) -> Mapping[str, Any]:
    """The one program of a JSON report of the file that holds ``text``."""
    arguments = ["check", "step.txt", "--format", "json", *options]
    drawn = Drawn({"step.txt": text.encode()}, arguments)
    with files_written(drawn.files, kept=False):
        outcome = run_inside(drawn.arguments)
    hold(drawn, outcome)
    (program,) = json.loads(outcome.stdout)["programs"]
    assert outcome.code == (2 if "error" in program else 0), outcome.stderr
    assert isinstance(program, dict)
    return program


def test_a_drawn_module_is_audited(empty_repository: Path, pytestconfig: pytest.Config) -> None:
    @tried(pytestconfig, share=10)
    @given(modules(most_lines=16), st.booleans())
    def holds(drawn: HloModule, has_floor: bool) -> None:
        floor = () if has_floor else ("--rule-option", "relayout-copy.min_bytes=0")
        program = checked(drawn.text, *floor)
        assert "error" not in program
        assert program["module"] == drawn.name
        bodies = {body.name: {line.name for line in body.lines} for body in drawn.bodies}
        for finding in program["findings"]:
            assert finding["instruction"] in bodies[finding["computation"]]

    holds()


def test_a_near_miss_is_told_in_a_line(empty_repository: Path, pytestconfig: pytest.Config) -> None:
    @tried(pytestconfig, share=6)
    @given(near_misses())
    def holds(drawn: NearMiss) -> None:
        error = checked(drawn.text)["error"]
        assert error["kind"] == "parse"
        assert error["message"].startswith(f"step.txt:{drawn.line}:{drawn.column}: ")

    holds()
