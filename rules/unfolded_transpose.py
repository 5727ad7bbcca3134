"""Transposes that XLA folded into no dot, and that cost copies.

## What it reports

By `kind`:

- `of-result`: a `transpose` in the last snapshot before layout assignment whose operand is the
  result of a dot (followed back through conversions, reductions over chips, slices and arithmetic
  with constants), where the dot with its operands exchanged would have given the transposed result
  at once; and relayout copies in the final module that turn buffers of that shape between the two
  orders. One finding for each dot.
- `of-operand`: a copy in the final module that turns a weight around, and is read by kernels
  (`tpu_custom_call`, as Pallas makes them) alone: each reads it with axes exchanged.
- `stored-layout`: such a copy of a weight which the kernels read with its axes as they are. The
  weight itself lies otherwise in memory: XLA chose that order for an argument whose last axis is no
  multiple of 128 lanes, to pad less.

## Why it matters

XLA folds `transpose(dot(a, b))` into `dot(b, a)` at no cost. Where something stood between the
two while the simplifier ran (a `Sharding` annotation, see HLA001) the transpose lives on until
layout assignment, which makes it a matter of layout: the gradient lies the other way round than
its parameter and its moments, and each of these is copied on the way in and out.

Into a kernel XLA folds nothing: it takes its operands row-major. A weight passed as
`w.swapaxes(1, 2)` is written once more, whole, at each call. In a 26-billion-parameter model with
128 experts those copies, of 507 and 253 MB, took 87 ms of a step.

## What is left out

- Transposes of a result without such a copy in the final module: layout assignment made them free.
  Most transposes of attention are.
- Copies that anything else reads as well, and those of values that are no weights: what is traced
  back, through gathers and conversions, to no argument of the step.
- Buffers smaller than `min_bytes` (64 KiB, as for relayout copies), such as a kernel's indices.

## Limits

After layout assignment a transpose is a bitcast or a copy, so the copies of a result are matched by
shape and order, not by name; `copies` counts all of that kind. No fix of the reference models
clears `stored-layout`: make the weight's last axis a multiple of 128, or ask for a row-major layout
(`jax.experimental.layout`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hlo_audit.hlo import Instruction, Module, Value
from hlo_audit.hlo.dataflow import (
    MOVES,
    Site,
    Use,
    origin_outside_loops,
    terminal_uses,
)
from hlo_audit.hlo.dots import spared_by_exchange, squeezed, turns_back
from hlo_audit.rule import (
    Context,
    Example,
    Finding,
    LayoutFix,
    Rule,
    Seen,
    Target,
    Watch,
    bit_for_bit,
)
from hlo_audit.rules._lm_head_fixes import (
    EXPLICIT_ON_V5,
    WHEREVER_IT_SHOWS,
    free_entry_layout,
    kernel_order_grad,
    vocab_embed,
)

_KERNEL = "tpu_custom_call"

# A weight on its way from its argument to a kernel.
_USED_AS_WEIGHT = MOVES | {
    *("convert", "all-gather", "all-gather-start", "all-gather-done", "slice", "dynamic-slice"),
    *("reshape", "transpose"),
}


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each dot whose transpose stayed apart and came to copies, and for each
    copy that turns a weight for kernels alone."""
    yield from _transposes_of_results(module, context)
    yield from _copies_for_kernels(module, context)


def sees(transpose: Instruction, context: Context) -> Iterator[Seen]:
    """Yield a transpose that exchanging its dot's operands would spare, whether it costs copies
    later or not; once for each dot."""
    if transpose.shape.logical_bytes >= context.option("min_bytes"):
        chain = spared_by_exchange(transpose)
        if chain is not None:
            yield Seen(transpose.shape, once=f"{chain.dot.computation.name}/{chain.dot.name}")


# -- of the result of a dot


def _transposes_of_results(module: Module, context: Context) -> Iterator[Finding]:
    final = context.module("final")
    copies = [copy for copy in final.of_opcodes(("copy",)) if copy.operands]
    # Layers repeat: the copies of one shape and order are looked for once.
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Instruction]] = {}
    reported: set[Instruction] = set()
    for transpose in module.of_opcodes(("transpose",)):
        if not transpose.operands:
            continue
        if transpose.shape.logical_bytes < context.option("min_bytes"):
            continue
        chain = spared_by_exchange(transpose)
        if chain is None or chain.dot in reported:
            continue
        dot = chain.dot
        alike = (transpose.shape.dimensions, transpose.dimensions)
        if alike not in found:
            found[alike] = [copy for copy in copies if turns_back(copy, transpose)]
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


# -- of the operand of a kernel


def _copies_for_kernels(module: Module, context: Context) -> Iterator[Finding]:
    final = context.module("final")
    for copy in final.of_opcodes(("copy",)):
        if not copy.operands:
            continue
        before, after = copy.operand_values[0].shape, copy.shape
        if before.is_tuple or before.moving_order == after.moving_order:
            continue
        if after.logical_bytes < context.option("min_bytes"):
            continue
        uses = terminal_uses(final, Value(copy), wanted=_is_of_kernel)
        if not uses:
            continue
        weight = _weight(final, copy)
        if weight is not None:
            yield _operand_finding(module, context, copy, uses, weight)


