"""Transposes of a dot's result that the compiler did not fold into the dot, and that cost copies.

## What it reports

A `transpose` in the last snapshot before layout assignment whose operand is the result of a dot
(followed back through conversions, reductions over chips, slices and arithmetic with constants),
where the dot with its operands exchanged would have given the transposed result at once; and
relayout copies in the final module that turn buffers of that shape between the two orders. One
finding for each dot.

## Why it matters

XLA folds `transpose(dot(a, b))` into `dot(b, a)` at no cost. Where something stood between the
two while the simplifier ran (a `Sharding` annotation, see HLA001) the transpose lives on until
layout assignment, which makes it a matter of layout: the gradient lies the other way round than
its parameter and its moments, and each of these is copied on the way in and out.

## What is left out

- Transposes without such a copy in the final module: layout assignment made them free. Most
  transposes of attention are.
- Transposes of buffers smaller than `min_bytes` (64 KiB, as for relayout copies).

## Limits

After layout assignment a transpose is a bitcast or a copy, so the copies are matched by shape and
order, not by name; `copies` counts all of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from hlo_audit.hlo import Instruction, Module, Shape
from hlo_audit.hlo.dots import swaps_operands
from hlo_audit.rule import Context, Example, Finding, Rule
from hlo_audit.rules._lm_head_fixes import (
    EXPLICIT_ON_V5,
    WHEREVER_IT_SHOWS,
    free_entry_layout,
    kernel_order_grad,
    vocab_embed,
)

# A gradient passes a handful of these.
_LONGEST_CHAIN = 100

# A gradient passes these between its dot and its transpose, and keeps its dimensions.
_PASSED = frozenset(
    {
        *("convert", "copy", "negate", "all-reduce", "reduce-scatter", "dynamic-slice", "slice"),
        *("multiply", "divide", "add", "subtract", "select", "get-tuple-element", "custom-call"),
    }
)


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each dot whose transpose stayed apart and came to copies."""
    final = context.module("final")
    copies = [copy for copy in final.instructions if copy.opcode == "copy" and copy.operands]
    # Layers repeat: the copies of one shape and order are looked for once.
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Instruction]] = {}
    reported: set[Instruction] = set()
    for transpose in module.instructions:
        if transpose.opcode != "transpose" or not transpose.operands:
            continue
        if transpose.shape.logical_bytes < context.option("min_bytes"):
            continue
        if sorted(transpose.dimensions) != list(range(transpose.shape.rank)):
            continue
        dot = _dot_of(transpose.operands[0])
        if dot is None or dot in reported or not swaps_operands(dot, transpose.dimensions):
            continue
        alike = (transpose.shape.dimensions, transpose.dimensions)
        if alike not in found:
            found[alike] = [copy for copy in copies if _undoes(copy, transpose)]
        made = found[alike]
        if made:
            reported.add(dot)
            yield _finding(module, context, dot, transpose, made)


def _finding(
    module: Module,
    context: Context,
    dot: Instruction,
    transpose: Instruction,
    copies: list[Instruction],
) -> Finding:
    shape = transpose.shape.without_layout
    copied_bytes = sum(copy.shape.logical_bytes for copy in copies)
    return context.finding(
        module,
        transpose,
        f"the transpose to {shape} was not folded into its dot {dot.shape.without_layout}; "
        f"copies that turn such a buffer in the final module: {len(copies)}",
        bytes=transpose.shape.logical_bytes,
        details={
            "kind": "of-result",
            "dot": dot.name,
            "dot_shape": dot.shape.without_layout,
            "permutation": list(transpose.dimensions),
            "copies": len(copies),
            "copied_bytes": copied_bytes,
        },
        fixes=("vocab-embed", "kernel-order-grad", "free-entry-layout"),
        charged_to=(dot, transpose),
    )


def _dot_of(value: Instruction) -> Instruction | None:
    """The dot that ``value`` is the result of, but for what keeps its dimensions in place."""
    for _ in range(_LONGEST_CHAIN):
        if value.opcode not in _PASSED or not value.operands:
            break
        if value.opcode == "custom-call" and value.custom_call_target != "Sharding":
            return None
        whole = [
            operand
            for operand in value.operands
            if operand.shape.rank == value.shape.rank and not _is_constant(operand)
        ]
        if value.opcode in ("all-reduce", "get-tuple-element") and value.operands[0].shape.is_tuple:
            return None
        if len(whole) != 1:
            return None
        value = whole[0]
    return value if value.opcode == "dot" else None


def _is_constant(instruction: Instruction) -> bool:
    if instruction.opcode != "broadcast" or not instruction.operands:
        return instruction.opcode == "constant"
    source = instruction.operands[0]
    return source.shape.rank == 0 or source.opcode == "constant"


def _undoes(copy: Instruction, transpose: Instruction) -> bool:
    """Whether a final copy turns a buffer of the transpose's shape between the two orders.

    Dimensions of size 1 are left out: layer stacks slice with a leading one.
    """
    before, after = copy.operand_values[0].shape, copy.shape
    if before.is_tuple or _squeezed(after) != _squeezed(transpose.shape):
        return False
    rank = transpose.shape.rank
    untransposed = [transpose.dimensions.index(d) for d in reversed(range(rank))]
    sizes = transpose.shape.dimensions
    turned = [sum(sizes[e] != 1 for e in range(d)) for d in untransposed if sizes[d] != 1]
    orders = [_squeezed_order(before), _squeezed_order(after)]
    return turned in orders and orders[0] != orders[1]


