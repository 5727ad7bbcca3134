"""Collectives that only a reshape asked for: it merges a sharded axis into a contracted one.

## What it reports

An `all-gather`, `all-to-all` or `collective-permute` of the final module, synchronous or not, that
moves the elements of a value on their way to or from a reshape which merges axes of which another
than the first is sharded, where the merged axis is then contracted or reduced. One finding for
each collective. It names the reshape's source line, the merge, the bytes that each chip sends
(`wire_bytes`), and those it would send for the sums over the chips if the axes were contracted one
by one (`reduction_wire_bytes`).

Where such a reshape is traced on an explicit mesh without a reshard before it, jax refuses the
program. That is reported as a finding too, in place of an error: its `kind` is `refused`.

## Why it matters

Elements that lie side by side in the merged axis lie on different chips: no sharding of the result
says so, and the compiler gathers, or reshuffles, the whole activation before it can go on. A
contraction over the separate axes needs a sum of its small result instead. In a model with
hyper-connections that made the whole training step 1.13 times as fast.

## What is left out

- Merges whose first axis is the sharded one: the merged axis is sharded the same way.
- Collectives that the program itself asks for (`all_gather`, `all_to_all`, `ppermute` in a
  `shard_map`).
- Gathers of parameters that the step updates, or whose axis the batch is sharded over too: weights
  of fully sharded training are gathered for use anyway.
- Values smaller than `min_bytes` (64 KiB).

## Limits

A collective's own op_name may be that of any neighbour, so the reshape is found in the module
before optimisation, by the sizes it merges. Shards that had to be padded are not followed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hlo_audit.errors import RefusedReshapeError
from hlo_audit.hlo import Instruction, Module, Shape, SourceLocation, Value
from hlo_audit.hlo.attributes import is_number, parse_integers
from hlo_audit.hlo.dataflow import MOVES, Site, follow, origin, trace_back
from hlo_audit.rule import (
    MOST_FRAMES,
    Agreement,
    Context,
    Example,
    Finding,
    LayoutFix,
    Rule,
    Target,
    Watch,
)

_GATHERS = ("all-gather", "all-gather-start")
_EXCHANGES = ("all-to-all", "collective-permute", "collective-permute-start")

# What hands on all elements of a value, whatever shape they take and whatever chip they go to.
_REARRANGES = (
    MOVES
    | {"convert", "reshape", "transpose", "all-to-all"}
    | {"collective-permute", "collective-permute-start", "collective-permute-done"}
)
# What hands on an axis: an element of the result depends on one place of it alone.
_KEEPS_AXES = MOVES | {
    *("convert", "negate", "multiply", "divide", "add", "subtract", "maximum", "minimum", "select"),
    *("exponential", "log", "logistic", "tanh", "rsqrt", "sqrt", "abs", "power", "compare", "and"),
    *("custom-call", "broadcast"),
}
# What jax calls the collectives that a program itself asks for.
_USER_WRITTEN = frozenset(
    {
        *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all"),
        *("ragged_all_to_all", "ppermute", "pshuffle", "pbroadcast"),
    }
)


class Merge(NamedTuple):
    """A reshape that merges axes, and what is made of the merged one.

    Attributes:
        reshape: in the module before optimisation.
        sizes: its operand's axes but those of size 1.
        first: the place of the first of the merged ones among them.
        end: the place behind the last.
        sums: what remains of each contraction or reduction of the merged axis.
    """

    reshape: Instruction
    sizes: tuple[int, ...]
    first: int
    end: int
    sums: tuple[Shape, ...]

    @property
    def factors(self) -> tuple[int, ...]:
        return self.sizes[self.first : self.end]


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each collective that a merge forces."""
    before = context.module("before_optimizations")
    merges = list(_contracted_merges(before))
    if not merges:
        return
    updated = {alias.parameter_number for alias in module.input_output_aliases}
    for collective in module.instructions:
        is_gather = collective.opcode in _GATHERS
        if not (is_gather or collective.opcode in _EXCHANGES) or _is_asked_for(collective):
            continue
        result = _result(collective)
        if result is None or result.shape.logical_bytes < context.option("min_bytes"):
            continue
        if is_gather and _is_weight_gather(module, collective, updated):
            continue
        forced = _forced_by(module, collective, result, merges)
        if forced is not None:
            yield _finding(module, context, before, collective, result, *forced)


# -- a program that jax refuses


