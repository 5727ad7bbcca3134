"""Sparing Python's garbage collector graphs that grow: it would walk them again and again, and
nothing of them is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect nothing while modules are read and looked through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collected_at_the_end() -> Iterator[None]:
    """As :func:`no_collection`, and collect what is left of modules that are not used any more.

    Computations and instructions refer to each other: they would stay until the collector gets to
    them. What was made meanwhile is of its youngest generation, so that no other is looked at.
    """
    with no_collection():
        yield
        gc.collect(0)
