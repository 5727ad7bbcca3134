"""The parser and the graph that it makes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_audit.errors import ParseError
from hlo_audit.hlo import (
    Alias,
    Instruction,
    Module,
    SourceLocation,
    Value,
    parse_module,
    parse_shape,
)

Dumps = Callable[[str], Path]


def entry(*lines: str) -> str:
    """A module whose entry holds ``lines``."""
    return "HloModule m\n\nENTRY %e {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def snapshot(dumps: Dumps, folder: str, suffix: str) -> str:
    """The one snapshot of an archive's folder whose name ends with ``suffix``."""
    archive, _, rest = folder.partition("/")
    (path,) = (dumps(archive) / rest).glob(f"*.{suffix}")
    return path.read_text()


PLAIN = """HloModule jit_f, is_scheduled=true, num_partitions=4

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8]{0} get-tuple-element(%p), index=1
  %w = f32[8]{0} all-reduce(%v), replica_groups={{0,1},{2,3}}, to_apply=%add.1
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %w)
}

ENTRY %main (a: f32[8], b: f32[8]) -> f32[] {
  %b = f32[8]{0} parameter(1), metadata={op_name="b"}
  %a = f32[8]{0} parameter(0), metadata={op_name="a"}
  %zero = s32[] constant(0)
  %square = f32[8]{0} multiply(%a, %a)
  %start = (s32[], f32[8]{0}) tuple(%zero, %square)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%cond, body=%body
  %out = f32[8]{0} get-tuple-element(%loop), index=1
  %both = f32[8]{0} add(%out, %b)
  %one = f32[] constant(1)
  ROOT %total = f32[] reduce(%both, %one), dimensions={0}, to_apply=%add.1
}
"""


# -- the graph


def test_a_module_has_its_computations_in_the_order_of_the_text_and_an_entry() -> None:
    module = parse_module(PLAIN)
    assert module.name == "jit_f"
    assert list(module.computations) == ["add.1", "cond", "body", "main"]
    assert module.entry_name == "main"
    assert module.entry is module.computations["main"]
    assert module.error is None
    assert list(module.lines.values()) == [3, 9, 16, 24]
    assert [one.name for one in module.instructions][:4] == ["x", "y", "sum", "p"]


def test_instructions_know_their_operands_users_place_and_computation() -> None:
    main = parse_module(PLAIN).entry
    square, a, start = main["square"], main["a"], main["start"]
    assert square.operands == (a, a)
    assert a.users == (square,)
    assert square.users == (start,)
    assert start.operands == (main["zero"], square)
    assert [one.index for one in main] == list(range(len(main))) == list(range(10))
    assert square.computation is main
    assert (square.opcode, square.shape) == ("multiply", parse_shape("f32[8]{0}"))
    assert main["total"].users == ()


def test_the_root_is_the_one_marked_and_else_the_last() -> None:
    main = parse_module(PLAIN).entry
    assert main.root is main["total"]
    assert [one.name for one in main if one.is_root] == ["total"]
    early = parse_module(entry("ROOT %a = f32[] parameter(0)", "%b = f32[] negate(%a)")).entry
    assert early.root is early["a"]
    unmarked = parse_module(entry("%a = f32[] parameter(0)", "%b = f32[] negate(%a)")).entry
    assert unmarked.root is unmarked["b"]


def test_parameters_are_given_by_their_number() -> None:
    main = parse_module(PLAIN).entry
    assert [parameter.name for parameter in main.parameters] == ["a", "b"]
    assert main["b"].parameter_number == 1
    assert main["square"].parameter_number is None


def test_calls_can_be_followed_both_ways() -> None:
    module = parse_module(PLAIN)
    loop, add = module.entry["loop"], module.computations["add.1"]
    assert module.called(loop) == (module.computations["cond"], module.computations["body"])
    assert module.called(module.entry["square"]) == ()
    assert module.callers(module.computations["body"]) == (loop,)
    assert module.callers(add) == (module.computations["body"]["w"], module.entry["total"])
    assert module.callers(module.entry) == ()


def test_a_computation_is_a_sized_collection_of_its_instructions() -> None:
    main = parse_module(PLAIN).entry
    assert len(main) == len(list(main)) == len(main.instructions) == 10
    assert "a" in main
    assert "nothing" not in main
    with pytest.raises(KeyError):
        main["nothing"]


def test_the_value_of_a_constant_is_kept_as_printed() -> None:
    main = parse_module(
        entry(
            "%big = s32[2,3]{1,0} constant({...})",
            "%grid = s32[2,3]{1,0} constant({ { 1, 2, 3 }, /*i1=1*/ { 4, 5, 6 } })",
            "%pairs = c64[2]{0} constant({(1, 2), (3, -4)})",
            "%nan = f32[] constant(nan)",
            'ROOT %text = opaque[] constant("a) b")',
        )
    ).entry
    assert main["big"].literal == "{...}"
    assert main["grid"].literal == "{ { 1, 2, 3 }, /*i1=1*/ { 4, 5, 6 } }"
    assert main["pairs"].literal == "{(1, 2), (3, -4)}"
    assert main["text"].literal == '"a) b"'
    assert not any(one.operands or one.operand_values for one in main)


# -- forms of text


