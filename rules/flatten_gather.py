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
- Gathers of parameters that the step updates, or over chips that have each its own part of the
  batch: weights of fully sharded training are gathered for use anyway. A layer's weight that is cut
  from a stack in a loop is such a one, too.
- Values smaller than `min_bytes` (64 KiB).

## Limits

A collective's own op_name may be that of any neighbour, so the reshape is found in the module
before optimisation, by the sizes it merges. Shards that had to be padded are not followed, nor
gathers that libtpu 0.0.23 (jax 0.7) starts and ends by custom calls.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hlo_audit.errors import RefusedReshapeError
from hlo_audit.hlo import Instruction, Module, Shape, SourceLocation, Value
from hlo_audit.hlo.attributes import is_number, parse_integers
from hlo_audit.hlo.dataflow import MOVES, Site, follow, origin_outside_loops, trace_back
from hlo_audit.hlo.module import kept_by_module
from hlo_audit.rule import (
    MOST_FRAMES,
    Agreement,
    Context,
    Example,
    Finding,
    LayoutFix,
    Rule,
    Seen,
    Target,
    Watch,
)

_GATHERS = ("all-gather", "all-gather-start")
_EXCHANGES = ("all-to-all", "collective-permute", "collective-permute-start")
_COLLECTIVES = (*_GATHERS, *_EXCHANGES)

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
# Activations have a handful; a damaged dump must not ask for all choices among a hundred.
_MOST_AXES = 12
# Programs have a handful that merge in different ways; each collective is held against each.
_MOST_MERGES = 200
# From a stack of layers' values to one layer's.
_CUT = frozenset({"convert", "reshape", "slice", "dynamic-slice"})
# What jax calls the collectives that a program itself asks for.
_USER_WRITTEN = frozenset(
    {
        *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all"),
        *("ragged_all_to_all", "ppermute", "pshuffle", "pbroadcast"),
    }
)


Partner = tuple[Value, tuple[int, ...]]


class Merge(NamedTuple):
    """A reshape that merges axes, and what is made of the merged one.

    Attributes:
        reshape: in the module before optimisation.
        sizes: its operand's axes but those of size 1.
        first: the place of the first of the merged ones among them.
        end: the place behind the last.
        sums: what remains of each contraction or reduction of the merged axis.
        partners: what the merged axis is contracted with, each with its contracted dimensions.
    """

    reshape: Instruction
    sizes: tuple[int, ...]
    first: int
    end: int
    sums: tuple[Shape, ...]
    partners: tuple[Partner, ...]

    @property
    def factors(self) -> tuple[int, ...]:
        return self.sizes[self.first : self.end]


