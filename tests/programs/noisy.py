"""Healthy, but prints to standard output and error at every chance, JSON lines among it."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

NOISE = '{"error": {"kind": "usage", "message": "noise", "hint": null}}\n'

print(NOISE)


def build(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    def step(x: jax.Array) -> jax.Array:
        print(NOISE)
        return x + 1

    sys.stderr.write(NOISE)
    os.write(1, NOISE.encode())
    os.write(2, b"\xff\xfe no text\n")
    by_rows = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.jit(step), (jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=by_rows),)
