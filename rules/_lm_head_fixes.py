"""The layout fixes that the LM head shows, for the rules whose findings they clear.

How closely the numbers of a fix agree and what it costs is the same for every rule; a rule says in
its own words why the fix helps it, and where it was measured to.
"""

from __future__ import annotations

from hlo_audit.rule import Agreement, LayoutFix, Target, bit_for_bit

_MODEL = "lm-head"
_BASELINE = "embed-vocab"

V5 = ("v5e:2x2", "v5p:2x2x1")
V5_AND_V6E = (*V5, "v6e:2x2")

EXPLICIT_ON_V5 = (Target("explicit", V5),)
EXPLICIT_ON_V5_AND_V6E = (Target("explicit", V5_AND_V6E),)
WHEREVER_IT_SHOWS = (*EXPLICIT_ON_V5_AND_V6E, Target("auto", ("v6e:2x2",)))
"""Explicit mode everywhere, and auto mode on v6e, where it has the faults of the baseline too."""


def vocab_embed(change: str, clears: tuple[Target, ...]) -> LayoutFix:
    """Store the kernel transposed."""
    return LayoutFix(
        name="vocab-embed",
        change=change,
        model=_MODEL,
        before=_BASELINE,
        numerics=(
            Agreement("exact", 0.0, "both sum the same products, modulo the transpose"),
            Agreement(
                "random",
                1e-5,
                "a product with a transposed kernel may be summed in another order, in float32",
            ),
        ),
        cost="turns the checkpoint; under auto mode, where the transpose is folded, it is slower",
        clears=clears,
        slower=(Target("auto", V5),),
    )


def kernel_order_grad(change: str, cost: str, clears: tuple[Target, ...]) -> LayoutFix:
    """Run the forward dot under ``jax.sharding.auto_axes``."""
    return LayoutFix(
        name="kernel-order-grad",
        change=change,
        model=_MODEL,
        before=_BASELINE,
        numerics=bit_for_bit("the same program without the annotations"),
        cost=cost,
        clears=clears,
    )


def free_entry_layout(change: str) -> LayoutFix:
    """Leave the entry layouts to XLA."""
    return LayoutFix(
        name="free-entry-layout",
        change=change,
        model=_MODEL,
        before=_BASELINE,
        numerics=bit_for_bit("the same program, laid out otherwise"),
        cost="arrays must be made in the formats that the compiled step asks for",
        clears=WHEREVER_IT_SHOWS,
    )