def _is_of_kernel(use: Use) -> bool:
    return use.user.custom_call_target == _KERNEL


def _weight(final: Module, copy: Instruction) -> Instruction | None:
    """The argument that ``copy`` is of; ``None`` for a value that is computed."""
    source = Site(copy.operand_values[0])
    parameter = origin_outside_loops(final, source, through=_USED_AS_WEIGHT).instruction
    is_argument = parameter.opcode == "parameter" and parameter.computation is final.entry
    return parameter if is_argument else None


def _operand_finding(
    module: Module, context: Context, copy: Instruction, uses: list[Use], weight: Instruction
) -> Finding:
    before = copy.operand_values[0].shape.in_memory_space(0)
    after = copy.shape.in_memory_space(0)
    kind = "stored-layout" if after.is_row_major else "of-operand"
    transpose = _transpose_for(module, copy) if kind == "of-operand" else None
    argument = weight.op_name or f"#{weight.parameter_number}"
    shape = copy.shape.without_layout
    kernel = uses[0].user
    why = (
        "which reads it with two axes exchanged: a transpose that nothing folds"
        if kind == "of-operand"
        else f"since the argument itself is stored as {_printed_layout(weight)}"
    )
    return context.finding(
        context.module("final"),
        copy,
        f"{shape} of the weight {argument} is copied from {before.layout} to {after.layout} for a "
        f"kernel alone, {why}",
        bytes=copy.shape.logical_bytes,
        details={
            "kind": kind,
            "from": str(before.layout or ""),
            "to": str(after.layout or ""),
            "argument": argument,
            "kernel": kernel.op_name,
            "kernels": len({use.user for use in uses}),
        },
        fixes=("transposed-rhs",) if kind == "of-operand" else (),
        charged_to=(copy,) if transpose is None else (transpose,),
        charged_in=context.module("final") if transpose is None else module,
    )


def _printed_layout(weight: Instruction) -> str:
    return str(weight.shape.in_memory_space(0).layout or "")


def _transpose_for(module: Module, copy: Instruction) -> Instruction | None:
    """The transpose that became ``copy``: of such a buffer, into kernels alone.

    Dimensions of size 1 are left out: a layer's slice of a stack has a leading one.
    """
    sizes = squeezed(copy.shape)
    for transpose in module.of_opcodes(("transpose",)):
        if not transpose.operands:
            continue
        operand = transpose.operand_values[0].shape
        if operand.is_tuple or squeezed(operand) != sizes:
            continue
        if terminal_uses(module, Value(transpose), wanted=_is_of_kernel):
            return transpose
    return None


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

_BEFORE_KERNEL = """\
HloModule jit_step, num_partitions=4

ENTRY %main (g: bf16[512,128], w: bf16[8,256,128]) -> bf16[512,256] {
  %g = bf16[512,128]{1,0} parameter(0)
  %w = bf16[8,256,128]{2,1,0} parameter(1)
  %transpose.1 = bf16[8,128,256]{1,2,0} transpose(%w), dimensions={0,2,1}
  ROOT %custom-call.1 = bf16[512,256]{1,0} custom-call(%g, %transpose.1), \
custom_call_target="tpu_custom_call"
}
"""
_KERNEL_HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (g: bf16[512,128], w: bf16[8,256,128]) -> bf16[512,256] {
  %g = bf16[512,128]{1,0:T(8,128)(2,1)} parameter(0)
"""
_ROW_MAJOR = """\
  %w = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="params['w']"}
"""
_TURNED = """\
  %copy.1 = bf16[8,256,128]{1,2,0:T(8,128)(2,1)} copy(%w)
  %bitcast.1 = bf16[8,128,256]{2,1,0:T(8,128)(2,1)} bitcast(%copy.1)
"""
_CALL = """\
  ROOT %custom-call.1 = bf16[512,256]{1,0:T(8,128)(2,1)} custom-call(%g, %bitcast.1), \
