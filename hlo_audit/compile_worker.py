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
import os
import platform
import queue
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
from typing import Any, Literal

from hlo_audit.errors import CompileError, HloAuditError, UsageError, unknown_name
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
    step, args = _build(lowering, mesh)
    # Only around the lowering: an operation that the builder runs eagerly could not run on a TPU
    # that is not there.
    with jax.set_mesh(mesh):
        lowered = step.lower(*args)
    text = lowered.as_text()
    lower_seconds = time.perf_counter() - started

    versions = _versions(lowering.platform)
    # With the source positions: those in a cached dump must be the program's.
    entry = _digest(lowered.as_text(debug_info=True), lowering, versions)
    cached = job.cache_entries is not None and (job.cache_entries / f"{entry}.zip").exists()
    compile_seconds = 0.0
    if not cached:
        results.enter("compile")
        # A hit in the persistent cache writes no dump. The user's code may have switched it on.
        jax.config.update("jax_enable_compilation_cache", False)
        started = time.perf_counter()
        lowered.compile(compiler_options=_compile_options(lowering.xla_flags, job.dump_to))
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
        module=_module_name(text),
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


def _build(lowering: Lowering, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    layout = {} if lowering.layout is None else {"layout": lowering.layout}
    built = load_build(lowering.build)(mesh, **layout, **lowering.settings)
    if not (
        isinstance(built, tuple)
        and len(built) == 2
        and hasattr(built[0], "lower")
        and isinstance(built[1], tuple | list)
    ):
        raise UsageError(
            f"{lowering.build} does not return a jitted function and its abstract arguments",
            hint="return (jax.jit(step), (argument, ...)), each argument a jax.ShapeDtypeStruct",
        )
    step, args = built
    return step, tuple(args)


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
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            hint = "a file is given by its path, path/to/file.py:function"
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


def _compile_options(xla_flags: Mapping[str, str], dump_to: Path) -> dict[str, str | bool]:
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


def _module_name(stablehlo: str) -> str:
    # "module @jit_step attributes {...} {", the name in quotes where it is no identifier.
    head = stablehlo.split("module @", 1)[1]
    return head[1:].split('"', 1)[0] if head.startswith('"') else head.split(None, 1)[0]


def _versions(for_platform: str) -> dict[str, str | None]:
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
    frame = _user_frame(error, lowering.build)
    place = f" ({frame})" if frame else ""
    reason = _reason(error)
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return UsageError(f"the program raised {text}{place}", hint=_program_hint(error, reason))


def _program_hint(error: BaseException, reason: str) -> str | None:
    # jax's class for it is private.
    if type(error).__name__ == "ShardingTypeError":
        return "name the sharding there, or reshard before it; the mode auto needs neither"
    if isinstance(error, AttributeError) and "local_devices" in reason:
        return (
            "the mesh's devices are not there to run on: build arguments as jax.ShapeDtypeStruct, "
            "and arrays outside of jax.set_mesh"
        )
    return None


def _user_frame(error: BaseException, build: str) -> str | None:
    """Return ``file:line in function`` of the deepest frame in code of the user's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    libraries = _library_folders()
    own = [f for f in frames if not _is_library(f[0], libraries)]
    # A program that is itself installed among the libraries.
    module = sys.modules.get(build.rpartition(":")[0])
    installed = [f for f in frames if f[0] == getattr(module, "__file__", None)]
    for filename, line, function in (own or installed)[-1:]:
        return f"{_shown(filename)}:{line} in {function}"
    return None


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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0].rstrip(".") if lines else ""
    return first if len(first) <= _LONGEST_REASON else first[:_LONGEST_REASON] + "..."


def _without_status(reason: str) -> str:
    status, _, rest = reason.partition(": ")
    return rest.rstrip(" :") if rest and status.isupper() else reason


def _error_to_json(error: HloAuditError) -> dict[str, Any]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint}


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
