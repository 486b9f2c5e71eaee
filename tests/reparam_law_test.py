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
"""The Reparam law: the gradient is that of theta -> loss(model with f(theta)).

The oracle is ``jax.grad`` of the pure function on split state.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

every_mode = parameterized.product(mode=list(models.MODES))


def _model(**parts):
  rngs = nnx.Rngs(params=0, dropout=1)
  return models.MLP(4, 1, rngs=rngs, **parts)


def _loss(model, x):
  return jnp.mean((model(x) - 1.0) ** 2)


def _pure(transform, theta, model, x):
  """The law, in plain JAX: the loss as a function of theta."""
  graphdef, params, rest = nnx.split(nnx.clone(model), nnx.Param, ...)
  pure = nnx.as_pure(params)
  values = nnx.to_pure_dict(pure)
  for layer, leaves in transform(theta, pure).items():
    values[layer] = {**values[layer], **leaves}
  nnx.replace_by_pure_dict(params, values)
  return _loss(nnx.merge(graphdef, params, rest), x)


def _theta_for(kind: str):
  """A theta of a kind, and a transform of it that is not linear."""
  kernel = jnp.linspace(-0.5, 0.5, 24).reshape(4, 6)
  if kind == 'array':
    return kernel, lambda t, p: {'l1': {'kernel': jnp.sin(t)}}
  if kind == 'tuple':
    return (kernel, jnp.ones((4, 6))), (
      lambda t, p: {'l1': {'kernel': t[0] * t[1] ** 2}}
    )
  if kind == 'dict':
    theta = {'u': jnp.ones((4, 1)), 'v': kernel[:1], 'b': jnp.ones(1)}
    return theta, (
      lambda t, p: {
        'l1': {'kernel': p['l1']['kernel'] + t['u'] @ t['v']},
        'l2': {'bias': t['b'] ** 3},
      }
    )
  if kind == 'float':
    return 0.3, lambda t, p: {'l1': {'kernel': t * p['l1']['kernel']}}
  if kind == 'none_leaf':
    return [kernel, None], lambda t, p: {'l1': {'kernel': jnp.exp(t[0])}}
  raise ValueError(kind)


class Hyper(nnx.Module):
  """A hypernetwork with rngs and statistics of its own."""

  def __init__(self):
    self.net = nnx.Linear(3, 6, rngs=nnx.Rngs(3))
    self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(4))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(5))

  def __call__(self, params):
    z = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    delta = self.dropout(self.norm(self.net(z)))
    return {'l1': {'kernel': params['l1']['kernel'] + delta}}


class ReparamLawTest(parameterized.TestCase):
  @parameterized.parameters(((2.0, 2.0), (4.0, 4.0)), ((4.0, 1.0), (2.0, 8.0)))
  def test_product(self, theta, expected):
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    for mode in models.MODES.values():
      grads = nnx_ext.reparam_grad(
        lambda model, x: model(x)[0, 0],
        lambda theta, _: {'kernel': jnp.reshape(theta[0] * theta[1], (1, 1))},
        **mode,
      )(theta, model, jnp.full((1, 1), 2.0))
      chex.assert_trees_all_close(grads, expected)

  @parameterized.product(
    mode=list(models.MODES),
    kind=['array', 'tuple', 'dict', 'float', 'none_leaf'],
    batch_norm=[False, True],
  )
  def test_equals_the_pure_function(self, mode, kind, batch_norm):
    theta, transform = _theta_for(kind)
    x = models.batch()
    expected = jax.value_and_grad(_pure, argnums=1)(
      transform, theta, _model(batch_norm=batch_norm), x
    )
    model, reference = (
      _model(batch_norm=batch_norm),
      _model(batch_norm=batch_norm),
    )
    options = models.MODES[mode]
    actual = nnx_ext.reparam_value_and_grad(_loss, transform, **options)(
      theta, model, x
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-7)
    self.assertEqual(jax.tree.structure(actual[1]), jax.tree.structure(theta))
    only = nnx_ext.reparam_grad(_loss, transform, **options)(theta, model, x)
    chex.assert_trees_all_close(only, expected[1], rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal(
      nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param)
    )

  @every_mode
  def test_module_theta(self, mode):
    theta, model = Hyper(), _model(batch_norm=True)
    ours, x = nnx.clone(theta), models.batch()

    def loss(theta, model, x):
      values = theta(nnx.as_pure(nnx.state(model, nnx.Param)))
      return _loss(nnx_ext.substitute(model, values), x)

    reference = nnx.clone(model)
    expected = nnx.value_and_grad(loss)(theta, reference, x)
    actual = nnx_ext.reparam_value_and_grad(_loss, **models.MODES[mode])(
      ours, model, x
    )
    self.assertIsInstance(actual[1], nnx.State)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    for kind in (nnx.BatchStat, nnx.RngCount):
      chex.assert_trees_all_close(nnx.state(ours, kind), nnx.state(theta, kind))
    chex.assert_trees_all_close(nnx.state(model), nnx.state(reference))
    self.assertEqual(int(ours.dropout.rngs.count[...]), 1)

  @every_mode
  def test_state_theta(self, mode):
    theta = nnx.clone(nnx.state(_model(), nnx.Param))
    transform = lambda theta, _: jax.tree.map(jnp.sin, theta)
    grads = nnx_ext.reparam_grad(_loss, transform, **models.MODES[mode])(
      theta, _model(), models.batch()
    )
    self.assertIsInstance(grads, nnx.State)
    self.assertEqual(jax.tree.structure(grads), jax.tree.structure(theta))
    graphdef = nnx.graphdef(_model())
    expected = jax.grad(
      lambda t: _loss(nnx.merge(graphdef, transform(t, None)), models.batch())
    )(theta)
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-7)

  @every_mode
  def test_theta_that_is_the_models_own_state(self, mode):
    # It is copied at entry: the gradient is that of an independent theta.
    model = _model()
    transform = lambda theta, _: {'l1': {'kernel': 2.0 * theta['l1']['kernel']}}
    options = models.MODES[mode]
    aliased = nnx_ext.reparam_grad(_loss, transform, **options)(
      nnx.state(model, nnx.Param), model, models.batch()
    )
    independent = nnx_ext.reparam_grad(_loss, transform, **options)(
      nnx.clone(nnx.state(model, nnx.Param)), model, models.batch()
    )
    chex.assert_trees_all_close(aliased, independent)
    chex.assert_trees_all_equal(aliased['l2']['bias'][...], jnp.zeros(1))

  @every_mode
  def test_gradient_by_the_rest_of_the_model(self, mode):
    theta, transform = _theta_for('array')
    model, x = _model(), models.batch()
    step = nnx_ext.reparam_grad(
      _loss, transform, argnums=(0, 1, 2), **models.MODES[mode]
    )
    by_theta, by_model, by_x = step(theta, model, x)
    self.assertEqual(set(by_model), {'l1', 'l2'})
    self.assertEqual(set(by_model['l1']), {'bias'})
    view = nnx_ext.substitute(model, transform(theta, None))
    full = nnx.grad(_loss, argnums=(0, 1))(view, x)
    chex.assert_trees_all_close(by_model['l2'], full[0]['l2'], rtol=1e-5)
    chex.assert_trees_all_close(
      by_model['l1']['bias'], full[0]['l1']['bias'], rtol=1e-5
    )
    chex.assert_trees_all_close(by_x, full[1], rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(
      by_theta,
      full[0]['l1']['kernel'][...] * jnp.cos(theta),
      rtol=1e-5,
      atol=1e-7,
    )

  @every_mode
  def test_no_gradient_through_params(self, mode):
    # The transform reads the weights, but they are constants to it.
    step = nnx_ext.reparam_grad(
      _loss,
      lambda theta, params: {'l1': {'kernel': theta * params['l1']['kernel']}},
      argnums=1,
      **models.MODES[mode],
    )
    self.assertEqual(set(step(2.0, _model(), models.batch())['l1']), {'bias'})

  @every_mode
  def test_state_moves_once(self, mode):
    model = _model(batch_norm=True, dropout=0.4)
    reference = nnx.clone(model)
    theta, transform = _theta_for('array')
    value, _ = nnx_ext.reparam_value_and_grad(
      _loss, transform, **models.MODES[mode]
    )(theta, model, models.batch())
    view = nnx_ext.substitute(reference, transform(theta, None))
    chex.assert_trees_all_close(value, _loss(view, models.batch()), rtol=1e-6)
    for kind in (nnx.BatchStat, nnx.RngCount, nnx.Param):
      chex.assert_trees_all_close(
        nnx.state(model, kind), nnx.state(reference, kind)
      )
    self.assertNotEqual(float(model.norm.mean[0]), 0.0)

  @parameterized.product(mode=list(models.MODES), late=[False, True])
  def test_nothing_moves_when_the_loss_raises(self, mode, late):
    model = _model(batch_norm=True, dropout=0.4)
    before = [(v, v.get_value()) for v in _variables(model)]

    def broken(model, x):
      loss = _loss(model, x)
      if late:
        return loss[None]
      raise RuntimeError('broken')

    theta, transform = _theta_for('array')
    words = 'scalar' if late else 'broken'
    with self.assertRaisesRegex((RuntimeError, ValueError), words):
      nnx_ext.reparam_grad(broken, transform, **models.MODES[mode])(
        theta, model, models.batch()
      )
    for (variable, value), now in zip(before, _variables(model)):
      self.assertIs(variable, now)
      self.assertIs(value, now.get_value())

  @every_mode
  def test_aux_keywords_and_decorator(self, mode):
    theta, transform = _theta_for('array')

    @nnx_ext.reparam_value_and_grad(
      transform=transform, has_aux=True, **models.MODES[mode]
    )
    def step(model, x, *, scale):
      loss = scale * _loss(model, x)
      return loss, {'scale': scale, 'name': 'aux'}

    (value, aux), grads = step(theta, _model(), x=models.batch(), scale=2.0)
    plain, plain_grads = nnx_ext.reparam_value_and_grad(_loss, transform)(
      theta, _model(), models.batch()
    )
    self.assertEqual(aux['name'], 'aux')
    chex.assert_trees_all_close(value, 2.0 * plain, rtol=1e-6)
    chex.assert_trees_all_close(grads, 2.0 * plain_grads, rtol=1e-6)

  @parameterized.product(wrt=[nnx.Param, nnx.PathContains('l1')])
  def test_a_tied_weight_is_one(self, wrt):
    class Tied(nnx.Module):
      def __init__(self):
        self.l1 = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))
        self.l2 = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(1))
        self.l2.kernel = self.l1.kernel

      def __call__(self, x):
        return self.l2(jnp.tanh(self.l1(x)))

    x = models.batch(3)
    theta = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
    for path in ('l1', 'l2'):
      grad = nnx_ext.reparam_grad(
        _loss, lambda t, _, path=path: {path: {'kernel': t}}, wrt=wrt
      )(theta, Tied(), x)
      expected = jax.grad(lambda t: jnp.mean((jnp.tanh(x @ t) @ t - 1.0) ** 2))(
        theta
      )
      chex.assert_trees_all_close(grad, expected, rtol=1e-5)

  @every_mode
  def test_values_take_the_dtype_of_the_slot(self, mode):
    model = nnx.Linear(
      2, 3, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    seen = []

    def loss(model, x):
      seen.append(model.kernel.dtype)
      return jnp.mean(model(x)).astype(jnp.float32)

    grads = nnx_ext.reparam_grad(
      loss, lambda t, _: {'kernel': t}, **models.MODES[mode]
    )(jnp.ones((2, 3)), model, jnp.ones((1, 2)))
    self.assertEqual(seen, [jnp.bfloat16])
    self.assertEqual(grads.dtype, jnp.float32)

  @every_mode
  def test_one_trace_and_learns_under_jit(self, mode):
    options = models.MODES[mode]
    theta, model = Hyper(), _model(batch_norm=True)
    optimizer = nnx.Optimizer(theta, optax.adam(1e-1), wrt=nnx.Param)
    traces = []

    def loss(model, x):
      traces.append(None)
      return _loss(model, x)

    @nnx.jit(**options)
    def step(theta, model, optimizer, x):
      value, grads = nnx_ext.reparam_value_and_grad(loss, **options)(
        theta, model, x
      )
      optimizer.update(theta, grads)
      return value

    values = [
      float(step(theta, model, optimizer, models.batch())) for _ in range(40)
    ]
    self.assertLen(traces, 1)
    self.assertLess(np.mean(values[-5:]), 0.9 * np.mean(values[:5]))

  @every_mode
  def test_second_derivatives_and_vmap(self, mode):
    theta, transform = _theta_for('array')
    grad = nnx_ext.reparam_grad(_loss, transform, **models.MODES[mode])
    model, x = _model(), models.batch()
    sharpness = lambda t: jnp.sum(
      nnx_ext.reparam_grad(_loss, transform, **models.MODES[mode])(
        t, _model(), x
      )
      ** 2
    )
    expected = jax.grad(
      lambda t: jnp.sum(
        jax.grad(_pure, argnums=1)(transform, t, _model(), x) ** 2
      )
    )(theta)
    chex.assert_trees_all_close(
      jax.grad(sharpness)(theta), expected, rtol=1e-4, atol=1e-7
    )
    thetas = jnp.stack([theta, 2.0 * theta])
    chex.assert_trees_all_close(
      jax.vmap(lambda t: grad(t, _model(), x))(thetas),
      jnp.stack([grad(t, model, x) for t in thetas]),
      rtol=1e-4,
      atol=1e-7,
    )


def _variables(model):
  return [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
