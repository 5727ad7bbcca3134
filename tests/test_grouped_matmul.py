"""The grouped matmul kernel, in Pallas' interpreter: values and gradients, however ragged."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_audit.errors import UsageError
from hlo_audit.models import grouped_matmul as gm
from hlo_audit.models.grouped_matmul import (
    DLHS_POLICIES,
    SWAPAXES,
    TRANSPOSED_RHS,
    ElementBytes,
    Tiles,
    cut_rows,
    drhs_tiles,
    grouped_matmul,
    product,
    product_tiles,
    reads_weights_in_place,
    transposed_product,
)

pytestmark = pytest.mark.usefixtures("unoptimized")

Array = np.ndarray[Any, np.dtype[Any]]

M, K, N, GROUPS = 20, 12, 10, 4

RAGGED = [
    pytest.param([5, 5, 5, 5], id="even"),
    pytest.param([5, 0, 11, 4], id="one-empty"),
    pytest.param([0, 0, 20, 0], id="all-in-one"),
    pytest.param([0, 1, 0, 19], id="very-uneven"),
    pytest.param([4, 4, 4, 4], id="rows-left-over"),
    pytest.param([0, 0, 0, 0], id="no-rows"),
]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def integers(seed: int, *shape: int) -> Array:
    """Floats whose products and sums are exact, so that the order of summation does not show."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def bounds_of(sizes: Array | list[int]) -> Array:
    return np.concatenate([[0], np.cumsum(sizes)])


