"""How the audit grows: with the size of a dump, of a module, of a matrix, and with the cores.

    python benchmarks/scale.py [--rounds N] [--only NAME]... DUMP

DUMP is a dump folder of one module, or an archive of one (``tests/data/*.tar.xz``); what is larger
is made of it. Prints one table:

folder
    ``check`` of folders of copies of the dump, up to ``--folder-bytes``: the snapshots that rules
    read, and with ``--introduced-by`` all of them. Time by size is 1.00 where it is linear; memory
    is held against one copy alone.
module
    ``check`` of one module that holds the final one of the dump many times over, up to
    ``--module-bytes``: half of it, and all of it.
matrix
    ``check`` of ``--programs`` compiled programs, some of them after others: on one core with one
    job, and on two with two.
audit
    Reading and judging a matrix of dumps, by compiling what they are of.
rules
    Reading with all rules on, against XLA's parser: the audit on the three snapshots that it reads,
    the timeline on every one, each beside reading the same and no more; and the audit on every one
    as well, which is what a whole dump costs who has it audited.

Times are medians of N rounds taken in turns; memory is the peak of the resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from jaxlib._hlo import hlo_module_from_text
from rich.console import Console
from rich.table import Table

from hlo_audit.dump import ModuleDump, Snapshot, read_dump
from hlo_audit.hlo.collector import no_collection
from hlo_audit.models import ALL_MODELS
from hlo_audit.passes import Passes
from hlo_audit.program import find_subjects
from hlo_audit.program_audit import audit_module_dump
from hlo_audit.rules import ALL_RULES
from hlo_audit.timeline import make_timeline

Row = tuple[str, str, str, str]
"""What was measured, on how much, the seconds or the memory, and the ratio."""

Item = TypeVar("Item")

_MODEL_SIZES = {"batch": 16, "seq": 16}
_TOPOLOGIES = (
    *("v4:2x2x1", "v5p:2x2x1", "v5e:2x2", "v6e:2x2", "v4:2x2x2", "v5p:2x2x2", "v5e:2x4", "v6e:2x4"),
    *("v5p:2x2x4", "v6e:4x4"),
)
_TOPOLOGIES_AT_ONCE = 2
_SAMPLE = 40


class Run(NamedTuple):
    """What a command took: seconds of the clock and of the processors, and the peak in bytes of
    the resident set of the largest of its processes."""

    wall: float
    processor: float
    peak_bytes: int


def command(*arguments: str | Path, cores: int | None = None) -> Run:
    """Run ``hlo-audit`` with its output thrown away, on so many cores.

    Raises:
        SystemExit: where it exits with 2 or more, with what it said.
    """

    def pin() -> None:
        if cores is not None:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        # The pid is waited for by hand: only so are the processor times those of this one alone.
        process = subprocess.Popen(
            [sys.executable, "-m", "hlo_audit", *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=said,
            preexec_fn=pin,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode > 1:
            said.seek(0)
            sys.exit(f"{' '.join(map(str, arguments))}\n{said.read()}")
    peak_bytes = used.ru_maxrss * 1024  # Linux counts in KiB
    return Run(time.perf_counter() - start, used.ru_utime + used.ru_stime, peak_bytes)


def reading(path: Path, *options: str) -> Callable[[], Run]:
    return lambda: command("check", path, *options)


def in_turns(rounds: int, runs: Mapping[str, Callable[[], Run]]) -> dict[str, Run]:
    """The medians of each."""
    found: dict[str, list[Run]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {
        name: Run(
            statistics.median(one.wall for one in ones),
            statistics.median(one.processor for one in ones),
            max(one.peak_bytes for one in ones),
        )
        for name, ones in found.items()
    }


def start_seconds(rounds: int, scratch: Path) -> float:
    """Processor time of a check of next to nothing: it is taken off the others."""
    path = scratch / "nothing.txt"
    path.write_text(
        "HloModule nothing\n\nENTRY %e (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"
    )
    return in_turns(rounds, {"start": reading(path)})["start"].processor


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


# -- what is measured


def folder(dump: ModuleDump, rounds: int, most_bytes: int, scratch: Path) -> Iterator[Row]:
    start = start_seconds(rounds, scratch)
    size = sum(path.stat().st_size for path in files_of(dump))
    most = max(4, most_bytes // size)
    counts = [1, most // 2, most]
    folders = {count: scratch / f"folder-{count}" for count in counts}
    for count, target in folders.items():
        copy_often(dump, count, target)
    for label, options in (("check", ()), ("check --introduced-by", ("--introduced-by",))):
        found = in_turns(
            rounds, {str(count): reading(path, *options) for count, path in folders.items()}
        )
        for count in counts[1:]:
            run, one = found[str(count)], found["1"]
            yield (
                f"folder: {label}",
                f"{count} modules, {megabytes(count * size)}",
                f"{run.processor:.1f} s, peak {megabytes(run.peak_bytes)}",
                f"time {(run.processor - start) / (one.processor - start) / count:.2f} by size, "
                f"memory {run.peak_bytes / one.peak_bytes:.2f} of one's",
            )
    for target in folders.values():
        shutil.rmtree(target)


def module(dump: ModuleDump, rounds: int, most_bytes: int, scratch: Path) -> Iterator[Row]:
    start = start_seconds(rounds, scratch)
    paths = {}
    for part in (2, 1):
        paths[part] = scratch / f"module_0000.large_{part}.after_codegen.txt"
        write_large_module(dump, most_bytes // part, paths[part])
    found = in_turns(rounds, {str(part): reading(path) for part, path in paths.items()})
    sizes = {part: path.stat().st_size for part, path in paths.items()}
    for part in (2, 1):
        run = found[str(part)]
        growth = (run.processor - start) / (found["2"].processor - start)
        by_size = growth / (sizes[part] / sizes[2])
        yield (
            "module: check",
            megabytes(sizes[part]),
            f"{run.processor:.1f} s, peak {megabytes(run.peak_bytes)}",
            f"time {by_size:.2f} by size, {run.peak_bytes / sizes[part]:.1f} bytes a byte",
        )
    for path in paths.values():
        path.unlink()


def matrix(programs: int, scratch: Path) -> Iterator[Row]:
    # All layouts in both modes on chip after chip: programs of about the same size.
    models = find_subjects(["lm-head"], ALL_MODELS, layouts=["all"])
    topologies = _TOPOLOGIES[: max(1, programs // len(models))]
    config = scratch / "hlo-audit.toml"
    sizes = ", ".join(f"{name} = {value}" for name, value in _MODEL_SIZES.items())
    common = ("check", "--config", config, "--no-cache", "--exit-zero", "--format", "json")
    one, two = [], []
    # A part on one core, then on two: what else slows the machine for minutes slows both.
    for first in range(0, len(topologies), _TOPOLOGIES_AT_ONCE):
        part = topologies[first : first + _TOPOLOGIES_AT_ONCE]
        config.write_text(
            f'programs = ["lm-head"]\nlayouts = ["all"]\ntopologies = {json.dumps(part)}\n'
            f"settings = {{ {sizes} }}\n"
        )
        one.append(command(*common, "--jobs", "1", cores=1))
        two.append(command(*common, "--jobs", "2", cores=2))
    of = f"{len(models) * len(topologies)} programs in {len(one)} runs"
    on_one, on_two = (sum(run.wall for run in runs) for runs in (one, two))
    yield ("matrix: one core", of, f"{on_one:.1f} s", "")
    yield (
        "matrix: two cores",
        of,
        f"{on_two:.1f} s, peak of a process {megabytes(max(run.peak_bytes for run in two))}",
        f"{on_one / on_two:.2f} times the speed of one",
    )


def audit(rounds: int, scratch: Path) -> Iterator[Row]:
    sizes = [part for name, value in _MODEL_SIZES.items() for part in ("--set", f"{name}={value}")]
    cache = scratch / "cache"
    model = ("check", "lm-head", *sizes, "--exit-zero", "--format", "json", "--cache-dir", cache)
    compiled = command(*model)
    dumps = scratch / "dumps"
    command("lower", "lm-head", *sizes, "-o", dumps, "--cache-dir", cache)
    run = in_turns(rounds, {"audit": reading(dumps)})["audit"]
    seconds = run.processor - start_seconds(rounds, scratch)
    yield (
        "audit: read and judge",
        "lm-head, both modes",
        f"{seconds:.2f} s beside {compiled.processor:.1f} s",
        f"{100 * seconds / compiled.processor:.1f} % of the compile",
    )


def rules(dump: ModuleDump, rounds: int) -> Iterator[Row]:
    judged = list(dump.audited.values())
    few, all_ = f"{len(judged)} snapshots", f"{len(dump.snapshots)} snapshots"
    texts = _texts(judged)
    sample, share = _sample(dump.snapshots)
    if share < 1:
        all_ += f", XLA's time from {len(sample)}"
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        of_few = seconds(lambda: each(hlo_module_from_text, texts))
        of_all = seconds(lambda: each(hlo_module_from_text, sample)) / share
        read_few = seconds(lambda: each(Snapshot.read, judged))
        read_all = seconds(lambda: each(id, dump.read_all()))
        audited = seconds(lambda: audit_module_dump("", dump, None, ALL_RULES, {}))
        counted = seconds(lambda: count(dump))
        for what, ratio in {
            ("rules: reading alone", few): of_few / read_few,
            ("rules: audit", few): of_few / audited,
            ("rules: reading alone", all_): of_all / read_all,
            ("rules: timeline of all passes", all_): of_all / counted,
            ("rules: audit of the whole dump", all_): of_all / audited,
        }.items():
            ratios.setdefault(what, []).append(ratio)
    for (what, of), found in ratios.items():
        yield (what, of, "", f"{statistics.median(found):.1f} times as fast as XLA's parser")


@no_collection()  # as the commands that count
def count(dump: ModuleDump) -> None:
    make_timeline(Passes(dump), ALL_RULES)


def _texts(snapshots: Sequence[Snapshot]) -> list[str]:
    return [snapshot.path.read_text("utf-8", "replace") for snapshot in snapshots]


def _sample(snapshots: Sequence[Snapshot]) -> tuple[list[str], float]:
    """Some of the texts, and which share of the characters of all they are."""
    texts = _texts(snapshots)
    sample = texts[:: max(1, len(texts) // _SAMPLE)]
    return sample, sum(map(len, sample)) / sum(map(len, texts))


def each(do: Callable[[Item], object], items: Iterable[Item]) -> None:
    for item in items:
        do(item)


def seconds(run: Callable[[], object]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


# -- what is measured on


@contextmanager
def one_dump(path: Path) -> Iterator[ModuleDump]:
    with tempfile.TemporaryDirectory() as scratch:
        target = path
        if not path.is_dir():
            target = Path(scratch)
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
        dumps = read_dump(target).modules
        if len(dumps) != 1:
            sys.exit(f"{path} holds {len(dumps)} modules: give a dump of one")
        yield dumps[0]


def files_of(dump: ModuleDump) -> list[Path]:
    return [snapshot.path for snapshot in dump.snapshots]


def copy_often(dump: ModuleDump, count: int, target: Path) -> None:
    """Write the dump ``count`` times into a folder, as modules of their own."""
    target.mkdir()
    for path in files_of(dump):
        for number in range(count):
            name = re.sub(r"module_\d+", f"module_{number:04}", path.name, count=1)
            shutil.copyfile(path, target / name)


def write_large_module(dump: ModuleDump, least_bytes: int, target: Path) -> None:
    """Write a module of at least so many bytes: its entry calls copies of the final module."""
    if dump.final is None:
        sys.exit(f"{dump.folder} has no final module")
    text = dump.final.path.read_text(encoding="utf-8", errors="replace")
    header, entry = text.split("\nENTRY ", 1)
    header, computations = header.split("\n\n%", 1)
    entry, _, _ = entry.partition("\n}")
    body = f"%{computations}\n{entry}\n}}\n\n"
    name = entry.split(" ", 1)[0]
    parameters = re.findall(r"^  %\S+ = .* parameter\(\d+\).*$", entry, re.MULTILINE)
    operands = ", ".join(line.split()[0] for line in parameters)
    shape = re.search(r"^  ROOT \S+ = (.*?) [\w-]+\(", entry, re.MULTILINE)[1]
    copies = 1 + least_bytes // len(body)
    with target.open("w", encoding="utf-8") as file:
        file.write(f"{header}\n\n")
        for number in range(copies):
            file.write(re.sub(r"%[\w.-]+", rf"\g<0>.copy{number}", body))
        file.write("ENTRY %whole " + entry.split(" ", 1)[1].split("\n", 1)[0] + "\n")
        file.write("\n".join(parameters) + "\n")
        for number in range(copies):
            root = "ROOT " if number == copies - 1 else ""
            called = f"{name}.copy{number}"
            file.write(f"  {root}%call.{number} = {shape} call({operands}), to_apply={called}\n")
        file.write("}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, metavar="DUMP")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder-bytes", type=int, default=10**9)
    parser.add_argument("--module-bytes", type=int, default=250 * 10**6)
    parser.add_argument("--programs", type=int, default=100)
    names = ("folder", "module", "matrix", "audit", "rules")
    parser.add_argument("--only", action="append", choices=names)
    given = parser.parse_args()
    table = Table()
    for column in ("what", "of", "took", "ratio"):
        table.add_column(column)
    with one_dump(given.dump) as dump, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        measures: dict[str, Callable[[], Iterator[Row]]] = {
            "folder": lambda: folder(dump, given.rounds, given.folder_bytes, scratch),
            "module": lambda: module(dump, given.rounds, given.module_bytes, scratch),
            "matrix": lambda: matrix(given.programs, scratch),
            "audit": lambda: audit(given.rounds, scratch),
            "rules": lambda: rules(dump, given.rounds),
        }
        for name, measure in measures.items():
            if not given.only or name in given.only:
                for row in measure():
                    table.add_row(*row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    console = Console(width=130)
    console.print(table)
    console.print(
        f"medians of {given.rounds} rounds; Python {platform.python_version()}, "
        f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.platform(terse=True)}"
    )


if __name__ == "__main__":
    main()
