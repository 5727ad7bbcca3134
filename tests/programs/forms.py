"""Small programs whose compiled modules hold many forms of HLO text, on four devices.

``scripts/make_dump_fixtures.py`` compiles them with each supported jax; see ``tests/data``.
"""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"x": 2, "y": 2}
"""The mesh that each is built for; only ``collectives`` looks at the axes by their names."""


def control_flow(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Loops with a trip count and without, conditionals of two and more branches, a sort of two
    arrays, random bits, and a donated argument."""

    def step(state: Any, key: Any, scores: Any, choice: Any) -> Any:
        def layer(carry: Any, weight: Any) -> Any:
            return jnp.tanh(carry @ weight), jnp.sum(carry)

        weights = jnp.stack([state, state.T, state + 1])
        counted, sums = lax.scan(layer, state, weights)
        halved = lax.while_loop(lambda v: jnp.max(v) > 1e-3, lambda v: v * 0.5, counted)
        signed = lax.cond(jnp.sum(sums) > 0, lambda v: -v, jnp.sin, halved)
        turned = lax.switch(choice, (jnp.cos, jnp.exp, lambda v: v.T), signed)
        order, ranked = lax.sort_key_val(scores, lax.iota(jnp.int32, scores.shape[0]))
        _, bits = lax.rng_bit_generator(key, (128,), dtype=jnp.uint32)
        drawn = lax.rng_uniform(0.0, 1.0, (128,))
        return turned + drawn, order, ranked, bits

    whole = NamedSharding(mesh, P())
    return jax.jit(step, donate_argnums=0), (
        jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((4,), jnp.uint32, sharding=whole),
        jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    )


def collectives(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Each collective once, over one axis of the mesh, the other, both, and listed groups."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    def exchange(block: Any) -> Any:
        total = lax.psum(block, ("x", "y"))
        most = lax.pmax(block, "x")
        pairs = lax.psum(block, ("x", "y"), axis_index_groups=[[0, 3], [1, 2]])
        gathered = lax.all_gather(block, "y", axis=1, tiled=True)
        product = gathered @ gathered.T
        scattered = lax.psum_scatter(product @ gathered, "x", scatter_dimension=1, tiled=True)
        turned = lax.all_to_all(block, "y", 0, 1, tiled=True).reshape(block.shape)
        shifted = lax.ppermute(block, "x", [(0, 1), (1, 0)])
        first, second = lax.psum((block * 2, block[:, 0]), "y")
        number = lax.axis_index("x").astype(block.dtype)
        return (
            total + most + pairs + scattered + turned + shifted + first + second[:, None] + number
        )

    def step(array: Any) -> Any:
        mixed = jnp.sin(array) @ array.T
        return exchange(lax.with_sharding_constraint(mixed, spread))

    spread = NamedSharding(mesh, P("x", "y"))
    return jax.jit(step), (jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=spread),)


def arrays(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Gathers, scatters, windows, slices, a convolution, a Fourier transform, and many types."""

    def step(table: Any, rows: Any, image: Any, small: Any, half: Any) -> Any:
        taken = table[rows]
        added = table.at[rows].add(taken * 2)
        pooled = lax.reduce_window(image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        picked = jax.grad(
            lambda v: jnp.sum(
                lax.reduce_window(v, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2
            )
        )(image)
        convolved = lax.conv_general_dilated(
            image, image[:, :3, :3, :], (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
        )
        spectrum = jnp.fft.fft(table[:8] + 1j * table[8:16])
        start = rows[0]
        window = lax.dynamic_slice(table, (start, 0), (8, 128))
        put = lax.dynamic_update_slice(added, window * 2, (start, 0))
        best, places = lax.top_k(table, 4)
        products = lax.dot(small, small.T, preferred_element_type=jnp.int32)
        eighths = half.astype(jnp.float8_e4m3fn), half.astype(jnp.float8_e5m2)
        return {
            "put": put,
            "pooled": (pooled, picked, convolved),
            "spectrum": spectrum,
            "best": (best, places),
            "products": products,
            "eighths": eighths,
            "sums": jnp.cumsum(half, axis=0),
            "bits": lax.bitcast_convert_type(half, jnp.uint16),
            "true": (table > 0) & ~jnp.isnan(table),
            "padded": jnp.pad(half, ((1, 2), (0, 3)))[::-1],
            "nibbles": small.astype(jnp.int4).astype(jnp.uint8),
            "none": jnp.zeros((0, 4)),
            "constants": jnp.array([1.5, -jnp.inf, jnp.nan, 1e-30]),
        }

    whole = NamedSharding(mesh, P())
    by_rows = NamedSharding(mesh, P(mesh.axis_names[0]))
    return jax.jit(step), (
        jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=by_rows),
        jax.ShapeDtypeStruct((16,), jnp.int32, sharding=whole),
        jax.ShapeDtypeStruct((2, 16, 16, 8), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((128, 256), jnp.int8, sharding=whole),
        jax.ShapeDtypeStruct((64, 128), jnp.bfloat16, sharding=whole),
    )


def kernel(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """A Pallas kernel under ``shard_map``, between two products."""

    def double(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    def call(block: Any) -> Any:
        return pl.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct(block.shape, block.dtype),
            grid=(2,),
            in_specs=[pl.BlockSpec((block.shape[0] // 2, block.shape[1]), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((block.shape[0] // 2, block.shape[1]), lambda i: (i, 0)),
            name="double",
        )(block)

    by_rows = P(mesh.axis_names)
    sharded = jax.shard_map(call, mesh=mesh, in_specs=by_rows, out_specs=by_rows, check_vma=False)

    def step(array: Any, weight: Any) -> Any:
        return sharded(array @ weight) @ weight.T

    return jax.jit(step), (
        jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=NamedSharding(mesh, by_rows)),
        jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=NamedSharding(mesh, P())),
    )
