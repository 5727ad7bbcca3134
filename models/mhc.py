"""A block of manifold-constrained hyper-connections (mHC): several residual streams around an MLP.

The residual is ``rate`` streams wide, ``x[batch, seq, rate, embed]``, with embed sharded over the
mesh axis ``tensor``. From the RMS-normalised streams one fused projection gives three mappings for
each token: ``pre`` weighs the streams into the MLP's input, ``post`` the MLP's output into each
stream, and ``res``, kept doubly stochastic, mixes the streams among each other. The projection
contracts rate and embed at once, and the plain way to write it flattens the two into one axis. A
merged axis of which the inner part is sharded cannot stay so: every device gathers all streams of
its tokens. The layout ``split`` keeps the axes apart and reduces ``rate + rate + rate * rate``
numbers a token instead.

After "mHC: Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880; the mapping
``lite`` after "mHC-lite", https://arxiv.org/abs/2601.05732.
"""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hlo_audit import checkpoint
from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.models._checks import check_divides, check_layout
from hlo_audit.program import Layout, Model
from hlo_audit.stored import MeshAxes, Storage, StoredArray, StoredLayouts, rearrange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import optax.contrib as optax_contrib
else:
    jax = lazy_import("jax")
    jnp = lazy_import("jax.numpy")
    np = lazy_import("numpy")
    optax = lazy_import("optax")
    optax_contrib = lazy_import("optax.contrib")

TENSOR_AXIS = "tensor"
BATCH_AXIS = "expert"

_SHARDED = "the mHC block is"

DTYPES = ("bfloat16", "float32")
MAPPINGS = ("sinkhorn", "lite")
OPTIMIZERS = ("adamw", "muon")
ALPHA_SHARDINGS = ("replicated", "embed")

MOST_LITE_RATE = 6
"""The mapping ``lite`` weighs all ``rate!`` permutations: 720 of them at this rate."""

FLAT = "flat"
SPLIT = "split"

LAYOUTS = (
    Layout(FLAT, "rate and embed flattened: norm scale [rate*embed], alphas [rate*embed, maps]"),
    Layout(SPLIT, "rate and embed contracted apart: scale [rate, embed], alphas [rate, embed, n]"),
)

ALPHAS = ("pre_alpha", "post_alpha", "res_alpha")
"""The parts of the fused projection, in the order in which it has them."""

_MATRICES = (*ALPHAS, "wi", "wo")
_SMALLEST_SUM = 1e-12

Params = dict[str, Any]
"""The parameters by name, float32; ``maps`` as :attr:`MHCConfig.maps` has it.

``norm_scale`` ``[rate*embed]``, or ``[rate, embed]`` in the layout ``split``; ``pre_alpha``,
``post_alpha`` and ``res_alpha`` ``[rate*embed, maps]``, or ``[rate, embed, maps]``; each one's
``_beta`` ``[maps]`` and ``_scale``, a scalar; ``mlp_norm_scale`` ``[embed]``, ``wi`` ``[embed,
mlp]`` and ``wo`` ``[mlp, embed]``.
"""


