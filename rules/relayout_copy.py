"""Copies that change the order or the tiling of a buffer.

## What it reports

A `copy` of the final module whose result lies otherwise in memory than its operand: another order
of dimensions, minor to major, or other tiles. Dimensions of size 1 do not count, and neither does
the memory space: a copy may move a buffer to VMEM as well.

`place` says which buffer it is:

- `parameter`: an argument of the step (traced back through prefetches, bitcasts and conversions);
- `result`: an output of the step;
- `inner`: a value in between, in the entry or in a loop;
- `fused`: a copy inside a fusion, which may cost no pass over memory of its own.

## Why it matters

A relayout reads and writes the whole buffer and computes nothing. Six of them, for an LM-head
kernel f32[2048,32000] and its two AdamW moments on 4 chips, were measured at 345 to 351 us of a
v5p step. They appear when a gradient comes out in another order than its parameter is stored in:
the compiler must keep the layout of arguments and results, so it turns each of them around on the
way in and out.

## What is left out

- Copies smaller than `min_bytes`, padding included: good programs are full of small ones. The
  default is 64 KiB: at the 2.3 TB/s measured for such copies on v5p, less than 0.1 us.
- Copies that convert: other types have other tiles (`T(8,128)` of f32 is `T(8,128)(2,1)` of
  bf16). They count where the order changes, or another dimension is tiled.
- Copies that alias (`output_to_operand_aliasing`), asynchronous copies (they move and never
  turn), and scalars.

## Limits

Some are what the program asked for: a transposed result, a tiled all_to_all. They are reported
with `requested_by`, as notes. A copy inside a fusion may be free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hlo_audit.hlo import Instruction, Module, Shape
from hlo_audit.hlo.dataflow import MOVES, Site, origin_before_prefetch
from hlo_audit.rule import Context, Detail, Example, Finding, Rule, Seen, Watch
from hlo_audit.rules._lm_head_fixes import (
    EXPLICIT_ON_V5,
    WHEREVER_IT_SHOWS,
    free_entry_layout,
    kernel_order_grad,
    vocab_embed,
)

# Moves between a parameter or a result and its copy are a handful.
_LONGEST_CHAIN = 100

_CONVERTED = MOVES | {"convert"}
_PARAMETER_FIXES = ("vocab-embed", "kernel-order-grad", "free-entry-layout")


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each relayout copy of the final module."""
    for copy in module.of_opcodes(("copy",)):
        if _is_counted(copy, context):
            yield _finding(module, context, copy, fused=module.is_fused(copy.computation))


def sees(copy: Instruction, context: Context) -> Iterator[Seen]:
    """Yield a relayout copy."""
    if _is_counted(copy, context):
        yield Seen(copy.shape)


def _is_counted(copy: Instruction, context: Context) -> bool:
    if not copy.operands:
        return False
    before, after = copy.operand_values[0].shape, copy.shape
    return (
        is_relayout(before, after)
        and max(before.padded_bytes, after.padded_bytes) >= context.option("min_bytes")
        and "output_to_operand_aliasing" not in copy.attributes
    )


def is_relayout(before: Shape, after: Shape) -> bool:
    """Whether a copy from ``before`` to ``after`` moves elements to other places."""
    if before.is_tuple or after.is_tuple:
        return False
    if before.moving_order != after.moving_order:
        return True
    converts = before.element_type != after.element_type
    return _tiling(before, converts) != _tiling(after, converts)


def _tiling(shape: Shape, converts: bool) -> tuple[object, ...]:
    """What the tiles do: (dimension, tile size) for each tiled dimension, and the inner tiles.

    A tile of 1 over a dimension of size 1 does nothing. Between element types only the outer tiles
    can be compared, and those only as far as the dimension reaches.
    """
    if shape.layout is None or not shape.layout.tiles:
        return ()
    outer, *inner = shape.layout.tiles
    physical = tuple(reversed(shape.minor_to_major))[-len(outer) :]
    tiled = []
    for dimension, size in zip(reversed(physical), reversed(outer), strict=False):
        extent = shape.dimensions[dimension]
        if converts and size > extent:
            size = extent
        if extent > 1 or size > 1:
            tiled.append((dimension if extent > 1 else None, size))
    return (tuple(tiled), *(() if converts else inner))


