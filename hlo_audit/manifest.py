"""What a dump folder says about the program it came from: the file ``hlo-audit.json`` in it.

A dump that hlo-audit compiled has one. A dump of another tool has none, and can still be audited:
then nobody knows its mode, its layout or its topology.
"""

from __future__ import annotations

import dataclasses
import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hlo_audit.errors import DumpError

MANIFEST_NAME = "hlo-audit.json"

SCHEMA_VERSION = 1
"""Keys are added within a version, never changed or removed."""

_MOST_BYTES = 1 << 20

Setting = int | float | bool | str


@dataclass(frozen=True)
class Manifest:
    """How a dump was made.

    Attributes:
        program: the name it is shown under, such as ``lm-head``.
        mode: the type of every mesh axis, ``auto`` or ``explicit``.
        layout: the layout of the model, or ``None`` for a program that has none.
        platform: ``tpu`` or ``cpu``.
        topology: such as ``v5p:2x2x1``; the number of devices for cpu.
        mesh: axis name -> number of devices along it.
        settings: what the program was built with.
        xla_flags: the compile options that were asked for, as they were written.
        versions: ``python``, ``jax``, ``jaxlib`` and ``libtpu``; ``None`` for one that had no part.
        module: the name of the HLO module.
        devices: how many devices it was compiled for.
        lower_seconds: wall time to build and trace the program.
        compile_seconds: wall time of the compiler, the dump included.
        digest: hexadecimal SHA-256 of all that the compiler was given: the lowered program without
            its source positions (but those inside a Pallas kernel's body), the flags, the topology
            and the versions.
    """

    program: str
    mode: str
    layout: str | None
    platform: str
    topology: str
    mesh: Mapping[str, int]
    settings: Mapping[str, Setting]
    xla_flags: Mapping[str, str]
    versions: Mapping[str, str | None]
    module: str
    devices: int
    lower_seconds: float
    compile_seconds: float
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in fields.items()}
        return {"schema_version": SCHEMA_VERSION, **plain}

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Return the manifest that ``data`` holds; keys that are not known are left alone.

        Raises:
            ValueError: says which key is missing or has a value of the wrong type.
        """
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ValueError(f"schema_version is {version!r}, not {SCHEMA_VERSION}")
        return cls(
            program=_field(data, "program", str),
            mode=_one_of(data, "mode", ("auto", "explicit")),
            layout=None if data.get("layout") is None else _field(data, "layout", str),
            platform=_one_of(data, "platform", ("tpu", "cpu")),
            topology=_field(data, "topology", str),
            mesh=_mapping(data, "mesh", int),
            settings=_mapping(data, "settings", bool, int, float, str),
            xla_flags=_mapping(data, "xla_flags", str),
            versions=_mapping(data, "versions", str, type(None)),
            module=_field(data, "module", str),
            devices=_field(data, "devices", int),
            lower_seconds=float(_field(data, "lower_seconds", int, float)),
            compile_seconds=float(_field(data, "compile_seconds", int, float)),
            digest=_field(data, "digest", str),
        )


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the dump ``folder``, or ``None`` where it has none.

    Raises:
        DumpError: names the file, where it is there and cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        # Nor a link: a dump names no file outside of it.
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError("it is no file of a reasonable size")
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        return Manifest.from_json(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise DumpError(
            f"{path} is no manifest: {str(error)[:200]}",
            hint="take the file away to audit the dump without it, or compile the program again",
        ) from None


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write ``manifest`` into the dump ``folder``."""
    text = json.dumps(manifest.to_json(), indent=2) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def _field(data: Mapping[str, Any], name: str, *kinds: type) -> Any:
    if name not in data:
        raise ValueError(f"it has no {name!r}")
    return _checked(name, data[name], kinds)


def _one_of(data: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = _field(data, name, str)
    if value not in known:
        raise ValueError(f"{name} is {value[:40]!r}, not one of {', '.join(known)}")
    return str(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _mapping(data: Mapping[str, Any], name: str, *kinds: type) -> dict[str, Any]:
    items = _field(data, name, dict).items()
    return {key: _checked(f"{name}.{key}", value, kinds) for key, value in items}


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    # By exact type: a bool is an int to isinstance.
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} is {repr(value)[:80]}, not of type {expected}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value