@pytest.mark.parametrize(
    "operands",
    [
        "%a, %b, %a",
        "a, b, a",
        "%a,%b,%a",
        "f32[8]{0} %a, f32[8]{0} %b, f32[8]{0} %a",
        "f32[8]{0} a, f32[8]{0} b, f32[8]{0} a",
        "f32[8]{0:T(8)(2,1)S(1)} %a, f32[8]{0:#(u32)} %b, b(f32[8]{0}) %a",
        "%a, /*index=1*/%b, /*index=2*/%a",
        "f32[8]{0} %a, /*index=1*/f32[8]{0} %b,\n    /* and */ f32[8]{0} %a",
        "(f32[8]{0}, (s32[], f32[4]{0})) %a, %b, %a",
    ],
)
def test_operands_are_read_in_every_printed_form(operands: str) -> None:
    main = parse_module(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%b = f32[8]{0} parameter(1)",
            f'ROOT %r = f32[8]{{0}} custom-call({operands}), custom_call_target="f"',
        )
    ).entry
    assert [operand.name for operand in main.root.operands] == ["a", "b", "a"]
    assert main.root.operand_values == (Value(main["a"]), Value(main["b"]), Value(main["a"]))
    assert main["a"].users == (main.root,)


@pytest.mark.parametrize(
    "operands",
    ["%a#1, %b, %a#0", "%a#1,%b,%a#0", "/*index=5*/%a#1, f32[8] %b, (f32[8], f32[8]) %a#0"],
)
def test_compact_operands_read_one_element_of_a_tuple(operands: str) -> None:
    main = parse_module(
        entry(
            "%a = (s32[], f32[8]{0}) parameter(0)",
            "%b = f32[8]{0} parameter(1)",
            f"ROOT %r = f32[8]{{0}} custom-call({operands})",
        )
    ).entry
    assert main.root.operands == (main["a"], main["b"], main["a"])
    values = main.root.operand_values
    assert [value.tuple_index for value in values] == [(1,), (), (0,)]
    assert list(map(str, (value.shape for value in values))) == ["f32[8]{0}", "f32[8]{0}", "s32[]"]


def test_compact_operands_may_reach_into_nested_tuples() -> None:
    main = parse_module(
        entry("%a = (s32[], (pred[], f32[8])) parameter(0)", "ROOT %r = f32[8] negate(%a#1#1)")
    ).entry
    assert main.root.operand_values == (Value(main["a"], (1, 1)),)
    assert main.root.operand_values[0].shape == parse_shape("f32[8]")


@pytest.mark.parametrize(
    "shape",
    [
        "f32[]",
        "f32[]{:T(128)}",
        "u32[]{:S(2)}",
        "pred[8,128]{1,0:T(8,128)(4,1)}",
        "f32[128,32000]{0,1:T(8,128)S(1)}",
        "s32[<=8,4]{1,0}",
        "f32[?,4]{1,0}",
        "bf16[8]{0:T(1)L(128)#(u32)*(u8)E(16)S(4)SC(0:4)M(64)}",
        "f32[8]{0:P(f32[2]{0:T(128)})}",
        *(f"{t}[8]{{0}}" for t in ("s1", "u1", "s2", "u2", "s4", "u4", "s8", "u64", "c128")),
        *(
            f"{t}[8]{{0}}"
            for t in ("f8e4m3fn", "f8e4m3b11fnuz", "f8e8m0fnu", "f6e2m3fn", "f4e2m1fn")
        ),
        "token[]",
        "opaque[]",
        "b(f32[8]{0:T(128)})",
        "()",
        "(f32[8]{0:T(128)}, token[], ())",
        "(f32[8]{0}, f32[], f32[], f32[], f32[], /*index=5*/s32[8]{0})",
        "((f32[8]{0}, (s32[], b(f32[8]{0:T(8)(2,1)}))), u32[])",
    ],
)
@pytest.mark.parametrize("layout", ["one line", "several lines"])
def test_every_form_of_shape_is_read_in_place(shape: str, layout: str) -> None:
    arguments = "%a, %a" if layout == "one line" else "%a,\n    %a"
    main = parse_module(
        entry(
            "%a = f32[] parameter(0)", f"ROOT %r = {shape} custom-call({arguments}), channel_id=1"
        )
    ).entry
    assert main.root.shape == parse_shape(shape)
    assert main.root.operands == (main["a"], main["a"])
    assert main.root.attributes == {"channel_id": "1"}


@pytest.mark.parametrize(
    "text",
    [
        "HloModule m\n\nENTRY e {\n  p = f32[] parameter(0)\n  ROOT r = f32[] negate(p)\n}\n",
        "HloModule m\nENTRY e {\n  p = f32[] parameter(0)\n  ROOT r = f32[] negate(p)\n}",
        "\n\n  HloModule m\nENTRY %e () -> f32[] {\n p = f32[] parameter(0)\n"
        "ROOT r=f32[] negate(p)}",
        "HloModule m\nENTRY e { p = f32[] parameter(0) ROOT r = f32[] negate(p) }",
        "HloModule m\n\nENTRY %e (p: f32[]) -> f32[]\n{\n  %p = f32[]\n    parameter(0)\n\n"
        "  ROOT %r = f32[] negate(\n    f32[] %p\n  )\n}\n\n\n",
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)\n\tROOT %r = f32[] negate(%p)\n}\n",
        "HloModule m\n\nENTRY %e { %p = f32[] parameter(0)\n  ROOT %r = f32[] negate(%p)\n}\n",
        "HloModule m\n\n/**/ENTRY %e {/* a { */\n  %p = f32[] parameter(0)/**/\n"
        "  /* * */ ROOT %r = f32[] /* f64 */ negate(%p)\n}",
    ],
)
def test_white_space_comments_and_percent_signs_do_not_matter(text: str) -> None:
    main = parse_module(text).entry
    assert [one.name for one in main] == ["p", "r"]
    assert main.root.operands == (main["p"],)


def test_an_instruction_out_of_line_is_not_taken_for_an_attribute() -> None:
    module = parse_module(
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)\n %q = f32[] parameter(1)\n}\n"
    )
    assert [one.name for one in module.entry] == ["p", "q"]
    assert module.entry["p"].attributes == {}


