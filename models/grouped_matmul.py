"""A grouped matrix product for TPU: each group of rows times a matrix of its own.

The rows of ``lhs`` are sorted by group, and ``group_sizes`` says how many each group has, as in a
mixture of experts whose tokens are sorted by expert. The product is a Pallas kernel, and so is
opaque to XLA: XLA cannot fold a transpose of an operand into it, as it does with a dot of its own,
and writes the transposed operand to memory first. The gradient of ``lhs`` is the product with each
group's matrix transposed. ``swapaxes`` computes it as it is written, on ``rhs.swapaxes(1, 2)``, and
pays a copy of all weights; ``transposed-rhs`` lets the kernel read the weights as they are and
contract the lanes of both operands in the matrix unit.

**How the kernel goes over ragged groups.** Cut the rows at the start of every tile and at every
bound between groups. Each piece lies in one tile of rows and in one group; it may be empty. There
are always as many pieces as tiles and bounds together, so the grid is static, and every tile and
every group has at least one piece: a tile without rows of any group and the gradient of a group
without rows are written as zeros with no special case. The pieces of one tile add up in one
accumulator, each masked to its own rows.
"""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.lazy_import import lazy_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import jax
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu
    import jax.numpy as jnp
else:
    jax = lazy_import("jax")
    jnp = lazy_import("jax.numpy")
    pl = lazy_import("jax.experimental.pallas")
    pltpu = lazy_import("jax.experimental.pallas.tpu")

SWAPAXES = "swapaxes"
TRANSPOSED_RHS = "transposed-rhs"

DLHS_POLICIES = (SWAPAXES, TRANSPOSED_RHS)

INT8_MAX = 127

LANES = 128
"""Elements in a row of a vector register; the last dimension of a block is a multiple of it, or the
array's whole dimension."""

VMEM_BUDGET_BYTES = 12 << 20
"""What the blocks of one kernel may take together. Compilers for TPU give a kernel 16 MiB at least
unless it asks for more; the rest is left for what they spill."""

LARGEST_TILE = 4096
"""Elements along one side of a block: the time to compile a kernel grows with them."""

# What a choice of tiles is judged by. Only their proportions count, and those are much the same for
# TPU v5p and v6e: peak bfloat16 rate by memory bandwidth (Cloud TPU's published figures are 459e12
# by 2.8e12 and 918e12 by 1.6e12), and what a step of a Pallas grid costs, about 0.35 us.
_FLOPS_PER_BYTE = 300
_BYTES_PER_STEP = 700_000

_ROW_TILES = (512, 256, 128)


class Tiles(NamedTuple):
    """The sizes of the blocks that a kernel works on.

    Attributes:
        m: rows.
        k: of the columns of ``lhs``.
        n: of the columns of the product, or of ``dout``.
    """

    m: int
    k: int
    n: int


class ElementBytes(NamedTuple):
    """Bytes of one element of each operand and of the result."""

    lhs: int
    rhs: int
    out: int


def product_tiles(m: int, k: int, n: int, groups: int, element: ElementBytes) -> Tiles:
    """Choose the blocks for a product of ``[m, k]`` by ``[groups, k, n]``.

    Of all blocks that fit into :data:`VMEM_BUDGET_BYTES`, those for which memory traffic, the work
    on masked rows and the steps of the grid together cost least.
    """

    def cost(tiles: Tiles) -> float:
        row_tiles, k_tiles, n_tiles = _counts((m, k, n), tiles)
        pieces = row_tiles + groups
        # A block stays where it is while its index does: with all of k in one block, a group's
        # weights are read once, however many tiles of rows it has.
        weight_reads = groups if k_tiles == 1 else pieces
        return _cost(
            moved_bytes=n_tiles * pieces * tiles.m * k * element.lhs
            + weight_reads * k * n * element.rhs
            + m * n * element.out,
            flops=2 * pieces * tiles.m * k * n,
            steps=pieces * k_tiles * n_tiles,
        )

    def fits(tiles: Tiles) -> bool:
        blocks_bytes = (
            tiles.m * tiles.k * element.lhs
            + tiles.k * tiles.n * element.rhs
            + tiles.m * tiles.n * element.out
        )
        return _fits(blocks_bytes, tiles.m * tiles.n)

    return min(filter(fits, _candidates(m, k, n)), key=cost)


