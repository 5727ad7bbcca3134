"""A model that adds one, in layouts that are right, wrong and worse: to be run, not compiled."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import os
import time
from typing import Any

import jax
import numpy as np

from hlo_audit.errors import UsageError


def run(mesh: jax.sharding.Mesh, *, layout: str, size: int) -> dict[str, dict[str, Any]]:
    """The result is on the mesh's devices, and a few things go wrong on the way to it."""
    if layout == "impossible":
        raise UsageError(f"size={size} cannot be", hint="take another")
    if layout == "crashes":
        print("these are the last words")
        os.abort()
    if layout == "hangs":
        time.sleep(3600)
    print("chatter that must not break in")
    values = np.arange(size, dtype=np.float32)
    results = {"exact": add_one(mesh, values), "random": add_one(mesh, values / 7)}
    if layout == "rounds":
        results["random"] *= np.float32(1 + 2**-20)
    if layout == "wrong":
        results["exact"][1] += 1
    return {inputs: {"sum": array} for inputs, array in results.items()}


def add_one(mesh: jax.sharding.Mesh, values: Any) -> Any:
    spread = jax.sharding.PartitionSpec(*mesh.axis_names)
    placed = jax.device_put(values, jax.sharding.NamedSharding(mesh, spread))
    assert len(placed.sharding.device_set) == mesh.size
    return np.array(placed + 1)
