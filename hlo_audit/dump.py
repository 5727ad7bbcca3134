"""Dump folders: which module, pass and stage each file is.

XLA names a file ``[TIMESTAMP.]module_NNNN[.NAME][.cl_N].SUFFIX``. The suffix is a pass,
``NNNN.PIPELINE.after_PASS.before_PASS`` or ``NNNN.PASS.STEP``, or a stage such as
``before_optimizations``, ``cpu_after_optimizations`` or, on TPU, ``after_codegen``. Other files of
a dump (buffer assignments, options, MLIR) look much the same and are told apart by the whole
suffix, never by a part of it. Nothing is read before it is asked for, and nothing read is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, NoReturn, cast

from hlo_audit.errors import DumpError
from hlo_audit.hlo import Memo, Module, parse_module
from hlo_audit.hlo.collector import collect
from hlo_audit.manifest import Manifest, read_manifest
from hlo_audit.own_json import kind_of_text
from hlo_audit.serialised import text_of_proto
from hlo_audit.whole_file import read_up_to

if TYPE_CHECKING:
    import pandas

Platform = Literal["tpu", "cpu", "gpu"]

Stage = Literal["before_optimizations", "pass", "after_optimizations", "after_codegen"]

AuditStage = Literal["before_optimizations", "before_layout_assignment", "final"]
"""The snapshots that rules read."""

FORMATS = (".txt", ".hlo", ".hlo.pb", ".txt.gz", ".hlo.gz", ".hlo.pb.gz")
"""The endings of the files that hold a module, as text or as a serialised proto."""

MAX_MODULE_BYTES = 4 << 30
"""The most that one file may hold: far more than any module."""

MAX_UNPACKED_TIMES = 64
"""How many times its size a ``.gz`` file may hold, beyond :data:`UNPACKED_BYTES_ALLOWED`. Real HLO
text shrinks to a seventh, and to a fourteenth at the most (650 snapshots of all backends at gzip's
highest level), a proto to a fifth; a bomb to a thousandth."""

UNPACKED_BYTES_ALLOWED = 64 << 20
"""What any ``.gz`` file may hold, however small it is."""


_FILE = re.compile(r"(?:(?P<timestamp>\d+)\.)?module_(?P<number>\d{4,})(?P<rest>\..*)")
_PASS = re.compile(
    r"(?P<name>.*)\.(?P<number>\d{4,})\.(?P<pipeline>[^.]+)"
    r"\.(?:after_(?P<after>.+)\.before_(?P<before>[^.]+)|(?P<step>[^.]+))"
)
_STAGE = re.compile(
    r"(?P<name>.*)\.(?:(?P<before>before_optimizations)"
    r"|(?:(?P<platform>cpu|(?:sm_|gfx)[\w.]+_gpu|gpu)_)?(?P<after>after_optimizations|after_codegen))"
)
_CHANGE_LIST = re.compile(r"\.cl_\d+$")


@dataclass(frozen=True)
class Snapshot:
    """One file of a dump: a module as it stood after one pass.

    Attributes:
        path: the file.
        stage: what it is of.
        number: the number of the pass in the dump; ``None`` for the stages at either end.
        pipeline: the pipeline it stands in, such as ``simplification-1``; ``""`` for a stage.
        after: the pass that has just run; ``""`` where the name does not say.
        before: the pass that runs next; ``""`` where the name does not say.
        step: what the name says of a step within a pass, such as ``after_tiling_propagation``.
    """

    path: Path
    stage: Stage
    number: int | None = None
    pipeline: str = ""
    after: str = ""
    before: str = ""
    step: str = ""

    @property
    def label(self) -> str:
        """Names the pass to a reader: ``simplification-1: algsimp``."""
        if self.stage != "pass":
            return self.stage
        return f"{self.pipeline}: {self.after or self.step}"

    def read(self, memo: Memo | None = None) -> Module:
        """Read and parse the file.

        Args:
            memo: of the snapshot before, as for :func:`hlo_audit.hlo.parse_module`.

        Raises:
            DumpError: where it cannot be read.
            ParseError: where it holds no whole module.
        """
        return read_module(self.path, memo)


class FileName(NamedTuple):
    """What the name of a dump's file says.

    Attributes:
        prefix: what the names of all files of the module start with.
        module: the module's name, such as ``jit_step``; ``""`` where it is not given.
        platform: ``None`` where this file's name does not say.
        snapshot: with the bare name as its path.
    """

    prefix: str
    module: str
    platform: Platform | None
    snapshot: Snapshot


@dataclass(frozen=True)
class ModuleDump:
    """The snapshots of one module, in the order in which the compiler wrote them.

    Attributes:
        folder: where its files are.
        prefix: what their names start with; tells modules and processes in a folder apart.
        name: the module's name, such as ``jit_step``; ``""`` where the files do not give it.
        platform: ``tpu``, ``cpu``, ``gpu``, or ``None`` where the files do not say.
        passes: every pass snapshot.
    """

    folder: Path
    prefix: str
    name: str
    platform: Platform | None
    before_optimizations: Snapshot | None
    passes: tuple[Snapshot, ...]
    after_optimizations: Snapshot | None
    after_codegen: Snapshot | None

    @property
    def final(self) -> Snapshot | None:
        """The module that runs. On TPU the one after code generation: the same, with its costs."""
        return self.after_codegen or self.after_optimizations

    @cached_property
    def before_layout_assignment(self) -> Snapshot | None:
        """The last snapshot in which no layout is assigned yet; ``None`` if passes are missing."""
        for position, snapshot in enumerate(self.passes):
            if snapshot.before == "layout-assignment":
                return snapshot
            # On TPU the first steps inside the pass are snapshots of this pipeline.
            if snapshot.after == "layout-assignment" or snapshot.pipeline == "tpu-tiling-rewriter":
                return self.passes[position - 1] if position else self.before_optimizations
        return None

    @property
    def audited(self) -> dict[AuditStage, Snapshot]:
        """The snapshots that rules read, as far as they are here."""
        stages: dict[AuditStage, Snapshot | None] = {
            "before_optimizations": self.before_optimizations,
            "before_layout_assignment": self.before_layout_assignment,
            "final": self.final,
        }
        return {stage: snapshot for stage, snapshot in stages.items() if snapshot is not None}

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Every snapshot, first to last."""
        ends = (
            self.before_optimizations,
            *self.passes,
            self.after_optimizations,
            self.after_codegen,
        )
        return tuple(snapshot for snapshot in ends if snapshot is not None)

    def read_all(self) -> Iterator[tuple[Snapshot, Module]]:
        """Read every snapshot, first to last.

        A pass leaves most computations as they are: those that stand in two snapshots on end, to
        the letter, are parsed once and shared by both modules.

        Raises:
            DumpError, ParseError: as :meth:`Snapshot.read`.
        """
        memo, most = Memo(), 0
        for snapshot in self.snapshots:
            yield snapshot, snapshot.read(memo)
            most = max(most, memo.size)
            if memo.dropped > most:  # or the largest snapshot would not bound the memory
                collect()
                memo.dropped = 0


