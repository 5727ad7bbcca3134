"""The language-model head: hidden states times a kernel, cross entropy, one AdamW update.

The hidden states are sharded over the batch and the kernel over one of its axes, both along the
mesh axis ``fsdp``. On an explicit mesh jax writes a sharding annotation behind every operation. The
one behind the kernel gradient's dot keeps XLA from folding the transpose that follows, so that the
gradient reaches the optimiser in the other orientation than the kernel and its moments: those three
buffers are copied into another layout on entry and back at the end. Where a device's share of a row
of that gradient is short (under 512 bytes on TPU), its reduce-scatter is lost as well. The layouts
here are the ways out; which of them help depends on the target and the mode.
"""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.models._checks import check_divides, check_layout
from hlo_audit.models.dense import Dense
from hlo_audit.program import Layout, Model
from hlo_audit.stored import Storage, StoredArray, StoredLayouts, axis_names, rearrange

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import jax.experimental.layout as jax_layout
    import jax.numpy as jnp
    import numpy as np
else:
    jax = lazy_import("jax")
    jax_layout = lazy_import("jax.experimental.layout")
    jnp = lazy_import("jax.numpy")
    np = lazy_import("numpy")

MESH_AXIS = "fsdp"

DTYPES = ("bfloat16", "float32")

EMBED_VOCAB = "embed-vocab"
VOCAB_EMBED = "vocab-embed"
KERNEL_ORDER_GRAD = "kernel-order-grad"
FREE_ENTRY_LAYOUT = "free-entry-layout"
VOCAB_PARALLEL = "vocab-parallel"

LAYOUTS = (
    Layout(EMBED_VOCAB, "kernel [embed, vocab] sharded over embed"),
    Layout(VOCAB_EMBED, "kernel stored transposed, [vocab, embed], sharded over embed"),
    Layout(KERNEL_ORDER_GRAD, "as embed-vocab, with auto_axes around the forward product"),
    Layout(FREE_ENTRY_LAYOUT, "as embed-vocab, with the layouts of kernel and moments left to XLA"),
    Layout(VOCAB_PARALLEL, "kernel [embed, vocab] sharded over vocab, the hidden states gathered"),
)


@dataclass(frozen=True)
class LMHeadConfig:
    """The sizes and settings of the head and its optimiser.

    Attributes:
        embed: width of the hidden states.
        vocab: number of tokens.
        batch: sequences in the global batch.
        seq: tokens in a sequence.
        dtype: dtype of the hidden states and of the product, ``bfloat16`` or ``float32``.
        logits_dtype: dtype that the product gives the logits in; the loss is always in float32.
        tied_embeddings: the head has no kernel of its own and multiplies by the table of the
            input embedding, ``[vocab, embed]`` in every layout. The lookup is not part of the step.
        learning_rate: of AdamW, as are the rest.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient and multiplied by the learning rate.

    Raises:
        UsageError: for a value out of its range.
    """

    embed: int = 512
    vocab: int = 32000
    batch: int = 16
    seq: int = 128
    dtype: str = "bfloat16"
    logits_dtype: str = "bfloat16"
    tied_embeddings: bool = False
    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name in ("embed", "vocab", "batch", "seq"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is too small for an LM head",
                    hint=f"set {name} to 1 or more",
                )
        for name in ("dtype", "logits_dtype"):
            if getattr(self, name) not in DTYPES:
                raise UsageError(
                    f"{name}={getattr(self, name)} is no dtype of the LM head",
                    hint="one of: " + ", ".join(DTYPES),
                )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is no decay of a moment",
                    hint=f"set {name} to 0 or more and less than 1",
                )
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(
                    f"{name}={getattr(self, name)} is negative or no number",
                    hint=f"set {name} to 0 or more",
                )
        if not 0 < self.eps < math.inf:
            raise UsageError(f"eps={self.eps} is not positive", hint="set eps to more than 0")


class State(NamedTuple):
    """What a training step carries over, each leaf an array or what describes one.

    Attributes:
        kernel: float32, ``[embed, vocab]`` or, as the layout stores it, ``[vocab, embed]``.
        mu: first moment of its gradient, as the kernel.
        nu: second moment, as the kernel.
        count: int32 scalar, the updates made so far.
    """

    kernel: Any
    mu: Any
    nu: Any
    count: Any


