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
"""Weights on a domain: positive, in an interval, on the simplex."""

import math
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float

from nnx_ext.parametrizations._arrays import wide
from nnx_ext.parametrizations._base import Parametrization

Weight = Float[jax.Array, '...']


class Positive(Parametrization):
  r"""Positive weights, such as scales, variances and temperatures.

  Elementwise, with ``map='softplus'`` or ``map='exp'``,

  .. math::

    w = \log(1 + e^x)
    \quad\text{from}\quad x = w + \log(1 - e^{-w}),
    \qquad\text{or}\qquad
    w = e^x \quad\text{from}\quad x = \log w.

  Softplus is nearly the identity for large weights; under the exponential an
  additive step is a relative one. Both are bijections, with :meth:`log_det`.

  Sources: the Stan Reference Manual, "Lower bounded scalar", for the
  exponential; Dugas et al., 2000, "Incorporating second-order functional
  knowledge for better option pricing", for softplus.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import Positive
    ...
    >>> norm = nnx_ext.parametrize(
    ...   nnx.LayerNorm(3, rngs=nnx.Rngs(0)),
    ...   {nnx.PathContains('scale'): lambda w: Positive(w, map='exp')},
    ... )
    >>> norm.scale[...]
    Array([1., 1., 1.], dtype=float32)
    >>> norm.scale.x[...]
    Array([0., 0., 0.], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: the Param, of the weight's shape and dtype.
    map: which map it is.

  Args:
    weight: the current weight, positive and finite.
    map: ``'softplus'`` or ``'exp'``.

  Raises:
    ValueError: if a weight is not positive and finite. Under a transformation
      such as jit or vmap this cannot be checked: negative weights become NaN,
      and zeros stay zero for ever.
  """

  def __init__(
    self, weight: Weight, *, map: tp.Literal['softplus', 'exp'] = 'softplus'
  ):
    if map not in ('softplus', 'exp'):
      raise ValueError(
        f"Positive: `map` must be 'softplus' or 'exp', got {map!r}."
      )
    _check_domain(
      'Positive',
      weight,
      lambda w: (w > 0) & (w < jnp.inf),
      'positive and finite',
      'jnp.abs(weight) + 1e-3',
    )
    w = wide(weight)
    x = w + jnp.log(-jnp.expm1(-w)) if map == 'softplus' else jnp.log(w)
    self.x = nnx.Param(x.astype(weight.dtype))
    self.map = map

  def __call__(self) -> Weight:
    x = self.x[...]
    f = jax.nn.softplus if self.map == 'softplus' else jnp.exp
    return f(wide(x)).astype(x.dtype)

  def log_det(self) -> Float[jax.Array, '']:
    x = wide(self.x[...])
    return jnp.sum(jax.nn.log_sigmoid(x) if self.map == 'softplus' else x)


class Interval(Parametrization):
  r"""Weights between two bounds.

  Elementwise, with :math:`\sigma(x) = 1 / (1 + e^{-x})`,

  .. math::

    w = a + (b - a)\, \sigma(x)
    \quad\text{from}\quad x = \log \frac{w - a}{b - w}.

  Weights that lie on a bound start a rounding error inside of it, where
  gradients are small but not zero. A bijection, with :meth:`log_det`.

  Source: the Stan Reference Manual, "Lower and upper bounded scalar".

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import Interval
    ...
    >>> slope = Interval(jnp.array([0.0, 0.25, 0.5]), low=0.0, high=0.5)
    >>> slope[...].round(4)
    Array([0.  , 0.25, 0.5 ], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: the Param, of the weight's shape and dtype.
    low: the lower bound :math:`a`.
    high: the upper bound :math:`b`.

  Args:
    weight: the current weight, between the bounds.
    low: the lower bound.
    high: the upper bound.

  Raises:
    ValueError: if the bounds are not finite and in order, or a weight lies
      outside of them by more than rounding. Under a transformation such as
      jit or vmap the weights cannot be checked; they are clipped.
  """

  def __init__(self, weight: Weight, *, low: float, high: float):
    if not -math.inf < low < high < math.inf:
      raise ValueError(
        'Interval: `low` must be less than `high` and both finite, got '
        f'low={low} and high={high}.'
      )
    slack = jnp.finfo(weight.dtype).eps * max(abs(low), abs(high))
    _check_domain(
      'Interval',
      weight,
      lambda w: (w >= low - slack) & (w <= high + slack),
      f'between low={low} and high={high}',
      'jnp.clip(weight, low, high)',
    )
    w = wide(weight)
    eps = float(jnp.finfo(w.dtype).eps)
    unit = jnp.clip((w - low) / (high - low), eps, 1 - eps)
    self.x = nnx.Param(jax.scipy.special.logit(unit).astype(weight.dtype))
    self.low = low
    self.high = high

  def __call__(self) -> Weight:
    x = self.x[...]
    unit = jax.nn.sigmoid(wide(x))
    return (self.low + (self.high - self.low) * unit).astype(x.dtype)

  def log_det(self) -> Float[jax.Array, '']:
    x = wide(self.x[...])
    log_slope = jax.nn.log_sigmoid(x) + jax.nn.log_sigmoid(-x)
    return jnp.sum(math.log(self.high - self.low) + log_slope)


