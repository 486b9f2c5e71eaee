# Copyright 2026 The nnx_ext Authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Training steps of adapted models, and of what they are compared with."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_ext

Loss = tp.Callable[[tp.Any, jax.Array], jax.Array]


class Block(nnx.Module):
  """A transformer's feed-forward block."""

  def __init__(
    self, width: int, hidden: int, *, exact: bool = False, rngs: nnx.Rngs
  ):
    self.exact = exact
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, hidden, rngs=rngs)
    self.down = nnx.Linear(hidden, width, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    hidden = nnx.gelu(self.up(self.norm(x)), approximate=not self.exact)
    return x + self.down(hidden)


def squares(model: tp.Any, x: jax.Array) -> jax.Array:
  return jnp.mean((model(x) - 1.0) ** 2)


@dataclasses.dataclass(frozen=True)
class Step:
  """A training step: what is trained, by which loss, on which input.

  Attributes:
    model: as it is trained.
    x: the input.
    wrt: the filter of what is trained.
    loss: of the model and the input.
    train: whether Adam updates what is trained; else gradients are returned.
  """

  model: nnx.Module
  x: jax.Array
  wrt: nnx.filterlib.Filter = nnx.LoRAParam
  loss: Loss = squares
  train: bool = True

  def compile(self) -> tuple[tp.Any, tp.Callable[[], tp.Any]]:
    """The compiled step, and a function that runs it, updating its state."""
    graphdef, trained, rest = nnx.split(self.model, self.wrt, ...)
    trained, rest = nnx.as_pure(trained), nnx.as_pure(rest)
    tx = optax.adam(1e-4)

    def step(trained, opt_state, rest, x):
      def loss(trained):
        return self.loss(nnx.merge(graphdef, trained, rest), x)

      value, grads = jax.value_and_grad(loss)(trained)
      if not self.train:
        return grads, opt_state, value
      updates, opt_state = tx.update(grads, opt_state, trained)
      return optax.apply_updates(trained, updates), opt_state, value

    opt_state = tx.init(trained) if self.train else ()
    donated = (0, 1) if self.train else ()
    # Donated buffers are copies, as models share those of their base.
    state = [jax.tree.map(jnp.copy, trained), opt_state]
    jitted = jax.jit(step, donate_argnums=donated)
    compiled = jitted.lower(*state, rest, self.x).compile()

    def run():
      first, second, value = compiled(*state, rest, self.x)
      if self.train:
        state[:] = first, second
      return first, value

    return compiled, run


def blocks(
  width: int = 1024,
  hidden: int = 4096,
  tokens: int | tuple[int, ...] = 512,
  rank: int = 8,
  depth: int = 4,
  exact: bool = False,
) -> dict[str, Step]:
  """Feed-forward blocks, trained in each of the ways.

  Args:
    width: features of a token.
    hidden: features inside of a block.
    tokens: how many there are, or the axes that they are on.
    rank: that of the adapters.
    depth: how many blocks there are.
    exact: whether gelu is computed by erf and not by tanh.
  """
  rngs = nnx.Rngs(0)
  base = nnx.Sequential(
    *(Block(width, hidden, exact=exact, rngs=rngs) for _ in range(depth))
  )
  adapted = nnx_ext.apply_lora(base, rank=rank, alpha=2 * rank, rngs=rngs)
  leading = tokens if isinstance(tokens, tuple) else (tokens,)
  x = jax.random.normal(jax.random.key(1), (*leading, width))
  return {
    'nnx_ext': Step(adapted, x),
    'nnx.LoRA': Step(_wrapped(base, rank, rngs), x),
    'W + s A B': Step(adapted, x, loss=_merged(squares)),
    'full': Step(base, x, wrt=nnx.Param),
  }


def dora(
  width: int = 1024, hidden: int = 4096, tokens: int = 512, rank: int = 8
) -> dict[str, Step]:
  """One block, with DoRA and without."""
  base = Block(width, hidden, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (tokens, width))
  make = lambda **options: nnx_ext.apply_lora(
    base, rank=rank, rngs=nnx.Rngs(1), **options
  )
  return {
    'nnx_ext': Step(make(dora=True), x),
    'LoRA': Step(make(), x),
    'W + s A B': Step(make(dora=True), x, loss=_merged(squares)),
    'full': Step(base, x, wrt=nnx.Param),
  }


def embed(
  vocabulary: int = 32_000, width: int = 1024, tokens: int = 512, rank: int = 8
) -> dict[str, Step]:
  """The look-up of an embedding: gradients alone, from those of its output."""
  base = nnx.Embed(vocabulary, width, rngs=nnx.Rngs(0))
  ids = jax.random.randint(jax.random.key(1), (tokens,), 0, vocabulary)
  direction = jax.random.normal(jax.random.key(2), (tokens, width))
  loss = lambda model, ids: jnp.vdot(model(ids), direction)
  return _gradients(base, ids, rank, loss)


def attend(
  vocabulary: int = 32_000, width: int = 1024, tokens: int = 512, rank: int = 8
) -> dict[str, Step]:
  """The logits of a tied embedding: gradients alone."""
  base = nnx.Embed(vocabulary, width, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (tokens, width))
  loss = lambda model, x: jnp.mean(jax.nn.logsumexp(model.attend(x), -1))
  return _gradients(base, x, rank, loss)


def conv(
  channels: int = 128, size: int = 32, batch: int = 8, rank: int = 8
) -> dict[str, Step]:
  """A 3 by 3 convolution: gradients alone."""
  base = nnx.Conv(channels, channels, (3, 3), rngs=nnx.Rngs(0))
  shape = batch, size, size, channels
  return _gradients(base, jax.random.normal(jax.random.key(1), shape), rank)


def recurrent(
  width: int = 512, batch: int = 8, length: int = 64, rank: int = 8
) -> dict[str, Step]:
  """An LSTM over a sequence: gradients alone."""
  rngs = nnx.Rngs(0)
  base = nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs))
  shape = batch, length, width
  return _gradients(base, jax.random.normal(jax.random.key(1), shape), rank)


