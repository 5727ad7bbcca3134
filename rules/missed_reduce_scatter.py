"""All-reduces of which every chip keeps only its own slice.

## What it reports

A value of an `all-reduce` in the final module whose every use is a slice at an offset that
differs between the members of each replica group: a reduce-scatter would have given each member
just that. The slice may stand in another fusion, behind converts, bitcasts and prefetches, with
its offset handed in as an operand; an `all-reduce` of several values is one finding for each
value that is only sliced. The offset is computed for every partition from `partition-id`.

`reason` says why the TPU compiler kept the all-reduce, as far as the module shows it:

- `minor-extent`: the slice is shorter than 512 bytes along the minor-most dimension. XLA:TPU's
  all-reduce-scatter fusion then refuses: a row of the vector unit is 128 lanes of 32 bits, and a
  shard must fill one. This depends on the order in which the gradient comes out.
- `two-dimensions`: the members' slices differ along more than one dimension.
- `not-fused`: the shapes allow it; the fusion did not apply. It may be switched off
  (`xla_tpu_enable_all_reduce_scatter_fusion`), or something stood between the two.

## Why it matters

Over a ring of n chips an all-reduce moves 2(n-1)/n of the value's bytes, a reduce-scatter
(n-1)/n: half. On small models the lost reduce-scatter of the LM head was up to 28% of what
explicit sharding cost.

## What is left out

- An `all-reduce` inside a computation called as `all-reduce-scatter`: that is how a TPU module
  spells a reduce-scatter.
- A slice along a mesh axis that the all-reduce does not span: all members of a group keep the
  same part. (There the remedy is to slice before the reduction.)
- Values with any other use, and values smaller than `min_bytes` (64 KiB): latency rules those.

## Limits

Offsets are evaluated where they are arithmetic on `partition-id` and constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hlo_audit.hlo import Instruction, Module, Shape, Value, element_bits
from hlo_audit.hlo.collectives import is_reduce_scatter
from hlo_audit.hlo.dataflow import MOVES, Site, Use, evaluate, terminal_uses
from hlo_audit.rule import Context, Example, Finding, Rule, Seen, Watch
from hlo_audit.rules._lm_head_fixes import (
    EXPLICIT_ON_V5,
    free_entry_layout,
    kernel_order_grad,
)

_CONVERTED = MOVES | {"convert"}
_ALL_REDUCES = ("all-reduce", "all-reduce-start")
_REASONS = {
    "minor-extent": "{extent} bytes along the minor-most dimension, under the {least} that a "
    "reduce-scatter needs",
    "two-dimensions": "the shards are cut along more than one dimension",
    "not-fused": "the shapes allow a reduce-scatter, but no pass made one",
}


class Scattered(NamedTuple):
    """A reduced value that is only sliced.

    Attributes:
        value: of an all-reduce.
        slices: all its uses.
        groups: the partitions that reduce it together.
    """

    value: Value
    slices: list[Use]
    groups: tuple[tuple[int, ...], ...]


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each reduced value that is only sliced."""
    for all_reduce in module.of_opcodes(_ALL_REDUCES):
        for value, slices, groups in _scattered(module, all_reduce, context):
            yield _finding(module, context, value, slices[0], groups)


def sees(all_reduce: Instruction, context: Context) -> Iterator[Seen]:
    """Yield the values of an all-reduce that are only sliced."""
    for found in _scattered(context.module("final"), all_reduce, context):
        yield Seen(found.value.shape)


def _scattered(module: Module, all_reduce: Instruction, context: Context) -> Iterator[Scattered]:
    least = context.option("min_bytes")
    if all_reduce.shape.logical_bytes < least or is_reduce_scatter(module, all_reduce):
        return
    for value in _reduced_values(all_reduce):
        if value.shape.logical_bytes < least:
            continue
        slices = _slices(module, value)
        groups = all_reduce.replica_groups(module.device_count) if slices else None
        if groups is None or min(map(len, groups)) < 2:
            continue
        if _scatters(module, slices, groups):
            yield Scattered(value, slices, groups)


def _reduced_values(all_reduce: Instruction) -> Iterator[Value]:
    if not all_reduce.shape.is_tuple:
        yield Value(all_reduce)
    for index in range(len(all_reduce.shape.elements)):
        yield Value(all_reduce, (index,))


def _slices(module: Module, value: Value) -> list[Use]:
    """The dynamic-slices that are all the uses of ``value``; empty if it has any other."""
    return terminal_uses(module, value, through=_CONVERTED, wanted=_is_slice) or []


def _is_slice(use: Use) -> bool:
    """Whether a value is cut into a part of the same rank, every size of it known."""
    if use.user.opcode != "dynamic-slice" or use.operand != 0:
        return False
    part, whole = use.user.shape, use.user.operand_values[0].shape
    return part.rank == whole.rank and -1 not in part.dimensions + whole.dimensions


