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
"""Weights with orthonormal columns, or rows."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from nnx_ext import _words
from nnx_ext.parametrizations._arrays import as_matrix
from nnx_ext.parametrizations._base import Parametrization

Method = tp.Literal['expm', 'cayley', 'householder']


class Orthogonal(Parametrization):
  r"""A weight with orthonormal columns; a wide one, with orthonormal rows.

  For a matrix of shape :math:`(n, k)`, :math:`n \ge k`, the parameters are
  the entries of :math:`X` below the diagonal, :math:`nk - k(k + 1)/2` of them,
  as many as the manifold has dimensions. With
  :math:`A = \mathrm{tril}(X, -1) - \mathrm{tril}(X, -1)^\top`, padded by zeros
  to :math:`(n, n)`:

  .. math::
    W_\text{expm} &= B \exp(A) \, [I; 0] \\
    W_\text{cayley} &= B \, (I - A/2)^{-1} (I + A/2) \, [I; 0] \\
    W_\text{householder} &= H_1 \cdots H_k \, [I; 0] \, D, \quad
      H_i = I - 2 \frac{u_i u_i^\top}{u_i^\top u_i}

  where :math:`u_i` is column :math:`i` of :math:`I + \mathrm{tril}(X, -1)`.
  :math:`B` is orthogonal and :math:`D` a diagonal of signs; both are fixed.

  - ``expm``: `Lezcano-Casado & Martínez-Rubio 2019
    <https://arxiv.org/abs/1901.08428>`__, section 3, around a base point as in
    `Lezcano-Casado 2019 <https://arxiv.org/abs/1909.09501>`__. Reaches all
    weights of the same determinant.
  - ``cayley``: `Helfrich et al. 2018 <https://arxiv.org/abs/1707.09520>`__.
    One linear solve, and nearly all of those weights.
  - ``householder``: `Mhammedi et al. 2017
    <https://arxiv.org/abs/1612.00188>`__, as one product: a triangular solve
    of size :math:`k`, the cheapest by far for tall weights.

  It starts at the orthogonal matrix nearest to the weight, the orthogonal
  factor of its polar decomposition: an orthogonal weight is kept, of any other
  the singular values become 1. Weights of more axes are taken as matrices
  ``(..., out)``.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import Orthogonal
    ...
    >>> layer = nnx.Linear(
    ...   4, 3, kernel_init=jax.nn.initializers.orthogonal(), rngs=nnx.Rngs(0)
    ... )
    >>> model = nnx_ext.parametrize(layer, {
    ...   nnx.PathContains('kernel'): lambda w: Orthogonal(w, method='cayley')
    ... })
    >>> x = jnp.ones((1, 4))
    >>> bool(jnp.allclose(model(x), layer(x), atol=1e-5))
    True
    >>> model.kernel.x[...] += 0.3  # as training might
    >>> w = model.kernel[...]
    >>> bool(jnp.allclose(w.T @ w, jnp.eye(3), atol=1e-5))
    True

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: Param of the weight's shape. Entries that do not count stay as they are.
    base: Variable of shape ``(n, n)``, the matrix B; not for
      householder.
    signs: Variable of shape ``(k,)``, the diagonal D; for householder only.

  Args:
    weight: a real weight of two or more axes.
    method: ``'expm'``, ``'cayley'`` or ``'householder'``.

  Raises:
    ValueError: if the weight has less than two axes, or the method is none of
      these.
  """

  def __init__(
    self, weight: Float[jax.Array, '...'], *, method: Method = 'expm'
  ):
    if method not in tp.get_args(Method):
      raise ValueError(
        f"Orthogonal: method must be 'expm', 'cayley' or 'householder', got "
        f'{method!r}.{_words.did_you_mean([method], tp.get_args(Method))}'
      )
    self.method = method
    q, rest = _polar(_tall(weight), complete=method != 'householder')
    if method == 'householder':
      # Column i holds u_i below the diagonal.
      x = jnp.tril(jnp.linalg.qr(q, mode='raw')[0].T, -1)
      self.signs = nnx.Variable(jnp.sign(jnp.sum(_reflected(x) * q, axis=0)))
    else:
      x = jnp.zeros_like(q)
      self.base = nnx.Variable(jnp.concatenate([q, rest], axis=1))
    self.x = nnx.Param(_as(x, weight).astype(weight.dtype))

  def __call__(self) -> Float[jax.Array, '...']:
    x = self.x[...]
    lower = jnp.tril(_tall(x), -1)
    if self.method == 'householder':
      q = _reflected(lower) * self.signs[...][None]
    else:
      n, k = lower.shape
      skew = jnp.pad(lower, ((0, 0), (0, n - k)))
      rotate = _expm if self.method == 'expm' else _cayley
      rotation = rotate(skew - skew.T, k)
      q = jnp.matmul(self.base[...], rotation, precision='highest')
    return _as(q, x).astype(x.dtype)


def _tall(weight):
  """A weight as a matrix with no more columns than rows, in float32 or more."""
  matrix = as_matrix('Orthogonal', weight)
  return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T


def _as(matrix, like):
  """A matrix that ``_tall`` made, back in the shape of the weight."""
  if matrix.shape[1] != like.shape[-1]:
    matrix = matrix.T
  return matrix.reshape(like.shape)


def _polar(matrix, complete):
  """The nearest orthogonal matrix, and columns that complete it."""
  k = matrix.shape[1]
  largest = jnp.max(jnp.abs(matrix), initial=0)
  matrix = matrix / jnp.where(largest > 0, largest, 1)
  u, _, vt = jnp.linalg.svd(matrix, full_matrices=complete)
  return jnp.matmul(u[:, :k], vt, precision='highest'), u[:, k:]


def _expm(skew, k):
  return jax.scipy.linalg.expm(skew)[:, :k]


def _cayley(skew, k):
  eye = jnp.eye(len(skew), dtype=skew.dtype)
  return jnp.linalg.solve(eye - skew / 2, (eye + skew / 2)[:, :k])


def _reflected(lower):
  """The first columns of the product of reflections, all at once.

  With U of unit columns, the product is I - U T U^T where T^-1 is U^T U above
  the diagonal and 1/2 on it (Joffrain et al. 2006, "Accumulating Householder
  transformations, revisited").
  """
  n, k = lower.shape
  eye = jnp.eye(n, k, dtype=lower.dtype)
  u = lower + eye
  scale = jax.lax.stop_gradient(jnp.max(jnp.abs(u), axis=0, keepdims=True))
  u = u / scale
  u = u / jnp.sqrt(jnp.sum(u**2, axis=0, keepdims=True))
  gram = jnp.matmul(u.T, u, precision='highest')
  inverse = jnp.triu(gram, 1) + eye[:k] / 2
  t_ut = jax.scipy.linalg.solve_triangular(inverse, u[:k].T)
  return eye - jnp.matmul(u, t_ut, precision='highest')