@dataclass(frozen=True)
class Dump:
    """A dump folder.

    Attributes:
        modules: by the number that XLA gave them.
        manifest: what was compiled and how, where this tool made the dump.
    """

    folder: Path
    modules: tuple[ModuleDump, ...]
    manifest: Manifest | None

    def to_frame(self) -> pandas.DataFrame:
        """A row for each snapshot: its module, stage and pass, and its file.

        Raises:
            ImportError: where pandas is not installed.
        """
        import pandas

        rows = [
            {
                "module": module.name,
                "platform": module.platform,
                "stage": snapshot.stage,
                "number": snapshot.number,
                "pass": snapshot.label if snapshot.stage == "pass" else None,
                "file": snapshot.path.name,
            }
            for module in self.modules
            for snapshot in module.snapshots
        ]
        columns = ["module", "platform", "stage", "number", "pass", "file"]
        return pandas.DataFrame(rows, columns=columns).astype({"number": "Int64"})

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=40))


def read_dump(folder: Path) -> Dump:
    """Find the modules of a dump folder and of the folders in it; links are not followed.

    Raises:
        DumpError: for a folder that is missing, cannot be read or holds no module.
    """
    found: dict[tuple[Path, str], list[FileName]] = {}
    for path in _files(folder):
        if name := parse_file_name(path.name):
            here = name._replace(snapshot=replace(name.snapshot, path=path))
            found.setdefault((path.parent, name.prefix), []).append(here)
    modules = tuple(_module_dump(key[0], names) for key, names in sorted(found.items(), key=_order))
    if not modules:
        raise DumpError(
            f"no HLO dump is in {folder}",
            hint="dump one with compiler option xla_dump_to and xla_dump_hlo_pass_re=.*",
        )
    return Dump(folder, modules, read_manifest(folder))


