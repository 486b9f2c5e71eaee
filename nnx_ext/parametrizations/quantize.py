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
"""Weights on a grid: quantization that can be trained through."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from nnx_ext.parametrizations._arrays import wide
from nnx_ext.parametrizations._base import Parametrization

Weight = Float[jax.Array, '...']


class FakeQuant(Parametrization):
  r"""Weights rounded to the grid of signed integers that will serve them.

  With :math:`b` bits and :math:`q = 2^{b-1} - 1`,

  .. math::

    w = s \cdot \operatorname{round}(\operatorname{clip}(v / s, -q, q)),
    \qquad
    \frac{\partial w}{\partial v} :=
    \begin{cases} 1 & |v| \le q s\\ 0 & \text{otherwise.} \end{cases}

  The gradient goes straight through the rounding, so that :math:`v` trains at
  full precision while the network computes what its integers will. The weight
  equals the formula bit for bit; it is not :math:`v` plus a difference, which
  rounding would spoil. The scale is that of the first weight,
  :math:`s = \max |v| / q`, and stays: the function changes by at most
  :math:`s / 2` a weight. :func:`nnx_ext.assign` sets a scale anew.

  Sources: Bengio et al., 2013, "Estimating or propagating gradients through
  stochastic neurons for conditional computation",
  `arXiv:1308.3432 <https://arxiv.org/abs/1308.3432>`__, for the
  straight-through gradient; Jacob et al., 2018, "Quantization and training of
  neural networks for efficient integer-arithmetic-only inference",
  `arXiv:1712.05877 <https://arxiv.org/abs/1712.05877>`__, section 3, for
  training with simulated quantization.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import FakeQuant
    ...
    >>> w = FakeQuant(jnp.array([0.3, -1.0, 1.5]), bits=3)
    >>> w[...]
    Array([ 0.5, -1. ,  1.5], dtype=float32)
    >>> (w[...] / w.scale[...]).astype(jnp.int8)
    Array([ 1, -2,  3], dtype=int8)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    v: the Param, of the weight's shape and dtype.
    scale: the ``nnx.Variable`` of :math:`s`, in float32 at least; one where
      all weights are zero. Of shape ``()``, or with ``per_output`` of the
      shape of the last axis and ones.
    bits: the number of bits.
    per_output: whether each output has its own scale.

  Args:
    weight: the current weight.
    bits: from 2 to 16.
    per_output: whether each index of the last axis has a scale of its own.

  Raises:
    ValueError: if ``bits`` is out of range, or there is no last axis.
  """

  def __init__(
    self, weight: Weight, *, bits: int = 8, per_output: bool = False
  ):
    if not 2 <= bits <= 16:
      raise ValueError(f'FakeQuant: `bits` must be from 2 to 16, got {bits}.')
    if per_output and weight.ndim == 0:
      raise ValueError(
        'FakeQuant: `per_output` needs a last axis, got a weight of shape ().'
      )
    self.v = nnx.Param(weight)
    self.bits = bits
    self.per_output = per_output
    self.scale = nnx.Variable(self._fit(weight))

  def __call__(self) -> Weight:
    v, scale, top = self.v[...], self.scale[...], self._top
    exact = v.astype(scale.dtype)
    weight = scale * jnp.round(jnp.clip(exact / scale, -top, top))
    weight = jax.lax.stop_gradient(weight.astype(v.dtype))
    through = jnp.where(jnp.abs(exact) <= top * scale, v, jnp.zeros_like(v))
    # A zero is taken away, not added: -0.0 stays.
    return weight - (jax.lax.stop_gradient(through) - through)

  @property
  def _top(self) -> int:
    """The largest integer."""
    return 2 ** (self.bits - 1) - 1

  def _fit(self, weight: Weight) -> Weight:
    """The smallest scale whose grid reaches the largest weight."""
    axes = tuple(range(weight.ndim - self.per_output))
    largest = jnp.max(
      jnp.abs(wide(weight)), axis=axes, keepdims=self.per_output, initial=0.0
    )
    scale = largest / self._top
    # Where division rounded down, the largest weight would be clipped.
    scale = jnp.where(
      self._top * scale < largest, jnp.nextafter(scale, jnp.inf), scale
    )
    return jnp.where(scale > 0, scale, jnp.ones_like(scale))
