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
"""Gaussian weights, and layers that draw their noise more cleverly."""

import math
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Shaped

from nnx_ext.parametrizations._arrays import wide
from nnx_ext.parametrizations._base import Parametrization

Weight = Float[jax.Array, '...']
Input = Shaped[jax.Array, '...']
Layer = nnx.Linear | nnx.Conv
Rngs = nnx.Rngs | nnx.RngStream


class GaussianMeanField(Parametrization):
  r"""Independent Gaussian weights: Bayes by backprop.

  .. math::

    w = \mu + \sigma \circ \epsilon, \qquad
    \sigma = \log(1 + e^\rho), \qquad \epsilon \sim \mathcal N(0, 1)

  Each read draws new noise; in eval mode, and in what :func:`nnx_ext.bake`
  returns, the weight is :math:`\mu`. To draw once for all reads of a forward,
  as for tied weights and recurrent cells, call :func:`nnx_ext.materialize`
  inside the loss. Add :func:`nnx_ext.kl` of the model, over the size of the
  data set, to the mean loss: with the prior :math:`\mathcal N(0, s_0^2)`,

  .. math::

    \mathrm{KL} = \sum_i \log \frac{s_0}{\sigma_i}
    + \frac{\sigma_i^2 + \mu_i^2}{2 s_0^2} - \frac 1 2 .

  The noise moves an rng count, so the model must be an argument of an
  ``nnx.jit`` or ``nnx.vmap``, as with ``nnx.Dropout``. :func:`flipout` and
  :func:`local_reparametrization` give the examples of a batch noise of their
  own.

  Source: Blundell et al., 2015, "Weight uncertainty in neural networks",
  `arXiv:1505.05424 <https://arxiv.org/abs/1505.05424>`__, section 3.2; here
  the prior is one Gaussian, for which the KL divergence is in closed form.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import GaussianMeanField
    ...
    >>> rngs, x = nnx.Rngs(params=0, noise=1), jnp.ones((1, 2))
    >>> plain = nnx.Linear(2, 3, rngs=rngs)
    >>> model = nnx_ext.parametrize(plain, {
    ...   nnx.Param: lambda w: GaussianMeanField(w, stddev=0.1, rngs=rngs)
    ... })
    >>> bool(jnp.any(model(x) == model(x)))
    False
    >>> nnx_ext.kl(model).shape
    ()

  Many samples, each with noise of its own. Dropout then draws a mask for each
  sample as well; BatchNorm must be in eval mode, since its statistics are
  shared by all samples, and in train mode flax refuses them::

    >>> @nnx.split_rngs(splits=8)
    ... @nnx.vmap(
    ...   in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None)
    ... )
    ... def sample(model, x):
    ...   return model(x)
    ...
    >>> sample(model, x).shape
    (8, 1, 3)
    >>> model.eval()
    >>> bool(jnp.all(model(x) == plain(x)))
    True

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    mean: the Param :math:`\mu`, of the weight's shape and dtype.
    rho: the Param :math:`\rho`, likewise.
    rngs: the stream that the noise is drawn from, forked off the given one.
    stddev: the standard deviation at the start, to which
      :func:`nnx_ext.assign` returns; :attr:`sigma` is the current one.
    prior_stddev: that of the prior.
    deterministic: whether the weight is the mean; set by ``Module.eval()``
      and ``Module.train()``.

  Args:
    weight: the current weight, which becomes the mean.
    stddev: the standard deviation of all weights at the start.
    prior_stddev: the standard deviation of the prior.
    rngs: an ``nnx.Rngs``, of which the stream ``noise`` is taken (or the
      default stream if there is no such), or a stream.
    deterministic: whether to start in eval mode.

  Raises:
    ValueError: if a standard deviation is not positive and finite.
  """

  def __init__(
    self,
    weight: Weight,
    *,
    stddev: float = 0.01,
    prior_stddev: float = 1.0,
    rngs: Rngs,
    deterministic: bool = False,
  ):
    for name, value in (('stddev', stddev), ('prior_stddev', prior_stddev)):
      if not 0 < value < math.inf:
        raise ValueError(
          f'GaussianMeanField: `{name}` must be positive and finite, got '
          f'{value}.'
        )
    rho = stddev + math.log(-math.expm1(-stddev))
    self.mean = nnx.Param(weight)
    self.rho = nnx.Param(jnp.full_like(weight, rho))
    self.rngs = _noise(rngs).fork()
    self.stddev = stddev
    self.prior_stddev = prior_stddev
    self.deterministic = deterministic

  def __call__(self) -> Weight:
    mean = jnp.asarray(self.mean[...])
    if self.deterministic:
      return mean
    return (mean + self._deviation(self.rngs)).astype(mean.dtype)

  @property
  def sigma(self) -> Weight:
    """The current standard deviation, in float32 at least."""
    return jax.nn.softplus(self._wide_rho)

  def kl(self) -> Float[jax.Array, '']:
    """The KL divergence from the prior, summed over the weights."""
    rho, prior = self._wide_rho, self.prior_stddev
    mean = self.mean[...].astype(rho.dtype)
    # Of a tiny softplus, the log is its argument; and no log is of zero.
    log_sigma = jnp.where(
      rho < -20, rho, jnp.log(jax.nn.softplus(jnp.maximum(rho, -20)))
    )
    square = ((self.sigma / prior) ** 2 + (mean / prior) ** 2) / 2
    return jnp.sum(math.log(prior) - log_sigma + square - 0.5)

  @property
  def _wide_rho(self) -> Weight:
    return wide(self.rho[...])

  def _deviation(self, stream: nnx.RngStream) -> Weight:
    """A draw of what is added to the mean."""
    sigma = self.sigma
    return sigma * jax.random.normal(stream(), sigma.shape, sigma.dtype)


