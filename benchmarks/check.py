"""How long ``hlo-audit check`` takes beside the bare compile of the same programs.

    python benchmarks/check.py [--rounds N] [MODEL]

In turns, N times: the check with an empty cache (cold), with the cache that this filled (warm), and
the same programs lowered and compiled with nothing around it (bare): as many processes as the check
has workers, each of which imports jax once and takes its share. Cold by bare is what the audit
costs on top of the compiler: the dumps of all passes, reading them, and the rules. Ratios are of
wall time, and of processor time with that of the children.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from hlo_audit.compiler import default_jobs, worker_environment
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import Lowering, find_subjects

_BARE = """
import importlib, sys
import jax
from jax.experimental import topologies
from hlo_audit.compile_worker import make_mesh, resolve_mesh
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import find_subjects
_, name, share, shares = sys.argv
for subject in find_subjects([name], ALL_MODELS)[int(share)::int(shares)]:
    lowering = getattr(subject, "lowering", subject)
    described = topologies.get_topology_desc(platform="tpu", topology_name=lowering.topology)
    devices = list(described.devices)
    sizes = resolve_mesh(lowering.mesh, len(devices), lowering.topology)
    mesh = make_mesh(devices, sizes, lowering.mode)
    module, _, function = lowering.build.partition(":")
    build = getattr(importlib.import_module(module), function)
    step, args = build(mesh, layout=lowering.layout, **lowering.settings)
    with jax.set_mesh(mesh):
        step.lower(*args).compile()
"""


class Times(NamedTuple):
    """Seconds of the clock, and of the processors with those of all children."""

    wall: float
    processor: float


def timed(run: Callable[[], None]) -> Times:
    def children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start, before = time.perf_counter(), children()
    run()
    return Times(time.perf_counter() - start, children() - before)


def bare(model: str, workers: int, folder: Path) -> None:
    environment = worker_environment(os.environ, folder, None)
    shares = [
        subprocess.Popen(
            [sys.executable, "-c", _BARE, model, str(share), str(workers)], env=environment
        )
        for share in range(workers)
    ]
    if [process for process in shares if process.wait()]:
        sys.exit("the bare compile failed")


def check(model: str, cache: Path) -> None:
    command = [sys.executable, "-m", "hlo_audit", "check", model, "--quiet"]
    done = subprocess.run(
        [*command, "--cache-dir", str(cache)], check=False, capture_output=True, text=True
    )
    if done.returncode > 1:
        sys.exit(done.stderr)


def one_round(model: str, workers: int) -> dict[str, Times]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        return {
            "bare": timed(lambda: bare(model, workers, Path(folder))),
            "cold": timed(lambda: check(model, cache)),
            "warm": timed(lambda: check(model, cache)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="lm-head")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model
    programs = [s for s in find_subjects([model], ALL_MODELS) if isinstance(s, Lowering)]
    workers = min(default_jobs(), len(programs))
    rounds = [one_round(model, workers) for _ in range(arguments.rounds)]
    found = {name: [times[name] for times in rounds] for name in rounds[0]}
    table = Table("", "wall s", "processor s", title=f"{model}: {len(programs)} programs")
    for name, times in found.items():
        wall, processor = map(statistics.median, zip(*times, strict=True))
        table.add_row(name, f"{wall:.2f}", f"{processor:.2f}")
    for above, below in (("cold", "bare"), ("warm", "cold")):
        pairs = zip(found[above], found[below], strict=True)
        ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in pairs]
        table.add_row(
            f"{above} / {below}",
            *(f"{statistics.median(column):.3f}" for column in zip(*ratios, strict=True)),
        )
    console = Console()
    console.print(table)
    console.print(f"medians of {arguments.rounds} rounds; {workers} workers")
    console.print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}, "
        f"{platform.platform(terse=True)}"
    )


if __name__ == "__main__":
    main()