def dense_product(lhs: Array, rhs: Array, sizes: list[int], offset: int = 0) -> Array:
    """Group by group; rhs is [groups, k, n]."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]), np.float32)
    bounds = bounds_of(sizes)
    for group, weights in enumerate(rhs, start=offset):
        rows = slice(bounds[group], bounds[group + 1])
        out[rows] = lhs[rows] @ weights
    return out


def dense_drhs(lhs: Array, dout: Array, sizes: list[int], offset: int, groups: int) -> Array:
    bounds = bounds_of(sizes)
    rows = [slice(bounds[g], bounds[g + 1]) for g in range(offset, offset + groups)]
    return np.stack([lhs[r].T @ dout[r] for r in rows])


# How the rows are cut


@cache
def compiled_cut(m: int, tile_m: int, groups: int) -> Callable[..., gm.Pieces]:
    cut: Callable[..., gm.Pieces] = jax.jit(partial(cut_rows, m=m, tile_m=tile_m, groups=groups))
    return cut


@pytest.mark.parametrize(("m", "tile_m", "groups"), [(20, 8, 4), (16, 4, 2), (5, 8, 6)])
def test_the_pieces_hold_each_row_of_a_group_once_and_visit_every_tile_and_group(
    m: int, tile_m: int, groups: int
) -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        rows = rng.integers(0, m + 1)
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(6, 0.3)))
        offset = int(rng.integers(0, 6 - groups + 1))
        pieces = compiled_cut(m, tile_m, groups)(sizes.astype(np.int32), np.int32(offset))
        p = gm.Pieces(*(np.asarray(leaf) for leaf in pieces))
        bounds = bounds_of(sizes)
        owner = np.full(m, -1)
        for piece in range(len(p.start)):
            taken = np.arange(p.start[piece], p.stop[piece])
            assert (owner[taken] == -1).all()
            owner[taken] = p.write_group[piece]
            assert (taken // tile_m == p.write_tile[piece]).all()
        expected = np.searchsorted(bounds, np.arange(m), side="right") - 1 - offset
        held = (expected >= 0) & (expected < groups) & (np.arange(m) < bounds[-1])
        np.testing.assert_array_equal(owner, np.where(held, expected, -1), err_msg=str(trial))
        assert len(p.start) == -(-m // tile_m) + groups + 1
        # Each in one run of pieces: a block that is left is not come back to.
        assert list(dict.fromkeys(p.write_tile)) == list(range(-(-m // tile_m)))
        assert list(dict.fromkeys(p.write_group)) == list(range(groups))
        assert (np.diff(p.write_tile) >= 0).all()
        assert (np.diff(p.write_group) >= 0).all()
        # What is read is what the last piece with rows needed.
        tile = group = 0
        for piece in range(len(p.start)):
            if p.start[piece] < p.stop[piece]:
                tile, group = p.write_tile[piece], p.write_group[piece]
            assert (p.read_tile[piece], p.read_group[piece]) == (tile, group)


def test_sizes_beyond_the_rows_reach_no_tile_that_is_not_there() -> None:
    pieces = compiled_cut(20, 8, 4)(np.array([15, 15, 15, 15], np.int32), np.int32(0))
    assert int(jnp.max(pieces.stop)) == 20
    assert int(jnp.max(pieces.write_tile)) == 2


# The product against a dense reference. Sizes and offset are arguments: one compile a shape.

TILINGS = [
    pytest.param(Tiles(4, 12, 10), id="whole-k"),
    pytest.param(Tiles(8, 5, 4), id="parts-left-over"),
]


@cache
def compiled_product(held: int, transpose_rhs: bool, tiles: Tiles) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda lhs, rhs, sizes, offset: product(
            lhs,
            rhs,
            sizes,
            group_offset=offset,
            transpose_rhs=transpose_rhs,
            tiles=tiles,
            interpret=True,
        )
    )


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("tiles", TILINGS)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_the_product_is_each_groups_rows_times_its_matrix(
    transpose_rhs: bool, tiles: Tiles, sizes: list[int]
) -> None:
    lhs, rhs = integers(0, M, K), integers(1, GROUPS, K, N)
    stored = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    run = compiled_product(GROUPS, transpose_rhs, tiles)
    out = run(lhs, stored, np.array(sizes, np.int32), np.int32(0))
    np.testing.assert_array_equal(out, dense_product(lhs, rhs, sizes))


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("sizes", [[5, 0, 11, 4], [7, 1, 12, 0], [0, 20, 0, 0]])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_with_an_offset_the_rows_of_other_groups_are_zero(
    transpose_rhs: bool, sizes: list[int], offset: int
) -> None:
    lhs, rhs = integers(0, M, K), integers(1, 2, K, N)
    stored = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    run = compiled_product(2, transpose_rhs, Tiles(4, 12, 10))
    out = run(lhs, stored, np.array(sizes, np.int32), np.int32(offset))
    np.testing.assert_array_equal(out, dense_product(lhs, rhs, sizes, offset))


def test_what_is_no_number_in_one_groups_weights_stays_in_its_rows() -> None:
    lhs, rhs = integers(0, M, K), integers(1, GROUPS, K, N)
    rhs[1] = np.nan
    sizes = [5, 3, 8, 4]
    run = compiled_product(GROUPS, False, Tiles(8, 5, 4))
    out = np.asarray(run(lhs, rhs, np.array(sizes, np.int32), np.int32(0)))
    assert np.isnan(out[5:8]).all()
    assert np.isfinite(np.delete(out, slice(5, 8), axis=0)).all()


@cache
def compiled_drhs(held: int, tiles: Tiles) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda lhs, dout, sizes, offset: transposed_product(
            lhs, dout, sizes, groups=held, group_offset=offset, tiles=tiles, interpret=True
        )
    )


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("tiles", TILINGS)
def test_the_weights_gradient_is_each_groups_rows_transposed_times_its_output_gradient(
    tiles: Tiles, sizes: list[int]
) -> None:
    lhs, dout = integers(0, M, K), integers(1, M, N)
    # Rows of no group may hold anything.
    lhs[sum(sizes) :] = np.nan
    out = compiled_drhs(GROUPS, tiles)(lhs, dout, np.array(sizes, np.int32), np.int32(0))
    np.testing.assert_array_equal(out, dense_drhs(lhs, dout, sizes, 0, GROUPS))


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_the_weights_gradient_with_an_offset_is_of_the_groups_that_are_held(offset: int) -> None:
    lhs, dout, sizes = integers(0, M, K), integers(1, M, N), [5, 0, 11, 4]
    run = compiled_drhs(2, Tiles(8, 5, 4))
    out = run(lhs, dout, np.array(sizes, np.int32), np.int32(offset))
    np.testing.assert_array_equal(out, dense_drhs(lhs, dout, sizes, offset, 2))


# Gradients


@cache
def compiled_gradients(policy: str, transpose_rhs: bool, quantization: str) -> Callable[..., Any]:
    """The product, and the gradients in lhs and rhs of its inner product with ``weight``."""

    def run(lhs: Any, rhs: Any, sizes: Any, weight: Any, offset: Any) -> Any:
        def forward(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return grouped_matmul(
                lhs,
                rhs,
                sizes,
                group_offset=offset,
                transpose_rhs=transpose_rhs,
                quantization=quantization,
                dlhs=policy,
                interpret=True,
            )

        out, pull = jax.vjp(forward, lhs, rhs)
        return out, *pull(weight)

    return jax.jit(run)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("policy", DLHS_POLICIES)
def test_the_gradients_are_those_of_the_dense_product_under_each_policy(
    policy: str, transpose_rhs: bool, offset: int
) -> None:
    sizes, held = [5, 0, 11, 4], GROUPS - 1
    lhs, rhs, weight = integers(0, M, K), integers(1, held, K, N), integers(2, M, N)
    stored = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out, dlhs, drhs = compiled_gradients(policy, transpose_rhs, "")(
        lhs, stored, np.array(sizes, np.int32), weight, np.int32(offset)
    )
    np.testing.assert_array_equal(out, dense_product(lhs, rhs, sizes, offset))
    expected = dense_product(weight, rhs.swapaxes(1, 2), sizes, offset)
    np.testing.assert_array_equal(dlhs, expected)
    expected = dense_drhs(lhs, weight, sizes, offset, held)
    np.testing.assert_array_equal(drhs, expected.swapaxes(1, 2) if transpose_rhs else expected)


def test_int8_sees_rounded_weights_and_passes_the_gradient_unchanged() -> None:
    sizes = [5, 0, 11, 4]
    lhs, weight = integers(0, M, K), integers(2, M, N)
    rhs = np.random.default_rng(3).standard_normal((GROUPS, K, N)).astype(np.float32)
    rhs[:, :, 0] = 0  # a column without a scale of its own
    scale = np.abs(rhs).max(axis=1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    rounded = np.round(rhs / scale) * scale
    out, dlhs, drhs = compiled_gradients(SWAPAXES, False, "int8")(
        lhs, rhs, np.array(sizes, np.int32), weight, np.int32(0)
    )
    np.testing.assert_allclose(out, dense_product(lhs, rounded, sizes), rtol=1e-5, atol=1e-4)
    expected = dense_product(weight, rounded.swapaxes(1, 2), sizes)
    np.testing.assert_allclose(dlhs, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(drhs, dense_drhs(lhs, weight, sizes, 0, GROUPS))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("policy", DLHS_POLICIES)
def test_values_and_gradients_are_those_of_jaxs_own_grouped_matmul(policy: str, dtype: Any) -> None:
    from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox

    rows, k, n, sizes = 32, 16, 8, jnp.array([9, 0, 20, 3], jnp.int32)
    rng = np.random.default_rng(0)
    lhs, rhs, weight = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((rows, k), (GROUPS, k, n), (rows, n))
    )

    @jax.jit
    def both(lhs: jax.Array, rhs: jax.Array) -> Any:
        def theirs(lhs: jax.Array, rhs: jax.Array) -> Any:
            options = (dtype, (16, k, n), None, None, False, True)
            return megablox(lhs, rhs, sizes, *options)

        def ours(lhs: jax.Array, rhs: jax.Array) -> Any:
            return grouped_matmul(lhs, rhs, sizes, dlhs=policy, interpret=True)

        found = []
        for function in (ours, theirs):
            out, pull = jax.vjp(function, lhs, rhs)
            found.append((out, *pull(weight)))
        return found

    ours, theirs = both(lhs, rhs)
    # Both add up in float32 and round once; the order within a block may differ.
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
    for found, expected in zip(ours, theirs, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(
            np.asarray(found, np.float32),
            np.asarray(expected, np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


# Which path the gradient takes


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of called functions too, kernels not entered."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def path_of_dlhs(**options: Any) -> tuple[bool, bool]:
    """Whether the gradient writes swapped weights, and whether it calls the transposed kernel."""
    transposed = options.get("transpose_rhs", False)
    shape = (GROUPS, N, K) if transposed else (GROUPS, K, N)
    lhs, rhs, sizes = jnp.zeros((M, K)), jnp.zeros(shape), jnp.full(GROUPS, 5, jnp.int32)

    def dlhs(lhs: jax.Array, rhs: jax.Array, dout: jax.Array) -> Any:
        _, pull = jax.vjp(lambda lhs: grouped_matmul(lhs, rhs, sizes, **options), lhs)
        return pull(dout)

    found = list(equations(jax.make_jaxpr(dlhs)(lhs, rhs, jnp.zeros((M, N))).jaxpr))
    kernels = [str(e.params["jaxpr"]) for e in found if e.primitive.name == "pallas_call"]
    # The lanes of both operands are contracted.
    in_place = sum("(([1], [1]), ([], []))" in text for text in kernels)
    swapped = any(e.primitive.name == "transpose" and e.invars[0].aval.ndim == 3 for e in found)
    assert len(kernels) >= 2
    # A forward product with a transposed rhs is the same kernel.
    return swapped, in_place > int(transposed)


@pytest.mark.parametrize(
    ("options", "swaps", "in_place"),
    [
        ({"dlhs": SWAPAXES}, True, False),
        ({"dlhs": TRANSPOSED_RHS}, False, True),
        ({"dlhs": SWAPAXES, "transpose_rhs": True}, False, False),
        ({"dlhs": TRANSPOSED_RHS, "transpose_rhs": True}, False, False),
        ({"dlhs": SWAPAXES, "quantization": "int8"}, True, False),
        ({"dlhs": TRANSPOSED_RHS, "quantization": "int8"}, True, False),
    ],
)
def test_only_plain_weights_under_the_policy_are_read_in_place(
    options: dict[str, Any], swaps: bool, in_place: bool
) -> None:
    assert path_of_dlhs(**options) == (swaps, in_place)
    assert in_place == reads_weights_in_place(
        options["dlhs"],
        transpose_rhs=options.get("transpose_rhs", False),
        quantized="quantization" in options,
    )


# The choice of tiles

SHAPES = [
    (4096, 2816, 1408, 128),
    (131072, 2816, 704, 128),
    (32768, 352, 2816, 128),
    (100, 5000, 7000, 3),
    (8, 16, 16, 2),
]


@pytest.mark.parametrize("choose", [product_tiles, drhs_tiles])
@pytest.mark.parametrize("element", [ElementBytes(2, 2, 2), ElementBytes(4, 4, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_fit_into_vmem_and_lie_on_lanes(
    shape: tuple[int, int, int, int], element: ElementBytes, choose: Callable[..., Tiles]
) -> None:
    m, k, n, groups = shape
    tiles = choose(m, k, n, groups, element)
    blocks = {
        product_tiles: ((tiles.m, tiles.k), (tiles.k, tiles.n), (tiles.m, tiles.n)),
        drhs_tiles: ((tiles.m, tiles.k), (tiles.m, tiles.n), (tiles.k, tiles.n)),
    }[choose]
    two_of_each = 2 * sum(
        rows * columns * size for (rows, columns), size in zip(blocks, element, strict=True)
    )
    accumulator = 4 * blocks[-1][0] * blocks[-1][1]
    assert two_of_each + accumulator <= gm.VMEM_BUDGET_BYTES
    assert tiles.m == m or (tiles.m < m and tiles.m % 128 == 0)
    for size, tile in ((k, tiles.k), (n, tiles.n)):
        assert tile == size or (tile < size and tile % gm.LANES == 0)
        # An axis that lies on the lanes is cut evenly: nothing is left over to mask.
        assert size % gm.LANES or size % tile == 0


def test_larger_elements_take_smaller_tiles() -> None:
    narrow, wide = (product_tiles(4096, 2816, 1408, 128, ElementBytes(b, b, b)) for b in (2, 4))
    assert np.prod(wide) < np.prod(narrow)


# Refusals


def refusal(**changed: Any) -> UsageError:
    arguments: dict[str, Any] = {
        "lhs": jnp.zeros((M, K)),
        "rhs": jnp.zeros((GROUPS, K, N)),
        "group_sizes": jnp.full(GROUPS, 5, jnp.int32),
        **changed,
    }
    with pytest.raises(UsageError) as caught:
        grouped_matmul(**arguments)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rhs": jnp.zeros((GROUPS, N, K))}, "lhs [20, 12] does not go with rhs [4, 10, 12]"),
        ({"transpose_rhs": True}, "does not go with rhs [4, 12, 10], transposed"),
        ({"rhs": jnp.zeros((K, N))}, "there are 0 groups of weights"),
        ({"lhs": jnp.zeros((0, K))}, "lhs [0, 12] is empty"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, "4 groups of weights, but sizes of 3 only"),
        ({"dlhs": "swap-axes"}, "no policy for dlhs is called 'swap-axes'"),
        ({"quantization": "int4"}, "no quantization is called 'int4'"),
        ({"quantization": "int8", "transpose_rhs": True}, "does not go with a transposed rhs"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changed: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**changed).message


def test_rows_of_other_numbers_have_no_gradient() -> None:
    with pytest.raises(UsageError, match=r"lhs \[20, 12\] does not go with dout \[19, 10\]"):
        transposed_product(
            jnp.zeros((M, K)), jnp.zeros((19, N)), jnp.full(2, 5, jnp.int32), groups=2
        )
