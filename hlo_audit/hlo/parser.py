"""HLO text -> :class:`Module`.

XLA prints one instruction a line, nearly always in the same plain form. So the body of a
computation is read in one of two ways:

* plainly: one regular expression, ``_PLAIN_LINE``, takes all lines of a body apart at once;
* carefully, where a line is not plain: statement by statement, past any white space, comment,
  string and bracket. It also finds the place at which broken text breaks.

Both give the same six pieces for an instruction, and :func:`_assemble` makes the graph of them.
Attributes stay text until somebody asks for them.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hlo_audit.errors import ParseError
from hlo_audit.hlo.attributes import COMMENT, is_number, parse_operands
from hlo_audit.hlo.module import Computation, Instruction, Module, Pieces
from hlo_audit.hlo.scan import Unbalanced, end_of_brackets, end_of_item
from hlo_audit.hlo.shape import Shape, parse_shape

# `  ROOT %name = shape opcode(operands), attributes`: no bracket stands in the operands, and the
# shape is at most a tuple of arrays. Lines that do not start with two spaces continue the
# attributes (kernel metadata is printed with line breaks). Every repetition is possessive. A line
# break may slip into any piece here: to leave it out of each class would make the match twice as
# slow, and counting the line breaks afterwards tells as much.
_PLAIN_LINE = re.compile(
    r"\n  (ROOT )?%?([a-zA-Z0-9_.-]++) = "
    r"(\((?:[^()]++|\([^()]*+\))*+\)|[^ (][^ ]*+) "
    r"([a-z][a-z0-9-]*+)\(([^()]*+)\)"
    r"(.*+(?:\n(?!  ).*+)*+)"
)
_MODULE = re.compile(r"\s*+HloModule\s++([^\s,]++)")
_FRAME_TABLES = re.compile(
    r'(?:(?:FileNames|FunctionNames|FileLocations|StackFrames|\d++ ["{][^\n]*+)?\n)*+'
)
_PLAIN_HEADER = re.compile(r"(ENTRY )?%?([A-Za-z_][\w.-]*+)(?: \([^\n]*)? \{(?=\n)")
_COMPUTATION = re.compile(r"(ENTRY\s++)?%?([A-Za-z_][\w.-]*+)\s*+")
_INSTRUCTION = re.compile(r"(ROOT\s++)?%?([A-Za-z_0-9][\w.-]*+)\s*+=\s*+")
_OPCODE = re.compile(r"([a-z][\w-]*+)\s*+(?=\()")
_ARRAY = re.compile(
    r"[a-z][a-z0-9]*+\[[^\]\n]*+\](?:\{(?:[^{}\n]++|\{[^{}\n]*+\})*+\})?|b\([^()\n]*+(?:\([^()\n]*+\)[^()\n]*+)*+\)"
)
_SPACE = re.compile(r"(?:\s++|/\*(?:[^*]++|\*(?!/))*+\*/)*+")
_STRAY_INSTRUCTION = re.compile(r"\n[ \t]*+(?:ROOT )?%?[\w.-]++ = ")

# What may follow the brace that closes a body.
_AFTER_BODY = re.compile(r"[ \t]*+(?:\n|\Z|, execution_thread=)")

# The parentheses of these hold a number or a literal.
_NO_OPERANDS = frozenset({"parameter", "constant"})


Memo = dict[str, Computation]
"""Computations by their whole text, to be taken over by the next snapshot that holds the same."""


def parse_module(
    text: str, *, path: str | None = None, partial: bool = False, memo: Memo | None = None
) -> Module:
    """Read the text of one module, of any pass, backend and supported version.

    Args:
        text: a pass dump, or what ``compiled.as_text()`` gives.
        path: the file it came from, for errors.
        partial: where the text is broken or cut off, return the computations before the error, and
            the error as ``module.error``, in place of raising it.
        memo: the computations of the snapshot before, which are taken over where they stand again
            to the letter; holds those of this one afterwards.

    Raises:
        ParseError: with file, line and column, for text that is not one whole module.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    with _no_garbage_collection():
        return _Reader(text, path, partial, memo).read_module()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Spare the collector the graph that is being made: it grows, and nothing of it is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _BadInstructionError(Exception):
    """The instruction at ``index`` of a computation does not fit those before it."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class _Reader:
    """Reads one text from its start to its end."""

    def __init__(
        self, text: str, path: str | None, partial: bool, memo: Memo | None = None
    ) -> None:
        self.known = memo
        self.read: Memo = {}
        self.text = text
        self.path = path
        self.partial = partial
        self.computations: dict[str, Computation] = {}
        self.lines: dict[str, int] = {}
        self.entry_name: str | None = None
        self.shapes = _Shapes()
        # Up to where bodies are read carefully, so that no text is tried the plain way twice.
        self.careful_end = 0
        # The line at an offset, so that lines are counted forward and only once.
        self.counted_offset = 0
        self.counted_line = 1

    def read_module(self) -> Module:
        text = self.text
        start = _MODULE.match(text)
        if start is None:
            self.fail("this is not HLO text: it does not start with 'HloModule'", 0)
        header = tables = ""
        error: ParseError | None = None
        try:
            header_end = text.find("\n", start.end())
            if not text.startswith("\n\n", header_end):
                header_end = self.skip_header(start.end())
            header = text[start.end() : header_end]
            position = _end(_FRAME_TABLES, text, header_end)
            tables = text[header_end:position]
            while (position := self.skip_space(position)) < len(text):
                position = self.read_computation(position)
            if self.entry_name is None:
                self.fail("the text ends without an ENTRY computation", len(text))
        except ParseError as caught:
            if not self.partial:
                raise
            error = caught
        if self.known is not None:
            self.known.clear()
            self.known.update(self.read)
        entry_name = self.entry_name if self.entry_name in self.computations else None
        return Module(start[1], self.computations, entry_name, header, tables, error, self.lines)

    def skip_header(self, position: int) -> int:
        """Step over the rest of the header, which may go on inside brackets or after a comma."""
        text = self.text
        while True:
            position = self.end_of_item(position, "\n")
            next_line = self.skip_space(position)
            if next_line >= len(text) or "," not in (text[position - 1], text[next_line]):
                return position
            position = next_line

    def read_computation(self, position: int) -> int:
        """Read one computation; return where it ends."""
        text = self.text
        header = _PLAIN_HEADER.match(text, position) or _COMPUTATION.match(text, position)
        if header is None:
            self.fail("the header of a computation is expected here", position)
        name = header[2]
        if name in self.computations:
            self.fail(f"a second computation is called {name}", position)
        if header[1] is not None:
            if self.entry_name is not None:
                self.fail(f"a second ENTRY, {name}, after {self.entry_name}", position)
            self.entry_name = name
        self.lines[name] = self.line_at(position)
        computation = Computation(name)
        body = header.end() - 1
        if header.re is not _PLAIN_HEADER:
            body = self.skip_signature(header.end())
        if not text.startswith("{", body):
            self.fail(f"'{{' of computation {name} is expected here", body)
        end = None
        if body >= self.careful_end and text.startswith("\n", body + 1):
            end = self.read_plain_body(computation, position, body + 1)
        if end is None:
            end = self.read_careful_body(computation, body + 1)
        if text.startswith(",", end):  # }, execution_thread="sparsecore"
            end = self.end_of_item(end, "\n")
        self.computations.setdefault(name, computation)
        return end

    # -- the plain way

    def read_plain_body(self, computation: Computation, header: int, start: int) -> int | None:
        """Read a body of plain lines; return where it ends, or ``None`` if a line is not plain."""
        text = self.text
        end = text.find("\n}", start)
        # Kernel metadata has lines that start with a brace too; the body's own stands alone.
        while end >= 0 and not _AFTER_BODY.match(text, end + 2):
            end = text.find("\n}", end + 2)
        if end < 0:
            self.careful_end = len(text)
            return None
        if self.known is not None:
            whole = text[header:end]
            known = self.known.get(whole)
            if known is not None:
                self.read[whole] = self.computations[computation.name] = known
                return end + 2
        lines: list[Pieces] = _PLAIN_LINE.findall(text, start, end)
        line_breaks = text.count("\n", start, end)
        plain = len(lines) == line_breaks or _only_attributes_continue(lines, line_breaks)
        if plain:
            try:
                _assemble(computation, lines, self.shapes)
            except _BadInstructionError:
                plain = False  # to be found again, with its place, by the careful way
        if not plain:
            self.careful_end = end
            return None
        if self.known is not None:
            self.read[whole] = computation
        self.counted_line += line_breaks + text.count("\n", self.counted_offset, start)
        self.counted_offset = end
        return end + 2

    # -- the careful way

    def read_careful_body(self, computation: Computation, start: int) -> int:
        """Read a body statement by statement; return where it ends."""
        position = start
        statements: list[Pieces] = []
        starts = [start]
        try:
            while not self.text.startswith("}", position := self.skip_space(position)):
                if position >= len(self.text):
                    self.fail(f"the text ends inside computation {computation.name}", position)
                pieces, end = self.read_statement(position)
                statements.append(pieces)
                starts.append(position)
                position = end
        except ParseError:
            if self.partial and statements:
                self.assemble(computation, statements, starts)
                self.computations[computation.name] = computation
            raise
        self.assemble(computation, statements, starts)
        return position + 1

    def assemble(
        self, computation: Computation, statements: Sequence[Pieces], starts: Sequence[int]
    ) -> None:
        try:
            _assemble(computation, statements, self.shapes)
        except _BadInstructionError as error:
            if self.partial and error.index > 0:
                _assemble(computation, statements[: error.index], self.shapes)
                self.computations[computation.name] = computation
            self.fail(str(error), starts[error.index + 1])

    def read_statement(self, position: int) -> tuple[Pieces, int]:
        text = self.text
        start = _INSTRUCTION.match(text, position)
        if start is None:
            self.fail("an instruction, 'name = shape opcode(...)', is expected here", position)
        shape_end = self.skip_shape(start.end())
        opcode_start = self.skip_space(shape_end)
        opcode = _OPCODE.match(text, opcode_start)
        if opcode is None:
            self.fail("an opcode and '(' are expected here", opcode_start)
        close = self.end_of_brackets(opcode.end())
        end = self.skip_attributes(close)
        pieces = (
            start[1] or "",
            start[2],
            text[start.end() : shape_end],
            opcode[1],
            text[opcode.end() + 1 : close - 1],
            text[close:end].rstrip(),
        )
        return pieces, end

    def skip_attributes(self, position: int) -> int:
        """Step over ``, name=value`` as often as it stands there."""
        text = self.text
        while text.startswith(",", comma := self.skip_space(position)):
            position = self.end_of_item(self.skip_space(comma + 1), ",\n}")
        return position

    def skip_signature(self, position: int) -> int:
        """Step over ``(parameters) -> shape``, where they are printed."""
        if self.text.startswith("(", position):
            position = self.end_of_brackets(position)
        position = self.skip_space(position)
        if self.text.startswith("->", position):
            position = self.skip_shape(self.skip_space(position + 2))
        return self.skip_space(position)

    def skip_shape(self, position: int) -> int:
        if self.text.startswith("(", position):
            return self.end_of_brackets(position)
        array = _ARRAY.match(self.text, position)
        if array is None:
            self.fail("a shape is expected here", position)
        return array.end()

    # -- places in the text

    def skip_space(self, position: int) -> int:
        return _end(_SPACE, self.text, position)

    def end_of_item(self, start: int, stops: str) -> int:
        try:
            return end_of_item(self.text, start, len(self.text), stops)
        except Unbalanced as error:
            self.fail(error.reason, error.position)

    def end_of_brackets(self, start: int) -> int:
        try:
            return end_of_brackets(self.text, start)
        except Unbalanced as error:
            self.fail(error.reason, error.position)

    def line_at(self, position: int) -> int:
        if position < self.counted_offset:
            self.counted_offset, self.counted_line = 0, 1
        self.counted_line += self.text.count("\n", self.counted_offset, position)
        self.counted_offset = position
        return self.counted_line

    def fail(self, reason: str, position: int) -> NoReturn:
        if len(reason) > 160:  # a name can be a megabyte of damage
            reason = reason[:160] + "..."
        on_last_line = self.text.find("\n", position) < 0
        if self.text and on_last_line and not reason.startswith("the text"):
            reason += "; the text ends on this line, it may be cut off"
        column = position - self.text.rfind("\n", 0, position)
        raise ParseError(reason, line=self.line_at(position), column=column, path=self.path)


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where a pattern that matches the empty text too ends."""
    match = pattern.match(text, position)
    assert match is not None
    return match.end()