def drhs_tiles(m: int, k: int, n: int, groups: int, element: ElementBytes) -> Tiles:
    """Choose the blocks for ``[groups, k, n]`` out of ``[m, k]`` and ``[m, n]``.

    As :func:`product_tiles`; ``element.rhs`` is of the ``[m, n]`` operand.
    """

    def cost(tiles: Tiles) -> float:
        row_tiles, k_tiles, n_tiles = _counts((m, k, n), tiles)
        pieces = row_tiles + groups
        rows = pieces * tiles.m
        return _cost(
            moved_bytes=n_tiles * rows * k * element.lhs
            + k_tiles * rows * n * element.rhs
            + groups * k * n * element.out,
            flops=2 * rows * k * n,
            steps=pieces * k_tiles * n_tiles,
        )

    def fits(tiles: Tiles) -> bool:
        blocks_bytes = (
            tiles.m * tiles.k * element.lhs
            + tiles.m * tiles.n * element.rhs
            + tiles.k * tiles.n * element.out
        )
        return _fits(blocks_bytes, tiles.k * tiles.n)

    return min(filter(fits, _candidates(m, k, n)), key=cost)


def _cost(*, moved_bytes: int, flops: int, steps: int) -> float:
    return moved_bytes + flops / _FLOPS_PER_BYTE + steps * _BYTES_PER_STEP


def _fits(blocks_bytes: int, accumulator_elements: int) -> bool:
    # Two of each block, for the next one is fetched meanwhile. The accumulator is float32, and so
    # is a product of its size before it is masked and added.
    return 2 * blocks_bytes + 2 * 4 * accumulator_elements <= VMEM_BUDGET_BYTES


