"""Find the arrays that a model describes in a tree, by the ends of their paths."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.lazy_import import lazy_import
from hlo_audit.stored import StoredArray, StoredLayouts

if TYPE_CHECKING:
    import jax
else:
    jax = lazy_import("jax")


@dataclass(frozen=True)
class Leaf:
    """A described array in a tree; ``dtype`` is the one it should have."""

    index: int
    path: str
    value: Any
    array: StoredArray
    dtype: str


@dataclass(frozen=True)
class Found:
    leaves: list[Any]
    treedef: Any
    described: list[Leaf]


def find(tree: Any, description: StoredLayouts) -> Found:
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = ["/".join(_step(key) for key in keys) for keys, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    owners: dict[int, StoredArray] = {}
    described = []
    for array in description.arrays:
        roles = _roles(paths, array, description)
        for role, index in roles.items():
            if index in owners:
                raise UsageError(
                    f"{paths[index]} is both {owners[index].path} and {array.path} of "
                    f"{description.model}",
                    hint="describe the two by longer paths",
                )
            owners[index] = array
            dtype = array.moments[role] if role else array.dtype
            described.append(Leaf(index, paths[index], leaves[index], array, dtype))
    return Found(leaves, treedef, described)


def _step(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))


def _roles(paths: list[str], array: StoredArray, description: StoredLayouts) -> dict[str, int]:
    """Return the leaf that is the parameter itself, under ``""``, and those that are its moments.

    Raises:
        UsageError: where there is none at all, and where two leaves have one role.
    """
    roles: dict[str, int] = {}
    for index, path in enumerate(paths):
        role = _role(path, array)
        if role is None or not _stands_beside(path, array, paths):
            continue
        if role in roles:
            what = f"the {role} of {array.path}" if role else array.path
            raise UsageError(
                f"{what} of {description.model} may be {paths[roles[role]]} or {path}",
                hint="describe it by a longer path, name every moment that an optimiser keeps of "
                "it, or pass the part of the tree that holds it",
            )
        roles[role] = index
    if not roles:
        some = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
        raise UsageError(
            f"the tree holds no {array.path} of {description.model}",
            hint=f"it holds {some}" if paths else "it is empty",
        )
    return roles


def _role(path: str, array: StoredArray) -> str | None:
    """Return ``""`` for the parameter, a moment's name for a moment, ``None`` for another leaf."""
    steps, own = path.split("/"), array.path.split("/")
    if steps[-len(own) :] == own:
        return next((step for step in steps[: -len(own)] if step in array.moments), "")
    if steps[-1] in array.moments and steps[-len(own) : -1] == own[:-1]:
        return steps[-1]
    return None


def _stands_beside(path: str, array: StoredArray, paths: list[str]) -> bool:
    """Whether a leaf named as a moment has its parameter beside it; true for any other name."""
    *parent, last = path.split("/")
    *_, name = array.path.split("/")
    return last == name or "/".join([*parent, name]) in paths


def array_at(leaf: str, description: StoredLayouts) -> StoredArray:
    arrays = [array for array in description.arrays if _role(leaf, array) is not None]
    if not arrays:
        raise unknown_name(
            f"stored array of {description.model}", leaf, [a.path for a in description.arrays]
        )
    if len(arrays) > 1:
        raise UsageError(
            f"{leaf} of {description.model} may be {arrays[0].path} or {arrays[1].path}",
            hint="give more of its path",
        )
    return arrays[0]
