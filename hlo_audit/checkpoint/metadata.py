"""What is stored beside a checkpoint to tell which layout its arrays are in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hlo_audit.errors import UsageError
from hlo_audit.stored import StoredLayouts, show_axes

FORMAT = "hlo-audit stored layout"
FORMAT_VERSION = 1


def metadata(layout: str, description: StoredLayouts) -> dict[str, Any]:
    """Return what to store beside a checkpoint whose arrays are in ``layout``.

    A checkpoint that went through :func:`to_canonical` is in ``description.canonical``. The result
    is plain JSON. It is all that tells the orientation of a square array.

    Raises:
        UsageError: for an unknown layout.
    """
    description.check_layout(layout)
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": description.model,
        "layout": layout,
        "arrays": {
            array.path: {
                "axes": [
                    axis if isinstance(axis, str) else list(axis)
                    for axis in array.layouts[layout].axes
                ],
                "shape": list(description.shape(array, layout)),
                "dtype": array.dtype,
            }
            for array in description.arrays
        },
    }


def check_metadata(
    stored_metadata: Mapping[str, Any] | None, layout: str, description: StoredLayouts
) -> None:
    """Refuse a checkpoint whose arrays are not stored as ``layout`` stores them.

    Layouts that store the arrays alike and differ in their shardings or in their arithmetic are as
    good as one another.

    Args:
        stored_metadata: what :func:`metadata` gave when the checkpoint was written; other keys
            beside its own are not looked at.
        layout: the layout that the arrays are wanted in; ``description.canonical`` where they go
            through :func:`from_canonical`.
        description: how the model stores its arrays.

    Raises:
        UsageError: for an unknown layout; for metadata that is missing, damaged, of a later version
            or of another model; and for arrays of other axes, sizes or dtypes.
    """
    expected = metadata(layout, description)
    if not stored_metadata or stored_metadata.get("format") != FORMAT:
        raise UsageError(
            "the checkpoint does not say which layout it is in",
            hint="store metadata(layout, description) beside it; for one that was written without, "
            "pass that of the layout you know it to be in",
        )
    if stored_metadata.get("version") != FORMAT_VERSION:
        raise UsageError(
            f"the checkpoint's layout is written in version {stored_metadata.get('version')!r} of "
            f"its format, and this is version {FORMAT_VERSION}",
            hint="restore it with the hlo-audit that wrote it, or a later one",
        )
    if stored_metadata.get("model") != description.model:
        raise UsageError(
            f"the checkpoint is of model {stored_metadata.get('model')!r}, "
            f"not of {description.model!r}",
            hint=f"restore a checkpoint of {description.model}",
        )
    arrays = stored_metadata.get("arrays")
    for path, wanted in expected["arrays"].items():
        written = arrays.get(path) if isinstance(arrays, Mapping) else None
        if not isinstance(written, Mapping):
            raise UsageError(
                f"the checkpoint does not say how it stores {path} of {description.model}",
                hint="it was written with another description of the model's arrays",
            )
        _compare_metadata(path, written, wanted, stored_metadata.get("layout"), layout, description)


def _compare_metadata(
    path: str,
    written: Mapping[str, Any],
    wanted: Mapping[str, Any],
    written_layout: object,
    layout: str,
    description: StoredLayouts,
) -> None:
    if written.get("axes") != wanted["axes"]:
        raise UsageError(
            f"the checkpoint stores {path} of {description.model} with the axes "
            f"{_show_json(written.get('axes'))} (layout {written_layout}), and layout {layout} "
            f"stores {_show_json(wanted['axes'])}",
            hint="a run does not change its layout by a flag: turn the arrays with "
            f"convert(tree, {written_layout!r}, {layout!r}, description)",
        )
    for key in ("shape", "dtype"):
        if written.get(key) != wanted[key]:
            raise UsageError(
                f"the checkpoint's {path} of {description.model} has the {key} "
                f"{_show_json(written.get(key))}, and {_show_json(wanted[key])} is wanted",
                hint="configure the model as the checkpoint's was",
            )


def _show_json(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return show_axes(tuple(tuple(v) if isinstance(v, list) else str(v) for v in value))