custom_call_target="tpu_custom_call"
}
"""

EXAMPLES = (
    Example(
        "a weight that a kernel reads with two axes exchanged",
        1,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": _KERNEL_HEAD + _ROW_MAJOR + _TURNED + _CALL,
        },
        {"of-operand": 1},
    ),
    Example(
        "a weight cut from a stack in a loop, which each turn copies for its kernel",
        1,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%body (p: (s32[], bf16[256,128], bf16[3,256,128])) -> (s32[], bf16[256,128], bf16[3,256,128]) {
  %p = (s32[], bf16[256,128]{1,0}, bf16[3,256,128]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %g = bf16[256,128]{1,0} get-tuple-element(%p), index=1
  %w = bf16[3,256,128]{2,1,0} get-tuple-element(%p), index=2
  %constant.1 = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,256,128]{2,1,0} dynamic-slice(%w, %i, %constant.1, %constant.1), \
dynamic_slice_sizes={1,256,128}
  %copy.1 = bf16[1,256,128]{1,2,0} copy(%dynamic-slice.1)
  %bitcast.1 = bf16[128,256]{1,0} bitcast(%copy.1)
  %custom-call.1 = bf16[256,128]{1,0} custom-call(%g, %bitcast.1), \
custom_call_target="tpu_custom_call"
  %constant.2 = s32[] constant(1)
  %add.1 = s32[] add(%i, %constant.2)
  ROOT %tuple.1 = (s32[], bf16[256,128]{1,0}, bf16[3,256,128]{2,1,0}) \
tuple(%add.1, %custom-call.1, %w)
}

%condition (q: (s32[], bf16[256,128], bf16[3,256,128])) -> pred[] {
  %q = (s32[], bf16[256,128]{1,0}, bf16[3,256,128]{2,1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %constant.3 = s32[] constant(3)
  ROOT %compare.1 = pred[] compare(%j, %constant.3), direction=LT
}

ENTRY %main (g: bf16[256,128], w: bf16[3,256,128]) -> bf16[256,128] {
  %g.1 = bf16[256,128]{1,0} parameter(0)
  %w.1 = bf16[3,256,128]{2,1,0} parameter(1)
  %constant.4 = s32[] constant(0)
  %tuple.2 = (s32[], bf16[256,128]{1,0}, bf16[3,256,128]{2,1,0}) tuple(%constant.4, %g.1, %w.1)
  %while.1 = (s32[], bf16[256,128]{1,0}, bf16[3,256,128]{2,1,0}) while(%tuple.2), \
condition=%condition, body=%body
  ROOT %g.2 = bf16[256,128]{1,0} get-tuple-element(%while.1), index=1
}
""",
        },
        {"of-operand": 1},
    ),
    Example(
        "a weight that is not stored row-major, for a kernel that reads it as it is",
        1,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": _KERNEL_HEAD
            + """\
  %w = bf16[8,256,128]{1,2,0:T(8,128)(2,1)} parameter(1)
  %copy.1 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} copy(%w)
  ROOT %custom-call.1 = bf16[512,256]{1,0:T(8,128)(2,1)} custom-call(%g, %copy.1), \
custom_call_target="tpu_custom_call"
}
""",
        },
        {"stored-layout": 1},
    ),
    Example(
        "near miss: the kernel reads a value that is computed",
        0,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": _KERNEL_HEAD
            + _ROW_MAJOR
            + """\
  %exponential.1 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} exponential(%w)
"""
            + _TURNED.replace("copy(%w)", "copy(%exponential.1)")
            + _CALL,
        },
    ),
    Example(
        "near miss: something else reads the copy, too",
        0,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": _KERNEL_HEAD
            + _ROW_MAJOR
            + _TURNED
            + "  %negate.1 = bf16[8,256,128]{1,2,0:T(8,128)(2,1)} negate(%copy.1)\n"
            + _CALL,
        },
    ),
    Example(
        "near miss: a custom call that is no kernel",
        0,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": _KERNEL_HEAD
            + _ROW_MAJOR
            + _TURNED
            + _CALL.replace("tpu_custom_call", "AssumeGatherIndicesInBound"),
        },
    ),
    Example(
        "near miss: the small indices of a kernel",
        0,
        {
            "before_layout_assignment": _BEFORE_KERNEL,
            "final": (_KERNEL_HEAD + _ROW_MAJOR + _TURNED + _CALL)
            .replace("[8,256,128]", "[8,16,128]")
            .replace("[8,128,256]", "[8,128,16]"),
        },
    ),
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

_MOE_ON = ("v6e:2x2",)

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
    LayoutFix(
        name="transposed-rhs",
        change="read the weight in place: a kernel whose block spec takes [tile_n, tile_k] tiles "
        "of the forward weight and contracts the last axis of both operands",
        model="moe-gmm",
        before="swapaxes",
        numerics=bit_for_bit("the same tiles, contracted in the same order"),
        cost="for weights that are not quantised, and a forward product that is not transposed",
        clears=(Target("auto", _MOE_ON), Target("explicit", _MOE_ON)),
    ),
)

RULE = Rule(
    code="HLA003",
    slug="unfolded-transpose",
    summary="transposes that were folded into no dot, or made for a kernel, and cost copies",
    documentation=__doc__,
    reads=("before_layout_assignment", "final"),
    check=check,
    tally="kind",
    examples=EXAMPLES,
    fixes=FIXES,
    options={"min_bytes": 64 << 10},
    watch=Watch(
        counts="transposes of a dot's result that the dot of the exchanged operands would spare, "
        "whether they cost copies or not",
        phases=("unpartitioned", "partitioned"),
        elsewhere="from layout assignment on a transpose is a bitcast or a copy",
        opcodes=("transpose",),
        sees=sees,
        reach="computation",
    ),
)
