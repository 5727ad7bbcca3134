"""A program that the first to build never ends to build; whoever comes after it does."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def build(mesh: jax.sharding.Mesh, *, seen: str = "", always: bool = False) -> tuple[Any, Any]:
    """Args: ``seen`` is a file for the ids of this process and of the one that started it."""
    try:
        file = os.open(seen, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except OSError:
        first = False
    else:
        first = True
        os.close(file)
        complete = Path(f"{seen}.part")
        complete.write_text(f"{os.getpid()} {os.getppid()}")
        complete.replace(seen)
    if first or always:
        time.sleep(3600)
    by_rows = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.jit(jnp.tanh), (jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=by_rows),)
