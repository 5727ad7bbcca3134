"""The IR: modules, computations and instructions of HLO, as they stand in one pass snapshot.

Objects are read-only and know their neighbours: an instruction its operands and users, a
computation its callers. Nothing here reads HLO text but the attributes of single instructions,
which are parsed when they are first asked for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ref

from hlo_audit.errors import ParseError
from hlo_audit.hlo import attributes as read
from hlo_audit.hlo import lookups
from hlo_audit.hlo.attributes import Metadata, Sharding
from hlo_audit.hlo.calls import Call, Calls, called_by
from hlo_audit.hlo.frames import FrameTables, SourceLocation
from hlo_audit.hlo.readers import ElementUses, Readers, find_readers, update_readers
from hlo_audit.hlo.row import (
    ATTRIBUTES,
    NAME,
    OPCODE,
    OPERANDS,
    READS,
    ROOT,
    SHAPE,
    Edit,
    Row,
    edits_between,
)
from hlo_audit.hlo.shape import Shape, parse_shape

if TYPE_CHECKING:
    import pandas

_Found = TypeVar("_Found")

_FEW_OPERANDS = 8
_FEW_USES = 32

# Of a computation whose readers are asked for oftener than this, all of them are looked up at once.
_FEW_QUESTIONS = 4

# The compiler's marker for a cost that it does not know is close to the largest int64.
_UNKNOWN_CYCLES = 1e18

_name_of = itemgetter(NAME)

_FIRST_TARGET = re.compile(r', custom_call_target="([^"\\]*+)"(?=,|$)').match

_INDEX = r"\{((?:\d{1,18}+(?:,\s*+|(?=\})))*+)\}"
_ALIAS = re.compile(rf"{_INDEX}:\s*+\((\d{{1,18}}+),\s*+{_INDEX}(?:,\s*+([a-z-]++))?\)")


class Value(NamedTuple):
    """What an operand reads: the result of ``instruction``, or one element of its tuple."""

    instruction: Instruction
    tuple_index: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        return self.instruction.shape.at(self.tuple_index)


class Alias(NamedTuple):
    """An output that shares the buffer of a parameter (a donated argument)."""

    output_index: tuple[int, ...]
    parameter_number: int
    parameter_index: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """The shapes and layouts in which the entry computation takes and returns its arrays."""

    parameters: tuple[Shape, ...]
    result: Shape


class Instruction:
    """One instruction; equal only to itself."""

    # A large module has 100,000 of them: few slots, and no __init__; see Computation._make.
    __slots__ = (
        *("_attributes", "_computation", "_index", "_operands", "_row"),
        "_wide_operand_values",
    )

    _attributes: Mapping[str, str]
    _computation: Computation
    _index: int
    _operands: tuple[Instruction, ...] | None
    _row: Row
    _wide_operand_values: tuple[Value, ...]

    # -- what every instruction has

    @property
    def name(self) -> str:
        """Its name, without the ``%``; unique within the computation."""
        return self._row[NAME][1:]

    @property
    def opcode(self) -> str:
        return self._row[OPCODE]

    @property
    def shape(self) -> Shape:
        return self._row[SHAPE]

    @property
    def computation(self) -> Computation:
        return self._computation

    @property
    def index(self) -> int:
        """Its place in the computation; in a scheduled module, its place in the schedule."""
        self._computation._note_all()
        return self._index

    @property
    def is_root(self) -> bool:
        if lookups.recording is not None:
            lookups.recording.instructions[self._computation].add(self._row[NAME])
        return self._computation._root_index == self._index

    @property
    def operands(self) -> tuple[Instruction, ...]:
        """The instructions that it reads, in order."""
        if lookups.recording is not None:
            lookups.recording.instructions[self._computation].update(self._row[READS])
        operands = self._operands
        if operands is None:
            operands = self._operands = self._computation._of_names(self._row[READS])
        return operands

    @property
    def operand_count(self) -> int:
        """How many operands it has; makes none of them."""
        return len(self._row[READS])

    @property
    def operand_values(self) -> tuple[Value, ...]:
        """The operands with the tuple element that each reads (``%fusion.3#1``)."""
        if len(self._row[READS]) <= _FEW_OPERANDS:
            return self._make_operand_values()
        if lookups.recording is not None:
            lookups.recording.instructions[self._computation].update(self._row[READS])
        # The tuple of a loop has thousands, and is asked for each of them.
        try:
            return self._wide_operand_values
        except AttributeError:
            self._wide_operand_values = self._make_operand_values()
            return self._wide_operand_values

    def read_index(self, number: int) -> tuple[int, ...]:
        """The tuple element that an operand reads, ``()`` for all of it."""
        if "#" not in self._row[OPERANDS]:
            return ()
        return self.operand_values[number].tuple_index

    def _make_operand_values(self) -> tuple[Value, ...]:
        operands, text = self.operands, self._row[OPERANDS]
        if "#" not in text or not operands:
            return tuple(map(Value, operands))
        return tuple(
            Value(operand, index)
            for operand, (_, index) in zip(operands, read.parse_operands(text), strict=True)
        )

    @property
    def users(self) -> tuple[Instruction, ...]:
        """The instructions of the same computation that read it, each once, in order."""
        return self._computation.users_of(self)

    def uses(self, element: int | None = None) -> Sequence[tuple[Instruction, int]]:
        """Each operand of the same computation that reads it: the user and the operand's place, in
        order.

        Args:
            element: leave out those that read only another element of its tuple.
        """
        return self._computation.uses_of(self, element)

    @property
    def literal(self) -> str:
        """What stands between the parentheses, as printed: the value of a ``constant``."""
        return self._row[OPERANDS]

    @property
    def parameter_number(self) -> int | None:
        """The number of a ``parameter``; ``None`` for every other opcode."""
        text = self._row[OPERANDS].strip()
        return int(text) if self._row[OPCODE] == "parameter" and read.is_number(text) else None

    # -- attributes

    @property
    def attributes(self) -> Mapping[str, str]:
        """Every attribute as printed, by name."""
        try:
            return self._attributes
        except AttributeError:
            self._attributes = read.split_attributes(self._row[ATTRIBUTES])
            return self._attributes

    @property
    def attribute_text(self) -> str:
        """Every attribute as printed, from the comma on."""
        return self._row[ATTRIBUTES]

    def _attribute(self, name: str) -> str | None:
        """One attribute as printed; text that does not hold its name is not taken apart."""
        return self.attributes.get(name) if name in self._row[ATTRIBUTES] else None

    @property
    def metadata(self) -> Metadata:
        text = self._attribute("metadata")
        return read.parse_metadata(text) if text else Metadata()

    @property
    def op_name(self) -> str:
        """The JAX operation or argument it comes from, such as ``jit(step)/dot_general``."""
        return self.metadata.op_name

    @property
    def custom_call_target(self) -> str:
        """The target of a ``custom-call``; ``""`` for every other opcode."""
        if self._row[OPCODE] != "custom-call":
            return ""
        # XLA prints it first: the others need not be read for it.
        if first := _FIRST_TARGET(self._row[ATTRIBUTES]):
            return first[1]
        return read.unquote(self.attributes.get("custom_call_target", ""))

    @property
    def called_names(self) -> tuple[str, ...]:
        """The names of the computations that it calls: fusion, while, call, reduce, async, ..."""
        return read.called_names(self._row[ATTRIBUTES])

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The ``dimensions`` attribute; ``()`` where it has none, or no list of numbers."""
        try:
            return read.parse_integers(self.attributes.get("dimensions", ""))
        except ValueError:
            return ()

    @property
    def sharding(self) -> Sharding | None:
        text = self._attribute("sharding")
        return read.parse_sharding(text) if text else None

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """The backend's settings; empty where there are none, or not as JSON."""
        return read.find_backend_config(self._row[ATTRIBUTES]) or {}

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own cost; ``None`` where it gives none, or its mark for "not known"."""
        if "estimated_cycles" not in self._row[ATTRIBUTES]:
            return None
        window = self.backend_config.get("window_config")
        try:
            cycles = int(window["estimated_cycles"])  # type: ignore[index]  # errors are caught
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        return cycles if 0 <= cycles < _UNKNOWN_CYCLES else None

    def replica_groups(self, device_count: int) -> tuple[tuple[int, ...], ...] | None:
        """The groups of a collective among ``device_count`` devices; ``None`` if not understood."""
        text = self.attributes.get("replica_groups")
        if text is None:
            return None
        devices = self.attributes.get("device_ids")
        if devices is not None and "mesh[" in text:  # the comma between is one of the form itself
            text = f"{text}, device_ids={devices}"
        try:
            return read.parse_replica_groups(text, device_count)
        except ValueError:
            return None

    @property
    def text(self) -> str:
        """The instruction on one line, as XLA prints it."""
        root = "ROOT " if self.is_root else ""
        return (
            f"{root}%{self.name} = {self.shape} {self._row[OPCODE]}"
            f"({self._row[OPERANDS]}){self._row[ATTRIBUTES]}"
        )

    def __repr__(self) -> str:
        return f"<Instruction %{self.name} = {self.shape} {self._row[OPCODE]}>"


class Computation:
    """A computation: its instructions, in the order of the text; equal only to itself.

    The parser leaves a row for each instruction. An instruction itself is made when it is first
    asked for, as most of a dump is never looked at.
    """

    __slots__ = (
        *("_name", "_rows", "_root_index", "_made", "_all", "_indices", "_places"),
        *("_calls", "_called"),
        *("_parameters", "_questions", "_readers", "_users", "_uses", "_element_uses"),
        *("_before", "_edits", "__weakref__"),
    )

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: Sequence[Row] = ()
        self._root_index = -1
        self._made: dict[int, Instruction] = {}
        self._all: tuple[Instruction, ...] | None = None
        self._indices: Mapping[str, int] | None = None
        self._places: Mapping[str, Sequence[int]] | None = None
        self._calls: tuple[tuple[str, Call], ...] | None = None
        self._called: frozenset[str] | None = None
        self._parameters: tuple[Instruction, ...] | None = None
        self._questions = 0
        self._readers: Readers | None = None
        self._users: dict[int, tuple[Instruction, ...]] = {}
        self._uses: dict[int, Sequence[tuple[Instruction, int]]] = {}
        self._element_uses: dict[int, ElementUses] = {}
        self._before: ref[Computation] | None = None
        self._edits: Sequence[Edit] = ()

    def _complete(
        self, rows: Sequence[Row], before: Computation | None = None, edits: Sequence[Edit] = ()
    ) -> None:
        """Take over what the parser has read: at least one row, each name once, and operands only
        of rows above.

        Args:
            before: the computation in the snapshot before, if the rows were held against its.
            edits: in what they differ.
        """
        if before is not None:
            self._before, self._edits = ref(before), edits
        self._rows = rows
        self._root_index = last = len(rows) - 1
        if not rows[last][ROOT]:
            self._root_index = next((i for i, row in enumerate(rows) if row[ROOT]), last)

    @property
    def name(self) -> str:
        """Its name, without the ``%``."""
        return self._name

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        self._note_all()
        if self._all is None:
            # Whoever walks through them all is likely to ask for their operands too.
            made: dict[str, Instruction] = {}
            for index, row in enumerate(self._rows):
                instruction = made[row[NAME]] = self._at(index)
                if instruction._operands is None:
                    instruction._operands = tuple([made[name] for name in row[READS]])
            self._all = tuple(made.values())
        return self._all

    @property
    def rows(self) -> Sequence[Row]:
        """Its instructions as the parser leaves them."""
        self._note_all()
        return self._rows

    def edits_since(self, before: Computation) -> Sequence[Edit]:
        """In which of its rows it differs from an earlier version of it."""
        if self._before is not None and self._before() is before:
            return self._edits
        return edits_between(before._rows, self._rows)

    @property
    def made_count(self) -> int:
        """How many of its instructions were made."""
        return len(self._made)

    @property
    def refers_to_itself(self) -> bool:
        """Whether instructions or calls of it were made, which refer to it."""
        return bool(self._made or self._calls)

    def let_go(self) -> None:
        """Let go of the instructions made so far, and of the calls. They refer to it, and it to
        them: all would stay until they are collected. Nobody else may hold one: the next of its
        name is another one."""
        if self.refers_to_itself:
            self._made, self._all, self._calls, self._parameters = {}, None, None, None
            self._users, self._uses, self._element_uses = {}, {}, {}

    def _make(self, index: int, row: Row) -> Instruction:
        instruction = self._made[index] = Instruction.__new__(Instruction)
        instruction._computation = self
        instruction._index = index
        instruction._operands = None
        instruction._row = row
        return instruction

    def at(self, index: int) -> Instruction:
        """The instruction at a place; makes no other."""
        self._note_all()
        return self._at(index)

    def _at(self, index: int) -> Instruction:
        return self._made.get(index) or self._make(index, self._rows[index])

    def _of_names(self, names: Sequence[str]) -> tuple[Instruction, ...]:
        """The instructions of these ``%names``."""
        if not names:
            return ()
        indices, at = self._index_of, self._at
        return tuple([at(indices[name]) for name in names])

    @property
    def _index_of(self) -> Mapping[str, int]:
        """The place of each instruction by its ``%name``."""
        if self._indices is None:
            self._indices = dict(zip(map(_name_of, self._rows), count(), strict=False))
        return self._indices

    def _places_of(self, names: Iterable[str]) -> list[int]:
        """The places of the instructions of these ``%names``."""
        return [self._index_of[name] for name in names]

    @property
    def root_name(self) -> str:
        """The ``%name`` of its root; does not make the root."""
        return self._rows[self._root_index][NAME]

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        if lookups.recording is not None:
            lookups.recording.instructions[self].add(self.root_name)
        return self._at(self._root_index)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, by their number."""
        if lookups.recording is not None:
            lookups.recording.others["parameters"].add(self._name)
        if self._parameters is None:
            found = map(self._at, self._by_opcode.get("parameter", ()))
            self._parameters = tuple(sorted(found, key=lambda one: one.parameter_number or 0))
        return self._parameters

    @property
    def places(self) -> Mapping[str, Sequence[int]]:
        """The places of its instructions by their opcode; makes no instructions."""
        self._note_all()
        return self._by_opcode

    @property
    def _by_opcode(self) -> Mapping[str, Sequence[int]]:
        if self._places is None:
            places: defaultdict[str, list[int]] = defaultdict(list)
            for index, row in enumerate(self._rows):
                places[row[OPCODE]].append(index)
            self._places = dict(places)
        return self._places

    def of_opcodes(self, opcodes: Collection[str], holding: str = "") -> Sequence[Instruction]:
        """Its instructions of these opcodes, in order; makes no others.

        Args:
            holding: leave out those whose attributes, as printed, do not hold this text.
        """
        places = self.places
        if places.keys().isdisjoint(opcodes):
            return ()
        found = sorted(chain.from_iterable(places.get(opcode, ()) for opcode in opcodes))
        if holding:
            rows = self._rows
            found = [index for index in found if holding in rows[index][ATTRIBUTES]]
        return list(map(self._at, found))

    def holding(self, text: str) -> Sequence[Instruction]:
        """Its instructions whose attributes, as printed, hold ``text``, in order; makes no
        others."""
        self._note_all()
        at = self._at
        return [at(index) for index, row in enumerate(self._rows) if text in row[ATTRIBUTES]]

    def _note_all(self) -> None:
        """Note, where lookups are recorded, that it was gone through."""
        if lookups.recording is not None:
            lookups.recording.others["computation"].add(self._name)

    def users_of(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that read ``instruction``, each once, in order."""
        index = instruction._index
        _note_readers(instruction)
        if index not in self._users:
            if self._all is not None:
                self._users = _users_of_all(self._all)
            else:
                self._users[index] = self._of_names(self._readers_of(index))
        return self._users[index]

    @property
    def calls(self) -> Sequence[tuple[str, Call]]:
        """The calls of other computations in it, in order, each with the name of what is called;
        makes no instructions."""
        self._note_all()
        return self._all_calls

    @property
    def _all_calls(self) -> Sequence[tuple[str, Call]]:
        if self._calls is None:
            self._calls = tuple(
                [(name, Call(self, place)) for place, name in called_by(self._rows)]
            )
        return self._calls

    @property
    def _called_names(self) -> frozenset[str]:
        if self._called is None:
            self._called = frozenset([name for name, _ in self._all_calls])
        return self._called

    def uses_of(
        self, instruction: Instruction, element: int | None = None
    ) -> Sequence[tuple[Instruction, int]]:
        """As :meth:`Instruction.uses`."""
        index = instruction._index
        _note_readers(instruction)
        uses = self._uses.get(index)
        if uses is None:
            name = instruction._row[NAME]
            uses = [
                (user, number)
                for user in self._of_names(self._readers_of(index))
                for number, read_name in enumerate(user._row[READS])
                if read_name == name
            ]
            self._uses[index] = uses
        if element is None or len(uses) <= _FEW_USES:
            return uses
        # Of a tuple with a reader for each of its elements, one is not looked for among all.
        if index not in self._element_uses:
            self._element_uses[index] = ElementUses(uses)
        return self._element_uses[index].of(element)

    def _readers_of(self, index: int) -> Sequence[str]:
        """The ``%name`` of each reader, each once, in order."""
        name = self._rows[index][NAME]
        if self._readers is None:
            self._readers = self._readers_by_those_before()
        if self._readers is None:
            self._questions += 1
            if self._questions <= _FEW_QUESTIONS:
                return [row[NAME] for row in self._rows[index + 1 :] if name in row[READS]]
            self._readers = find_readers(self._rows)
        return list(dict.fromkeys(self._readers.get(name, ())))

    def _readers_by_those_before(self) -> Readers | None:
        """All readers, made of those in an earlier version; ``None`` where none is near whose
        readers are known."""
        versions, differ = [self], 0
        while versions[-1]._readers is None:
            version = versions[-1]
            before = None if version._before is None else version._before()
            differ += sum(edit.size for edit in version._edits)
            if before is None or differ > len(self._rows):
                return None
            versions.append(before)
        before = versions.pop()
        readers = dict(before._readers or {})
        for version in reversed(versions):
            update_readers(readers, before._rows, version._rows, version._edits, version._places_of)
            before = version
        return readers

    def __getitem__(self, name: str) -> Instruction:
        self._note_all()
        return self._at(self._index_of["%" + name])

    def __contains__(self, name: object) -> bool:
        self._note_all()
        return f"%{name}" in self._index_of

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        self._note_all()
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<Computation %{self._name}, {len(self)} instructions>"


def _note_readers(instruction: Instruction) -> None:
    if lookups.recording is not None:
        lookups.recording.readers[instruction._computation].add(instruction._row[NAME])


def _note_callers(computation: Computation) -> None:
    if lookups.recording is not None:
        lookups.recording.others["callers"].add(computation.name)


def _users_of_all(instructions: Sequence[Instruction]) -> dict[int, tuple[Instruction, ...]]:
    """The users of each, by its place: whoever walks through a computation asks for most of them,
    and one by one they take several times as long."""
    users: list[list[Instruction]] = [[] for _ in instructions]
    for user in instructions:
        for operand in user.operands:
            readers = users[operand._index]
            if not readers or readers[-1] is not user:
                readers.append(user)
    return dict(enumerate(map(tuple, users)))


@dataclass(frozen=True, eq=False)
class Module:
    """A module: its computations, its entry, and what stands at the head of its text.

    Attributes:
        name: such as ``jit_step``.
        entry_name: the name of the entry computation; ``None`` only in a module read in part.
        header_text: what stands after the name in the ``HloModule`` line, as printed.
        frame_tables: the text of the source tables, ``""`` where there are none.
        error: what stopped the parser, in a module read in part.
        lines: the line of each computation's header in the text, by its name, counted from 1.
    """

    name: str
    _computations: Mapping[str, Computation] = field(repr=False)
    entry_name: str | None
    header_text: str = field(repr=False)
    frame_tables: str = field(default="", repr=False)
    error: ParseError | None = None
    lines: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def computations(self) -> Mapping[str, Computation]:
        """The computations by name, in the order of the text."""
        self._note_all()
        return self._computations

    @property
    def entry(self) -> Computation:
        """The entry computation.

        Raises:
            KeyError: in a module read in part, whose text ends before it.
        """
        return self._computations[self.entry_name or ""]

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Every instruction, computation by computation."""
        for computation in self.computations.values():
            yield from computation.instructions

    def of_opcodes(self, opcodes: Collection[str], holding: str = "") -> Iterator[Instruction]:
        """Every instruction of these opcodes, as :meth:`Computation.of_opcodes`."""
        for computation in self.computations.values():
            if not computation.places.keys().isdisjoint(opcodes):
                yield from computation.of_opcodes(opcodes, holding)

    def holding(self, text: str) -> Iterator[Instruction]:
        """Every instruction whose attributes hold ``text``, as :meth:`Computation.holding`."""
        for computation in self.computations.values():
            yield from computation.holding(text)

    def _note_all(self) -> None:
        """Note, where lookups are recorded, that it was gone through."""
        if lookups.recording is not None:
            lookups.recording.others["module"].add("")

    # -- the header

    @cached_property
    def header(self) -> Mapping[str, str]:
        """The attributes of the ``HloModule`` line as printed, by name."""
        return read.split_attributes(self.header_text)

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of the text is the order of execution."""
        return self.header.get("is_scheduled") == "true"

    @cached_property
    def device_count(self) -> int:
        """Partitions times replicas."""
        counts = (self.header.get("num_partitions", "1"), self.header.get("replica_count", "1"))
        return math.prod(int(count) if read.is_number(count) else 1 for count in counts)

    @cached_property
    def entry_layout(self) -> EntryLayout | None:
        """The entry's shapes and layouts; ``None`` where the header has none."""
        text = self.header.get("entry_computation_layout")
        if text is None:
            return None
        parameters, _, result = text[1:-1].rpartition("->")
        try:
            return EntryLayout(parse_shape(parameters).elements, parse_shape(result.strip()))
        except ValueError:
            return None

    @cached_property
    def input_output_aliases(self) -> tuple[Alias, ...]:
        """The outputs that share a parameter's buffer, in the order of the text."""
        return tuple(
            Alias(
                read.parse_integers(output),
                int(number),
                read.parse_integers(index),
                kind or "may-alias",
            )
            for output, number, index, kind in _ALIAS.findall(
                self.header.get("input_output_alias", "")
            )
        )

    @cached_property
    def donated_to(self) -> Mapping[tuple[int, ...], int]:
        """The index of an output -> the number of the parameter whose whole buffer it takes."""
        numbers: dict[tuple[int, ...], int] = {}
        for alias in self.input_output_aliases:
            known = alias.parameter_number < len(self.entry.parameters)
            if known and not alias.parameter_index:
                numbers.setdefault(alias.output_index, alias.parameter_number)
        return numbers

    # -- calls

    def called(self, instruction: Instruction) -> tuple[Computation, ...]:
        """The computations that ``instruction`` calls and this module holds."""
        names, computations = instruction.called_names, self._computations
        if lookups.recording is not None:
            lookups.recording.others["existence"].update(names)
        return tuple([computations[name] for name in names if name in computations])

    def callers(self, computation: Computation) -> tuple[Instruction, ...]:
        """The instructions that call ``computation``, in the order of the text."""
        _note_callers(computation)
        callers = self._callers.get(computation.name)
        if callers is None:
            callers = tuple(call.instruction for call in self.calls_of(computation))
            self._callers[computation.name] = callers
        return callers

    def calls_of(self, computation: Computation) -> Sequence[Call]:
        """As :meth:`callers`, by their places: makes no instructions."""
        _note_callers(computation)
        return self._calls.of(computation.name)

    def is_fused(self, computation: Computation) -> bool:
        """Whether a fusion calls ``computation``."""
        _note_callers(computation)
        return computation.name in self._fused

    def fusion_kinds(self, computation: Computation) -> frozenset[str]:
        """The kinds (``kLoop``, ``kCustom``, ...) of the fusions that call ``computation``."""
        _note_callers(computation)
        kinds = self._fusion_kinds.get(computation.name)
        if kinds is None:
            kinds = frozenset(
                caller.attributes.get("kind", "")
                for caller in self.callers(computation)
                if caller.opcode == "fusion"
            )
            self._fusion_kinds[computation.name] = kinds
        return kinds

    @cached_property
    def _calls(self) -> Calls:
        return Calls(tuple(self._computations.values()))

    @cached_property
    def _fused(self) -> frozenset[str]:
        return frozenset(
            name
            for name, calls in self._calls.of_all.items()
            if any(call.opcode == "fusion" for call in calls)
        )

    @cached_property
    def _callers(self) -> dict[str, tuple[Instruction, ...]]:
        return {}  # filled as they are asked for

    @cached_property
    def _fusion_kinds(self) -> dict[str, frozenset[str]]:
        return {}

    def let_go(self) -> None:
        """Let go of the calls that were looked up and of what is kept: they refer to instructions
        that :meth:`Computation.let_go` lets go of."""
        for name in ("_calls", "_callers", "_kept"):
            self.__dict__.pop(name, None)

    # -- sources

    def frames(self, instruction: Instruction) -> tuple[SourceLocation, ...]:
        """The Python stack that traced ``instruction``, innermost first; ``()`` if not known."""
        metadata = instruction.metadata
        if metadata.stack_frame_id:
            return self._frames.stack(metadata.stack_frame_id)
        if metadata.source_file:
            return (SourceLocation(metadata.source_file, metadata.source_line),)
        return ()

    def source(self, instruction: Instruction) -> SourceLocation | None:
        """The innermost line that traced ``instruction``."""
        return next(iter(self.frames(instruction)), None)

    # -- for notebooks

    def to_frame(self) -> pandas.DataFrame:
        """A row for each instruction: what it is, what it reads, what it costs, where it is from.

        Raises:
            ImportError: where pandas is not installed.
        """
        from hlo_audit.hlo.frame import instructions_frame

        return instructions_frame(self)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=40, max_cols=20))

    @cached_property
    def _kept(self) -> dict[object, Any]:
        return {}

    @cached_property
    def _frames(self) -> FrameTables:
        return FrameTables.parse(self.frame_tables)

    @property
    def traced_lines(self) -> frozenset[SourceLocation]:
        """Every line in the source tables; empty for a module without them."""
        return self._frames.lines


def kept_by_module(find: Callable[[Module], _Found]) -> Callable[[Module], _Found]:
    """Find something out of each module once: the module keeps it."""

    @wraps(find)
    def find_once(module: Module) -> _Found:
        kept = module._kept
        if lookups.recording is not None and lookups.recording.module is module:
            module._note_all()
        if find not in kept:
            kept[find] = find(module)
        found: _Found = kept[find]
        return found

    return find_once