@dataclass(frozen=True)
class MHCConfig:
    """The sizes and settings of the block and its optimiser.

    Attributes:
        rate: number of residual streams.
        embed: width of a stream.
        mlp: width of the MLP between.
        batch: sequences in the global batch.
        seq: tokens in a sequence.
        mapping: how the streams' mixing is made doubly stochastic: ``sinkhorn`` normalises rows and
            columns in turn, ``lite`` is a softmax over the permutation matrices.
        sinkhorn_iterations: how often.
        dtype: dtype of the streams and of the products, ``bfloat16`` or ``float32``. Norms,
            mappings and loss are in float32.
        alpha_sharding: of the alphas and the norm's scale: ``replicated``, or ``embed`` for the
            axis that holds embed over the mesh axis ``tensor``: the merged one in ``flat``.
        norm_eps: added to the mean square in the norms.
        optimizer: ``adamw`` or ``muon``, which orthogonalises the updates of the alphas and of the
            MLP's matrices, and leaves the rest to AdamW.
        learning_rate: of the optimiser, as are the rest.
        b1: decay of AdamW's first moment.
        b2: decay of AdamW's second moment.
        eps: added to the root of the second moment, and to the norm that Muon divides by.
        weight_decay: of alphas and matrices, multiplied by the learning rate.

    Raises:
        UsageError: for a value out of its range.
    """

    rate: int = 4
    embed: int = 1024
    mlp: int = 512
    batch: int = 2
    seq: int = 128
    mapping: str = "sinkhorn"
    sinkhorn_iterations: int = 20
    dtype: str = "bfloat16"
    alpha_sharding: str = "replicated"
    norm_eps: float = 1e-6
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name in ("rate", "embed", "mlp", "batch", "seq", "sinkhorn_iterations"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is too small for an mHC block",
                    hint=f"set {name} to 1 or more",
                )
        for name, known in (
            ("mapping", MAPPINGS),
            ("dtype", DTYPES),
            ("alpha_sharding", ALPHA_SHARDINGS),
            ("optimizer", OPTIMIZERS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name}={getattr(self, name)} is no {name} of the mHC block",
                    hint="one of: " + ", ".join(known),
                )
        if self.mapping == "lite" and self.rate > MOST_LITE_RATE:
            raise UsageError(
                f"rate={self.rate} has {math.factorial(self.rate):,} permutations, too many for "
                "mapping=lite",
                hint=f"set rate to {MOST_LITE_RATE} or less, or mapping to sinkhorn",
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
        for name in ("eps", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(
                    f"{name}={getattr(self, name)} is not positive",
                    hint=f"set {name} to more than 0",
                )

    @property
    def res_maps(self) -> int:
        """Numbers a token that the mixing of the streams is made of."""
        return math.factorial(self.rate) if self.mapping == "lite" else self.rate**2

    @property
    def maps(self) -> dict[str, int]:
        """Columns of each part of the fused projection, in its order."""
        return dict(zip(ALPHAS, (self.rate, self.rate, self.res_maps), strict=True))


class State(NamedTuple):
    """What a training step carries over, each leaf an array or what describes one.

    Attributes:
        params: see :data:`Params`.
        opt_state: the optimiser's state, as optax has it.
    """

    params: Any
    opt_state: Any


class Batch(NamedTuple):
    """What a training step reads, in the config's dtype.

    Attributes:
        x: the streams, ``[batch, seq, rate, embed]``.
        target: what the block's output should be, of the same shape.
    """

    x: Any
    target: Any


def init_params(config: MHCConfig, key: jax.Array, layout: str = FLAT) -> Params:
    """Draw the parameters.

    Under one key the parameters of ``split`` are those of ``flat``, reshaped: they are drawn in the
    same order and shapes. Alphas and matrices are normal with variance ``1 / fan_in``, the norms'
    scales 1, the mappings' biases 0 and their scales 0.01, as in the paper.

    Raises:
        UsageError: for an unknown layout.
    """
    check_layout("mhc", LAYOUTS, layout)
    keys = iter(jax.random.split(key, len(_MATRICES)))

    def draw(*shape: int) -> jax.Array:
        values: jax.Array = jax.random.normal(next(keys), shape) * shape[0] ** -0.5
        return values

    width = config.rate * config.embed
    params: Params = {"norm_scale": jnp.ones(width)}
    for name, maps in config.maps.items():
        params[name] = draw(width, maps)
        params[beta_name(name)] = jnp.zeros(maps)
        params[scale_name(name)] = jnp.full((), 0.01)
    params["mlp_norm_scale"] = jnp.ones(config.embed)
    params["wi"] = draw(config.embed, config.mlp)
    params["wo"] = draw(config.mlp, config.embed)
    description = checkpoint_layouts(config)
    for array in description.arrays:
        params[array.path] = rearrange(
            params[array.path],
            array.layouts[FLAT].axes,
            array.layouts[layout].axes,
            description.sizes,
        )
    return params


def init(config: MHCConfig, key: jax.Array, layout: str = FLAT) -> State:
    """Return the state before the first step; place it with :func:`state_shardings`.

    Raises:
        UsageError: for an unknown layout.
    """
    params = init_params(config, key, layout)
    return State(params, optimizer(config, layout).init(params))


def apply(params: Params, x: jax.Array, config: MHCConfig, layout: str) -> jax.Array:
    """Return the streams after the block, ``[batch, seq, rate, embed]`` in the dtype of ``x``.

    Shardings follow the mesh in use (``jax.set_mesh``); without one nothing is said of them.

    Args:
        params: as the layout stores them.
        x: the streams, ``[batch, seq, rate, embed]``.
        config: the settings.
        layout: the name of one of ``LAYOUTS``.

    Raises:
        UsageError: for an unknown layout.
    """
    check_layout("mhc", LAYOUTS, layout)
    projected = _project(params, x, config, layout).astype(jnp.float32)
    # Where the parts begin: after pre, after pre and post.
    parts = jnp.split(projected, (config.rate, 2 * config.rate), axis=-1)
    logits = {
        name: params[scale_name(name)] * part + params[beta_name(name)]
        for name, part in zip(ALPHAS, parts, strict=True)
    }
    pre = jax.nn.sigmoid(logits["pre_alpha"]).astype(x.dtype)
    post = (2 * jax.nn.sigmoid(logits["post_alpha"])).astype(x.dtype)
    res = _mixing(logits["res_alpha"], config).astype(x.dtype)
    branch = _mlp(params, jnp.einsum("bskd,bsk->bsd", x, pre), config)
    # res[..., k, m] is what stream k gives to stream m.
    mixed = jnp.einsum("bskd,bskm->bsmd", x, res)
    return mixed + jnp.einsum("bsd,bsm->bsmd", branch, post)


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """Return ``exp(logits)`` with rows and columns scaled towards sums of 1.

    Args:
        logits: ``[..., k, k]``, in float32: the sums of many iterations need it.
        iterations: each scales all rows, then all columns. Columns sum to 1 exactly, up to
            rounding, and rows the closer the more iterations there are.
    """
    # exp and a first scaling of the columns at once, which cannot overflow.
    start = jax.nn.softmax(logits, axis=-2)

    def scale(_: Any, matrix: jax.Array) -> jax.Array:
        for axis in (-1, -2):
            total = jnp.sum(matrix, axis=axis, keepdims=True)
            matrix = matrix / jnp.maximum(total, _SMALLEST_SUM)
        return matrix

    scaled: jax.Array = jax.lax.fori_loop(0, iterations, scale, start)
    return scaled


def permutations(size: int) -> Any:
    """Return all permutation matrices, ``[size!, size, size]`` in float32 (numpy).

    In lexicographic order of what stands at rows 0, 1, ...: the first is the identity.
    """
    return np.eye(size, dtype=np.float32)[list(itertools.permutations(range(size)))]


def loss(
    params: Params, x: jax.Array, target: jax.Array, config: MHCConfig, layout: str
) -> jax.Array:
    """Return the mean squared distance of the output from the target, a float32 scalar.

    Raises:
        UsageError: for an unknown layout.
    """
    out = apply(params, x, config, layout)
    return jnp.mean(jnp.square(out.astype(jnp.float32) - target.astype(jnp.float32)))


def optimizer(config: MHCConfig, layout: str) -> optax.GradientTransformation:
    """Return the optimiser of parameters that ``layout`` stores.

    What it does to a parameter goes by the parameter's name: the number of axes, which optax goes
    by unless told otherwise, is not the same in both layouts.

    Raises:
        UsageError: for an unknown layout.
    """
    check_layout("mhc", LAYOUTS, layout)
    if config.optimizer == "adamw":
        return optax.adamw(
            config.learning_rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=lambda params: {name: name in _MATRICES for name in params},
        )
    contracted = dict.fromkeys(ALPHAS, (0, 1) if layout == SPLIT else (0,))

    def dimensions(params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: optax_contrib.MuonDimensionNumbers(contracted.get(name, (0,)), (-1,))
            if name in _MATRICES
            else None
            for name in params
        }

    return optax_contrib.muon(
        config.learning_rate,
        eps=config.eps,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        muon_weight_dimension_numbers=dimensions,
    )


def train_step(config: MHCConfig, layout: str) -> Callable[..., tuple[State, jax.Array, jax.Array]]:
    """Return ``step(params, opt_state, x, target) -> (state, loss, x_grad)``.

    The arguments are those of :class:`State` and :class:`Batch`; ``loss`` is a float32 scalar and
    ``x_grad`` has the shape and dtype of ``x``.

    Raises:
        UsageError: for an unknown layout.
    """
    update = optimizer(config, layout).update

    def step(
        params: Params, opt_state: Any, x: jax.Array, target: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        value, (grads, x_grad) = jax.value_and_grad(loss, argnums=(0, 1))(
            params, x, target, config, layout
        )
        # Without it XLA updates shares of the alphas and gathers parameters and moments after.
        specs = _state_specs(config, layout).params
        grads = {name: _constrain(grad, specs[name]) for name, grad in grads.items()}
        updates, opt_state = _update(update, grads, opt_state, params, config, layout)
        return State(optax.apply_updates(params, updates), opt_state), value, x_grad

    return step


def checkpoint_layouts(config: MHCConfig) -> StoredLayouts:
    """Describe how each layout stores the norm's scale, the alphas and their moments.

    A checkpoint holds them as ``flat`` does.
    """
    merged: MeshAxes = None if config.alpha_sharding == "replicated" else TENSOR_AXIS
    moments = {"mu": "float32", "nu": "float32"}

    def described(path: str, *maps: str) -> StoredArray:
        whole = (None,) * len(maps)
        return StoredArray(
            path=path,
            dtype="float32",
            layouts={
                FLAT: Storage((("rate", "embed"), *maps), (merged, *whole)),
                SPLIT: Storage(("rate", "embed", *maps), (None, merged, *whole)),
            },
            moments=moments,
        )

    return StoredLayouts(
        model="mhc",
        canonical=FLAT,
        sizes={
            "rate": config.rate,
            "embed": config.embed,
            **{_maps_axis(name): maps for name, maps in config.maps.items()},
        },
        arrays=(
            described("norm_scale"),
            *(described(name, _maps_axis(name)) for name in ALPHAS),
        ),
    )


def convert(state: Any, from_layout: str, to_layout: str, config: MHCConfig) -> Any:
    """Return a state, or any tree of parameters or moments, as the other layout stores it.

    A pure reshape of the norm's scale, the alphas and their moments; there and back is exact. See
    :func:`hlo_audit.checkpoint.convert` for what is refused, and for the sharding of jax arrays.

    Raises:
        UsageError: for an unknown layout, and for arrays that are not what ``from_layout`` stores.
    """
    return checkpoint.convert(state, from_layout, to_layout, checkpoint_layouts(config))


def state_shardings(config: MHCConfig, mesh: jax.sharding.Mesh, layout: str) -> State:
    """Return the ``NamedSharding`` of each leaf of the state.

    Raises:
        UsageError: for an unknown layout, for a mesh without the axis ``tensor``, and for a size
            that the axis does not divide.
    """
    check_layout("mhc", LAYOUTS, layout)
    check_divides(mesh, TENSOR_AXIS, {"embed": config.embed, "mlp": config.mlp}, sharded=_SHARDED)
    shardings: State = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        _state_specs(config, layout),
        is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
    )
    return shardings


def batch_shardings(config: MHCConfig, mesh: jax.sharding.Mesh) -> Batch:
    """Return the ``NamedSharding`` of each leaf of the batch.

    The batch is sharded over the mesh axis ``expert``, where there is one, and embed over
    ``tensor``.

    Raises:
        UsageError: for a mesh without the axis ``tensor``, and for sizes that the axes do not
            divide.
    """
    check_divides(mesh, TENSOR_AXIS, {"embed": config.embed}, sharded=_SHARDED)
    if BATCH_AXIS in mesh.shape:
        check_divides(mesh, BATCH_AXIS, {"batch": config.batch}, sharded=_SHARDED)
    batch = BATCH_AXIS if BATCH_AXIS in mesh.shape else None
    spec = jax.sharding.PartitionSpec(batch, None, None, TENSOR_AXIS)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return Batch(sharding, sharding)


def abstract_state(config: MHCConfig, mesh: jax.sharding.Mesh, layout: str) -> State:
    """Return the state as ``jax.ShapeDtypeStruct`` with shardings; no array is made.

    Raises:
        UsageError: as :func:`state_shardings`.
    """
    shardings = state_shardings(config, mesh, layout)
    state: State = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        _shapes(config, layout),
        shardings,
    )
    return state


def abstract_batch(config: MHCConfig, mesh: jax.sharding.Mesh) -> Batch:
    """Return the batch as ``jax.ShapeDtypeStruct`` with shardings; no array is made.

    Raises:
        UsageError: as :func:`batch_shardings`.
    """
    shape = (config.batch, config.seq, config.rate, config.embed)
    x, target = (
        jax.ShapeDtypeStruct(shape, config.dtype, sharding=sharding)
        for sharding in batch_shardings(config, mesh)
    )
    return Batch(x, target)


def build(mesh: jax.sharding.Mesh, *, layout: str, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted training step and its abstract arguments.

    Lower it with the mesh in use: ``with jax.set_mesh(mesh): jitted.lower(*args)``. The mode is the
    type of the mesh's axes. Parameters and optimiser state are donated.

    Args:
        mesh: has an axis ``tensor``, and ``expert`` where the batch is sharded.
        layout: the name of one of ``LAYOUTS``.
        **settings: fields of :class:`MHCConfig`.

    Raises:
        UsageError: for settings that cannot be or that the mesh does not divide.
    """
    config = MHCConfig(**settings)
    state, batch = state_shardings(config, mesh, layout), batch_shardings(config, mesh)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(
        train_step(config, layout),
        in_shardings=(*state, *batch),
        out_shardings=(state, whole, batch.x),
        donate_argnums=tuple(range(len(state))),
    )
    return jitted, (*abstract_state(config, mesh, layout), *abstract_batch(config, mesh))


def run(mesh: jax.sharding.Mesh, *, layout: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Run the step on the mesh's devices and return what came of it, for each kind of inputs.

    The inputs are the same for every layout and mode: ``exact``, for one step, and ``random``, for
    three. The results are numpy arrays, those of the state as ``flat`` stores them: loss and
    gradient of the streams of the first step, loss and state after the last.

    Args:
        mesh: has an axis ``tensor``, of devices that are there.
        layout: the name of one of ``LAYOUTS``.
        **settings: fields of :class:`MHCConfig`; for exact sums the dtype is float32, norm_eps is
            lost beside 1, and all sizes are powers of 2, 64 at the most, rate 2 and embed 4 at the
            least.

    Raises:
        UsageError: as :func:`build`.
    """
    config = MHCConfig(**settings)
    with jax.set_mesh(mesh):
        jitted, args = build(mesh, layout=layout, **settings)
        step = jitted.lower(*args).compile()
        return {
            "exact": _take_steps(step, mesh, config, layout, *_exact_inputs(config), steps=1),
            "random": _take_steps(step, mesh, config, layout, *_random_inputs(config), steps=3),
        }


def _take_steps(
    step: Any,
    mesh: jax.sharding.Mesh,
    config: MHCConfig,
    layout: str,
    params: Params,
    batch: Batch,
    *,
    steps: int,
) -> dict[str, Any]:
    flat = State(params, _zero_opt_state(config))
    state = jax.device_put(
        convert(flat, FLAT, layout, config), state_shardings(config, mesh, layout)
    )
    placed = jax.device_put(batch, batch_shardings(config, mesh))
    results: dict[str, Any] = {}
    for _ in range(steps):
        state, value, x_grad = step(*state, *placed)
        results.setdefault("loss", np.asarray(value))
        results.setdefault("gradient of x", np.asarray(x_grad))
    results["last loss"] = np.asarray(value)
    after = convert(jax.tree.map(np.asarray, state), layout, FLAT, config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(after):
        results[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    return results


@cache
def _zero_opt_state(config: MHCConfig) -> Any:
    """The optimiser's state before the first step, as numpy arrays of the layout ``flat``.

    Made once for each config: it takes as long as the steps.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        state = jax.jit(lambda: init(config, jax.random.key(0)).opt_state)()
    return jax.tree.map(np.asarray, state)


def _exact_inputs(config: MHCConfig) -> tuple[Params, Batch]:
    """Parameters, as ``flat`` stores them, and a batch for which no sum of a step rounds.

    All streams are of values 1 and -1, so that their norm divides by 1. The alphas are a few large
    integers: a logit is 0, or so large that its sigmoid is 0 or 1. The streams' mix is then a
    permutation, or all streams alike. ``pre`` picks the even streams, the odd ones, or a half of
    each. The even streams are alike, and so are the odd ones, and the two agree in a quarter of
    their values: the MLP's norm divides by a power of 2 each time. The MLP picks inputs and
    outputs. So all that is added up is a small integer over a power of 2.
    """
    rng = np.random.default_rng(0)
    rate, embed, mlp = config.rate, config.embed, config.mlp
    large = 256.0

    def sparse() -> Any:
        """A column of the alphas that reads one element of the first stream, one of the last."""
        column = np.zeros((rate, embed), np.float32)
        for stream in (0, rate - 1):
            column[stream, rng.integers(embed)] += rng.choice([-large, large])
        return column.reshape(-1, 1)

    def picking(rows: int, columns: int) -> Any:
        matrix = np.zeros((rows, columns), np.float32)
        matrix[rng.integers(rows, size=columns), np.arange(columns)] = rng.choice([-1, 1], columns)
        return matrix

    params = {name: np.asarray(leaf) for name, leaf in _random_params(config).items()}
    for name in ALPHAS:
        params[beta_name(name)] = np.zeros_like(params[beta_name(name)])
        params[scale_name(name)] = np.ones((), np.float32)
    params["norm_scale"] = rng.choice([1, 2], rate * embed).astype(np.float32)
    params["mlp_norm_scale"] = rng.choice([1, 2], embed).astype(np.float32)
    params["pre_alpha"] = sparse() * (-1.0) ** np.arange(rate, dtype=np.float32)
    params["post_alpha"] = np.concatenate([sparse() for _ in range(rate)], axis=1)
    # Two permutations without a place in common: the one wins, the other, or neither.
    one, other = np.eye(rate, dtype=np.float32), np.roll(np.eye(rate, dtype=np.float32), 1, axis=0)
    if config.mapping == "lite":
        one, other = np.eye(config.res_maps, dtype=np.float32)[:2]
        params["res_beta"] = np.where(one + other, 0.0, -64 * large).astype(np.float32)
    params["res_alpha"] = sparse() * (one - other).reshape(1, -1)
    params["wi"], params["wo"] = picking(embed, mlp), picking(mlp, embed)
    shape = (config.batch, config.seq, rate, embed)
    even = rng.choice([-1, 1], (*shape[:2], 1, embed))
    quarter = np.where(np.arange(embed) < embed // 4, 1, -1)
    odd = even * rng.permuted(np.broadcast_to(quarter, even.shape), axis=-1)
    x = np.concatenate([even, odd] * (rate // 2), axis=2)
    target = rng.integers(-3, 4, shape)
    return params, Batch(x.astype(config.dtype), target.astype(config.dtype))


def _random_inputs(config: MHCConfig) -> tuple[Params, Batch]:
    """Parameters, as ``flat`` stores them, and a batch of random floats."""
    rng = np.random.default_rng(0)
    shape = (config.batch, config.seq, config.rate, config.embed)
    x, target = (rng.standard_normal(shape).astype(config.dtype) for _ in range(2))
    return _random_params(config), Batch(x, target)


def _random_params(config: MHCConfig) -> Params:
    """Random floats of the size that :func:`init_params` draws, the scales and biases too."""
    rng = np.random.default_rng(1)
    shapes = _shapes(config, FLAT).params
    params = {}
    for name, leaf in shapes.items():
        values = rng.standard_normal(leaf.shape)
        params[name] = values * leaf.shape[0] ** -0.5 if name in _MATRICES else 1 + values / 4
    return {name: np.asarray(values, np.float32) for name, values in params.items()}


def _project(params: Params, x: jax.Array, config: MHCConfig, layout: str) -> jax.Array:
    """Return the fused projection of the normalised streams, ``[batch, seq, maps]``."""
    alphas = jnp.concatenate([params[name].astype(x.dtype) for name in ALPHAS], axis=-1)
    scale = params["norm_scale"]
    if layout == SPLIT:
        # A share of them is all that a device multiplies by. Told so, it gets the gradient as a
        # share too, and not by a gather of the streams.
        alphas = _reshard(alphas, None, TENSOR_AXIS, None)
        normed = _rms_norm(x, scale, config, axes=(-2, -1))
        product = "bskd,kdn->bsn"
    else:
        # On an explicit mesh no reshape may merge a sharded axis: the gather that an auto mesh
        # makes of it has to be said.
        x = _reshard(x, _batch_axis(), None, None, None)
        x = x.reshape(*x.shape[:2], config.rate * config.embed)
        if config.alpha_sharding == "embed":
            x = _reshard(x, _batch_axis(), None, TENSOR_AXIS)
        normed = _rms_norm(x, scale, config, axes=(-1,))
        product = "bsm,mn->bsn"
    return _einsum(product, normed, alphas, _batch_axis(), None, None)


def _rms_norm(
    x: jax.Array, scale: jax.Array, config: MHCConfig, axes: tuple[int, ...]
) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + config.norm_eps)).astype(x.dtype)
    return normed * scale.astype(x.dtype)


def _mixing(logits: jax.Array, config: MHCConfig) -> jax.Array:
    """Return the doubly stochastic ``[batch, seq, rate, rate]`` of ``[batch, seq, res_maps]``."""
    if config.mapping == "lite":
        return jnp.einsum("bsp,pkm->bskm", jax.nn.softmax(logits), permutations(config.rate))
    square = logits.reshape(*logits.shape[:-1], config.rate, config.rate)
    return sinkhorn(square, config.sinkhorn_iterations)


def _mlp(params: Params, x: jax.Array, config: MHCConfig) -> jax.Array:
    """Norm and MLP, ``[batch, seq, embed]`` to the same; mlp is sharded over ``tensor``.

    Its activation is a ReLU: there are inputs for which none of its sums rounds.
    """
    wi, wo = (params[name].astype(x.dtype) for name in ("wi", "wo"))
    normed = _rms_norm(x, params["mlp_norm_scale"], config, axes=(-1,))
    normed = _reshard(normed, _batch_axis(), None, None)
    hidden = jax.nn.relu(_einsum("bsd,dm->bsm", normed, wi, _batch_axis(), None, TENSOR_AXIS))
    return _einsum("bsm,md->bsd", hidden, wo, _batch_axis(), None, TENSOR_AXIS)


def _update(
    update: Any, grads: Params, opt_state: Any, params: Params, config: MHCConfig, layout: str
) -> tuple[Any, Any]:
    if config.optimizer == "muon" and _is_explicit():
        # optax orthogonalises reshaped matrices, and does not say how they are sharded.
        specs = _state_specs(config, layout)
        update = jax.sharding.auto_axes(
            update, axes=jax.sharding.get_abstract_mesh().axis_names, out_sharding=tuple(specs)
        )
    updated: tuple[Any, Any] = update(grads, opt_state, params)
    return updated


def _shapes(config: MHCConfig, layout: str) -> State:
    shapes: State = jax.eval_shape(lambda: init(config, jax.random.key(0), layout))
    return shapes


def _state_specs(config: MHCConfig, layout: str) -> State:
    """Return the ``PartitionSpec`` of each leaf; a moment's is that of its parameter."""
    specs = {
        array.path: jax.sharding.PartitionSpec(*array.layouts[layout].mesh_axes)
        for array in checkpoint_layouts(config).arrays
    }
    specs["wi"] = jax.sharding.PartitionSpec(None, TENSOR_AXIS)
    specs["wo"] = jax.sharding.PartitionSpec(TENSOR_AXIS, None)
    state: State = jax.tree_util.tree_map_with_path(
        lambda path, _: specs.get(getattr(path[-1], "key", ""), jax.sharding.PartitionSpec()),
        _shapes(config, layout),
    )
    return state


def _einsum(product: str, a: jax.Array, b: jax.Array, *axes: str | None) -> jax.Array:
    """Multiply, with the sharding of what comes out said where the mesh in use can be told."""
    if _is_explicit():
        spec = jax.sharding.PartitionSpec(*axes)
        return jnp.einsum(product, a, b, out_sharding=spec)
    return _constrain(jnp.einsum(product, a, b), jax.sharding.PartitionSpec(*axes))


def _constrain(x: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
    """Tell XLA how ``x`` is sharded on an auto mesh; on an explicit one its type says so."""
    if jax.sharding.get_abstract_mesh().empty or _is_explicit():
        return x
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec)
    return constrained


def _reshard(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shard ``x`` by mesh axis names on an explicit mesh, where no operation would do it itself."""
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*axes)) if _is_explicit() else x


def _is_explicit() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types.get(TENSOR_AXIS) == jax.sharding.AxisType.Explicit


def _batch_axis() -> str | None:
    """The mesh axis that shards the batch, where the mesh in use has it."""
    return BATCH_AXIS if BATCH_AXIS in jax.sharding.get_abstract_mesh().axis_names else None


def beta_name(alpha: str) -> str:
    """Return the name of the biases that belong to an alpha."""
    return alpha.replace("_alpha", "_beta")


def scale_name(alpha: str) -> str:
    """Return the name of the scale that belongs to an alpha."""
    return f"{alpha}_scale"


def _maps_axis(alpha: str) -> str:
    return alpha.replace("_alpha", "_maps")


MHC = Model(
    name="mhc",
    summary="hyper-connections: streams mixed around an MLP, mean squared error, AdamW or Muon",
    config=MHCConfig,
    layouts=LAYOUTS,
    mesh={BATCH_AXIS: -1, TENSOR_AXIS: 8},
    topologies={"tpu": "v6e:2x4", "cpu": "8"},
    build="hlo_audit.models.mhc:build",
    run="hlo_audit.models.mhc:run",
    run_settings={
        "embed": 64,
        "mlp": 64,
        "batch": 2,
        "seq": 16,
        "dtype": "float32",
        "norm_eps": 1e-8,
    },
    quick_settings={"seq": 64},
    stored=checkpoint_layouts,
)
"""The block of hyper-connections; see this module's docstring for what it shows."""
