"""A feed-forward block trained by momentum; parameters and state are plain dicts.

hlo-audit check examples/plain_pytree.py:train_step --mesh fsdp=4 --topology v5p:2x2x1

Parameters are sharded over ``fsdp`` and gathered where they are used, as in ZeRO-3.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def train_step(mesh, *, batch=256, embed=512, mlp=2048, learning_rate=1e-2):
    def array(*shape, dtype=jnp.float32):
        sharding = NamedSharding(mesh, P("fsdp", *[None] * (len(shape) - 1)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(params, inputs, targets):
        up, down = (jax.sharding.reshard(params[name], P()) for name in ("up", "down"))
        hidden = jax.nn.gelu(inputs @ up.astype(inputs.dtype))
        outputs = hidden @ down.astype(inputs.dtype)
        return jnp.mean(jnp.square(outputs - targets).astype(jnp.float32))

    def step(params, momentum, inputs, targets):
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        params = jax.tree.map(lambda p, m: p - learning_rate * m, params, momentum)
        return params, momentum, value

    params = {"up": array(embed, mlp), "down": array(mlp, embed)}
    data = array(batch, embed, dtype=jnp.bfloat16)
    return jax.jit(step, donate_argnums=(0, 1)), (params, params, data, data)
