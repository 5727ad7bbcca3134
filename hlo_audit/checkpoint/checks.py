"""Refuse arrays that are not what a layout stores."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlo_audit.checkpoint.leaves import Leaf, find
from hlo_audit.checkpoint.sharding import check_spec, is_named
from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.stored import StoredLayouts, show_axes

if TYPE_CHECKING:
    import jax
else:
    jax = lazy_import("jax")


def check(tree: Any, layout: str, description: StoredLayouts) -> None:
    """Refuse a tree that is not what a run in ``layout`` stores.

    Compares shape and dtype of each described array, and its sharding where that is a
    ``NamedSharding`` (see :func:`check_sharding`; a mesh axis of one device shards nothing and does
    not count). Leaves need only have a ``shape`` and a ``dtype``, so the metadata of a checkpoint
    can be checked before any array of it is read.

    Raises:
        UsageError: for an unknown layout, and for an array that the tree lacks, has twice, or has
            in another shape, dtype or sharding.
    """
    description.check_layout(layout)
    for leaf in find(tree, description).described:
        check_leaf(leaf, layout, description)
        sharding = getattr(leaf.value, "sharding", None)
        if is_named(sharding):
            check_spec(sharding, leaf.path, leaf.array, layout, description, None)


def check_leaf(leaf: Leaf, layout: str, description: StoredLayouts) -> None:
    name = f"{leaf.path} of {description.model}"
    if not hasattr(leaf.value, "shape") or not hasattr(leaf.value, "dtype"):
        raise UsageError(
            f"{name} is no array but of type {type(leaf.value).__name__}",
            hint="a leaf is a numpy array, a jax array or a jax.ShapeDtypeStruct",
        )
    shape, wanted = tuple(leaf.value.shape), description.shape(leaf.array, layout)
    if shape != wanted:
        here = (
            f"layout {layout} stores {list(wanted)}, {show_axes(leaf.array.layouts[layout].axes)}"
        )
        others = [
            other for other in leaf.array.layouts if description.shape(leaf.array, other) == shape
        ]
        if not others:
            raise UsageError(
                f"{name} has the shape {list(shape)}, which no layout gives it; {here}",
                hint="compare the model's sizes with those that the array was made with",
            )
        raise UsageError(
            f"{name} has the shape {list(shape)}, "
            f"{show_axes(leaf.array.layouts[others[0]].axes)}, of layout {' or '.join(others)}; "
            f"{here}",
            hint=f"a run does not change its layout by a flag: {_way(others, layout, description)}",
        )
    if str(leaf.value.dtype) != leaf.dtype:
        raise UsageError(
            f"{name} is {leaf.value.dtype}, and the model stores it in {leaf.dtype}",
            hint=f"restore or cast it as {leaf.dtype}: turning it never changes its dtype",
        )


def _way(sources: list[str], layout: str, description: StoredLayouts) -> str:
    """Say what turns a tree that is in one of ``sources`` into ``layout``."""
    if description.canonical in sources:
        return f"restore it through from_canonical(tree, {layout!r}, description)"
    if layout == description.canonical:
        return f"bring it there with to_canonical(tree, {sources[0]!r}, description)"
    return f"turn it with convert(tree, {sources[0]!r}, {layout!r}, description)"


def check_shapes_tell(tree: Any, description: StoredLayouts) -> None:
    for leaf in find(tree, description).described:
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            continue
        canonical = leaf.array.layouts[description.canonical]
        shape = canonical.shape(description.sizes)
        for other, storage in leaf.array.layouts.items():
            if storage.axes != canonical.axes and storage.shape(description.sizes) == shape:
                raise UsageError(
                    f"{leaf.path} of {description.model} has the shape {list(shape)} both as "
                    f"{show_axes(canonical.axes)} and, in layout {other}, as "
                    f"{show_axes(storage.axes)}",
                    hint="pass stored_metadata, which the checkpoint was written with; for one "
                    "without, metadata(layout, description) of the layout you know it to be in",
                )
