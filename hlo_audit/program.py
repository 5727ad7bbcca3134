"""What can be audited: a reference model or function to compile, a dump folder, an HLO file.

A *program* on the command line becomes one :class:`Lowering` for each mode and layout, or one
:class:`Recorded` for a dump folder or a file. Nothing here imports jax, nor a user's function: the
worker does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.stored import StoredLayouts

Mode = Literal["auto", "explicit"]
"""The type of every mesh axis: ``auto`` leaves shardings to XLA, ``explicit`` types them."""

MODES: tuple[Mode, ...] = get_args(Mode)

Platform = Literal["tpu", "cpu"]

Setting = int | float | bool | str

FUNCTION_TOPOLOGY = "v5p:2x2x1"
"""What a user's function is compiled for on tpu where no topology is given."""

_FUNCTION = re.compile(r"(?P<where>.+\.py|[\w.]+):(?P<name>\w+)")


@dataclass(frozen=True)
class Layout:
    """One way a model stores or contracts its weights; ``summary`` is one line for listings."""

    name: str
    summary: str


@dataclass(frozen=True)
class Model:
    """A reference model: what it is, its sizes, its layouts and how to build its step.

    Attributes:
        name: its name on the command line.
        summary: one line for listings.
        config: a frozen dataclass whose fields, with their defaults, are the model's settings; its
            ``__post_init__`` raises :class:`UsageError` for values that cannot be.
        layouts: the layouts; the first is the baseline, which shows the fault.
        mesh: axis name -> size; ``-1`` takes the devices that are left.
        topologies: platform -> the topology compiled for by default.
        build: import path ``package.module:function`` of ``build(mesh, *, layout, **settings) ->
            (jitted function, abstract arguments)``.
        run: import path of ``run(mesh, *, layout, **settings) -> {inputs: {name: array}}``, which
            runs real steps, on the kinds of inputs that :data:`hlo_audit.rule.Inputs` names, and
            returns what came of them as numpy arrays in the baseline layout's orientation;
            ``None`` for a model that cannot be run.
        run_settings: the settings that are changed to run it: sizes that are small enough.
        quick_settings: those that are changed where all models are checked at once: sizes that
            compile sooner and show the same faults.
        stored: describes, for a config, the arrays that the layouts store in different ways, for
            the checkpoint; ``None`` where no layout changes any.
    """

    name: str
    summary: str
    config: type[Any]
    layouts: tuple[Layout, ...]
    mesh: Mapping[str, int]
    topologies: Mapping[Platform, str]
    build: str
    run: str | None = None
    run_settings: Mapping[str, Setting] = field(default_factory=dict)
    quick_settings: Mapping[str, Setting] = field(default_factory=dict)
    stored: Callable[[Any], StoredLayouts] | None = None

    @property
    def baseline_layout(self) -> str:
        return self.layouts[0].name

    def configure(self, settings: Mapping[str, str]) -> dict[str, Setting]:
        """Return every setting of the model, with the given ones read as their field's type.

        Raises:
            UsageError: for a name that is no setting, or a value that is not of its type or range.
        """
        fields = {f.name: f for f in dataclasses.fields(self.config)}
        changed: dict[str, Setting] = {}
        for name, text in settings.items():
            if name not in fields:
                raise unknown_name(f"setting of {self.name}", name, fields)
            changed[name] = _read_setting(name, text, type(fields[name].default))
        return dataclasses.asdict(self.config(**changed))


