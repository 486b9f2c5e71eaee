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
"""Square weights: symmetric, skew-symmetric, positive definite."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Inexact

from nnx_ext.parametrizations._arrays import check_square, wide
from nnx_ext.parametrizations._base import Parametrization


class Symmetric(Parametrization):
  r"""A symmetric weight.

  .. math::
    W = \mathrm{tril}(X) + \mathrm{tril}(X, -1)^\top

  It starts at the symmetric matrix nearest to the weight,
  :math:`(W + W^\top)/2`: a symmetric weight is kept, any other loses its skew
  part. An entry of :math:`X` off the diagonal stands at two places of the
  weight, and its gradient is the sum of theirs.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import Symmetric
    ...
    >>> Symmetric(jnp.array([[1.0, 2.0], [4.0, 5.0]]))()
    Array([[1., 3.],
           [3., 5.]], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: Param of the weight's shape; what is above the diagonal does not count.

  Args:
    weight: a square matrix.

  Raises:
    ValueError: if the weight is no square matrix.
  """

  def __init__(self, weight: Inexact[jax.Array, '...']):
    check_square('Symmetric', weight)
    self.x = nnx.Param(jnp.tril(weight / 2 + weight.T / 2))

  def __call__(self) -> Inexact[jax.Array, 'n n']:
    x = self.x[...]
    return jnp.tril(x) + jnp.tril(x, -1).T

  def log_det(self) -> Float[jax.Array, '']:
    """Zero: the entries on and below the diagonal are the parameters."""
    return jnp.zeros(())


class Skew(Parametrization):
  r"""A skew-symmetric weight.

  .. math::
    W = \mathrm{tril}(X, -1) - \mathrm{tril}(X, -1)^\top

  It starts at the skew-symmetric matrix nearest to the weight,
  :math:`(W - W^\top)/2`: a skew weight is kept, any other loses its symmetric
  part.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import Skew
    ...
    >>> Skew(jnp.array([[1.0, 2.0], [4.0, 5.0]]))()
    Array([[ 0., -1.],
           [ 1.,  0.]], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: Param of the weight's shape; only what is below the diagonal counts.

  Args:
    weight: a square matrix.

  Raises:
    ValueError: if the weight is no square matrix.
  """

  def __init__(self, weight: Inexact[jax.Array, '...']):
    check_square('Skew', weight)
    self.x = nnx.Param(jnp.tril(weight / 2 - weight.T / 2, -1))

  def __call__(self) -> Inexact[jax.Array, 'n n']:
    lower = jnp.tril(self.x[...], -1)
    return lower - lower.T

  def log_det(self) -> Float[jax.Array, '']:
    """Zero: the entries below the diagonal are the parameters."""
    return jnp.zeros(())


class PositiveDefinite(Parametrization):
  r"""A symmetric positive definite weight, such as a covariance.

  .. math::
    W = L L^\top + \epsilon I, \qquad
    L = \mathrm{tril}(X, -1) + \mathrm{diag}(\mathrm{softplus}(X_{ii}))

  The Cholesky parametrization of `Pinheiro & Bates 1996
  <https://doi.org/10.1007/BF00140873>`__, with softplus for the exponential.
  The weight must be symmetric with all eigenvalues above :math:`\epsilon`, and
  is kept. Where its values are not known, as under ``jit``, this cannot be
  checked, and any other weight gives NaN.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import PositiveDefinite
    ...
    >>> covariance = PositiveDefinite(jnp.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> covariance().round(4)
    Array([[2., 1.],
           [1., 2.]], dtype=float32)
    >>> covariance.x[...] -= 10.0  # wherever training goes
    >>> bool(jnp.all(jnp.linalg.eigvalsh(covariance()) > 0))
    True

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: Param of the weight's shape; what is above the diagonal does not count.

  Args:
    weight: a symmetric positive definite matrix.
    eps: what all eigenvalues stay above.

  Raises:
    ValueError: if the weight is no square matrix, not symmetric, or has an
      eigenvalue of ``eps`` or less; or if ``eps`` is negative.
  """

  def __init__(self, weight: Float[jax.Array, '...'], *, eps: float = 1e-6):
    check_square('PositiveDefinite', weight)
    if eps < 0:
      raise ValueError(
        f'PositiveDefinite: eps must not be negative, got {eps}.'
      )
    self.eps = eps
    matrix = wide(weight)
    cholesky = jnp.linalg.cholesky(matrix - eps * _eye(matrix))
    _check_definite(matrix, cholesky, jnp.finfo(weight.dtype).eps, eps)
    # The inverse of softplus, which neither over- nor underflows.
    diagonal = jnp.diag(cholesky)
    diagonal = diagonal + jnp.log(-jnp.expm1(-diagonal))
    x = jnp.tril(cholesky, -1) + jnp.diag(diagonal)
    self.x = nnx.Param(x.astype(weight.dtype))

  def __call__(self) -> Float[jax.Array, 'n n']:
    x = wide(self.x[...])
    lower = jnp.tril(x, -1) + jnp.diag(jax.nn.softplus(jnp.diag(x)))
    weight = jnp.matmul(lower, lower.T, precision='highest')
    return (weight + self.eps * _eye(x)).astype(self.x.dtype)

  def log_det(self) -> Float[jax.Array, '']:
    r"""The log determinant on the entries on and below the diagonal.

    .. math::
      n \log 2 + \sum_{i=1}^n (n + 1 - i) \log L_{ii}
        + \sum_{i=1}^n \log \mathrm{sigmoid}(X_{ii})

    as for covariance matrices in the Stan reference manual, with softplus for
    the exponential.
    """
    x = jnp.diag(wide(self.x[...]))
    n = x.shape[0]
    log_diagonal = jnp.log(jax.nn.softplus(x))
    powers = jnp.arange(n, 0, -1, dtype=x.dtype)
    return n * jnp.log(2.0) + jnp.sum(
      powers * log_diagonal + jax.nn.log_sigmoid(x)
    )


def _eye(matrix):
  return jnp.eye(len(matrix), dtype=matrix.dtype)


def _check_definite(weight, cholesky, precision, eps) -> None:
  """Raises for a weight off the domain, if its values are known."""
  skew = jnp.max(jnp.abs(weight - weight.T))
  symmetric = skew <= 10 * precision * jnp.max(jnp.abs(weight))
  definite = jnp.all(jnp.isfinite(cholesky)) & jnp.all(jnp.diag(cholesky) > 0)
  try:
    known = bool(symmetric), bool(definite)
  except jax.errors.ConcretizationTypeError:
    return
  if not known[0]:
    raise ValueError(
      'PositiveDefinite needs a symmetric matrix, got one that differs from '
      f'its transpose by {float(skew):.2g}; (w + w.T) / 2 is symmetric.'
    )
  if not known[1]:
    smallest = float(jnp.linalg.eigvalsh(weight)[0])
    raise ValueError(
      f'PositiveDefinite needs a matrix with all eigenvalues above eps={eps}, '
      f'got one of {smallest:.2g}; adding a multiple of the identity raises '
      'them all.'
    )
