"""Programs of this process: functions and jax objects at hand, compiled where they are.

For notebooks, scripts and tests, whose programs have no name that a worker could import them by.
What the user's code raises goes through as it is. The compiler runs in this process, so that an
abort of it ends this process too; what can be named is better audited by its name.

jax is imported as a program is lowered, by whoever made the program before; reading a compiled
object needs none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hlo_audit.cache import Cache
from hlo_audit.compile_worker import (
    as_audit_error,
    call_build,
    compiler_versions,
    dump_options,
    module_name,
    resolve_mesh,
)
from hlo_audit.compile_worker import make_mesh as mesh_of_devices
from hlo_audit.compiler import LIBTPU_SETTINGS, check_can_compile, refuse_cut_short
from hlo_audit.dump import read_dump
from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.hlo import parse_module
from hlo_audit.lazy_import import lazy_import
from hlo_audit.program import MODES, Lowering, Mode, Platform, Setting
from hlo_audit.program_audit import (
    ProgramAudit,
    RuleOptions,
    audit_final,
    audit_module_dump,
)
from hlo_audit.rule import Rule
from hlo_audit.topology import parse_tpu_topology

jax = lazy_import("jax")
topologies = lazy_import("jax.experimental.topologies")
compilation_cache = lazy_import("jax.experimental.compilation_cache.compilation_cache")


@dataclass(frozen=True)
class How:
    """How a live program is lowered, compiled and audited.

    Attributes:
        mesh: a ``jax.sharding.Mesh``; or axis name -> size, to make one; ``None`` for that of the
            arguments.
        modes: the types of the axes of a mesh that is made; those of the arguments' mesh, or all
            of :data:`MODES` for a function that builds its step, where empty.
        topology: what a mesh is made of: a TPU topology, ``None`` for this process's own devices.
        settings: for a function that builds its step.
        xla_flags: compile options by flag name without dashes.
        cache: where dumps of compiles for TPU are kept.
    """

    rules: Sequence[Rule]
    options: RuleOptions
    mesh: Any = None
    modes: Sequence[Mode] = ()
    topology: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    xla_flags: Mapping[str, str] = field(default_factory=dict)
    cache: Cache | None = None


def audit_live(program: Any, args: Sequence[Any], how: How, *, name: str) -> list[ProgramAudit]:
    """Audit a program of this process; one audit for each mode.

    Args:
        program: a compiled object (``jax.stages.Compiled``: its final module alone is seen), a
            lowered one, a function with its arguments, or, where no arguments are given but a mesh
            is, a function that builds its step as :mod:`hlo_audit.program` describes.
        args: of the function, arrays or ``jax.ShapeDtypeStruct``. Where the mesh is made, their
            shardings are moved onto it.
        name: what the audit calls it.

    Raises:
        UsageError: for an object that cannot be audited, a mesh or a topology that cannot be.
        CompileError: where the compiler fails.
    """
    if hasattr(program, "as_text"):
        if args or how.mesh is not None or how.topology is not None or how.settings:
            raise UsageError(f"{name} is lowered already: it takes no arguments and no mesh")
        if hasattr(program, "compile"):
            return [_compile_and_audit(program, None, how, name)]
        if how.xla_flags:
            raise UsageError(f"{name} is compiled already: flags come too late")
        return [_audit_compiled(program, how, name)]
    if not callable(program):
        raise UsageError(
            f"an object of type {type(program).__name__} cannot be audited",
            hint="give a function with its arguments, a lowered or a compiled one, or a name",
        )
    if how.topology is not None and not isinstance(how.mesh, Mapping):
        raise UsageError(
            "a topology needs the axes of a mesh", hint='such as mesh={"fsdp": 4}, or make_mesh'
        )
    if not isinstance(how.mesh, Mapping) and how.modes:
        raise UsageError(
            "a mode needs a mesh to be made for it", hint='give the axes, such as mesh={"fsdp": 4}'
        )
    if not args and how.mesh is not None:
        return [_audit_built(program, mesh, how, name) for mesh in _meshes(how, MODES)]
    if how.settings:
        raise UsageError(
            "settings are for a function that builds its step from a mesh, without arguments"
        )
    step = program if hasattr(program, "lower") else jax.jit(program)
    if not isinstance(how.mesh, Mapping):
        mesh = _mesh_of(args) if how.mesh is None else how.mesh
        with _mesh_in_use(mesh, unless_set=how.mesh is None):
            lowered = step.lower(*args)
        return [_compile_and_audit(lowered, mesh, how, name)]
    mode = mode_of(_mesh_of(args)) or "auto"
    audits = []
    for mesh in _meshes(how, (mode,)):
        moved = _onto(tuple(args), mesh)
        with _mesh_in_use(mesh):
            lowered = step.lower(*moved)
        audits.append(_compile_and_audit(lowered, mesh, how, name))
    return audits


def make_mesh(axes: Mapping[str, int], *, topology: str | None = None, mode: Mode = "auto") -> Any:
    """Return a ``jax.sharding.Mesh`` to build arguments for.

    Args:
        axes: axis name -> size, in order; one may be -1, for the devices that are left.
        topology: TPU chips that need not be there, such as ``v5p:2x2x1``: programs can be compiled
            for them, not run. ``None`` for the devices of this process.
        mode: the type of every axis.

    Raises:
        UsageError: for a mesh that does not fit, a topology that cannot be, and no TPU compiler.
    """
    devices = list(jax.devices()) if topology is None else _topology_devices(topology)
    where = "of this process" if topology is None else topology
    return mesh_of_devices(devices, resolve_mesh(axes, len(devices), where), mode)


def mode_of(mesh: Any) -> Mode | None:
    """The type of the axes of a jax mesh; ``None`` for no mesh and for axes of several types."""
    types = {kind.name.lower() for kind in getattr(mesh, "axis_types", None) or ()}
    return next((mode for mode in MODES if types == {mode}), None)


def _meshes(how: How, by_default: Sequence[Mode]) -> Iterator[Any]:
    if not isinstance(how.mesh, Mapping):
        yield how.mesh
        return
    for mode in dict.fromkeys(how.modes or by_default):
        yield make_mesh(how.mesh, topology=how.topology, mode=mode)


def _audit_built(build: Callable[..., Any], mesh: Any, how: How, name: str) -> ProgramAudit:
    step, args, keywords = call_build(build, mesh, how.settings, name=name)
    with _mesh_in_use(mesh):
        lowered = step.lower(*args, **keywords)
    return _compile_and_audit(lowered, mesh, how, name)


@contextlib.contextmanager
def _mesh_in_use(mesh: Any, *, unless_set: bool = False) -> Iterator[None]:
    if mesh is None or (unless_set and not jax.sharding.get_abstract_mesh().empty):
        yield
    else:
        with jax.set_mesh(mesh):
            yield


def _mesh_of(args: Sequence[Any]) -> Any:
    """The mesh that the arguments are sharded over; ``None`` where they are not."""
    for leaf in jax.tree.leaves(tuple(args)):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            return mesh
    return None


def _onto(args: Any, mesh: Any) -> Any:
    """The arguments without their values, sharded as they are, but over ``mesh``."""

    def move(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for axis in jax.tree.leaves(tuple(sharding.spec)):
            if axis not in mesh.axis_names:
                raise UsageError(
                    f"an argument is sharded over {axis!r}, and the mesh has the axes "
                    + ", ".join(mesh.axis_names),
                    hint="give the mesh the axes of the arguments",
                )
        moved = jax.sharding.NamedSharding(mesh, sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=moved)

    return jax.tree.map(move, args)


def _audit_compiled(compiled: Any, how: How, name: str) -> ProgramAudit:
    text = compiled.as_text()
    if not text:
        raise UsageError(f"{name} has no text", hint="its backend gives none: audit it lowered")
    module = parse_module(text, path=f"{name}.as_text()")
    return audit_final(name, module, how.rules, how.options)


def _compile_and_audit(lowered: Any, mesh: Any, how: How, name: str) -> ProgramAudit:
    text = lowered.as_text()
    platform: Platform = "tpu" if mesh is not None and _is_tpu(mesh) else "cpu"
    described = Lowering(
        program=name,
        build="",
        mode=mode_of(mesh) or "auto",
        layout=None,
        settings=how.settings,
        mesh={},
        platform=platform,
        topology=how.topology or "",
        xla_flags=how.xla_flags,
    )
    with tempfile.TemporaryDirectory(prefix="hlo-audit-") as temporary:
        folder = Path(temporary)
        entry = None
        if how.cache is not None and platform == "tpu":
            entry = _entry(lowered.as_text(debug_info=True), mesh, how.xla_flags)
        if entry is None or how.cache is None or not how.cache.extract(entry, folder):
            try:
                _compile(lowered, how.xla_flags, folder)
            except HloAuditError:
                raise
            except Exception as error:  # whatever the compiler raises is its verdict
                raise as_audit_error(error, "compile", described) from error
            refuse_cut_short(folder)
            if entry is not None and how.cache is not None:
                how.cache.store(entry, folder)
        modules = read_dump(folder).modules
        wanted = module_name(text)
        dump = next((module for module in modules if module.name == wanted), modules[-1])
        audit = audit_module_dump(name, dump, None, how.rules, how.options)
    return replace(
        audit,
        mode=mode_of(mesh),
        topology=how.topology,
        settings=how.settings,
        xla_flags=how.xla_flags,
        versions=compiler_versions(audit.platform or "cpu"),
    )


def _compile(lowered: Any, xla_flags: Mapping[str, str], dump_to: Path) -> None:
    # A hit in jax's own cache writes no dump, and jax decides only once whether it uses one.
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        lowered.compile(compiler_options=dump_options(xla_flags, dump_to))
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
    if not any(dump_to.iterdir()):
        raise CompileError(
            "the compiler wrote no dump", hint="audit the program by its name, in a process apart"
        )


def _is_tpu(mesh: Any) -> bool:
    return all(device.platform == "tpu" for device in mesh.devices.flat)


def _entry(stablehlo: str, mesh: Any, xla_flags: Mapping[str, str]) -> str:
    """Names a compile in the cache: all that the compiler is given."""
    devices = [(device.device_kind, str(device)) for device in mesh.devices.flat]
    environment = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    versions = compiler_versions("tpu")
    asked = ["live", versions, devices, environment, dict(xla_flags), stablehlo]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _topology_devices(topology: str) -> list[Any]:
    bounds = parse_tpu_topology(topology).chips_per_host_bounds
    check_can_compile("tpu")
    options = {} if bounds is None else {"chips_per_host_bounds": bounds}
    try:
        with _libtpu_settings():
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except Exception as error:  # libtpu's refusal, of whatever type
        described = Lowering("", "", "auto", None, {}, {}, "tpu", topology)
        raise as_audit_error(error, "topology", described) from error
    return list(found.devices)


@contextlib.contextmanager
def _libtpu_settings() -> Iterator[None]:
    """Set, as libtpu loads, what it needs where there is no TPU; what the user has set stays.

    Only then: a TPU of this machine that is used later must find its own settings.
    """
    added = {n: v for n, v in LIBTPU_SETTINGS.items() if n not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
