"""Damaged input of every kind, driven through the command line: each ends in a report or in a line.

A case is drawn by its kind, its number and ``--fuzz-seed``, so that it can be tried again alone::

    pytest tests/test_fuzz_damaged.py --fuzz-seed 7 --fuzz-only text:123
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fuzz_cases import (
    FORMATS,
    FRAMES,
    MEMORY_BYTES,
    Drawn,
    files_written,
    hold,
    peak_bytes,
    run_inside,
)
from hlo_audit.manifest import MANIFEST_NAME, Manifest
from hlo_audit.rules import ALL_RULES

SHARES = {
    "text": 40,
    "dump": 16,
    "manifest": 7,
    "baseline": 9,
    "report": 8,
    "config": 8,
    "proto": 7,
    "gzip": 5,
}
"""Kind of input -> how many of a hundred cases are of it."""

BATCH = 50

# -- what real input looks like


@cache
def example_texts() -> list[str]:
    """The modules of the rules' examples: small, and each shows something to a rule."""
    return [text for rule in ALL_RULES for e in rule.examples for text in e.hlo.values()]


MANIFEST = Manifest(
    program="train",
    mode="explicit",
    layout="straight",
    platform="tpu",
    topology="v5p:2x2x1",
    mesh={"fsdp": 4},
    settings={"embed": 512, "rate": 0.001, "tied": False, "dtype": "bfloat16"},
    xla_flags={"xla_some_flag": "true"},
    versions={"python": "3.11.7", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": None},
    module="jit_step",
    devices=4,
    lower_seconds=0.5,
    compile_seconds=1.5,
    digest="0" * 64,
).to_json()

CONFIG = """\
# What is audited here.
programs = ["step.txt", { name = "other.txt", max = { relayout-copy = ["0", "64MiB"] } }]
modes = ["auto", "explicit"]
topologies = ["v5p:2x2x1"]
meshes = [{ fsdp = 4 }, { data = 2, fsdp = -1 }]
platform = "tpu"
select = ["relayout-copy", "HLA003"]
ignore = ['HLA001']
rule-options = { relayout-copy = { min_bytes = 0 } }
strict = true
settings = { embed = 512, "dtype" = "bfloat16" }
xla-flags = { xla_some_flag = true }

[max]
relayout-copy = 3
missed-reduce-scatter = "64MiB"

[[programs]]
name = "third.txt"
ignore = ["HLA001"]

[[suppress]]
rule = "relayout-copy"
op-name = "jit(step)/*"
source = "train.py*"
reason = \"\"\"it is read
in this order\"\"\"
"""


@pytest.fixture(scope="session")
def snapshots(dumps: Callable[[str], Path]) -> list[bytes]:
    """Real snapshots of all backends and versions, the smaller ones."""
    folders = [dumps(name) for name in ("lm_head_versions", "lm_head_platforms", "forms_versions")]
    files = [path for folder in folders for path in folder.rglob("*module_*.txt")]
    heads = ((path, path.read_bytes()) for path in sorted(files)[::9])
    return [data for _, data in heads if data.startswith(b"HloModule") and len(data) < 50_000]


@cache
def protos() -> list[bytes]:
    """Serialised modules, as XLA writes them."""
    try:
        hlo = importlib.import_module("jaxlib._hlo")
    except ImportError:  # jaxlib before 0.8
        hlo = importlib.import_module("jaxlib._jax")
    return [
        hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
        for text in (
            FRAMES,
            "HloModule m\n\nENTRY %e {\n  ROOT %v = f32[4,4]{1,0} constant({...})\n}\n",
            "HloModule m\n\nENTRY %e {\n  ROOT %v = (f32[2], s32[]) parameter(0)\n}\n",
        )
    ]


# -- damage

NUMBERS = [
    *("0", "-1", "-0", "1", "2147483648", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551616", "1e999", "-1e999", "NaN", "inf", "0x10", "1_000", "٣", "²", "1.5"),
    "9" * 400,
    "9" * 5_000,
]

NAMES = [
    "",
    " ",
    "\x00",
    "\x1b[31mred\x1b[0m",
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "\u202edesrever",
    "\ud800",
    "\r\n::error::owned",
    "\u2028",
    "</script>",
    "]]>",
    "../../../etc/passwd",
    "/etc/passwd",
    "%",
    "{}",
    '"',
    "\\",
    "é" * 200,
    "a" * 20_000,
]

OPCODES = [
    *("add", "copy", "transpose", "bitcast", "reshape", "broadcast", "convert", "dot", "fusion"),
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "while"),
    *("call", "conditional", "custom-call", "tuple", "get-tuple-element", "parameter", "constant"),
    *("dynamic-slice", "slice", "concatenate", "convolution", "partition-id", "iota", "copy-start"),
    *("copy-done", "all-reduce-start", "all-gather-start", "async-start", "async-done", "sort"),
    *("optimization-barrier", "dynamic-update-slice", "reduce", "gather", "scatter", "rng", "x-y"),
]

SHAPES = [
    *(
        "f32[]",
        "f32[0]",
        "f32[512,512]{1,0}",
        "f32[512,512]{0,1}",
        "pred[]",
        "s32[4]{0}",
        "token[]",
    ),
    *("()", "(f32[2]{0}, (s32[], token[]))", "bf16[8,128]{1,0:T(8,128)(2,1)}", "u4[7]", "f99[3]"),
    *("f32[-1]", "f32[2,?]", "f32[<=4]", "f32[4]{7}", "f32[4,4]{1,1}", "f32[4]{0:T(0)}", "b()"),
    *("f32[99999999999999999999]", "f32[4294967296,4294967296]", "opaque[]", "f32[1,1,1,1,1,1,1]"),
    f"f32[{','.join(['9' * 18] * 20)}]",
    f"f32[{','.join(['2'] * 300)}]",
]

ATTRIBUTES = [
    *("dimensions={1,0}", "dimensions={}", "dimensions={-1}", "dimensions={9}", "dimensions={0,0}"),
    *("index=0", "index=-1", "index=99", "replica_groups={}", "replica_groups={{}}"),
    *("replica_groups={{0,1},{2,3}}", "replica_groups=[2,2]<=[4]", "replica_groups=[0,4]<=[4]"),
    *("replica_groups=[2,2]<=[2,2]T(1,0)", "replica_groups=[3,3]<=[4]", "to_apply=%main"),
    *("calls=%main", "calls=%nobody", "body=%main", "condition=%main", "sharding={replicated}"),
    *("sharding={devices=[4]<=[4]}", "sharding={devices=[2,2]<=[4]}", "sharding={{},{}}"),
    *(
        "lhs_contracting_dims={0}",
        "rhs_contracting_dims={1}",
        "lhs_batch_dims={5}",
        "slice={[0:1]}",
    ),
    *(
        "dynamic_slice_sizes={1,1}",
        "source_target_pairs={{0,1},{1,0}}",
        "source_target_pairs={{0}}",
    ),
    *('custom_call_target="Sharding"', 'custom_call_target="tpu_custom_call"', "channel_id=-1"),
    *(
        'metadata={op_name="a/b" source_file="train.py" source_line=2}',
        "metadata={stack_frame_id=1}",
    ),
    *(
        'backend_config={"window_config":{"estimated_cycles":"7"}}',
        'backend_config={"known_trip_count"',
    ),
    *("backend_config={{{}}}", "direction=LT", "kind=kOutput", "control-predecessors={%main}"),
    'metadata={source_line=99999999999999999999 source_file="train.py"}',
]

_TOKENS = {
    "name": re.compile(r"%[\w.-]+"),
    "number": re.compile(r"(?<![\w.])-?\d+(?![\w.])"),
    "shape": re.compile(r"[a-z]\w*\[[^\]\n]*\](?:\{[^}\n]*\})?"),
    "opcode": re.compile(r"(?<= )[a-z][a-z0-9-]*(?=\()"),
    "operands": re.compile(r"(?<=[a-z])\([^()\n]*\)"),
    "attribute": re.compile(r"(?<=, )[a-z][\w-]*=[^ \n]*"),
    "string": re.compile(r'"[^"\n]*"'),
    "word": re.compile(r"\w+"),
}


def replace_token(text: str, rng: random.Random) -> str:
    """Another name, number, shape, opcode, operand list or attribute in the place of one."""
    kind = rng.choice(list(_TOKENS))
    found = list(_TOKENS[kind].finditer(text))
    if not found:
        return text
    where = rng.choice(found)
    pool = {
        "number": NUMBERS,
        "shape": SHAPES,
        "opcode": OPCODES,
        "attribute": ATTRIBUTES,
        "string": [f'"{name}"' for name in NAMES],
        "operands": ["()", "(,)", "(%p, %p, %p)", "(f32[] %x)", "(%p#0)", "(%p#7, /*index=1*/%p)"],
    }.get(kind, NAMES)
    other = rng.choice(pool) if rng.random() < 0.6 else rng.choice(found)[0]
    return text[: where.start()] + other + text[where.end() :]


def add_attribute(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    number = rng.randrange(len(lines))
    lines[number] += ", " + rng.choice(ATTRIBUTES)
    return "\n".join(lines)


def move_lines(text: str, rng: random.Random) -> str:
    """Lines lost, doubled, many times over, swapped or moved."""
    lines = text.split("\n")
    start = rng.randrange(len(lines))
    block = lines[start : start + rng.choice([1, 1, 1, 2, 5, 30])]
    match rng.randrange(4):
        case 0:
            del lines[start : start + len(block)]
        case 1:
            lines[start:start] = block * rng.choice([1, 1, 2, 200])
        case 2:
            other = rng.randrange(len(lines))
            lines[start], lines[other] = lines[other], lines[start]
        case _:
            del lines[start : start + len(block)]
            where = rng.randrange(len(lines) + 1)
            lines[where:where] = block
    return "\n".join(lines)


def nest(text: str, rng: random.Random) -> str:
    """Brackets thousands deep, closed or not."""
    opening, closing = rng.choice([*map(tuple, ("{}", "()", "[]", '""', "({", "/*", "<>"))])
    depth = rng.choice([3, 100, 2_000, 30_000])
    inserted = opening * depth + closing * rng.choice([depth, depth, 0, depth - 1])
    return insert(text, inserted, rng)


def lengthen(text: str, rng: random.Random) -> str:
    """A very long line, name, list or space."""
    piece = rng.choice(
        [" ", "a", "%p, ", "1,", "/* */", '\\"', "\n", "\t\n", "#1", "{0},", ", x=1"]
    )
    return insert(text, piece * rng.choice([10, 1_000, 60_000]), rng)


def insert(text: str, piece: str, rng: random.Random) -> str:
    where = rng.randrange(len(text) + 1)
    return text[:where] + piece + text[where:]


def insert_odd(text: str, rng: random.Random) -> str:
    return insert(
        text, rng.choice([*NAMES, *NUMBERS, "\x00" * 5, "\r", "\ufeff", "}", "{", '"']), rng
    )


def cut(text: str, rng: random.Random) -> str:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    match rng.randrange(4):
        case 0:
            return text[:start]
        case 1:
            return text[start:]
        case 2:
            return text[:start] + text[end:]
        case _:
            return text[:end] + text[start:]


def line_ends(text: str, rng: random.Random) -> str:
    return text.replace("\n", rng.choice(["\r\n", "\r", "\n\n", "\u2028", "\v", " \n", "\n  ", ""]))


CHANGES = [replace_token] * 8 + [add_attribute] * 3 + [move_lines] * 4
CHANGES += [nest, lengthen, insert_odd, insert_odd, cut, cut, line_ends]


def damaged(text: str, rng: random.Random, others: Sequence[str] = ()) -> str:
    """``text`` after one to six changes; sometimes one of ``others`` is spliced in."""
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 6])):
        if not text:
            break
        text = rng.choice(CHANGES)(text, rng)[: 2 << 20]
    if others and rng.random() < 0.05:
        other = rng.choice(others)
        text = text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other)) :]
    return text


