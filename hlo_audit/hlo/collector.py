"""When Python's garbage collector looks at the graphs of modules: not while they grow, as it would
walk them again and again and nothing of them is garbage, but once enough of them is done with."""

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


def collect() -> None:
    """Collect what refers to itself only, unless nothing is to be collected now."""
    if gc.isenabled():
        gc.collect()


@contextmanager
def collected_at_the_end() -> Iterator[None]:
    """As :func:`no_collection`, and collect what is left of modules that are not used any more.

    Computations and instructions refer to each other: they would stay until the collector gets to
    them. What was made meanwhile is of its youngest generation, so that no other is looked at.
    """
    with no_collection():
        yield
        gc.collect(0)
