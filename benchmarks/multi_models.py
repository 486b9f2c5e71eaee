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
"""The networks of the multi-loss programs."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import Layer, stacked


class MLP(nnx.Module):
  def __init__(
    self,
    sizes: tp.Sequence[int],
    *,
    dropout: float = 0.0,
    dtype: tp.Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.layers = nnx.List(
      [
        nnx.Linear(i, o, dtype=dtype, param_dtype=dtype, rngs=rngs)
        for i, o in zip(sizes, sizes[1:])
      ]
    )
    self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

  def __call__(self, x: jax.Array) -> jax.Array:
    for layer in self.layers:
      x = jnp.tanh(layer(x))
      if self.dropout is not None:
        x = self.dropout(x)
    return x


class Scanned(nnx.Module):
  """Layers of one width, their weights stacked, run by a scan."""

  def __init__(
    self,
    depth: int,
    width: int,
    *,
    dtype: tp.Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    def layer(rngs):
      return nnx.Linear(width, width, dtype=dtype, param_dtype=dtype, rngs=rngs)

    self.layers = stacked(layer, depth, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return jnp.tanh(layer(x))

    return forward(x, self.layers)


class Transformer(nnx.Module):
  """Layers run by a scan, recomputed in the backward pass with ``remat``."""

  def __init__(
    self,
    depth: int,
    width: int,
    *,
    remat: bool = False,
    dtype: tp.Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    def layer(rngs):
      heads = max(width // 64, 1)
      return Layer(width, 4 * width, heads, dtype=dtype, rngs=rngs)

    self.layers = stacked(layer, depth, rngs)
    self.remat = remat

  def __call__(self, x: jax.Array) -> jax.Array:
    def forward(x, layer):
      return layer(x)

    forward = nnx.remat(forward) if self.remat else forward
    scan = nnx.scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return scan(x, self.layers)


class Heads(nnx.Module):
  """Heads of one output on one trunk."""

  def __init__(
    self,
    trunk: nnx.Module,
    sizes: tp.Sequence[int],
    names: tp.Sequence[str],
    *,
    dtype: tp.Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.trunk = trunk
    self.names = tuple(names)
    for name in names:
      setattr(self, name, MLP(sizes, dtype=dtype, rngs=rngs))

  def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
    h = self.trunk(x)
    return {name: getattr(self, name)(h)[..., 0] for name in self.names}
