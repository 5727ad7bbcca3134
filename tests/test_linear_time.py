"""Shapes of text and graph that could take more than their share: twice the input takes about twice
the time, and memory for each byte of a text is bounded."""

from __future__ import annotations

import gc
import io
import shutil
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from hlo_audit.diff import diff_subjects
from hlo_audit.dump import read_dump, read_module
from hlo_audit.errors import HloAuditError
from hlo_audit.gate import judge
from hlo_audit.history import read_histories
from hlo_audit.hlo import Memo, Module, parse_module
from hlo_audit.program import Recorded
from hlo_audit.program_audit import audit_recorded
from hlo_audit.report import Report
from hlo_audit.report.diff_text import print_diff
from hlo_audit.report.formats import FORMATS, render
from hlo_audit.report.passes_text import print_passes
from hlo_audit.report.sources import Repository
from hlo_audit.rules import ALL_RULES

pytestmark = pytest.mark.slow

MOST_TIMES_AS_LONG = 3.0
"""For twice the input: linear is 2, quadratic 4, and a busy machine somewhere between."""

SHORTEST_SECONDS = 0.15
"""What is measured takes at least as long, so that the clock says something."""

MOST_BYTES_PER_BYTE = 80
"""Of memory, at the peak of reading a text: most of its size are the instructions of real text, in
lines of 40 characters and more; what is measured here has the shortest that there are."""

