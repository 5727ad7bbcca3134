"""Our parser against XLA's own, over snapshots of real compiles.

jaxlib reads HLO text with the parser that XLA itself uses and gives the module as a serialized
proto. The two must see the same computations, instructions, graph, shapes and schedule.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import Compiled, available_platform, compile_programs
from hlo_audit.hlo import Computation, Memo, Module, Shape, parse_module
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import Lowering, find_subjects

pytestmark = pytest.mark.oldest_jax

_VERSIONS = ("0.7.2", "0.8.0", "0.8.3", "0.9.2", "0.10.2", "0.11.0", "0.12.0")
_MODES = ("auto", "explicit")
DUMPS = (
    *(f"llama2_{mode}_fsdp4" for mode in _MODES),
    *(f"lm_head_versions/jax-{version}-{mode}" for version in _VERSIONS for mode in _MODES),
    *(
        f"lm_head_platforms/{platform}-{mode}"
        for platform in ("cpu", "gpu-h100")
        for mode in _MODES
    ),
)

# Each folder holds only the snapshots that show a form of text of its own: none is left out.
FORMS_ARCHIVE = "forms_versions"
FORMS_VERSIONS = ("0.7.2", "0.8.0", "0.8.3", "0.9.2", "0.10.2", "0.11.2", "0.12.0.1")
FORMS_PROGRAMS = (
    *(f"tpu-{name}-auto" for name in ("control_flow", "collectives", "arrays", "kernel")),
    *(f"cpu-{name}-auto" for name in ("control_flow", "collectives", "arrays")),
    *(f"tpu-lm-head-{mode}" for mode in _MODES),
)
FORMS_DUMPS = tuple(
    f"{FORMS_ARCHIVE}/jax-{version}/{program}"
    for version in FORMS_VERSIONS
    for program in FORMS_PROGRAMS
)

# How many passes of a dump the default run compares, next to the first and the final module.
_SAMPLE = 4

# -- what an older jaxlib cannot read: a sign of it in the text, and the smallest text that has it

_SMALL = "HloModule m\n{}\nENTRY %e {{\n{}\n}}\n"
_PARAMETER = "  %p = (f32[8], f32[8]) parameter(0)\n"
_FORMS = {
    "tables of source positions": (
        # jax 0.8.3 drops the tables on the way and leaves the numbers.
        re.compile(r"^StackFrames$|[{ ]stack_frame_id=", re.MULTILINE),
        _SMALL.format(
            '\nFileNames\n1 "f"\n\nFunctionNames\n1 "g"\n\nFileLocations\n'
            "1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=1}\n\n"
            "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n",
            "  ROOT %p = f32[8] parameter(0)",
        ),
    ),
    "operands that read an element of a tuple": (
        re.compile(r"%[\w.-]+#\d"),
        _SMALL.format("", _PARAMETER + "  ROOT %n = f32[8] negate(%p#1)"),
    ),
    "shardings over named axes": (
        re.compile(r"sharding=\{+mesh\["),
        _SMALL.format("", "  ROOT %p = f32[8] parameter(0), sharding={mesh['a'=2], [{'a'}]}"),
    ),
}


# -- XLA's view of a text


# The name of an instruction, and the element of its tuple that is read.
ValueName = tuple[str, tuple[int, ...]]


class Operation(NamedTuple):
    """What both parsers must agree on for one instruction."""

    opcode: str
    shape: Any
    operands: tuple[ValueName, ...]
    called: list[str]
    number: int | None  # of a parameter, or of the element that get-tuple-element takes


class Graph(NamedTuple):
    """One computation."""

    root: ValueName
    operations: dict[str, Operation]
    users: dict[str, set[str]]
    schedule: list[str]


@cache
def _xla() -> ModuleType:
    try:
        return importlib.import_module("jaxlib._hlo")
    except ImportError:  # up to 0.9
        return importlib.import_module("jaxlib._jax")


@cache
def _unreadable_forms() -> tuple[str, ...]:
    """The forms of text that the installed jaxlib is too old to read."""
    unreadable = []
    for form, (_, example) in _FORMS.items():
        try:
            _xla().hlo_module_from_text(example)
        except RuntimeError:
            unreadable.append(form)
    return tuple(unreadable)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a serialized proto: their numbers, and integers or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        if key & 7 == 0:
            value: int | bytes
            value, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}.get(key & 7, 0)
            if key & 7 == 2:
                size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
        yield key >> 3, value


def _packed(data: bytes) -> tuple[int, ...]:
    values = []
    position = 0
    while position < len(data):
        value, position = _varint(data, position)
        values.append(value)
    return tuple(values)


_ELEMENT_TYPES = (
    *("invalid", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64"),
    *("tuple", "opaque", "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4"),
    *("f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz", "s2", "u2", "f8e4m3", "f8e3m4", "s1", "u1"),
    *("f4e2m1fn", "f8e8m0fnu"),
)


@lru_cache(maxsize=1 << 16)
def _xla_shape(data: bytes) -> Any:
    """A shape as nested tuples: type, dimensions, order, tiles, memory space, or the elements."""
    element_type, layout = "invalid", b""
    dimensions: tuple[int, ...] = ()
    elements = []
    for number, value in _fields(data):
        match number:
            case 2:
                element_type = _ELEMENT_TYPES[value]
            case 3:
                dimensions = _packed(value)
            case 4:
                elements.append(_xla_shape(value))
            case 5:
                layout = value
    if element_type == "tuple":
        return tuple(elements)
    order: tuple[int, ...] = ()
    tiles = []
    memory_space = 0
    for number, value in _fields(layout):
        match number:
            case 1:
                order = _packed(value)
            case 6:
                tiles.append(next((_packed(v) for n, v in _fields(value) if n == 1), ()))
            case 8:
                memory_space = value
    return element_type, dimensions, order, tuple(tiles), memory_space


def _xla_graphs(text: str) -> tuple[str, dict[str, Graph]]:
    """The name of the entry, and every computation by its name."""
    proto = _xla().hlo_module_from_text(text).as_serialized_hlo_module_proto()
    entry_id = 0
    computations: dict[int, dict[int, list[Any]]] = {}
    schedules: dict[int, tuple[int, ...]] = {}
    for number, value in _fields(proto):
        match number:
            case 3:
                computation = _by_number(value)
                computations[_integer(computation, 5)] = computation
            case 6:
                entry_id = value
            case 7:
                for _, sequence in _fields(value):
                    entry = _by_number(sequence)
                    schedules[_integer(entry, 1)] = _integers(_by_number(entry[2][0]), 1)
    names = {identity: fields[1][0].decode() for identity, fields in computations.items()}
    return names[entry_id], {
        names[identity]: _xla_graph(fields, names, schedules.get(identity, ()))
        for identity, fields in computations.items()
    }


def _by_number(data: bytes) -> dict[int, list[Any]]:
    fields: dict[int, list[Any]] = {}
    for number, value in _fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def _integer(message: Mapping[int, list[Any]], number: int) -> int:
    value: int = message.get(number, [0])[0]  # a zero is not serialized
    return value


def _integers(message: Mapping[int, list[Any]], number: int) -> tuple[int, ...]:
    return _packed(b"".join(message.get(number, [])))


def _xla_graph(
    computation: dict[int, list[Any]], computations: dict[int, str], schedule: tuple[int, ...]
) -> Graph:
    instructions = {_integer(fields, 35): fields for fields in map(_by_number, computation[2])}
    names = {identity: fields[1][0].decode() for identity, fields in instructions.items()}
    operations = {}
    for identity, fields in instructions.items():
        opcode = fields[2][0].decode()
        number_field = {"parameter": 9, "get-tuple-element": 13}.get(opcode)
        operations[names[identity]] = Operation(
            opcode,
            _xla_shape(fields[3][0]),
            tuple((names[operand], ()) for operand in _integers(fields, 36)),
            sorted(computations[called] for called in _integers(fields, 38)),
            _integer(fields, number_field) if number_field is not None else None,
        )
    return Graph(
        (names[_integer(computation, 6)], ()),
        operations,
        _users(operations),
        [names[identity] for identity in schedule],
    )


def _users(operations: Mapping[str, Operation]) -> dict[str, set[str]]:
    users: dict[str, set[str]] = {name: set() for name in operations}
    for name, operation in operations.items():
        for operand, _ in operation.operands:
            users[operand].add(name)
    return users


def _without_expanded_operands(graph: Graph, written: Container[str]) -> Graph:
    """Take back what jaxlib makes of ``%x#1``: a get-tuple-element that no line of the text has."""
    expanded = {
        name: operation
        for name, operation in graph.operations.items()
        if name not in written and operation.opcode == "get-tuple-element"
    }

    def value(name: str) -> ValueName:
        index: tuple[int, ...] = ()
        while (operation := expanded.get(name)) is not None:
            index = (operation.number or 0, *index)
            name = operation.operands[0][0]
        return name, index

    operations = {
        name: operation._replace(
            operands=tuple(value(operand) for operand, _ in operation.operands)
        )
        for name, operation in graph.operations.items()
        if name not in expanded
    }
    return Graph(
        value(graph.root[0]),
        operations,
        _users(operations),
        [name for name in graph.schedule if name not in expanded],
    )


