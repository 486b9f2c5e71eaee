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
"""What users derive from the layers, or build of them."""

import jax.numpy as jnp
from flax import nnx


class Relu(nnx.Linear):
  """Calls the layer's own forward and does something with it."""

  def __call__(self, x):
    return nnx.relu(super().__call__(x))


class Gated(nnx.Linear):
  """Calls it twice, on different inputs."""

  def __call__(self, x):
    return jnp.tanh(super().__call__(x)) * super().__call__(jnp.flip(x, -1))


class OwnForward(nnx.Linear):
  """Reads the weight itself."""

  def __call__(self, x):
    return jnp.tanh(x @ self.kernel[...]) + self.bias[...].sum()


class Both(nnx.Linear):
  """Reads the weight and calls the layer's own forward."""

  def __call__(self, x):
    return super().__call__(x) * jnp.mean(self.kernel[...] ** 2)


class Helper(nnx.Linear):
  """Reads the weight in a method."""

  def __call__(self, x):
    return super().__call__(x) / self.size()

  def size(self):
    return jnp.sqrt(jnp.sum(self.kernel[...] ** 2))


class Property(nnx.Linear):
  """Reads the weight in a property."""

  @property
  def doubled(self):
    return 2.0 * self.kernel

  def __call__(self, x):
    return x @ self.doubled


class Normed:
  """A mixin that is no Module."""

  def normed(self):
    return self.kernel[...] / jnp.max(jnp.abs(self.kernel[...]))


class Mixed(Normed, nnx.Linear):
  """Reads the weight in a method of a mixin."""

  def __call__(self, x):
    return x @ self.normed()


class Derived(OwnForward):
  """Inherits a forward of its own."""

  def __call__(self, x):
    return 3.0 * super().__call__(x)


class Named(nnx.Linear):
  """Calls the layer's own forward by its name."""

  def __call__(self, x):
    return 2.0 * nnx.Linear.__call__(self, x)


class Jitted(nnx.Linear):
  """Reads the weight in a method that is no plain function."""

  @nnx.jit
  def __call__(self, x):
    return jnp.tanh(x @ self.kernel[...])


class ScaledEmbed(nnx.Embed):
  def __call__(self, ids):
    return super().__call__(ids) * self.features**0.5


class PooledConv(nnx.Conv):
  def __call__(self, x):
    return jnp.mean(jnp.tanh(super().__call__(x)), axis=1)


class Tied(nnx.Module):
  """Embeds ids and attends over the same embedding."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 5, rngs=rngs)

  def __call__(self, ids):
    return self.embed.attend(jnp.tanh(self.embed(ids)))


class Attention(nnx.Module):
  """Self-attention under a causal mask."""

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(
      2, 6, qkv_features=8, decode=False, rngs=rngs
    )

  def __call__(self, x):
    return self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))
