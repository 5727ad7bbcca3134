"""Routed experts: the tokens of each expert times its own weights, by a grouped matmul kernel.

Tokens, and the stored float32 weights of the experts, are sharded over the mesh axis ``fsdp``: the
tokens over the batch, the weights over the experts. Under ``shard_map`` each device gathers all the
experts' weights for use, cast before the gather, sorts its tokens by expert and multiplies. The
forward pass is computed again in the backward pass (remat), gathers included.

The grouped product is a kernel, into which XLA folds nothing. So the gradient of its input,
``dout @ w.swapaxes(1, 2)``, makes XLA write every gathered weight once more, transposed, at each
step: the layout ``swapaxes``. With ``transposed-rhs`` the kernel reads the gathered weights as they
are. Both store and gather the same arrays, and differ in that one product alone.
"""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.models._checks import check_divides, check_layout
from hlo_audit.models.grouped_matmul import SWAPAXES, TRANSPOSED_RHS, grouped_matmul
from hlo_audit.program import Layout, Model

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import jax.numpy as jnp
    import numpy as np
else:
    jax = lazy_import("jax")
    jnp = lazy_import("jax.numpy")
    np = lazy_import("numpy")

MESH_AXIS = "fsdp"

DTYPES = ("bfloat16", "float32")

LAYOUTS = (
    Layout(SWAPAXES, "input gradients on the experts' weights with swapped axes"),
    Layout(TRANSPOSED_RHS, "input gradients by a kernel that reads the weights as they are"),
)


@dataclass(frozen=True)
class MoEConfig:
    """The sizes and settings of the experts and their optimiser.

    Attributes:
        experts: number of experts.
        top_k: experts that each token goes to.
        embed: width of the tokens.
        mlp: width inside of an expert.
        batch: sequences in the global batch.
        seq: tokens in a sequence.
        gated: an expert is ``(silu(x @ gate) * (x @ up)) @ wo``, with gate and up side by side in
            one array ``wi``, ``[experts, embed, 2 * mlp]``. Without, it is ``silu(x @ wi) @ wo``,
            and ``wi`` is ``[experts, embed, mlp]``.
        dtype: what tokens and weights are cast to for the products, ``bfloat16`` or ``float32``.
        quantization: empty, or ``int8``: the experts' products see their weights rounded to int8.
        learning_rate: of gradient descent with momentum.
        momentum: decay of the running sum of gradients.

    Raises:
        UsageError: for a value out of its range.
    """

    experts: int = 128
    top_k: int = 2
    embed: int = 512
    mlp: int = 384
    batch: int = 8
    seq: int = 32
    gated: bool = True
    dtype: str = "bfloat16"
    quantization: str = ""
    learning_rate: float = 1e-3
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "embed", "mlp", "batch", "seq"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is too small for a mixture of experts",
                    hint=f"set {name} to 1 or more",
                )
        if self.top_k > self.experts:
            raise UsageError(
                f"top_k={self.top_k} is more than there are experts, {self.experts}",
                hint=f"set top_k to {self.experts} or less",
            )
        if self.dtype not in DTYPES:
            raise UsageError(
                f"dtype={self.dtype} is no dtype of the experts",
                hint="one of: " + ", ".join(DTYPES),
            )
        if self.quantization not in ("", "int8"):
            raise UsageError(
                f"quantization={self.quantization} is no quantization of the experts",
                hint="leave it empty or say int8",
            )
        if not 0 <= self.momentum < 1:
            raise UsageError(
                f"momentum={self.momentum} is no decay of the gradients' sum",
                hint="set momentum to 0 or more and less than 1",
            )
        if not 0 <= self.learning_rate < math.inf:
            raise UsageError(
                f"learning_rate={self.learning_rate} is negative or no number",
                hint="set learning_rate to 0 or more",
            )

    @property
    def wi_columns(self) -> int:
        """The last axis of ``wi``."""
        return 2 * self.mlp if self.gated else self.mlp


class Params(NamedTuple):
    """The parameters, each leaf an array or what describes one; all are float32.

    Attributes:
        router: ``[embed, experts]``, on every device.
        wi: ``[experts, embed, wi_columns]``, sharded over the experts.
        wo: ``[experts, mlp, embed]``, sharded over the experts.
    """

    router: Any
    wi: Any
    wo: Any