def _with_written_names(graph: Graph, written: Iterable[str], taken: Container[str]) -> Graph:
    """Take back the names that jaxlib makes up where one of the text is taken.

    What it makes of ``%p#0`` may get the name ``p_0.2``, which another computation has in the text:
    there it becomes ``p_0.7``. That is taken back where only one name can be meant.

    Args:
        written: the names in the text of the computation.
        taken: the names of what jaxlib added.
    """
    ours = set(written)
    lost = [name for name in ours - graph.operations.keys() if name in taken]
    made_up = graph.operations.keys() - ours
    names = {}
    for name in lost:
        alike = [one for one in made_up if _stem(one) == _stem(name)]
        if len(alike) == 1 and [one for one in lost if _stem(one) == _stem(name)] == [name]:
            names[alike[0]] = name
    if not names:
        return graph

    def value(of: ValueName) -> ValueName:
        return names.get(of[0], of[0]), of[1]

    operations = {
        names.get(name, name): operation._replace(operands=tuple(map(value, operation.operands)))
        for name, operation in graph.operations.items()
    }
    schedule = [names.get(name, name) for name in graph.schedule]
    return Graph(value(graph.root), operations, _users(operations), schedule)


def _stem(name: str) -> str:
    return re.sub(r"\.\d+$", "", name)


