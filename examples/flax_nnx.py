"""A Flax NNX network trained by its own optimizer: split into state, merged inside the step.

hlo-audit check examples/flax_nnx.py:train_step --mesh fsdp=4 --topology v5p:2x2x1
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Network(nnx.Module):
    def __init__(self, embed, mlp, rngs):
        self.norm = nnx.LayerNorm(embed, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(embed, mlp, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(mlp, embed, use_bias=False, rngs=rngs)

    def __call__(self, inputs):
        return inputs + self.down(nnx.gelu(self.up(self.norm(inputs))))


def train_step(mesh, *, batch=256, embed=256, mlp=1024):
    def initial():
        network = Network(embed, mlp, nnx.Rngs(0))
        return network, nnx.Optimizer(network, optax.adam(1e-3), wrt=nnx.Param)

    def loss(params, rest, inputs, targets):
        gathered = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
        network = nnx.merge(structure, gathered, rest)
        return jnp.mean(jnp.square(network(inputs) - targets))

    def step(params, rest, optimizer_state, inputs, targets):
        value, gradients = jax.value_and_grad(loss)(params, rest, inputs, targets)
        network = nnx.merge(structure, params, rest)
        optimizer = nnx.merge(optimizer_structure, optimizer_state)
        optimizer.update(network, gradients)
        return nnx.state(network, nnx.Param), nnx.state(optimizer), value

    def sharded(shape):
        spec = P("fsdp", None) if len(shape.shape) == 2 else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    network, optimizer = nnx.eval_shape(initial)
    structure, params, rest = nnx.split(network, nnx.Param, ...)
    optimizer_structure, optimizer_state = nnx.split(optimizer)
    data = jax.ShapeDtypeStruct((batch, embed), jnp.float32)
    arguments = jax.tree.map(sharded, (params, rest, optimizer_state, data, data))
    return jax.jit(step, donate_argnums=(0, 2)), arguments
