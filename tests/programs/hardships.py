"""Programs that compile, and others that end the compiler in the ways in which it ends."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NoReturn

import jax
import jax.numpy as jnp


def works(mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x.T)

    return jax.jit(step), (jax.eval_shape(lambda: jnp.zeros((64, 64))),)


def aborts(mesh: jax.sharding.Mesh) -> NoReturn:
    os.abort()


def is_killed(mesh: jax.sharding.Mesh) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory runs out
    raise AssertionError


def hangs(mesh: jax.sharding.Mesh) -> NoReturn:
    while True:
        time.sleep(1)
