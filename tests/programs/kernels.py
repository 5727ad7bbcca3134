"""Programs that feed Pallas kernels: with weights whose axes are swapped, and with activations."""

# mypy: untyped-calls-exclude=jax, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"fsdp": 4}

ROWS, WIDTH, HIDDEN, LAYERS = 256, 256, 512, 3
BATCH, SEQ, HEADS, HEAD_DIM = 4, 256, 4, 128

Program = tuple[Any, tuple[Any, ...]]


def _array(mesh: Any, dtype: Any, *shape: int, axis: int = 0) -> Any:
    """An abstract array, with one axis over ``fsdp``."""
    spec = P(*(None,) * axis, "fsdp")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _matmul(a: Any, b: Any) -> Any:
    """``a @ b`` by a kernel that takes both whole, row-major."""

    def kernel(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        product = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)
        out_ref[...] = product.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    product: Any = pl.pallas_call(kernel, out_shape=out)(a, b)
    return product


def _on_each_device(mesh: Any, count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The arrays cut along their first axis, but for stacked weights: along their second."""
    specs = (P("fsdp"), *(P(None, "fsdp"),) * (count - 1))
    return partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False)


def scanned_swapped_weights(mesh: jax.sharding.Mesh) -> Program:
    """A stack of layers in a loop, each of which hands its gathered weight to a kernel, swapped."""

    @_on_each_device(mesh, 3)
    def layers(x: Any, inwards: Any, outwards: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            first, second = (
                lax.all_gather(w.astype(x.dtype), "fsdp", axis=0, tiled=True) for w in weights
            )
            return _matmul(jnp.tanh(_matmul(x, first)), second.swapaxes(0, 1)), None

        return lax.scan(layer, x, (inwards, outwards))[0]

    return jax.jit(layers), (
        _array(mesh, jnp.bfloat16, ROWS, WIDTH),
        _array(mesh, jnp.float32, LAYERS, WIDTH, HIDDEN, axis=1),
        _array(mesh, jnp.float32, LAYERS, WIDTH, HIDDEN, axis=1),
    )


def scanned_weights_as_they_are(mesh: jax.sharding.Mesh) -> Program:
    """The same stack with the second weights stored as the kernel reads them."""

    @_on_each_device(mesh, 3)
    def layers(x: Any, inwards: Any, outwards: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            first, second = (
                lax.all_gather(w.astype(x.dtype), "fsdp", axis=0, tiled=True) for w in weights
            )
            return _matmul(jnp.tanh(_matmul(x, first)), second), None

        return lax.scan(layer, x, (inwards, outwards))[0]

    return jax.jit(layers), (
        _array(mesh, jnp.bfloat16, ROWS, WIDTH),
        _array(mesh, jnp.float32, LAYERS, WIDTH, HIDDEN, axis=1),
        _array(mesh, jnp.float32, LAYERS, HIDDEN, WIDTH, axis=1),
    )


def swapped_weight(mesh: jax.sharding.Mesh) -> Program:
    """A weight that is an argument and goes to a kernel swapped, with nothing between."""

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp"), check_vma=False
    )
    def step(x: Any, weight: Any) -> Any:
        return _matmul(x, weight.T)

    whole = NamedSharding(mesh, P())
    return jax.jit(step), (
        _array(mesh, jnp.bfloat16, ROWS, WIDTH),
        jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.bfloat16, sharding=whole),
    )


def flash_attention(mesh: jax.sharding.Mesh) -> Program:
    """Attention by a kernel that wants heads before tokens: transposes of activations."""

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any) -> None:
        q, k, v = (ref[0, 0] for ref in (q_ref, k_ref, v_ref))
        scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        out_ref[0, 0] = out.astype(out_ref.dtype)

    block = pl.BlockSpec((1, 1, SEQ, HEAD_DIM), lambda b, h: (b, h, 0, 0))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("fsdp"), P(None, "fsdp"), P("fsdp")),
        out_specs=P("fsdp"),
        check_vma=False,
    )
    def attention(x: Any, projections: Any, outwards: Any) -> Any:
        weights = lax.all_gather(projections.astype(x.dtype), "fsdp", axis=1, tiled=True)
        outwards = lax.all_gather(outwards.astype(x.dtype), "fsdp", axis=0, tiled=True)
        # As trainers write it: [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim].
        q, k, v = (
            (x @ weight).reshape(*x.shape[:2], HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
            for weight in weights
        )
        heads = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=q.shape[:2],
            in_specs=[block] * 3,
            out_specs=block,
        )(q, k, v)
        merged = heads.transpose(0, 2, 1, 3).reshape(*x.shape[:2], HEADS * HEAD_DIM)
        return merged @ outwards

    return jax.jit(attention), (
        _array(mesh, jnp.bfloat16, BATCH, SEQ, WIDTH),
        _array(mesh, jnp.float32, 3, WIDTH, HEADS * HEAD_DIM, axis=1),
        _array(mesh, jnp.float32, HEADS * HEAD_DIM, WIDTH),
    )