@pytest.mark.parametrize("line", ["\t%b\t=\tf32[8]{0} add(%a, %a)", " %b  = f32[8]{0} add(%a, %a)"])
def test_an_instruction_with_odd_white_space_is_not_taken_for_an_attribute(line: str) -> None:
    module = parse_module(
        f"HloModule m\n\nENTRY %e {{\n  %a = f32[8]{{0}} parameter(0)\n{line}\n}}\n"
    )
    assert [one.name for one in module.entry] == ["a", "b"]


def test_windows_line_ends_change_nothing() -> None:
    tables = '\nFileNames\n1 "a.py"\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n\n%'
    unix = PLAIN.replace("\n%", tables, 1)
    windows = unix.replace("\n", "\r\n")
    for text in (windows, windows.replace("%zero", "% zero".replace(" ", ""))):
        ours, expected = parse_module(text), parse_module(unix)
        assert [one.text for one in ours.instructions] == [
            one.text for one in expected.instructions
        ]
        assert ours.header == expected.header
        assert ours.is_scheduled
        assert ours.frame_tables == expected.frame_tables
        assert ours.lines == expected.lines


def test_a_computation_may_name_its_thread() -> None:
    module = parse_module(
        "HloModule m\n\n"
        "%one (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}, "
        'execution_thread="sparsecore"\n\n'
        '%two {\n  ROOT %p = f32[]\n    parameter(0)\n}, execution_thread="sparsecore"\n\n'
        "ENTRY %e {\n  %p = f32[] parameter(0)\n"
        "  %s = ((f32[]), f32[], u32[]) async-start(%p), calls=%one, "
        'async_execution_thread="sparsecore"\n'
        "  ROOT %d = f32[] async-done(%s)\n}\n"
    )
    assert list(module.computations) == ["one", "two", "e"]
    assert module.called(module.entry["s"]) == (module.computations["one"],)
    assert module.entry["s"].attributes["async_execution_thread"] == '"sparsecore"'


def test_kernel_metadata_over_several_lines_belongs_to_its_instruction() -> None:
    module = parse_module(
        entry(
            "%p = f32[8]{0} parameter(0)",
            '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
            'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"tile_m\\": 512}"\n}}, '
            'metadata={op_name="pallas_call"}, '
            'backend_config={"custom_call_config":{"body":"TUz"}}',
            "ROOT %r = f32[8]{0} negate(%k)",
        )
    )
    kernel = module.entry["k"]
    assert [one.name for one in module.entry] == ["p", "k", "r"]
    assert kernel.op_name == "pallas_call"
    assert kernel.backend_config == {"custom_call_config": {"body": "TUz"}}
    assert "tile_m" in kernel.attributes["frontend_attributes"]


# -- the header


def test_the_header_says_how_the_module_is_compiled() -> None:
    module = parse_module(
        "HloModule jit_step, is_scheduled=true, "
        "input_output_alias={ {0}: (0, {}, may-alias), {1, 0}: (2, {1}, must-alias), "
        "{}: (3, {}) }, "
        "entry_computation_layout={(f32[8,4]{1,0:T(8,128)}, /*index=1*/(s32[], bf16[4]{0}))"
        "->(f32[8,4]{0,1:T(8,128)}, ())}, replica_count=2, num_partitions=4\n\n"
        "ENTRY %e {\n  ROOT %p = f32[] parameter(0)\n}\n"
    )
    assert module.is_scheduled
    assert module.device_count == 8
    assert module.input_output_aliases == (
        Alias((0,), 0, (), "may-alias"),
        Alias((1, 0), 2, (1,), "must-alias"),
        Alias((), 3, (), "may-alias"),
    )
    layout = module.entry_layout
    assert layout is not None
    assert list(map(str, layout.parameters)) == ["f32[8,4]{1,0:T(8,128)}", "(s32[], bf16[4]{0})"]
    assert str(layout.result) == "(f32[8,4]{0,1:T(8,128)}, ())"


def test_a_header_without_attributes_has_defaults() -> None:
    module = parse_module(entry("ROOT %p = f32[] parameter(0)"))
    assert module.header == {}
    assert not module.is_scheduled
    assert module.device_count == 1
    assert module.entry_layout is None
    assert module.input_output_aliases == ()
    assert module.frame_tables.strip() == ""


@pytest.mark.parametrize(
    "header",
    [
        ', is_scheduled=true, frontend_attributes={a={\n  b={c}\n},d="\n"}, num_partitions=4',
        ", is_scheduled=true,\n  num_partitions=4, frontend_attributes={d={a}}",
        ", is_scheduled=true\n  , frontend_attributes={a={\n}}\n  , num_partitions=4",
    ],
)
def test_a_header_may_go_on_over_several_lines(header: str) -> None:
    module = parse_module(PLAIN.replace(", is_scheduled=true, num_partitions=4", header))
    assert module.is_scheduled
    assert module.device_count == 4
    assert "frontend_attributes" in module.header
    assert len(module.computations) == 4


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (", num_partitions=many", "num_partitions"),
        (", num_partitions=²", "num_partitions"),
        (f", num_partitions={'9' * 5000}", "num_partitions"),
        (", entry_computation_layout={(f32[8]{0})}", "entry_computation_layout"),
        (", entry_computation_layout={(f32[8]{0}->f32[]}", ""),
        (", entry_computation_layout={(strange)->f32[]}", "entry_computation_layout"),
        (", entry_computation_layout=", "entry_computation_layout"),
        (", input_output_alias={ {1 2}: (0, {}), {x}: (1, {}) }", "input_output_alias"),
        (f", input_output_alias={{ {{{'9' * 5000}}}: (0, {{}}) }}", "input_output_alias"),
        (f", input_output_alias={{ {{}}: ({'9' * 5000}, {{}}) }}", "input_output_alias"),
    ],
    ids=lambda value: value[:40],
)
def test_what_a_header_says_in_an_unknown_form_is_kept_raw(header: str, name: str) -> None:
    module = parse_module(
        f"HloModule m{header}\n\nENTRY %e {{\n  ROOT %p = f32[] parameter(0)\n}}\n"
    )
    assert module.device_count == 1
    assert module.entry_layout is None
    assert module.input_output_aliases == ()
    assert name in module.header


