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
"""What the programs of several pillars are made of."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx


def normal(*shape: int, dtype: tp.Any = jnp.float32) -> jax.Array:
  """An input."""
  return jax.random.normal(jax.random.key(1), shape, dtype)


def squares(model: tp.Any, x: jax.Array) -> jax.Array:
  """A loss, in float32."""
  return jnp.mean((model(x).astype(jnp.float32) - 1.0) ** 2)


def stacked(
  make: tp.Callable[[nnx.Rngs], tp.Any], depth: int, rngs: nnx.Rngs
) -> tp.Any:
  """Modules of one kind, their weights on a leading axis."""
  return nnx.split_rngs(splits=depth)(nnx.vmap(make))(rngs)


def attention_of(
  width: int, heads: int, dtype: tp.Any, rngs: nnx.Rngs
) -> nnx.MultiHeadAttention:
  return nnx.MultiHeadAttention(
    num_heads=heads,
    in_features=width,
    param_dtype=dtype,
    decode=False,
    rngs=rngs,
  )


class Block(nnx.Module):
  """A transformer's feed-forward block."""

  def __init__(
    self,
    width: int,
    hidden: int,
    *,
    exact: bool = False,
    dtype: tp.Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.exact = exact
    self.norm = nnx.LayerNorm(width, param_dtype=dtype, rngs=rngs)
    self.up = nnx.Linear(width, hidden, param_dtype=dtype, rngs=rngs)
    self.down = nnx.Linear(hidden, width, param_dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    hidden = nnx.gelu(self.up(self.norm(x)), approximate=not self.exact)
    return x + self.down(hidden)


class Layer(nnx.Module):
  """A transformer's layer: attention, then a feed-forward block."""

  def __init__(
    self, width: int, hidden: int, heads: int, *, dtype: tp.Any, rngs: nnx.Rngs
  ):
    self.norm = nnx.LayerNorm(width, param_dtype=dtype, rngs=rngs)
    self.attention = attention_of(width, heads, dtype, rngs)
    self.block = Block(width, hidden, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.block(x + self.attention(self.norm(x)))
