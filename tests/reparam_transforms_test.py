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
"""Gradients by theta under, over and beside the transforms of JAX and NNX."""

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

P = jax.sharding.PartitionSpec
X = models.batch(4, 8)
THETA = jnp.linspace(-0.5, 0.5, 24).reshape(4, 6)

every_mode = parameterized.product(mode=list(models.MODES))


def _model(**parts):
  rngs = nnx.Rngs(params=0, dropout=1)
  return models.MLP(4, 1, rngs=rngs, **parts)


def _transform(theta, params):
  return {'l1': {'kernel': jnp.sin(theta) + 0.1 * params['l1']['kernel']}}


def _loss(model, x):
  return jnp.mean((model(x) - 1.0) ** 2)


def _through_remat(model, x):
  return nnx.remat(_loss)(model, x)


def _through_cond(model, x):
  return nnx.cond(
    jnp.mean(x) < 10.0, _loss, lambda model, x: 3.0 * _loss(model, x), model, x
  )


def _through_scan(model, x):
  def body(total, row):
    return total + _loss(model, row[None]) / len(x), None

  return jax.lax.scan(body, 0.0, x)[0]


def _step(mode, loss=_loss, **options):
  return nnx_ext.reparam_value_and_grad(
    loss, _transform, **models.MODES[mode], **options
  )


def _expected(loss=_loss, x=X):
  graphdef, state = nnx.split(_model())

  def pure(theta):
    model = nnx.merge(graphdef, nnx.clone(state))
    values = _transform(theta, nnx.as_pure(nnx.state(model)))
    model.l1.kernel[...] = values['l1']['kernel']
    return loss(model, x)

  return jax.value_and_grad(pure)(THETA)


class ReparamTransformsTest(parameterized.TestCase):
  def _check(self, actual, expected=None, rtol=1e-5):
    chex.assert_trees_all_close(
      actual, expected or _expected(), rtol=rtol, atol=1e-6
    )

  @parameterized.product(
    mode=list(models.MODES),
    loss=[_through_remat, _through_cond, _through_scan],
  )
  def test_within_the_loss(self, mode, loss):
    self._check(_step(mode, loss)(THETA, _model(), X))

  @every_mode
  def test_jax_jit_on_split_state(self, mode):
    graphdef, state = nnx.split(_model(batch_norm=True, dropout=0.5))

    @jax.jit
    def step(theta, state):
      model = nnx.merge(graphdef, state)
      return _step(mode)(theta, model, X), nnx.state(model)

    eager = _model(batch_norm=True, dropout=0.5)
    expected = _step(mode)(THETA, eager, X)
    actual, after = step(THETA, state)
    self._check(actual, expected, rtol=1e-4)
    for kind in (nnx.BatchStat, nnx.RngCount):
      chex.assert_trees_all_close(
        nnx.filter_state(after, kind), nnx.state(eager, kind), rtol=1e-5
      )

  @every_mode
  def test_scan_over_steps(self, mode):
    graphdef, state = nnx.split(_model(batch_norm=True))

    def body(carry, _):
      theta, state = carry
      model = nnx.merge(graphdef, state)
      value, grad = _step(mode)(theta, model, X)
      return (theta - 0.1 * grad, nnx.state(model)), value

    (theta, after), values = jax.lax.scan(body, (THETA, state), length=3)
    model, looped, losses = _model(batch_norm=True), THETA, []
    for _ in range(3):
      value, grad = _step(mode)(looped, model, X)
      looped = looped - 0.1 * grad
      losses.append(value)
    self._check((theta, values), (looped, jnp.stack(losses)), rtol=1e-4)
    chex.assert_trees_all_close(after, nnx.state(model), rtol=1e-4, atol=1e-6)

  @every_mode
  def test_shard_map(self, mode):
    self.assertLen(jax.devices(), 4)
    mesh = jax.make_mesh(
      (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    graphdef, state = nnx.split(_model())

    def averaged(model, x):
      return jax.lax.pmean(_loss(model, x), 'data')

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P('data')), out_specs=P())
    def step(theta, state, x):
      model = nnx.merge(graphdef, state)
      return _step(mode, averaged)(theta, model, x)

    self._check(step(THETA, state, X))

  @every_mode
  def test_no_tracer_is_left(self, mode):
    model, step = _model(), nnx.jit(_step(mode), **models.MODES[mode])
    with jax.checking_leaks():
      self._check(step(THETA, model, X))

  @every_mode
  def test_within_several_losses(self, mode):
    # A parametrized model in a multi-loss step, each loss to its own part.
    class Cubed(nnx_ext.parametrizations.Parametrization):
      def __init__(self, weight):
        self.root = nnx.Param(jnp.cbrt(weight))

      def __call__(self):
        return self.root[...] ** 3

    make = lambda: (
      nnx_ext.parametrize(_model(), {nnx.PathContains('kernel'): Cubed}),
      _model(batch_norm=True),
    )
    routes = {
      'policy': nnx.DiffState(0, nnx.Param),
      'value': nnx.DiffState(1, nnx.Param),
    }
    _, grads = nnx_ext.value_and_grad_multi(
      models.leaking_losses, argnums=routes, **models.MODES[mode]
    )(*make(), X)
    for key, route in routes.items():
      alone = nnx.grad(_alone(key), argnums=route)
      chex.assert_trees_all_close(
        grads[key], alone(*make(), X), rtol=1e-4, atol=1e-6
      )


def _alone(key):
  return lambda actor, critic, x: models.leaking_losses(actor, critic, x)[key]