# -- source positions, as real compiles print them


def test_positions_are_read_from_the_instruction_in_old_modules(dumps: Dumps) -> None:
    text = snapshot(dumps, "lm_head_versions/jax-0.7.2-auto", "after_optimizations.txt")
    module = parse_module(text)
    assert module.frame_tables.strip() == ""
    convert = module.entry["convert_element_type.1"]
    assert convert.op_name == "jit(step)/jvp()/convert_element_type"
    assert module.source(convert) == SourceLocation("/src/lmc.py", 26)
    assert module.frames(convert) == (SourceLocation("/src/lmc.py", 26),)
    assert module.source(module.entry["param"]) is None


def test_positions_are_read_from_the_tables_in_new_modules(dumps: Dumps) -> None:
    text = snapshot(dumps, "lm_head_versions/jax-0.12.0-auto", "before_optimizations.txt")
    module = parse_module(text)
    maximum = module.computations["region_0.1"].root
    assert (maximum.opcode, maximum.metadata.stack_frame_id) == ("maximum", 3)
    assert module.frames(maximum) == (
        SourceLocation("/src/lm.py", 33, "loss"),
        SourceLocation("/src/lm.py", 38, "step"),
        SourceLocation("/src/lm.py", 44, "<module>"),
    )
    assert module.source(maximum) == SourceLocation("/src/lm.py", 33, "loss")


def _with_tables(frames: str, frame_id: int) -> tuple[Module, Instruction]:
    module = parse_module(
        'HloModule m\n\nFileNames\n1 "a.py"\n2 "dir \\"x\\"/b.py"\n\n'
        'FunctionNames\n1 "f"\n2 "g"\n\n'
        "FileLocations\n"
        "1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}\n"
        "2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=2}\n\n"
        f"StackFrames\n{frames}\n\n"
        f"ENTRY %e {{\n  ROOT %p = f32[] parameter(0), metadata={{stack_frame_id={frame_id}}}\n}}\n"
    )
    return module, module.entry.root


def test_the_parent_of_a_frame_is_printed_one_too_high() -> None:
    module, root = _with_tables(
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}", 2
    )
    assert module.frames(root) == (
        SourceLocation('dir "x"/b.py', 20, "g"),
        SourceLocation("a.py", 10, "f"),
    )