def local_reparametrization(layer: Layer, x: Input, rngs: Rngs) -> Weight:
  r"""The output of a layer with Gaussian weights, drawn as such.

  Instead of the weights, the outputs are drawn, which are Gaussian, too. Each
  has noise of its own, so gradients have less variance than with one draw of
  the weights for the batch, at the price of a second pass of the layer:

  .. math::

    y \sim \mathcal N\left(x \mu_w + \mu_b,\;
    x^2 \sigma_w^2 + \sigma_b^2\right)

  Each output is distributed as under one draw of the weights. That outputs
  of different examples, or at different places of a convolution, would vary
  together under one draw is left out.

  Source: Kingma et al., 2015, "Variational dropout and the local
  reparameterization trick",
  `arXiv:1506.02557 <https://arxiv.org/abs/1506.02557>`__, section 2.3.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import (
    ...   GaussianMeanField, local_reparametrization
    ... )
    ...
    >>> rngs = nnx.Rngs(params=0, noise=1)
    >>> layer = nnx_ext.parametrize(nnx.Linear(2, 3, rngs=rngs), {
    ...   nnx.PathContains('kernel'): lambda w: GaussianMeanField(w, rngs=rngs)
    ... })
    >>> local_reparametrization(layer, jnp.ones((4, 2)), rngs).shape
    (4, 3)

  In a Module it stands in the place of the layer's call. A bias may be
  Gaussian, too, and after ``eval()`` the weights are at their mean::

    >>> class Model(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.rngs = rngs.fork()
    ...     self.layer = nnx.Linear(2, 3, rngs=rngs)
    ...   def __call__(self, x):
    ...     return local_reparametrization(self.layer, x, self.rngs)
    ...
    >>> model = nnx_ext.parametrize(
    ...   Model(rngs), {nnx.Param: lambda w: GaussianMeanField(w, rngs=rngs)}
    ... )
    >>> x = jnp.ones((4, 2))
    >>> bool(jnp.any(model(x) == model(x)))
    False
    >>> model.eval()
    >>> bool(jnp.all(model(x) == model(x)))
    True

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    layer: an ``nnx.Linear`` or ``nnx.Conv`` whose kernel is a
      :class:`GaussianMeanField`; its bias may be one, an ``nnx.Param`` or None.
    x: the input of the layer.
    rngs: whose stream ``noise`` is drawn from; or a stream.

  Returns:
    The output of the layer; in eval mode, at the mean weights.

  Raises:
    TypeError: if the layer is another, or its weights are.
  """
  weights = _weights('local_reparametrization', layer)
  mean = _apply(layer, x, {name: _mean(w) for name, w in weights.items()})
  if not _any_random(weights):
    return mean
  variances = {
    name: jnp.square(w.sigma) if _is_random(w) else jnp.zeros(w.shape)
    for name, w in weights.items()
  }
  mask = getattr(layer, 'mask', None)
  if mask is not None:  # The layer multiplies once more.
    variances['kernel'] = variances['kernel'] * mask
  variance = _apply(layer, jnp.square(wide(x)), variances)
  noise = jax.random.normal(_noise(rngs)(), mean.shape, mean.dtype)
  return mean + _sqrt(variance).astype(mean.dtype) * noise


