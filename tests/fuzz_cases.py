"""Cases of the fuzz suite: the files and the command line of each, and what all of them must keep.

An exit code of 0, 1 or 2; one printable line for each program that could not be audited, and
nothing else on standard error; a report that can be read again; and bounds of time and memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import HealthCheck, seed, settings

import hlo_audit
from hlo_audit.cli import main

SECONDS = 3.0
SECONDS_PER_MB = 12.0
"""CPU time that a case may take, and more for each megabyte of its input. Real snapshots take a
tenth of that; the machine may be busy, and a case reads its input up to four times."""

MEMORY_BYTES = 600 << 20
"""By how much the memory of this process may have grown at any time: no input is larger than 2 MB,
but for a bomb, which may unpack to 64 MiB."""

LONGEST_LINE = 4_000


@dataclass(frozen=True)
class Drawn:
    """A case: the files to write, and the command line to run beside them."""

    files: dict[str, bytes]
    arguments: list[str]


FRAMES = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[512,512]{1,0})->f32[512,512]{0,1}}

FileNames
1 "train.py"
2 "/venv/lib/python3.11/site-packages/flax/linen.py"

FunctionNames
1 "step"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused (q: f32[512,512]) -> f32[512,512] {
  %q = f32[512,512]{1,0} parameter(0)
  ROOT %t = f32[512,512]{0,1} transpose(%q), dimensions={1,0}, metadata={op_name="jit(step)/t" stack_frame_id=2}
}

%body (s: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %s = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%s), index=1
  %f = f32[512,512]{0,1} fusion(%x), kind=kLoop, calls=%fused
  %k = f32[512,512]{1,0} copy(%f), backend_config={"window_config":{"estimated_cycles":"700"}}
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %r = (s32[], f32[512,512]{1,0}) tuple(%j, %k)
}

%cond (s: (s32[], f32[512,512])) -> pred[] {
  %s = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(10)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0), sharding={devices=[2,2]<=[4]}, metadata={op_name="w" stack_frame_id=1}
  %z = s32[] constant(0)
  %in = (s32[], f32[512,512]{1,0}) tuple(%z, %p)
  %w = (s32[], f32[512,512]{1,0}) while(%in), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %o = f32[512,512]{1,0} get-tuple-element(%w), index=1
  %g = f32[512,512]{1,0} all-reduce(%o), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=%fused
  ROOT %copy = f32[512,512]{0,1} copy(%g), metadata={op_name="jit(step)/out" stack_frame_id=1}
}
"""  # noqa: E501
"""A module that shows something to most rules and readers."""

FORMATS = ("text", "json", "sarif", "junit", "markdown", "github")


# -- driving a case


@dataclass(frozen=True)
class Outcome:
    code: object
    stdout: str
    stderr: str
    seconds: float


def run_inside(arguments: Sequence[str]) -> Outcome:
    """Run the command line in this process, as its entry point does."""
    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    ]
    before, saved = sys.argv, (sys.stdout, sys.stderr)
    sys.argv = ["hlo-audit", *arguments]
    sys.stdout, sys.stderr = streams
    started = time.process_time()
    code: object = None
    try:
        main()
    except SystemExit as exit_:
        code = exit_.code or 0
    finally:
        sys.argv, (sys.stdout, sys.stderr) = before, saved
    seconds = time.process_time() - started
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    return Outcome(code, out, err, seconds)


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    folder = Path(hlo_audit.__file__).parent
    schema = json.loads((folder / name).read_text())
    return jsonschema.Draft202012Validator(schema)


_SCHEMAS = {
    "check": "report/schema.json",
    "passes": "report/passes.schema.json",
    "diff": "report/diff.schema.json",
}


def hold(drawn: Drawn, outcome: Outcome) -> None:
    """What every case must keep."""
    assert outcome.code in (0, 1, 2), f"exit code {outcome.code}\n{outcome.stderr[-3000:]}"
    for text in (outcome.stdout, outcome.stderr):
        odd = {char for char in text if not char.isprintable() and char != "\n"}
        assert not odd, f"not printable: {odd}"
    assert "Traceback" not in outcome.stderr
    lines = outcome.stderr.splitlines()
    assert all(len(line) <= LONGEST_LINE for line in lines), "a line is too long"
    errors = [line for line in lines if line.startswith("hlo-audit: error: ")]
    if outcome.code == 2:
        assert errors, outcome.stderr
        assert len(errors) <= len(drawn.files)
    damaged_names = [name.rpartition("/")[2] for name in drawn.files]
    for line in errors:
        words = line.removeprefix("hlo-audit: error: ")
        assert words.strip()
        named = any(name in words for name in (*damaged_names, "dump", " a", " b", "a/", "b/"))
        assert named or drawn.arguments[0] in ("passes", "diff"), f"names no file: {words}"
    _hold_form(drawn.arguments, outcome)
    size = sum(map(len, drawn.files.values()))
    allowed = SECONDS + SECONDS_PER_MB * size / 1e6
    assert outcome.seconds < allowed, f"{outcome.seconds:.1f} s for {size:,} bytes"


def _hold_form(arguments: Sequence[str], outcome: Outcome) -> None:
    if not outcome.stdout or "--format" not in arguments:
        return
    format_ = arguments[arguments.index("--format") + 1]
    if format_ == "json":
        report = json.loads(outcome.stdout)
        validator(_SCHEMAS[arguments[0]]).validate(report)
    elif format_ == "sarif":
        assert json.loads(outcome.stdout)["version"] == "2.1.0"
    elif format_ == "junit":
        assert ElementTree.fromstring(outcome.stdout).tag == "testsuites"
    elif format_ == "github":
        assert all(line.startswith("::") for line in outcome.stdout.splitlines())


@contextlib.contextmanager
def files_written(files: dict[str, bytes], *, kept: bool) -> Iterator[None]:
    for name, data in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    yield
    if not kept:
        for name in files:
            Path(name).unlink(missing_ok=True)
        for folder in {name.partition("/")[0] for name in files if "/" in name}:
            shutil.rmtree(folder)


def peak_bytes() -> int:
    """The most memory that this process has taken so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_Test = TypeVar("_Test", bound=Callable[..., None])


def tried(config: pytest.Config, share: int) -> Callable[[_Test], _Test]:
    """Have hypothesis try a property on examples drawn by ``--fuzz-seed``.

    Args:
        share: on how many, for each hundred of ``--fuzz-cases``.
    """
    count = max(1, config.getoption("--fuzz-cases") * share // 100)

    def decorate(test: _Test) -> _Test:
        # What is slow to draw is not what is tested; the oracle has a bound of time of its own. The
        # seed alone says what is drawn, so nothing is kept of one run for the next.
        drawing = settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return seed(config.getoption("--fuzz-seed"))(drawing(test))

    return decorate