def encoded(text: str, rng: random.Random) -> bytes:
    """Most often UTF-8."""
    encoding = "utf-8" if rng.random() < 0.93 else rng.choice(["utf-16", "utf-32", "utf-8-sig"])
    data = text.encode(encoding, "surrogatepass")
    return flipped(data, rng) if rng.random() < 0.07 else data


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 8, 100]) if data else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1 << 63, 10**400, 1.5, 1e308, "", "a", [], {}, [[]], {"": {}}),
    *(NAMES[3], NAMES[6], "a" * 20_000, ["x"] * 500, {"rule": 1}, float("nan"), "HLA002"),
]


def damaged_json(data: Any, rng: random.Random) -> Any:
    """Plain data with a value of it replaced, lost, doubled or renamed."""
    data = json.loads(json.dumps(data))
    for _ in range(rng.choice([1, 1, 2, 4])):
        node = data
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.25:
                match rng.randrange(4):
                    case 0:
                        del node[key]
                    case 1 if isinstance(node, dict):
                        node[rng.choice(NAMES)] = node[key]
                    case 2 if isinstance(node, list):
                        node.append(node[key])
                    case _:
                        node[key] = rng.choice(ODD_VALUES)
                break
            node = node[key]
    return data


def damaged_json_bytes(data: Any, rng: random.Random) -> bytes:
    """Sound JSON of damaged data, or damaged JSON."""
    if rng.random() < 0.65:
        with contextlib.suppress(ValueError):  # a number of too many digits
            return json.dumps(damaged_json(data, rng)).encode("utf-8", "surrogatepass")
    return encoded(damaged(json.dumps(data, indent=1), rng), rng)