def _squeezed(shape: Shape) -> list[int]:
    return [size for size in shape.dimensions if size != 1]


def _squeezed_order(shape: Shape) -> list[int]:
    """``moving_order`` in numbers of the dimensions that are left without those of size 1."""
    return [sum(size != 1 for size in shape.dimensions[:d]) for d in shape.moving_order]


_BEFORE = """\
HloModule jit_step, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}

ENTRY %main (g: f32[512,32000], x: f32[512,512], w: f32[128,32000]) -> f32[128,32000] {
  %g = f32[512,32000]{1,0} parameter(0)
  %x = f32[512,512]{1,0} parameter(1)
  %w = f32[128,32000]{1,0} parameter(2)
  %dot.1 = f32[32000,512]{1,0} dot(%g, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %all-reduce.1 = f32[32000,512]{1,0} all-reduce(%dot.1), replica_groups={{0,1,2,3}}, to_apply=%add
  %partition-id.1 = u32[] partition-id()
  %constant.1 = u32[] constant(128)
  %multiply.1 = u32[] multiply(%partition-id.1, %constant.1)
  %constant.2 = u32[] constant(0)
  %dynamic-slice.1 = f32[32000,128]{1,0} dynamic-slice(%all-reduce.1, %constant.2, %multiply.1), \
dynamic_slice_sizes={32000,128}
  %constant.3 = f32[] constant(0.1)
  %broadcast.1 = f32[32000,128]{1,0} broadcast(%constant.3), dimensions={}
  %multiply.2 = f32[32000,128]{1,0} multiply(%broadcast.1, %dynamic-slice.1)
  %transpose.1 = f32[128,32000]{1,0} transpose(%multiply.2), dimensions={1,0}
  ROOT %add.2 = f32[128,32000]{1,0} add(%w, %transpose.1)
}
"""
_FINAL = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (w: f32[128,32000], m: f32[32000,128]) -> f32[128,32000] {
  %w = f32[128,32000]{1,0:T(8,128)} parameter(0)
  %m = f32[32000,128]{1,0:T(8,128)} parameter(1)
"""

EXAMPLES = (
    Example(
        "a weight gradient that is reduced, sliced and scaled before its transpose",
        1,
        {
            "before_layout_assignment": _BEFORE,
            "final": _FINAL
            + """\
  %copy.1 = f32[128,32000]{0,1:T(8,128)} copy(%w)
  %bitcast.1 = f32[128,32000]{0,1:T(8,128)} bitcast(%m)
  %add.1 = f32[128,32000]{0,1:T(8,128)} add(%copy.1, %bitcast.1)
  ROOT %copy.2 = f32[128,32000]{1,0:T(8,128)} copy(%add.1)
}
""",
        },
    ),
    Example(
        "near miss: layout assignment made it free",
        0,
        {
            "before_layout_assignment": _BEFORE,
            "final": _FINAL
            + """\
  %bitcast.1 = f32[32000,128]{1,0:T(8,128)} bitcast(%w)
  %add.1 = f32[32000,128]{1,0:T(8,128)} add(%bitcast.1, %m)
  ROOT %bitcast.2 = f32[128,32000]{0,1:T(8,128)} bitcast(%add.1)
}
""",
        },
    ),
    Example(
        "near miss: a transpose of no dot, with a copy of its shape",
        0,
        {
            "before_layout_assignment": """\
HloModule jit_step, num_partitions=4

ENTRY %main (w: f32[32000,128]) -> f32[128,32000] {
  %w = f32[32000,128]{1,0} parameter(0)
  %exponential.1 = f32[32000,128]{1,0} exponential(%w)
  ROOT %transpose.1 = f32[128,32000]{1,0} transpose(%exponential.1), dimensions={1,0}
}
""",
            "final": _FINAL
            + """\
  %bitcast.1 = f32[128,32000]{0,1:T(8,128)} bitcast(%m)
  ROOT %copy.1 = f32[128,32000]{1,0:T(8,128)} copy(%bitcast.1)
}
""",
        },
    ),
)

FIXES = (
    vocab_embed(
        "store the kernel transposed, [vocab, embed]: its gradient needs no transpose",
        clears=WHEREVER_IT_SHOWS,
    ),
    kernel_order_grad(
        "run the forward dot under jax.sharding.auto_axes: nothing then stands between the "
        "gradient's dot and its transpose",
        cost="explicit mode only, and not on v6e, where the copies stay; the sharding of the dot's "
        "result must be named",
        clears=EXPLICIT_ON_V5,
    ),
    free_entry_layout(
        "leave the entry layouts of the kernel and its moments to XLA (Layout.AUTO): the "
        "transpose stays, and costs nothing"
    ),
)

RULE = Rule(
    code="HLA003",
    slug="unfolded-transpose",
    summary="transposes that were not folded into their dot and cost relayout copies",
    documentation=__doc__,
    reads=("before_layout_assignment", "final"),
    check=check,
    tally="kind",
    examples=EXAMPLES,
    fixes=FIXES,
    options={"min_bytes": 64 << 10},
)