class Forced(NamedTuple):
    """A collective that a merge forces.

    Attributes:
        collective: its start, where it is asynchronous.
        result: the array that it gives.
        merge: that asks for it.
        sizes: those in which a chip holds what is merged.
    """

    collective: Instruction
    result: Value
    merge: Merge
    sizes: tuple[int, ...]


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each collective that a merge forces."""
    before = context.module("before_optimizations")
    if not _merges(before):
        return
    for collective in module.of_opcodes(_COLLECTIVES):
        forced = _forced(module, before, collective, context)
        if forced is not None:
            yield _finding(module, context, before, *forced)


def sees(collective: Instruction, context: Context) -> Iterator[Seen]:
    """Yield what a collective gives that a merge forces."""
    before = context.module("before_optimizations")
    forced = _forced(context.module("final"), before, collective, context)
    if forced is not None:
        yield Seen(forced.result.shape)


def _forced(
    module: Module, before: Module, collective: Instruction, context: Context
) -> Forced | None:
    merges = _merges(before)
    if not merges or _is_asked_for(collective):
        return None
    result = _result(collective)
    if result is None or result.shape.logical_bytes < context.option("min_bytes"):
        return None
    forced = _forced_by(module, collective, result, merges)
    if forced is None:
        return None
    of_gather = collective.opcode in _GATHERS
    if of_gather and _weights(before).is_gathered_by(module, collective, forced[0]):
        return None
    return Forced(collective, result, *forced)


@kept_by_module
def _merges(before: Module) -> list[Merge]:
    """The merges of the program that are unlike each other."""
    return _unlike(_contracted_merges(before))


def _unlike(merges: Iterable[Merge]) -> list[Merge]:
    """The first of those that merge alike: any other would be found in its place."""
    unlike: dict[tuple[object, ...], Merge] = {}
    for merge in merges:
        unlike.setdefault((merge.sizes, merge.first, merge.end), merge)
        if len(unlike) == _MOST_MERGES:
            break
    return list(unlike.values())


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
    for reshape in before.of_opcodes(("reshape",)):
        if not reshape.operands:
            continue
        operand = reshape.operand_values[0].shape
        if operand.is_tuple or -1 in operand.dimensions + reshape.shape.dimensions:
            continue
        sizes, merged = _without_ones(operand), _without_ones(reshape.shape)
        group = _merged_group(sizes, merged)
        if group is not None:
            found = list(_sums(before, reshape, _axis_of(reshape.shape, group[0])))
            if found:
                partners = tuple(partner for _, partner in found if partner is not None)
                yield Merge(reshape, sizes, *group, tuple(shape for shape, _ in found), partners)


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


def _sums(
    before: Module, reshape: Instruction, axis: int
) -> Iterator[tuple[Shape, Partner | None]]:
    """What is left of each contraction or reduction over ``axis`` of the reshape's result, and what
    a contraction is with."""
    followed = follow(before, Value(reshape), through=_KEEPS_AXES)
    size = reshape.shape.dimensions[axis]
    for user, operand, _ in followed.uses if followed else ():
        if operand >= len(user.operands):
            continue
        shape = user.operand_values[operand].shape
        partner: Partner | None = None
        if user.opcode == "dot" and operand < 2 and len(user.operands) == 2:
            sides = ("lhs", "rhs")
            over = _integers(user, f"{sides[operand]}_contracting_dims")
            other = 1 - operand
            contracted = _integers(user, f"{sides[other]}_contracting_dims")
            partner = (user.operand_values[other], contracted)
        elif user.opcode == "reduce":
            over = _integers(user, "dimensions")
        else:
            continue
        # What is followed keeps its axes where they are, but for a broadcast to more of them.
        same_axes = shape.dimensions == reshape.shape.dimensions
        if any(d == axis if same_axes else shape.dimensions[d : d + 1] == (size,) for d in over):
            yield user.shape.elements[0] if user.shape.is_tuple else user.shape, partner


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


class _Weights:
    """Tells gathers of weights from others; what many gathers ask is found out once."""

    def __init__(self, before: Module) -> None:
        self._before = before
        self._shards = {one.parameter_number: _shards(one) for one in before.entry.parameters}
        self._with_the_batch: dict[tuple[Instruction, int], set[bool | None]] = {}
        self._cut_by: dict[int, set[int | None]] = {}

    def is_gathered_by(self, module: Module, gather: Instruction, merge: Merge) -> bool:
        """Whether what is gathered is a parameter that fully sharded training keeps in pieces."""
        parameter = _made_of(module, gather, through=MOVES | _CUT)
        if parameter.opcode != "parameter" or parameter.computation is not module.entry:
            return False
        number = parameter.parameter_number
        updated = {alias.parameter_number for alias in module.input_output_aliases}
        if number in updated:
            return True
        # A step that updates nothing tells weights from activations by what is sharded over the
        # batch.
        members = _group_size(module, gather)
        contracted_with = self._contracted_with(merge, members) - {None}
        if contracted_with:
            return True in contracted_with
        # Not every compiler writes shardings into its final module.
        own = self._shards.get(number, ())
        if own and own[0] > 1 and len([cuts for cuts in own if cuts > 1]) > 1:
            return False  # an activation: it is sharded over the batch as well
        return bool(self._cut_in(members) - updated - {number})

    def _contracted_with(self, merge: Merge, members: int) -> set[bool | None]:
        key = (merge.reshape, members)
        if key not in self._with_the_batch:
            self._with_the_batch[key] = {
                _has_the_batch(self._before, *partner, members) for partner in merge.partners
            }
        return self._with_the_batch[key]

    def _cut_in(self, members: int) -> set[int | None]:
        """The parameters whose first axis ``members`` divides into parts."""
        if members not in self._cut_by:
            self._cut_by[members] = {
                number
                for number, cuts in self._shards.items()
                if cuts and cuts[0] > 1 and cuts[0] % members == 0
            }
        return self._cut_by[members]


@kept_by_module
def _weights(before: Module) -> _Weights:
    return _Weights(before)


def _has_the_batch(
    before: Module, partner: Value, contracted: tuple[int, ...], members: int
) -> bool | None:
    """Whether the chips that gather have each its own part of what the merge is contracted with,
    along its first axis; ``None`` where nothing says how it is sharded."""
    for site in trace_back(before, Site(partner), through=MOVES | {"convert"}):
        sharding = site.instruction.sharding
        if sharding is None or sharding.kind not in ("tiled", "replicated"):
            continue
        first = sharding.shards[0] if sharding.shards else 1
        return 0 not in contracted and first > 1 and first % members == 0
    return None


def _shards(parameter: Instruction) -> tuple[int, ...]:
    sharding = parameter.sharding
    return sharding.shards[: parameter.shape.rank] if sharding else ()


def _group_size(module: Module, collective: Instruction) -> int:
    if collective.opcode in _GATHERS:
        result, operand = _result(collective), collective.operand_values[0]
        if result is not None and not operand.shape.is_tuple:
            return max(result.shape.logical_bytes // max(operand.shape.logical_bytes, 1), 1)
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
        for form in forms:
            for sizes in _spread(form, merge.sizes):
                if not _is_shard_of(sizes, merge, whole=gathered is not None):
                    continue
                merged = math.prod(sizes[merge.first : merge.end])
                joined = (*sizes[: merge.first], merged, *sizes[merge.end :])
                if tuple(size for size in joined if size != 1) not in forms:
                    continue
                if gathered is None or _gathers_within(
                    result.shape, gathered, sizes, joined, merge
                ):
                    return merge, sizes
    return None


def _spread(form: Sequence[int], whole: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way in which sizes, those of 1 left out, can be those of a shard of ``whole``: a batch
    is often cut down to one for each chip."""
    if len(whole) > _MOST_AXES:
        return
    for places in itertools.combinations(range(len(whole)), len(form)):
        sizes = dict(zip(places, form, strict=True))
        spread = tuple(sizes.get(place, 1) for place in range(len(whole)))
        if not any(size % part for size, part in zip(whole, spread, strict=True)):
            yield spread