@pytest.mark.parametrize(
    ("frames", "files"),
    [
        ("1 {file_location_id=1 parent_frame_id=2}", ["a.py"]),  # its own parent
        (
            "1 {file_location_id=1 parent_frame_id=3}\n2 {file_location_id=2 parent_frame_id=2}",
            ["a.py", 'dir "x"/b.py'],
        ),  # a ring
        ("1 {file_location_id=7}", [""]),
        ("2 {file_location_id=2}", []),
        (f"1 {{file_location_id=1 parent_frame_id={'9' * 5000}}}", ["a.py"]),
        (f"{'9' * 5000} {{file_location_id=1}}", []),
        ("1 {file_location_id=² parent_frame_id=x}", [""]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_broken_tables_give_what_they_can(frames: str, files: list[str]) -> None:
    module, root = _with_tables(frames, 1)
    assert [location.file for location in module.frames(root)] == files


def test_long_rows_of_the_tables_are_read_in_linear_time() -> None:
    start = time.process_time()
    module, root = _with_tables("1 {" + "a" * 300_000 + "}\n2 {" + "1" * 300_000 + "=}", 1)
    assert [location.file for location in module.frames(root)] == [""]
    assert time.process_time() - start < 2


# -- real snapshots


def test_a_real_step_gives_layout_aliases_and_devices(dumps: Dumps) -> None:
    text = snapshot(dumps, "lm_head_versions/jax-0.12.0-auto", "after_optimizations.txt")
    module = parse_module(text)
    assert (module.name, module.is_scheduled, module.device_count) == ("jit_step", True, 4)
    assert [(a.output_index, a.parameter_number) for a in module.input_output_aliases] == [
        *(((0,), 0), ((1,), 1))
    ]
    layout = module.entry_layout
    assert layout is not None
    assert layout.parameters == tuple(p.shape for p in module.entry.parameters)
    assert layout.result == module.entry.root.shape
    fusion = module.entry["fusion"]
    assert [c.name for c in module.called(fusion)] == ["all-reduce-scatter"]
    assert module.entry["all-reduce.2"].replica_groups(4) == ((0, 1, 2, 3),)
    assert module.entry["all-reduce.2"].operand_values[0].shape == parse_shape("f32[]{:T(128)}")


@pytest.mark.parametrize(
    "folder",
    [
        "lm_head_versions/jax-0.7.2-explicit",
        "lm_head_versions/jax-0.12.0-explicit",
        "llama2_explicit_fsdp4",
    ],
)
def test_the_text_of_an_instruction_is_its_line(folder: str, dumps: Dumps) -> None:
    text = snapshot(dumps, folder, "after_optimizations.txt")
    printed = {re.sub(r"/\*index=\d+\*/", "", line.strip()) for line in text.split("\n")}
    instructions = list(parse_module(text).instructions)
    assert len(instructions) > 100
    for one in instructions:
        if "\n" not in one.attribute_text:
            assert re.sub(r"/\*index=\d+\*/", "", one.text) in printed


@pytest.mark.parametrize("folder", ["llama2_auto_fsdp4", "lm_head_platforms/cpu-auto"])
def test_a_module_put_together_from_its_instructions_is_the_same(folder: str, dumps: Dumps) -> None:
    suffix = "cpu_after_optimizations.txt" if "cpu" in folder else "after_optimizations.txt"
    module = parse_module(snapshot(dumps, folder, suffix))
    text = f"HloModule {module.name}{module.header_text}\n"
    for computation in module.computations.values():
        text += "\nENTRY" if computation is module.entry else "\n"
        text += f" %{computation.name} {{\n"
        text += "".join(f"  {one.text}\n" for one in computation) + "}\n"
    again = parse_module(text)
    assert list(again.computations) == list(module.computations)
    for ours, theirs in zip(again.instructions, module.instructions, strict=True):
        assert ours.text == theirs.text
        assert ours.shape == theirs.shape
        assert [o.name for o in ours.operands] == [o.name for o in theirs.operands]
        assert [u.name for u in ours.users] == [u.name for u in theirs.users]


# -- broken text


def error_of(text: str, *, partial: bool = False) -> ParseError:
    with pytest.raises(ParseError) as caught:
        parse_module(text, path="dump.txt", partial=partial)
    return caught.value


@pytest.mark.parametrize(
    "text", ["", "\n", "hello", "{}", "HloModule", "module @jit_f {\n}", "\0" * 9]
)
def test_what_is_no_hlo_is_refused_at_once(text: str) -> None:
    for partial in (False, True):
        error = error_of(text, partial=partial)
        assert "does not start with 'HloModule'" in error.reason
        assert (error.line, error.column) == (1, 1)
        assert str(error).startswith("dump.txt:1:1: ")


def test_text_without_an_entry_is_refused_at_its_end() -> None:
    text = PLAIN[: PLAIN.index("ENTRY")]
    error = error_of(text)
    assert "ends without an ENTRY" in error.reason
    assert (error.line, error.column) == (24, 1)
    assert error_of("HloModule m").line == 1


@pytest.mark.parametrize(
    ("lines", "reason", "line", "column"),
    [
        (["%a = f32[] negate(%b)"], "operand b is not defined before its use", 4, 3),
        (["%a = f32[] negate(%a)"], "operand a is not defined before its use", 4, 3),
        (["%p = f32[] parameter(0)", "%a = f32[] negate(%p#0)"], "p has no element 0", 5, 3),
        (["%p = (f32[]) parameter(0)", "%a = f32[] negate(%p#1)"], "p has no element 1", 5, 3),
        (["%p = (f32[]) parameter(0)", "%a = f32[] negate(%p#x)"], "#x is no element", 5, 3),
        (["%p = f32[] parameter(0)", "%a = f32[] add(%p, )"], "an operand is empty", 5, 3),
        (["%p = f32[] parameter(0)", "%p = f32[] parameter(1)"], "instruction is called p", 5, 3),
        (["%p = f32[8,4]{0} parameter(0)"], "p: layout '0' does not order 2 dimensions", 4, 3),
        (["%p = f32[3,,4] parameter(0)"], "p: '' is not a number", 4, 3),
        (["%p = f32[8]{0:T(0)} parameter(0)"], "p: a tile has no size 0", 4, 3),
        (["%p = F32[] parameter(0)"], "a shape is expected here", 4, 8),
        (["%p = f32[] parameter(0", "%q = f32[] negate(%p)"], "'(' is not closed by ')'", 4, 23),
        (["%p = f32[] parameter(0)", "%q = f32[] add(%p], %p)"], "'(' is not closed by ')'", 5, 17),
        (["%p = f32[] parameter(0)", "%q = f32[] add(%p, {%p)"], "'{' is not closed by '}'", 5, 22),
        (["%p = f32[] parameter 0"], "an opcode and '(' are expected here", 4, 14),
        (["%p = f32[]"], "an opcode and '(' are expected here", 5, 1),
        (["%p = (f32[], f32[] parameter(0)"], "is not closed by ')'", 4, 8),
        (["p"], "an instruction, 'name = shape opcode(...)', is expected here", 4, 3),
        (["%p = f32[] parameter(0) nonsense"], "", 0, 0),
        ([], "computation e has no instructions", 3, 11),
    ],
)
def test_a_broken_instruction_is_named_with_its_line_and_column(
    lines: list[str], reason: str, line: int, column: int
) -> None:
    if not reason:  # what follows the operands is an attribute of an unknown form
        assert parse_module(entry(*lines)).entry.root.attributes == {"": "nonsense"}
        return
    error = error_of(entry(*lines))
    assert reason in error.reason
    assert (error.line, error.column) == (line, column)


@pytest.mark.parametrize(
    ("text", "reason", "line", "column"),
    [
        (PLAIN.replace("%cond (p", "%add.1 (p"), "a second computation is called add.1", 9, 1),
        (PLAIN.replace("%cond (p", "ENTRY %cond (p"), "a second ENTRY, main, after cond", 24, 1),
        (PLAIN.replace("pred[] {", "pred[]"), "'{' of computation cond is expected here", 10, 3),
        (PLAIN.replace("f32[8])) -> pred[] {", "f32[8])"), "'(' is not closed by ')'", 9, 7),
        (PLAIN + PLAIN, "'{' of computation HloModule is expected here", 36, 11),
        (PLAIN + "}\n", "the header of a computation is expected here", 36, 1),
        ("HloModule m, a={\nENTRY %e {\n}\n", "'{' is not closed by '}'", 1, 16),
        ('HloModule m, a="\nENTRY %e {\n}\n', "string is not closed", 1, 16),
    ],
)
def test_a_broken_module_is_named_with_its_line_and_column(
    text: str, reason: str, line: int, column: int
) -> None:
    error = error_of(text)
    assert reason in error.reason
    assert (error.line, error.column) == (line, column)


CUT = """HloModule m, num_partitions=2

ENTRY %e (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), metadata={op_name="p"}
  %q = (f32[8]{0}, s32[]) custom-call(%p, /*index=1*/%p), metadata={op_name="q" stack_frame_id=1}
"""


@pytest.mark.parametrize(
    ("after", "line", "column", "kept"),
    [
        # Whole lines: the text ends where an instruction or the closing brace should be.
        ('op_name="q" stack_frame_id=1}\n', 6, 1, ["p", "q"]),
        ('op_name="p"}\n', 5, 1, ["p"]),
        ('op_name="p"}', 4, 54, ["p"]),
        # In the middle of the last line.
        ("  %q", 5, 3, ["p"]),
        ("  %q =", 5, 7, ["p"]),
        ("  %q = (f32[8", 5, 12, ["p"]),
        ("  %q = (f32[8]{0}, s", 5, 8, ["p"]),
        ("s32[])", 5, 26, ["p"]),
        ("s32[]) custom-c", 5, 27, ["p"]),
        ("custom-call(", 5, 38, ["p"]),
        ("custom-call(%p, /*ind", 5, 38, ["p"]),
        ("custom-call(%p, /*index=1*/%p", 5, 38, ["p"]),
        ("custom-call(%p, /*index=1*/%p)", 5, 57, ["p", "q"]),
        ("/*index=1*/%p), metadata={op_na", 5, 68, ["p"]),
        ('/*index=1*/%p), metadata={op_name="q', 5, 77, ["p"]),
        # Before any instruction.
        ("-> f32[8] {", 3, 33, []),
        ("-> f32[8]", 3, 31, []),
        ("ENTRY %e (p: f3", 3, 10, []),
        ("ENTR", 3, 5, []),
        ("partitions=2\n\n", 3, 1, []),
        ("num_parti", 1, 23, []),
    ],
)
def test_a_cut_is_found_where_it_is_and_what_stands_before_it_is_kept(
    after: str, line: int, column: int, kept: list[str]
) -> None:
    text = CUT[: CUT.index(after) + len(after)]
    error = error_of(text)
    assert (error.line, error.column) == (line, column)
    module = parse_module(text, partial=True)
    assert module.error is not None
    assert (module.error.line, module.error.column) == (line, column)
    assert module.name == "m"
    assert [one.name for one in module.instructions] == kept
    assert module.entry_name == ("e" if kept else None)


def test_computations_before_a_cut_are_kept_whole() -> None:
    module = parse_module(PLAIN[: PLAIN.index("%square")], partial=True)
    assert [len(computation) for computation in module.computations.values()] == [3, 4, 5, 3]
    assert module.entry.root is module.entry["zero"]
    assert module.error is not None
    without_entry = parse_module(PLAIN[: PLAIN.index("ENTRY")], partial=True)
    assert list(without_entry.computations) == ["add.1", "cond", "body"]
    assert without_entry.entry_name is None
    with pytest.raises(KeyError):
        without_entry.entry  # noqa: B018


@pytest.mark.parametrize("later", ["%total", "%missing"])
def test_of_two_broken_instructions_the_first_is_named(later: str) -> None:
    text = PLAIN.replace("%both = ", "%a = ").replace("reduce(%both", f"reduce({later}")
    for partial in (False, True):
        error = parse_module(text, partial=True).error if partial else error_of(text)
        assert error is not None
        assert error.reason == "a second instruction is called a"
        assert error.line == 32
    assert len(parse_module(text, partial=True).entry) == 7


def test_an_error_on_the_last_line_says_that_the_text_may_be_cut_off() -> None:
    assert "cut off" in error_of(PLAIN[: PLAIN.index("direction=LT")].rstrip(", ") + " {").reason
    assert "cut off" not in error_of(PLAIN.replace("multiply(%a", "multiply(%")).reason


def test_the_reason_is_short_however_long_the_damage() -> None:
    for text in (entry(f"%p = f32[] negate(%{'x' * 100_000})"), PLAIN + "x" * 100_000):
        assert len(error_of(text).reason) < 220


def test_instructions_before_a_broken_one_are_kept() -> None:
    text = PLAIN.replace("multiply(%a, %a)", "multiply(%a, %missing)")
    module = parse_module(text, partial=True)
    assert [one.name for one in module.entry] == ["b", "a", "zero"]
    assert module.error is not None
    assert (module.error.line, module.error.column) == (28, 3)


def test_a_cut_header_gives_an_empty_module() -> None:
    module = parse_module("HloModule m, frontend_attributes={a=", partial=True)
    assert (module.name, dict(module.computations), module.entry_name) == ("m", {}, None)
    assert module.error is not None


def test_whole_text_read_in_part_is_read_whole() -> None:
    module = parse_module(PLAIN, partial=True)
    assert module.error is None
    assert len(list(module.instructions)) == len(list(parse_module(PLAIN).instructions))


# -- hostile text


def parsed(text: str, *, partial: bool = False) -> tuple[Module | None, ParseError | None]:
    """The module, or the error; anything else that is raised is a fault."""
    try:
        module = parse_module(text, partial=partial)
    except ParseError as error:
        return None, error
    return module, module.error


_DEPTH = 200_000
_PLACES = {
    "shape": "HloModule m\n\nENTRY %e {{\n  %p = f32[]{} parameter(0)\n}}\n",
    "tuple": "HloModule m\n\nENTRY %e {{\n  %p = (f32[], {}) parameter(0)\n}}\n",
    "operands": "HloModule m\n\nENTRY %e {{\n  %p = f32[] negate({})\n}}\n",
    "literal": "HloModule m\n\nENTRY %e {{\n  %p = f32[] constant({})\n}}\n",
    "attribute": "HloModule m\n\nENTRY %e {{\n  %p = f32[] parameter(0), sharding={}\n}}\n",
    "header": "HloModule m, input_output_alias={}\n\nENTRY %e {{\n  %p = f32[] parameter(0)\n}}\n",
    "signature": "HloModule m\n\nENTRY %e (p: {}) -> f32[] {{\n  %p = f32[] parameter(0)\n}}\n",
    "tables": "HloModule m\n\nStackFrames\n1 {}\n\nENTRY %e {{\n  %p = f32[] parameter(0)\n}}\n",
    "top": "HloModule m\n\n{}\n\nENTRY %e {{\n  %p = f32[] parameter(0)\n}}\n",
}


@pytest.mark.parametrize(
    ("place", "brackets"),
    [
        *itertools.product(["shape", "operands", "attribute", "header"], ["()", "{}", "[]"]),
        *itertools.product(["tuple", "literal", "signature", "tables", "top"], ["({[]})"]),
        *itertools.product(["operands", "attribute"], ["/**/", '""']),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_kept_raw_or_refused_in_linear_time(
    place: str, brackets: str, closed: bool
) -> None:
    half = len(brackets) // 2
    nested = brackets[:half] * (_DEPTH // half)
    if closed:
        nested += brackets[half:] * (_DEPTH // half)
    text = _PLACES[place].format(nested)
    start = time.process_time()
    module, error = parsed(text)
    assert error is None or len(str(error)) < 300
    assert module is None or touch(module) > 0
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "text",
    [
        # Many computations, none of which can be read the plain way.
        "HloModule m\n\n" + "".join(f"c{i} {{ p = f32[] parameter(0) }}\n" for i in range(5_000)),
        "HloModule m\n\n"
        + "".join(f"c{i} {{\n p = f32[] parameter(0) }}\n" for i in range(5_000))
        + "ENTRY e {\n  p = f32[] parameter(0)\n}\n",
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)" + "\n}," * 100_000,
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)" + "\n}, execution_thread=" * 20_000,
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)" + "\n%" * 100_000 + "\n}\n",
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)\n  %q = f32[] add("
        + "%p#0, " * 50_000,
        entry("%p = f32[] parameter(0)", "%q = f32[] add(%p" + ", /*%p" * 50_000 + ")"),
        entry("%p = f32[] parameter(0)", "%q = f32[] add(f32[] %p" + ", f32[] %p" * 50_000 + ")"),
        entry("%p = f32[] parameter(0)", "%q = f32[] add(" + "%p " * 100_000 + ")"),
        entry(*(f"%p{i} = f32[] parameter({i})" for i in range(10_000)), "%q = f32[] negate(%x)"),
        entry("%p = f32[] parameter(0), metadata={op_name=" + '"' * 100_001 + "}"),
        "HloModule m" + ",\n" * 100_000,
        "HloModule m\n" + "1 {\n" * 100_000,
        "HloModule m\n" + "FileNames\n" * 50_000,
        "HloModule m\n\n" + "%c " * 100_000,
    ],
    ids=range(15),
)
def test_long_broken_text_is_read_in_linear_time(text: str) -> None:
    start = time.process_time()
    module = parse_module(text, partial=True)
    assert module.name == "m"
    assert module.error is None or len(str(module.error)) < 300
    touch(module)
    assert time.process_time() - start < 5


