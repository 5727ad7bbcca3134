"""The opcodes that HLO has, to tell one that a module lacks from one that is misspelt."""

from __future__ import annotations

import re

# Those of XLA's hlo_opcode.h; asynchronous ones by what they start.
OPCODES = frozenset(
    """
    abs acos acosh add add-dependency after-all all-gather all-reduce all-to-all and asin
    asinh async atan atan2 atanh batch-norm-grad batch-norm-inference batch-norm-training
    bitcast bitcast-convert broadcast call cbrt ceil cholesky clamp collective-broadcast
    collective-permute collective-reduce compare complex concatenate conditional constant
    convert convolution copy cosh cosine count-leading-zeros custom-call divide domain dot
    dynamic-reshape dynamic-slice dynamic-update-slice erf exponential exponential-minus-one
    fft floor fusion gather get-dimension-size get-tuple-element imag infeed iota is-finite
    log log-plus-one logistic map maximum minimum mulhi multiply negate not opt-barrier or
    outfeed pad parameter partition-id popcnt power ragged-all-to-all ragged-dot real recv
    reduce reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse
    rng rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt
    scaled-dot scan scatter select select-and-scatter send set-dimension-size shift-left
    shift-right-arithmetic shift-right-logical shuffle sign sine sinh slice sort sqrt
    stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
    """.split()  # noqa: SIM905  (they are read, and compared with XLA's, more easily)
)


def is_opcode(name: str) -> bool:
    """Whether HLO has this opcode; of any also ``-start``, ``-update`` and ``-done``, which is how
    text writes asynchronous computations that hold it alone."""
    return name in OPCODES or re.sub(r"-(?:start|update|done)$", "", name) in OPCODES