def _is_shard_of(sizes: Sequence[int], merge: Merge, *, whole: bool) -> bool:
    """Whether ``sizes`` are those of a shard of what ``merge`` reshapes: with all of the merged
    axes, or with all of the first and a part of another."""
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
    apart = [axis for axis, size in enumerate(sizes) if size != 1]
    if own == tuple(sizes[axis] for axis in apart):
        return merge.first < apart[place] < merge.end
    merged = [axis for axis, size in enumerate(joined) if size != 1]
    if own == tuple(joined[axis] for axis in merged):  # of the merged axis, to be split again
        return merged[place] == merge.first
    return False


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
    source = _made_of(module, collective, through=_REARRANGES | _CUT)
    if source.opcode != "parameter":
        return f"the result of {source.op_name.rpartition('/')[2] or source.opcode}"
    if source.computation is module.entry:
        return f"parameter {source.op_name or source.parameter_number}"
    return "a value that a loop carries"


def _made_of(module: Module, collective: Instruction, *, through: frozenset[str]) -> Instruction:
    operand = Site(collective.operand_values[0])
    return origin_outside_loops(module, operand, through=through).instruction


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

_LOOP = """\
%body (p: (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64])) -> \
(s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64]) {
  %p = (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[BATCH,64,2048] get-tuple-element(%p), index=1
  %w = bf16[3,4,PART,64] get-tuple-element(%p), index=2
  %constant.1 = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,4,PART,64] \
dynamic-slice(%w, %i, %constant.1, %constant.1, %constant.1), dynamic_slice_sizes={1,4,PART,64}
GATHERED
  %dot.1 = bf16[BATCH,64,64] dot(%x, %reshape.1), lhs_contracting_dims={2}, rhs_contracting_dims={0}
  %broadcast.1 = bf16[BATCH,64,32,64] broadcast(%dot.1), dimensions={0,1,3}
  %reshape.2 = bf16[BATCH,64,2048] reshape(%broadcast.1)
  %constant.2 = s32[] constant(1)
  %add.1 = s32[] add(%i, %constant.2)
  ROOT %tuple.1 = (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64]) tuple(%add.1, %reshape.2, %w)
}

%condition (q: (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64])) -> pred[] {
  %q = (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %constant.3 = s32[] constant(3)
  ROOT %compare.1 = pred[] compare(%j, %constant.3), direction=LT
}

ENTRY %main (x: bf16[BATCH,64,2048], w: f32[3,4,PART,64]) -> bf16[BATCH,64,2048] {
  %x.1 = bf16[BATCH,64,2048] parameter(0), sharding={devices=[4,1,1]<=[4]}
  %w.1 = f32[3,4,PART,64] parameter(1), sharding={devices=[1,1,4,1]<=[4]}
  %convert.1 = bf16[3,4,PART,64] convert(%w.1)
  %constant.4 = s32[] constant(0)
  %tuple.2 = (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64]) tuple(%constant.4, %x.1, %convert.1)
  %while.1 = (s32[], bf16[BATCH,64,2048], bf16[3,4,PART,64]) while(%tuple.2), \
condition=%condition, body=%body
  ROOT %x.2 = bf16[BATCH,64,2048] get-tuple-element(%while.1), index=1
}
"""
_MERGED_LAYER = "  %reshape.1 = bf16[2048,64] reshape(%dynamic-slice.1)"
_GATHERED_LAYER = """\
  %all-gather.1 = bf16[1,4,512,64] all-gather(%dynamic-slice.1), replica_groups={{0,1,2,3}}, \
dimensions={2}
  %reshape.1 = bf16[2048,64] bitcast(%all-gather.1)"""

