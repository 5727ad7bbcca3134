"""The process that calls the compiler: ``python -m hlo_audit.compile_worker JOBS_FD RESULTS_FD``.

The compiler may abort, crash or hang, and takes the process with it: so it runs here, and
:mod:`hlo_audit.compiler` starts, feeds and ends these processes. Both sides talk in JSON lines over
two pipes of their own, so that nothing a program or the compiler prints can break in. For each job
``{"lowering": ..., "dump_to": ..., "chips_per_host_bounds": ...}`` the answer is a line
``{"stage": ...}`` as each stage starts, and last ``{"manifest": ...}`` or ``{"error": ...}``.

A job leaves no trace for the next one: what the compiler writes depends on the job alone. (Only in
the names of some passes, as in ``apply-xla-transforms-3``, XLA counts on through the process.)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import platform
import queue
import re
import resource
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from hlo_audit.errors import (
    CompileError,
    HloAuditError,
    RefusedReshapeError,
    UsageError,
    unknown_name,
)
from hlo_audit.lazy_import import lazy_import
from hlo_audit.manifest import Manifest
from hlo_audit.program import Lowering

metadata = lazy_import("importlib.metadata")
jax = lazy_import("jax")
topologies = lazy_import("jax.experimental.topologies")
numpy = lazy_import("numpy")

Stage = Literal["start", "topology", "build", "compile"]
"""What the worker is at: importing jax, asking for the devices, building and tracing the program
(which runs the user's code), compiling it."""

TPU_VERSIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")

GRACE_SECONDS = 2.0
"""How long a job in progress may go on after the parent has gone."""

_LONGEST_REASON = 300
_MOST_REASON_LINES = 8
_MOST_FRAMES = 8
_JAX_NOTES = ("------", "For simplicity, JAX has removed", "The stack trace below")
_PR_SET_PDEATHSIG = 1

# What the compiler says of a flag that it does not know or of a value that it cannot read: a
# DebugOptions field, a TPU flag, and a TPU flag on libtpu of 2025.
_UNKNOWN_FLAG = "No such compile option"
_BAD_FLAG_VALUES = (
    "While setting option",
    "Failed to parse",
    "flag type mismatch",
    "has an unrecognized type",
)


@dataclass(frozen=True)
class Job:
    """One program to compile.

    Attributes:
        lowering: the program.
        dump_to: the empty folder for the dump.
        chips_per_host_bounds: given to libtpu with the topology; ``None`` leaves its default.
        cache_entries: the folder of cached dumps, where a program that is in it need not be
            compiled; ``None`` compiles in any case.
    """

    lowering: Lowering
    dump_to: Path
    chips_per_host_bounds: tuple[int, int, int] | None
    cache_entries: Path | None = None

    def to_json(self) -> dict[str, Any]:
        lowering = {name: getattr(self.lowering, name) for name in Lowering.__dataclass_fields__}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in lowering.items()}
        return {
            "lowering": plain,
            "dump_to": str(self.dump_to),
            "chips_per_host_bounds": self.chips_per_host_bounds,
            "cache_entries": None if self.cache_entries is None else str(self.cache_entries),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        bounds, entries = data["chips_per_host_bounds"], data["cache_entries"]
        return cls(
            lowering=Lowering(**data["lowering"]),
            dump_to=Path(data["dump_to"]),
            chips_per_host_bounds=None if bounds is None else tuple(bounds),
            cache_entries=None if entries is None else Path(entries),
        )


class Results:
    """The pipe to the parent, and the stage of the job in progress."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.stage: Stage = "start"

    def enter(self, stage: Stage) -> None:
        """Tell the parent that ``stage`` begins: it decides how a crash is worded."""
        self.stage = stage
        self.send({"stage": stage})

    def send(self, answer: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(answer).encode() + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]


def main(arguments: Sequence[str]) -> None:
    """Compile one job after another until the parent closes the pipe."""
    jobs_fd, results_fd = map(int, arguments)
    for fd in (jobs_fd, results_fd):
        # A process that the user's code starts must not hold the pipes open.
        os.set_inheritable(fd, False)
    end_with_parent()
    write_no_core_files()
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs_fd, jobs), daemon=True).start()
    results = Results(results_fd)
    while (job := jobs.get()) is not None:
        _answer(job, results)


def _answer(job: Job, results: Results) -> None:
    results.stage = "start"
    try:
        results.send(_compile(job, results))
    # The boundary of the process: whatever the user's code, jax or the compiler raises, SystemExit
    # among it, is the answer for this one program.
    except BaseException as error:
        results.send({"error": _error_to_json(as_audit_error(error, results.stage, job.lowering))})


def _compile(job: Job, results: Results) -> dict[str, Any]:
    """Compile a program, unless the cache has it; return the answer to the parent."""
    lowering = job.lowering
    importlib.import_module("jax")
    # jax keeps all that it traced and compiled: the programs of one worker must not see each
    # other's, nor fill the memory.
    jax.clear_caches()

    results.enter("topology")
    devices = _devices(lowering, job.chips_per_host_bounds)
    sizes = resolve_mesh(lowering.mesh, len(devices), lowering.topology)
    mesh = make_mesh(devices, sizes, lowering.mode)

    results.enter("build")
    started = time.perf_counter()
    step, args, keywords = build_program(lowering, mesh)
    # Only around the lowering: an operation that the builder runs eagerly could not run on a TPU
    # that is not there.
    with jax.set_mesh(mesh):
        lowered = step.lower(*args, **keywords)
    text = lowered.as_text()
    lower_seconds = time.perf_counter() - started

    versions = compiler_versions(lowering.platform)
    # With the source positions: those in a cached dump must be the program's.
    entry = _digest(lowered.as_text(debug_info=True), lowering, versions)
    cached = job.cache_entries is not None and (job.cache_entries / f"{entry}.zip").exists()
    compile_seconds = 0.0
    if not cached:
        results.enter("compile")
        # A hit in the persistent cache writes no dump. The user's code may have switched it on.
        jax.config.update("jax_enable_compilation_cache", False)
        started = time.perf_counter()
        lowered.compile(compiler_options=dump_options(lowering.xla_flags, job.dump_to))
        compile_seconds = time.perf_counter() - started
        if not any(job.dump_to.iterdir()):
            raise CompileError("the compiler wrote no dump")

    manifest = Manifest(
        program=lowering.program,
        mode=lowering.mode,
        layout=lowering.layout,
        platform=lowering.platform,
        topology=lowering.topology,
        mesh=sizes,
        settings=lowering.settings,
        xla_flags=lowering.xla_flags,
        versions=versions,
        module=module_name(text),
        devices=len(devices),
        lower_seconds=round(lower_seconds, 3),
        compile_seconds=round(compile_seconds, 3),
        digest=_digest(text, lowering, versions),
    )
    return {
        "manifest": manifest.to_json(),
        "entry": entry,
        "cached": cached,
        "sources": _source_digests(),
    }


def _source_digests() -> dict[str, str]:
    """The SHA-256 of each Python file outside of the libraries that took part, by its path."""
    libraries = _library_folders()
    ours = str(Path(__file__).parent)
    digests = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not (isinstance(file, str) and file.endswith(".py")):
            continue
        if file.startswith(ours) or not file.startswith(libraries):
            with contextlib.suppress(OSError):
                digests[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return digests


def _devices(lowering: Lowering, bounds: tuple[int, int, int] | None) -> list[Any]:
    if lowering.platform == "cpu":
        return list(jax.devices("cpu"))
    options = {} if bounds is None else {"chips_per_host_bounds": bounds}
    return list(
        topologies.get_topology_desc(
            platform="tpu", topology_name=lowering.topology, **options
        ).devices
    )


def resolve_mesh(mesh: Mapping[str, int], devices: int, topology: str) -> dict[str, int]:
    """Return the mesh with the size of its ``-1`` axis filled in.

    Raises:
        UsageError: where the sizes do not multiply to the number of devices.
    """
    shown = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    known = 1
    for size in mesh.values():
        known *= 1 if size == -1 else size
    open_axes = sum(size == -1 for size in mesh.values())
    if open_axes > 1 or any(size < 1 and size != -1 for size in mesh.values()):
        raise UsageError(
            f"the mesh {shown} has sizes that cannot be", hint="one axis at most may be -1"
        )
    if (devices % known if open_axes else devices - known) != 0:
        raise UsageError(
            f"the mesh {shown} takes {'a multiple of ' if open_axes else ''}{known} devices, "
            f"but the topology {topology} has {devices}",
            hint="give one axis the size -1 to take the devices that are left",
        )
    return {axis: devices // known if size == -1 else size for axis, size in mesh.items()}


def make_mesh(devices: list[Any], sizes: Mapping[str, int], mode: str) -> Any:
    """Return a mesh of all the devices, each axis of the type that ``mode`` says."""
    axis_type = getattr(jax.sharding.AxisType, mode.capitalize())
    # In libtpu's order: how jax would arrange the devices depends on its version.
    return jax.sharding.Mesh(
        numpy.asarray(devices).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(axis_type,) * len(sizes),
    )


def build_program(lowering: Lowering, mesh: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what a program's function builds for ``mesh``: the jitted step, its abstract arguments
    and those that it takes by keyword.

    Raises:
        UsageError: where the function does not take a mesh or the settings, or returns another
            thing. What the function itself raises goes through.
    """
    layout = {} if lowering.layout is None else {"layout": lowering.layout}
    function = load_build(lowering.build)
    return call_build(function, mesh, {**layout, **lowering.settings}, name=lowering.build)


def call_build(
    function: Callable[..., Any], mesh: Any, settings: Mapping[str, Any], *, name: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """As :func:`build_program`, for a function at hand, called ``name`` in errors."""
    if hasattr(function, "lower"):
        raise UsageError(
            f"{name} is a jitted function, not one that builds it",
            hint=f"name a function that takes a mesh, {_RETURN_A_STEP}",
        )
    by_keyword = _check_settings(function, settings, name)
    built = function(mesh=mesh, **settings) if by_keyword else function(mesh, **settings)
    if problem := _problem_of(built):
        raise UsageError(
            f"{name} does not return a jitted function and its abstract arguments: {problem}",
            hint=_RETURN_A_STEP,
        )
    step, args, *rest = built
    return step, tuple(args), dict(rest[0]) if rest else {}


_RETURN_A_STEP = (
    "return (jax.jit(step), (argument, ...)), each argument a tree of jax.ShapeDtypeStruct"
)


def _check_settings(function: Callable[..., Any], settings: Mapping[str, Any], name: str) -> bool:
    """Whether ``function`` takes the mesh by keyword.

    Raises:
        UsageError: where it takes no mesh, does not know a setting, or needs one that is not given.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable that does not say
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_mesh = [
        p for p in parameters if p.kind in (*positional, inspect.Parameter.VAR_POSITIONAL)
    ]
    takes_mesh += [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name == "mesh"]
    if not takes_mesh:
        raise UsageError(f"{name} takes no mesh", hint="its first parameter is the mesh")
    mesh = takes_mesh[0]
    named = {
        p.name: p
        for p in parameters
        if p is not mesh and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for setting in settings:
            if setting not in named:
                known = [*named] or ["(it has none)"]
                raise unknown_name(f"setting of {name}", setting, known)
    for parameter in named.values():
        if parameter.default is parameter.empty and parameter.name not in settings:
            raise UsageError(
                f"{name} needs the setting {parameter.name}",
                hint=f"--set {parameter.name}=VALUE, or give it a default; "
                "what is named must be the function that builds the step, not the step itself",
            )
    return mesh.kind is mesh.KEYWORD_ONLY


def _problem_of(built: Any) -> str | None:
    """What is wrong with what a program's function returned."""
    if hasattr(built, "lower"):
        return "the arguments are missing"
    if not isinstance(built, tuple) or not 2 <= len(built) <= 3:
        return f"it returns {_thing(built)}"
    step, args, *rest = built
    if not hasattr(step, "lower"):
        jit = ", which is not jitted" if callable(step) else ""
        return f"the first is {_thing(step)}{jit}"
    if not isinstance(args, tuple | list):
        return f"the arguments are {_thing(args)}, not a tuple of them"
    if rest and not isinstance(rest[0], Mapping):
        return f"the arguments by keyword are {_thing(rest[0])}, not a dict of them"
    return None


def _thing(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = getattr(value, "__name__", None) if callable(value) else None
    return f"the function {name}" if name else f"an object of type {type(value).__name__}"


def is_ours(module: str) -> bool:
    """Whether a program is one of the reference models, whose import changes nothing."""
    return module.startswith("hlo_audit.models.")


def load_build(build: str) -> Callable[..., Any]:
    """Return the function behind ``package.module:function`` or ``path/to/file.py:function``.

    A file is imported with its own folder first on ``sys.path``, as Python runs a script.

    Raises:
        UsageError: where there is no such file, module or function. What the import itself raises
            goes through.
    """
    where, _, name = build.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, f in inspect.getmembers(module, inspect.isfunction) if n[0] != "_"]
        raise unknown_name(f"function in {where}", name, own)
    return function  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if not is_ours(name) and here not in sys.path:
        sys.path.insert(0, here)  # as ``python -m`` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            hint = f"it is looked for from {here}; a file is given by its path, file.py:function"
            raise UsageError(f"no module is called {name!r}", hint=hint) from None
        raise


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    path = path.resolve()
    # Its siblings may import it by its name, but a file called jax.py must not become jax.
    names = (path.stem, f"hlo_audit_program.{path.stem}")
    for name in names:
        if getattr(sys.modules.get(name), "__file__", None) == str(path):
            return sys.modules[name]
    name = names[path.stem in sys.modules]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def dump_options(xla_flags: Mapping[str, str], dump_to: Path) -> dict[str, str | bool]:
    """Return the compile options for ``xla_flags`` and a dump of every pass into a folder."""
    dump: dict[str, str | bool] = {
        "xla_dump_to": str(dump_to),
        "xla_dump_hlo_pass_re": ".*",
        "xla_dump_hlo_as_text": True,
    }
    return {**{name: option_value(text) for name, text in xla_flags.items()}, **dump}


def option_value(text: str) -> str | bool:
    """Return a flag's value as the compiler takes it.

    It reads numbers and enumerations from text, whatever the flag's type, and refuses a number
    where the flag holds text, or on jax 0.7 an integer where it holds a float. Truth values are the
    other way round: text is refused for the general flags, a bool is taken by all.
    """
    return {"true": True, "false": False}.get(text.lower(), text)


def module_name(stablehlo: str) -> str:
    """Return the name of the module that a StableHLO text holds."""
    # "module @jit_step attributes {...} {", the name in quotes where it is no identifier.
    head = stablehlo.split("module @", 1)[1]
    return head[1:].split('"', 1)[0] if head.startswith('"') else head.split(None, 1)[0]


def compiler_versions(for_platform: str) -> dict[str, str | None]:
    """Return the versions of what has a part in a compile for a platform."""
    return {
        "python": platform.python_version(),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "libtpu": _libtpu_version() if for_platform == "tpu" else None,
    }


def _libtpu_version() -> str | None:
    """Return the version of the installed libtpu, where it is the one that jax takes."""
    # The user may name another library; otherwise jax itself sets the variable.
    chosen = os.environ.get("TPU_LIBRARY_PATH")
    spec = importlib.util.find_spec("libtpu")
    if chosen is not None and (
        spec is None
        or spec.origin is None
        or not Path(chosen).is_relative_to(Path(spec.origin).parent)
    ):
        return None
    return _version("libtpu")


def _version(distribution: str) -> str | None:
    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def _digest(stablehlo: str, lowering: Lowering, versions: Mapping[str, str | None]) -> str:
    compilers = {name: version for name, version in versions.items() if name != "python"}
    asked = [compilers, lowering.platform, lowering.topology, dict(lowering.xla_flags), stablehlo]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def as_audit_error(error: BaseException, stage: Stage, lowering: Lowering) -> HloAuditError:
    """Return what the user is told of an exception that ended ``stage``."""
    if isinstance(error, HloAuditError):
        return error
    reason = _reason(error)
    if stage == "start":
        return UsageError(f"jax cannot be imported: {reason}", hint='pip install "jax[tpu]"')
    if stage == "topology":
        return _topology_error(lowering, reason)
    if stage == "build":
        return _program_error(error, lowering)
    return _flag_error(lowering, reason) or CompileError(
        f"the compiler failed: {reason or type(error).__name__}"
    )


def _topology_error(lowering: Lowering, reason: str) -> HloAuditError:
    if lowering.platform == "cpu":
        return CompileError(f"the devices cannot be had: {reason}")
    libtpu = f"libtpu {_libtpu_version() or ''}".strip()
    if "Invalid TPU external name" in reason:
        version = lowering.topology.partition(":")[0]
        return UsageError(
            f"{libtpu} knows no TPU {version!r}",
            hint="those it may know: " + ", ".join(TPU_VERSIONS),
        )
    return UsageError(
        f"{libtpu} refuses {lowering.topology}: {_without_status(reason)}",
        hint="shapes are 1x1, 2x1x1, 1x4 and multiples of 2x2",
    )


def _flag_error(lowering: Lowering, reason: str) -> UsageError | None:
    for name, value in lowering.xla_flags.items():
        if f"{_UNKNOWN_FLAG}: '{name}'" in reason:
            elsewhere = name.startswith("xla_tpu_") and lowering.platform != "tpu"
            return UsageError(
                f"the {lowering.platform} compiler has no flag {name!r}",
                hint="it is a flag of the TPU compiler" if elsewhere else None,
            )
        words = reason.replace("'", " ").replace(",", " ").replace(":", " ").split()
        if name in words and any(phrase in reason for phrase in _BAD_FLAG_VALUES):
            return UsageError(
                f"the flag {name} cannot be {value!r}", hint=f"XLA: {_without_status(reason)}"
            )
    return None


def _program_error(error: BaseException, lowering: Lowering) -> UsageError:
    frames = _user_frames(error, lowering.build)
    place = f" ({frames[-1].place})" if frames else ""
    reason = _reason(error)
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    message = f"the program raised {text}{place}"
    hint = _program_hint(error, reason, placed=bool(frames))
    log = (*_rest_of_reason(error), *(frame.line for frame in frames[-_MOST_FRAMES:]))
    refused = _REFUSED_RESHAPE.search(str(error))
    if refused is not None and _is_sharding_error(error):
        return RefusedReshapeError(
            message,
            operand=refused["operand"],
            sizes=tuple(map(int, re.findall(r"\d+", refused["sizes"]))),
            frames=tuple((f.file, f.number or 0, f.function) for f in reversed(frames)),
            hint=hint,
            log=log,
        )
    return UsageError(message, hint=hint, log=log)


# What jax 0.7.2 to 0.12 say of a reshape whose result they find no sharding for.
_REFUSED_RESHAPE = re.compile(
    r"reshape is not supported.*Got operand type: (?P<operand>\S+\[.*\]), "
    r"new sizes: \((?P<sizes>[\d, ]*)\)",
    re.DOTALL,
)


def _is_sharding_error(error: BaseException) -> bool:
    return type(error).__name__ == "ShardingTypeError"  # jax's class for it is private


def _program_hint(error: BaseException, reason: str, *, placed: bool) -> str | None:
    if _is_sharding_error(error):
        return "name the sharding there, or reshard before it; the mode auto needs neither"
    if isinstance(error, AttributeError) and "local_devices" in reason:
        return (
            "the mesh's devices are not there to run on: build arguments as jax.ShapeDtypeStruct, "
            "and arrays outside of jax.set_mesh"
        )
    if "incompatible devices" in reason:
        return (
            "build every sharding from the mesh that the function is given, and arguments as "
            "jax.ShapeDtypeStruct"
        )
    if "not found in mesh" in reason:
        return "the names of the mesh's axes are those of --mesh"
    if isinstance(error, ModuleNotFoundError):
        return f"it must be there for {sys.executable}"
    if isinstance(error, ImportError) and "relative import" in reason:
        return "name a file of a package by its module, package.module:function"
    if isinstance(error, TypeError) and not placed:
        return "are the abstract arguments those that the jitted function takes?"
    return None


class _Frame(NamedTuple):
    """A line of the user's own that an exception went through."""

    file: str
    number: int | None
    function: str
    code: str

    @property
    def place(self) -> str:
        function = f" in {self.function}" if self.function else ""
        return f"{_shown(self.file)}:{self.number}{function}"

    @property
    def line(self) -> str:
        return f"{self.place}: {self.code}" if self.code else self.place


def _user_frames(error: BaseException, build: str) -> list[_Frame]:
    """The frames in code of the user's own, outermost first."""
    frames = [
        _Frame(frame.f_code.co_filename, line, frame.f_code.co_name, "")
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    libraries = _library_folders()
    own = [f for f in frames if not _is_library(f.file, libraries)]
    # A program that is itself installed among the libraries.
    module = sys.modules.get(build.rpartition(":")[0])
    installed = [f for f in frames if f.file == getattr(module, "__file__", None)]
    chosen = own or installed
    if isinstance(error, SyntaxError) and error.filename:
        chosen.append(_Frame(error.filename, error.lineno, "", (error.text or "").strip()))
    return [
        frame
        if frame.code or frame.number is None
        else frame._replace(code=linecache.getline(frame.file, frame.number).strip())
        for frame in chosen
    ]


def _rest_of_reason(error: BaseException) -> list[str]:
    """The further lines of a message: jax says there what the first line leaves open."""
    if isinstance(error, SyntaxError):
        return []
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()][1:]
    kept = [_cut(line) for line in lines if not line.startswith(_JAX_NOTES)]
    return kept[:_MOST_REASON_LINES]


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    jax_file = getattr(sys.modules.get("jax"), "__file__", None)
    folders += [str(Path(jax_file).parent)] if jax_file else []
    return tuple({os.path.join(folder, "") for folder in folders})  # noqa: PTH118


def _is_library(filename: str, libraries: tuple[str, ...]) -> bool:
    ours = (__file__, lazy_import.__code__.co_filename)
    return filename in ours or filename.startswith(("<", *libraries))


def _shown(filename: str) -> str:
    """Return the path from the working directory where it lies below, as users write it."""
    here = Path.cwd()
    path = Path(filename)
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _reason(error: BaseException) -> str:
    # Without the place, which follows.
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _cut(lines[0].rstrip(".")) if lines else ""


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


def _without_status(reason: str) -> str:
    status, _, rest = reason.partition(": ")
    return rest.rstrip(" :") if rest and status.isupper() else reason


def _error_to_json(error: HloAuditError) -> dict[str, Any]:
    return {
        "kind": error.kind,
        "message": error.message,
        "hint": error.hint,
        "log": list(error.log),
        "refused": _refused_to_json(error) if isinstance(error, RefusedReshapeError) else None,
    }


def _refused_to_json(error: RefusedReshapeError) -> dict[str, Any]:
    return {"operand": error.operand, "sizes": error.sizes, "frames": error.frames}


def _read_jobs(fd: int, jobs: queue.SimpleQueue[Job | None]) -> None:
    with open(fd, encoding="utf-8") as lines:
        for line in lines:
            jobs.put(Job.from_json(json.loads(line)))
    jobs.put(None)
    # The parent has closed the pipe, or died: an idle worker ends by itself, a busy one here.
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def end_with_parent() -> None:
    """Let the system end this process with the one that started it, where it can (Linux)."""
    # The pipe's end tells as much, but not to a thread that waits for a compiler holding the lock
    # of the interpreter.
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_no_core_files() -> None:
    """Let a crash of this process leave no file behind."""
    hard_limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))


if __name__ == "__main__":
    main(sys.argv[1:])
