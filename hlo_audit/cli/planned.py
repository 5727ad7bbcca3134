"""Which programs a check is of, and how they are compiled: the command line over the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hlo_audit.cli.options import How, find_programs, platform_of, say_platform
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.config import Config, ConfiguredProgram
    from hlo_audit.program import Subject


def plan(names: Sequence[str], how: How, config: Config) -> list[Subject]:
    """What is to be audited.

    Args:
        names: as given; none for the programs of the config, or, where it has none, the models in
            all their layouts, at their quick sizes.
        how: as given; what it does not say is the config's to say.

    Raises:
        UsageError: for what cannot be; of a program that the config names with its file and line.
    """
    from hlo_audit.models import ALL_MODELS

    models = [model.name for model in ALL_MODELS]
    chosen: list[tuple[str, ConfiguredProgram | None]] = [
        (name, config.program(name)) for name in names
    ]
    if not names:
        chosen = [(config.name_here(program), program) for program in config.programs]
    if not chosen:
        return _all_models(how, config, models)
    compiled = [name for name, _ in chosen if not _is_there(name, models)]
    subjects: list[Subject] = []
    for name, program in chosen:
        if not names and program is not None:
            try:
                subjects += _subjects(name, program, how, config, models)
            except UsageError as error:
                message = f"{program.where}: {error.message}"
                raise UsageError(message, hint=error.hint) from None
        elif name in compiled:
            subjects += _subjects(name, program, how, config, models)
        else:
            # Of several names the options are for those that are compiled.
            given = how if not compiled else _without_ways(how)
            subjects += _subjects(name, program, given, config, models)
    if compiled:
        _say_platform(how, config)
    return subjects


def _all_models(how: How, config: Config, models: Sequence[str]) -> list[Subject]:
    """Every model in all its layouts, at the sizes that compile soonest: nothing in particular is
    asked about, and the fixes are of interest as much as the faults."""
    from hlo_audit.models import ALL_MODELS

    how = replace(how, layouts=how.layouts or config.ways.layouts or ("all",))
    sizes_are_given = bool(how.settings or config.ways.settings)
    subjects: list[Subject] = []
    for model in ALL_MODELS:
        settings = how.settings if sizes_are_given else _pairs(model.quick_settings)
        named = replace(how, settings=tuple(settings))
        subjects += _subjects(model.name, None, named, config, models)
    _say_platform(how, config)
    return subjects


def _say_platform(how: How, config: Config) -> None:
    asked = how if how.platform else replace(how, platform=config.ways.platform)
    say_platform(platform_of(asked), asked)


@dataclass(frozen=True)
class Reach:
    """How much of all that is known a command line asks for.

    Attributes:
        whole: whether it is all programs, in all their ways: one that a baseline has and that is
            not audited has gone.
        all_used: whether a suppression of the config without a use can be told: where programs are
            named, those of the config have not been looked at.
    """

    whole: bool
    all_used: bool


def reach_of(programs: Sequence[str], how: How, config: Config) -> Reach:
    """The reach of a command line with these programs and options."""
    narrowed = bool(how.modes or how.layouts or how.settings or how.topology or how.mesh)
    whole = not narrowed and not programs
    return Reach(whole, whole or (not narrowed and not config.programs))


def _is_there(name: str, models: Sequence[str]) -> bool:
    if name in models:
        return False
    try:
        return name == "-" or Path(name).exists()
    except (OSError, ValueError):
        return False


def _without_ways(how: How) -> How:
    return replace(how, modes=(), layouts=(), settings=(), topology=None, mesh=(), xla_flags=())


def _subjects(
    name: str,
    program: ConfiguredProgram | None,
    how: How,
    config: Config,
    models: Sequence[str],
) -> list[Subject]:
    """A program in each of its topologies and meshes."""
    from hlo_audit.config import Ways

    own = program.ways if program is not None else Ways()
    # What stands at the top is for those programs that it fits.
    top = config.ways if not _is_there(name, models) else Ways()
    layouts = top.layouts if name in models else ()
    meshes = top.meshes if name not in models else ()
    platform = how.platform or own.platform or top.platform or platform_of(how)
    topologies: list[str | None] = [how.topology] if how.topology is not None else []
    if not topologies:
        named = own.topologies or top.topologies
        topologies += [text for text in named if (":" in text) == (platform == "tpu")]
    as_texts = [
        ",".join(f"{axis}={size}" for axis, size in mesh.items()) for mesh in own.meshes or meshes
    ]
    meshes_given: list[tuple[str, ...]] = [how.mesh] if how.mesh else [(t,) for t in as_texts]
    subjects: list[Subject] = []
    for topology in topologies or [None]:
        for mesh in meshes_given or [()]:
            subjects += find_programs(
                (name,),
                replace(
                    how,
                    modes=how.modes or own.modes or top.modes,
                    layouts=how.layouts or own.layouts or layouts,
                    settings=(*_pairs({**top.settings, **own.settings}), *how.settings),
                    topology=topology,
                    mesh=mesh,
                    platform=platform,
                    xla_flags=(*_pairs({**top.xla_flags, **own.xla_flags}), *how.xla_flags),
                ),
            )
    return subjects


def _pairs(values: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]
