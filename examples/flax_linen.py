"""A residual Flax Linen network trained by Adam, its parameters sharded by their annotations.

hlo-audit check examples/flax_linen.py:train_step --mesh fsdp=4 --topology v5p:2x2x1
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

KERNEL = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", None))


class Block(nn.Module):
    mlp: int

    @nn.compact
    def __call__(self, inputs):
        hidden = nn.LayerNorm(use_bias=False)(inputs)
        hidden = nn.gelu(nn.Dense(self.mlp, use_bias=False, kernel_init=KERNEL)(hidden))
        return inputs + nn.Dense(inputs.shape[-1], use_bias=False, kernel_init=KERNEL)(hidden)


class Network(nn.Module):
    depth: int
    mlp: int

    @nn.compact
    def __call__(self, inputs):
        for _ in range(self.depth):
            inputs = Block(self.mlp)(inputs)
        return inputs


def train_step(mesh, *, batch=256, embed=256, mlp=1024, depth=2):
    network = Network(depth, mlp)
    optimizer = optax.adam(1e-3)

    def loss(params, inputs, targets):
        gathered = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
        return jnp.mean(jnp.square(network.apply({"params": gathered}, inputs) - targets))

    def step(params, state, inputs, targets):
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def initial(inputs):
        params = network.init(jax.random.key(0), inputs)["params"]
        return params, optimizer.init(params)

    def sharded(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    data = sharded(jax.ShapeDtypeStruct((batch, embed), jnp.float32), P("fsdp", None))
    annotated = jax.eval_shape(initial, jax.ShapeDtypeStruct(data.shape, data.dtype))
    specs = nn.get_partition_spec(annotated)
    params, state = jax.tree.map(sharded, nn.meta.unbox(annotated), specs)
    return jax.jit(step, donate_argnums=(0, 1)), (params, state, data, data)