def check_refused(refused: RefusedReshapeError) -> Iterator[Finding]:
    """Yield a finding where the refused reshape merges axes of which a later one is sharded."""
    # float32[2,16,4,64@(a,b)]: the size of each axis, and the mesh axes that it is sharded over.
    axes = re.sub(r"\([^()]*\)", "", refused.operand.partition("[")[2].rstrip("]")).split(",")
    kept = [axis.partition("@") for axis in axes if axis.partition("@")[0] != "1"]
    if not all(is_number(size) for size, _, _ in kept):
        return
    sizes = [int(size) for size, _, _ in kept]
    group = _merged_group(sizes, [size for size in refused.sizes if size != 1])
    if group is None or not any(sharded for _, sharded, _ in kept[group[0] + 1 : group[1]]):
        return
    factors = sizes[slice(*group)]
    stack = [SourceLocation(*frame) for frame in refused.frames]
    to = ",".join(map(str, refused.sizes))
    yield Finding(
        rule=RULE.code,
        slug=RULE.slug,
        severity="warning",
        message=f"a reshape from {refused.operand} to [{to}] merges axes "
        f"({' x '.join(map(str, factors))}) of which another than the first is sharded; "
        "on an explicit mesh jax refuses it: reshard before it, or contract the axes apart",
        instruction="reshape",
        computation="",
        opcode="reshape",
        shape=refused.operand,
        bytes=None,
        executions=None,
        estimated_cycles=None,
        op_name="reshape",
        source=stack[0] if stack else None,
        stack=tuple(stack[1 : 1 + MOST_FRAMES]),
        details={
            "kind": "refused",
            "reshape_from": refused.operand,
            "reshape_to": f"[{to}]",
            "merged": factors,
        },
        fixes=("split",),
    )


# -- the merges of the program


def _contracted_merges(before: Module) -> Iterator[Merge]:
    for reshape in before.instructions:
        if reshape.opcode != "reshape" or not reshape.operands:
            continue
        operand = reshape.operand_values[0].shape
        if operand.is_tuple or -1 in operand.dimensions + reshape.shape.dimensions:
            continue
        sizes, merged = _without_ones(operand), _without_ones(reshape.shape)
        group = _merged_group(sizes, merged)
        if group is not None:
            sums = tuple(_sums(before, reshape, _axis_of(reshape.shape, group[0])))
            if sums:
                yield Merge(reshape, sizes, *group, sums)


def _merged_group(sizes: Sequence[int], merged: Sequence[int]) -> tuple[int, int] | None:
    """The sizes, from one place up to another, that are one in ``merged``, where all others are as
    they were; ``None`` where it is not so."""
    count = len(sizes) - len(merged) + 1
    for first in range(len(merged) if count > 1 else 0):
        end = first + count
        joined = (*sizes[:first], math.prod(sizes[first:end]), *sizes[end:])
        if joined == tuple(merged):
            return first, end
    return None


def _axis_of(shape: Shape, place: int) -> int:
    """The dimension that is the one at ``place`` among those that are not of size 1."""
    return [d for d, size in enumerate(shape.dimensions) if size != 1][place]


def _sums(before: Module, reshape: Instruction, axis: int) -> Iterator[Shape]:
    """What is left of each contraction or reduction over ``axis`` of the reshape's result."""
    followed = follow(before, Value(reshape), through=_KEEPS_AXES)
    size = reshape.shape.dimensions[axis]
    for user, operand, _ in followed.uses if followed else ():
        if operand >= len(user.operands):
            continue
        shape = user.operand_values[operand].shape
        if user.opcode == "dot" and operand < 2:
            side = ("lhs", "rhs")[operand]
            over = _integers(user, f"{side}_contracting_dims")
        elif user.opcode == "reduce":
            over = _integers(user, "dimensions")
        else:
            continue
        if any(d < shape.rank and shape.dimensions[d] == size for d in over):
            yield user.shape.elements[0] if user.shape.is_tuple else user.shape


def _integers(instruction: Instruction, attribute: str) -> tuple[int, ...]:
    try:
        return parse_integers(instruction.attributes.get(attribute, ""))
    except ValueError:
        return ()


# -- the collectives of the final module


def _is_asked_for(collective: Instruction) -> bool:
    return collective.op_name.rpartition("/")[2].partition("[")[0] in _USER_WRITTEN


