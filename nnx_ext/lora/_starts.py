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
"""How the factors of an adapter start."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Inexact

from nnx_ext.lora._axes import Axes
from nnx_ext.lora._options import LoRAOptions


def check_start(
  api: str, axes: Axes, shape: tuple[int, ...], options: LoRAOptions
):
  """Raises if a start by decomposition has fewer directions than the rank."""
  _, *sizes = axes.matrix_sizes(shape[len(shape) - len(axes.kinds) :])
  if options.init in ('pissa', 'olora') and options.rank > min(sizes):
    raise ValueError(
      f'{api}: init={options.init!r} takes the leading directions of the '
      f'weight, and one of shape {shape} has {min(sizes)}, fewer than the rank '
      f'{options.rank}; give a smaller rank.'
    )


def start(
  weight: Inexact[Array, '...'],
  axes: Axes,
  options: LoRAOptions,
  initializers: tuple[nnx.Initializer, nnx.Initializer],
  rngs: nnx.Rngs,
) -> tuple[Array, Array]:
  """A and B, from matrices, as initializers and decompositions know them."""
  count = len(axes.kinds)
  stack = weight.shape[: weight.ndim - count]
  shape = weight.shape[weight.ndim - count :]
  b, i, o = axes.matrix_sizes(shape)
  rank, dtype = options.rank, options.param_dtype
  keys = rngs.params(), rngs.params()
  if options.init in ('pissa', 'olora'):
    matrices = axes.matrices(weight)
    decompose = _pissa if options.init == 'pissa' else _olora
    a, b_ = decompose(matrices, rank, options.scale)
  elif options.init == 'orthogonal':
    a, b_ = _orthogonal(keys, (*stack, b), i, o, rank)
  else:
    a_init = options.a_initializer or initializers[0]
    b_init = options.b_initializer or initializers[1]
    a = _draw(a_init, keys[0], stack, (i, b * rank), dtype)
    a = jnp.moveaxis(a.reshape(*stack, i, b, rank), -2, -3)
    b_ = _draw(b_init, keys[1], stack, (rank, b * o), dtype)
    b_ = jnp.moveaxis(b_.reshape(*stack, rank, b, o), -2, -3)
  a = axes.a_from_matrices(a, shape).astype(dtype)
  return a, axes.b_from_matrices(b_, shape).astype(dtype)


def _draw(initializer, key, stack, shape, dtype) -> Array:
  """Values for each of the stacked layers, from keys of their own."""
  draw = lambda key: initializer(key, shape, dtype)
  for size in reversed(stack):
    draw = _draw_each(draw, size)
  return draw(key)


def _draw_each(draw, size):
  return lambda key: jax.vmap(draw)(jax.random.split(key, size))


def _pissa(
  matrices: Float[Array, '... i o'], rank: int, scale: float
) -> tuple[Float[Array, '... i r'], Float[Array, '... r o']]:
  """The leading singular directions (https://arxiv.org/abs/2404.02948)."""
  u, s, vt = jnp.linalg.svd(matrices, full_matrices=False)
  root = jnp.sqrt(s[..., :rank] / scale)
  return u[..., :rank] * root[..., None, :], root[..., None] * vt[..., :rank, :]


def _olora(
  matrices: Float[Array, '... i o'], rank: int, scale: float
) -> tuple[Float[Array, '... i r'], Float[Array, '... r o']]:
  """Columns of a QR decomposition (https://arxiv.org/abs/2406.01775).

  That of the transpose, as in PEFT, whose weights are (out, in).
  """
  q, r = jnp.linalg.qr(jnp.swapaxes(matrices, -1, -2))
  transposed = lambda x: jnp.swapaxes(x, -1, -2)
  return transposed(r[..., :rank, :]), transposed(q[..., :rank])


def _orthogonal(
  keys, stack: tuple[int, ...], i: int, o: int, rank: int
) -> tuple[Float[Array, '... i r'], Float[Array, '... r o']]:
  """Factors that are not zero, whose product is.

  A random orthogonal basis of the rank's space, one half for A and the other
  for B, as PEFT's ``init_lora_weights='orthogonal'``.
  """
  half = rank // 2
  square, left, right = (
    jax.random.normal(key, (*stack, *shape))
    for key, shape in zip(
      (*jax.random.split(keys[0]), keys[1]),
      ((rank, rank), (i, half), (half, o)),
    )
  )
  basis, _ = jnp.linalg.qr(square)
  a = left @ basis[..., 0::2, :] / 10
  return a, jnp.swapaxes(basis[..., 1::2, :], -1, -2) @ right / 10