def _finding(module: Module, context: Context, copy: Instruction, *, fused: bool) -> Finding:
    source = copy.operand_values[0]
    before, after = source.shape.in_memory_space(0), copy.shape.in_memory_space(0)
    place, place_details, neighbour = _place(module, copy, fused)
    details: dict[str, Detail] = {
        "from": str(before.layout or ""),
        "to": str(after.layout or ""),
        "place": place,
        **place_details,
    }
    requested_by = _requested_by(copy)
    if requested_by:
        details["requested_by"] = requested_by
    # What turns an array that is stored row-major is the program's order of axes. Where XLA itself
    # stores it otherwise, to pad less, none of the fixes changes that.
    stored = {"parameter": before, "result": after}.get(place)
    is_fixable = stored is not None and stored.is_row_major and not requested_by
    argument = place_details.get("argument")
    of_what = {
        "parameter": f"parameter {argument}",
        "result": f"the result for {argument}" if argument else "a result",
        "inner": "an inner value",
        "fused": "a value inside a fusion",
    }[place]
    message = (
        f"{after.without_layout} of {of_what} is copied from {before.layout} to {after.layout}"
    )
    if requested_by:
        message += f", as {requested_by} in the program asks"
    return context.finding(
        module,
        copy,
        message,
        bytes=after.logical_bytes,
        details=details,
        severity="note" if requested_by or place == "fused" else "warning",
        fixes=_PARAMETER_FIXES if is_fixable else (),
        charged_to=(copy, neighbour),
    )


def _place(
    module: Module, copy: Instruction, fused: bool
) -> tuple[str, Mapping[str, Detail], Instruction]:
    """Where the copied buffer stands, what is known of it, and who has a source line if it has
    none."""
    if fused:
        return "fused", {}, copy.operands[0]
    details: dict[str, Detail]
    if copy.computation is module.entry:
        source = origin_before_prefetch(module, Site(copy.operand_values[0]), through=_CONVERTED)
        parameter = source.instruction
        if parameter.opcode == "parameter":
            details = {
                "parameter": parameter.parameter_number,
                "argument": argument_name(parameter),
            }
            return "parameter", details, _reader(copy)
        output = output_index(module, copy)
        if output is not None:
            details = {"output": list(output), "argument": _donated_argument(module, output)}
            return "result", details, source.instruction
    return "inner", {}, copy.operands[0]


def argument_name(parameter: Instruction) -> str:
    """What JAX calls an entry parameter (``state['mu']``), or its number."""
    return parameter.op_name or f"#{parameter.parameter_number}"


def _reader(copy: Instruction) -> Instruction:
    """The first reader of the copied buffer that does something with it."""
    reader = copy
    for _ in range(_LONGEST_CHAIN):
        if not reader.users or not (reader is copy or reader.opcode in MOVES | {"convert"}):
            break
        reader = reader.users[0]
    return reader


def output_index(module: Module, instruction: Instruction) -> tuple[int, ...] | None:
    """The output of the entry that ``instruction`` becomes, past moves; ``None`` for none."""
    seen: set[Instruction] = set()
    waiting = [instruction]
    while waiting and len(seen) < _LONGEST_CHAIN:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current is module.entry.root:
            return ()
        for user, number in current.uses():
            if user is module.entry.root and user.opcode == "tuple":
                return (number,)
            if user.opcode in MOVES | {"convert"}:
                waiting.append(user)
    return None


def _donated_argument(module: Module, output: tuple[int, ...]) -> str | None:
    number = module.donated_to.get(output)
    return None if number is None else argument_name(module.entry.parameters[number])


def _requested_by(copy: Instruction) -> str | None:
    """The operation of the program that asks for the new order, if the copy is of one.

    ``transpose(jvp(...))`` in an op_name is autodiff's name for a backward pass, no such operation.
    """
    primitive = copy.op_name.rpartition("/")[2]
    if primitive == "transpose" and "transpose(" not in copy.op_name:
        return "transpose"
    neighbours = {copy.operands[0].opcode, *(user.opcode for user in copy.users)}
    if primitive == "all_to_all" or (neighbours & {"all-to-all"} and "all_to_all" in copy.op_name):
        return "all_to_all"
    return None


_ENTRY = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, \
entry_computation_layout={(f32[128,32000]{1,0:T(8,128)})->(f32[128,32000]{1,0:T(8,128)})}

ENTRY %main (param: f32[128,32000]) -> (f32[128,32000]) {
"""

EXAMPLES = (
    Example(
        "a parameter read through its prefetch, and the result turned back",
        2,
        {
            "final": _ENTRY
            + """\
  %param = f32[128,32000]{1,0:T(8,128)} parameter(0), metadata={op_name="kernel"}
  %copy-start = (f32[128,32000]{1,0:T(8,128)S(1)}, f32[128,32000]{1,0:T(8,128)}, u32[]{:S(2)}) \
copy-start(%param)
  %copy-done = f32[128,32000]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %copy.1 = f32[128,32000]{0,1:T(8,128)} copy(%copy-done), metadata={op_name="kernel"}
  %negate.1 = f32[128,32000]{0,1:T(8,128)} negate(%copy.1)
  %copy.2 = f32[128,32000]{1,0:T(8,128)} copy(%negate.1)
  ROOT %tuple.1 = (f32[128,32000]{1,0:T(8,128)}) tuple(%copy.2)
}
"""
        },
    ),
    Example(
        "a parameter that is prefetched in pieces",
        1,
        {
            "final": """\
HloModule jit_step, is_scheduled=true