class Batch(NamedTuple):
    """What a training step reads, sharded over the batch.

    Attributes:
        tokens: ``[batch, seq, embed]`` in the config's dtype.
        targets: ``[batch, seq, embed]`` in the config's dtype.
    """

    tokens: Any
    targets: Any


def init(config: MoEConfig, key: jax.Array) -> tuple[Params, Params]:
    """Return parameters and momenta before the first step.

    Normal with variance one over the width that is contracted; the momenta are zero. Place them
    with :func:`param_shardings`.
    """
    keys = jax.random.split(key, 3)
    shapes = _param_shapes(config)
    params = Params(
        *(
            jax.random.normal(k, shape, jnp.float32) * shape[-2] ** -0.5
            for k, shape in zip(keys, shapes, strict=True)
        )
    )
    return params, Params(*map(jnp.zeros_like, params))


def apply(
    params: Params, tokens: jax.Array, config: MoEConfig, layout: str, *, interpret: bool = False
) -> jax.Array:
    """Return the experts' output on one device, with all the weights there.

    Args:
        params: as :class:`Params`; all experts, in any float dtype.
        tokens: ``[tokens, embed]``, of one device.
        config: the sizes.
        layout: the name of one of ``LAYOUTS``.
        interpret: run the kernels in Pallas' interpreter.

    Returns:
        ``[tokens, embed]`` in the config's dtype: for each token the sum of its experts' outputs,
        weighted by the softmax over their logits in the router.

    Raises:
        UsageError: for an unknown layout.
    """
    check_layout("moe-gmm", LAYOUTS, layout)
    count, embed = tokens.shape
    logits = jnp.dot(tokens, params.router.astype(tokens.dtype), preferred_element_type=jnp.float32)
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(logits), config.top_k)
    chosen = experts[..., None] == jnp.arange(config.experts)
    # A comparison, where taking the logits themselves would scatter in the gradient.
    best = jnp.sum(jnp.where(chosen, logits[:, None, :], 0.0), axis=-1)
    weights = jax.nn.softmax(best, axis=-1)
    group_sizes = jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    place = jnp.argsort(order)
    matmul = partial(
        grouped_matmul,
        group_sizes=group_sizes,
        quantization=config.quantization,
        dlhs=layout,
        interpret=interpret,
    )
    rows = _permute()(jnp.repeat(tokens, config.top_k, axis=0), order, place)
    hidden = matmul(rows, params.wi)
    if config.gated:
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = jax.nn.silu(gate) * up
    else:
        hidden = jax.nn.silu(hidden)
    rows = _permute()(matmul(hidden, params.wo), place, order)
    rows = rows.reshape(count, config.top_k, embed)
    return jnp.sum(rows * weights[..., None].astype(rows.dtype), axis=1)


