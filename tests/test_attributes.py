"""The attributes of instructions, read on demand."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hlo_audit.dump import read_dump
from hlo_audit.hlo import Instruction, Metadata, Sharding, parse_module
from hlo_audit.hlo.attributes import (
    CALLING_ATTRIBUTES,
    parse_computation_names,
    parse_integers,
    parse_operands,
    parse_replica_groups,
    parse_sharding,
    split_attributes,
)
from hlo_audit.hlo.scan import Unbalanced, split_items


def instruction(attributes: str, opcode: str = "custom-call") -> Instruction:
    """An instruction with ``attributes``, which start with a comma."""
    return parse_module(
        f"HloModule m\n\nENTRY %e {{\n  %x = f32[8]{{0}} {opcode}(){attributes}\n}}\n"
    ).entry.root


# -- splitting


def test_attributes_are_split_at_the_commas_outside_brackets_and_strings() -> None:
    found = instruction(
        ", window={size=2x2 stride=1x1}, dim_labels=b01f_01io->b01f, dimensions={0,1}, "
        'frontend_attributes={a="x, y=1",b={c=2,d=3}}, metadata={op_name="f(a, b)/{c}"}, '
        "channel_id=7"
    ).attributes
    assert found == {
        "window": "{size=2x2 stride=1x1}",
        "dim_labels": "b01f_01io->b01f",
        "dimensions": "{0,1}",
        "frontend_attributes": '{a="x, y=1",b={c=2,d=3}}',
        "metadata": '{op_name="f(a, b)/{c}"}',
        "channel_id": "7",
    }


def split_by_hand(text: str) -> list[str] | None:
    """Character by character; ``None`` where a bracket or a string is not balanced."""
    items, closers, start, position = [], [], 0, 0
    while position < len(text):
        char = text[position]
        if char == '"':
            position += 1
            while position < len(text) and text[position] != '"':
                position += 2 if text[position] == "\\" else 1
            if position >= len(text):
                return None
        elif char in "{([":
            closers.append({"{": "}", "(": ")", "[": "]"}[char])
        elif char in "})]":
            if not closers or closers.pop() != char:
                return None
        elif char == "," and not closers:
            items.append(text[start:position].strip())
            start = position + 1
        position += 1
    return None if closers else items + [text[start:].strip()] * (start < len(text))


NESTED = st.recursive(
    st.sampled_from(["a", ",", "\n", " ", "b=c", '"d,}"', '"\\""', "\\"]),
    lambda inside: st.tuples(st.sampled_from(["{}", "()", "[]"]), st.lists(inside, max_size=4)).map(
        lambda pair: pair[0][0] + "".join(pair[1]) + pair[0][1]
    ),
)


@given(st.lists(NESTED, max_size=6).map("".join) | st.text('{}()[]",\n\\a', max_size=12))
@example("{[{(a,b)}],c},d")
@example('{{{"}"}}}, {{{"}}}')
def test_nesting_of_any_depth_is_split_as_by_hand(text: str) -> None:
    try:
        items = split_items(text)
    except Unbalanced:
        items = None
    assert items == split_by_hand(text)


ATTRIBUTE_TEXT = st.tuples(
    st.sampled_from([", ", ",", ",  ", ",\n", " "]),
    st.sampled_from(["a", "b.c-d", "_", "1a", "a b", ""]),
    st.sampled_from(["=", " = ", "= ", ""]),
    st.lists(NESTED, max_size=3).map("".join) | st.text('{}()[]",\n\\a ', max_size=6),
).map("".join)


@given(st.lists(ATTRIBUTE_TEXT, max_size=4).map("".join))
@example(", sharding={mesh['x'=2], [{'x'}, {}]}, metadata={op_name=\"a\"}")
@example(", a=b ")
@example(", a=b\n, c=d")
@example(", a={b}c, a=")
@example(", a={[b}]}, c=d")
@example(", a=b, c={{{{}}}}, d=e,")
def test_attributes_are_the_items_by_their_names(text: str) -> None:
    items = split_by_hand(text.lstrip(", \n"))
    expected = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        is_named = equals and re.fullmatch(r"[A-Za-z_][\w.-]*\s*", name)
        expected[name.rstrip() if is_named else ""] = value.lstrip() if is_named else item
    if items is None:
        expected = {"": text.strip(", \n")}
    assert split_attributes(text) == expected


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("%a", [("a", ())]),
        ("%a, %b.1#2, /*index=5*/%c#0#3", [("a", ()), ("b.1", (2,)), ("c", (0, 3))]),
        ("f32[8]{0} %a, (f32[], s32[]) %b#1", [("a", ()), ("b", (1,))]),
        ("%a,%b , c", [("a", ()), ("b", ()), ("c", ())]),
        ("/* of %x, y */ %a", [("a", ())]),
        ("%a#01", [("a", (1,))]),
    ],
)
def test_operands_are_read_in_any_form(text: str, operands: list[tuple[str, object]]) -> None:
    assert parse_operands(text) == operands


@pytest.mark.parametrize("text", ["%a, ", ", %a", "%a#", "%a#b", "%a#-1", f"%a#{10**20}", "%", ""])
def test_operands_of_no_known_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"operand|element"):
        parse_operands(text)


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        (", kind=kLoop, calls=%f.1", ("f.1",)),
        (', calls=%f, metadata={op_name="while/body=/select"}', ("f",)),
        (", dimensions={0,1}, to_apply=%add, calls=%g", ("g", "add")),
        (", to_apply=%a, to_apply=%b", ("b",)),
        (", condition=%c, body=%b", ("c", "b")),
        (", branch_computations={%a, %b}", ("a", "b")),
        (", calls = f", ("f",)),
        (', metadata={op_name="calls=%f"}', ()),
    ],
)
def test_what_an_instruction_calls(attributes: str, names: tuple[str, ...]) -> None:
    assert instruction(attributes).called_names == names


def test_what_is_called_in_a_dump_is_what_its_attributes_say(dumps: Callable[[str], Path]) -> None:
    (dump,) = read_dump(dumps("llama2_auto_fsdp4")).modules
    assert dump.final is not None
    module = dump.final.read()
    for one in module.instructions:
        said = [one.attributes[key] for key in CALLING_ATTRIBUTES if key in one.attributes]
        assert one.called_names == tuple(n for text in said for n in parse_computation_names(text))
    calls = [
        (name, call.instruction)
        for computation in module.computations.values()
        for name, call in computation.calls
    ]
    assert calls == [(name, one) for one in module.instructions for name in one.called_names]
    assert calls


def test_an_instruction_without_attributes_has_none() -> None:
    plain = instruction("")
    assert plain.attributes == {}
    assert plain.metadata == Metadata()
    assert plain.op_name == plain.custom_call_target == ""
    assert plain.sharding is None
    assert plain.estimated_cycles is None
    assert plain.replica_groups(4) is None
    assert (len(plain.dimensions), len(plain.called_names)) == (0, 0)
    assert plain.backend_config == {}


def test_attributes_that_cannot_be_split_are_kept_as_they_are() -> None:
    assert instruction(", dimensions={0,1}, strange").attributes == {
        "dimensions": "{0,1}",
        "": "strange",
    }
    assert instruction(', metadata={op_name="a"').attributes == {"": 'metadata={op_name="a"'}
    assert instruction(", a=], b=2").attributes == {"": "a=], b=2"}


def test_attributes_may_go_on_over_several_lines() -> None:
    found = instruction(
        ', frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block\\": 512}"\n}}, '
        "channel_id=1"
    )
    assert found.attributes["channel_id"] == "1"
    assert found.attributes["frontend_attributes"].count("\n") == 2


def test_a_brace_and_a_comma_at_the_start_of_a_line_do_not_end_the_computation() -> None:
    module = parse_module(
        "HloModule m\n\nENTRY %e {\n"
        "  %x = f32[8]{0} custom-call(), frontend_attributes={kernel_metadata={\n"
        '"a":"b"\n},z="1"}\n'
        "  ROOT %y = f32[8]{0} negate(%x)\n}\n"
    )
    assert [one.name for one in module.entry] == ["x", "y"]
    assert module.entry["x"].attributes["frontend_attributes"].endswith(',z="1"}')


# -- metadata


def test_metadata_names_the_operation_and_where_it_comes_from() -> None:
    metadata = instruction(
        ', metadata={op_type="dot" op_name="jit(step)/dot_general" source_file="/src/lm.py" '
        "source_line=35 source_end_line=36 source_column=10 stack_frame_id=12}"
    ).metadata
    assert metadata == Metadata("jit(step)/dot_general", "dot", 12, "/src/lm.py", 35)


def test_escaped_quotes_and_bytes_in_an_op_name_are_read() -> None:
    name = instruction(r', metadata={op_name="params[\"w\"]\\\303\x41\n" stack_frame_id=2}')
    assert name.op_name == 'params["w"]\\\xc3A\n'
    assert name.metadata.stack_frame_id == 2


def test_what_looks_like_a_key_inside_a_string_is_text() -> None:
    metadata = instruction(', metadata={op_name="stack_frame_id=3" profile_type={1}}').metadata
    assert metadata == Metadata("stack_frame_id=3")


@pytest.mark.parametrize(
    "number", ["²", "-1", "x", "9" * 5000, "1e5", ""], ids=lambda number: number[:5]
)
def test_a_frame_or_line_that_is_no_number_is_left_out(number: str) -> None:
    metadata = instruction(f", metadata={{stack_frame_id={number} source_line={number}}}").metadata
    assert metadata == Metadata()


def test_an_escape_of_something_else_than_octal_digits_is_that_character() -> None:
    assert instruction(', metadata={op_name="a\\²b\\9\\q"}').op_name == "a²b9q"


# -- called computations


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        (", kind=kLoop, calls=%fused.1", ("fused.1",)),
        (", calls={%a, %b.2}", ("a", "b.2")),
        (", dimensions={0}, to_apply=%region_0.1", ("region_0.1",)),
        (", condition=%cond.1, body=%body.1", ("cond.1", "body.1")),
        (", branch_computations={%one, %two, %three}", ("one", "two", "three")),
        (", true_computation=%yes, false_computation=%no", ("yes", "no")),
        (", select=%ge, scatter=%add", ("ge", "add")),
        (", called_computations={%async-body}", ("async-body",)),
        (", to_apply=no_percent", ("no_percent",)),
        (", called_computations={}", ()),
        (', metadata={op_name="calls=%nothing"}', ()),
    ],
)
def test_called_computations_are_named(attributes: str, names: tuple[str, ...]) -> None:
    assert instruction(attributes).called_names == names


# -- numbers


def test_dimensions_are_integers() -> None:
    assert instruction(", dimensions={0,2}").dimensions == (0, 2)
    assert instruction(", dimensions={}").dimensions == ()
    assert parse_integers("[3, 4]") == (3, 4)


@pytest.mark.parametrize(
    "text",
    ["{x}", "{0,²}", "{" + "9" * 5000 + "}", "kNone", "{0,{1}}", "{{1}}", "{1_0}", "{-1}", "{0 1}"],
    ids=lambda text: text[:10],
)
def test_dimensions_of_an_unknown_form_are_kept_raw(text: str) -> None:
    unknown = instruction(f", dimensions={text}")
    assert unknown.dimensions == ()
    assert unknown.attributes["dimensions"] == text


# -- backend config


_CONFIG = {
    "window_config": {"kernel": ["1", "{2}"], "estimated_cycles": "4821"},
    "flag_configs": [{"deep": [{"er": {}}]}],
}


def test_a_backend_config_is_read_as_raw_json() -> None:
    found = instruction(f", backend_config={json.dumps(_CONFIG)}, channel_id=1")
    assert found.backend_config == _CONFIG
    assert found.estimated_cycles == 4821
    assert found.attributes["channel_id"] == "1"


def test_a_backend_config_is_read_from_an_escaped_string() -> None:
    escaped = json.dumps(json.dumps(_CONFIG, separators=(",", ":")))
    found = instruction(f", backend_config={escaped}, channel_id=1")
    assert found.backend_config == _CONFIG
    assert found.estimated_cycles == 4821


@pytest.mark.parametrize(
    "text",
    [
        '""',
        '"opaque"',
        "[1,2]",
        "7",
        "{not json}",
        '"\\377"',
        '{"a":' * 200_000 + "1" + "}" * 200_000,
    ],
    ids=lambda text: text[:10],
)
def test_a_backend_config_of_another_form_is_empty_and_kept_raw(text: str) -> None:
    found = instruction(f", backend_config={text}")
    assert found.backend_config == {}
    assert found.attributes["backend_config"] == text


@pytest.mark.parametrize(
    ("window", "cycles"),
    [
        ('{"estimated_cycles":"0"}', 0),
        ('{"estimated_cycles":12}', 12),
        ('{"estimated_cycles":"9223372036854775807"}', None),
        ('{"estimated_cycles":"9223372036854775000"}', None),
        ('{"estimated_cycles":"-1"}', None),
        ('{"estimated_cycles":""}', None),
        ('{"estimated_cycles":null}', None),
        ('{"estimated_cycles":1e999}', None),
        ('{"estimated_cycles":NaN}', None),
        (f'{{"estimated_cycles":"{"9" * 5000}"}}', None),
        ('{"other":"1"}', None),
        ('"estimated_cycles"', None),
        ('["estimated_cycles"]', None),
        ("null", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_cycles_are_given_only_where_the_compiler_knows_them(
    window: str, cycles: int | None
) -> None:
    assert instruction(f', backend_config={{"window_config":{window}}}').estimated_cycles == cycles


def test_a_kernel_of_5_megabytes_on_one_line_is_read_fast() -> None:
    body = "TUzvUgFN" * (5 * 1024 * 128)
    config = {"custom_call_config": {"body": body, "needs_hlo_passes": False}}
    text = (
        f', custom_call_target="tpu_custom_call", backend_config={json.dumps(config)}, channel_id=3'
    )
    start = time.process_time()
    kernel = instruction(text)
    assert kernel.custom_call_target == "tpu_custom_call"
    assert kernel.attributes["channel_id"] == "3"
    assert kernel.backend_config["custom_call_config"]["body"] == body
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("target", "value"),
    [("Sharding", "Sharding"), ("TODO(b/522284627)", "TODO(b/522284627)"), (r"a\"b", 'a"b')],
)
def test_only_a_custom_call_has_a_target(target: str, value: str) -> None:
    attributes = f', custom_call_target="{target}"'
    assert instruction(attributes).custom_call_target == value
    assert instruction(attributes, opcode="fusion").custom_call_target == ""


# -- replica groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        # Lists.
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0, 2}, {1, 3}}", [[0, 2], [1, 3]]),
        ("{{0},{1,2,3}}", [[0], [1, 2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{}}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        # Iota tiles: devices in a grid, transposed, cut into groups.
        ("[1,8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        # Named axes: device 4 * a + b.
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("@mesh['a'=2,'b'=4]{'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b','a'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=2] {}", [[0], [1], [2], [3]]),
        # Sub-axes: 'b' is 2 major by 2 minor.
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(1)2,'b':(2)2}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # A mesh of other devices than 0, 1, ...: here of 0, 4, 1, 5, 2, 6, 3, 7.
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_replica_groups_are_as_worked_out_by_hand(text: str, groups: list[list[int]]) -> None:
    expected = tuple(map(tuple, groups))
    collective = instruction(f", replica_groups={text}, channel_id=1", opcode="all-reduce")
    assert collective.replica_groups(8) == expected
    assert parse_replica_groups(text, 8) == expected


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "{{0,x}}",
        "{{²}}",
        "[2,4]",
        "[2,4]<=[4]",
        "[8]<=[8]",
        "[2,4]<=[4,2]T(1,5)",
        "[2,4]<=[4,2]T(1)",
        "[2,4]<=[4,2]T(1,1)",
        "[2,4]<=[8]T(0)T(0)",
        "[0,4]<=[0]",
        "[9999999999,0]<=[0]",
        "[1,9999999999]<=[9999999999]",
        "[0,9999999999]<=[0,9999999999]",
        f"[1,{'9' * 5000}]<=[{'9' * 5000}]",
        "mesh['a'=2,'b'=4]",
        "mesh['a'=2] {'c'}",
        "mesh['a'=0] {'a'}",
        "mesh['a'=4] {'a':(0)2}",
        "mesh['a'=4] {'a':(3)2}",
        "mesh['a'=4] {'a':(1)0}",
        "mesh['a'=4] {'a','a'}",
        "mesh['a'=8] {'a':(1)4,'a':(2)4}",
        "mesh['a'=9999999999] {'a'}",
        "mesh['a'=1024,'b'=1024,'c'=1024] {'a'}",
        f"mesh['a'={'9' * 5000}] {{'a'}}",
        "mesh['a'=4, device_ids=([3,2,1,0])] {'a'}",
    ],
    ids=lambda text: text[:40],
)
def test_replica_groups_of_an_unknown_form_are_none_and_kept_raw(text: str) -> None:
    collective = instruction(f", replica_groups={text}", opcode="all-reduce")
    assert collective.replica_groups(8) is None
    assert collective.attributes["replica_groups"] == text


@pytest.mark.parametrize(
    "devices", ["([2,2])", "([2,4]T(1,1))", "([9999999999])", "(3,2,1,0)", "([4],[2])"]
)
def test_a_mesh_of_devices_of_an_unknown_form_gives_no_groups(devices: str) -> None:
    text = f", replica_groups=mesh['a'=4,'b'=2], device_ids={devices} {{'a'}}"
    assert instruction(text, opcode="all-reduce").replica_groups(8) is None


def test_all_devices_of_an_absurd_number_are_no_group() -> None:
    assert instruction(", replica_groups={}").replica_groups(10**12) is None
    assert instruction(", replica_groups={}").replica_groups(0) is None


# -- shardings


@pytest.mark.parametrize(
    ("text", "kind", "shards"),
    [
        ("{replicated}", "replicated", ()),
        ("{maximal device=0}", "maximal", ()),
        ("{manual}", "manual", ()),
        ("{devices=[4,1]<=[4]}", "tiled", (4, 1)),
        ("{devices=[2,2]0,1,2,3}", "tiled", (2, 2)),
        ("{devices=[1,4]<=[2,2]T(1,0)}", "tiled", (1, 4)),
        ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", "tiled", (2, 1)),
        ("{devices=[1,1,4]<=[4] last_tile_dim_replicate}", "replicated", ()),
        ("{devices=[2,2,2]<=[8] last_tile_dims={manual}}", "tiled", (2, 2)),
        ("{devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}", "tiled", (2,)),
        ("{{replicated}, {devices=[4]<=[4]}}", "tuple", ()),
        ("{}", "tuple", ()),
        ("{mesh['fsdp'=4], [{'fsdp'}, {}]}", "tiled", (4, 1)),
        ("{mesh['a'=2,'b'=4], [{'a','b'}, {}]}", "tiled", (8, 1)),
        ("{mesh['a'=2,'b'=4], [{}, {'b':(1)2}]}", "tiled", (1, 2)),
        ("{mesh['a'=2,'b'=4], [{'a', ?}, {?}]}", "tiled", (2, 1)),
        ("{mesh['fsdp'=4], [{}, {}]}", "replicated", ()),
        ("{mesh['fsdp'=4], replicated}", "replicated", ()),
        ("{mesh['fsdp'=4], manual}", "manual", ()),
        ("{{mesh['fsdp'=4], [{'fsdp'}]}, {mesh['fsdp'=4], replicated}}", "tuple", ()),
        # Forms that are not known.
        ("{unreduced}", "unknown", ()),
        ("{devices=[2,x]<=[4]}", "unknown", ()),
        ("{devices=[2,2}", "unknown", ()),
        ("{devices=[²]}", "unknown", ()),
        (f"{{devices=[{'9' * 5000}]<=[4]}}", "unknown", ()),
        ("{mesh['a'=2]}", "unknown", ()),
        ("{mesh['a'=2], [{'a'}", "unknown", ()),
        ("{mesh['a'=2], [{'a', [}]]}", "unknown", ()),
        (f"{{mesh['a'={'9' * 5000}], [{{'a'}}]}}", "unknown", ()),
        ("everything", "unknown", ()),
    ],
    ids=lambda value: str(value)[:40],
)
def test_shardings_say_into_how_many_pieces(text: str, kind: str, shards: tuple[int, ...]) -> None:
    assert parse_sharding(text) == Sharding(kind, shards, text)


def test_the_sharding_of_an_instruction_is_read_with_white_space_folded() -> None:
    sharding = instruction(", sharding={devices=[4,1]<=[4]\n  last_tile_dim_replicate}").sharding
    assert sharding == Sharding("tiled", (4,), "{devices=[4,1]<=[4] last_tile_dim_replicate}")


# -- hostile attributes take no time


@pytest.mark.parametrize(
    "value",
    [
        "{" + "a" * 300_000 + "}",
        "{" + 'a="\\' * 60_000 + "}",
        "{" + "'" * 300_000 + "}",
        "mesh['" + "a'='" * 60_000 + "]",
        "[" + "1," * 100_000 + "]<=[4]",
        "/*" * 100_000,
        "%" * 300_000,
        "{" * 100_000 + "}" * 100_000,
    ],
    ids=lambda value: value[:10],
)
@pytest.mark.parametrize(
    "key", ["metadata", "sharding", "replica_groups", "backend_config", "calls"]
)
def test_long_attributes_are_read_in_linear_time(key: str, value: str) -> None:
    start = time.process_time()
    hostile = instruction(f", {key}={value}")
    assert hostile.metadata == Metadata()
    assert hostile.sharding is None or hostile.sharding.shards == ()
    assert hostile.replica_groups(4) is None
    assert hostile.backend_config == {}
    assert all(name in value for name in hostile.called_names)
    assert value in hostile.attribute_text
    assert time.process_time() - start < 2