def _scatters(module: Module, slices: Sequence[Use], groups: Sequence[Sequence[int]]) -> bool:
    """Whether every member of each replica group keeps a part of its own in every slice."""
    partitions = [partition for group in groups for partition in group]
    parts: list[tuple[int | None, ...]] | None = None
    for use in slices:
        offsets = _offsets(module, use, partitions)
        differs = parts is not None and parts != offsets
        if differs or any(None in part for part in offsets):
            return False
        parts = offsets
    part_of = dict(zip(partitions, parts or (), strict=True))
    return all(len({part_of[partition] for partition in group}) == len(group) for group in groups)


def _offsets(module: Module, use: Use, partitions: Sequence[int]) -> list[tuple[int | None, ...]]:
    """Where the slice of each partition starts in the dimensions that are cut."""
    indices = [use.user.operand_values[1 + dimension] for dimension in _cut_dimensions(use.user)]
    offsets = [evaluate(module, Site(index, use.calls), partitions) for index in indices]
    return list(zip(*offsets, strict=True)) if offsets else [()] * len(partitions)


def _cut_dimensions(dynamic_slice: Instruction) -> tuple[int, ...]:
    whole = dynamic_slice.operand_values[0].shape.dimensions
    return tuple(
        dimension
        for dimension, (part, size) in enumerate(
            zip(dynamic_slice.shape.dimensions, whole, strict=False)
        )
        if part < size and 1 + dimension < len(dynamic_slice.operands)
    )


def _finding(
    module: Module,
    context: Context,
    value: Value,
    use: Use,
    groups: Sequence[Sequence[int]],
) -> Finding:
    all_reduce, shape = value.instruction, value.shape
    group_size = len(groups[0])
    reason, extent = _reason(module, context, shape, use, groups[0])
    least = context.option("min_minor_extent_bytes")
    fraction = (group_size - 1) / group_size
    element = value.tuple_index[0] if value.tuple_index else None
    of_several = "" if element is None else f" (value {element} of {len(all_reduce.operands)})"
    message = (
        f"every chip keeps only {use.user.shape.without_layout} of the all-reduced "
        f"{shape.without_layout}{of_several}: "
        + _REASONS[reason].format(extent=extent, least=least)
    )
    # A combined all-reduce has the metadata of one of its parts: the operand knows its own.
    operands = all_reduce.operands
    made_by = operands[element or 0] if (element or 0) < len(operands) else all_reduce
    return context.finding(
        module,
        all_reduce,
        message,
        shape=shape.without_layout,
        bytes=shape.logical_bytes,
        details={
            "reason": reason,
            "minor_extent_bytes": extent,
            "element": element,
            "group_size": group_size,
            "slice": use.user.shape.without_layout,
            "wire_bytes": round(2 * fraction * shape.logical_bytes),
            "reduce_scatter_wire_bytes": round(fraction * shape.logical_bytes),
        },
        fixes=("kernel-order-grad", "free-entry-layout") if reason == "minor-extent" else (),
        charged_to=(made_by, all_reduce, use.user),
        element=element,
    )


def _reason(
    module: Module, context: Context, reduced: Shape, use: Use, group: Sequence[int]
) -> tuple[str, int]:
    """Why the rewrite was refused, and the shard's bytes along the minor-most dimension.

    The bytes are those of the reduced type: that is what the wire carries.
    """
    offsets = _offsets(module, use, group)
    cut = zip(_cut_dimensions(use.user), zip(*offsets, strict=True), strict=True)
    moving = [dimension for dimension, starts in cut if len(set(starts)) > 1]
    minor = use.user.operand_values[0].shape.minor_to_major[0]
    extent = use.user.shape.dimensions[minor] * element_bits(reduced.element_type) // 8
    if len(moving) > 1:
        return "two-dimensions", extent
    # The limit is of the TPU compiler, whose arrays are tiled.
    is_tpu = reduced.layout is not None and bool(reduced.layout.tiles)
    if is_tpu and extent < context.option("min_minor_extent_bytes"):
        return "minor-extent", extent
    return "not-fused", extent


_HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x, %y)
}
"""

EXAMPLES = (
    Example(
        "one value of a variadic all-reduce, sliced inside a fusion, too narrow a shard",
        1,
        {
            "final": _HEAD
            + """
%fused (param_0: bf16[32000,512], param_1: u32[]) -> f32[32000,128] {
  %param_0 = bf16[32000,512]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = u32[]{:T(128)} parameter(1)
  %convert.1 = s32[]{:T(128)} convert(%param_1)
  %constant.1 = s32[]{:T(128)} constant(128)
  %multiply.1 = s32[]{:T(128)} multiply(%convert.1, %constant.1)
  %constant.2 = s32[]{:T(128)} constant(0)
  %dynamic-slice.1 = bf16[32000,128]{1,0:T(8,128)(2,1)} dynamic-slice(%param_0, %constant.2, \
%multiply.1), dynamic_slice_sizes={32000,128}
  ROOT %convert.2 = f32[32000,128]{1,0:T(8,128)} convert(%dynamic-slice.1)
}