def touch(module: Module) -> int:
    """Read every property of everything in ``module``; return how many instructions there are."""
    count = 0
    for computation in module.computations.values():
        assert computation.name in repr(computation)
        assert all(parameter.opcode == "parameter" for parameter in computation.parameters)
        assert all(computation in module.called(caller) for caller in module.callers(computation))
        assert computation.root in computation.instructions
        for one in computation:
            count += 1
            assert one.computation is computation
            assert all(one in operand.users for operand in one.operands)
            assert all(one in user.operands for user in one.users)
            assert tuple(value.instruction for value in one.operand_values) == one.operands
            assert all(value.shape.rank >= 0 for value in one.operand_values)
            assert one.parameter_number is None or one.parameter_number >= 0
            assert one.estimated_cycles is None or one.estimated_cycles >= 0
            assert all(number >= 0 for number in one.dimensions)
            assert all(name for name in one.called_names)
            assert one.op_name == one.metadata.op_name
            assert all(location.line >= 0 for location in module.frames(one))
            assert one.sharding is None or one.sharding.kind
            assert isinstance(one.backend_config, dict)
            assert one.custom_call_target == "" or one.opcode == "custom-call"
            assert one.literal in one.text
            assert one.attribute_text in one.text
            assert one.name in repr(one)
            groups = one.replica_groups(4)
            assert groups is None or "replica_groups" in one.attributes
            shape = one.shape
            assert shape.padded_bytes >= shape.logical_bytes >= 0
            assert shape.element_count >= 0
            assert set(shape.moving_order) <= set(shape.minor_to_major)
            assert shape.without_layout in (str(shape), shape.without_layout)
            assert parse_shape(str(shape)) == shape
    assert module.device_count >= 0
    assert module.is_scheduled in (True, False)
    assert module.entry_layout is None or module.entry_layout.result.rank >= 0
    assert all(alias.parameter_number >= 0 for alias in module.input_output_aliases)
    return count