def _only_attributes_continue(lines: Sequence[Pieces], line_breaks: int) -> bool:
    """Whether all further line breaks stand inside attributes, and begin no instruction there."""
    continued = [pieces[5] for pieces in lines if "\n" in pieces[5]]
    inside = sum(text.count("\n") for text in continued)
    return len(lines) + inside == line_breaks and not any(
        _STRAY_INSTRUCTION.search(text) for text in continued
    )


class _Shapes(dict[str, Shape]):
    """Shapes by their text: a module has a few hundred of them, and many times as many lines."""

    def __missing__(self, text: str) -> Shape:
        shape = self[text] = parse_shape(text)
        return shape


def _assemble(computation: Computation, lines: Sequence[Pieces], shapes: _Shapes) -> None:
    """Make the instructions of ``computation`` out of their pieces, each with its operands.

    Raises:
        _BadInstructionError: for an instruction that does not fit those before it.
    """
    by_name: dict[str, Instruction] = {}
    find = by_name.__getitem__
    root: Instruction | None = None
    operands: tuple[Instruction, ...]
    # The innermost loop of the parser: it runs for every line of a dump.
    try:
        for index, pieces in enumerate(lines):
            is_root, name, shape_text, opcode, operand_text, _ = pieces
            try:
                if operand_text[:1] == "%":
                    # "%a, %b" falls apart into names; any other form does not, and is a KeyError.
                    operands = tuple(map(find, operand_text[1:].split(", %")))
                elif not operand_text or opcode in _NO_OPERANDS:
                    operands = ()
                else:
                    operands = _resolve_operands(operand_text, by_name, index)
            except KeyError:
                operands = _resolve_operands(operand_text, by_name, index)
            try:
                shape = shapes[shape_text]
            except ValueError as error:
                raise _BadInstructionError(index, f"{name}: {error}") from None
            by_name[name] = instruction = Instruction(computation, index, pieces, shape, operands)
            if is_root:
                root = instruction
    except _BadInstructionError as error:
        if len(by_name) < error.index:  # of two faults the first is told
            raise _second_of_a_name(lines) from None
        raise
    if not by_name:
        raise _BadInstructionError(-1, f"computation {computation.name} has no instructions")
    if len(by_name) != len(lines):
        raise _second_of_a_name(lines)
    computation._complete(by_name, root or instruction)