def attention(
  width: int = 512, heads: int = 8, tokens: int = 256, rank: int = 8
) -> dict[str, Step]:
  """The four projections of self-attention, trained."""
  base = nnx.MultiHeadAttention(
    num_heads=heads, in_features=width, decode=False, rngs=nnx.Rngs(0)
  )
  adapted = nnx_ext.apply_lora(base, rank=rank, rngs=nnx.Rngs(1))
  x = jax.random.normal(jax.random.key(1), (1, tokens, width))
  return {
    'nnx_ext': Step(adapted, x),
    'W + s A B': Step(adapted, x, loss=_merged(squares)),
    'full': Step(base, x, wrt=nnx.Param),
  }


def _gradients(
  base: nnx.Module, x: jax.Array, rank: int, loss: Loss = squares
) -> dict[str, Step]:
  adapted = nnx_ext.apply_lora(base, rank=rank, rngs=nnx.Rngs(1))
  return {
    'nnx_ext': Step(adapted, x, loss=loss, train=False),
    'W + s A B': Step(adapted, x, loss=_merged(loss), train=False),
    'full': Step(base, x, wrt=nnx.Param, loss=loss, train=False),
  }


def _merged(loss: Loss) -> Loss:
  """What is written by hand: the adapted weight is made, then used."""
  return lambda model, x: loss(nnx_ext.merge_lora(model), x)


def _wrapped(base: tp.Any, rank: int, rngs: nnx.Rngs) -> tp.Any:
  """A copy with upstream's bypass beside each Linear."""
  model = nnx.clone(base)
  for block in model.layers:
    for name in ('up', 'down'):
      layer = getattr(block, name)
      sizes = layer.in_features, rank, layer.out_features
      wrapper = nnx.LoRA(*sizes, base_module=layer, rngs=rngs)
      setattr(block, name, wrapper)
  return model
