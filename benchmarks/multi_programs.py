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
"""Functions of several losses, with their arguments and routes."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import normal
from benchmarks.multi_models import MLP, Heads, Scanned, Transformer
from benchmarks.multi_ways import Program


def dense(rows: int, sizes: tp.Sequence[int]) -> list[int]:
  """The flops of each layer's product."""
  return [2 * rows * i * o for i, o in zip(sizes, sizes[1:])]


def first_saves(forward: list[int]) -> int:
  """Forward and backward of layers whose input is not differentiated."""
  return 3 * sum(forward) - forward[0]


def actor_critic_losses(actor, critic, x) -> dict[str, jax.Array]:
  log_prob = jax.nn.log_softmax(actor(x))[:, 0]
  value = critic(x)[:, 0]
  advantage = jax.lax.stop_gradient(1.0 - value)
  return {
    'policy': -jnp.mean(log_prob * advantage),
    'value': jnp.mean((1.0 - value) ** 2),
  }


def separate(width: int = 128, size: int = 64, dtype=jnp.float32) -> Program:
  """An actor and a critic, each with a loss of its own."""
  actor_sizes = width, width, width, 8
  critic_sizes = width, width, width, 1

  def arguments():
    rngs = nnx.Rngs(0)
    actor = MLP(actor_sizes, dtype=dtype, rngs=rngs)
    critic = MLP(critic_sizes, dtype=dtype, rngs=rngs)
    return actor, critic, normal(size, width, dtype=dtype)

  limit = sum(
    first_saves(dense(size, sizes)) for sizes in (actor_sizes, critic_sizes)
  )
  argnums = {'policy': 0, 'value': 1}
  return Program(actor_critic_losses, arguments, argnums, limit, limit)


def scanned(
  depth: int = 6, width: int = 64, size: int = 32, dtype=jnp.float32
) -> Program:
  """The same with scanned networks: XLA does not merge the naive forwards."""

  def arguments():
    rngs = nnx.Rngs(0)
    actor = Scanned(depth, width, dtype=dtype, rngs=rngs)
    critic = Scanned(depth, width, dtype=dtype, rngs=rngs)
    return actor, critic, normal(size, width, dtype=dtype)

  limit = 2 * 3 * 2 * size * width**2
  argnums = {'policy': 0, 'value': 1}
  return Program(actor_critic_losses, arguments, argnums, limit, limit, depth)


def heads(
  count: int = 2,
  width: int = 128,
  size: int = 64,
  *,
  depth: int = 4,
  hidden: bool = True,
  leak: bool = False,
  dropout: float = 0.0,
  dtype=jnp.float32,
) -> Program:
  """Heads on one trunk, each trained with the trunk by a loss of its own.

  ``depth`` counts the trunk's layers; with ``hidden`` a head has one more
  than its output layer. With ``leak`` the last loss reads the first head's
  output too. ``dropout`` draws from a stream of the model's own.
  """
  trunk_sizes = (width,) * (depth + 1)
  head_sizes = (width, width, 1) if hidden else (width, 1)

  def make(rngs):
    return MLP(trunk_sizes, dropout=dropout, dtype=dtype, rngs=rngs)

  trunk, head = dense(size, trunk_sizes), dense(size, head_sizes)
  forward = sum(trunk) + count * sum(head)
  back, of_heads = 2 * sum(trunk) - trunk[0], 2 * count * sum(head)
  # Through the head that is leaked into, and not to its weights; the sum has
  # both losses' cotangents there, and one of them alone for the weights.
  through, alone = (sum(head), sum(head[1:])) if leak else (0, 0)
  return Program(
    losses=functools.partial(_heads_losses, count, leak),
    arguments=functools.partial(
      _heads_arguments,
      make,
      head_sizes,
      count,
      normal(size, width, dtype=dtype),
    ),
    argnums=_heads_argnums(count),
    limit=forward + of_heads + count * back + through,
    sum_limit=forward + of_heads + back + alone,
  )


def transformer(
  depth: int = 6,
  width: int = 128,
  size: int = 8,
  length: int = 64,
  *,
  remat: bool = False,
  dtype=jnp.float32,
) -> Program:
  """Two heads on a scanned transformer, whose layers may be recomputed."""
  head_sizes = width, width, 1
  shape = size, length, width

  def make(rngs):
    return Transformer(depth, width, remat=remat, dtype=dtype, rngs=rngs)

  tokens = size * length
  # Four projections, two products of attention, a feed-forward of four widths.
  layer = tokens * (24 * width**2 + 4 * length * width)
  head = 3 * sum(dense(tokens, head_sizes))
  return Program(
    losses=functools.partial(_heads_losses, 2, False),
    arguments=functools.partial(
      _heads_arguments,
      make,
      head_sizes,
      2,
      normal(*shape, dtype=dtype),
    ),
    argnums=_heads_argnums(2),
    limit=5 * layer + 2 * head,
    sum_limit=3 * layer + 2 * head,
    rounds=depth,
    outside=2 * head,
  )


def _heads_losses(count: int, leak: bool, model: Heads, x: jax.Array):
  y = model(x)
  out = {
    f'h_{i}': jnp.mean((y[f'h_{i}'] - i).astype(jnp.float32) ** 2)
    for i in range(count)
  }
  if leak:
    last = f'h_{count - 1}'
    out[last] += jnp.mean(y[last] * y['h_0'])
  return out


def _heads_arguments(make, head_sizes, count: int, x: jax.Array):
  rngs = nnx.Rngs(0)
  names = [f'h_{i}' for i in range(count)]
  return Heads(make(rngs), head_sizes, names, dtype=x.dtype, rngs=rngs), x


def _heads_argnums(count: int) -> dict[str, nnx.DiffState]:
  def trunk_and(name):
    return nnx.All(
      nnx.Param, nnx.Any(nnx.PathContains('trunk'), nnx.PathContains(name))
    )

  names = [f'h_{i}' for i in range(count)]
  return {name: nnx.DiffState(0, trunk_and(name)) for name in names}
