"""What can be audited: a reference model or function to compile, a dump folder, an HLO file.

A *program* on the command line becomes one :class:`Lowering` for each mode and layout, or one
:class:`Recorded` for a dump folder or a file. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
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
    xla_flags: Mapping[str, str] | None = None,
) -> list[Subject]:
    """Turn names on the command line into what is to be audited.

    Args:
        programs: names of models, dump folders, HLO files, ``-``.
        models: the reference models.
        modes: both, if empty.
        layouts: of the models; ``all`` for each, the baseline if empty.
        settings: changed settings of the models.
        platform: to compile for.
        topology: the model's own for the platform, if ``None``.
        xla_flags: compile options.

    Raises:
        UsageError: for a name that is nothing of these, and for a layout, setting or topology that
            does not fit.
    """
    if topology is not None and not topology.strip():
        raise UsageError("the topology is empty", hint="give one such as v5p:2x2x1")
    subjects: list[Subject] = []
    recorded = [name for name in programs if all(model.name != name for model in models)]
    asked = [modes, layouts, settings, topology, xla_flags]
    if len(recorded) == len(programs) and any(asked):
        raise UsageError(
            f"{recorded[0]} is there already: modes, layouts, settings, topologies and flags are "
            "for models, which are compiled"
        )
    for name in programs:
        model = next((model for model in models if model.name == name), None)
        if model is None:
            subjects.append(_recorded(name, models))
            continue
        values = model.configure(settings or {})
        subjects += [
            Lowering(
                program=model.name,
                build=model.build,
                mode=mode,
                layout=layout,
                settings=values,
                mesh=model.mesh,
                platform=platform,
                topology=topology or model.topologies[platform],
                xla_flags=dict(xla_flags or {}),
            )
            for layout in _chosen_layouts(model, layouts)
            for mode in dict.fromkeys(modes or MODES)
        ]
    return subjects


def _recorded(name: str, models: Sequence[Model]) -> Recorded:
    path = Path(name)
    if name == "-":
        return Recorded(path)
    if not name:
        raise UsageError("a program's name is empty", hint="is a variable not set?")
    try:
        if path.exists():
            # "./-" is a file, and only "-" standard input.
            return Recorded(path.absolute() if str(path) == "-" else path)
    except OSError as error:
        raise UsageError(f"cannot read {name[:80]}: {error.strerror}") from None
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