def _result(collective: Instruction) -> Value | None:
    """The array that a collective gives: of an asynchronous one, that of its end."""
    if not collective.opcode.endswith("-start"):
        return None if collective.shape.is_tuple else Value(collective)
    ends = [user for user in collective.users if user.opcode.endswith("-done")]
    return Value(ends[0]) if ends and not ends[0].shape.is_tuple else None


def _is_weight_gather(module: Module, gather: Instruction, updated: set[int]) -> bool:
    """Whether what is gathered is a parameter that fully sharded training keeps in pieces."""
    source = origin(module, Site(gather.operand_values[0]), through=MOVES | {"convert"})
    parameter = source.instruction
    if parameter.opcode != "parameter" or parameter.computation is not module.entry:
        return False
    if parameter.parameter_number in updated:
        return True
    own = _shards(parameter)
    if own and own[0] > 1 and len([cuts for cuts in own if cuts > 1]) > 1:
        return False  # an activation: it is sharded over the batch as well
    members = _group_size(module, gather)
    return any(
        shards[0] == members
        for other in module.entry.parameters
        if other is not parameter and other.parameter_number not in updated
        if (shards := _shards(other))
    )


def _shards(parameter: Instruction) -> tuple[int, ...]:
    sharding = parameter.sharding
    return sharding.shards[: parameter.shape.rank] if sharding else ()


def _group_size(module: Module, collective: Instruction) -> int:
    groups = collective.replica_groups(module.device_count)
    return max(map(len, groups), default=1) if groups else module.device_count


def _forced_by(
    module: Module, collective: Instruction, result: Value, merges: Sequence[Merge]
) -> tuple[Merge, tuple[int, ...]] | None:
    """The merge that asks for ``collective``, and the sizes in which a chip holds what is merged.

    On its way the value of the collective takes both shapes of the merge's reshape.
    """
    forward = follow(module, result, through=_REARRANGES)
    if forward is None:
        return None
    shapes = [value.shape for value in forward.values]
    gathered: int | None = None
    if collective.opcode in _GATHERS:
        dimensions = _integers(collective, "dimensions")
        if len(dimensions) != 1 or dimensions[0] >= result.shape.rank:
            return None
        gathered = dimensions[0]
    else:
        operand = Site(collective.operand_values[0])
        shapes += [site.value.shape for site in trace_back(module, operand, through=_REARRANGES)]
    forms = {_without_ones(shape) for shape in shapes if not shape.is_tuple}
    for merge in merges:
        for sizes in forms:
            if not _is_shard_of(sizes, merge, whole=gathered is not None):
                continue
            merged = math.prod(sizes[merge.first : merge.end])
            joined = (*sizes[: merge.first], merged, *sizes[merge.end :])
            if joined not in forms:
                continue
            if gathered is None or _gathers_within(result.shape, gathered, sizes, joined, merge):
                return merge, sizes
    return None


def _is_shard_of(sizes: Sequence[int], merge: Merge, *, whole: bool) -> bool:
    """Whether ``sizes`` are those of a shard of what ``merge`` reshapes: with all of the merged
    axes, or with all of the first and a part of another."""
    if len(sizes) != len(merge.sizes):
        return False
    if any(size % part for size, part in zip(merge.sizes, sizes, strict=True)):
        return False
    factors = tuple(sizes[merge.first : merge.end])
    if whole:
        return factors == merge.factors
    return factors[0] == merge.factors[0] and factors[1:] != merge.factors[1:]


def _gathers_within(
    shape: Shape, dimension: int, sizes: Sequence[int], joined: Sequence[int], merge: Merge
) -> bool:
    """Whether a gather along ``dimension`` makes a merged axis whole, other than by its first."""
    if shape.dimensions[dimension] == 1:
        return False
    place = sum(size != 1 for size in shape.dimensions[:dimension])
    own = _without_ones(shape)
    if own == tuple(sizes):
        return merge.first < place < merge.end
    return own == tuple(joined) and place == merge.first  # of the merged axis, to be split again


def _without_ones(shape: Shape) -> tuple[int, ...]:
    return tuple(size for size in shape.dimensions if size != 1)


# -- the finding