@cache
def _permute() -> Callable[..., jax.Array]:
    """``f(rows, order, inverse)`` gives ``rows[order]``.

    Its gradient gathers by the inverse, where that of a gather would scatter.
    """

    def take(rows: jax.Array, order: jax.Array) -> jax.Array:
        return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)

    @jax.custom_vjp
    def permute(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
        return take(rows, order)

    permute.defvjp(
        lambda rows, order, inverse: (take(rows, order), inverse),
        lambda inverse, grad: (take(grad, inverse), None, None),
    )
    return permute


def loss(
    params: Params,
    batch: Batch,
    config: MoEConfig,
    layout: str,
    mesh: Any,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return half the mean squared distance of the output from the targets, a float32 scalar.

    Args:
        params: as :class:`Params`.
        batch: as :class:`Batch`.
        config: the sizes.
        layout: the name of one of ``LAYOUTS``.
        mesh: with an axis ``fsdp``, which the experts' weights are gathered over.
        interpret: run the kernels in Pallas' interpreter.

    Raises:
        UsageError: for an unknown layout.
    """
    whole, sharded = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(MESH_AXIS)

    def on_each_device(params: Params, tokens: jax.Array) -> jax.Array:
        # Cast before the gather: half the bytes on the wire.
        wi, wo = (
            jax.lax.all_gather(w.astype(config.dtype), MESH_AXIS, axis=0, tiled=True)
            for w in (params.wi, params.wo)
        )
        rows = tokens.reshape(-1, config.embed)
        out = apply(Params(params.router, wi, wo), rows, config, layout, interpret=interpret)
        return out.reshape(tokens.shape)

    experts = jax.shard_map(
        jax.checkpoint(on_each_device),
        mesh=mesh,
        in_specs=(Params(whole, sharded, sharded), sharded),
        out_specs=sharded,
        # What varies over the mesh is not followed through a kernel.
        check_vma=False,
    )
    out = experts(params, batch.tokens).astype(jnp.float32)
    return 0.5 * jnp.mean((out - batch.targets.astype(jnp.float32)) ** 2)


def train_step(
    config: MoEConfig, layout: str, mesh: Any, *, interpret: bool = False
) -> Callable[..., tuple[Params, Params, jax.Array, jax.Array]]:
    """Return ``step(params, momenta, batch) -> (params, momenta, loss, tokens_grad)``.

    ``loss`` is a float32 scalar and ``tokens_grad`` has the shape and dtype of the tokens.

    Raises:
        UsageError: for an unknown layout.
    """
    check_layout("moe-gmm", LAYOUTS, layout)

    def step(
        params: Params, momenta: Params, batch: Batch
    ) -> tuple[Params, Params, jax.Array, jax.Array]:
        def of(params: Params, tokens: jax.Array) -> jax.Array:
            at = Batch(tokens, batch.targets)
            return loss(params, at, config, layout, mesh, interpret=interpret)

        value, (grads, tokens_grad) = jax.value_and_grad(of, argnums=(0, 1))(params, batch.tokens)
        momenta = jax.tree.map(lambda m, g: config.momentum * m + g, momenta, grads)
        params = jax.tree.map(lambda p, m: p - config.learning_rate * m, params, momenta)
        return params, momenta, value, tokens_grad

    return step


def param_shardings(config: MoEConfig, mesh: jax.sharding.Mesh) -> Params:
    """Return the ``NamedSharding`` of each parameter, and so of its momentum.

    Raises:
        UsageError: for a mesh without the axis ``fsdp``, or whose size does not divide the experts.
    """
    check_divides(mesh, MESH_AXIS, {"experts": config.experts}, sharded="tokens and experts are")
    experts = _sharding(mesh, MESH_AXIS, None, None)
    return Params(_sharding(mesh, None, None), experts, experts)


def batch_shardings(config: MoEConfig, mesh: jax.sharding.Mesh) -> Batch:
    """Return the ``NamedSharding`` of each leaf of the batch.

    Raises:
        UsageError: for a mesh without the axis ``fsdp``, or whose size does not divide the batch.
    """
    check_divides(mesh, MESH_AXIS, {"batch": config.batch}, sharded="tokens and experts are")
    tokens = _sharding(mesh, MESH_AXIS, None, None)
    return Batch(tokens, tokens)


def build(mesh: jax.sharding.Mesh, *, layout: str, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted training step and its abstract arguments.

    Lower it with the mesh in use: ``with jax.set_mesh(mesh): jitted.lower(*args)``. The mode is the
    type of the mesh's axes. Parameters and momenta are donated. On a mesh of other devices than
    TPUs the kernels run in Pallas' interpreter.

    Args:
        mesh: has an axis ``fsdp``.
        layout: the name of one of ``LAYOUTS``.
        **settings: fields of :class:`MoEConfig`.

    Raises:
        UsageError: for settings that cannot be or that the mesh does not divide.
    """
    config = MoEConfig(**settings)
    param_sharding, batch_sharding = param_shardings(config, mesh), batch_shardings(config, mesh)
    params = Params(
        *(
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for shape, sharding in zip(_param_shapes(config), param_sharding, strict=True)
        )
    )
    tokens = jax.ShapeDtypeStruct(
        (config.batch, config.seq, config.embed), config.dtype, sharding=batch_sharding.tokens
    )
    jitted = jax.jit(
        train_step(config, layout, mesh, interpret=_needs_interpreter(mesh)),
        in_shardings=(param_sharding, param_sharding, batch_sharding),
        out_shardings=(param_sharding, param_sharding, _sharding(mesh), batch_sharding.tokens),
        donate_argnums=(0, 1),
    )
    return jitted, (params, params, Batch(tokens, tokens))


def run(mesh: jax.sharding.Mesh, *, layout: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Run the step on the mesh's devices and return what came of it, for each kind of inputs.

    The inputs are the same for every layout and mode: ``exact``, for one step, and ``random``, for
    three. The results are numpy arrays: loss and gradients of the first step (the parameters'
    gradients as the momenta tell them), loss and parameters after the last.

    Args:
        mesh: has an axis ``fsdp``, of devices that are there.
        layout: the name of one of ``LAYOUTS``.
        **settings: fields of :class:`MoEConfig`; for exact sums embed, batch and seq are powers of
            2, 64 at the most, mlp is 64 at the most, top_k 2 at the most, and the dtype float32.

    Raises:
        UsageError: as :func:`build`.
    """
    config = MoEConfig(**settings)
    with jax.set_mesh(mesh):
        jitted, args = build(mesh, layout=layout, **settings)
        step = jitted.lower(*args).compile()
        return {
            "exact": _take_steps(step, *_exact_inputs(config), steps=1),
            "random": _take_steps(step, *_random_inputs(config), steps=3),
        }


def _take_steps(step: Any, params: Params, batch: Batch, *, steps: int) -> dict[str, Any]:
    momenta = Params(*map(np.zeros_like, params))
    params, momenta, batch = jax.device_put((params, momenta, batch), step.input_formats[0])
    results: dict[str, Any] = {}
    for number in range(steps):
        params, momenta, value, tokens_grad = step(params, momenta, batch)
        if number == 0:
            results = {
                "loss": np.asarray(value),
                "tokens gradient": np.asarray(tokens_grad),
                **{f"{name} gradient": np.array(g) for name, g in momenta._asdict().items()},
            }
    return {
        **results,
        "last loss": np.asarray(value),
        **{name: np.asarray(array) for name, array in params._asdict().items()},
    }


def _exact_inputs(config: MoEConfig) -> tuple[Params, Batch]:
    """Parameters and a batch for which no sum of a step rounds.

    All are -1, 0 or 1, most weights 0; the router's and the gates' are times 128. So two logits of
    a token are the same or 128 apart, and a gate is 0 or 128 from it: softmax, and the sigmoid
    within silu, are then exactly 0, 1/2 or 1, and all that follows is integers over powers of 2.
    """
    rng = np.random.default_rng(0)

    def small(shape: tuple[int, ...], share: float) -> Any:
        return (rng.integers(0, 2, shape) * 2 - 1) * (rng.random(shape) < share)

    router, wi, wo = (small(shape, 0.25) for shape in _param_shapes(config))
    wi[..., : config.mlp] *= 128
    tokens = (config.batch, config.seq, config.embed)
    params = Params(*(array.astype(np.float32) for array in (128 * router, wi, wo)))
    return params, Batch(*(small(tokens, 0.5).astype(config.dtype) for _ in range(2)))


def _random_inputs(config: MoEConfig) -> tuple[Params, Batch]:
    """Parameters and a batch of random floats."""
    rng = np.random.default_rng(0)
    params = Params(
        *(
            (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)
            for shape in _param_shapes(config)
        )
    )
    tokens = (config.batch, config.seq, config.embed)
    return params, Batch(*(rng.standard_normal(tokens).astype(config.dtype) for _ in range(2)))


def _param_shapes(config: MoEConfig) -> Params:
    return Params(
        (config.embed, config.experts),
        (config.experts, config.embed, config.wi_columns),
        (config.experts, config.mlp, config.embed),
    )


def _needs_interpreter(mesh: Any) -> bool:
    """Whether the mesh has devices, and those are no TPUs."""
    return isinstance(mesh, jax.sharding.Mesh) and mesh.devices.flat[0].platform != "tpu"


def _sharding(mesh: jax.sharding.Mesh, *axes: str | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


MOE_GMM = Model(
    name="moe-gmm",
    summary="routed experts: grouped matmuls on gathered weights, gradient descent",
    config=MoEConfig,
    layouts=LAYOUTS,
    mesh={MESH_AXIS: -1},
    topologies={"tpu": "v6e:2x2", "cpu": "4"},
    build="hlo_audit.models.moe_gmm:build",
    run="hlo_audit.models.moe_gmm:run",
    run_settings={
        "experts": 4,
        "embed": 16,
        "mlp": 8,
        "batch": 4,
        "seq": 8,
        "dtype": "float32",
    },
    quick_settings={"experts": 4},
)
"""The routed experts; see this module's docstring for what they show."""