# -- the kinds


def check_options(rng: random.Random) -> list[str]:
    options = ["--format", rng.choice(FORMATS)]
    options += ["--verbose"] if rng.random() < 0.3 else []
    options += ["--max", "relayout-copy=0", "--max", "HLA004=1MiB"] if rng.random() < 0.4 else []
    options += ["--rule-option", "relayout-copy.min_bytes=0"] if rng.random() < 0.4 else []
    return options


def some_text(rng: random.Random, snapshots: Sequence[bytes]) -> str:
    """A sound module, most often a small one."""
    at = rng.random()
    if at < 0.55:
        return rng.choice(example_texts())
    if at < 0.85:
        return FRAMES
    return rng.choice(snapshots).decode()


def draw_text(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    text = damaged(some_text(rng, snapshots), rng, example_texts())
    name = rng.choice(["step.txt", "step.hlo", "module_0001.m.after_codegen.txt"])
    return Drawn({name: encoded(text, rng)}, ["check", name, *check_options(rng)])


STAGES = (
    "before_optimizations",
    "0001.one.after_pipeline-start.before_algsimp",
    "0002.one.after_algsimp.before_dce",
    "0003.two.after_dce.before_layout-assignment",
    "0004.three.after_layout-assignment.before_fusion",
    "after_optimizations",
    "after_codegen",
)


def draw_dump(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    """A module through the passes, some of the snapshots damaged."""
    files: dict[str, bytes] = {}
    for folder in ("a", "b"):
        text = some_text(rng, snapshots[:40])
        for stage in STAGES:
            if rng.random() < 0.85:
                if rng.random() < 0.4:
                    text = damaged(text, rng)
                ending = rng.choice([".txt"] * 8 + [".hlo", ".TXT", ".txt.bak", "", ".txt.txt"])
                number = rng.choice(
                    ["0001"] * 15
                    + ["0002", "99999999999999999999", "1", "\u0660\u0660\u0660\u0661"]
                )
                files[f"{folder}/module_{number}.jit_step.{stage}{ending}"] = encoded(text, rng)
        if rng.random() < 0.5:
            files[f"{folder}/{MANIFEST_NAME}"] = json.dumps(MANIFEST).encode()
    commands = [
        ["check", "a", *check_options(rng)],
        ["check", "a", "--introduced-by", *check_options(rng)],
        ["check", "a", "--against", "b", *check_options(rng)],
        ["passes", "a", "--format", rng.choice(["text", "json"]), "--all"],
        ["passes", "a", "--finding", "1", "--format", rng.choice(["text", "json"])],
        ["passes", "a", "--instruction", rng.choice(["copy", "p", "t", "x.1"])],
        ["diff", "a", "b", "--format", rng.choice(["text", "json"])],
        ["diff", "a", "b", "--force", "--format", rng.choice(["text", "json"])],
    ]
    return Drawn(files, rng.choice(commands))


def sound_dump() -> dict[str, bytes]:
    return {
        f"dump/module_0001.jit_step.{stage}.txt": FRAMES.encode()
        for stage in (STAGES[0], *STAGES[3:])
    }


def draw_manifest(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    files = sound_dump() | {f"dump/{MANIFEST_NAME}": damaged_json_bytes(MANIFEST, rng)}
    commands = [
        ["check", "dump", *check_options(rng)],
        ["passes", "dump"],
        ["diff", "dump", "dump"],
    ]
    return Drawn(files, rng.choice(commands))


@cache
def sound_baseline() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(written(["--baseline", "file", "--update-baseline"]))
    return found


@cache
def sound_report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(written(["--format", "json", "--output", "file"]))
    return found


def written(options: Sequence[str]) -> str:
    """What a check of the module above writes into ``file``."""
    Path("step.txt").write_text(FRAMES)
    outcome = run_inside(["check", "step.txt", *options])
    assert outcome.code == 0, outcome.stderr
    return Path("file").read_text()


def draw_baseline(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    files = {"step.txt": FRAMES.encode(), "b.json": damaged_json_bytes(sound_baseline(), rng)}
    options = ["--update-baseline"] if rng.random() < 0.3 else []
    options += ["--strict"] if rng.random() < 0.3 else []
    return Drawn(
        files, ["check", "step.txt", "--baseline", "b.json", *options, *check_options(rng)]
    )


def draw_report(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    files = {"step.txt": FRAMES.encode(), "r.json": damaged_json_bytes(sound_report(), rng)}
    commands = [["check", "step.txt", "--against", "r.json", *check_options(rng)]] * 4
    commands += [["diff", "step.txt", "r.json"], ["check", "r.json"]]
    return Drawn(files, rng.choice(commands))


def draw_config(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    text = CONFIG
    if rng.random() < 0.7:  # one that can be read, so that its values are
        head, _, rest = text.partition("\n")
        lines = rest.split("\n")
        number = rng.randrange(len(lines))
        key, equals, _ = lines[number].partition(" = ")
        odd = ['""', "0", "-1", "1e400", "[]", "{}", "true", "1979-05-27", '"\\u0000"', "[[1]]"]
        odd += ["[{}]", "[1, 'a']", f"{'[' * 500}{']' * 500}", f'"{"a" * 9_000}"', '"\\U000e0001"']
        odd += [f"{'9' * 4_400}", "{ a = { b = { c = 1 } } }", '"x:y"', '"../x"', '"lm-head"']
        if equals and rng.random() < 0.8:
            lines[number] = f"{key} = {rng.choice(odd)}"
        else:
            lines[number] = (
                f"{rng.choice(['x', 'max', 'a.b.c', '[x]', 'programs'])} = {rng.choice(odd)}"
            )
        text = "\n".join([head, *lines])
    else:
        text = damaged(text, rng)
    files = dict.fromkeys(("step.txt", "other.txt", "third.txt"), FRAMES.encode())
    if rng.random() < 0.3:
        table = re.sub(r"^\[(\[?)", r"[\1tool.hlo-audit.", text, flags=re.MULTILINE)
        files["pyproject.toml"] = encoded(f"[tool.hlo-audit]\n{table}", rng)
    else:
        files["hlo-audit.toml"] = encoded(text, rng)
    # What is not there would be a program to compile.
    commands = [
        ["check", "step.txt", *check_options(rng)],
        ["doctor"],
        ["diff", "step.txt", "other.txt"],
    ]
    return Drawn(files, rng.choice(commands))


def draw_proto(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    data = rng.choice(protos())
    match rng.randrange(5):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:  # other schemas: some field of some type
            fields = [
                bytes([rng.randrange(1, 128)]) + rng.randbytes(rng.randrange(9)) for _ in range(9)
            ]
            data = rng.choice([b"\x0a\x03abc", b"", b"\x0a"]) + b"".join(fields)
        case 2:
            where = rng.randrange(len(data))
            huge = rng.choice(
                [b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01", b"\x80\x80\x80\x80\x10"]
            )
            data = data[:where] + huge + data[where + rng.randrange(6) :]
        case 3:
            data = rng.choice([FRAMES.encode(), gzip.compress(data), rng.randbytes(500), data * 2])
        case _:
            data = flipped(data, rng)
    if rng.random() < 0.2:
        return Drawn({"step.hlo.pb.gz": gzip.compress(data)}, ["check", "step.hlo.pb.gz"])
    return Drawn({"step.hlo.pb": data}, ["check", "step.hlo.pb", *check_options(rng)])


def draw_gzip(rng: random.Random, snapshots: Sequence[bytes]) -> Drawn:
    data = gzip.compress(some_text(rng, snapshots).encode(), rng.choice([1, 9]))
    match rng.randrange(6):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:
            data += rng.choice([b"garbage", b"\0" * 50, rng.randbytes(30), data, data[:20]])
        case 2:
            data = flipped(data, rng)
        case 3:
            data = data[:12] + rng.randbytes(rng.randrange(40)) + data[12:]
        case 4:
            data = gzip.compress(gzip.compress(data))
        case _:
            text = b"HloModule m\n" + rng.choice([b" ", b"\n", b"{", b'"', b"\0"]) * rng.choice(
                [10**6, 10**6]
            )
            data = gzip.compress(text)
    name = rng.choice(["step.txt.gz", "step.hlo.gz", "module_0001.m.after_codegen.txt.gz"])
    return Drawn({name: data}, ["check", name, *check_options(rng)])


DRAW: dict[str, Callable[[random.Random, Sequence[bytes]], Drawn]] = {
    "text": draw_text,
    "dump": draw_dump,
    "manifest": draw_manifest,
    "baseline": draw_baseline,
    "report": draw_report,
    "config": draw_config,
    "proto": draw_proto,
    "gzip": draw_gzip,
}


# -- trying the cases


def batches(cases: int) -> list[tuple[str, int, int]]:
    """Kind, first and last number of the cases that one test tries."""
    found = []
    for kind, share in SHARES.items():
        count = -(-cases * share // 100)
        found += [(kind, n, min(n + BATCH, count)) for n in range(0, count, BATCH)]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "batch" in metafunc.fixturenames:
        only = metafunc.config.getoption("--fuzz-only")
        chosen = batches(metafunc.config.getoption("--fuzz-cases"))
        if only:
            kind, _, number = only.partition(":")
            chosen = [(kind, int(number), int(number) + 1)]
        metafunc.parametrize("batch", chosen, ids=[f"{kind}:{start}" for kind, start, _ in chosen])


def test_damaged_input_ends_in_a_report_or_in_a_line(
    batch: tuple[str, int, int],
    empty_repository: Path,
    snapshots: list[bytes],
    pytestconfig: pytest.Config,
) -> None:
    kind, first, end = batch
    seed = pytestconfig.getoption("--fuzz-seed")
    only = pytestconfig.getoption("--fuzz-only")
    memory_before = peak_bytes()
    failures: list[str] = []
    for number in range(first, end):
        rng = random.Random(f"{kind}:{number}:{seed}")
        drawn = DRAW[kind](rng, snapshots)
        with files_written(drawn.files, kept=bool(only)):
            outcome = run_inside(drawn.arguments)
        try:
            hold(drawn, outcome)
            grown = peak_bytes() - memory_before
            assert grown < MEMORY_BYTES, f"the memory grew by {grown:,} bytes"
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            again = (
                f"pytest tests/test_fuzz_damaged.py --fuzz-seed {seed} --fuzz-only {kind}:{number}"
            )
            command = f"hlo-audit {' '.join(drawn.arguments)}"
            failures.append(f"{again}\n{command}\n{str(error)[:2_000]}")
    assert not failures, f"{len(failures)} cases, in {empty_repository}:\n\n" + "\n\n".join(
        failures[:5]
    )
