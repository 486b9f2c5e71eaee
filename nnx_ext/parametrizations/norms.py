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
"""Weights of a set norm: weight norm, spectral norm, unit norm."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from nnx_ext import _words
from nnx_ext.parametrizations._arrays import as_matrix, wide
from nnx_ext.parametrizations._base import Parametrization

Axes = int | tp.Sequence[int]


class WeightNorm(Parametrization):
  r"""Weight norm: the direction and the length of each output apart.

  .. math::
    W_{\cdot j} = g_j \, \frac{v_{\cdot j}}{\lVert v_{\cdot j} \rVert}

  `Salimans & Kingma 2016 <https://arxiv.org/abs/1602.07868>`__, equation 2.
  It starts with :math:`v = W` and :math:`g_j = \lVert W_{\cdot j} \rVert`, so
  as the same function. The gradient by ``v`` is orthogonal to ``v``
  (equation 3): its length only grows under SGD, which lowers the effective
  learning rate by itself.

  An output of zeros starts with ``g`` 0 and ``v`` of ones: still zeros, but
  with a gradient.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import WeightNorm
    ...
    >>> weight = jnp.array([[3.0, 1.0], [4.0, 0.0]])
    >>> normed = WeightNorm(weight)
    >>> normed.g[...]
    Array([5., 1.], dtype=float32)
    >>> normed.g[...] = jnp.array([10.0, 1.0])
    >>> normed()
    Array([[6., 1.],
           [8., 0.]], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    v: Param of the weight's shape, the directions.
    g: Param of the feature axes' shape, the lengths.

  Args:
    weight: a real weight of one or more axes.
    feature_axes: the axes of outputs, each with a length of its own, as in
      ``nnx.WeightNorm``; the norm is taken over all others. The query, key and
      value kernels of attention have two, ``(-2, -1)``.

  Raises:
    ValueError: if the weight has no such axes.
  """

  def __init__(
    self, weight: Float[jax.Array, '...'], *, feature_axes: Axes = -1
  ):
    self.feature_axes = _static(feature_axes)
    axes = _other_axes('WeightNorm', weight, feature_axes)
    norm = _norm(weight, axes)
    self.v = nnx.Param(jnp.where(norm > 0, weight, jnp.ones_like(weight)))
    self.g = nnx.Param(jnp.squeeze(norm, axes).astype(weight.dtype))

  def __call__(self) -> Float[jax.Array, '...']:
    v = self.v[...]
    axes = _other_axes('WeightNorm', v, self.feature_axes)
    g = jnp.expand_dims(self.g[...], axes)
    return (wide(v) * _scale(wide(v), g, axes)).astype(v.dtype)


class UnitNorm(Parametrization):
  r"""Each output a vector of length one.

  .. math::
    W_{\cdot j} = \frac{v_{\cdot j}}{\lVert v_{\cdot j} \rVert}

  The sphere as a quotient, as in `Lezcano-Casado 2019
  <https://arxiv.org/abs/1909.09501>`__ and its library geotorch. It starts
  with :math:`v = W`: a weight with outputs of length one is kept, any other is
  projected, that is, its outputs keep their directions only. An output of
  zeros has none and becomes a constant one.

  Example::

    >>> import jax.numpy as jnp
    >>> from nnx_ext.parametrizations import UnitNorm
    ...
    >>> UnitNorm(jnp.array([[3.0, 1.0], [4.0, 0.0]]))()
    Array([[0.6, 1. ],
           [0.8, 0. ]], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    v: Param of the weight's shape, the directions.

  Args:
    weight: a real weight of one or more axes.
    feature_axes: the axes of outputs, as in :class:`WeightNorm`.

  Raises:
    ValueError: if the weight has no such axes.
  """

  def __init__(
    self, weight: Float[jax.Array, '...'], *, feature_axes: Axes = -1
  ):
    self.feature_axes = _static(feature_axes)
    norm = _norm(weight, _other_axes('UnitNorm', weight, feature_axes))
    self.v = nnx.Param(jnp.where(norm > 0, weight, jnp.ones_like(weight)))

  def __call__(self) -> Float[jax.Array, '...']:
    v = self.v[...]
    axes = _other_axes('UnitNorm', v, self.feature_axes)
    return _unit(v, axes).astype(v.dtype)


class SpectralNorm(Parametrization):
  r"""Spectral norm: a weight divided by its largest singular value.

  .. math::
    W = \frac{\bar W}{\sigma}, \qquad \sigma = u^\top \bar W v

  `Miyato et al. 2018 <https://arxiv.org/abs/1802.05957>`__, section 2 and
  algorithm 1: :math:`u` and :math:`v` approximate the top singular vectors by
  power iteration, and no gradient flows through them. They are exact at the
  start. In train mode each call moves them by ``num_iters`` steps; in eval
  mode a call writes nothing.

  The norm of the weight is 1, so that the layer is no longer the same function
  unless :math:`\sigma` was 1. With ``preserve_scale=True`` the weight is
  :math:`s \, \bar W / \sigma` with a trainable :math:`s` that starts at
  :math:`\sigma`, so that it is.

  Weights of more axes are taken as matrices ``(..., out)``: of a convolution,
  this is not the norm of the linear map, but within a factor of it.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import SpectralNorm
    ...
    >>> critic = nnx_ext.parametrize(
    ...   nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
    ...   {nnx.PathContains('kernel'): SpectralNorm},
    ... )
    >>> print(f'{jnp.linalg.norm(critic.kernel[...], 2):.4f}')
    1.0000
    >>> critic.eval()  # the vectors rest

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    w: Param of the weight's shape.
    scale: scalar Param, with ``preserve_scale=True`` only.
    u: BatchStat of shape ``(prod(...),)``, the left singular vector.
    v: BatchStat of shape ``(out,)``, the right singular vector.
    use_running_average: whether in eval mode; ``Module.eval()`` and
      ``Module.train()`` set it.

  Args:
    weight: a real weight of two or more axes.
    preserve_scale: whether to start as the same function.
    num_iters: steps of power iteration at a call in train mode.
    use_running_average: whether to start in eval mode.

  Raises:
    ValueError: if the weight has less than two axes, or ``num_iters`` is less
      than 1.
  """

  def __init__(
    self,
    weight: Float[jax.Array, '...'],
    *,
    preserve_scale: bool = False,
    num_iters: int = 1,
    use_running_average: bool = False,
  ):
    if num_iters < 1:
      raise ValueError(
        f'SpectralNorm: num_iters must be at least 1, got {num_iters}.'
      )
    self.preserve_scale = preserve_scale
    self.num_iters = num_iters
    self.use_running_average = use_running_average
    matrix = as_matrix('SpectralNorm', weight)
    u, v = _top_singular_vectors(matrix)
    self.w = nnx.Param(weight)
    self.u, self.v = nnx.BatchStat(u), nnx.BatchStat(v)
    if preserve_scale:
      self.scale = nnx.Param(_sigma(u, matrix, v).astype(weight.dtype))

  def __call__(self) -> Float[jax.Array, '...']:
    w = self.w[...]
    matrix = as_matrix('SpectralNorm', w)
    u, v = self.u[...], self.v[...]
    if not self.use_running_average:
      fixed = jax.lax.stop_gradient(matrix)
      for _ in range(self.num_iters):
        u, v = _power_step(fixed, u, v)
      self.u[...], self.v[...] = u, v
    matrix = matrix / _magnitude(matrix)
    sigma = _sigma(u, matrix, v)
    normed = matrix / jnp.where(sigma == 0, 1, sigma)
    if self.preserve_scale:
      normed *= self.scale[...]
    return normed.reshape(w.shape).astype(w.dtype)


def _static(axes: Axes) -> Axes:
  return axes if isinstance(axes, int) else tuple(axes)


def _other_axes(name: str, weight, feature_axes: Axes) -> tuple[int, ...]:
  """The axes that a norm is taken over."""
  axes = (feature_axes,) if isinstance(feature_axes, int) else feature_axes
  if not all(-weight.ndim <= axis < weight.ndim for axis in axes):
    raise ValueError(
      f'{name}: feature_axes={feature_axes} must be axes of the weight, got '
      f'{_words.value(weight)}.'
    )
  features = {axis % weight.ndim for axis in axes}
  return tuple(i for i in range(weight.ndim) if i not in features)


def _magnitude(x, axes=None):
  """The largest entry, to divide by: nothing over- or underflows after."""
  largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
  largest = jax.lax.stop_gradient(largest)
  # One divided by less than this would be infinite.
  return jnp.where(largest > jnp.finfo(x.dtype).tiny, largest, 1)


def _root(x, axes):
  """The norm over axes, which stay; its gradient is 0 at 0, not NaN."""
  squares = jnp.sum(x**2, axes, keepdims=True)
  positive = squares > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _norm(x, axes):
  x = wide(x)
  magnitude = _magnitude(x, axes)
  return magnitude * _root(x / magnitude, axes)


def _scale(x, length, axes):
  """What to multiply vectors by, so that they have a length; 0 of zeros.

  One number a vector: to multiply by it keeps nothing of the vectors' size
  for the gradient but the vectors.
  """
  magnitude = _magnitude(x, axes)
  norm = _root(x / magnitude, axes)
  inverse = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
  return length / magnitude * inverse  # in this order nothing overflows


def _unit(x, axes, otherwise=0):
  """Vectors of length one; those of zeros become ``otherwise``."""
  x = wide(x)
  scale = _scale(x, 1, axes)
  return jnp.where(scale > 0, x * scale, otherwise)


def _sigma(u, matrix, v):
  u, v = jax.lax.stop_gradient((u, v))
  return jnp.sum(matrix * (u[:, None] * v[None]))


def _power_step(matrix, u, v):
  v = _unit(jnp.matmul(u, matrix, precision='highest'), 0, v)
  u = _unit(jnp.matmul(matrix, v, precision='highest'), 0, u)
  return u, v


def _top_singular_vectors(matrix):
  """The exact ones, by the smaller Gram matrix."""
  rows, columns = matrix.shape
  if rows < columns:
    return _top_singular_vectors(matrix.T)[::-1]
  matrix = matrix / _magnitude(matrix)
  gram = jnp.matmul(matrix.T, matrix, precision='highest')
  v = jnp.linalg.eigh(gram)[1][:, -1]
  u = jnp.full(rows, rows**-0.5, matrix.dtype)
  return _power_step(matrix, _unit(matrix @ v, 0, u), v)
