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
"""Steps that train what weights are made of, each beside one by hand.

Each case gives value and gradient by theta of a loss. ``parametrize`` puts
Modules in the place of weights, ``reparam_grad`` is given theta and a function
of it, and ``by hand`` merges weights into the model inside of the function
that ``jax.value_and_grad`` differentiates. All start at the same theta, which
is laid out in the same way, and return ``((value, gradient), moved)``, where
``moved`` is what else the step changes.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_ext
from benchmarks import reparam_models as models
from benchmarks import steps
from benchmarks.models import normal, squares
from nnx_ext.parametrizations import GaussianMeanField, Orthogonal, WeightNorm

IS_KERNEL = nnx.PathContains('kernel')


def _mlp_products(depth: int, width: int, size: int) -> float:
  """The flops of forward and backward; the input needs no gradient."""
  return 2 * size * width**2 * (3 * depth - 1)


def weight_norm(
  depth: int,
  width: int,
  size: int,
  *,
  peers: bool = True,
  dtype=jnp.float32,
) -> steps.Case:
  """An MLP with weight norm: direction and length of each output.

  With ``peers`` there are two more steps. ``nnx.WeightNorm`` is another
  training: it starts at lengths of one, writes the weight over the direction,
  and trains the lengths in newer versions only. ``paramax`` is given the
  formula, as ``paramax.WeightNormalization`` takes the norm over the last
  axis and trains the length by a softplus.
  """
  model = models.MLP(depth, width, dtype=dtype, rngs=nnx.Rngs(0))
  x = normal(size, width, dtype=dtype)
  parametrized = nnx_ext.parametrize(model, {IS_KERNEL: WeightNorm})
  made = _norm_steps(model, parametrized, x)

  def upstream():
    wrapped = nnx.clone(model)
    options = dict(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    for i, layer in enumerate(wrapped.layers):
      wrapped.layers[i] = nnx.WeightNorm(layer, **options)
    return steps.jitted(nnx.value_and_grad(squares), (wrapped, x))

  if peers:
    made['nnx.WeightNorm'] = upstream
    made['paramax'] = lambda: _paramax_norm(parametrized, model, x)
  return steps.Case(
    made, baseline='by hand', limit=_mlp_products(depth, width, size)
  )


def weight_norm_scanned(
  depth: int, width: int, size: int, *, dtype=jnp.float32
) -> steps.Case:
  """The same with stacked layers, each normed inside of the scan or before."""

  def make(of_layer):
    return models.Scanned(
      depth, width, of_layer=of_layer, dtype=dtype, rngs=nnx.Rngs(0)
    )

  def parametrize(layer):
    return nnx_ext.parametrize(layer, {IS_KERNEL: WeightNorm})

  model, parametrized = make(lambda layer: layer), make(parametrize)
  x = normal(size, width, dtype=dtype)
  return steps.Case(
    _norm_steps(model, parametrized, x),
    baseline='by hand',
    limit=6 * size * width**2,
    whole_limit=_mlp_products(depth, width, size),
  )


def _norm_steps(model, parametrized, x) -> dict[str, tp.Any]:
  theta, weights = models.theta_of(parametrized), models.NORMED
  step = nnx.value_and_grad(squares)
  return {
    'parametrize': lambda: models.on_model(step, parametrized, x),
    'reparam_grad': lambda: models.reparam_step(weights, theta, model, x),
    'by hand': lambda: models.hand_step(weights, theta, model, x),
  }


def _paramax_norm(parametrized, model, x) -> steps.Jitted:
  paramax = pytest.importorskip('paramax')
  equinox = pytest.importorskip('equinox')  # which paramax brings along
  wrap = models.made_of(
    functools.partial(paramax.Parameterize, models.normed), 'v', 'g'
  )
  tree = wrap(models.theta_of(parametrized))
  trained, fixed = equinox.partition(tree, equinox.is_inexact_array)

  def weights(trained):
    return paramax.unwrap(equinox.combine(trained, fixed))

  return models.hand_step(weights, trained, model, x)


def weight_norm_eager(depth: int, width: int, size: int) -> steps.Case:
  """Weight norm with every operation run from Python."""
  model = models.MLP(depth, width, rngs=nnx.Rngs(0))
  x = normal(size, width)
  parametrized = nnx_ext.parametrize(model, {IS_KERNEL: WeightNorm})
  theta, weights = models.theta_of(parametrized), models.NORMED
  graphdef = nnx.graphdef(model)

  def by_hand(theta):
    return squares(nnx.merge(graphdef, weights(theta)), x)

  step = nnx_ext.reparam_value_and_grad(
    squares, lambda theta, params: weights(theta)
  )
  return steps.Case(
    {
      'parametrize': lambda: steps.Eager(
        nnx.value_and_grad(squares), (parametrized, x)
      ),
      'reparam_grad': lambda: steps.Eager(step, (theta, model, x)),
      'by hand': lambda: steps.Eager(jax.value_and_grad(by_hand), (theta,)),
    },
    baseline='by hand',
  )


def mean_field(
  samples: int, depth: int, width: int, size: int, *, dtype=jnp.float32
) -> steps.Case:
  """A Bayesian MLP: the loss is the mean of those at samples of the weights.

  All draw the same noise: ``by hand`` uses keys as ``nnx.RngStream`` does.
  """
  rngs = nnx.Rngs(params=0, noise=1)
  model = models.MLP(depth, width, dtype=dtype, rngs=rngs)
  x = normal(size, width, dtype=dtype)
  parametrized = nnx_ext.parametrize(
    model, {nnx.Param: lambda w: GaussianMeanField(w, stddev=0.05, rngs=rngs)}
  )
  theta, weights = models.theta_of(parametrized), models.DRAWN
  streams = nnx.to_pure_dict(nnx.state(parametrized, nnx.RngKey))
  keys = jax.tree.map(
    lambda stream: stream['rngs']['key'], streams, is_leaf=lambda x: 'rngs' in x
  )
  graphdef = nnx.graphdef(model)

  def all_losses(model, x):
    @nnx.split_rngs(splits=samples)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None))
    def each(model, x):
      return models.materialized_loss(model, x)

    return jnp.mean(each(model, x))

  def by_reparam(model, theta, keys, count, x):
    def of_keys(model, keys):
      return nnx_ext.reparam_value_and_grad(
        squares, lambda theta, params: weights(theta, keys)
      )(theta, model, x)

    keys = models.drawn_keys(keys, count, samples)
    if samples == 1:
      return of_keys(model, keys)
    out = nnx.vmap(of_keys, in_axes=(None, 0))(model, keys)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), out)

  def by_hand(theta, keys, count, x):
    def of_keys(theta, keys):
      return squares(nnx.merge(graphdef, weights(theta, keys)), x)

    def of_theta(theta):
      if samples == 1:
        return of_keys(theta, chosen)
      return jnp.mean(jax.vmap(of_keys, (None, 0))(theta, chosen))

    chosen = models.drawn_keys(keys, count, samples)
    return jax.value_and_grad(of_theta)(theta), count + 1

  count = jnp.zeros((), jnp.uint32)
  return steps.Case(
    {
      'parametrize': lambda: models.on_model(
        nnx.value_and_grad(
          models.materialized_loss if samples == 1 else all_losses
        ),
        parametrized,
        x,
      ),
      'reparam_grad': lambda: models.on_model(
        by_reparam, model, theta, keys, count, x
      ),
      'by hand': lambda: steps.Jitted(by_hand, (theta, keys, count, x)),
    },
    baseline='by hand',
    limit=samples * _mlp_products(depth, width, size),
  )


def orthogonal_recurrent(
  width: int, time: int, size: int, *, dtype=jnp.float32
) -> steps.Case:
  """A recurrent layer that is orthogonal, by a matrix exponential.

  ``lazy`` reads the parametrized weight, and so computes it, at each time. The
  products of the exponential are not in the limits: their number depends on
  its argument.
  """
  model = models.Recurrent(width, dtype=dtype, rngs=nnx.Rngs(0))
  x = normal(size, time, width, dtype=dtype)
  is_recurrent = nnx.All(nnx.PathContains('dense_h'), IS_KERNEL)
  parametrized = nnx_ext.parametrize(model, {is_recurrent: Orthogonal})
  kernel = parametrized.rnn.cell.dense_h.kernel
  kernel.x[...] = 0.1 * normal(width, width, dtype=dtype)
  theta = models.theta_of(parametrized)

  def rotated(base, x):
    lower = jnp.tril(x.astype(jnp.float32), -1)
    rotation = jax.scipy.linalg.expm(lower - lower.T)
    return jnp.matmul(base, rotation, precision='highest').astype(x.dtype)

  def weights(theta, base):
    return models.made_of(functools.partial(rotated, base), 'x')(theta)

  body = 10 * size * width**2
  return steps.Case(
    {
      'materialize': lambda: models.on_model(
        nnx.value_and_grad(models.materialized_loss), parametrized, x
      ),
      'lazy': lambda: models.on_model(
        nnx.value_and_grad(squares), parametrized, x
      ),
      'by hand': lambda: models.hand_step(
        weights, theta, model, x, kernel.base[...]
      ),
    },
    baseline='by hand',
    limit=body + 4 * width**3,
    whole_limit=time * body + 4 * width**3,
  )


def hypernetwork(
  depth: int,
  width: int,
  size: int,
  *,
  embedding: int,
  hidden: int,
  dtype=jnp.float32,
) -> steps.Case:
  """An MLP whose weights another network makes, and that alone is trained."""
  model = models.MLP(depth, width, dtype=dtype, rngs=nnx.Rngs(0))
  hyper = models.Hyper(
    depth, width, embedding, hidden, dtype=dtype, rngs=nnx.Rngs(1)
  )
  x = normal(size, width, dtype=dtype)
  graphdef, theta = nnx.split(hyper)
  step = nnx_ext.reparam_value_and_grad(squares)

  weights = lambda theta: nnx.merge(graphdef, theta)()
  made = embedding * hidden + hidden * (width + 1) * width
  return steps.Case(
    {
      'reparam_grad': lambda: models.on_model(
        lambda both, x: step(*both, x), (hyper, model), x
      ),
      'by hand': lambda: models.hand_step(weights, theta, model, x),
    },
    baseline='by hand',
    limit=6 * depth * made + _mlp_products(depth, width, size),
  )