ENTRY %main (g: bf16[32000,512], n: bf16[512]) -> (f32[32000,128], bf16[512]) {
  %g = bf16[32000,512]{1,0:T(8,128)(2,1)} parameter(0)
  %n = bf16[512]{0:T(512)(128)(2,1)} parameter(1)
  %all-reduce.1 = (bf16[512]{0:T(512)(128)(2,1)}, bf16[32000,512]{1,0:T(8,128)(2,1)}) \
all-reduce(%n, %g), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true, \
to_apply=%add
  %partition-id.1 = u32[]{:T(128)} partition-id()
  %constant.3 = u32[]{:T(128)} constant(3)
  %and.1 = u32[]{:T(128)} and(%partition-id.1, %constant.3)
  %fusion.1 = f32[32000,128]{1,0:T(8,128)} fusion(%all-reduce.1#1, %and.1), kind=kLoop, calls=%fused
  ROOT %tuple.1 = (f32[32000,128]{1,0:T(8,128)}, bf16[512]{0:T(512)(128)(2,1)}) \
tuple(%fusion.1, %all-reduce.1#0)
}
"""
        },
    ),
    Example(
        "near miss: the inside of a reduce-scatter",
        0,
        {
            "final": _HEAD
            + """
%all-reduce-scatter (input: bf16[512,32000]) -> bf16[128,32000] {
  %input = bf16[512,32000]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.2 = bf16[512,32000]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=4, \
replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add
  %constant.33 = u32[] constant(0)
  %partition-id.1 = u32[] partition-id()
  %constant.34 = u32[] constant(128)
  %multiply.3 = u32[]{:T(128)} multiply(%partition-id.1, %constant.34)
  ROOT %dynamic-slice.4 = bf16[128,32000]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.2, \
%multiply.3, %constant.33), dynamic_slice_sizes={128,32000}
}

ENTRY %main (g: bf16[512,32000]) -> bf16[128,32000] {
  %g = bf16[512,32000]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %fusion.1 = bf16[128,32000]{1,0:T(8,128)(2,1)} fusion(%g), kind=kCustom, \
calls=%all-reduce-scatter
}
"""
        },
    ),
    Example(
        "near miss: a slice along the mesh axis that the all-reduce does not span",
        0,
        {
            "final": _HEAD
            + """
ENTRY %main (g: bf16[512,32000]) -> bf16[256,32000] {
  %g = bf16[512,32000]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[512,32000]{1,0:T(8,128)(2,1)} all-reduce(%g), channel_id=1, \
replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
  %partition-id.1 = u32[]{:T(128)} partition-id()
  %constant.1 = u32[]{:T(128)} constant(1)
  %shift.1 = u32[]{:T(128)} shift-right-logical(%partition-id.1, %constant.1)
  %constant.2 = u32[]{:T(128)} constant(256)
  %multiply.1 = u32[]{:T(128)} multiply(%shift.1, %constant.2)
  %constant.3 = u32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.1 = bf16[256,32000]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, \
%multiply.1, %constant.3), dynamic_slice_sizes={256,32000}
}
"""
        },
    ),
    Example(
        "near miss: the whole value is needed too",
        0,
        {
            "final": _HEAD
            + """
ENTRY %main (g: bf16[512,32000]) -> (bf16[128,32000], bf16[512,32000]) {
  %g = bf16[512,32000]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[512,32000]{1,0:T(8,128)(2,1)} all-reduce(%g), channel_id=1, \
replica_groups=mesh['fsdp'=4] {'fsdp'}, use_global_device_ids=true, to_apply=%add
  %partition-id.1 = u32[]{:T(128)} partition-id()
  %constant.2 = u32[]{:T(128)} constant(128)
  %multiply.1 = u32[]{:T(128)} multiply(%partition-id.1, %constant.2)
  %constant.3 = u32[]{:T(128)} constant(0)
  %dynamic-slice.1 = bf16[128,32000]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, \
%multiply.1, %constant.3), dynamic_slice_sizes={128,32000}
  ROOT %tuple.1 = (bf16[128,32000]{1,0:T(8,128)(2,1)}, bf16[512,32000]{1,0:T(8,128)(2,1)}) \
tuple(%dynamic-slice.1, %all-reduce.1)
}
"""
        },
    ),
)

FIXES = (
    kernel_order_grad(
        "run the forward dot under jax.sharding.auto_axes: the gradient's transpose is "
        "folded, it comes out as [embed, vocab], and is cut along its major dimension",
        cost="explicit mode only; on v6e the fold does not give the reduce-scatter back",
        clears=EXPLICIT_ON_V5,
    ),
    free_entry_layout("leave the entry layouts of the kernel and its moments to XLA (Layout.AUTO)"),
)

RULE = Rule(
    code="HLA004",
    slug="missed-reduce-scatter",
    summary="all-reduces of which every chip keeps only its own slice",
    documentation=__doc__,
    reads=("final",),
    check=check,
    tally="reason",
    examples=EXAMPLES,
    fixes=FIXES,
    options={"min_bytes": 64 << 10, "min_minor_extent_bytes": 512},
    watch=Watch(
        counts="all-reduced values of which every chip keeps only its own slice",
        phases=("partitioned", "laid-out"),
        elsewhere="a program that is not partitioned yet has no collectives of its own",
        opcodes=_ALL_REDUCES,
        sees=sees,
        reach="module",
    ),
)
