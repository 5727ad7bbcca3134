"""How a model stores its arrays in each of its layouts, told by the names of their axes.

An array's *logical axes* have names and sizes that no layout changes. What a layout decides is the
order in which they are stored, which of them are merged into one, and along which mesh axes they
are sharded. Whatever turns an array from one layout into another follows from the names alone: a
permutation, a reshape, or both. Nothing here imports jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hlo_audit.errors import UsageError, unknown_name

StoredAxis = str | tuple[str, ...]
"""A logical axis by name, or several merged into one dimension, the slowest-varying first."""

MeshAxes = str | tuple[str, ...] | None
"""The mesh axis, or axes, that shard one stored axis; ``None`` where none does."""


@dataclass(frozen=True)
class Storage:
    """One way to store an array.

    Attributes:
        axes: the stored axes in order, one for each dimension of the array.
        mesh_axes: what shards each of them; empty where nothing is sharded.

    Raises:
        UsageError: for an axis named twice, and for mesh axes of another number than the axes.
    """

    axes: tuple[StoredAxis, ...]
    mesh_axes: tuple[MeshAxes, ...] = ()

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(axis_names(self.axes)).items() if count > 1]
        if twice:
            raise UsageError(
                f"the axis {twice[0]!r} is named twice in {show_axes(self.axes)}",
                hint="give each axis a name of its own, such as 'embed_in' and 'embed_out'",
            )
        if self.mesh_axes and len(self.mesh_axes) != len(self.axes):
            raise UsageError(
                f"there are {len(self.mesh_axes)} mesh axes for the {len(self.axes)} stored axes "
                f"{show_axes(self.axes)}",
                hint="give one mesh axis, or None, for each stored axis",
            )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the array, from the size of each logical axis."""
        return tuple(math.prod(sizes[name] for name in axis_names((axis,))) for axis in self.axes)


@dataclass(frozen=True)
class StoredArray:
    """One parameter in each of its layouts, with the optimiser's moments that are stored as it is.

    Attributes:
        path: the last steps of the way to it in a tree of parameters, joined by ``/``: ``kernel``,
            or ``logits_dense/kernel`` where other layers have a kernel too.
        dtype: its dtype by name; no layout changes it.
        layouts: the name of each layout -> how it stores the array.
        moments: the names that an optimiser gives to arrays of the parameter's shape -> their
            dtype. In a tree one of them stands before the path (``mu/logits_dense/kernel``, as in
            optax) or in place of its last step (``mu`` beside ``kernel``).

    Raises:
        UsageError: where two layouts do not have the same logical axes.
    """

    path: str
    dtype: str
    layouts: Mapping[str, Storage]
    moments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.strip("/") or not self.layouts:
            raise UsageError(
                f"the stored array {self.path!r} has no path or no layout",
                hint="give the end of its path in the tree, and how each layout stores it",
            )
        (first, storage), *others = self.layouts.items()
        for name, other in others:
            if set(axis_names(other.axes)) != set(axis_names(storage.axes)):
                raise UsageError(
                    f"layout {name} stores {self.path} as {show_axes(other.axes)}, "
                    f"and layout {first} as {show_axes(storage.axes)}",
                    hint="every layout stores the same logical axes, a size of 1 included",
                )


@dataclass(frozen=True)
class StoredLayouts:
    """What a model's checkpoint holds that its layouts store in different ways.

    Attributes:
        model: the model's name.
        canonical: the layout that a checkpoint is in, whatever the layout of the run.
        sizes: the size of each logical axis, at least 1.
        arrays: the arrays; those that every layout stores alike need not be among them.

    Raises:
        UsageError: for an axis without a size, for arrays of different layouts, for two arrays of
            one path, and for a canonical layout that is none of the layouts.
    """

    model: str
    canonical: str
    sizes: Mapping[str, int]
    arrays: tuple[StoredArray, ...]

    def __post_init__(self) -> None:
        for array in self.arrays:
            if set(array.layouts) != set(self.layouts):
                raise UsageError(
                    f"{array.path} and {self.arrays[0].path} of {self.model} are not described in "
                    "the same layouts",
                    hint="describe every array in every layout, the unchanged ones too",
                )
            for name in axis_names(next(iter(array.layouts.values())).axes):
                if self.sizes.get(name, 0) < 1:
                    raise UsageError(
                        f"the axis {name!r} of {array.path} of {self.model} has no size",
                        hint="give the size of each logical axis, 1 or more",
                    )
        if len({array.path for array in self.arrays}) < len(self.arrays):
            raise UsageError(
                f"two stored arrays of {self.model} have the same path",
                hint="give each a path that tells it from the others",
            )
        self.check_layout(self.canonical)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of the layouts."""
        return tuple(self.arrays[0].layouts) if self.arrays else ()

    def check_layout(self, layout: str) -> None:
        """Refuse a layout that the model does not store its arrays in.

        Raises:
            UsageError: for an unknown layout.
        """
        if layout not in self.layouts:
            raise unknown_name(f"stored layout of {self.model}", layout, self.layouts)

    def shape(self, array: StoredArray, layout: str) -> tuple[int, ...]:
        """Return the shape of one of the arrays in a layout."""
        return array.layouts[layout].shape(self.sizes)


def axis_names(axes: tuple[StoredAxis, ...]) -> list[str]:
    """Return the names of the logical axes in the order in which they are stored."""
    return [name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis)]


def show_axes(axes: tuple[StoredAxis, ...]) -> str:
    """Write stored axes as ``[rate*embed, n]``."""
    return "[" + ", ".join(axis if isinstance(axis, str) else "*".join(axis) for axis in axes) + "]"


def rearrange(
    array: Any,
    source: tuple[StoredAxis, ...],
    target: tuple[StoredAxis, ...],
    sizes: Mapping[str, int],
) -> Any:
    """Return the array stored by ``target``'s axes instead of ``source``'s; no value changes.

    Args:
        array: has the methods ``reshape`` and ``transpose`` of numpy and jax arrays.
        source: its axes.
        target: the same logical axes in another order, merged otherwise, or both.
        sizes: the size of each logical axis.
    """
    if source == target:
        return array
    names = axis_names(source)
    order = [names.index(name) for name in axis_names(target)]
    apart = array.reshape([sizes[name] for name in names])
    return apart.transpose(order).reshape(Storage(target).shape(sizes))