def read_dump_of_file(path: Path) -> Dump:
    """A dump of the one module, and the one snapshot of it, that an HLO file holds.

    Its stage is that of its name; under a name that XLA does not give, ``after_optimizations`` for
    a scheduled module and else ``before_optimizations``.

    Raises:
        DumpError: where it cannot be read.
        ParseError: under such a name, where it holds no whole module.
    """
    name = parse_file_name(path.name)
    if name is None:
        module = read_module(path)
        final = stage_of_file(path, module) == "final"
        stage: Stage = "after_optimizations" if final else "before_optimizations"
        name = FileName(path.name, module.name, None, Snapshot(path, stage))
    snapshot = replace(name.snapshot, path=path)

    def where(stage: Stage) -> Snapshot | None:
        return snapshot if snapshot.stage == stage else None

    passes = (snapshot,) if snapshot.stage == "pass" else ()
    before = where("before_optimizations")
    ends = where("after_optimizations"), where("after_codegen")
    module_dump = ModuleDump(
        path.parent, name.prefix, name.module, name.platform, before, passes, *ends
    )
    return Dump(path.parent, (module_dump,), None)


def _files(folder: Path) -> Iterator[Path]:
    """The regular files of a folder and of the folders in it, links left out."""

    def fail(error: OSError) -> NoReturn:
        raise DumpError(f"cannot read {error.filename}: {error.strerror}")

    if not os.path.lexists(folder):
        raise DumpError(f"there is no file or folder {folder}")
    for parent, _, names in os.walk(folder, onerror=fail):
        for name in sorted(names):
            path = Path(parent, name)
            # What is not there any more is no part of the dump.
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def _order(item: tuple[tuple[Path, str], list[FileName]]) -> tuple[Path, int, str]:
    """By folder, then by the number that XLA gave the module."""
    folder, prefix = item[0]
    number = prefix.partition("module_")[2].partition(".")[0]
    return folder, int(number), prefix


def _module_dump(folder: Path, names: list[FileName]) -> ModuleDump:
    # A snapshot may be there both as text and as proto: text is read without jaxlib.
    names.sort(key=lambda name: FORMATS.index(_ending(name.snapshot.path.name)), reverse=True)
    stages = {name.snapshot.stage: name.snapshot for name in names}
    # By the whole name but its ending: a number may be there twice.
    passes = {
        (s.number or 0, s.pipeline, s.after, s.before, s.step): s
        for s in (name.snapshot for name in names)
        if s.stage == "pass"
    }
    return ModuleDump(
        folder,
        names[0].prefix,
        names[0].module,
        next((name.platform for name in names if name.platform), None),
        stages.get("before_optimizations"),
        tuple(passes[key] for key in sorted(passes)),
        stages.get("after_optimizations"),
        stages.get("after_codegen"),
    )


def parse_file_name(name: str) -> FileName | None:
    """Take the name of a dump's file apart; ``None`` for files that hold no module."""
    file = _FILE.fullmatch(name)
    ending = _ending(name)
    if file is None or not ending:
        return None
    rest = file["rest"].removesuffix(ending)
    stage: Stage = "pass"
    platform: Platform | None = None
    if found := _STAGE.fullmatch(rest):
        stage = cast("Stage", found["before"] or found["after"])
        if found["platform"]:
            platform = "cpu" if found["platform"] == "cpu" else "gpu"
        elif stage == "after_codegen":  # the TPU backend alone writes it
            platform = "tpu"
        snapshot = Snapshot(Path(name), stage)
    elif found := _PASS.fullmatch(rest):
        snapshot = Snapshot(
            Path(name),
            stage,
            int(found["number"]),
            found["pipeline"],
            found["after"] or "",
            found["before"] or "",
            found["step"] or "",
        )
    else:
        return None
    start = name[: len(name) - len(file["rest"])]
    return FileName(
        prefix=start + found["name"],
        module=_CHANGE_LIST.sub("", found["name"]).removeprefix("."),
        platform=platform,
        snapshot=snapshot,
    )