class Batch(NamedTuple):
    """What a training step reads.

    Attributes:
        hidden: ``[batch, seq, embed]`` in the config's dtype.
        targets: int32 ``[batch, seq]``, each in ``[0, vocab)``.
    """

    hidden: Any
    targets: Any


def dense_layer(config: LMHeadConfig, layout: str) -> Dense:
    """Return the head's dense layer, with its kernel oriented and sharded as the layout has it.

    Raises:
        UsageError: for an unknown layout, and for ``vocab-embed`` with tied embeddings.
    """
    check_layout("lm-head", LAYOUTS, layout)
    return Dense(
        in_features=config.embed,
        out_features=config.vocab,
        kernel_axes=(None, MESH_AXIS) if layout == VOCAB_PARALLEL else (MESH_AXIS, None),
        dtype=config.dtype,
        output_dtype=config.logits_dtype,
        kernel_transposed=layout == VOCAB_EMBED,
        tied_embedding=config.tied_embeddings,
    )


def init(config: LMHeadConfig, key: jax.Array, layout: str = EMBED_VOCAB) -> State:
    """Return the state before the first step.

    Under one key every layout starts from the same values: ``vocab-embed``'s kernel is exactly the
    transpose of the others' (so its statistics are theirs: truncated normal with standard deviation
    ``embed ** -0.5``). Place it with :func:`state_shardings`.

    Raises:
        UsageError: as :func:`dense_layer`.
    """
    kernel = dense_layer(config, layout).init(key)["kernel"]
    # Two buffers of zeros, not one twice: the step donates both.
    mu, nu = jnp.zeros_like(kernel), jnp.zeros_like(kernel)
    return State(kernel, mu, nu, jnp.zeros((), jnp.int32))


def apply(kernel: jax.Array, hidden: jax.Array, config: LMHeadConfig, layout: str) -> jax.Array:
    """Return the logits, ``[batch, seq, vocab]`` in ``logits_dtype``.

    Shardings follow the mesh in use (``jax.set_mesh``): an explicit one is told where kernel or
    hidden states are gathered, an auto one only how the logits lie; without a mesh nothing is said.

    Raises:
        UsageError: as :func:`dense_layer`.
    """
    dense = dense_layer(config, layout)
    # Cast before the gather: half the bytes on the wire.
    kernel = kernel.astype(config.dtype)
    logits_axes: tuple[str | None, ...]
    if layout == VOCAB_PARALLEL:
        hidden = _reshard(hidden, None, None, None)
        logits_axes = (None, None, MESH_AXIS)
    else:
        kernel = _reshard(kernel, None, None)
        logits_axes = (MESH_AXIS, None, None)

    def product(kernel: jax.Array, hidden: jax.Array) -> jax.Array:
        return dense.apply({"kernel": kernel}, hidden)

    if layout == KERNEL_ORDER_GRAD and _is_explicit():
        # Inside, jax annotates nothing, so the gradient's transpose stands next to its dot. On an
        # auto mesh it does so anyway.
        spec = jax.sharding.PartitionSpec(*logits_axes)
        product = jax.sharding.auto_axes(product, axes=MESH_AXIS, out_sharding=spec)
    return _constrain(product(kernel, hidden), *logits_axes)