def _second_of_a_name(lines: Sequence[Pieces]) -> _BadInstructionError:
    seen: set[str] = set()
    for index, (_, name, *_) in enumerate(lines):
        if name in seen:
            return _BadInstructionError(index, f"a second instruction is called {name}")
        seen.add(name)
    raise AssertionError("every name is there once")


def _resolve_operands(
    text: str, by_name: Mapping[str, Instruction], index: int
) -> tuple[Instruction, ...]:
    """Find the operands that are not simply ``%a, %b``."""
    if not text.strip():
        return ()
    compact = _resolve_compact_operands(text, by_name)
    if compact is not None:
        return compact
    try:
        operands = parse_operands(text)
    except ValueError as error:
        raise _BadInstructionError(index, str(error)) from None
    resolved = []
    for name, tuple_index in operands:
        operand = by_name.get(name)
        if operand is None:
            reason = f"operand {name} is not defined before its use"
            raise _BadInstructionError(index, reason)
        if tuple_index:
            try:
                operand.shape.at(tuple_index)
            except IndexError:
                reason = f"{name} has no element {'#'.join(map(str, tuple_index))}"
                raise _BadInstructionError(index, reason) from None
        resolved.append(operand)
    return tuple(resolved)


def _resolve_compact_operands(
    text: str, by_name: Mapping[str, Instruction]
) -> tuple[Instruction, ...] | None:
    """``%a#1, /*index=5*/%b``, the common ones of the other forms; ``None`` for any other."""
    resolved = []
    for item in COMMENT.sub("", text).split(", "):
        name, sharp, element = item.partition("#")
        operand = by_name.get(name[1:])
        if operand is None or name[0] != "%":
            return None
        if sharp and not (is_number(element) and int(element) < len(operand.shape.elements)):
            return None
        resolved.append(operand)
    return tuple(resolved)