class Simplex(Parametrization):
  r"""Weights that are probabilities along the last axis.

  Mixture weights, attention over a fixed set, transition matrices: each row
  is not negative and sums to one.

  .. math::

    w_i = \frac{e^{x_i}}{\sum_j e^{x_j}} \quad\text{from}\quad x_i = \log w_i

  A constant added to a row of :math:`x` changes nothing, so this is no
  bijection. A weight of zero starts at the smallest normal number.

  Source: the Stan Reference Manual, "Unit simplex", which has bijections, too.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import Simplex
    ...
    >>> mixture = Simplex(jnp.array([0.5, 0.25, 0.25]))
    >>> mixture[...]
    Array([0.5 , 0.25, 0.25], dtype=float32)
    >>> mixture.x[...] += 10.0
    >>> mixture[...].round(4)
    Array([0.5 , 0.25, 0.25], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    x: the Param, of the weight's shape and dtype.

  Args:
    weight: the current weight, whose rows are not negative and sum to one.

  Raises:
    ValueError: if the weight has no axis, or a row is not on the simplex to
      within rounding. Under a transformation such as jit or vmap the values
      cannot be checked; what sums to another number is normalized.
  """

  def __init__(self, weight: Weight):
    if weight.ndim == 0:
      raise ValueError(
        'Simplex: the weight must have an axis to sum to one over, got shape '
        '().'
      )
    _check_domain(
      'Simplex',
      weight,
      lambda w: (w >= 0) & _sums_to_one(w),
      'not negative and sum to one over the last axis',
      'jax.nn.softmax(weight)',
    )
    w = wide(weight)
    x = jnp.log(jnp.maximum(w, jnp.finfo(w.dtype).tiny))
    self.x = nnx.Param(x.astype(weight.dtype))

  def __call__(self) -> Weight:
    x = self.x[...]
    return jax.nn.softmax(wide(x)).astype(x.dtype)


def _sums_to_one(w: Weight) -> Bool[jax.Array, '...']:
  slack = max(1e-5, 2 * float(jnp.finfo(w.dtype).eps))
  total = jnp.sum(wide(w), axis=-1, keepdims=True)
  return jnp.abs(total - 1) <= slack


def _check_domain(
  name: str,
  weight: Weight,
  contains: tp.Callable[[Weight], Bool[jax.Array, '...']],
  domain: str,
  cure: str,
) -> None:
  """Raises for weights off the domain, where their values are known."""
  if isinstance(weight, jax.core.Tracer):
    return
  with jax.ensure_compile_time_eval():  # A known weight may be seen in a jit.
    if not jnp.all(contains(weight)):
      raise ValueError(
        f'{name}: the weight must be {domain}, got values from '
        f'{jnp.min(weight)} to {jnp.max(weight)}. To start from the nearest '
        f'that will do, write `lambda weight: {name}({cure}, ...)`.'
      )