HEAD = "HloModule m, is_scheduled=true\n\n"
P, Q = "f32[512,512]{1,0}", "f32[512,512]{0,1}"
GROUPS = ", replica_groups={{0,1,2,3}}"
SHARDING = ', custom_call_target="Sharding", sharding={devices=[2,2]<=[4]}'
DOT = ", lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def entry(*lines: str, head: str = HEAD, root: str = f"{Q} copy(%p)") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"{head}ENTRY %e (p: f32[512,512]) -> f32[512,512] {{\n  %p = {P} parameter(0)\n"
        f"{body}\n  ROOT %root = {root}\n}}\n"
    )


def each(count: int, line: str, **formats: str) -> list[str]:
    """``line`` for each number ``{n}``; ``{m}`` is the name made by the line before."""
    return [
        line.replace("{n}", str(n)).replace("{m}", f"%v{n - 1}" if n else "%p")
        for n in range(count)
    ]


def chain(operation: str, attributes: str = "", shape: str = P) -> Callable[[int], str]:
    return lambda n: entry(*each(n, f"%v{{n}} = {shape} {operation}({{m}}){attributes}"))


def tuple_of(count: int, item: str) -> str:
    return f"({', '.join([item] * count)})"


def names(count: int, prefix: str) -> str:
    return ", ".join(f"%{prefix}{n}" for n in range(count))


def nested_calls(count: int) -> str:
    first = f"%f0 (p: f32[512,512]) -> f32[512,512] {{\n  ROOT %p = {P} parameter(0)\n}}\n"
    others = "".join(
        f"\n%f{n} (p: f32[512,512]) -> f32[512,512] {{\n  %p = {P} parameter(0)\n"
        f"  %a = {Q} copy(%p)\n  ROOT %b = {P} call(%a), to_apply=%f{n - 1}\n}}\n"
        for n in range(1, count)
    )
    call = f"{P} call(%p), to_apply=%f{count - 1}"
    return entry(root=call, head=f"{HEAD}{first}{others}\n")


def wide_loop(count: int) -> str:
    state = f"(s32[], {', '.join([P] * count)})"
    body = [f"%q = {state} parameter(0)", "%z = s32[] get-tuple-element(%q), index=0"]
    for n in range(count):
        body.append(f"%g{n} = {P} get-tuple-element(%q), index={n + 1}")
        body.append(f"%c{n} = {Q} copy(%g{n})")
    lines = "\n".join(f"  {line}" for line in body)
    head = (
        f"{HEAD}%b (q: s32[]) -> s32[] {{\n{lines}\n"
        f"  ROOT %r = {state} tuple(%z, {names(count, 'c')})\n}}\n\n"
        f"%c (q: s32[]) -> pred[] {{\n  %q = {state} parameter(0)\n"
        "  ROOT %t = pred[] constant(false)\n}\n\n"
    )
    made = [
        "%z = s32[] constant(0)",
        f"%in = {state} tuple(%z, {', '.join(['%p'] * count)})",
        f"%w = {state} while(%in), condition=%c, body=%b",
    ]
    for n in range(count):
        made.append(f"%k{n} = {P} get-tuple-element(%w), index={n + 1}")
        made.append(f"%y{n} = {Q} copy(%k{n})")
    return entry(*made, head=head)


def repeated(piece: str, before: str, after: str) -> Callable[[int], str]:
    """A long text inside of one line."""
    return lambda n: entry(f"%v = {before}{piece * n}{after}")


def stack_frames(count: int) -> str:
    frames = "".join(
        f"{n} {{file_location_id=1 parent_frame_id={max(1, n - 1)}}}\n" for n in range(1, count)
    )
    location = "1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=9}"
    head = (
        f'{HEAD}FileNames\n1 "a.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n{location}\n\n'
        f"StackFrames\n{frames}\n"
    )
    metadata = f'metadata={{op_name="a" stack_frame_id={count - 1}}}'
    return entry(*each(count // 5, f"%v{{n}} = {Q} copy(%p), {metadata}"), head=head)


SHAPES: dict[str, Callable[[int], str]] = {
    # graphs
    "a chain of copies": chain("copy", shape=Q),
    "a chain of transposes": chain("transpose", ", dimensions={1,0}"),
    "a chain of bitcasts": chain("bitcast"),
    "a chain of annotations": chain("custom-call", SHARDING),
    "a chain of all-reduces": chain("all-reduce", f"{GROUPS}, to_apply=%e"),
    "a chain of gathers": chain("all-gather", f"{GROUPS}, dimensions={{0}}"),
    "all copies of one": lambda n: entry(*each(n, f"%v{{n}} = {Q} copy(%p)")),
    "copies that end in one tuple": lambda n: entry(
        *each(n, f"%v{{n}} = {Q} copy(%p)"), root=f"{tuple_of(n, Q)} tuple({names(n, 'v')})"
    ),
    "copies out of one tuple": lambda n: entry(
        f"%t = {tuple_of(n, P)} tuple({', '.join(['%p'] * n)})",
        *each(
            n, f"%g{{n}} = {P} get-tuple-element(%t), index={{n}}\n  %v{{n}} = {Q} copy(%g{{n}})"
        ),
    ),
    "one all-reduce of many": lambda n: entry(
        f"%t = {tuple_of(n, P)} all-reduce({', '.join(['%p'] * n)}){GROUPS}, to_apply=%e",
        *each(n, f"%g{{n}} = {P} get-tuple-element(%t), index={{n}}"),
    ),
    "one all-reduce, cut often": lambda n: entry(
        "%i = u32[] partition-id()",
        f"%t = {P} all-reduce(%p){GROUPS}, to_apply=%e",
        *each(
            n,
            "%v{n} = f32[128,512]{1,0} dynamic-slice(%t, %i, %i), dynamic_slice_sizes={128,512}",
        ),
    ),
    "one transpose, many dots": lambda n: entry(
        f"%t = {Q} transpose(%p), dimensions={{1,0}}", *each(n, f"%v{{n}} = {P} dot(%t, %p){DOT}")
    ),
    "one gather, many merges": lambda n: entry(
        f"%a = {P} all-gather(%p){GROUPS}, dimensions={{0}}",
        *each(
            n,
            "%v{n} = f32[262144]{0} reshape(%a)\n  %d{n} = f32[] dot(%v{n}, %v{n}), "
            "lhs_contracting_dims={0}, rhs_contracting_dims={0}",
        ),
    ),
    "calls in calls": nested_calls,
    "a wide loop": wide_loop,
    "frames in frames": stack_frames,
    # text
    "nested braces": lambda n: entry(f"%v = {P} copy(%p), x={'{' * n}{'}' * n}"),
    "open braces": repeated("{", f"{P} copy(%p), x=", ""),
    "nested parentheses": lambda n: entry(f"%v = {P} copy({'(' * n}%p{')' * n})"),
    "a deep tuple": lambda n: entry(f"%v = {'(' * n}f32[2]{')' * n} copy(%p)"),
    "quotes": repeated('"', f"{P} copy(%p), x=", ""),
    "backslashes": repeated("\\", f'{P} copy(%p), x="', '"'),
    "comments": repeated("/* */", f"{P} copy(", "%p)"),
    "open comments": repeated("/*", f"{P} copy(", "%p)"),
    "spaces": repeated(" ", f"{P} copy(", "%p)"),
    "operands": repeated("%p, ", f"{P} custom-call(", "%p)"),
    "dimensions": repeated("1,", "f32[", "1] copy(%p)"),
    "large dimensions": repeated("9999999999,", "f32[", "1] copy(%p)"),
    "tiles": repeated("9999999999,", "f32[512,512]{1,0:T(", "8)} copy(%p)"),
    "groups": repeated("{0,1},", f"{P} all-reduce(%p), replica_groups={{", "{2,3}}"),
    "lists in the backend's settings": lambda n: entry(
        f'%v = {P} copy(%p), backend_config={{"a":{"[" * n}{"]" * n}}}'
    ),
    "lines that are not plain": lambda n: entry(*each(n, f" %v{{n}}  =  {P}  copy( %p )")),
    "braces on lines of their own": lambda n: entry(f"%v = {P} copy(%p), x={{", *["}x"] * n),
    "headers without an end": lambda n: HEAD + "%f {\n" * n,
    "small computations": lambda n: entry(
        head=HEAD + "".join(f"%f{i} {{\n  ROOT %p = f32[] parameter(0)\n}}\n\n" for i in range(n))
    ),
    "small computations of a thread": lambda n: entry(
        head=HEAD
        + "".join(
            f'%f{i} {{\n  ROOT %p = f32[] parameter(0)\n}}, execution_thread="sparsecore"\n\n'
            for i in range(n)
        )
    ),
    "small computations, not plain": lambda n: entry(
        head=HEAD + "".join(f"%f{i} {{  ROOT %p = f32[] parameter(0) }}\n\n" for i in range(n))
    ),
    "names that are there twice": lambda n: entry(*[f"%v = {P} copy(%p)"] * n),
    "no line break that counts": lambda n: chain("copy")(n).replace("\n", "\r"),
    "NULs": lambda n: HEAD + "\0" * n,
    "aliases": lambda n: entry(
        head="HloModule m, input_output_alias={ "
        + ", ".join(f"{{{i}}}: ({i}, {{}}, may-alias)" for i in range(n))
        + " }\n\n"
    ),
}


def hold_linear(seconds: Callable[[int], float], first: int = 500) -> None:
    """Find a size that takes a moment, and hold twice the size to about twice the time."""
    count, once = first, seconds(first)
    while once < SHORTEST_SECONDS and count < 1 << 21:
        count *= 2
        once = seconds(count)
    for _ in range(3):
        twice = seconds(2 * count)
        if twice < MOST_TIMES_AS_LONG * once:
            return
        count *= 2
        once = seconds(count)
    pytest.fail(f"{once:.2f} s for {count // 2}, {twice:.2f} s for twice as much")


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_audited_in_linear_time(name: str, tmp_path: Path) -> None:
    path = tmp_path / "step.txt"

    def seconds(count: int) -> float:
        path.write_text(SHAPES[name](count))
        started = time.process_time()
        try:
            audits = audit_recorded(path, ALL_RULES, {})
        except HloAuditError:
            return time.process_time() - started
        report = Report(audits, judge(audits, {}), {})
        for format_ in FORMATS:
            render(format_, report, Repository(tmp_path))
        return time.process_time() - started

    hold_linear(seconds)


STAGES = (
    "before_optimizations",
    "0001.one.after_algsimp.before_dce",
    "0002.two.after_dce.before_layout-assignment",
    "0003.three.after_layout-assignment.before_fusion",
    "after_codegen",
)
GRAPHS = (
    "a chain of transposes",
    "a chain of annotations",
    "a chain of all-reduces",
    "one transpose, many dots",
    "one gather, many merges",
    "copies out of one tuple",
    "a wide loop",
    "calls in calls",
)


def write_dump(folder: Path, texts: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, stage in enumerate(STAGES):
        text = texts[number % len(texts)]
        (folder / f"module_0001.m.{stage}.txt").write_text(text)


SLOW_GRAPHS = {"copies out of one tuple", "a wide loop", "calls in calls"}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("command", ["passes", "diff"])
def test_a_dump_is_looked_through_in_linear_time(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    if name in SLOW_GRAPHS and not pytestconfig.getoption("--full-size"):
        pytest.skip("takes many seconds: with --full-size only")
    monkeypatch.chdir(tmp_path)

    def seconds(count: int) -> float:
        text = SHAPES[name](count)
        renamed = text.replace("%v", "%w").replace("%e ", "%ee ")
        write_dump(Path("a"), [text, renamed])
        write_dump(Path("b"), [renamed.replace("{0,1}", "{1,0}"), text])
        console = Console(file=io.StringIO())
        started = time.process_time()
        if command == "passes":
            histories = read_histories([Recorded(Path("a"))], ALL_RULES)
            assert histories[0].timeline is not None
            print_passes(console, histories, ["a"], None, show_all=True)
        else:
            both = [Recorded(Path("a")), Recorded(Path("b"))]
            print_diff(console, diff_subjects(both, ALL_RULES, force=True))
        return time.process_time() - started

    hold_linear(seconds, first=300)


EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "nothing": lambda lines: lines,
    "the header": lambda lines: lines,
    "every other line": lambda lines: [
        line.replace("copy", "negate") if number % 2 else line for number, line in enumerate(lines)
    ],
    "every line": lambda lines: [line.replace("copy", "negate") for line in lines],
    "the other way round": lambda lines: lines[::-1],
    "halves exchanged": lambda lines: lines[len(lines) // 2 :] + lines[: len(lines) // 2],
    "most lines gone": lambda lines: lines[:: len(lines) // 10],
    "a line between any two": lambda lines: [
        new for line in lines for new in (line, line.replace("%v", "%w"), line.replace("%v", "%x"))
    ],
}


TURNS = {"nothing": 100, "the header": 100}
"""How often each is read beside the other, where that is once too fast to be measured."""


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_snapshot_is_read_in_linear_time(edit: str) -> None:
    other_head = HEAD.replace("HloModule ", "HloModule other_") if edit == "the header" else HEAD

    def seconds(count: int) -> float:
        lines = each(count, f"%v{{n}} = {P} copy(%p)")
        texts = [entry(*lines), entry(*EDITS[edit](lines), head=other_head)]
        memo = Memo()
        parse_module(texts[0], memo=memo)
        started = time.process_time()
        for _ in range(TURNS.get(edit, 1)):
            modules = [parse_module(text, memo=memo) for text in reversed(texts)]
        taken = time.process_time() - started
        assert [len(module.entry) for module in modules] == [
            text.count(" = ") for text in reversed(texts)
        ]
        return taken

    hold_linear(seconds)


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_takes_memory_in_proportion(name: str) -> None:
    count = 1_000
    while len(text := SHAPES[name](count)) < 200_000:
        count *= 2
    tracemalloc.start()
    try:
        module = parse_module(text)
        for computation in module.computations.values():
            _ = computation.instructions
    except HloAuditError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < MOST_BYTES_PER_BYTE * len(text)


def test_a_snapshot_takes_memory_in_proportion(dumps: Callable[[str], Path]) -> None:
    (path,) = dumps("llama2_explicit_fsdp4").glob("*.after_codegen.txt")
    tracemalloc.start()
    module = read_module(path)
    assert len(module.entry.instructions) > 100
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * path.stat().st_size


def test_modules_that_were_looked_at_do_not_pile_up() -> None:
    text = chain("copy")(2_000)
    gc.collect()
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(120):
            module = parse_module(text)
            assert sum(len(one.operands) for one in module.instructions) > 1_000
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[-1] < 40 * peaks[0]


def test_the_largest_snapshot_bounds_the_memory_of_a_dump(dumps: Callable[[str], Path]) -> None:
    (dump,) = read_dump(dumps("llama2_auto_fsdp4")).modules

    def look_at(module: Module) -> None:
        for instruction in module.instructions:
            assert all(instruction in operand.users for operand in instruction.operands)

    largest = max(dump.snapshots, key=lambda snapshot: snapshot.path.stat().st_size)
    gc.collect()
    tracemalloc.start()
    try:
        look_at(largest.read())
        peak_of_one = tracemalloc.get_traced_memory()[1]
        for _, module in dump.read_all():
            look_at(module)
        peak_of_all = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_of_all < 2.5 * peak_of_one
