"""Builders that fail, each in its own way, and a healthy one beside them."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hlo_audit.errors import UsageError


def healthy(mesh: jax.sharding.Mesh, *, rows: int = 64) -> tuple[Any, Any]:
    by_rows = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.jit(jnp.tanh), (jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=by_rows),)


def aborts(mesh: jax.sharding.Mesh) -> Any:
    print("these are the last words")
    print("\n    @     0x7f8ee3b48064  absl::log_internal::LogMessage::Flush()\n", file=sys.stderr)
    os.abort()


def fails_a_check(mesh: jax.sharding.Mesh) -> Any:
    os.write(2, b"F0101 12:00:00.000000    7044 mesh.cc:172] Check failed: a == b (1 vs. 2)\n")
    os.abort()


def segfaults(mesh: jax.sharding.Mesh) -> Any:
    ctypes.string_at(0)


def aborts_in_the_compiler(mesh: jax.sharding.Mesh) -> Any:
    step, args = healthy(mesh)

    class Lowered:
        def __init__(self, lowered: Any) -> None:
            self.as_text = lowered.as_text

        def compile(self, **options: Any) -> None:
            os.abort()

    class Jitted:
        def lower(self, *args: Any) -> Lowered:
            return Lowered(step.lower(*args))

    return Jitted(), args


def exits(mesh: jax.sharding.Mesh) -> Any:
    os._exit(7)


def leaves_by_sys_exit(mesh: jax.sharding.Mesh) -> Any:
    sys.exit("no TPU here")


def hangs(mesh: jax.sharding.Mesh, *, started: str = "") -> Any:
    """Hang for good; the file ``started`` is made before, and says the process."""
    if started:
        Path(started).write_text(str(os.getpid()), encoding="utf-8")
    while True:
        time.sleep(60)


def leaves_a_child(mesh: jax.sharding.Mesh, *, pid_file: str) -> Any:
    """Die while a child process lives on that holds every file this process has open."""
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(60)
    Path(pid_file).write_text(str(child), encoding="utf-8")
    os.abort()


def raises(mesh: jax.sharding.Mesh) -> Any:
    def step(x: jax.Array) -> jax.Array:
        return x.astype("no such type")

    return jax.jit(step), healthy(mesh)[1]


def merges_a_sharded_axis(mesh: jax.sharding.Mesh) -> Any:
    def step(x: jax.Array) -> jax.Array:
        return x.reshape(-1)

    return jax.jit(step), (
        jax.ShapeDtypeStruct(
            (8, 64),
            jnp.float32,
            sharding=NamedSharding(mesh, PartitionSpec(None, *mesh.axis_names)),
        ),
    )


def runs_on_the_mesh(mesh: jax.sharding.Mesh) -> Any:
    with jax.set_mesh(mesh):
        return jnp.zeros((8, 8))


def refuses(mesh: jax.sharding.Mesh) -> Any:
    raise UsageError("7 rows cannot be", hint="take 8")


def returns_no_pair(mesh: jax.sharding.Mesh) -> Any:
    return jax.jit(jnp.tanh)


def caches(mesh: jax.sharding.Mesh, *, folder: str) -> Any:
    """Healthy, and switches on jax's persistent cache as trainers do."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return healthy(mesh)