def loss(
    kernel: jax.Array, hidden: jax.Array, targets: jax.Array, config: LMHeadConfig, layout: str
) -> jax.Array:
    """Return the mean cross entropy of the targets in nats, a float32 scalar.

    Raises:
        UsageError: as :func:`dense_layer`.
    """
    logits = apply(kernel, hidden, config, layout).astype(jnp.float32)
    vocabulary = jnp.arange(config.vocab)
    if layout == VOCAB_PARALLEL:
        vocabulary = _reshard(vocabulary, MESH_AXIS)
        targets = _reshard(targets, None, None)
    # A comparison, where a gather of the target's logit would scatter in the gradient.
    picked = jnp.sum(jnp.where(targets[..., None] == vocabulary, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def train_step(
    config: LMHeadConfig, layout: str
) -> Callable[..., tuple[State, jax.Array, jax.Array]]:
    """Return ``step(kernel, mu, nu, count, hidden, targets) -> (state, loss, hidden_grad)``.

    The arguments are those of :class:`State` and :class:`Batch`; ``loss`` is a float32 scalar in
    nats and ``hidden_grad`` has the shape and dtype of ``hidden``.

    Raises:
        UsageError: as :func:`dense_layer`.
    """
    dense_layer(config, layout)

    def step(
        kernel: jax.Array,
        mu: jax.Array,
        nu: jax.Array,
        count: jax.Array,
        hidden: jax.Array,
        targets: jax.Array,
    ) -> tuple[State, jax.Array, jax.Array]:
        value, (grad, hidden_grad) = jax.value_and_grad(loss, argnums=(0, 1))(
            kernel, hidden, targets, config, layout
        )
        state = _adamw(State(kernel, mu, nu, count), grad, config)
        return state, value, hidden_grad

    return step


def checkpoint_layouts(config: LMHeadConfig) -> StoredLayouts:
    """Describe how each layout stores the kernel and its moments.

    A checkpoint holds them as ``embed-vocab`` does; :mod:`hlo_audit.checkpoint` turns them for a
    run in another layout. With tied embeddings there is no ``vocab-embed``, and every layout stores
    ``[vocab, embed]``.
    """
    layouts = [layout.name for layout in LAYOUTS]
    if config.tied_embeddings:
        layouts.remove(VOCAB_EMBED)
    kernel = StoredArray(
        path="kernel",
        dtype="float32",
        layouts={
            layout: Storage(
                _kernel_axes(config, layout), dense_layer(config, layout).stored_kernel_axes
            )
            for layout in layouts
        },
        moments={"mu": "float32", "nu": "float32"},
    )
    sizes = {"embed": config.embed, "vocab": config.vocab}
    return StoredLayouts("lm-head", EMBED_VOCAB, sizes, (kernel,))


def convert(state: State, from_layout: str, to_layout: str) -> State:
    """Return the state as the other layout stores it; there and back is exact.

    A transpose of kernel and moments to or from ``vocab-embed``, the same arrays otherwise. Works
    on jax and on numpy arrays, of any sizes and dtypes. Where the arrays are placed is not changed:
    ``vocab-parallel`` shards another axis (see :func:`state_shardings`). To check what is turned,
    as with a checkpoint, see :func:`checkpoint_layouts`.

    A state with tied embeddings has one orientation only, and none in ``vocab-embed``.

    Raises:
        UsageError: for an unknown layout.
    """
    source = _kernel_axes(LMHeadConfig(), from_layout)
    target = _kernel_axes(LMHeadConfig(), to_layout)
    if source == target:
        return state
    sizes = dict(zip(axis_names(source), state.kernel.shape, strict=True))
    kernel, mu, nu = (rearrange(array, source, target, sizes) for array in state[:3])
    return State(kernel, mu, nu, state.count)


def state_shardings(config: LMHeadConfig, mesh: jax.sharding.Mesh, layout: str) -> State:
    """Return the ``NamedSharding`` of each leaf of the state.

    Raises:
        UsageError: as :func:`dense_layer`, for a mesh without the axis ``fsdp``, and for a size
            that the axis does not divide.
    """
    axes = dense_layer(config, layout).stored_kernel_axes
    sharded_size = "vocab" if layout == VOCAB_PARALLEL else "embed"
    check_divides(
        mesh, MESH_AXIS, {sharded_size: getattr(config, sharded_size)}, sharded="the LM head is"
    )
    kernel = _sharding(mesh, *axes)
    return State(kernel, kernel, kernel, _sharding(mesh))


def batch_shardings(config: LMHeadConfig, mesh: jax.sharding.Mesh) -> Batch:
    """Return the ``NamedSharding`` of each leaf of the batch.

    Raises:
        UsageError: for a mesh without the axis ``fsdp``, or whose size does not divide the batch.
    """
    check_divides(mesh, MESH_AXIS, {"batch": config.batch}, sharded="the LM head is")
    return Batch(_sharding(mesh, MESH_AXIS, None, None), _sharding(mesh, MESH_AXIS, None))


def abstract_state(config: LMHeadConfig, mesh: jax.sharding.Mesh, layout: str) -> State:
    """Return the state as ``jax.ShapeDtypeStruct`` with shardings; no array is made.

    Raises:
        UsageError: as :func:`state_shardings`.
    """
    shardings = state_shardings(config, mesh, layout)
    shape = dense_layer(config, layout).kernel_shape
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings.kernel)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings.count)
    return State(kernel, kernel, kernel, count)


