"""Write ``tests/data/forms_versions.tar.xz``: how the text of HLO differs from jax to jax.

    python scripts/make_dump_fixtures.py

For each jax of ``VERSIONS``: makes a fresh environment, installs this checkout and that jax in it,
compiles the programs of ``tests/programs/forms.py`` and the LM head with a dump of every pass, and
keeps of each module the first and the last snapshots, and every other one that shows a form of text
that no snapshot kept before it shows. ``--jax VERSION`` and ``--output FILE`` make an archive of
some versions alone, to look at; where a Python that is needed is not found, nothing is written.

Two runs of one checkout give the same bytes, wherever it stands, as long as the index gives the
same releases of jaxlib and libtpu: they stand in ``versions.json`` of each folder. Takes some
minutes, and the network for the first time. ``tests/test_form_fixtures.py`` holds the archive to
the forms that it is there for.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from find_python import find_python

from hlo_audit.compiler import Compiled, compile_programs
from hlo_audit.dump import ModuleDump, read_dump
from hlo_audit.manifest import read_manifest
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import MODES, Lowering, Mode, Platform, find_subjects

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / "tests" / "data" / "forms_versions.tar.xz"

VERSIONS = {
    "0.7.2": "3.11",
    "0.8.0": "3.11",
    "0.8.3": "3.11",
    "0.9.2": "3.11",
    "0.10.2": "3.11",
    "0.11.2": "3.13",
    "0.12.0.1": "3.13",
}
"""Each jax and the Python to compile with. Two of 0.8: between them source positions moved."""

TOPOLOGIES: Mapping[Platform, str] = {"tpu": "v5p:2x2x1", "cpu": "4"}
MODULE = "jit_step"


# -- inside of an environment


def programs() -> list[Lowering]:
    """What is compiled, in the order in which it is."""
    file = ROOT / "tests" / "programs" / "forms.py"

    def form(name: str, platform: Platform, mode: Mode = "auto") -> Lowering:
        return Lowering(
            program=name,
            build=f"{file}:{name}",
            mode=mode,
            layout=None,
            settings={},
            mesh={"x": 2, "y": 2},
            platform=platform,
            topology=TOPOLOGIES[platform],
        )

    lm_head = find_subjects(["lm-head"], ALL_MODELS, modes=MODES, topology=TOPOLOGIES["tpu"])
    return [
        *(form(name, "tpu") for name in ("control_flow", "collectives", "arrays", "kernel")),
        *(form(name, "cpu") for name in ("control_flow", "collectives", "arrays")),
        *(subject for subject in lm_head if isinstance(subject, Lowering)),
    ]


def compile_into(folder: Path) -> None:
    """Compile the programs with the jax that is installed, a dump folder for each."""
    # One after the other in one process: XLA counts on in the names of some passes.
    for outcome in compile_programs(programs(), into=folder, jobs=1):
        if not isinstance(outcome, Compiled):
            sys.exit(f"{outcome}")


# -- outside


def make_dumps(jax_version: str, python: str, folder: Path) -> Path:
    """Compile the programs with ``jax_version`` in an environment of its own below ``folder``.

    Returns:
        the folder that holds a dump folder for each program.
    """
    environment, dumps = folder / "venv", folder / "dumps"
    print(f"jax {jax_version}", flush=True)
    subprocess.run([python, "-m", "venv", environment], check=True)
    interpreter = environment / "bin" / "python"
    install = [interpreter, "-m", "pip", "install", "--quiet", "--no-compile", "--editable", ROOT]
    subprocess.run([*install, f"jax=={jax_version}"], check=True)
    # The names of source files stand in the tables of a module and inside of a kernel: without the
    # part that is of this machine.
    places = "|".join(re.escape(f"{path}/") for path in (ROOT, environment.resolve()))
    subprocess.run(
        [interpreter, __file__, "--compile-into", dumps],
        check=True,
        env={**os.environ, "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX": f"^(?:{places})"},
    )
    return dumps


_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\((.*)$", re.MULTILINE)
_ATTRIBUTE = re.compile(r", ([a-z_]+=[\[{\"]*(?:mesh|devices|maximal|replicated|manual)?)")
_SIGNS = {
    "line": re.compile(r"^(?:HloModule|ENTRY|FileNames|StackFrames|%)|^\}.*", re.MULTILINE),
    "header": re.compile(r"(?m:^HloModule.*$)"),
    "type": re.compile(r"\b([a-z]+\d+[a-z\d]*|pred|token|opaque)\["),
    "layout": re.compile(r"\[[\d,<=]*\]\{[\d,]*(:[^{}]*)\}"),
    "target": re.compile(r'custom_call_target="([^"]*)"'),
    "element": re.compile(r"%[\w.-]+(#)\d"),
    "groups": re.compile(r"replica_groups=(\{\{|\{\}|\[[^,]*|[^\[]*)"),
    "comment": re.compile(r"/\*[a-z]+"),
    "backend": re.compile(r'backend_config=(\{"|"|\{)'),
}


def forms(text: str) -> set[tuple[str, ...]]:
    """The kinds of things that stand in the text of a module, by signs of our own: the parser
    takes no part in choosing what it is tested on.
    """
    found: set[tuple[str, ...]] = set()
    for kind, sign in _SIGNS.items():
        for one in set(sign.findall(text)):
            if kind == "header":
                found.update((kind, key) for key in re.findall(r", ([a-z_]+)=", one))
            else:
                found.add((kind, re.sub(r"\d+", "0", one) if kind == "layout" else one))
    for opcode, rest in set(_INSTRUCTION.findall(text)):
        found.add(("opcode", opcode))
        found.update(("attribute", opcode, name) for name in _ATTRIBUTE.findall(rest))
    return found


def distinct(module: ModuleDump) -> Iterator[Path]:
    """The snapshots to keep of a module, in the order of the passes."""
    texts = {snapshot.path: snapshot.path.read_text("utf-8") for snapshot in module.snapshots}
    ends = {snapshot.path for snapshot in module.snapshots if snapshot.stage != "pass"}
    seen = set().union(*(forms(texts[path]) for path in ends))
    for path, text in texts.items():
        new = forms(text) - seen
        if path in ends or new:
            seen |= new
            yield path


def entries(jax_version: str, dumps: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a version in the archive: their names and contents.

    Exits where a text names a place on this machine.
    """
    versions: dict[str, str | None] = {}
    for folder in sorted(path for path in dumps.iterdir() if path.is_dir()):
        manifest = read_manifest(folder)
        assert manifest is not None  # compile_programs wrote it
        versions.update((name, v) for name, v in manifest.versions.items() if v is not None)
        name = f"jax-{jax_version}/{manifest.platform}-{manifest.program}-{manifest.mode}"
        for module in read_dump(folder).modules:
            if module.name != MODULE:
                continue
            for path in distinct(module):
                data = path.read_bytes()
                if place := re.search(rb'"(/[^"]*\.py)"', data):
                    sys.exit(f"{path} names {place[1].decode()}")
                yield f"{name}/{path.name}", data
    del versions["python"]  # its patch release changes nothing of the text
    yield f"jax-{jax_version}/versions.json", json.dumps(versions, indent=1).encode() + b"\n"


