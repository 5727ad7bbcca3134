"""Shapes and layouts, and the bytes that they take."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_audit.hlo import Layout, Shape, element_bits, parse_shape


def test_an_array_has_a_type_dimensions_and_a_layout() -> None:
    shape = parse_shape("bf16[4,128,512]{2,0,1:T(8,128)(2,1)S(1)}")
    assert shape == Shape("bf16", (4, 128, 512), Layout((2, 0, 1), ((8, 128), (2, 1)), 1))
    assert (shape.rank, shape.element_count, shape.is_tuple) == (3, 4 * 128 * 512, False)


def test_a_shape_without_a_layout_is_row_major() -> None:
    shape = parse_shape("f32[2,3,4]")
    assert shape.layout is None
    assert shape.minor_to_major == (2, 1, 0)


def test_a_scalar_may_have_a_tile_and_a_memory_space() -> None:
    assert parse_shape("f32[]") == Shape("f32")
    assert parse_shape("f32[]{}") == Shape("f32", (), Layout(()))
    assert parse_shape("f32[]{:T(128)}") == Shape("f32", (), Layout((), ((128,),)))
    assert parse_shape("u32[]{:S(2)}") == Shape("u32", (), Layout((), (), 2))


def test_a_dynamic_dimension_counts_by_its_bound_and_one_without_a_bound_not_at_all() -> None:
    assert parse_shape("f32[<=8,4]{1,0}").dimensions == (8, 4)
    unbounded = parse_shape("f32[?,4]{1,0}")
    assert unbounded.dimensions == (-1, 4)
    assert (unbounded.element_count, unbounded.logical_bytes, unbounded.padded_bytes) == (0, 0, 0)
    assert str(unbounded) == "f32[?,4]{1,0}"


@pytest.mark.parametrize(
    ("suffixes", "other"),
    [
        ("T(8,128)L(1024)", "L(1024)"),
        ("T(8,128)#(u32)", "#(u32)"),
        ("T(8,128)*(u8)", "*(u8)"),
        ("T(8,128)E(4)", "E(4)"),
        ("T(8,128)SC(0:128,256)", "SC(0:128,256)"),
        ("T(8,128)P(f32[2]{0:T(128)})", "P(f32[2]{0:T(128)})"),
        ("T(8,128)M(1024)", "M(1024)"),
        ("D(D,C)T(8,128)", "D(D,C)"),
        (
            "T(8,128)L(2)#(u64)*(s32)E(32)SC(1:8)P(s8[4]{0})M(8)",
            "L(2)#(u64)*(s32)E(32)SC(1:8)P(s8[4]{0})M(8)",
        ),
    ],
)
def test_every_layout_suffix_is_kept(suffixes: str, other: str) -> None:
    shape = parse_shape(f"f32[8,128]{{1,0:{suffixes}}}")
    assert shape.layout == Layout((1, 0), ((8, 128),), 0, other)
    assert parse_shape(str(shape)) == shape


def test_the_memory_space_is_found_among_other_suffixes() -> None:
    layout = parse_shape("f32[8]{0:T(128)L(128)E(32)S(5)M(64)}").layout
    assert layout is not None
    assert (layout.memory_space, layout.other) == (5, "L(128)E(32)M(64)")


def test_a_star_in_a_tile_stands_for_a_combined_dimension() -> None:
    shape = parse_shape("f32[2,7,8]{2,1,0:T(*,*,2)}")
    assert shape.layout is not None
    assert shape.layout.tiles == ((-1, -1, 2),)
    assert str(shape) == "f32[2,7,8]{2,1,0:T(*,*,2)}"


def test_a_tuple_holds_shapes_past_index_comments() -> None:
    shape = parse_shape(
        "(f32[2]{0}, s32[], f32[2]{0}, token[], pred[], /*index=5*/(bf16[4]{0}, ()))"
    )
    assert shape.is_tuple
    assert [element.element_type for element in shape.elements] == [
        *("f32", "s32", "f32", "token", "pred", "tuple")
    ]
    assert shape.at((5, 0)) == Shape("bf16", (4,), Layout((0,)))
    assert shape.at((5, 1)) == Shape("tuple")
    assert shape.at(()) is shape


def test_a_buffer_is_the_array_that_it_pins() -> None:
    assert parse_shape("b(f32[8]{0:T(128)})") == parse_shape("f32[8]{0:T(128)}")
    assert parse_shape("(b(f32[8]{0}), u32[])").elements[0] == parse_shape("f32[8]{0}")


def test_tokens_and_opaque_values_take_no_space() -> None:
    for text in ("token[]", "opaque[]"):
        shape = parse_shape(text)
        assert (shape.logical_bytes, shape.padded_bytes) == (0, 0)
        assert str(shape) == text


@pytest.mark.parametrize(
    ("element_type", "bits"),
    [
        *((f"{sign}{bits}", bits) for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)),
        *(
            ("pred", 8),
            ("bf16", 16),
            ("f16", 16),
            ("f32", 32),
            ("f64", 64),
            ("c64", 64),
            ("c128", 128),
        ),
        *(("f8e5m2", 8), ("f8e4m3fn", 8), ("f8e4m3b11fnuz", 8), ("f8e8m0fnu", 8), ("f8e3m4", 8)),
        *(("f6e2m3fn", 6), ("f6e3m2fn", 6), ("f4e2m1fn", 4)),
        *(("token", 0), ("opaque", 0), ("new9", 0)),
    ],
)
def test_every_element_type_has_its_bits(element_type: str, bits: int) -> None:
    assert element_bits(element_type) == bits
    assert parse_shape(f"{element_type}[16]").logical_bytes == 2 * bits


@pytest.mark.parametrize(
    ("text", "logical", "padded"),
    [
        # 3 rows fill a tile of 8, and 64 lanes one of 128.
        ("f32[3,64]{1,0:T(8,128)}", 3 * 64 * 4, 8 * 128 * 4),
        ("f32[3,64]{1,0:T(4,128)}", 3 * 64 * 4, 4 * 128 * 4),
        ("f32[3,64]{1,0:T(2,128)}", 3 * 64 * 4, 4 * 128 * 4),
        ("bf16[3,64]{1,0:T(8,128)(2,1)}", 3 * 64 * 2, 8 * 128 * 2),
        ("bf16[3,64]{1,0:T(4,128)(2,1)}", 3 * 64 * 2, 4 * 128 * 2),
        ("f8e4m3fn[5,130]{1,0:T(8,128)(4,1)}", 5 * 130, 8 * 256),
        ("s4[5,130]{1,0:T(8,128)(8,1)}", 325, 8 * 256 // 2),
        ("pred[33,1]{1,0:T(8,128)(4,1)}", 33, 40 * 128),
        # No padding where the tiles fit.
        ("f32[128,32000]{1,0:T(8,128)}", 128 * 32000 * 4, 128 * 32000 * 4),
        # The other order: the first dimension lies along the lanes.
        ("f32[32000,100]{0,1:T(8,128)}", 32000 * 100 * 4, 32000 * 104 * 4),
        ("f32[32000,100]{1,0:T(8,128)}", 32000 * 100 * 4, 32000 * 128 * 4),
        ("f32[2,3,5]{2,1,0:T(8,128)}", 2 * 3 * 5 * 4, 2 * 8 * 128 * 4),
        ("f32[2,3,5]{0,2,1:T(8,128)}", 2 * 3 * 5 * 4, 3 * 8 * 128 * 4),
        # One dimension.
        ("f32[1000]{0:T(1024)}", 4000, 4096),
        ("bf16[3000]{0:T(1024)(128)(2,1)}", 6000, 3 * 1024 * 2),
        ("pred[10]{0:T(512)(128)(4,1)}", 10, 512),
        ("f32[]{:T(128)}", 4, 512),
        # More dimensions in the tile than in the array.
        ("s32[4]{0:T(8,128)}", 16, 8 * 128 * 4),
        # Combined dimensions: 2 * 7 * 8 = 112 rows by 11 * 10 = 110 columns, in tiles of 2 by 3.
        ("f32[2,7,8,11,10]{4,3,2,1,0:T(*,*,2,*,3)}", 2 * 7 * 8 * 11 * 10 * 4, 112 * 111 * 4),
        ("f32[3,5,64]{2,1,0:T(*,8,128)}", 3 * 5 * 64 * 4, 16 * 128 * 4),
        # No tile, no padding; bits are packed and rounded up to a byte.
        ("f32[3,64]{1,0}", 768, 768),
        ("f32[3,64]", 768, 768),
        ("u2[3,5]{1,0}", 4, 4),
        ("f4e2m1fn[3,5]{1,0}", 8, 8),
        ("s1[15]{0}", 2, 2),
        ("c128[2]{0}", 32, 32),
        ("f32[0,64]{1,0:T(8,128)}", 0, 0),
        # A tuple is the sum.
        ("(f32[3,64]{1,0:T(8,128)}, (s32[]{:T(128)}, token[]))", 768 + 4, 4096 + 512),
        ("()", 0, 0),
    ],
)
def test_bytes_are_as_worked_out_by_hand(text: str, logical: int, padded: int) -> None:
    shape = parse_shape(text)
    assert (shape.logical_bytes, shape.padded_bytes) == (logical, padded)


def test_dimensions_of_size_1_do_not_count_for_the_moving_order() -> None:
    assert parse_shape("f32[1,8,1,4]{0,3,2,1}").moving_order == (3, 1)
    assert parse_shape("f32[8,1]{0,1}").moving_order == parse_shape("f32[8,1]{1,0}").moving_order


def test_a_shape_can_be_moved_to_another_memory_space() -> None:
    shape = parse_shape("f32[8]{0:T(128)S(1)}")
    assert str(shape.in_memory_space(0)) == "f32[8]{0:T(128)}"
    assert shape.in_memory_space(1) is shape
    assert parse_shape("f32[8]").in_memory_space(3) == parse_shape("f32[8]")


def test_the_text_without_layout_has_none_at_any_depth() -> None:
    shape = parse_shape("(f32[8,?]{1,0:T(8,128)}, (bf16[]{:S(2)}, token[]), ())")
    assert shape.without_layout == "(f32[8,?], (bf16[], token[]), ())"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a shape"),
        ("f32", "'f32' is not a shape"),
        ("f32[8", "'f32[8' is not a shape"),
        ("F32[8]", "'F32[8]' is not a shape"),
        ("f32[8]{0", "'{0' after the shape"),
        ("f32[8] f32[8]", "' f32[8]' after the shape"),
        ("f32[3,,4]", "'' is not a number"),
        ("f32[,]", "'' is not a number"),
        ("f32[<=]", "'' is not a number"),
        ("f32[4 4]", "'4 4' is not a number"),
        ("f32[99999999999999999999]", "is not a number"),
        (f"f32[{'9' * 5000}]", "is not a number"),
        ("f32[8,4]{0}", "'0' does not order 2 dimensions"),
        ("f32[8,4]{0,0}", "'0,0' does not order 2 dimensions"),
        ("f32[8,4]{2,1}", "'2,1' does not order 2 dimensions"),
        ("f32[8]{0,}", "'' is not a number"),
        ("f32[8]{x}", "'x' is not a layout"),
        ("f32[8]{0:t(8)}", "'0:t(8)' is not a layout"),
        ("f32[8]{0:T(8}", "'0:T(8' is not a layout"),
        ("f32[8]{0:T(0)}", "a tile has no size 0"),
        ("f32[8]{0:T(-8)}", "'-8' is not a number"),
        ("f32[8]{0:T()}", "'' is not a number"),
        ("f32[8]{0:S(x)}", "'x' is not a number"),
        ("f32[8]{0:S(²)}", "'²' is not a number"),
        ("(f32[8]", "tuple shape is not closed"),
        ("(f32[8] f32[8])", "tuple shape is not closed"),
        ("(f32[8],)", "')' is not a shape"),
        ("b(f32[8]", "buffer shape is not closed"),
        ("(/*index=5 f32[8])", "comment is not closed"),
        ("(" * 200_000, "nested more than 100 deep"),
        ("(" * 101 + ")" * 101, "nested more than 100 deep"),
        ("f32[8]{" + "(" * 200_000 + "}", "is not a layout"),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_shape_is_refused_with_a_short_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        parse_shape(text)
    assert len(str(caught.value)) < 120


def test_tuples_may_be_nested_100_deep() -> None:
    shape = parse_shape("(" * 100 + ")" * 100)
    assert str(shape) == "(" * 100 + ")" * 100
    assert shape.padded_bytes == 0


@pytest.mark.parametrize(
    "name", ["element_type", "dimensions", "layout", "elements", "padded_bytes"]
)
def test_a_shape_cannot_be_changed(name: str) -> None:
    shape = parse_shape("f32[8]{0}")
    with pytest.raises(AttributeError):
        setattr(shape, name, None)


@pytest.mark.parametrize("field", dataclasses.fields(Layout), ids=lambda field: field.name)
def test_a_layout_cannot_be_changed(field: dataclasses.Field[Any]) -> None:
    with pytest.raises(AttributeError):
        setattr(Layout((0,)), field.name, None)


@st.composite
def _arrays(draw: st.DrawFn) -> Shape:
    dimensions = tuple(draw(st.lists(st.integers(0, 1 << 15), max_size=4)))
    tile = st.lists(st.integers(1, 1024) | st.just(-1), min_size=1, max_size=3).map(tuple)
    layout = st.builds(
        Layout,
        st.permutations(range(len(dimensions))).map(tuple),
        st.lists(tile, max_size=2).map(tuple),
        st.integers(0, 15),
        st.sampled_from(["", "L(128)", "E(4)", "L(2)#(u32)"]),
    )
    element_type = draw(st.sampled_from(["f32", "bf16", "pred", "s4", "f8e4m3fn", "c64"]))
    return Shape(element_type, dimensions, draw(st.none() | layout))


_SHAPES = st.recursive(
    _arrays(),
    lambda inner: st.lists(inner, max_size=3).map(lambda e: Shape("tuple", elements=tuple(e))),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(_SHAPES)
def test_a_printed_shape_reads_back_as_itself(shape: Shape) -> None:
    assert parse_shape(str(shape)) == shape
    assert shape.logical_bytes <= shape.padded_bytes
