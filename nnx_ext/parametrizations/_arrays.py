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
"""What families of parametrizations share: precision, and matrices."""

import jax
import jax.numpy as jnp

from nnx_ext import _words


def wide(x: jax.Array) -> jax.Array:
  """In float32 or more, to compute in."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def as_matrix(name: str, weight: jax.Array) -> jax.Array:
  """A weight of two or more axes as a wide matrix ``(..., out)``."""
  if weight.ndim < 2:
    raise ValueError(
      f'{name} needs a weight of two or more axes, such as a kernel, got '
      f'{_words.value(weight)}.'
    )
  return wide(weight).reshape(-1, weight.shape[-1])


def check_square(name: str, weight: jax.Array) -> None:
  if weight.ndim != 2 or weight.shape[0] != weight.shape[1]:
    raise ValueError(
      f'{name} needs a square matrix, such as one of shape (3, 3), got '
      f'{_words.value(weight)}.'
    )
