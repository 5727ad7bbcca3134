"""What a dump folder says about the program it came from: the file ``hlo-audit.json`` in it.

A dump that hlo-audit compiled has one. A dump of another tool has none, and can still be audited:
then nobody knows its mode, its layout or its topology.
"""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_audit.errors import DumpError
from hlo_audit.own_json import Value, parse

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
        top = Value(data)
        top.refuse_other_version(SCHEMA_VERSION)
        return cls(
            program=top["program"].text(),
            mode=top["mode"].one_of(("auto", "explicit")),
            layout=top.get("layout").text_or_none(),
            platform=top["platform"].one_of(("tpu", "cpu")),
            topology=top["topology"].text(),
            mesh=top["mesh"].integers(),
            settings=top["settings"].settings(),
            xla_flags=top["xla_flags"].texts(),
            versions=top["versions"].texts_or_none(),
            module=top["module"].text(),
            devices=top["devices"].integer(),
            lower_seconds=top["lower_seconds"].seconds(),
            compile_seconds=top["compile_seconds"].seconds(),
            digest=top["digest"].text(),
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
        return Manifest.from_json(parse(path.read_text(encoding="utf-8")).value)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DumpError(
            f"{path} is no manifest: {str(error)[:200]}",
            hint="take the file away to audit the dump without it, or compile the program again",
        ) from None


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write ``manifest`` into the dump ``folder``."""
    text = json.dumps(manifest.to_json(), indent=2) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