def _finding(
    module: Module,
    context: Context,
    before: Module,
    collective: Instruction,
    result: Value,
    merge: Merge,
    sizes: tuple[int, ...],
) -> Finding:
    kind = collective.opcode.removesuffix("-start")
    members = _group_size(module, collective)
    shape = result.shape.without_layout
    wire_bytes = _wire_bytes(kind, result.shape.logical_bytes, members)
    whole, merged = merge.reshape.operand_values[0].shape, merge.reshape.shape
    # A chip adds up what it holds of the batch, once for each way in which the sum is used.
    held = math.prod((*sizes[: merge.first], *sizes[merge.end :]))
    share = held * math.prod(merge.factors) / max(math.prod(merge.sizes), 1)
    over = members
    if kind != "all-gather":
        over = math.prod(merge.factors) // math.prod(sizes[merge.first : merge.end])
    sums_bytes = sum(int(one.logical_bytes * share) for one in merge.sums)
    reduction_wire_bytes = 2 * sums_bytes * (over - 1) // over
    tensor = _tensor(module, collective)
    factors = " x ".join(map(str, merge.factors))
    return context.finding(
        module,
        collective,
        f"{kind} {shape} of {tensor}: a reshape to {merged.without_layout} merges axes "
        f"({factors}) of which another than the first is sharded, and contracts them",
        bytes=result.shape.logical_bytes,
        details={
            "kind": kind,
            "tensor": tensor,
            "reshape_from": whole.without_layout,
            "reshape_to": merged.without_layout,
            "merged": list(merge.factors),
            "chips": over,
            "wire_bytes": wire_bytes,
            "reduction_wire_bytes": reduction_wire_bytes,
        },
        fixes=("split",),
        charged_to=(merge.reshape,),
        charged_in=before,
        shape=shape,
    )


def _wire_bytes(kind: str, result_bytes: int, members: int) -> int:
    """The bytes that each chip sends: of a ring's all-gather and of an all-to-all all but its own
    share, of a permute everything."""
    if kind == "collective-permute" or members < 1:
        return result_bytes
    return result_bytes * (members - 1) // members


def _tensor(module: Module, collective: Instruction) -> str:
    """What is gathered, in words: the argument, or the operation that makes it."""
    source = origin(module, Site(collective.operand_values[0]), through=_REARRANGES).instruction
    if source.opcode == "parameter" and source.computation is module.entry:
        return f"parameter {source.op_name or source.parameter_number}"
    return f"the result of {source.op_name.rpartition('/')[2] or source.opcode}"


_BEFORE = """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: bf16[2,64,4,512], w: f32[2048,8]) -> bf16[2,64,8] {
  %x = bf16[2,64,4,512]{3,2,1,0} parameter(0)
  %w = bf16[2048,8]{1,0} parameter(1)
  %reshape.1 = bf16[2,64,2048]{2,1,0} reshape(%x)
  ROOT %dot.1 = bf16[2,64,8]{2,1,0} dot(%reshape.1, %w), lhs_contracting_dims={2}, \
rhs_contracting_dims={0}
}
"""
_HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[2,64,4,128], w: bf16[2048,8]) -> bf16[2,64,8] {
  %x = bf16[2,64,4,128]{3,2,1,0:T(4,128)(2,1)} parameter(0)
  %w = bf16[2048,8]{1,0:T(8,128)(2,1)} parameter(1)
"""
_DOT = """\
  ROOT %dot.1 = bf16[2,64,8]{2,1,0:T(8,128)(2,1)} dot(%reshape.1, %w), lhs_contracting_dims={2}, \
rhs_contracting_dims={0}
}
"""
_GATHER = """\
  %all-gather.1 = bf16[2,64,4,512]{3,2,1,0:T(4,128)(2,1)} all-gather(%x), \
replica_groups={{0,1,2,3}}, dimensions={3}"""
_RESHAPE = """\
  %reshape.1 = bf16[2,64,2048]{2,1,0:T(8,128)(2,1)} reshape(%all-gather.1)
