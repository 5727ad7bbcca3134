"""Turn the described arrays of a tree from one layout into another."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlo_audit.checkpoint.checks import check_leaf, check_shapes_tell
from hlo_audit.checkpoint.leaves import Found, Leaf, find
from hlo_audit.checkpoint.metadata import check_metadata
from hlo_audit.checkpoint.sharding import is_named, sharding_after
from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.stored import Storage, StoredLayouts, rearrange

if TYPE_CHECKING:
    import jax
    import numpy as np
else:
    jax = lazy_import("jax")
    np = lazy_import("numpy")


def to_canonical(
    tree: Any,
    layout: str,
    description: StoredLayouts,
    *,
    shardings: Any = None,
    donate: bool = False,
) -> Any:
    """Return the tree of a run in ``layout`` as a checkpoint holds it.

    Of a tree of ``jax.ShapeDtypeStruct`` this is what to restore the checkpoint into: with the
    run's own shardings each device reads the part of the checkpoint that it will keep. Arguments
    and errors as :func:`convert`.
    """
    return convert(
        tree, layout, description.canonical, description, shardings=shardings, donate=donate
    )


def from_canonical(
    tree: Any,
    layout: str,
    description: StoredLayouts,
    *,
    stored_metadata: Mapping[str, Any] | None = None,
    shardings: Any = None,
    donate: bool = False,
) -> Any:
    """Return the tree of a checkpoint as a run in ``layout`` stores it.

    Arguments and errors as :func:`convert`.

    Raises:
        UsageError: also where there is no ``stored_metadata`` and an array has the same shape in
            layouts that store it differently (a square kernel), so that nothing else can tell what
            the checkpoint holds.
    """
    if stored_metadata is None:
        check_shapes_tell(tree, description)
    return convert(
        tree,
        description.canonical,
        layout,
        description,
        stored_metadata=stored_metadata,
        shardings=shardings,
        donate=donate,
    )


def convert(
    tree: Any,
    from_layout: str,
    to_layout: str,
    description: StoredLayouts,
    *,
    stored_metadata: Mapping[str, Any] | None = None,
    shardings: Any = None,
    donate: bool = False,
) -> Any:
    """Return the tree as ``to_layout`` stores it.

    A jax array is turned on its devices. It keeps its sharding by logical axis: what was sharded
    over ``embed`` still is, wherever ``embed`` is stored, so that no value leaves its device. Only
    where axes are merged otherwise does it get the sharding that the description has for
    ``to_layout``. Within a ``jax.jit`` of yours the shardings are that jit's, and on an explicit
    mesh a merge of sharded axes needs ``shardings``. A numpy array comes back contiguous.

    Args:
        tree: parameters, moments, or both.
        from_layout: the layout that the tree is in.
        to_layout: the layout wanted.
        description: how the model stores its arrays.
        stored_metadata: what :func:`metadata` gave when the tree was saved, to be checked first.
        shardings: a tree like ``tree`` with the sharding that each described array shall have,
            ``None`` where it keeps its own. Other leaves' are not looked at.
        donate: delete each jax array that was turned, so that no two copies of all of them exist.

    Raises:
        UsageError: for an unknown layout; for an array that the tree lacks, has twice, or has in
            another shape or dtype than ``from_layout`` stores; for metadata of other arrays, of
            another layout, or of none; and for ``shardings`` that are no tree like ``tree``.
    """
    description.check_layout(from_layout)
    description.check_layout(to_layout)
    if stored_metadata is not None:
        check_metadata(stored_metadata, from_layout, description)
    found = find(tree, description)
    for leaf in found.described:
        check_leaf(leaf, from_layout, description)
    targets = _matching_shardings(shardings, found)
    leaves = list(found.leaves)
    for leaf in found.described:
        move = _Move(
            source=leaf.array.layouts[from_layout],
            target=leaf.array.layouts[to_layout],
            sizes=tuple(description.sizes.items()),
        )
        leaves[leaf.index] = _turn(leaf, move, targets[leaf.index], donate)
    return found.treedef.unflatten(leaves)


def _matching_shardings(shardings: Any, found: Found) -> list[Any]:
    if shardings is None:
        return [None] * len(found.leaves)
    try:
        matching: list[Any] = found.treedef.flatten_up_to(shardings)
    except ValueError as error:
        raise UsageError(
            f"the shardings are no tree like the arrays': {error}",
            hint="give a tree of the same structure, with a sharding or None in place of an array",
        ) from None
    return matching


@dataclass(frozen=True)
class _Move:
    """From one storage to another; ``sizes`` are those of the logical axes."""

    source: Storage
    target: Storage
    sizes: tuple[tuple[str, int], ...]

    def apply(self, array: Any) -> Any:
        return rearrange(array, self.source.axes, self.target.axes, dict(self.sizes))

    @property
    def is_identity(self) -> bool:
        return self.source.axes == self.target.axes


def _turn(leaf: Leaf, move: _Move, sharding: Any, donate: bool) -> Any:
    value = leaf.value
    if isinstance(value, jax.ShapeDtypeStruct):
        if sharding is None:
            sharding = sharding_after(value.sharding, move.source, move.target)
        shape = move.target.shape(dict(move.sizes))
        return jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding)
    if isinstance(value, jax.core.Tracer):
        return _compiled(move, sharding)(value)
    if isinstance(value, jax.Array):
        return _turn_on_devices(value, move, sharding, donate)
    if isinstance(value, np.ndarray):
        # Some writers take the buffer as it lies, whatever its strides say.
        turned = value if move.is_identity else np.ascontiguousarray(move.apply(value))
        return turned if sharding is None else jax.device_put(turned, sharding)
    raise UsageError(
        f"{leaf.path} is of type {type(value).__name__}, which cannot be turned",
        hint="a leaf is a numpy array, a jax array or a jax.ShapeDtypeStruct",
    )


def _turn_on_devices(array: jax.Array, move: _Move, sharding: Any, donate: bool) -> jax.Array:
    turned = array
    if not move.is_identity:
        own = sharding_after(array.sharding, move.source, move.target)
        # One program cannot take an array from one mesh to another.
        on_its_mesh = own is not None and is_named(sharding) and sharding.mesh == own.mesh
        turned = _compiled(move, sharding if on_its_mesh else own)(array)
        if donate:
            # Donating it to the program would do nothing: no buffer can be turned in place.
            array.delete()
    if sharding is None or sharding == turned.sharding:
        return turned
    placed: jax.Array = jax.device_put(turned, sharding, donate=donate or turned is not array)
    return placed


@functools.lru_cache(maxsize=256)
def _compiled(move: _Move, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """Return the move as one program, which a kernel and its moments share."""
    apply = move.apply
    if is_named(sharding):
        # On an explicit mesh a reshape that merges a sharded axis is a type error otherwise.
        apply = jax.sharding.auto_axes(apply, out_sharding=sharding)
    compiled: Callable[[jax.Array], jax.Array] = jax.jit(apply, out_shardings=sharding)
    return compiled
