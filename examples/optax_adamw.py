"""A classifier's last layer trained by optax's AdamW with a learning-rate schedule and clipping.

hlo-audit check examples/optax_adamw.py:train_step --mesh fsdp=4 --topology v5p:2x2x1

The abstract optimiser state comes from ``jax.eval_shape``: moments are sharded as their parameters.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def train_step(mesh, *, batch=1024, embed=512, classes=4096):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=100, decay_steps=10_000)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def loss(params, inputs, labels):
        kernel = jax.sharding.reshard(params["kernel"], P())
        logits = (inputs @ kernel.astype(inputs.dtype) + params["bias"]).astype(jnp.float32)
        return optax.softmax_cross_entropy(logits, labels).mean()

    def step(params, state, inputs, labels):
        value, gradients = jax.value_and_grad(loss)(params, inputs, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def sharded(shape):
        spec = P("fsdp", None) if len(shape.shape) == 2 else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    params = {
        "kernel": jax.ShapeDtypeStruct((embed, classes), jnp.float32),
        "bias": jax.ShapeDtypeStruct((classes,), jnp.float32),
    }
    arguments = (
        params,
        jax.eval_shape(optimizer.init, params),
        jax.ShapeDtypeStruct((batch, embed), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, classes), jnp.float32),
    )
    return jax.jit(step, donate_argnums=(0, 1)), jax.tree.map(sharded, arguments)
