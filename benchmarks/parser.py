"""How fast the parser reads dumps, against XLA's own parser on the same text in the same run.

    python benchmarks/parser.py DUMP...

A DUMP is a dump folder, or an archive of one (``tests/data/*.tar.xz``). For each: every snapshot
parsed into the full graph, users included, one by one; and the whole dump read in a row, where what
two snapshots on end have in common is parsed once. Times are of the processor, not of the clock; a
ratio over 1 is in our favour. Needs a jaxlib that reads the dump's text.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from jaxlib import _hlo, version
from rich.console import Console
from rich.table import Table

from hlo_audit.dump import ModuleDump, read_dump
from hlo_audit.hlo import Module, parse_module

ROUNDS = 3


def seconds(run: Callable[[], object]) -> float:
    """Processor time of the fastest of a few runs."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def full_graph(module: Module) -> None:
    """Make what the parser leaves for later: the users of every instruction."""
    for computation in module.computations.values():
        computation.users_of(computation.root)


def read_in_a_row(dump: ModuleDump) -> None:
    for _, module in dump.read_all():
        full_graph(module)


def measure(dump: ModuleDump) -> list[str]:
    """The table's row for one dump."""
    ratios, xla_seconds, characters = [], 0.0, 0
    for snapshot in dump.snapshots:
        text = snapshot.path.read_text(encoding="utf-8", errors="replace")
        xla = seconds(lambda text=text: _hlo.hlo_module_from_text(text))
        ours = seconds(lambda text=text: full_graph(parse_module(text)))
        ratios.append(xla / ours)
        xla_seconds += xla
        characters += len(text)
    whole = seconds(lambda: read_in_a_row(dump))
    largest = max(dump.snapshots, key=lambda snapshot: snapshot.path.stat().st_size)
    tracemalloc.start()
    full_graph(largest.read())
    peak_of_largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    read_in_a_row(dump)
    peak_of_all = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return [
        dump.name,
        f"{len(dump.snapshots)}",
        f"{characters / 1e6:.0f}",
        f"{characters / 1e6 / xla_seconds:.0f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}",
        f"{xla_seconds / whole:.2f}",
        f"{peak_of_all / peak_of_largest:.2f}",
    ]


def folders(paths: list[str], stack: ExitStack) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield path
            continue
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        yield folder


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    table = Table("module", "snapshots", "MB", "XLA MB/s", "median", "least", "in a row", "memory")
    with ExitStack() as stack:
        for folder in folders(sys.argv[1:], stack):
            for dump in read_dump(folder).modules:
                table.add_row(*measure(dump))
    console = Console()
    console.print(table)
    console.print(
        "median, least: XLA's time by ours, snapshot by snapshot; in a row: by the whole dump's; "
        "memory: peak of all in a row by that of the largest snapshot alone"
    )
    console.print(
        f"Python {platform.python_version()}, jaxlib {version.__version__}, "
        f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.platform(terse=True)}"
    )


if __name__ == "__main__":
    main()