def pack(root: str, files: Iterable[tuple[str, bytes]]) -> bytes:
    """An archive that depends on the names and the contents of its files alone."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in sorted(files):
            info = tarfile.TarInfo(f"{root}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the archive of HLO text of each jax.")
    parser.add_argument("--jax", action="append", choices=VERSIONS, help="of this alone; repeats")
    parser.add_argument("--output", type=Path, default=ARCHIVE, metavar="FILE")
    parser.add_argument("--compile-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile_into is not None:
        compile_into(arguments.compile_into)
        return
    chosen = {v: python for v, python in VERSIONS.items() if v in (arguments.jax or VERSIONS)}
    pythons = {python: find_python(python) for python in chosen.values()}
    for python, path in pythons.items():
        if path is None:
            sys.exit(f"there is no Python {python}, on PATH or of pyenv")
    files: list[tuple[str, bytes]] = []
    for version, python in chosen.items():
        with tempfile.TemporaryDirectory(prefix="hlo-audit-fixtures-") as folder:
            dumps = make_dumps(version, str(pythons[python]), Path(folder))
            files += entries(version, dumps)
    data = pack(arguments.output.name.removesuffix(".tar.xz"), files)
    arguments.output.write_bytes(data)
    size_bytes = sum(len(content) for _, content in files)
    print(f"{arguments.output}: {len(files)} files, {size_bytes:,} bytes, packed {len(data):,}")


if __name__ == "__main__":
    main()