def _counts(sizes: tuple[int, int, int], tiles: Tiles) -> tuple[int, int, int]:
    m, k, n = (-(-size // tile) for size, tile in zip(sizes, tiles, strict=True))
    return m, k, n


def _candidates(m: int, k: int, n: int) -> Iterator[Tiles]:
    row_tiles = [tile for tile in _ROW_TILES if tile < m] or [m]
    for sizes in itertools.product(row_tiles, _lane_tiles(k), _lane_tiles(n)):
        yield Tiles(*sizes)


def _lane_tiles(size: int) -> list[int]:
    """The whole axis where it is not too long, and the multiples of the lanes that cut it evenly.

    An axis that is no multiple of the lanes is cut by any of them, with a part left over.
    """
    whole = [size] if size <= LARGEST_TILE else []
    multiples = range(LANES, min(size - 1, LARGEST_TILE) + 1, LANES)
    return whole + [tile for tile in multiples if size % LANES or size % tile == 0]


# The pieces that the rows are cut into


class Pieces(NamedTuple):
    """What each step along the rows works on; int32, one entry a piece, in the order of the rows.

    Attributes:
        start: its first row.
        stop: the row after its last; ``start`` for a piece that has no rows of any group.
        write_tile: the tile of rows it lies in, each with at least one piece.
        write_group: the group it belongs to, each with at least one piece.
        read_tile: as ``write_tile``, of the last piece that has rows: a step that has nothing to
            do fetches nothing.
        read_group: as ``write_group``, in the same way.
    """

    start: Any
    stop: Any
    write_tile: Any
    write_group: Any
    read_tile: Any
    read_group: Any


def cut_rows(
    group_sizes: jax.Array, group_offset: jax.Array, *, m: int, tile_m: int, groups: int
) -> Pieces:
    """Cut the rows at every tile and at every bound between groups.

    Args:
        group_sizes: int32 ``[all groups]``, the rows of each.
        group_offset: int32 scalar, the first group whose weights are here.
        m: rows of the array; those past the sum of the sizes belong to no group.
        tile_m: rows of a tile.
        groups: how many groups have their weights here. Rows of others belong to none.

    Returns:
        ``ceil(m / tile_m) + groups + 1`` pieces, those of no rows included.
    """
    row_tiles = -(-m // tile_m)
    # Rows past the end are nobody's, so that no tile is out of range whatever the sizes say.
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), m)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    bounds = jax.lax.dynamic_slice(bounds, (group_offset,), (groups + 1,))
    # In the merged order of bounds and starts of tiles, a bound comes before the tile that starts
    # at the same row. A bound's place is its number plus that of the tiles that start before it.
    places = jnp.arange(groups + 1, dtype=jnp.int32) + -(-bounds // tile_m)
    piece = jnp.arange(row_tiles + groups + 1, dtype=jnp.int32)
    group = jnp.sum(places[None, :] <= piece[:, None], axis=1, dtype=jnp.int32) - 1
    tile = jnp.maximum(piece - group - 1, 0)
    # -1 stands before the first bound and `groups` behind the last: rows of other groups.
    mine = (group >= 0) & (group < groups)
    start = jnp.maximum(jnp.where(group < 0, 0, bounds[jnp.clip(group, 0, groups)]), tile * tile_m)
    stop = jnp.where(mine, jnp.append(start[1:], m), start)
    group = jnp.clip(group, 0, groups - 1)
    has_rows = start < stop
    return Pieces(
        start=start,
        stop=stop,
        write_tile=tile,
        write_group=group,
        read_tile=jax.lax.cummax(jnp.where(has_rows, tile, 0)),
        read_group=jax.lax.cummax(jnp.where(has_rows, group, 0)),
    )


def _is_first(keys: Any, piece: Any) -> Any:
    """Whether the piece is the first of those with its key."""
    return (piece == 0) | (keys[piece] != keys[jnp.maximum(piece - 1, 0)])


def _is_last(keys: Any, piece: Any, pieces: Any) -> Any:
    return (piece == pieces - 1) | (keys[piece] != keys[jnp.minimum(piece + 1, pieces - 1)])


def _rows_of(pieces: Pieces, piece: Any, shape: tuple[int, ...], tile: Any) -> Any:
    """A mask of a block's rows: those that the piece has."""
    rows = tile * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (rows >= pieces.start[piece]) & (rows < pieces.stop[piece])


# The kernels


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    transpose_rhs: bool = False,
    scale: jax.Array | None = None,
    out_dtype: Any = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each group's rows by the group's matrix; the kernel itself, without a gradient.

    Args:
        lhs: ``[m, k]``, the rows sorted by group.
        rhs: ``[groups, k, n]``, or ``[groups, n, k]`` with ``transpose_rhs``.
        group_sizes: int32 ``[all groups]``, the rows of each.
        group_offset: the first group that ``rhs`` holds, where it holds a part of all groups.
        transpose_rhs: read ``rhs`` as it lies and contract its last axis.
        scale: float32 ``[groups, n]``, multiplied to the product's columns.
        out_dtype: of the result, ``lhs``'s by default. Sums are taken in float32.
        tiles: the blocks, chosen by :func:`product_tiles` by default.
        interpret: run in Pallas' interpreter, as on a CPU.

    Returns:
        ``[m, n]``; rows of groups that ``rhs`` does not hold, and those past the last group, are 0.

    Raises:
        UsageError: for shapes that do not fit each other.
    """
    groups, k, n = rhs.shape if rhs.ndim == 3 else (0, 0, 0)
    if transpose_rhs:
        k, n = n, k
    _check_operands(lhs, group_sizes, groups)
    if lhs.shape[1] != k:
        raise UsageError(
            f"lhs {list(lhs.shape)} does not go with rhs {list(rhs.shape)}"
            f"{', transposed' if transpose_rhs else ''}",
            hint="lhs is [m, k], rhs [groups, k, n], or [groups, n, k] with transpose_rhs",
        )
    m = lhs.shape[0]
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    element = ElementBytes(lhs.dtype.itemsize, rhs.dtype.itemsize, out_dtype.itemsize)
    tiles = tiles or product_tiles(m, k, n, groups, element)
    pieces = cut_rows(group_sizes, jnp.int32(group_offset), m=m, tile_m=tiles.m, groups=groups)
    _, k_tiles, n_tiles = _counts((m, k, n), tiles)

    def k_block(piece: Any, k_tile: Any, pieces: Pieces) -> Any:
        # A piece without rows keeps to the block that is there.
        return jnp.where(pieces.start[piece] < pieces.stop[piece], k_tile, k_tiles - 1)

    def lhs_block(n_tile: Any, piece: Any, k_tile: Any, *refs: Any) -> tuple[Any, ...]:
        pieces = Pieces(*refs)
        return pieces.read_tile[piece], k_block(piece, k_tile, pieces)

    def rhs_block(n_tile: Any, piece: Any, k_tile: Any, *refs: Any) -> tuple[Any, ...]:
        pieces = Pieces(*refs)
        k_tile = k_block(piece, k_tile, pieces)
        place = (n_tile, k_tile) if transpose_rhs else (k_tile, n_tile)
        return (pieces.read_group[piece], *place)

    def scale_block(n_tile: Any, piece: Any, k_tile: Any, *refs: Any) -> tuple[Any, ...]:
        return Pieces(*refs).read_group[piece], 0, n_tile

    def out_block(n_tile: Any, piece: Any, k_tile: Any, *refs: Any) -> tuple[Any, ...]:
        return Pieces(*refs).write_tile[piece], n_tile

    rhs_tile = (tiles.n, tiles.k) if transpose_rhs else (tiles.k, tiles.n)
    operands = [lhs, rhs]
    in_specs = [
        pl.BlockSpec((tiles.m, tiles.k), lhs_block),
        pl.BlockSpec((None, *rhs_tile), rhs_block),
    ]
    if scale is not None:
        operands.append(scale[:, None, :])
        in_specs.append(pl.BlockSpec((None, 1, tiles.n), scale_block))
    kernel = partial(
        _product_kernel,
        tiles=tiles,
        k=k,
        transpose_rhs=transpose_rhs,
        scaled=scale is not None,
    )
    return _call(
        kernel,
        pieces,
        operands,
        in_specs,
        grid=(n_tiles, pieces.start.size, k_tiles),
        parallel_axes=1,
        out=jax.ShapeDtypeStruct((m, n), out_dtype),
        out_spec=pl.BlockSpec((tiles.m, tiles.n), out_block),
        accumulator=(tiles.m, tiles.n),
        flops=2 * m * k * n,
        name="grouped_matmul_transposed_rhs" if transpose_rhs else "grouped_matmul",
        interpret=interpret,
    )


def _product_kernel(*refs: Any, tiles: Tiles, k: int, transpose_rhs: bool, scaled: bool) -> None:
    pieces, (lhs_ref, rhs_ref, *scale_refs, out_ref, sum_ref) = Pieces(*refs[:6]), refs[6:]
    piece, k_tile = pl.program_id(1), pl.program_id(2)
    is_first = _is_first(pieces.write_tile, piece) & (k_tile == 0)
    is_last = _is_last(pieces.write_tile, piece, pl.num_programs(1))
    is_last &= k_tile == pl.num_programs(2) - 1

    @pl.when(is_first)
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pieces.start[piece] < pieces.stop[piece])
    def _add() -> None:
        lhs, rhs = lhs_ref[...], rhs_ref[...].astype(lhs_ref.dtype)
        k_axis = 1 if transpose_rhs else 0
        if k % tiles.k:
            # What a block holds past the end of its array is anything.
            left = k - k_tile * tiles.k
            lhs = _keep_first(lhs, left, axis=1)
            rhs = _keep_first(rhs, left, axis=k_axis)
        part = jax.lax.dot_general(
            lhs, rhs, (((1,), (k_axis,)), ((), ())), preferred_element_type=jnp.float32
        )
        if scaled:
            part *= scale_refs[0][...]
        # Masked after the product and not before: what another group's weights make of these rows
        # may be no number.
        rows = _rows_of(pieces, piece, part.shape, pieces.write_tile[piece])
        sum_ref[...] += jnp.where(rows, part, 0.0)

    @pl.when(is_last)
    def _end() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def transposed_product(
    lhs: jax.Array,
    dout: jax.Array,
    group_sizes: jax.Array,
    *,
    groups: int,
    group_offset: jax.Array | int = 0,
    out_dtype: Any = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return ``lhs.T @ dout`` over each group's rows: the gradient of the weights.

    Args:
        lhs: ``[m, k]``, the rows sorted by group.
        dout: ``[m, n]``, the same rows.
        group_sizes: int32 ``[all groups]``, the rows of each.
        groups: how many groups to return, from ``group_offset`` on.
        group_offset: the first of them.
        out_dtype: of the result, ``lhs``'s by default. Sums are taken in float32.
        tiles: the blocks, chosen by :func:`drhs_tiles` by default.
        interpret: run in Pallas' interpreter, as on a CPU.

    Returns:
        ``[groups, k, n]``, 0 for a group without rows.

    Raises:
        UsageError: for shapes that do not fit each other.
    """
    _check_operands(lhs, group_sizes, groups)
    if dout.ndim != 2 or dout.shape[0] != lhs.shape[0]:
        raise UsageError(
            f"lhs {list(lhs.shape)} does not go with dout {list(dout.shape)}",
            hint="lhs is [m, k] and dout [m, n]",
        )
    (m, k), n = lhs.shape, dout.shape[1]
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    element = ElementBytes(lhs.dtype.itemsize, dout.dtype.itemsize, out_dtype.itemsize)
    tiles = tiles or drhs_tiles(m, k, n, groups, element)
    pieces = cut_rows(group_sizes, jnp.int32(group_offset), m=m, tile_m=tiles.m, groups=groups)
    _, k_tiles, n_tiles = _counts((m, k, n), tiles)

    def lhs_block(k_tile: Any, n_tile: Any, piece: Any, *refs: Any) -> tuple[Any, ...]:
        return Pieces(*refs).read_tile[piece], k_tile

    def dout_block(k_tile: Any, n_tile: Any, piece: Any, *refs: Any) -> tuple[Any, ...]:
        return Pieces(*refs).read_tile[piece], n_tile

    def out_block(k_tile: Any, n_tile: Any, piece: Any, *refs: Any) -> tuple[Any, ...]:
        return Pieces(*refs).write_group[piece], k_tile, n_tile

    return _call(
        _transposed_product_kernel,
        pieces,
        [lhs, dout],
        [
            pl.BlockSpec((tiles.m, tiles.k), lhs_block),
            pl.BlockSpec((tiles.m, tiles.n), dout_block),
        ],
        grid=(k_tiles, n_tiles, pieces.start.size),
        parallel_axes=2,
        out=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        out_spec=pl.BlockSpec((None, tiles.k, tiles.n), out_block),
        accumulator=(tiles.k, tiles.n),
        flops=2 * m * k * n,
        name="grouped_matmul_drhs",
        interpret=interpret,
    )


def _transposed_product_kernel(*refs: Any) -> None:
    pieces, (lhs_ref, dout_ref, out_ref, sum_ref) = Pieces(*refs[:6]), refs[6:]
    piece = pl.program_id(2)
    is_first = _is_first(pieces.write_group, piece)
    is_last = _is_last(pieces.write_group, piece, pl.num_programs(2))

    @pl.when(is_first)
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pieces.start[piece] < pieces.stop[piece])
    def _add() -> None:
        # Rows are contracted, so both sides are masked: a row that is not the group's may hold
        # anything, and zero times that need not be zero.
        lhs, dout = (
            jnp.where(
                _rows_of(pieces, piece, ref.shape, pieces.write_tile[piece]),
                ref[...],
                jnp.zeros((), ref.dtype),
            )
            for ref in (lhs_ref, dout_ref)
        )
        sum_ref[...] += jax.lax.dot_general(
            lhs, dout, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    @pl.when(is_last)
    def _end() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _keep_first(block: jax.Array, count: Any, *, axis: int) -> jax.Array:
    """Put zeros behind the first elements of an axis."""
    places = jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
    return jnp.where(places < count, block, jnp.zeros((), block.dtype))


def _call(
    kernel: Callable[..., None],
    pieces: Pieces,
    operands: list[jax.Array],
    in_specs: list[Any],
    *,
    grid: tuple[int, ...],
    parallel_axes: int,
    out: jax.ShapeDtypeStruct,
    out_spec: Any,
    accumulator: tuple[int, int],
    flops: int,
    name: str,
    interpret: bool,
) -> jax.Array:
    moved: list[Any] = [*operands, out]
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pieces),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=[pltpu.VMEM(accumulator, jnp.float32)],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[
                "parallel" if axis < parallel_axes else "arbitrary" for axis in range(len(grid))
            ]
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            bytes_accessed=sum(math.prod(array.shape) * array.dtype.itemsize for array in moved),
            transcendentals=0,
        ),
        name=name,
        interpret=interpret,
    )
    result: jax.Array = call(*pieces, *operands)
    return result


