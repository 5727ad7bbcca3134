"""A healthy program: one sharded matrix product."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def build(mesh: jax.sharding.Mesh, *, rows: int = 256, layout: str = "plain") -> tuple[Any, Any]:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) if layout == "plain" else jnp.tanh(x @ w.T)

    by_rows = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(product), (
        jax.ShapeDtypeStruct((rows, 128), jnp.float32, sharding=by_rows),
        jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=whole),
    )