def test_the_readers_of_few_are_found_as_those_of_all() -> None:
    text = entry(
        "%p = f32[] parameter(0)",
        *(f"%a{n} = f32[] add(%p, %{f'a{n - 1}' if n else 'p'})" for n in range(8)),
        "%t = (f32[], f32[]) tuple(%p, %a7)",
    )
    for asked in (1, 9):
        e = parse_module(text).entry
        names = ["p", *(f"a{n}" for n in range(8))][-asked:]
        found = {name: [(user.name, number) for user, number in e[name].uses()] for name in names}
        assert found["a7"] == [("t", 1)]
        assert all(e[name].users == (e[f"a{n + 1}"],) for n, name in enumerate(names[1:-1]))
    assert found["p"] == [("a0", 0), ("a0", 1), *((f"a{n}", 0) for n in range(1, 8)), ("t", 0)]
    assert e.made_count == len(e)
    assert [one.name for one in e["p"].users] == [*(f"a{n}" for n in range(8)), "t"]
    assert e["a3"] is e.instructions[4] is e["a4"].operands[1]


def test_a_whole_real_module_can_be_touched(dumps: Dumps) -> None:
    text = snapshot(dumps, "lm_head_versions/jax-0.12.0-auto", "after_optimizations.txt")
    assert touch(parse_module(text)) == text.count("\n  %") + text.count("\n  ROOT %") > 100


