"""How fast the parser reads dumps, against XLA's own parser on the same text in the same run.

    python benchmarks/parser.py [--rounds N] [--every N] DUMP...

A DUMP is a dump folder, or an archive of one (``tests/data/*.tar.xz``). For each: every snapshot
parsed into its graph, one by one; and the whole dump read in a row, where what two snapshots on
end have in common is read once. The graph is every computation and instruction with its shape and
its operands resolved; "touched" adds what is left for the first look at a computation: the objects
of its instructions, and the users of each. Times are of the processor, not of the clock, and taken
in turns; a ratio over 1 is in our favour. Needs a jaxlib that reads the text.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
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


def seconds(run: Callable[[], object]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def touch(module: Module) -> None:
    """Make what the parser leaves for later: every instruction, with its operands and users."""
    for instruction in module.instructions:
        _ = instruction.operands, instruction.users


def read_in_a_row(dump: ModuleDump, then: Callable[[Module], object]) -> None:
    for _, module in dump.read_all():
        then(module)


def measure(dump: ModuleDump, rounds: int, every: int) -> list[str]:
    """The table's row for one dump; of one by one, each ``every``-th snapshot is taken, and XLA's
    time for all is reckoned by their size."""
    graph_ratios, touched_ratios, xla_seconds, characters = [], [], 0.0, 0
    for snapshot in dump.snapshots[::every]:
        text = snapshot.path.read_text(encoding="utf-8", errors="replace")
        # The fastest of a few, taken in turns: what else the machine does slows both alike.
        times = [
            (
                seconds(lambda text=text: _hlo.hlo_module_from_text(text)),
                seconds(lambda text=text: parse_module(text)),
                seconds(lambda text=text: touch(parse_module(text))),
            )
            for _ in range(rounds)
        ]
        xla, graph, touched = (min(column) for column in zip(*times, strict=True))
        graph_ratios.append(xla / graph)
        touched_ratios.append(xla / touched)
        xla_seconds += xla
        characters += len(text)
    whole = sum(snapshot.path.stat().st_size for snapshot in dump.snapshots)
    xla_of_all = xla_seconds * whole / characters
    in_a_row = min(seconds(lambda: read_in_a_row(dump, len_of)) for _ in range(rounds))
    in_a_row_touched = min(seconds(lambda: read_in_a_row(dump, touch)) for _ in range(rounds))
    largest = max(dump.snapshots, key=lambda snapshot: snapshot.path.stat().st_size)
    tracemalloc.start()
    touch(largest.read())
    peak_of_largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    read_in_a_row(dump, touch)
    peak_of_all = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return [
        dump.name,
        f"{len(dump.snapshots)}",
        f"{whole / 1e6:.0f}",
        f"{characters / 1e6 / xla_seconds:.0f}",
        f"{statistics.median(graph_ratios):.2f}",
        f"{min(graph_ratios):.2f}",
        f"{statistics.median(touched_ratios):.2f}",
        f"{xla_of_all / in_a_row:.1f}",
        f"{xla_of_all / in_a_row_touched:.1f}",
        f"{peak_of_all / peak_of_largest:.2f}",
    ]


def len_of(module: Module) -> int:
    return len(module.computations)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dumps", nargs="+", metavar="DUMP")
    parser.add_argument("--rounds", type=int, default=5, help="the fastest of N counts")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="one by one, take each N-th snapshot only"
    )
    arguments = parser.parse_args()
    table = Table(title="XLA's time by ours")
    one_by_one = ("graph", "least", "touched")
    for column in ("module", "snapshots", "MB", "XLA MB/s", *one_by_one, "row", "row touched"):
        table.add_column(column, no_wrap=column == "module")
    table.add_column("memory")
    with ExitStack() as stack:
        for folder in folders(arguments.dumps, stack):
            for dump in read_dump(folder).modules:
                table.add_row(*measure(dump, arguments.rounds, arguments.every))
    console = Console(width=110)
    console.print(table)
    console.print(
        "graph, touched: medians over the snapshots, one by one; least: the least of graph; "
        "row: the whole dump in a row; memory: its peak by that of the largest snapshot alone"
    )
    console.print(
        f"Python {platform.python_version()}, jaxlib {version.__version__}, "
        f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.platform(terse=True)}"
    )


if __name__ == "__main__":
    main()
