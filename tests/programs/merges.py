"""Programs that merge axes, or move activations, with and without need: on four devices.

Each is built for the mesh ``MESH``. What only looks like a flatten is here beside what is one.
"""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"data": 2, "tensor": 2}

BATCH, SEQ, RATE, EMBED, MAPS = 4, 64, 4, 512, 128
HEADS, HEAD_DIM = 8, 128
LAYERS = 3

BATCH_SPEC = P(("data", "tensor"))

Program = tuple[Any, tuple[Any, ...]]


def _bf16(mesh: Any, spec: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def _f32(mesh: Any, spec: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def _is_explicit() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def _reshard(x: Any, spec: Any) -> Any:
    return jax.sharding.reshard(x, spec) if _is_explicit() else x


def _einsum(product: str, a: Any, b: Any, spec: Any) -> Any:
    if _is_explicit():
        return jnp.einsum(product, a, b, out_sharding=spec)
    return _constrain(jnp.einsum(product, a, b), spec)


def _constrain(x: Any, spec: Any) -> Any:
    return x if _is_explicit() else lax.with_sharding_constraint(x, spec)


def fsdp_weight(mesh: jax.sharding.Mesh) -> Program:
    """A training step that gathers a weight for use, and merges the gathered axis after."""

    def loss(weight: Any, x: Any) -> Any:
        weight = _reshard(weight.astype(jnp.bfloat16), P(None, None, None))
        flat = weight.reshape(RATE * EMBED, MAPS)
        out = _einsum("bsm,mn->bsn", x, flat, BATCH_SPEC)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    def step(weight: Any, x: Any) -> Any:
        return weight - 0.1 * jax.grad(loss)(weight, x)

    spec = P(None, ("data", "tensor"), None)
    return (
        jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, spec)),
        (
            _f32(mesh, spec, RATE, EMBED, MAPS),
            _bf16(mesh, BATCH_SPEC, BATCH, SEQ, RATE * EMBED),
        ),
    )


def fsdp_weight_in_use(mesh: jax.sharding.Mesh) -> Program:
    """The same weight in a forward pass alone, which updates and donates nothing."""

    def step(weight: Any, x: Any) -> Any:
        weight = _reshard(weight.astype(jnp.bfloat16), P(None, None, None))
        flat = weight.reshape(RATE * EMBED, MAPS)
        return _einsum("bsm,mn->bsn", x, flat, BATCH_SPEC)

    return jax.jit(step), (
        _f32(mesh, P(None, ("data", "tensor"), None), RATE, EMBED, MAPS),
        _bf16(mesh, BATCH_SPEC, BATCH, SEQ, RATE * EMBED),
    )


def scanned_fsdp_weights(mesh: jax.sharding.Mesh) -> Program:
    """A stack of such weights: each layer gathers its own in the loop."""
    spec = P(None, None, ("data", "tensor"), None)

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            weight = _reshard(weight.astype(jnp.bfloat16), P(None, None, None))
            out = _einsum("bsm,mn->bsn", x, weight.reshape(RATE * EMBED, MAPS), BATCH_SPEC)
            return jnp.tanh(x * jnp.sum(out, axis=-1, keepdims=True)), None

        out, _ = lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> Any:
        return weights - 0.1 * jax.grad(loss)(weights, x)

    return (
        jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, spec)),
        (
            _f32(mesh, spec, LAYERS, RATE, EMBED, MAPS),
            _bf16(mesh, BATCH_SPEC, BATCH, SEQ, RATE * EMBED),
        ),
    )