_FRAGMENTS = st.sampled_from(
    [
        *(
            "(",
            ")",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            "\n",
            "\n}",
            "\n}\n",
            "  ",
            ",",
            ", ",
            "=",
            "#",
            "%",
        ),
        *(
            "#1",
            "#9",
            "²",
            "٣",
            "9" * 5000,
            "1e999",
            "-1",
            "0",
            "<=",
            "?",
            "*",
            ":",
            "/*",
            "*/",
            "->",
        ),
        *(
            "T(0)",
            "T(*)",
            "S(²)",
            "E(4)",
            "{}",
            "()",
            "ROOT ",
            "ENTRY ",
            "HloModule ",
            "\r\n",
            "\0",
        ),
        *(
            "mesh[",
            "'a'=0",
            "'a':(0)2",
            "[0,9]<=[0]",
            "T(1,5)",
            "last_tile_dims={",
            "devices=[",
            "\ud800",
        ),
        *(", dimensions={x}", ", calls=%", ', metadata={op_name="\\²" stack_frame_id=1}'),
        *(', backend_config={"window_config":{"estimated_cycles":1e999}}', ", sharding={mesh[}"),
    ]
)
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["cut", "delete", "repeat", "move", "flip", "insert", "insert"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.integers(1, 200),
        _FRAGMENTS,
    ),
    min_size=1,
    max_size=6,
)
_Edit = tuple[str, float, float, int, str]


def edited(text: str, edits: list[_Edit]) -> str:
    """``text`` after cuts, deletions, repetitions, moves, flipped characters and insertions."""
    for kind, place, target, size, fragment in edits:
        at, to = int(place * len(text)), int(target * len(text))
        piece = text[at : at + size]
        if kind == "cut":
            text = text[:at]
        elif kind == "delete":
            text = text[:at] + text[at + size :]
        elif kind == "repeat":
            text = text[:at] + piece * 2 + text[at + size :]
        elif kind == "move":
            text = text[:to] + piece + text[to:]
        elif kind == "flip" and piece:
            text = text[:at] + chr(ord(piece[0]) ^ (1 << size % 7)) + text[at + 1 :]
        else:
            text = text[:at] + fragment + text[at:]
    return text


@pytest.fixture(scope="session")
def small_snapshots(dumps: Dumps) -> list[str]:
    return [
        snapshot(dumps, "lm_head_versions/jax-0.12.0-auto", "after_optimizations.txt"),
        snapshot(dumps, "lm_head_versions/jax-0.7.2-explicit", "before_optimizations.txt"),
        snapshot(dumps, "lm_head_platforms/cpu-auto", "cpu_after_optimizations.txt"),
    ]


@settings(max_examples=100, deadline=None)
@given(which=st.integers(0, 2), edits=_EDITS, partial=st.booleans())
def test_damaged_real_text_is_read_or_refused_and_never_anything_else(
    small_snapshots: list[str], which: int, edits: list[_Edit], partial: bool
) -> None:
    text = edited(small_snapshots[which], edits)
    start = time.process_time()
    module, error = parsed(text, partial=partial)
    if error is not None:
        assert (error.line, error.column) >= (1, 1)
        assert len(error.reason) < 220
    if module is not None:
        assert partial or module.error is None
        assert touch(module) >= 0
    assert time.process_time() - start < 2


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(
        [
            *("metadata", "sharding", "replica_groups", "dimensions", "backend_config", "calls"),
            *(
                "to_apply",
                "custom_call_target",
                "index",
                "frontend_attributes",
                "source_target_pairs",
            ),
        ]
    ),
    pieces=st.lists(_FRAGMENTS | st.text(max_size=4), max_size=8),
)
def test_no_value_of_an_attribute_makes_a_property_fail(key: str, pieces: list[str]) -> None:
    text = entry(
        "%p = (f32[8], s32[]) parameter(0)",
        f"ROOT %r = f32[8]{{0}} custom-call(%p#0), {key}={''.join(pieces)}",
    )
    assert touch(parse_module(text, partial=True)) >= 0


# -- read-only


def _public(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if isinstance(value, property)]


def test_nothing_parsed_can_be_assigned_to() -> None:
    module = parse_module(PLAIN)
    for thing in (module.entry, module.entry.root):
        names = _public(type(thing))
        assert len(names) >= 4
        for name in names:
            with pytest.raises(AttributeError):
                setattr(thing, name, None)
        with pytest.raises(AttributeError):
            thing.extra = 1  # type: ignore[union-attr]
    for name in ("name", "computations", "entry_name", "entry", "header", "error", "extra"):
        with pytest.raises(AttributeError):
            setattr(module, name, None)
    with pytest.raises(AttributeError):
        module.entry.root.metadata.op_name = ""  # type: ignore[misc]