def flipout(layer: Layer, x: Input, rngs: Rngs) -> Weight:
  r"""The output of a layer with Gaussian weights, decorrelated by signs.

  One deviation :math:`\Delta W = \sigma \circ \epsilon` is drawn for the
  batch, and for each example :math:`n` random signs :math:`r_n` of the inputs
  and :math:`s_n` of the outputs:

  .. math::

    y_n = x_n \mu + \left((x_n \circ r_n)\, \Delta W\right) \circ s_n
    = x_n \left(\mu + \Delta W \circ r_n s_n^\top\right)

  So each example has weights of its own, distributed as they should be, and
  gradients have less variance than with one draw for the batch, at the price
  of a second pass of the layer. The deviation of a Gaussian bias gets the
  signs :math:`s_n`; in a convolution all places of an example share signs.

  Source: Wen et al., 2018, "Flipout: efficient pseudo-independent weight
  perturbations on mini-batches",
  `arXiv:1803.04386 <https://arxiv.org/abs/1803.04386>`__, section 3.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import GaussianMeanField, flipout
    ...
    >>> rngs = nnx.Rngs(params=0, noise=1)
    >>> layer = nnx_ext.parametrize(nnx.Linear(2, 3, rngs=rngs), {
    ...   nnx.PathContains('kernel'): lambda w: GaussianMeanField(w, rngs=rngs)
    ... })
    >>> flipout(layer, jnp.ones((4, 2)), rngs).shape
    (4, 3)

  The same for a convolution. Gradients reach the mean and the deviation of
  the weights::

    >>> conv = nnx_ext.parametrize(nnx.Conv(2, 3, (3,), rngs=rngs), {
    ...   nnx.PathContains('kernel'): lambda w: GaussianMeanField(w, rngs=rngs)
    ... })
    >>> def loss(conv, x, rngs):
    ...   return jnp.mean(flipout(conv, x, rngs) ** 2)
    ...
    >>> grads = nnx.grad(loss)(conv, jnp.ones((4, 8, 2)), rngs)
    >>> sorted(grads['kernel'])
    ['mean', 'rho']

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    layer: an ``nnx.Linear`` or ``nnx.Conv`` whose kernel is a
      :class:`GaussianMeanField`; its bias may be one, an ``nnx.Param`` or None.
    x: the input of the layer; its first axis counts the examples.
    rngs: whose stream ``noise`` is drawn from; or a stream.

  Returns:
    The output of the layer; in eval mode, at the mean weights.

  Raises:
    TypeError: if the layer is another, or its weights are.
    ValueError: if the input has no axis of examples.
  """
  weights = _weights('flipout', layer)
  if x.ndim < weights['kernel'].ndim:
    raise ValueError(
      'flipout: the first axis of the input must count the examples, got an '
      f'input of shape {x.shape}; write `x[None]` for one example.'
    )
  mean = _apply(layer, x, {name: _mean(w) for name, w in weights.items()})
  if not _any_random(weights):
    return mean
  stream = _noise(rngs)
  deviations = {
    name: (
      w._deviation(stream) if _is_random(w) else jnp.zeros(w.shape)
    ).astype(w.dtype)
    for name, w in weights.items()
  }

  def signs(like: jax.Array) -> jax.Array:
    shape = (like.shape[0], *(1 for _ in like.shape[1:-1]), like.shape[-1])
    return jax.random.rademacher(stream(), shape, mean.dtype)

  deviation = _apply(layer, x * signs(x), deviations)
  return mean + deviation * signs(mean)


def _noise(rngs: Rngs) -> nnx.RngStream:
  return rngs if isinstance(rngs, nnx.RngStream) else rngs.noise


def _weights(api: str, layer: tp.Any) -> dict[str, tp.Any]:
  """The layer's weights by name, all of which we can draw."""
  # A subclass that has its own call may compute something else.
  if not isinstance(layer, (nnx.Linear, nnx.Conv)) or (
    type(layer).__call__ not in (nnx.Linear.__call__, nnx.Conv.__call__)
  ):
    raise TypeError(
      f'{api}: the layer must be an nnx.Linear or nnx.Conv, got '
      f'{type(layer).__name__}; call other layers as they are.'
    )
  if not isinstance(layer.kernel, GaussianMeanField):
    raise TypeError(
      f'{api}: the kernel must be a GaussianMeanField, got '
      f'{type(layer.kernel).__name__}; write `nnx_ext.parametrize(layer, '
      "{nnx.PathContains('kernel'): lambda weight: GaussianMeanField(weight, "
      'rngs=rngs)})`.'
    )
  if layer.bias is None:
    return {'kernel': layer.kernel}
  if not isinstance(layer.bias, (GaussianMeanField, nnx.Variable)):
    raise TypeError(
      f'{api}: the bias must be a GaussianMeanField, an nnx.Param or None, '
      f'got {type(layer.bias).__name__}.'
    )
  return {'kernel': layer.kernel, 'bias': layer.bias}


def _apply(layer: tp.Any, x: Input, weights: dict[str, jax.Array]) -> Weight:
  """The layer's own output, with other weights."""
  view = nnx.clone(layer, variables=False, graph=True)
  for name, weight in weights.items():
    setattr(view, name, nnx.Param(weight))
  return view(x)


def _is_random(weight: tp.Any) -> bool:
  return isinstance(weight, GaussianMeanField) and not weight.deterministic


def _any_random(weights: dict[str, tp.Any]) -> bool:
  return any(map(_is_random, weights.values()))


def _mean(weight: tp.Any) -> Weight:
  return (weight.mean if isinstance(weight, GaussianMeanField) else weight)[...]


def _sqrt(x: Weight) -> Weight:
  """The square root, with gradient zero at zero."""
  positive = x > 0
  root = jnp.sqrt(jnp.where(positive, x, jnp.ones_like(x)))
  return jnp.where(positive, root, jnp.zeros_like(x))
