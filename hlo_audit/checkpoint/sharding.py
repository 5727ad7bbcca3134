"""Shardings by logical axis: what a layout expects, and what is left of one after a turn."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from hlo_audit.checkpoint.leaves import array_at
from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.lazy_import import lazy_import
from hlo_audit.stored import (
    MeshAxes,
    Storage,
    StoredArray,
    StoredAxis,
    StoredLayouts,
    axis_names,
    show_axes,
)

if TYPE_CHECKING:
    import jax
else:
    jax = lazy_import("jax")

_Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension, none of them left out."""


def check_sharding(
    sharding: Any,
    leaf: str,
    layout: str,
    description: StoredLayouts,
    *,
    sharded: Mapping[StoredAxis, MeshAxes] | None = None,
) -> None:
    """Refuse a sharding that shards other logical axes of an array than it should.

    The specs of an array's two orientations have the same rank, so that the wrong one raises
    nothing by itself and shards the wrong axis.

    Args:
        sharding: a ``PartitionSpec``, a ``NamedSharding``, or a tuple of mesh axes.
        leaf: the path of the array in a tree, steps joined by ``/``; its end is enough.
        layout: the layout that the array is stored in where the sharding is used.
        description: how the model stores its arrays.
        sharded: logical axis -> mesh axis, for an export that shards by its own mesh axes, such as
            ``{"vocab": "model"}``; axes that it does not name are not sharded. Without it, what the
            description has for the layout is expected.

    Raises:
        UsageError: for another sharding than the one expected, which it names; for a leaf, layout
            or axis that is unknown; and for an axis whose sharding the layout cannot express.
    """
    array = array_at(leaf, description)
    description.check_layout(layout)
    check_spec(sharding, leaf, array, layout, description, sharded)


def partition_spec(
    leaf: str,
    layout: str,
    description: StoredLayouts,
    *,
    sharded: Mapping[StoredAxis, MeshAxes] | None = None,
) -> jax.sharding.PartitionSpec:
    """Return the spec that :func:`check_sharding` expects; arguments and errors as there."""
    array = array_at(leaf, description)
    description.check_layout(layout)
    return jax.sharding.PartitionSpec(*_expected_spec(array, layout, description, sharded))


def check_spec(
    sharding: Any,
    path: str,
    array: StoredArray,
    layout: str,
    description: StoredLayouts,
    sharded: Mapping[StoredAxis, MeshAxes] | None = None,
) -> None:
    """Do what :func:`check_sharding` does, for a leaf whose description is known."""
    axes = array.layouts[layout].axes
    expected = _full(_expected_spec(array, layout, description, sharded), len(axes))
    given = _full(_spec_of(sharding, path), len(axes))
    mesh_shape = dict(sharding.mesh.shape) if is_named(sharding) else None
    if _effective(given, mesh_shape) == _effective(expected, mesh_shape):
        return
    elsewhere = [
        other
        for other in array.layouts
        if given == _spec_elsewhere(array, other, description, sharded)
    ]
    raise UsageError(
        f"the sharding {_show(given)} of {path} of {description.model} does not fit layout "
        f"{layout}, which stores {show_axes(axes)} and shards it {_show(expected)}",
        hint=f"it is the sharding of layout {' or '.join(elsewhere)}: give the one of the layout "
        "that the array is stored in"
        if elsewhere
        else "name the mesh axes in the order in which the layout stores the array",
    )


def is_named(sharding: Any) -> TypeGuard[jax.sharding.NamedSharding]:
    return isinstance(sharding, jax.sharding.NamedSharding)


def _spec_of(sharding: Any, path: str) -> tuple[MeshAxes, ...]:
    spec = sharding.spec if is_named(sharding) else sharding
    if not isinstance(spec, (jax.sharding.PartitionSpec, tuple, list)) or not all(
        axes is None or isinstance(axes, (str, tuple)) for axes in spec
    ):
        raise UsageError(
            f"the sharding of {path} is {sharding!r}",
            hint="give a PartitionSpec, a NamedSharding or a tuple of mesh axes",
        )
    return tuple(spec)


def _full(spec: Iterable[Any], rank: int, mesh_shape: Mapping[str, int] | None = None) -> _Spec:
    """Return the spec with the mesh axes of every dimension, less those that the mesh lacks."""
    named = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
    named += [()] * (rank - len(named))
    return tuple(
        tuple(axis for axis in axes if mesh_shape is None or axis in mesh_shape) for axes in named
    )


def _effective(spec: _Spec, mesh_shape: Mapping[str, int] | None) -> _Spec:
    """Return the spec less the mesh axes of a single device, which shard nothing."""
    if mesh_shape is None:
        return spec
    return tuple(tuple(axis for axis in axes if mesh_shape.get(axis, 1) > 1) for axes in spec)


def _plain(spec: _Spec) -> tuple[MeshAxes, ...]:
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)


def _show(spec: _Spec) -> str:
    return str(_plain(spec))


def _spec_elsewhere(
    array: StoredArray,
    layout: str,
    description: StoredLayouts,
    sharded: Mapping[StoredAxis, MeshAxes] | None,
) -> _Spec | None:
    """Return the spec that another layout expects, ``None`` where it cannot express it."""
    try:
        spec = _expected_spec(array, layout, description, sharded)
    except UsageError:
        return None
    return _full(spec, len(spec))


def _expected_spec(
    array: StoredArray,
    layout: str,
    description: StoredLayouts,
    sharded: Mapping[StoredAxis, MeshAxes] | None,
) -> tuple[MeshAxes, ...]:
    storage = array.layouts[layout]
    if sharded is None:
        return storage.mesh_axes or (None,) * len(storage.axes)
    known = {*axis_names(storage.axes), *storage.axes}
    for axis in sharded:
        if axis not in known:
            raise unknown_name(
                f"axis of {array.path} of {description.model} in layout {layout}",
                str(axis),
                map(str, storage.axes),
            )
    return tuple(_mesh_axes_of(axis, sharded, array, layout) for axis in storage.axes)


def _mesh_axes_of(
    axis: StoredAxis, sharded: Mapping[StoredAxis, MeshAxes], array: StoredArray, layout: str
) -> MeshAxes:
    if axis in sharded:
        return sharded[axis]
    outer, *inner = axis_names((axis,)) or [""]
    for name in inner:
        if sharded.get(name) is not None:
            raise UsageError(
                f"layout {layout} stores {name} of {array.path} within "
                f"{show_axes((axis,))}, of which only {outer} can be sharded",
                hint=f"shard {outer}, or the merged axis as a whole by naming {axis!r}",
            )
    return sharded.get(outer)


def sharding_after(
    sharding: Any, source: Storage, target: Storage
) -> jax.sharding.NamedSharding | None:
    """Return the sharding of an array once it is stored by ``target``; ``None`` for no mesh's.

    Each axis keeps its own. Blocks of a merged axis are none of the axes in it, so that an array
    whose axes are merged otherwise gets what the model has for ``target``, as far as the mesh has
    those mesh axes.
    """
    if not is_named(sharding):
        return None
    spec = dict(zip(source.axes, _full(sharding.spec, len(source.axes)), strict=True))
    if any(spec.values()) and spec.keys() != set(target.axes):
        described = _full(target.mesh_axes, len(target.axes), dict(sharding.mesh.shape))
        spec = dict(zip(target.axes, described, strict=True))
    ordered = tuple(spec.get(axis, ()) for axis in target.axes)
    return jax.sharding.NamedSharding(
        sharding.mesh,
        jax.sharding.PartitionSpec(*_plain(ordered)),
        memory_kind=sharding.memory_kind,
    )
