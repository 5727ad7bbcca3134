"""What stands behind an instruction's operands, read on demand.

Each reader takes the raw text of one attribute and returns data, or raises ``ValueError``; the
properties of :class:`~hlo_audit.hlo.module.Instruction` turn that into ``None``, so that a form
this version does not know never stops an audit.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeVar

from hlo_audit.hlo.scan import PLAIN_ITEM, Unbalanced, end_of_item, split_items

_Read = TypeVar("_Read")

_ATTRIBUTE = re.compile(r"([A-Za-z_][\w.-]*+)\s*+=\s*+(.*)", re.DOTALL)
# How XLA prints nearly all; what does not match is read with care.
_PLAIN_ATTRIBUTE = re.compile(
    rf" ?+([A-Za-z_][\w.-]*+)=(?!\s)({PLAIN_ITEM})(?<!\s)(?=,|\Z)", re.DOTALL
).match
_METADATA = re.compile(
    r'(?<![a-z_])([a-z_]++)=("(?:[^"\\]++|\\.)*+"|\{[^{}]*+\}|[^\s{}"]++)', re.DOTALL
)
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
# A comment that is not closed takes the rest: were it left, each "/*" would be read to the end.
COMMENT = re.compile(r"/\*(?:[^*]++|\*(?!/))*+(?:\*/)?+")
# Attributes longer than this are those of kernels: too large to be kept.
_SHORT = 2000
_BACKEND_CONFIG = ", backend_config={"
_BRACKET = re.compile(r"[(\[{\"]")
# How XLA prints nearly all operands.
_PLAIN_OPERAND = r"(?:/\*index=[0-9]++\*/)?+%([\w.-]++)((?:#[0-9]{1,18})*+)"
_PLAIN_OPERANDS = re.compile(rf"{_PLAIN_OPERAND}(?:, {_PLAIN_OPERAND})*+").fullmatch
_EACH_PLAIN_OPERAND = re.compile(_PLAIN_OPERAND).findall
_COMPUTATION_NAME = re.compile(r"%?([\w.-]++)")
_AXIS = re.compile(r"'([^']*+)'(?::\((\d++)\)(\d++))?")
_AXIS_SIZE = re.compile(r"'([^']*+)'=(\d++)")
_TILE_ASSIGNMENT = re.compile(
    r"\[([\d,]++)\](?:<=\[([\d,]++)\](?:T\(([\d,]++)\))?|((?:\d++,?)++)?)"
)
_MESH_GROUPS = re.compile(
    r"@?mesh\[([^\]]*+)\](?:,\s*+device_ids=\(\[([\d,]++)\](?:T\(([\d,]++)\))?\))?\s*+\{([^{}]*+)\}"
)

CALLING_ATTRIBUTES = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "called_computations",
    "branch_computations",
    "true_computation",
    "false_computation",
    "select",
    "scatter",
)
"""The attributes that name computations."""

_CALLING = re.compile(rf",\s*+(?:{'|'.join(CALLING_ATTRIBUTES)})\s*+=").search

# How XLA prints nearly all calls.
_PLAIN_CALL = re.compile(
    r", (?:kind=\w++, |dimensions=\{[\d,]*+\}, )?(?:calls|to_apply)=%([\w.-]++)(?=,|\Z)"
).match


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where an instruction comes from: a source line, or a frame of the module's tables."""

    op_name: str = ""
    op_type: str = ""
    stack_frame_id: int = 0
    source_file: str = ""
    source_line: int = 0


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a value is spread over devices.

    Attributes:
        kind: ``replicated``, ``maximal``, ``manual``, ``tiled``, ``tuple`` or ``unknown``.
        shards: for ``tiled``: into how many pieces each dimension is cut.
        text: as printed, with white space folded; two shardings of one module are the same if
            their texts are.
    """

    kind: str
    shards: tuple[int, ...]
    text: str


def _kept_where_short(read: Callable[[str], _Read]) -> Callable[[str], _Read]:
    """Keep what short attributes are read as: most of a snapshot stands in the next one too."""
    read_once = lru_cache(maxsize=1 << 12)(read)

    @wraps(read)
    def read_or_recall(text: str) -> _Read:
        return read_once(text) if len(text) < _SHORT else read(text)

    return read_or_recall


@_kept_where_short
def split_attributes(text: str) -> Mapping[str, str]:
    """Read ``, name=value, name=value`` into raw values; text that cannot be split is kept whole.

    The last of two equal names wins. What is no ``name=value`` goes under ``""``.
    """
    attributes: dict[str, str] = {}
    end = len(text)
    start = end - len(text.lstrip(", \n"))
    while start < end:
        match = _PLAIN_ATTRIBUTE(text, start)
        if match is not None:
            stop = match.end()
        else:
            try:
                stop = end_of_item(text, start, end, ",")
            except Unbalanced:
                return {"": text.strip(", \n")}
            item = text[start:stop].strip()
            match = _ATTRIBUTE.fullmatch(item)
        if match is None:
            attributes[""] = item
        else:
            attributes[match[1]] = match[2]
        start = stop + 1
    return attributes


def unquote(text: str) -> str:
    """The value of a C-escaped string in double quotes; other text as it is."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    body = text[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "01234567":
        return chr(int(code, 8))
    if code[0] == "x" and len(code) == 3:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code)


