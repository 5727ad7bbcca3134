"""The mappings of an mHC block as Hugging Face's DeepSeek-V4 has them: flat, fused, outputs first.

``fn`` is one weight ``[maps, rate*embed]`` for the pre, post and residual mappings together, in
that order, ``base`` ``[maps]`` their biases and ``scale`` ``[3]`` their scales. The layout of the
run does not show in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.models.mhc import ALPHAS, MHCConfig, beta_name, checkpoint_layouts, scale_name
from hlo_audit.stored import show_axes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
else:
    np = lazy_import("numpy")

PARTS = ("pre", "post", "res")


def concat_alphas(alphas: Sequence[Any]) -> Any:
    """Return the fused weight, ``[maps, rate*embed]`` (numpy), of three alphas.

    Args:
        alphas: of the pre, the post and the residual mapping, in this order: arrays or nested
            lists, each ``[rate*embed, n]`` or ``[rate, embed, n]``.

    Raises:
        UsageError: for another number of alphas than three, for one that is neither a matrix nor a
            matrix with its first axis split, and for alphas that contract different widths.
    """
    if len(alphas) != len(PARTS):
        raise UsageError(
            f"an mHC block has three alphas, pre, post and res, and {len(alphas)} were given",
            hint="give exactly these three, in this order",
        )
    flat = []
    for part, alpha in zip(PARTS, alphas, strict=True):
        array = _as_array(f"the alpha {part}", alpha)
        if array.ndim not in (2, 3) or array.size == 0:
            raise UsageError(
                f"the alpha {part} has the shape {list(array.shape)}",
                hint="an alpha is [rate*embed, maps] or [rate, embed, maps]",
            )
        flat.append(array.reshape(-1, array.shape[-1]))
    widths = {part: array.shape[0] for part, array in zip(PARTS, flat, strict=True)}
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{part} {width:,}" for part, width in widths.items())
        raise UsageError(
            f"the alphas contract different widths: {told}",
            hint="all three contract rate * embed",
        )
    return np.ascontiguousarray(np.concatenate(flat, axis=1).T)


def export_mappings(params: Mapping[str, Any], config: MHCConfig) -> dict[str, Any]:
    """Return ``fn``, ``base`` and ``scale`` (numpy) of parameters that are in either layout.

    Raises:
        UsageError: for a parameter that is missing or has a shape that no layout gives it.
    """
    description = checkpoint_layouts(config)
    for array in description.arrays:
        if array.path not in ALPHAS:
            continue
        found = _as_array(array.path, _param(params, array.path)).shape
        known = {name: description.shape(array, name) for name in array.layouts}
        if found not in known.values():
            shapes = " or ".join(
                f"{list(shape)}, {show_axes(array.layouts[name].axes)}"
                for name, shape in known.items()
            )
            raise UsageError(
                f"{array.path} has the shape {list(found)}, and the block stores {shapes}",
                hint="compare the block's settings with those that the parameters were made with",
            )
    vectors: dict[str, list[Any]] = {"base": [], "scale": []}
    for alpha, maps in config.maps.items():
        for kind, name, shape in (
            ("base", beta_name(alpha), (maps,)),
            ("scale", scale_name(alpha), ()),
        ):
            value = _as_array(name, _param(params, name))
            _check_shape(name, value, shape)
            vectors[kind].append(value.reshape(-1))
    return {
        "fn": concat_alphas([params[alpha] for alpha in ALPHAS]),
        **{kind: np.concatenate(values) for kind, values in vectors.items()},
    }


def import_mappings(arrays: Mapping[str, Any], config: MHCConfig, layout: str) -> dict[str, Any]:
    """Return the parameters of the mappings (numpy) as ``layout`` stores them.

    The inverse of :func:`export_mappings`, exact.

    Args:
        arrays: ``fn``, ``base`` and ``scale``, arrays or nested lists.
        config: the settings of the block.
        layout: the layout wanted.

    Raises:
        UsageError: for an unknown layout, and for an array that is missing or of another shape than
            the settings ask for.
    """
    description = checkpoint_layouts(config)
    description.check_layout(layout)
    maps = config.maps
    shapes = {
        "fn": (sum(maps.values()), config.rate * config.embed),
        "base": (sum(maps.values()),),
        "scale": (len(maps),),
    }
    read = {name: _as_array(name, _param(arrays, name)) for name in shapes}
    for name, shape in shapes.items():
        _check_shape(name, read[name], shape)
    stored = {array.path: array for array in description.arrays}
    params: dict[str, Any] = {}
    first = 0
    for index, (alpha, size) in enumerate(maps.items()):
        part = slice(first, first + size)
        first += size
        shape = description.shape(stored[alpha], layout)
        params[alpha] = np.ascontiguousarray(read["fn"][part].T).reshape(shape)
        params[beta_name(alpha)] = read["base"][part]
        params[scale_name(alpha)] = read["scale"][index]
    return params


def _param(params: Mapping[str, Any], name: str) -> Any:
    if name not in params:
        raise UsageError(
            f"there is no {name} among the arrays",
            hint="there are " + (", ".join(params) or "none at all"),
        )
    return params[name]


def _as_array(name: str, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:
        array = None
    if array is None or array.dtype == object:
        raise UsageError(
            f"{name} is no array of numbers",
            hint="give an array, or nested lists of equal lengths",
        )
    return array


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise UsageError(
            f"{name} has the shape {list(array.shape)}, and {list(shape)} is wanted",
            hint="compare the block's settings with those that the arrays were made with",
        )