def _check_operands(lhs: jax.Array, group_sizes: jax.Array, groups: int) -> None:
    if lhs.ndim != 2 or group_sizes.ndim != 1 or groups < 1:
        raise UsageError(
            f"lhs has {lhs.ndim} axes, group_sizes {group_sizes.ndim}, and there are {groups} "
            "groups of weights",
            hint="lhs is [m, k], rhs [groups, k, n] of 1 group or more, group_sizes [all groups]",
        )
    if lhs.shape[0] < 1 or lhs.shape[1] < 1:
        raise UsageError(f"lhs {list(lhs.shape)} is empty", hint="give at least one row")
    if group_sizes.shape[0] < groups:
        raise UsageError(
            f"there are {groups} groups of weights, but sizes of {group_sizes.shape[0]} only",
            hint="group_sizes has the rows of every group, of those that rhs does not hold too",
        )


# The product with its gradients


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    transpose_rhs: bool = False,
    quantization: str = "",
    dlhs: str = SWAPAXES,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each group's rows by the group's matrix; differentiable in ``lhs`` and ``rhs``.

    The policy ``dlhs`` changes how the gradient of ``lhs`` is computed, where
    :func:`reads_weights_in_place` says so, and nothing else.

    Args:
        lhs: ``[m, k]``, the rows sorted by group.
        rhs: ``[groups, k, n]``, or ``[groups, n, k]`` with ``transpose_rhs``.
        group_sizes: int32 ``[all groups]``, the rows of each.
        group_offset: the first group that ``rhs`` holds, where it holds a part of all groups.
        transpose_rhs: contract the last axis of ``rhs`` in the forward product.
        quantization: empty, or ``int8``: the product sees ``rhs`` rounded to int8, with one scale
            for each group and output column (its largest magnitude over 127), and the gradient
            passes the rounding unchanged (straight-through).
        dlhs: ``swapaxes`` or ``transposed-rhs``.
        interpret: run in Pallas' interpreter, as on a CPU.

    Returns:
        ``[m, n]`` in ``lhs``'s dtype; rows of groups that ``rhs`` does not hold are 0.

    Raises:
        UsageError: for shapes that do not fit each other, an unknown policy or quantization, and a
            quantization with ``transpose_rhs``.
    """
    if dlhs not in DLHS_POLICIES:
        raise unknown_name("policy for dlhs", dlhs, DLHS_POLICIES)
    if quantization not in ("", "int8"):
        raise UsageError(
            f"no quantization is called {quantization!r}", hint="leave it empty or say int8"
        )
    if quantization and transpose_rhs:
        raise UsageError(
            f"quantization={quantization} does not go with a transposed rhs",
            hint="its scales are of the last axis of rhs, which is contracted there",
        )
    options = _Options(transpose_rhs, quantization, dlhs, interpret)
    return _with_gradients(options)(lhs, rhs, group_sizes, jnp.int32(group_offset))


def reads_weights_in_place(policy: str, *, transpose_rhs: bool, quantized: bool) -> bool:
    """Whether the gradient of ``lhs`` is computed by the kernel with a transposed ``rhs``.

    Only by the policy ``transposed-rhs``, and there

    - not where the forward product reads ``rhs`` transposed: its gradient contracts the other axis,
      which needs no transpose;
    - not for quantised weights: their scales are of the axis that this gradient contracts, and the
      kernel applies scales to columns of its result, so that the weights are written out in any
      case.
    """
    return policy == TRANSPOSED_RHS and not transpose_rhs and not quantized


class _Options(NamedTuple):
    transpose_rhs: bool
    quantization: str
    dlhs: str
    interpret: bool


@cache
def _with_gradients(options: _Options) -> Callable[..., jax.Array]:
    """``f(lhs, rhs, group_sizes, group_offset)`` with its custom gradient."""

    def forward(
        lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        scale = None
        weights = rhs
        if options.quantization:
            weights, scale = quantize_int8(rhs)
        out = product(
            lhs,
            weights,
            group_sizes,
            group_offset=group_offset,
            transpose_rhs=options.transpose_rhs,
            scale=scale,
            interpret=options.interpret,
        )
        # An empty array carries the dtype of weights that are kept as int8.
        rhs_dtype = jnp.zeros(0, rhs.dtype)
        return out, (lhs, weights, scale, rhs_dtype, group_sizes, group_offset)

    def backward(residuals: tuple[Any, ...], dout: jax.Array) -> tuple[Any, ...]:
        lhs, weights, scale, rhs_dtype, group_sizes, group_offset = residuals
        where = {"group_offset": group_offset, "interpret": options.interpret}
        in_place = reads_weights_in_place(
            options.dlhs,
            transpose_rhs=options.transpose_rhs,
            quantized=bool(options.quantization),
        )
        if scale is not None:
            weights_seen = (weights * scale[:, None, :]).astype(rhs_dtype.dtype)
        else:
            weights_seen = weights
        if not in_place and not options.transpose_rhs:
            weights_seen = weights_seen.swapaxes(1, 2)
        dlhs = product(
            dout, weights_seen, group_sizes, transpose_rhs=in_place, out_dtype=lhs.dtype, **where
        )
        left, right = (dout, lhs) if options.transpose_rhs else (lhs, dout)
        drhs = transposed_product(
            left,
            right,
            group_sizes,
            groups=weights.shape[0],
            out_dtype=rhs_dtype.dtype,
            **where,
        )
        return dlhs, drhs, None, None

    @jax.custom_vjp
    def grouped(
        lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array
    ) -> jax.Array:
        return forward(lhs, rhs, group_sizes, group_offset)[0]

    grouped.defvjp(forward, backward)
    return grouped


def quantize_int8(rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 values, as ``rhs``, and their float32 scales ``[groups, n]``."""
    weights = rhs.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weights), axis=1)
    # A column of zeros has no scale of its own: 1 keeps its values zero.
    scale = jnp.where(largest > 0, largest / INT8_MAX, 1.0)
    return jnp.round(weights / scale[:, None, :]).astype(jnp.int8), scale