EXAMPLES = (
    Example(
        "an activation is gathered, to merge its last two axes and contract them",
        1,
        {"before_optimizations": _BEFORE, "final": _HEAD + _GATHER + "\n" + _RESHAPE + _DOT},
        {"all-gather": 1},
    ),
    Example(
        "an activation of which each chip has one element of the batch",
        1,
        {
            "before_optimizations": _BEFORE.replace("num_partitions=4", "num_partitions=8"),
            "final": (_HEAD + _GATHER + "\n" + _RESHAPE + _DOT)
            .replace("num_partitions=4", "num_partitions=8")
            .replace("[2,64,", "[1,64,")
            .replace("{{0,1,2,3}}", "{{0,1,2,3},{4,5,6,7}}"),
        },
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
        "an activation, in a step that updates nothing, beside a weight whose rows are sharded",
        1,
        {
            "before_optimizations": _BEFORE.replace(
                "parameter(1)", "parameter(1), sharding={replicated}"
            )
            .replace("w: bf16[2048,8])", "w: bf16[2048,8], rows: bf16[512,512])")
            .replace(
                "  %reshape.1",
                "  %rows = bf16[512,512] parameter(2), sharding={devices=[4,1]<=[4]}\n  %reshape.1",
            ),
            "final": _HEAD + _GATHER + "\n" + _RESHAPE + _DOT,
        },
        {"all-gather": 1},
    ),
    Example(
        "near miss: a weight, in a step that updates nothing, for a batch on the same chips",
        0,
        {
            "before_optimizations": """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: bf16[8,64,2048], w: bf16[4,512,64]) -> bf16[8,64,64] {
  %x = bf16[8,64,2048] parameter(0), sharding={devices=[4,1,1]<=[4]}
  %w = bf16[4,512,64] parameter(1), sharding={devices=[1,4,1]<=[4]}
  %reshape.1 = bf16[2048,64] reshape(%w)
  ROOT %dot.1 = bf16[8,64,64] dot(%x, %reshape.1), lhs_contracting_dims={2}, \
rhs_contracting_dims={0}
}
""",
            "final": """\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[2,64,2048], w: bf16[4,128,64]) -> bf16[2,64,64] {
  %x = bf16[2,64,2048] parameter(0)
  %w = bf16[4,128,64] parameter(1)
  %all-gather.1 = bf16[4,512,64] all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={1}
  %bitcast.1 = bf16[2048,64] bitcast(%all-gather.1)
  ROOT %dot.1 = bf16[2,64,64] dot(%x, %bitcast.1), lhs_contracting_dims={2}, \
rhs_contracting_dims={0}
}
""",
        },
    ),
    Example(
        "near miss: a weight cut from a stack in a loop, and gathered for use by a layer",
        0,
        {
            "before_optimizations": "HloModule jit_step, num_partitions=4\n\n"
            + _LOOP.replace("BATCH", "8").replace("PART", "512").replace("GATHERED", _MERGED_LAYER),
            "final": "HloModule jit_step, is_scheduled=true, num_partitions=4\n\n"
            + _LOOP.replace("BATCH", "2")
            .replace("PART", "128")
            .replace("GATHERED", _GATHERED_LAYER),
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
        "near miss: another axis, of the same size as the merged one, is contracted",
        0,
        {
            "before_optimizations": _BEFORE.replace("[2,64,", "[2,2048,").replace(
                "lhs_contracting_dims={2}", "lhs_contracting_dims={1}"
            ),
            "final": (_HEAD + _GATHER + "\n" + _RESHAPE + _DOT).replace("[2,64,", "[2,2048,"),
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
        opcodes=_COLLECTIVES,
        sees=sees,
        reach="module",
    ),
)
