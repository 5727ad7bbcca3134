"""HLO text -> :class:`Module`.

XLA prints one instruction a line, nearly always in the same plain form. So the body of a
computation is read in one of two ways:

* plainly: one regular expression, ``_PLAIN_LINE``, takes all lines of a body apart at once, but
  for those that the snapshot before has as well;
* carefully, where a line is not plain: statement by statement, past any white space, comment,
  string and bracket. It also finds the place at which broken text breaks.

Both give the same six pieces for an instruction, and :class:`_Assembly` makes the graph of them.
Attributes stay text until somebody asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from hlo_audit.errors import ParseError
from hlo_audit.hlo.attributes import is_number, parse_operands
from hlo_audit.hlo.body import NEXT_LINE, Hunk, end_of_body
from hlo_audit.hlo.collector import no_collection
from hlo_audit.hlo.memo import Memo, Place
from hlo_audit.hlo.module import Computation, Module
from hlo_audit.hlo.row import ATTRIBUTES, NAME, OPERANDS, READS, SHAPE, SHAPE_TEXT, Edit, Row
from hlo_audit.hlo.scan import Unbalanced, end_of_brackets, end_of_item
from hlo_audit.hlo.shape import Shape, parse_shape

# `  ROOT %name = shape opcode(operands), attributes`: no bracket stands in the operands, or one
# pair in another as in a complex constant, and no string; the shape is at most a tuple of tuples.
# Lines that start with no space continue the attributes: kernel metadata is printed with line
# breaks. Every repetition is possessive, and what is most common is tried first; the ASCII
# characters that are no bracket and no quotation mark are looked up faster than ruled out. A line
# break may slip into any piece here: to leave it out of each class would make the match twice as
# slow, and counting the breaks tells as much.
_PLAIN_LINE = re.compile(
    r"\n  (ROOT )?(%[a-zA-Z0-9_.-]++) = "
    r"([^ (][^ ]*+|\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\)) "
    r"""([a-z][a-z0-9-]*+)\(([\t !#-'*-~]*+|(?:[^()"]++|\([^()"]*+\))*+)\)"""
    r"(.*+(?:\n[^ \n].*+)*+)"
)
_MODULE = re.compile(r"\s*+HloModule\s++([^\s,]++)")
_FRAME_TABLES = re.compile(
    r'(?:\d++ ["{].*+\n|(?:FileNames|FunctionNames|FileLocations|StackFrames)?\n)*+'
)
_PLAIN_HEADER = re.compile(r"(ENTRY )?%?([A-Za-z_][\w.-]*+)(?: \([^\n]*)? \{(?=\n)")
_COMPUTATION = re.compile(r"(ENTRY\s++)?%?([A-Za-z_][\w.-]*+)\s*+")
_INSTRUCTION = re.compile(r"(ROOT\s++)?%?([A-Za-z_0-9][\w.-]*+)\s*+=\s*+")
_OPCODE = re.compile(r"([a-z][\w-]*+)\s*+(?=\()")
_ARRAY = re.compile(
    r"[a-z][a-z0-9]*+\[[^\]\n]*+\](?:\{(?:[^{}\n]++|\{[^{}\n]*+\})*+\})?|b\([^()\n]*+(?:\([^()\n]*+\)[^()\n]*+)*+\)"
)
_SPACE = re.compile(r"(?:\s++|/\*(?:[^*]++|\*(?!/))*+\*/)*+")
_STRAY_INSTRUCTION = re.compile(r"\n[^\S\n]*+(?:ROOT\s++)?%?[\w.-]++\s*+=")

# Printed before every fifth operand.
_INDEX_COMMENT = re.compile(r"/\*index=\d++\*/")

# The parentheses of these hold a number or a literal.
_NO_OPERANDS = frozenset({"parameter", "constant"})

Pieces = tuple[str, str, str, str, str, str]
"""The text of an instruction in pieces, as in a :data:`Row`."""


def parse_module(
    text: str, *, path: str | None = None, partial: bool = False, memo: Memo | None = None
) -> Module:
    """Read the text of one module, of any pass, backend and supported version.

    Args:
        text: a pass dump, or what ``compiled.as_text()`` gives.
        path: the file it came from, for errors.
        partial: where the text is broken or cut off, return the computations before the error, and
            the error as ``module.error``, in place of raising it.
        memo: the snapshot before, whose computations are taken over where they stand again to the
            letter, or the whole of it; holds this one afterwards.

    Raises:
        ParseError: with file, line and column, for text that is not one whole module.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if memo is not None and (known := memo.module_of(text)) is not None:
        return known
    with no_collection():
        return _Reader(text, path, partial, memo).read_module()


class _Reader:
    """Reads one text from its start to its end."""

    def __init__(
        self, text: str, path: str | None, partial: bool, memo: Memo | None = None
    ) -> None:
        self.memo = memo
        self.before = memo or Memo()
        # The place in the snapshot before of the computation that is expected next.
        self.expected = 0
        self.places: list[Place | None] = []
        self.offsets: list[int] = []
        self.lines: dict[str, int] = {}
        self.text = text
        self.path = path
        self.partial = partial
        self.computations: dict[str, Computation] = {}
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
            known = self.before.tables
            position = header_end + len(known) * text.startswith(known, header_end)
            position = _end(_FRAME_TABLES, text, position)
            tables = text[header_end:position]
            while (position := self.skip_space(position)) < len(text):
                position = self.read_computation(position)
            if self.entry_name is None:
                self.fail("the text ends without an ENTRY computation", len(text))
        except ParseError as caught:
            if not self.partial:
                raise
            error = caught
        entry_name = self.entry_name if self.entry_name in self.computations else None
        module = Module(start[1], self.computations, entry_name, header, tables, error, self.lines)
        # A text that is cut off at its last brace, or broken, is no help to read the next.
        if self.memo is not None and error is None and text.endswith("\n"):
            self.memo.remember(text, module, [*self.offsets, len(text)], self.places)
        return module

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
        """Read one computation, or step over some that are known; return where they end."""
        # The ones expected are tried first: they are found without a look at their headers.
        if self.before.names and (end := self.step_over_known(position, self.expected)) is not None:
            return end
        header = _PLAIN_HEADER.match(self.text, position) or _COMPUTATION.match(self.text, position)
        if header is None:
            self.fail("the header of a computation is expected here", position)
        name, is_entry = header[2], header[1] is not None
        place_before = self.before.index_of(name)
        if place_before is not None:
            end = self.step_over_known(position, place_before)
            if end is not None:
                return end
            self.expected = place_before + 1
        if name in self.computations:
            self.fail(f"a second computation is called {name}", position)
        if is_entry:
            if self.entry_name is not None:
                self.fail(f"a second ENTRY, {name}, after {self.entry_name}", position)
            self.entry_name = name
        self.lines[name] = self.line_at(position)
        computation = Computation(name)
        end, body = self.read_body(computation, header, position)
        self.computations[name] = computation
        self.places.append(body)
        self.offsets.append(position)
        if self.text.startswith(",", end):  # }, execution_thread="sparsecore"
            end = self.end_of_item(end, "\n")
        return end

    def step_over_known(self, position: int, first: int) -> int | None:
        """Take over the computations from ``first`` on that stand at ``position`` as well.

        Returns:
            where the last of them ends; ``None`` where not even the first stands there, or one is
            the second of its name or a second entry.
        """
        before = self.before
        last = before.run(self.text, position, first)
        if last == first:
            return None
        taken = dict(zip(before.names[first:last], before.computations[first:last], strict=True))
        entry = before.entry_name if before.entry_name in taken else None
        second_entry = entry is not None and self.entry_name is not None
        if second_entry or not self.computations.keys().isdisjoint(taken):
            return None
        self.computations |= taken
        self.entry_name = self.entry_name or entry
        self.places += before.places[first:last]
        shift = position - before.offsets[first]
        self.offsets += [offset + shift for offset in before.offsets[first:last]]
        line_shift = self.line_at(position) - before.lines[first]
        lines = [line + line_shift for line in before.lines[first:last]]
        self.lines |= zip(taken, lines, strict=True)
        end = before.offsets[last] + shift
        if last < len(before.names):
            self.counted_offset, self.counted_line = end, before.lines[last] + line_shift
        self.expected = last
        return end

    def read_body(
        self, computation: Computation, header: re.Match[str], start: int
    ) -> tuple[int, Place | None]:
        """Read what follows the name of a computation that begins at ``start``.

        Returns:
            where its closing brace ends, and where its lines are, if they are all plain.
        """
        text = self.text
        body = header.end() - 1
        if header.re is not _PLAIN_HEADER:
            body = self.skip_signature(header.end())
        if not text.startswith("{", body):
            self.fail(f"'{{' of computation {computation.name} is expected here", body)
        first = body + 1
        if body >= self.careful_end and text.startswith("\n", first):
            end, continued = self.read_plain_body(computation, first)
            if continued is not None:
                remembered = self.memo is not None
                place = Place(first - start, end - start, continued) if remembered else None
                return end + 2, place
            # What does not fit is found again, with its place, by the careful way.
            self.careful_end = end
        return self.read_careful_body(computation, first), None

    # -- the plain way

    def read_plain_body(self, computation: Computation, start: int) -> tuple[int, int | None]:
        """Read a body of plain lines.

        Returns:
            where it ends, and how many of its lines continue one above: ``None`` where a line is
            not plain, or does not fit those above it.
        """
        text = self.text
        before = self.before.body_of(computation.name)
        hunks: Sequence[Hunk] = ()
        if before is None or not text.startswith(NEXT_LINE, start):
            end = end_of_body(text, start)
        else:
            hunks, end = before.compare(text, start)
        if end < 0:
            return len(text), None
        assembly = _Assembly(self.shapes)
        try:
            if not hunks:
                assembly.add_plain(text[start:end])
            for hunk in hunks:
                assembly.add_hunk(hunk)
            rows = assembly.finish()
        except ValueError:
            return end, None
        if not rows:
            return end, None
        namesake = before.computation if before is not None and hunks else None
        computation._complete(rows, namesake, assembly.edits)
        continued = assembly.continued
        if before and before.continued:
            continued = text.count("\n", start, end) - len(rows)
        self.counted_line = self.line_at(start) + len(rows) + continued + 1
        self.counted_offset = end + 2
        return end, continued

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
        if not statements:
            self.fail(f"computation {computation.name} has no instructions", start)
        self.assemble(computation, statements, starts)
        return position + 1

    def assemble(
        self, computation: Computation, statements: Sequence[Pieces], starts: Sequence[int]
    ) -> None:
        assembly = _Assembly(self.shapes)
        try:
            assembly.add(statements)
            computation._complete(assembly.finish())
        except ValueError as error:
            # Of two faults the first is told.
            reason, index = str(error), len(assembly.rows)
            if second := assembly.second_of_a_name():
                name, index = second
                reason = f"a second instruction is called {name}"
            if self.partial and index > 0:
                computation._complete(assembly.rows[:index])
                self.computations[computation.name] = computation
            self.fail(reason, starts[index + 1])

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
            "%" + start[2],
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


class _Shapes(dict[str, Shape]):
    """Shapes by their text: a module has a few hundred of them, and many times as many lines."""

    def __missing__(self, text: str) -> Shape:
        shape = self[text] = parse_shape(text)
        return shape


class _Assembly:
    """The rows of one computation, made in the order of its text.

    Attributes:
        rows: those so far.
        continued: how many of their lines continue one above, in what was added as plain text.
        edits: in what they differ from those of the body before, as far as hunks were added.
    """

    __slots__ = (
        *("_by_name", "_rows_before", "_shapes", "_suspects"),
        *("continued", "edits", "rows"),
    )

    def __init__(self, shapes: _Shapes) -> None:
        self.rows: list[Row] = []
        self.continued = 0
        self.edits: list[Edit] = []
        self._rows_before = 0
        self._by_name: dict[str, Row] = {}
        self._shapes = shapes
        self._suspects: set[str] = set()

    def add(self, lines: Iterable[Pieces]) -> None:
        """Resolve the shapes and operands of further instructions.

        Raises:
            ValueError: for the first that does not fit those above it; it is not among the rows.
        """
        rows, by_name, shapes = self.rows, self._by_name, self._shapes
        operands: tuple[str, ...]
        # The innermost loop of the parser: it runs for every line of a snapshot.
        for root, name, shape_text, opcode, operand_text, attributes in lines:
            try:
                shape = shapes[shape_text]
            except ValueError as error:
                raise ValueError(f"{name[1:]}: {error}") from None
            try:
                if opcode in _NO_OPERANDS:
                    operands = ()
                elif ", " in operand_text:
                    # "%a, %b" falls apart into names; any other form does not, and is a KeyError.
                    items = operand_text.split(", ")
                    operands = tuple([by_name[operand][NAME] for operand in items])
                else:
                    operands = (by_name[operand_text][NAME],)
            except KeyError:
                operands = _resolve_operands(operand_text, by_name)
            row = (root, name, shape_text, opcode, operand_text, attributes, shape, operands)
            rows.append(row)
            by_name[name] = row

    def add_plain(self, text: str) -> None:
        """Add the instructions of plain lines.

        Raises:
            ValueError: if one is not plain, or does not fit those above it.
        """
        line_breaks = text.count("\n")
        lines: list[Pieces] = _PLAIN_LINE.findall(text)
        if len(lines) != line_breaks:
            self.continued += line_breaks - len(lines)
            attributes = [pieces[ATTRIBUTES] for pieces in lines if "\n" in pieces[ATTRIBUTES]]
            # All further line breaks stand inside attributes, and begin no instruction there.
            inside = sum(one.count("\n") for one in attributes)
            stray = any(map(_STRAY_INSTRUCTION.search, attributes))
            if len(lines) + inside != line_breaks or stray:
                raise ValueError("a line is not plain")
        self.add(lines)

    def add_hunk(self, hunk: Hunk) -> None:
        """Add the instructions of a hunk that are new, and those that the body before has as well.

        Raises:
            ValueError: as :meth:`add_plain`.
        """
        first = len(self.rows)
        self.add_plain(hunk.text)
        gone = slice(self._rows_before, self._rows_before + len(hunk.gone))
        if hunk.gone or hunk.text:
            self.edits.append(Edit(gone, slice(first, len(self.rows))))
        self._rows_before = gone.stop + len(hunk.rows)
        # What reads one that is gone may read nothing now, or an element that a tuple has no more.
        for row in hunk.gone:
            here = self._by_name.get(row[NAME])
            if here is None or here[SHAPE_TEXT] != row[SHAPE_TEXT]:
                self._suspects.add(row[NAME])
        self.rows += hunk.rows
        self._by_name.update(zip(hunk.names, hunk.rows, strict=True))
        if self._suspects:
            is_clear = self._suspects.isdisjoint
            for row in [row for row in hunk.rows if not is_clear(row[READS])]:
                _resolve_operands(row[OPERANDS], self._by_name)

    def finish(self) -> list[Row]:
        """The rows.

        Raises:
            ValueError: where two have one name.
        """
        if len(self._by_name) != len(self.rows):
            raise ValueError("two instructions have one name")
        return self.rows

    def second_of_a_name(self) -> tuple[str, int] | None:
        """The first instruction that is called as one above it: the name, and its index."""
        seen: set[str] = set()
        for index, row in enumerate(self.rows):
            if row[NAME] in seen:
                return row[NAME][1:], index
            seen.add(row[NAME])
        return None


def _resolve_operands(text: str, defined: Mapping[str, Row]) -> tuple[str, ...]:
    """Find the operands that are not simply ``%a, %b``: the ``%name`` of each.

    Raises:
        ValueError: for an operand that is not defined, or an element that a tuple does not have.
    """
    if not text.strip():
        return ()
    compact = _resolve_compact_operands(text, defined)
    if compact is not None:
        return compact
    resolved = []
    for name, tuple_index in parse_operands(text):
        operand = defined.get("%" + name)
        if operand is None:
            raise ValueError(f"operand {name} is not defined before its use")
        if tuple_index:
            try:
                operand[SHAPE].at(tuple_index)
            except IndexError:
                element = "#".join(map(str, tuple_index))
                raise ValueError(f"{name} has no element {element}") from None
        resolved.append(operand[NAME])
    return tuple(resolved)


def _resolve_compact_operands(text: str, defined: Mapping[str, Row]) -> tuple[str, ...] | None:
    """``%a#1, /*index=5*/%b``, the common ones of the other forms; ``None`` for any other."""
    resolved = []
    items = _INDEX_COMMENT.sub("", text) if "/" in text else text
    for item in items.split(", "):
        operand = defined.get(item)
        if operand is None:
            name, sharp, element = item.partition("#")
            operand = defined.get(name)
            if operand is None:
                return None
            if sharp and not (is_number(element) and int(element) < len(operand[SHAPE].elements)):
                return None
        resolved.append(operand[NAME])
    return tuple(resolved)
