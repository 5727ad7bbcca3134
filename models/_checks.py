"""What every reference model asks of the layout and the mesh that it is built for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.program import Layout

if TYPE_CHECKING:
    import jax


def check_layout(model: str, layouts: Sequence[Layout], layout: str) -> None:
    """Refuse a layout that the model does not have.

    Raises:
        UsageError: names those that it has.
    """
    names = [known.name for known in layouts]
    if layout not in names:
        raise unknown_name(f"layout of {model}", layout, names)


def check_divides(
    mesh: jax.sharding.Mesh, axis: str, sizes: Mapping[str, int], *, sharded: str
) -> None:
    """Refuse a mesh without ``axis``, and sizes that it does not divide.

    Args:
        sizes: by the names of their settings.
        sharded: what is sharded along the axis, in words: ``the LM head is``.

    Raises:
        UsageError: for either.
    """
    if axis not in mesh.shape:
        raise UsageError(
            f"the mesh has no axis {axis!r}, only {', '.join(map(repr, mesh.shape))}",
            hint=f"give the mesh an axis {axis!r}, along which {sharded} sharded",
        )
    axis_size = mesh.shape[axis]
    for name, size in sizes.items():
        if size % axis_size:
            raise UsageError(
                f"{name}={size} is no multiple of {axis_size}, the size of mesh axis {axis!r}",
                hint=f"set {name} to a multiple of {axis_size}",
            )
