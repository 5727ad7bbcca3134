"""Modules that load on first use, so that commands which never need jax do not pay for it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module called ``name`` and imports it at the first attribute access."""

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.__name__), attribute)


def lazy_import(name: str) -> Any:
    """Return a stand-in for the module ``name``.

    Raises:
        ImportError: at the first attribute access, where ``name`` cannot be imported.
    """
    return LazyModule(name)