%first (p: s8[16384000]) -> s8[8192000] {
  %p = s8[16384000]{0:T(1024)(128)(4,1)} parameter(0)
  ROOT %slice.1 = s8[8192000]{0:T(1024)(128)(4,1)S(1)} slice(%p), slice={[0:8192000]}
}

%second (q: s8[16384000]) -> s8[8192000] {
  %q = s8[16384000]{0:T(1024)(128)(4,1)} parameter(0)
  ROOT %slice.2 = s8[8192000]{0:T(1024)(128)(4,1)S(1)} slice(%q), slice={[8192000:16384000]}
}

ENTRY %main (param: f32[128,32000]) -> f32[128,32000] {
  %param = f32[128,32000]{1,0:T(8,128)} parameter(0), metadata={op_name="kernel"}
  %bitcast.1 = s8[16384000]{0:T(1024)(128)(4,1)} bitcast(%param)
  %start.1 = ((s8[16384000]{0:T(1024)(128)(4,1)}), s8[8192000]{0:T(1024)(128)(4,1)S(1)}, \
s32[]{:S(2)}) async-start(%bitcast.1), calls=%first
  %start.2 = ((s8[16384000]{0:T(1024)(128)(4,1)}), s8[8192000]{0:T(1024)(128)(4,1)S(1)}, \
s32[]{:S(2)}) async-start(%bitcast.1), calls=%second
  %done.1 = s8[8192000]{0:T(1024)(128)(4,1)S(1)} async-done(%start.1)
  %done.2 = s8[8192000]{0:T(1024)(128)(4,1)S(1)} async-done(%start.2)
  %joined = f32[128,32000]{1,0:T(8,128)S(1)} custom-call(%done.1, %done.2), \
custom_call_target="ConcatBitcast"
  %copy.1 = f32[128,32000]{0,1:T(8,128)} copy(%joined)
  ROOT %negate.1 = f32[128,32000]{0,1:T(8,128)} negate(%copy.1)
}
"""
        },
        tallies={"parameter": 1},
    ),
    Example(
        "the same order under other tiles",
        1,
        {
            "final": """\
HloModule jit_step, is_scheduled=true

ENTRY %main (param: f32[128,1,1024]) -> f32[128,1,1024] {
  %param = f32[128,1,1024]{2,1,0:T(1,128)} parameter(0)
  ROOT %copy.1 = f32[128,1,1024]{2,0,1:T(8,128)} copy(%param)
}
"""
        },
    ),
    Example(
        "near miss: copies that move, convert, alias or are small",
        0,
        {
            "final": """\
HloModule jit_step, is_scheduled=true

ENTRY %main (param: f32[128,32000], small: f32[16,64], one: f32[1,32000]) -> \
(f32[128,32000], bf16[128,32000], f32[16,64], bf16[1,32000]) {
  %param = f32[128,32000]{1,0:T(8,128)} parameter(0)
  %small = f32[16,64]{1,0:T(8,128)} parameter(1)
  %one = f32[1,32000]{1,0:T(1,128)} parameter(2)
  %copy.1 = f32[128,32000]{1,0:T(8,128)S(1)} copy(%param)
  %copy.2 = bf16[128,32000]{1,0:T(8,128)(2,1)} copy(%param)
  %copy.3 = f32[16,64]{0,1:T(8,128)} copy(%small)
  %copy.4 = bf16[1,32000]{1,0:T(2,128)(2,1)} copy(%one)
  ROOT %tuple.1 = (f32[128,32000]{1,0:T(8,128)S(1)}, bf16[128,32000]{1,0:T(8,128)(2,1)}, \
f32[16,64]{0,1:T(8,128)}, bf16[1,32000]{1,0:T(2,128)(2,1)}) \
tuple(%copy.1, %copy.2, %copy.3, %copy.4)
}
"""
        },
    ),
)

FIXES = (
    vocab_embed(
        "store the kernel transposed, [vocab, embed]: its gradient comes out as stored",
        clears=WHEREVER_IT_SHOWS,
    ),
    kernel_order_grad(
        "run the forward dot under jax.sharding.auto_axes, so that no annotation stands "
        "between the gradient's dot and its transpose",
        cost="helps where auto mode is clean: explicit mode on v5e and v5p, not on v6e",
        clears=EXPLICIT_ON_V5,
    ),
    free_entry_layout("leave the entry layouts of the kernel and its moments to XLA (Layout.AUTO)"),
)

RULE = Rule(
    code="HLA002",
    slug="relayout-copy",
    summary="copies that change the order or the tiling of a buffer",
    documentation=__doc__,
    reads=("final",),
    check=check,
    tally="place",
    examples=EXAMPLES,
    fixes=FIXES,
    options={"min_bytes": 64 << 10},
    watch=Watch(
        counts="copies that change the order or the tiling of a buffer",
        phases=("laid-out",),
        elsewhere="before layout assignment no layout is settled",
        opcodes=("copy",),
        sees=sees,
        reach="computation",
    ),
)
