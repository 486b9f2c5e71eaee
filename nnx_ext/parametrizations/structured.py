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
"""Structured matrices: Kronecker products, circulant, Monarch."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Inexact

from nnx_ext import _words
from nnx_ext.parametrizations._arrays import check_square, wide
from nnx_ext.parametrizations._base import Parametrization


class Kronecker(Parametrization):
  r"""The Kronecker product of two matrices.

  .. math::
    W = A \otimes B, \qquad
    W_{(i, m), (j, n)} = A_{ij} B_{mn}

  It starts at the product nearest to the weight, by the singular value
  decomposition of the rearranged weight (`Van Loan & Pitsianis 1993
  <https://doi.org/10.1007/978-94-015-8196-7_17>`__): a Kronecker product of
  factors of these shapes is kept, any other weight is projected.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import Kronecker
    ...
    >>> weight = jnp.kron(jnp.array([[1.0, 2.0]]), jnp.ones((2, 2)))
    >>> product = Kronecker(weight, left=(1, 2))
    >>> product.a.shape, product.b.shape
    ((1, 2), (2, 2))
    >>> product().round(4)
    Array([[1., 1., 2., 2.],
           [1., 1., 2., 2.]], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    a: Param, the left factor.
    b: Param, the right factor.

  Args:
    weight: a matrix.
    left: the shape of the left factor; it divides that of the weight, and the
      right factor has the quotient.

  Raises:
    ValueError: if the weight is no matrix, or ``left`` does not divide its
      shape.
  """

  def __init__(
    self, weight: Inexact[jax.Array, '...'], *, left: tuple[int, int]
  ):
    _check_matrix('Kronecker', weight)
    if len(left) != 2 or any(
      n < 1 or m % n for m, n in zip(weight.shape, left)
    ):
      raise ValueError(
        f'Kronecker: left={left} must be two numbers that divide the shape of '
        f'the weight, {weight.shape}.'
      )
    self.left = tuple(left)
    right = tuple(m // n for m, n in zip(weight.shape, left))
    (i, j), (m, n) = left, right
    blocks = jnp.moveaxis(weight.reshape(i, m, j, n), 2, 1)
    a, b = _nearest_product(blocks.reshape(i * j, m * n))
    self.a = nnx.Param(a.reshape(left))
    self.b = nnx.Param(b.reshape(right))

  def __call__(self) -> Inexact[jax.Array, '...']:
    return jnp.kron(self.a[...], self.b[...])


class Circulant(Parametrization):
  r"""A circulant matrix: each row is the one above, moved by one.

  .. math::
    W_{ij} = c_{(i - j) \bmod n}

  `Cheng et al. 2015 <https://arxiv.org/abs/1502.03436>`__, section 3. It
  starts at the circulant matrix nearest to the weight, by the means of its
  wrapped diagonals: a circulant weight is kept, any other is projected.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import Circulant
    ...
    >>> Circulant(jnp.array([[1.0, 4.0], [2.0, 3.0]]))()
    Array([[2., 3.],
           [3., 2.]], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    c: Param of shape ``(n,)``, the first column.

  Args:
    weight: a square matrix.

  Raises:
    ValueError: if the weight is no square matrix.
  """

  def __init__(self, weight: Inexact[jax.Array, '...']):
    check_square('Circulant', weight)
    # Element (i, d) of what is gathered is on the diagonal d.
    i, d = jnp.indices(weight.shape)
    self.c = nnx.Param(jnp.mean(weight[i, (i - d) % len(weight)], axis=0))

  def __call__(self) -> Inexact[jax.Array, 'n n']:
    c = self.c[...]
    i, j = jnp.indices((len(c), len(c)))
    return jnp.take(c, (i - j) % len(c))


class Monarch(Parametrization):
  r"""A Monarch matrix: two block-diagonal matrices and a permutation.

  .. math::
    W = P^\top L P R, \qquad
    W_{(l, j), (k, i)} = L_{j l k} \, R_{k j i}

  `Dao et al. 2022 <https://arxiv.org/abs/2204.00595>`__, section 3.1. The
  permutation :math:`P` swaps the two parts of an index, and the blocks of
  :math:`L` and :math:`R` are the matrices :math:`L_j` and :math:`R_k`. It
  starts at the Monarch matrix nearest to the weight, by the singular value
  decomposition of each slice :math:`(j, k)` (section 3.3, algorithm 1): a
  Monarch matrix is kept, any other weight is projected.

  Example::

    >>> from flax import nnx
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import Monarch
    ...
    >>> model = nnx_ext.parametrize(
    ...   nnx.Linear(12, 8, rngs=nnx.Rngs(0)),
    ...   {nnx.PathContains('kernel'): lambda w: Monarch(w, blocks=4)},
    ... )
    >>> model.kernel.left.shape, model.kernel.right.shape
    ((4, 3, 4), (4, 4, 2))

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    left: Param of shape ``(blocks, rows / blocks, blocks)``, the blocks of L.
    right: Param of shape ``(blocks, blocks, columns / blocks)``, those of R.

  Args:
    weight: a matrix.
    blocks: the number of blocks of L and of R, a divisor of the numbers of
      rows and columns; by default :math:`m` for a square matrix of size
      :math:`m^2`, as in the paper.

  Raises:
    ValueError: if the weight is no matrix, or ``blocks`` does not divide its
      shape, or is not given where it must be.
  """

  def __init__(
    self, weight: Inexact[jax.Array, '...'], *, blocks: int | None = None
  ):
    _check_matrix('Monarch', weight)
    rows, columns = weight.shape
    if blocks is None and rows == columns == math.isqrt(rows) ** 2:
      blocks = math.isqrt(rows)
    if blocks is None or blocks < 1 or rows % blocks or columns % blocks:
      raise ValueError(
        f'Monarch: blocks={blocks} must divide the shape of the weight, '
        f'{weight.shape}, such as blocks={math.gcd(rows, columns)}; it can be '
        'left out for a square matrix of size 4, 9, 16 and so on.'
      )
    self.blocks = m = blocks
    slices = weight.reshape(rows // m, m, m, columns // m)
    left, right = _nearest_product(jnp.einsum('ljki->jkli', slices))
    self.left = nnx.Param(jnp.einsum('jkl->jlk', left))
    self.right = nnx.Param(jnp.einsum('jki->kji', right))

  def __call__(self) -> Inexact[jax.Array, '...']:
    left, right = self.left[...], self.right[...]
    weight = jnp.einsum('jlk,kji->ljki', left, right)
    m = self.blocks
    return weight.reshape(m * left.shape[1], m * right.shape[2])


def _check_matrix(name: str, weight) -> None:
  if weight.ndim != 2:
    raise ValueError(
      f'{name} needs a matrix, such as the kernel of nnx.Linear, got '
      f'{_words.value(weight)}.'
    )


def _nearest_product(matrix):
  """Columns and rows whose product is nearest to each of some matrices.

  Of a matrix of zeros only the row is zero, so that there is a gradient.
  """
  u, s, vh = jnp.linalg.svd(wide(matrix), full_matrices=False)
  root = jnp.sqrt(s[..., :1])
  column = u[..., :, 0] * jnp.where(root > 0, root, 1)
  row = root * vh[..., 0, :]
  return column.astype(matrix.dtype), row.astype(matrix.dtype)