def abstract_batch(config: LMHeadConfig, mesh: jax.sharding.Mesh) -> Batch:
    """Return the batch as ``jax.ShapeDtypeStruct`` with shardings; no array is made.

    Raises:
        UsageError: as :func:`batch_shardings`.
    """
    shardings = batch_shardings(config, mesh)
    tokens = (config.batch, config.seq)
    return Batch(
        jax.ShapeDtypeStruct((*tokens, config.embed), config.dtype, sharding=shardings.hidden),
        jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=shardings.targets),
    )


def build(mesh: jax.sharding.Mesh, *, layout: str, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted training step and its abstract arguments.

    Lower it with the mesh in use: ``with jax.set_mesh(mesh): jitted.lower(*args)``. The mode is the
    type of the mesh's axes. Kernel, moments and count are donated. To run ``free-entry-layout``,
    compile first and place the arguments by the ``input_formats`` of what came out: jax refuses to
    call a function whose layouts are still open.

    Args:
        mesh: has an axis ``fsdp``.
        layout: the name of one of ``LAYOUTS``.
        **settings: fields of :class:`LMHeadConfig`.

    Raises:
        UsageError: for settings that cannot be or that the mesh does not divide.
    """
    config = LMHeadConfig(**settings)
    args = (*abstract_state(config, mesh, layout), *abstract_batch(config, mesh))
    state, batch = state_shardings(config, mesh, layout), batch_shardings(config, mesh)
    if layout == FREE_ENTRY_LAYOUT:
        free = jax_layout.Format(jax_layout.Layout.AUTO, state.kernel)
        state = State(free, free, free, state.count)
    jitted = jax.jit(
        train_step(config, layout),
        in_shardings=(*state, *batch),
        out_shardings=(state, _sharding(mesh), batch.hidden),
        donate_argnums=tuple(range(len(state))),
    )
    return jitted, args


def _kernel_axes(config: LMHeadConfig, layout: str) -> tuple[str, ...]:
    """Return the logical axes of the kernel in the order in which the layout stores them."""
    dense = replace(dense_layer(config, layout), kernel_axes=("embed", "vocab"))
    return tuple(str(axis) for axis in dense.stored_kernel_axes)


def run(mesh: jax.sharding.Mesh, *, layout: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Run the step on the mesh's devices and return what came of it, for each kind of inputs.

    The inputs are the same for every layout and mode: ``exact``, for one step, and ``random``, for
    three. The results are numpy arrays, the kernel's in the orientation of ``embed-vocab``: loss
    and gradients of the first step (the kernel's gradient as the first moment tells it), loss and
    state after the last.

    Args:
        mesh: has an axis ``fsdp``, of devices that are there.
        layout: the name of one of ``LAYOUTS``.
        **settings: fields of :class:`LMHeadConfig`; for exact sums batch, seq and vocab are powers
            of 2, 256 at the most, and the dtypes float32.

    Raises:
        UsageError: as :func:`build`.
    """
    config = LMHeadConfig(**settings)
    with jax.set_mesh(mesh):
        jitted, args = build(mesh, layout=layout, **settings)
        step = jitted.lower(*args).compile()
        return {
            "exact": _take_steps(step, config, layout, *_exact_inputs(config), steps=1),
            "random": _take_steps(step, config, layout, *_random_inputs(config), steps=3),
        }


def _take_steps(
    step: Any, config: LMHeadConfig, layout: str, kernel: Any, batch: Batch, *, steps: int
) -> dict[str, Any]:
    if config.tied_embeddings:
        kernel = kernel.T
    zeros = np.zeros_like(kernel)
    state = convert(State(kernel, zeros, zeros, np.int32(0)), EMBED_VOCAB, layout)
    # In the layouts that were compiled for, which free-entry-layout has left to XLA.
    *leaves, hidden, targets = jax.device_put((*state, *batch), step.input_formats[0])
    results = {}
    for number in range(steps):
        after, value, hidden_grad = step(*leaves, hidden, targets)
        leaves = list(after)
        state = convert(State(*(np.asarray(leaf) for leaf in after)), layout, EMBED_VOCAB)
        if number == 0:
            results = {
                "loss": np.asarray(value),
                "hidden gradient": np.asarray(hidden_grad),
                "kernel gradient": state.mu / np.float32(1 - config.b1),
            }
    return {
        **results,
        "last loss": np.asarray(value),
        "kernel": state.kernel,
        "first moment": state.mu,
        "second moment": state.nu,
    }


def _exact_inputs(config: LMHeadConfig) -> tuple[Any, Batch]:
    """A kernel, ``[embed, vocab]``, and a batch for which no sum of a step rounds.

    Small integers, so that products and their sums are exact. The first row of the kernel holds a
    different fraction for each token, and all is scaled so that two logits of a position are at
    least 128 apart: the softmax is then exactly 0 or 1, and the gradients are sums of integers
    again, over a power of 2.
    """
    rng = np.random.default_rng(0)
    kernel = rng.integers(-3, 4, (config.embed, config.vocab)).astype(np.float32)
    kernel[0] = np.arange(config.vocab) / config.vocab
    hidden = rng.integers(-3, 4, (config.batch, config.seq, config.embed)).astype(np.float32)
    hidden[..., 0] = 1
    targets = rng.integers(0, config.vocab, (config.batch, config.seq)).astype(np.int32)
    return kernel, Batch((128 * config.vocab * hidden).astype(config.dtype), targets)


def _random_inputs(config: LMHeadConfig) -> tuple[Any, Batch]:
    """A kernel, ``[embed, vocab]``, and a batch of random floats."""
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((config.embed, config.vocab)) * config.embed**-0.5
    hidden = rng.standard_normal((config.batch, config.seq, config.embed))
    targets = rng.integers(0, config.vocab, (config.batch, config.seq)).astype(np.int32)
    return kernel.astype(np.float32), Batch(hidden.astype(config.dtype), targets)


def _adamw(state: State, grad: jax.Array, config: LMHeadConfig) -> State:
    count = state.count + 1
    mu = config.b1 * state.mu + (1 - config.b1) * grad
    nu = config.b2 * state.nu + (1 - config.b2) * grad * grad
    mu_hat = mu / (1 - config.b1**count)
    nu_hat = nu / (1 - config.b2**count)
    update = mu_hat / (jnp.sqrt(nu_hat) + config.eps) + config.weight_decay * state.kernel
    return State(state.kernel - config.learning_rate * update, mu, nu, count)


def _reshard(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shard ``x`` by mesh axis names on an explicit mesh, where no operation would do it itself."""
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*axes)) if _is_explicit() else x


def _constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Tell XLA how ``x`` is sharded on an auto mesh; on an explicit one its type says so."""
    if jax.sharding.get_abstract_mesh().empty or _is_explicit():
        return x
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*axes))
    return constrained


def _is_explicit() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types.get(MESH_AXIS) == jax.sharding.AxisType.Explicit


def _sharding(mesh: jax.sharding.Mesh, *axes: str | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


LM_HEAD = Model(
    name="lm-head",
    summary="language-model head: hidden states x kernel, cross entropy, AdamW",
    config=LMHeadConfig,
    layouts=LAYOUTS,
    mesh={MESH_AXIS: -1},
    topologies={"tpu": "v5p:2x2x1", "cpu": "4"},
    build="hlo_audit.models.lm_head:build",
    run="hlo_audit.models.lm_head:run",
    run_settings={
        "embed": 64,
        "vocab": 256,
        "batch": 8,
        "seq": 16,
        "dtype": "float32",
        "logits_dtype": "float32",
    },
    quick_settings={"batch": 4, "seq": 16},
    stored=checkpoint_layouts,
)
"""The language-model head; see this module's docstring for what it shows."""