def stage_of_file(path: Path, module: Module) -> AuditStage | None:
    """Which of the snapshots that rules read a single file is; ``None`` for one in between.

    By the name that XLA gave it. Under any other name: a scheduled module is the final one, as
    ``compiled.as_text()`` gives it, and one without a schedule is from before optimisation.
    """
    name = parse_file_name(path.name)
    if name is None:
        return "final" if module.is_scheduled else "before_optimizations"
    if name.snapshot.stage == "pass":
        is_last = name.snapshot.before == "layout-assignment"
        return "before_layout_assignment" if is_last else None
    return "before_optimizations" if name.snapshot.stage == "before_optimizations" else "final"


def read_module(path: Path, memo: Memo | None = None) -> Module:
    """Read one file of any of the :data:`FORMATS`; ``-`` is standard input, as text.

    ``memo`` is as for :func:`hlo_audit.hlo.parse_module`.

    Raises:
        DumpError: where it cannot be read, is larger than :data:`MAX_MODULE_BYTES`, or is a gzip
            bomb (:data:`MAX_UNPACKED_TIMES`).
        ParseError: where it holds no whole module.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise DumpError("standard input is closed")
        given = read_up_to(sys.stdin.buffer.read, MAX_MODULE_BYTES + 1)
        if len(given) > MAX_MODULE_BYTES:
            raise DumpError(f"standard input holds more than {MAX_MODULE_BYTES >> 30} GiB")
        text = given.decode("utf-8", errors="replace")
        if not text.strip():
            raise DumpError("standard input is empty", hint="did the command before it fail?")
        _refuse_json(text, "standard input")
        return parse_module(text, path="<stdin>", memo=memo)
    data = _read_bytes(path)
    if not data or data.isspace():
        raise DumpError(f"{path} is empty")
    if _ending(path.name).startswith(".hlo.pb"):
        return parse_module(text_of_proto(data, path), path=str(path), memo=memo)
    text = data.decode("utf-8", errors="replace")
    _refuse_json(text, str(path))
    return parse_module(text, path=str(path), memo=memo)


def _refuse_json(text: str, name: str) -> None:
    kind = kind_of_text(text)
    if kind is None:
        return
    hints = {
        "a report": "merge joins reports; an audit or a page needs the dumps",
        "a baseline": "give it by --baseline",
    }
    raise DumpError(f"{name} is {kind}, not HLO", hint=hints.get(kind))


def _read_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DumpError(f"{path} is neither a file nor a folder")
        most_bytes = MAX_MODULE_BYTES
        if path.suffix == ".gz":
            unpacked_bytes = max(UNPACKED_BYTES_ALLOWED, MAX_UNPACKED_TIMES * status.st_size)
            most_bytes = min(most_bytes, unpacked_bytes)
        with _open(path) as file:
            data = read_up_to(file.read, most_bytes + 1, first_bytes=status.st_size + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DumpError(f"cannot read {path}: {reason}") from None
    if len(data) > MAX_MODULE_BYTES:
        raise DumpError(f"{path} holds more than {MAX_MODULE_BYTES >> 30} GiB")
    if len(data) > most_bytes:
        raise DumpError(
            f"{path} unpacks to more than {MAX_UNPACKED_TIMES} times its size, which no HLO does",
            hint="if it is HLO all the same, unpack it first: gzip -d",
        )
    return data


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _ending(name: str) -> str:
    """The one of :data:`FORMATS` that ``name`` ends in, ``""`` for none."""
    return max((ending for ending in FORMATS if name.endswith(ending)), key=len, default="")