@dataclass(frozen=True)
class Lowering:
    """One program to compile: everything that decides what the compiler writes.

    Attributes:
        program: the name to show, such as ``lm-head``.
        build: import path of the function that builds the step (see :class:`Model`).
        mode: the type of every mesh axis.
        layout: passed to ``build`` where it is not ``None``.
        settings: passed to ``build`` by keyword.
        mesh: axis name -> size; one may be ``-1``.
        platform: ``tpu`` or ``cpu``.
        topology: such as ``v5p:2x2x1`` for tpu; the number of devices for cpu.
        xla_flags: compile options by flag name without dashes.
    """

    program: str
    build: str
    mode: Mode
    layout: str | None
    settings: Mapping[str, Setting]
    mesh: Mapping[str, int]
    platform: Platform
    topology: str
    xla_flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Names it among others, such as ``lm-head/explicit/embed-vocab``."""
        return "/".join(part for part in (self.program, self.mode, self.layout) if part)


@dataclass(frozen=True)
class Recorded:
    """A dump folder or an HLO file that is there already; ``-`` is standard input."""

    path: Path

    @property
    def label(self) -> str:
        return str(self.path)


Subject = Lowering | Recorded
"""One thing to audit."""


def find_subjects(
    programs: Sequence[str],
    models: Sequence[Model],
    *,
    modes: Sequence[Mode] = (),
    layouts: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    platform: Platform = "tpu",
    topology: str | None = None,
    mesh: Mapping[str, int] | None = None,
    xla_flags: Mapping[str, str] | None = None,
) -> list[Subject]:
    """Turn names on the command line into what is to be audited.

    Args:
        programs: names of models, ``path/to/file.py:function``, ``package.module:function``, dump
            folders, HLO files, ``-``.
        models: the reference models.
        modes: both, if empty.
        layouts: of the models; ``all`` for each, the baseline if empty.
        settings: changed settings of the models, and all settings of functions.
        platform: to compile for.
        topology: the model's own for the platform, if ``None``; of a function
            :data:`FUNCTION_TOPOLOGY`, or as many CPU devices as its mesh takes.
        mesh: axis name -> size; must be given for a function. The axes of a model have names of
            their own: only their sizes may be others.
        xla_flags: compile options.

    Raises:
        UsageError: for a name that is nothing of these, and for a layout, setting or topology that
            does not fit.
    """
    if topology is not None and not topology.strip():
        raise UsageError("the topology is empty", hint="give one such as v5p:2x2x1")
    subjects: list[Subject] = []
    compiled = [n for n in programs if _is_function(n) or any(m.name == n for m in models)]
    asked = [modes, layouts, settings, topology, mesh, xla_flags]
    if not compiled and any(asked) and programs:
        _recorded(programs[0], models)
        raise UsageError(
            f"{programs[0]} is there already: modes, layouts, settings, topologies, meshes and "
            "flags are for models and functions, which are compiled"
        )
    for name in programs:
        model = next((model for model in models if model.name == name), None)
        if model is not None:
            values = model.configure(settings or {})
            subjects += [
                Lowering(
                    program=model.name,
                    build=model.build,
                    mode=mode,
                    layout=layout,
                    settings=values,
                    mesh=_mesh_of(model, mesh),
                    platform=platform,
                    topology=topology or model.topologies[platform],
                    xla_flags=dict(xla_flags or {}),
                )
                for layout in _chosen_layouts(model, layouts)
                for mode in dict.fromkeys(modes or MODES)
            ]
        elif _is_function(name):
            _check_function(name, mesh, layouts)
            axes = dict(mesh or {})
            subjects += [
                Lowering(
                    program=name,
                    build=name,
                    mode=mode,
                    layout=None,
                    settings={key: read_value(text) for key, text in (settings or {}).items()},
                    mesh=axes,
                    platform=platform,
                    topology=topology or _function_topology(axes, platform),
                    xla_flags=dict(xla_flags or {}),
                )
                for mode in dict.fromkeys(modes or MODES)
            ]
        else:
            subjects.append(_recorded(name, models))
    return subjects


def parse_mesh(texts: Sequence[str]) -> dict[str, int]:
    """Read ``fsdp=4`` or ``data=2,fsdp=2`` texts: axis name -> size, in the order given.

    Raises:
        UsageError: for anything else, and for an axis that is given twice.
    """
    axes: dict[str, int] = {}
    for part in (part for text in texts for part in text.split(",")):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if not (axis.isidentifier() and equals and re.fullmatch(r"-1|[1-9][0-9]{0,6}", size)):
            raise UsageError(
                f"the mesh axis {part[:80]!r} is not of the form AXIS=SIZE",
                hint="such as fsdp=4, or data=2,fsdp=-1: -1 takes the devices that are left",
            )
        if axis in axes:
            raise UsageError(f"the mesh axis {axis} is given twice")
        axes[axis] = int(size)
    return axes


def read_value(text: str) -> Setting:
    """Read a setting of a function, whose type nobody has said: a whole number, a number, ``true``
    or ``false`` in any case, else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for pattern, kind in ((r"[+-]?\d{1,18}", int), (r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", float)):
        if re.fullmatch(pattern, text, re.ASCII | re.IGNORECASE):
            number = kind(text)
            return number if math.isfinite(number) else text
    return text


def _is_function(name: str) -> bool:
    """Whether a name is of the form of a function's, and of no file that is there."""
    found = _FUNCTION.fullmatch(name)
    if found is None or not found["name"].isidentifier():
        return False
    if not found["where"].endswith(".py"):
        return all(part.isidentifier() for part in found["where"].split("."))
    return not _exists(Path(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _check_function(name: str, mesh: Mapping[str, int] | None, layouts: Sequence[str]) -> None:
    where = name.rpartition(":")[0]
    if where.endswith(".py") and not _exists(Path(where)):
        raise UsageError(f"there is no file {where}")
    if not mesh:
        raise UsageError(
            f"{name} needs a mesh", hint="give its axes by --mesh, such as --mesh fsdp=4"
        )
    if layouts:
        raise UsageError(
            f"{name} is a function, and layouts are for models",
            hint=f"where it takes one, --set layout={layouts[0]}",
        )


def _mesh_of(model: Model, mesh: Mapping[str, int] | None) -> Mapping[str, int]:
    if mesh and set(mesh) != set(model.mesh):
        raise UsageError(
            f"the mesh of {model.name} has the axes {', '.join(model.mesh)}, not {', '.join(mesh)}",
            hint="only their sizes may be others",
        )
    return {axis: mesh[axis] for axis in model.mesh} if mesh else model.mesh


def _function_topology(mesh: Mapping[str, int], platform: Platform) -> str:
    # An axis that takes the devices that are left gets the one that there is.
    return FUNCTION_TOPOLOGY if platform == "tpu" else str(abs(math.prod(mesh.values())))


def _recorded(name: str, models: Sequence[Model]) -> Recorded:
    path = Path(name)
    if name == "-":
        return Recorded(path)
    if not name:
        raise UsageError("a program's name is empty", hint="is a variable not set?")
    try:
        if path.suffix == ".py" and path.is_file():
            raise UsageError(
                f"{name} is a Python file", hint=f"name a function in it, {name}:train_step"
            )
        if path.exists():
            # "./-" is a file, and only "-" standard input.
            return Recorded(path.absolute() if str(path) == "-" else path)
    except OSError as error:
        raise UsageError(f"cannot read {name[:80]}: {error.strerror}") from None
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        raise UsageError(f"{function!r} is no name of a function", hint=f"{file}:train_step")
    if path.is_symlink() or len(path.parts) > 1 or path.suffix:
        raise UsageError(f"there is no file or folder {name}")
    raise unknown_name("reference model, folder or file", name, [m.name for m in models])


def _chosen_layouts(model: Model, names: Sequence[str]) -> list[str]:
    known = [layout.name for layout in model.layouts]
    if "all" in names:
        return known
    for name in names:
        if name not in known:
            raise unknown_name(f"layout of {model.name}", name, known)
    return list(dict.fromkeys(names)) or [model.baseline_layout]


def _read_setting(name: str, text: str, kind: type) -> Setting:
    readers: dict[type, Callable[[str], Setting]] = {
        bool: _read_bool,
        int: int,
        float: float,
        str: str,
    }
    try:
        return readers[kind](text)
    except ValueError:
        raise UsageError(f"setting {name}={text} is not of type {kind.__name__}") from None


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")