def scanned_fsdp_weights_in_use(mesh: jax.sharding.Mesh) -> Program:
    """The same stack in a forward pass alone."""

    def step(weights: Any, x: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            weight = _reshard(weight.astype(jnp.bfloat16), P(None, None, None))
            out = _einsum("bsm,mn->bsn", x, weight.reshape(RATE * EMBED, MAPS), BATCH_SPEC)
            return jnp.tanh(x * jnp.sum(out, axis=-1, keepdims=True)), None

        return lax.scan(layer, x, weights)[0]

    return jax.jit(step), (
        _f32(mesh, P(None, None, ("data", "tensor"), None), LAYERS, RATE, EMBED, MAPS),
        _bf16(mesh, BATCH_SPEC, BATCH, SEQ, RATE * EMBED),
    )


def flatten_in_use(mesh: jax.sharding.Mesh) -> Program:
    """A flatten in a forward pass alone, beside a weight whose rows are sharded."""

    def step(x: Any, alphas: Any, rows: Any) -> Any:
        flat = _reshard(x, P()).reshape(BATCH, SEQ, RATE * EMBED)
        maps = _einsum("bsm,mn->bsn", flat, alphas, P())
        mixed = _einsum("bskd,bsk->bsd", x, maps[..., :RATE], P(None, None, "tensor"))
        return _einsum("bsd,de->bse", mixed, rows, P())

    return jax.jit(step), (
        _bf16(mesh, P(None, None, None, "tensor"), BATCH, SEQ, RATE, EMBED),
        _bf16(mesh, P(), RATE * EMBED, MAPS),
        _bf16(mesh, P("tensor"), EMBED, EMBED),
    )


def _in_shard_map(mesh: jax.sharding.Mesh, moved: Callable[[Any], Any]) -> Program:
    """``moved`` takes a shard of x, and what it gives is merged and contracted."""

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data", None, None, "tensor"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    def project(x: Any, weight: Any) -> Any:
        x = moved(x)
        flat = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
        return lax.psum(flat @ weight[: flat.shape[-1]], "tensor")

    return jax.jit(project), (
        _bf16(mesh, P("data", None, None, "tensor"), BATCH, SEQ, RATE, EMBED),
        _bf16(mesh, P(), RATE * EMBED, MAPS),
    )


def asked_for_gather(mesh: jax.sharding.Mesh) -> Program:
    """An ``all_gather`` of the program's own, then a merge."""
    return _in_shard_map(mesh, lambda x: lax.all_gather(x, "tensor", axis=3, tiled=True))


def asked_for_exchange(mesh: jax.sharding.Mesh) -> Program:
    """An ``all_to_all`` of the program's own, then a merge."""
    return _in_shard_map(mesh, lambda x: lax.all_to_all(x, "tensor", 2, 3, tiled=True))


def asked_for_permute(mesh: jax.sharding.Mesh) -> Program:
    """A ``ppermute`` of the program's own, then a merge."""
    return _in_shard_map(mesh, lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]))


def merged_heads(mesh: jax.sharding.Mesh) -> Program:
    """Attention with heads over ``tensor``: the outer of the merged axes, so that nothing moves."""

    def loss(weights: Any, x: Any) -> Any:
        # As most write it: one product, then a split into heads, and a merge after.
        q, k, v = (
            _einsum("bse,em->bsm", x, w, P("data", None, "tensor")).reshape(
                BATCH, SEQ, HEADS, HEAD_DIM
            )
            for w in weights[:3]
        )
        scores = jnp.einsum("bshd,bthd->bhst", q, k) * HEAD_DIM**-0.5
        probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        heads = jnp.einsum("bhst,bthd->bshd", probabilities, v)
        merged = heads.reshape(BATCH, SEQ, HEADS * HEAD_DIM)
        out = _einsum("bsm,me->bse", merged, weights[3], P("data"))
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> Any:
        return jax.grad(loss, argnums=(0, 1))(weights, x)

    inwards = _bf16(mesh, P(None, "tensor"), EMBED, HEADS * HEAD_DIM)
    outwards = _bf16(mesh, P("tensor"), HEADS * HEAD_DIM, EMBED)
    return jax.jit(step), (
        (inwards, inwards, inwards, outwards),
        _bf16(mesh, P("data"), BATCH, SEQ, EMBED),
    )


def _hand_on(state: Any) -> Any:
    """Each stage's activation to the next; jax types no roll of a sharded axis."""
    if _is_explicit():
        roll = jax.sharding.auto_axes(lambda s: jnp.roll(s, 1, axis=0), axes=tuple(MESH))
        return roll(state, out_sharding=jax.typeof(state).sharding)
    return jnp.roll(state, 1, axis=0)


def pipeline(mesh: jax.sharding.Mesh) -> Program:
    """Stages over ``tensor`` that hand their activation on, and merge and contract its axes."""
    stages = mesh.shape["tensor"]

    def step(weight: Any, x: Any) -> Any:
        def tick(state: Any, _: Any) -> Any:
            shifted = _hand_on(state)
            flat = shifted.reshape(stages, BATCH, SEQ, RATE * EMBED)
            out = _einsum("gbsm,gmn->gbsn", flat, weight, P("tensor", "data"))
            state = jnp.tanh(out).reshape(stages, BATCH, SEQ, RATE, EMBED)
            return _constrain(state, P("tensor", "data")), None

        return lax.scan(tick, x, None, length=LAYERS)[0]

    return jax.jit(step), (
        _bf16(mesh, P("tensor"), stages, RATE * EMBED, RATE * EMBED),
        _bf16(mesh, P("tensor", "data"), stages, BATCH, SEQ, RATE, EMBED),
    )


def scanned_flatten(mesh: jax.sharding.Mesh) -> Program:
    """A stack of layers, each of which flattens its streams: a gather for each."""
    spec = P("data", None, None, "tensor")

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            whole = _reshard(x, P("data"))
            flat = whole.reshape(BATCH, SEQ, RATE * EMBED)
            maps = _einsum("bsm,mn->bsn", flat, weight, P("data"))
            gates = jax.nn.sigmoid(maps[..., :RATE])
            return x * gates[..., None], None

        out, _ = lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> Any:
        return jax.grad(loss)(weights, x)

    return jax.jit(step), (
        _bf16(mesh, P(), LAYERS, RATE * EMBED, MAPS),
        _bf16(mesh, spec, BATCH, SEQ, RATE, EMBED),
    )