"""

EXAMPLES = (
    Example(
        "an activation is gathered, to merge its last two axes and contract them",
        1,
        {"before_optimizations": _BEFORE, "final": _HEAD + _GATHER + "\n" + _RESHAPE + _DOT},
        {"all-gather": 1},
    ),
    Example(
        "a shard of the merged axis is made of parts from all chips",
        1,
        {
            "before_optimizations": _BEFORE,
            "final": """\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[2,64,4,128], w: bf16[512,8]) -> bf16[2,64,8] {
  %x = bf16[2,64,4,128]{3,2,1,0:T(4,128)(2,1)} parameter(0)
  %w = bf16[512,8]{1,0:T(8,128)(2,1)} parameter(1)
  %all-to-all.1 = bf16[2,64,4,128]{3,2,1,0:T(4,128)(2,1)} all-to-all(%x), \
replica_groups={{0,1,2,3}}, dimensions={2}
  %reshape.1 = bf16[2,64,512]{2,1,0:T(8,128)(2,1)} reshape(%all-to-all.1)
"""
            + _DOT,
        },
        {"all-to-all": 1},
    ),
    Example(
        "near miss: the program asks for the gather",
        0,
        {
            "before_optimizations": _BEFORE,
            "final": _HEAD
            + _GATHER
            + ', metadata={op_name="jit(step)/shard_map/all_gather"}\n'
            + _RESHAPE
            + _DOT,
        },
    ),
    Example(
        "near miss: a weight that the step updates is gathered for use",
        0,
        {
            "before_optimizations": _BEFORE,
            "final": _HEAD.replace(
                "num_partitions=4",
                "num_partitions=4, input_output_alias={ {}: (0, {}, may-alias) }",
            )
            + _GATHER
            + "\n"
            + _RESHAPE
            + _DOT,
        },
    ),
    Example(
        "near miss: the first of the merged axes is gathered, which the merge does not ask for",
        0,
        {
            "before_optimizations": _BEFORE,
            "final": """\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[2,64,1,512], w: bf16[2048,8]) -> bf16[2,64,8] {
  %x = bf16[2,64,1,512]{3,2,1,0:T(4,128)(2,1)} parameter(0)
  %w = bf16[2048,8]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.1 = bf16[2,64,4,512]{3,2,1,0:T(4,128)(2,1)} all-gather(%x), \
replica_groups={{0,1,2,3}}, dimensions={2}
"""
            + _RESHAPE
            + _DOT,
        },
    ),
    Example(
        "near miss: the merged axis is not contracted",
        0,
        {
            "before_optimizations": """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: bf16[2,64,4,512]) -> bf16[2,64,2048] {
  %x = bf16[2,64,4,512]{3,2,1,0} parameter(0)
  ROOT %reshape.1 = bf16[2,64,2048]{2,1,0} reshape(%x)
}
""",
            "final": _HEAD
            + _GATHER
            + "\n"
            + _RESHAPE.replace("%reshape.1", "ROOT %reshape.1")
            + "}\n",
        },
    ),
    Example(
        "near miss: a gather that no reshape needs",
        0,
        {
            "before_optimizations": """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: bf16[2,64,4,512], w: bf16[4,512,8]) -> bf16[2,64,8] {
  %x = bf16[2,64,4,512]{3,2,1,0} parameter(0)
  %w = bf16[4,512,8]{2,1,0} parameter(1)
  ROOT %dot.1 = bf16[2,64,8]{2,1,0} dot(%x, %w), lhs_contracting_dims={2,3}, \
rhs_contracting_dims={0,1}
}
""",
            "final": _HEAD + _GATHER + "\n" + _RESHAPE + _DOT,
        },
    ),
)

_TARGETS = ("v6e:2x4",)

FIXES = (
    LayoutFix(
        name="split",
        change="keep the axes apart through the norm and the contraction (one einsum over both), "
        "with the weights stored in the same axes: the sums over the chips are all that is left",
        model="mhc",
        before="flat",
        numerics=(
            Agreement("exact", 0.0, "both sum the same products, modulo the reshape"),
            Agreement(
                "random",
                2e-5,
                "a sum over two axes may be taken in another order than that over one, in float32",
            ),
        ),
        cost="turns the checkpoint: norm scale and projections are reshaped",
        clears=(Target("auto", _TARGETS), Target("explicit", _TARGETS)),
    ),
)

RULE = Rule(
    code="HLA005",
    slug="flatten-gather",
    summary="collectives forced by a reshape that merges a sharded axis into a contraction",
    documentation=__doc__,
    reads=("final", "before_optimizations"),
    check=check,
    tally="kind",
    examples=EXAMPLES,
    fixes=FIXES,
    options={"min_bytes": 64 << 10},
    check_refused=check_refused,
    watch=Watch(
        counts="collectives that a merge of a sharded axis forces",
        phases=("partitioned", "laid-out"),
        elsewhere="a program that is not partitioned yet has no collectives of its own",
        opcodes=frozenset({*_GATHERS, *_EXCHANGES}),
    ),
)