# -- our view of the same text


@lru_cache(maxsize=1 << 16)
def _our_shape(shape: Shape) -> Any:
    if shape.is_tuple:
        return tuple(map(_our_shape, shape.elements))
    layout = shape.layout
    if layout is None:
        return shape.element_type, shape.dimensions, (), (), 0
    return (
        shape.element_type,
        shape.dimensions,
        layout.minor_to_major,
        layout.tiles,
        layout.memory_space,
    )


def _our_graph(module: Module, computation: Computation) -> Graph:
    operations = {
        one.name: Operation(
            one.opcode,
            _our_shape(one.shape),
            tuple((value.instruction.name, value.tuple_index) for value in one.operand_values),
            sorted(called.name for called in module.called(one)),
            int(one.attributes["index"])
            if one.opcode == "get-tuple-element"
            else one.parameter_number,
        )
        for one in computation
    }
    return Graph(
        (computation.root.name, ()),
        operations,
        {one.name: {user.name for user in one.users} for one in computation},
        [one.name for one in computation],
    )


def _differences(module: Module, text: str) -> tuple[list[str], int]:
    """What XLA sees in ``text`` other than in our ``module``, and how many instructions were held
    against each other."""
    entry, theirs = _xla_graphs(text)
    found = []
    if module.entry.name != entry:
        found.append(f"entry: ours {module.entry.name}, XLA's {entry}")
    if module.computations.keys() != theirs.keys():
        found.append(f"computations: {module.computations.keys() ^ theirs.keys()} on one side only")
    count = 0
    both = module.computations.keys() & theirs.keys()
    taken = {
        one
        for name in both
        for one in theirs[name].operations
        if one not in module.computations[name]
    }
    for name in both:
        computation = module.computations[name]
        ours, xla = _our_graph(module, computation), theirs[name]
        xla = _without_expanded_operands(xla, computation)
        xla = _with_written_names(xla, (one.name for one in computation), taken)
        count += len(ours.operations)
        if ours.root != xla.root:
            found.append(f"{name}: the root is ours {ours.root}, XLA's {xla.root}")
        if ours.users != xla.users:
            found.append(f"{name}: the users differ")
        if xla.schedule and ours.schedule != xla.schedule:
            found.append(f"{name}: the schedule differs")
        for one in ours.operations.keys() | xla.operations.keys():
            left, right = ours.operations.get(one), xla.operations.get(one)
            if left != right:
                found.append(f"{name}: {one}: ours {left}, XLA's {right}")
    return found, count