@lru_cache(maxsize=1 << 15)
def parse_metadata(text: str) -> Metadata:
    """Read ``{op_name="..." stack_frame_id=3}``; unknown keys are left out."""
    values = dict(_METADATA.findall(text))
    return Metadata(
        op_name=unquote(values.get("op_name", "")),
        op_type=unquote(values.get("op_type", "")),
        stack_frame_id=_int_or_zero(values.get("stack_frame_id", "")),
        source_file=unquote(values.get("source_file", "")),
        source_line=_int_or_zero(values.get("source_line", "")),
    )


def _int_or_zero(text: str) -> int:
    return int(text) if is_number(text) else 0


def is_number(text: str) -> bool:
    """Whether ``text`` is a count or an id: digits, and no more of them than an int64 has."""
    return text.isdecimal() and len(text) < 20


def parse_operands(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Read operands in any form: ``f32[8]{0} %a``, ``/*index=5*/%b``, ``%c#1``, ``d``.

    Returns:
        for each, the name, and the index of the tuple element that is read.

    Raises:
        ValueError: for an operand without a name, an index that is none, or an open bracket.
    """
    if _PLAIN_OPERANDS(text):
        return [
            (name, tuple(map(int, index[1:].split("#"))) if index else ())
            for name, index in _EACH_PLAIN_OPERAND(text)
        ]
    text = COMMENT.sub("", text)
    # No bracket: the commas are those between operands, and nothing needs to be balanced.
    items = split_items(text) if _BRACKET.search(text) else text.split(",")
    operands = []
    for item in items:
        # The shape comes first, and may hold a "#" of its own.
        name, *index = item.split()[-1].removeprefix("%").split("#") if item.strip() else [""]
        if not name:
            raise ValueError("an operand is empty")
        if not all(map(is_number, index)):
            raise ValueError(f"#{'#'.join(index)[:40]} is no element of a tuple")
        operands.append((name, tuple(map(int, index))))
    return operands


def parse_computation_names(text: str) -> tuple[str, ...]:
    """Read ``%name`` or ``{%one, %two}``."""
    return tuple(_COMPUTATION_NAME.findall(text))


@_kept_where_short
def called_names(text: str) -> tuple[str, ...]:
    """The names of the computations that an instruction with the attributes ``text`` calls."""
    plain = _PLAIN_CALL(text)
    # A string may look like an attribute; a comment may stand before one.
    may_call = "/*" in text or _CALLING(text, plain.end() if plain else 0)
    if not may_call:
        return (plain[1],) if plain else ()
    attributes = split_attributes(text)
    return tuple(
        name
        for key in CALLING_ATTRIBUTES
        if key in attributes
        for name in parse_computation_names(attributes[key])
    )


def parse_integers(text: str) -> tuple[int, ...]:
    """Read ``{0,2}``, ``[0,2]`` or ``0,2``.

    Raises:
        ValueError: for anything that is no list of counts or ids.
    """
    text = text.strip()
    if text[:1] + text[-1:] in ("{}", "[]"):
        text = text[1:-1]
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if not all(map(is_number, items)):
        raise ValueError("not a list of numbers")
    return tuple(map(int, items))


def find_backend_config(text: str) -> Mapping[str, Any] | None:
    """The backend config among the attributes ``text``; ``None`` where none is there, or not as
    JSON."""
    # XLA prints it last: where what stands before it is whole, what follows is JSON or it is not,
    # and need not be taken apart twice, deep and long as it is.
    before, name, config = text.partition(_BACKEND_CONFIG)
    if name and _is_whole(before) and (found := parse_backend_config("{" + config)) is not None:
        return found
    found_text = split_attributes(text).get("backend_config") if "backend_config" in text else None
    return parse_backend_config(found_text) if found_text else None


def _is_whole(text: str) -> bool:
    try:
        return end_of_item(text, 0, len(text), "") == len(text)
    except Unbalanced:
        return False


def parse_backend_config(text: str) -> Mapping[str, Any] | None:
    """Read a backend config printed as JSON, plain or as an escaped string; else ``None``."""
    try:
        config = json.loads(unquote(text))
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


@lru_cache(maxsize=1 << 8)
def parse_replica_groups(text: str, device_count: int) -> tuple[tuple[int, ...], ...]:
    """Read replica groups in any printed form; ``{}`` is one group of all devices.

    Forms: ``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)``, ``mesh['a'=2,'b'=4] {'b'}``. In the last, the
    devices of one group differ in the axes named in braces only, the first named moving slowest;
    ``mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`` says which devices the mesh is made of.

    Raises:
        ValueError: for any other form.
    """
    text = text.strip()
    if text.startswith("{"):
        _check_sizes([device_count])
        listed = map(parse_integers, split_items(text, 1, len(text) - 1))
        groups = tuple(group for group in listed if group)
        return groups or (tuple(range(device_count)),)
    if text.startswith("["):
        match = _TILE_ASSIGNMENT.fullmatch(text)
        if match is None or match[2] is None:
            raise ValueError(f"replica groups {text!r} are of no known form")
        return _reshape_to_groups(parse_integers(match[1]), _iota_devices(match[2], match[3]))
    match = _MESH_GROUPS.fullmatch(text)
    if match is None:
        raise ValueError(f"replica groups {text!r} are of no known form")
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(match[1])}
    if "device_ids" in match[1]:
        raise ValueError(f"replica groups {text!r} are of no known form")
    places = _mesh_groups(sizes, _AXIS.findall(match[4]))
    if match[2] is None:
        return places
    devices = _iota_devices(match[2], match[3])
    if len(devices) != math.prod(sizes.values()):
        raise ValueError(f"a mesh of {math.prod(sizes.values())} with {len(devices)} devices")
    return tuple(tuple(devices[place] for place in group) for group in places)


def _iota_devices(dimensions_text: str, permutation_text: str | None) -> list[int]:
    """``<=[4,2]T(1,0)``: the devices 0, 1, ... shaped to [4,2], transposed, flattened."""
    dimensions = parse_integers(dimensions_text)
    _check_sizes(dimensions)
    if permutation_text is None:
        return list(range(math.prod(dimensions)))
    permutation = parse_integers(permutation_text)
    if sorted(permutation) != list(range(len(dimensions))):
        raise ValueError(f"{permutation} does not order {len(dimensions)} dimensions")
    strides = [math.prod(dimensions[i + 1 :]) for i in range(len(dimensions))]
    return [
        sum(index * strides[axis] for index, axis in zip(indices, permutation, strict=True))
        for indices in itertools.product(*(range(dimensions[axis]) for axis in permutation))
    ]


def _reshape_to_groups(shape: Sequence[int], devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    if len(shape) != 2 or shape[0] * shape[1] != len(devices):
        raise ValueError(f"replica groups of shape {list(shape)} over {len(devices)} devices")
    size = shape[1]
    return tuple(tuple(devices[i * size : (i + 1) * size]) for i in range(shape[0]))


def _mesh_groups(
    sizes: dict[str, int], grouped: Sequence[tuple[str, str, str]]
) -> tuple[tuple[int, ...], ...]:
    _check_sizes(sizes.values())
    strides, stride = {}, 1
    for name in reversed(sizes):
        strides[name] = stride
        stride *= sizes[name]
    device_count = stride
    # What is grouped, as (stride, size): an axis, or the part of one, 'a':(2)4, that has size 4 and
    # stands after a more major part of size 2.
    parts = []
    for name, major_text, part_text in grouped:
        if name not in sizes:
            raise ValueError(f"the mesh has no axis {name!r}")
        major, part = int(major_text or 1), int(part_text or sizes[name])
        if not major * part or sizes[name] % (major * part):
            raise ValueError(f"sub-axis {name}:({major}){part} does not divide {sizes[name]}")
        parts.append((strides[name] * sizes[name] // (major * part), part))
    offsets = [0]
    for stride, size in parts:
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
        if len(offsets) > device_count:
            raise ValueError("a group has more devices than the mesh")
    firsts = [d for d in range(device_count) if all(d // s % size == 0 for s, size in parts)]
    if len(firsts) * len(offsets) != device_count:
        raise ValueError("the axes of the groups overlap")
    return tuple(tuple(first + offset for offset in offsets) for first in firsts)


def _check_sizes(sizes: Collection[int]) -> None:
    # The largest pod has 9,216 chips; a number far beyond is damage, not a mesh to build in memory.
    if any(size < 1 for size in sizes) or math.prod(sizes) > 1 << 16:
        raise ValueError("no mesh has that many devices")


@lru_cache(maxsize=1 << 12)
def parse_sharding(text: str) -> Sharding:
    """Read a sharding in either printed form; what is not understood is of kind ``unknown``."""
    folded = " ".join(text.split())
    body = folded[1:-1].strip() if folded.startswith("{") and folded.endswith("}") else folded
    if body.startswith("{") or body == "":
        return Sharding("tuple", (), folded)
    try:
        if body.startswith("mesh["):
            return Sharding(*_mesh_sharding(body), folded)
        if body.startswith("devices=["):
            return Sharding(*_tile_sharding(body), folded)
    except ValueError:
        return Sharding("unknown", (), folded)
    for kind in ("replicated", "manual", "maximal"):
        if body.startswith(kind):
            return Sharding(kind, (), folded)
    return Sharding("unknown", (), folded)


def _mesh_sharding(body: str) -> tuple[str, tuple[int, ...]]:
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(body[: body.find("]")])}
    rest = body[body.find("]") + 1 :].lstrip(", ")
    for kind in ("replicated", "manual", "maximal"):
        if rest.startswith(kind):
            return kind, ()
    if not rest.startswith("[") or "]" not in rest:
        return "unknown", ()
    shards = tuple(
        math.prod(
            int(part) if part else sizes.get(name, 1) for name, _, part in _AXIS.findall(axes)
        )
        for axes in split_items(rest, 1, rest.index("]"))
    )
    return ("tiled", shards) if any(count > 1 for count in shards) else ("replicated", ())


def _tile_sharding(body: str) -> tuple[str, tuple[int, ...]]:
    shards = parse_integers(body[len("devices=[") : body.index("]")])
    if "last_tile_dims=" in body:
        subgroups = body[body.index("last_tile_dims=") :].split("{", 1)[-1].split("}", 1)[0]
        shards = shards[: len(shards) - len(subgroups.split(","))]
    elif "last_tile_dim_replicate" in body:
        shards = shards[:-1]
    return ("tiled", shards) if any(count > 1 for count in shards) else ("replicated", ())
