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
"""Weights of low rank, and low-rank updates of weights."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Inexact

from nnx_ext.parametrizations._arrays import as_matrix, wide
from nnx_ext.parametrizations._base import Parametrization


class LowRank(Parametrization):
  r"""A weight of low rank, as the product of two factors.

  .. math::
    W = A B, \qquad A: (\ldots, r), \quad B: (r, \text{out})

  It starts at the matrix of rank :math:`r` nearest to the weight, by the
  truncated singular value decomposition
  (`Eckart & Young 1936 <https://doi.org/10.1007/BF02288367>`__) with
  :math:`\sqrt{s}` in each factor. A weight of rank :math:`r` or less is kept;
  of any other, the spectral norm of what is lost is the singular value
  :math:`s_{r+1}`.

  Weights of more axes are taken as matrices ``(..., out)``. Where a singular
  value is 0, so is the row of :math:`B` only, so that there is a gradient.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import LowRank
    ...
    >>> model = nnx_ext.parametrize(
    ...   nnx.Linear(8, 6, rngs=nnx.Rngs(0)),
    ...   {nnx.PathContains('kernel'): lambda w: LowRank(w, rank=2)},
    ... )
    >>> model.kernel.a.shape, model.kernel.b.shape
    ((8, 2), (2, 6))
    >>> int(jnp.linalg.matrix_rank(model.kernel[...]))
    2

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    a: Param of shape ``(..., rank)``.
    b: Param of shape ``(rank, out)``.

  Args:
    weight: a weight of two or more axes.
    rank: from 1 to the number of the matrix's rows or columns.

  Raises:
    ValueError: if the weight has less than two axes, or the rank is none of
      these.
  """

  def __init__(self, weight: Inexact[jax.Array, '...'], *, rank: int):
    matrix = as_matrix('LowRank', weight)
    if not 1 <= rank <= min(matrix.shape):
      raise ValueError(
        f'LowRank: rank must be from 1 to {min(matrix.shape)} for a weight of '
        f'shape {weight.shape}, got {rank}.'
      )
    self.rank = rank
    u, s, vh = jnp.linalg.svd(matrix, full_matrices=False)
    root = jnp.sqrt(s[:rank])
    a = u[:, :rank] * jnp.where(root > 0, root, 1)[None]
    b = root[:, None] * vh[:rank]
    a = a.reshape(*weight.shape[:-1], rank)
    self.a = nnx.Param(a.astype(weight.dtype))
    self.b = nnx.Param(b.astype(weight.dtype))

  def __call__(self) -> Inexact[jax.Array, '...']:
    return _product(self.a[...], self.b[...]).astype(self.a.dtype)


class LowRankUpdate(Parametrization):
  r"""A fixed weight with a trained update of low rank (LoRA).

  .. math::
    W = W_0 + \frac{\alpha}{r} A B

  `Hu et al. 2021 <https://arxiv.org/abs/2106.09685>`__, section 4.1: only
  :math:`A` and :math:`B` train, :math:`W_0` is no Param. :math:`A` starts
  random and :math:`B` at zero, so that the layer starts as the same function.
  Weights of more axes are taken as matrices ``(..., out)``.

  Example::

    >>> from flax import nnx
    >>> import jax
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import LowRankUpdate
    ...
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx_ext.parametrize(
    ...   nnx.Linear(8, 6, use_bias=False, rngs=rngs),
    ...   {nnx.Param: lambda w: LowRankUpdate(w, rank=2, rngs=rngs)},
    ... )
    >>> jax.tree.map(jax.numpy.shape, nnx.to_pure_dict(
    ...   nnx.state(model, nnx.Param)
    ... ))
    {'kernel': {'a': (8, 2), 'b': (2, 6)}}

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    base: Variable of the weight's shape, the weight at the start.
    a: Param of shape ``(..., rank)``.
    b: Param of shape ``(rank, out)``.

  Args:
    weight: a weight of two or more axes.
    rank: the rank of the update, at least 1.
    alpha: the update is scaled by ``alpha / rank``; by default, not at all.
    rngs: :math:`A` is drawn from ``rngs.params()``. By default from a fixed
      seed, so that weights of one shape get the same.

  Raises:
    ValueError: if the weight has less than two axes, or the rank is less than
      1.
  """

  def __init__(
    self,
    weight: Inexact[jax.Array, '...'],
    *,
    rank: int,
    alpha: float | None = None,
    rngs: nnx.Rngs | None = None,
  ):
    rows, columns = as_matrix('LowRankUpdate', weight).shape
    if rank < 1:
      raise ValueError(f'LowRankUpdate: rank must be at least 1, got {rank}.')
    self.rank = rank
    self.alpha = alpha
    key = (nnx.Rngs(0) if rngs is None else rngs).params()
    a = jax.nn.initializers.he_uniform()(key, (rows, rank), weight.dtype)
    self.base = nnx.Variable(weight)
    self.a = nnx.Param(a.reshape(*weight.shape[:-1], rank))
    self.b = nnx.Param(jnp.zeros((rank, columns), weight.dtype))

  def __call__(self) -> Inexact[jax.Array, '...']:
    base = self.base[...]
    scale = 1 if self.alpha is None else self.alpha / self.rank
    update = scale * _product(self.a[...], self.b[...])
    return (base + update).astype(base.dtype)


def _product(a, b):
  return jnp.tensordot(wide(a), wide(b), axes=1, precision='highest')