# -- the comparison


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dump_name" in metafunc.fixturenames:
        own: Path | None = metafunc.config.getoption("--dumps")
        names = (*DUMPS, *FORMS_DUMPS)
        if own is not None:
            files = (path.parent for path in own.rglob("*.txt") if _is_snapshot(path))
            names = tuple(sorted(str(folder.relative_to(own)) for folder in set(files)))
        metafunc.parametrize("dump_name", names)


def _is_snapshot(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9) == b"HloModule"


def test_reads_every_snapshot_as_xla_does(
    dump_name: str, dumps: Callable[[str], Path], pytestconfig: pytest.Config
) -> None:
    own: Path | None = pytestconfig.getoption("--dumps")
    archive, _, folder = dump_name.partition("/")
    root = dumps(archive) / folder if own is None else own / dump_name
    every = archive == FORMS_ARCHIVE or pytestconfig.getoption("--all-snapshots")
    _compare(dump_name, root, every=every)


def _compare(name: str, root: Path, *, every: bool) -> None:
    """Hold the snapshots in a dump folder, or a sample of them, against what XLA reads of them."""
    paths = sorted(path for path in root.glob("*.txt") if _is_snapshot(path))
    readable = []
    out_of_reach: Counter[str] = Counter()
    for path in paths:
        text = path.read_text()
        form = next((form for form in _unreadable_forms() if _FORMS[form][0].search(text)), None)
        if form is None:
            readable.append(path)
        else:
            out_of_reach[form] += 1
    if paths and not readable:
        pytest.skip(f"this jaxlib is too old to read {', '.join(out_of_reach)}")
    if not every:
        ends = [path for path in readable if path.name.endswith("_optimizations.txt")]
        passes = [path for path in readable if path not in ends]
        readable = ends + passes[:: -(-len(passes) // _SAMPLE) or 1]

    differences = []
    instructions = 0
    memo = Memo()
    for path in sorted(readable):  # in the order of the passes, which share computations
        text = path.read_text()
        found, count = _differences(parse_module(text, memo=memo), text)
        instructions += count
        differences += [f"{path.name}: {one}" for one in found]
    print(
        f"{name}: {len(readable)} modules, {instructions} instructions, "
        f"{len(differences)} differences, out of reach {dict(out_of_reach)}"
    )
    assert not differences, "\n".join(differences[:20])
    assert len(readable) >= min(_SAMPLE, len(paths) - out_of_reach.total()) > 0
    assert instructions >= 10 * len(readable)


# -- what the installed jax writes: the forms that are not in any archive yet


def _fresh_programs() -> dict[str, Lowering]:
    file = Path(__file__).parent / "programs" / "forms.py"
    tpu = available_platform() == "tpu"
    programs = {
        f"{platform}-{name}": Lowering(
            program=name,
            build=f"{file}:{name}",
            mode="auto",
            layout=None,
            settings={},
            mesh={"x": 2, "y": 2},
            platform=platform,
            topology="v5p:2x2x1" if platform == "tpu" else "4",
        )
        for platform in (("tpu", "cpu") if tpu else ("cpu",))
        for name in ("control_flow", "collectives", "arrays", "kernel")
        if (platform, name) != ("cpu", "kernel")  # a Pallas kernel is compiled for TPU alone
    }
    models = [model.name for model in ALL_MODELS]
    for subject in find_subjects(models, ALL_MODELS, platform="tpu" if tpu else "cpu"):
        assert isinstance(subject, Lowering)
        programs[f"{subject.platform}-{subject.program}-{subject.mode}"] = subject
    return programs


FRESH = _fresh_programs()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The dump folder of each of FRESH."""
    outcomes = compile_programs(
        list(FRESH.values()),
        into=tmp_path_factory.mktemp("fresh"),
        jobs=1,
        cache=Cache(default_folder(os.environ)),
    )
    folders = {}
    for name, outcome in zip(FRESH, outcomes, strict=True):
        assert isinstance(outcome, Compiled), outcome
        folders[name] = outcome.folder
    return folders


@pytest.mark.parametrize("program", FRESH)
def test_reads_what_the_installed_jax_writes_as_xla_does(
    program: str, fresh: dict[str, Path], pytestconfig: pytest.Config
) -> None:
    _compare(program, fresh[program], every=pytestconfig.getoption("--all-snapshots"))


def test_dumps_without_any_newer_form_are_within_reach_of_every_jaxlib(
    dumps: Callable[[str], Path],
) -> None:
    paths = [*dumps("lm_head_versions").glob("jax-0.7.2-*/*.txt")]
    snapshots = [path for path in paths if _is_snapshot(path)]
    assert len(snapshots) > 200
    for path in snapshots:
        text = path.read_text()
        assert not [form for form, (sign, _) in _FORMS.items() if sign.search(text)]


_EXAMPLE = """HloModule m, is_scheduled=true

%one (a: f32[8,4]) -> f32[8,4] {
  ROOT %a = f32[8,4]{1,0:T(8,128)} parameter(0)
}

%two (b: f32[8,4]) -> f32[8,4] {
  ROOT %b = f32[8,4]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  %q = f32[8,4]{1,0:T(8,128)} parameter(1)
  %c = f32[8,4]{1,0:T(8,128)S(1)} call(%p), to_apply=%one
  %d = f32[8,4]{1,0:T(8,128)} call(%q), to_apply=%two
  %t = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0:T(8,128)}) tuple(%c, %d)
  %g = f32[8,4]{1,0:T(8,128)S(1)} get-tuple-element(%t), index=0
  ROOT %r = f32[8,4]{1,0:T(8,128)} subtract(%g, %q)
}
"""


@pytest.mark.parametrize(
    ("printed", "misread"),
    [
        ("subtract(%g, %q)", "subtract(%q, %g)"),  # the order of operands
        ("subtract(%g, %q)", "subtract(%g, %g)"),
        ("subtract", "add"),
        ("%r = f32[8,4]", "%r = f32[4,8]"),
        ("%r = f32[8,4]", "%r = s32[8,4]"),
        ("%r = f32[8,4]{1,0", "%r = f32[8,4]{0,1"),
        ("%r = f32[8,4]{1,0:T(8,128)}", "%r = f32[8,4]{1,0:T(4,128)}"),
        ("%r = f32[8,4]{1,0:T(8,128)}", "%r = f32[8,4]{1,0:T(8,128)S(2)}"),
        ("index=0", "index=1"),
        ("to_apply=%one", "to_apply=%two"),
        ("%q = f32[8,4]{1,0:T(8,128)} parameter(1)", "%q = f32[8,4]{1,0:T(8,128)} parameter(0)"),
        ("  %g = ", "  ROOT %g = "),
        ("%one", "%uno"),
        ("%c", "%k"),
        ("ENTRY %main", "%main"),
    ],
)
def test_the_comparison_sees_whatever_our_parser_would_misread(printed: str, misread: str) -> None:
    assert _differences(parse_module(_EXAMPLE), _EXAMPLE) == ([], 9)
    text = _EXAMPLE.replace(printed, misread)
    if "ROOT %g" in misread:
        text = text.replace("ROOT %r", "%r")
    if printed.startswith("ENTRY"):
        text = text.replace("%two (", "ENTRY %two (")
    assert _differences(parse_module(text), _EXAMPLE)[0]


def test_the_comparison_sees_a_schedule_in_another_order() -> None:
    lines = _EXAMPLE.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("  %c"))
    lines[at : at + 2] = reversed(lines[at : at + 2])
    differences, _ = _differences(parse_module("".join(lines)), _EXAMPLE)
    assert differences == ["main: the schedule differs"]
