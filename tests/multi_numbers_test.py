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
"""Several losses of higher order and of other dtypes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

from tests import models
from tests.transforms import (
  EACH_MODE,
  HEAD_ROUTES,
  ROUTES,
  Heads,
  LawTestCase,
  arrays,
  distances,
  head_distances,
  inputs,
  multi,
  naive_multi,
  stateful,
  stateless,
)


def _sum_of_squares(tree):
  return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


def _gradient_norm(step):
  """A function of what ``step`` returns, to differentiate once more."""

  def norm(actor, critic, x):
    losses, grads = step(actor, critic, x)
    return (
      _sum_of_squares(grads['policy'])
      + 2.0 * _sum_of_squares(grads['value'])
      + losses['value'] ** 2
    )

  return norm


def _adapted(step, stop=lambda x: x):
  """Outer losses of the actor after a step along the inner gradient."""

  def f(actor, critic, x):
    losses, grads = step(actor, critic, x[:4])
    adapted, params = nnx.clone(actor), nnx.state(actor, nnx.Param)
    nnx.update(
      adapted,
      jax.tree.map(lambda p, g: p - 0.3 * stop(g), params, grads['policy']),
    )
    outer = models.leaking_losses(adapted, critic, x[4:])
    return {**outer, 'value': outer['value'] + 0.5 * losses['value']}

  return f


@functools.cache
def _expected_second_order():
  """Value, state and gradient by Params of the gradient norm."""
  (value, after), grads = _second_order(naive_multi())
  return (value, grads), arrays(after)


def _second_order(step, transform=lambda f: f):
  graphdef, params, rest = nnx.split(stateful(), nnx.Param, ...)

  @transform
  def norm(params, rest):
    modules = nnx.merge(graphdef, params, rest, copy=True)
    value = _gradient_norm(step)(*modules, inputs())
    return value, nnx.state(modules, nnx.Not(nnx.Param))

  return jax.jit(jax.value_and_grad(norm, has_aux=True))(params, rest)


@functools.cache
def _expected_pure_second_order():
  """Value and gradient of the gradient norm of ``stateless()``, without NNX."""
  graphdef, state = nnx.split(stateless())

  def loss(key, *params):
    modules = nnx.merge(graphdef, dict(enumerate(params)))
    return models.leaking_losses(*modules, inputs())[key]

  def step(actor, critic, _):
    losses, grads = {}, {}
    for i, key in enumerate(ROUTES):
      losses[key], grads[key] = jax.value_and_grad(
        functools.partial(loss, key), argnums=i
      )(actor, critic)
    return losses, grads

  norm = _gradient_norm(step)
  value, grads = jax.jit(jax.value_and_grad(norm, argnums=(0, 1)))(
    state[0], state[1], None
  )
  return value, jax.tree.leaves(grads)


class HigherOrderTest(LawTestCase):
  @EACH_MODE
  def test_nnx_grad_of_gradient_norm(self, mode):
    modules = stateless()
    second_order = nnx.value_and_grad(
      _gradient_norm(multi(mode)), argnums=(0, 1), **models.MODES[mode]
    )
    value, grads = nnx.jit(second_order, **models.MODES[mode])(
      *modules, inputs()
    )
    result = value, jax.tree.leaves(grads)
    expected = _expected_pure_second_order()
    self.assert_law(result, modules, expected, arrays(stateless()), atol=1e-5)

  @parameterized.parameters(
    ('default', 'none'),
    ('no_updates', 'jax.checkpoint'),
    ('tree', 'nnx.remat'),
  )
  def test_jax_grad_of_gradient_norm(self, mode, remat):
    step, transform = multi(mode), lambda f: f
    if remat == 'nnx.remat':
      step = nnx.remat(step, **models.MODES[mode])
    elif remat == 'jax.checkpoint':
      transform = jax.checkpoint
    (value, after), grads = _second_order(step, transform)
    self.assert_law(
      (value, grads), after, *_expected_second_order(), rtol=1e-4, atol=1e-4
    )

  @EACH_MODE
  def test_hessian(self, mode):
    modules = stateless()

    def at(bias):
      actor, critic = nnx.clone(modules)
      critic.l1.bias[...] = bias
      return actor, critic, inputs()

    @jax.jit
    def hessians(bias):
      loss = lambda bias: models.leaking_losses(*at(bias))['value']
      gradient = lambda bias: multi(mode)(*at(bias))[1]['value']['l1']['bias'][
        ...
      ]
      return (
        jax.hessian(loss)(bias),
        jax.jacfwd(gradient)(bias),
        jax.jacrev(gradient)(bias),
      )

    expected, forward, reverse = hessians(jnp.linspace(-0.5, 1.0, 6))
    self.assertGreater(jnp.abs(expected).min(), 1e-4)
    self.assert_close(forward, expected)
    self.assert_close(reverse, expected)

  @EACH_MODE
  def test_multi_in_multi(self, mode):
    modules = stateful()
    step = multi(mode, _adapted(multi(mode)))
    result = nnx.jit(step, **models.MODES[mode])(*modules, inputs())
    self.assert_law(result, modules, *_expected_adapted(), rtol=1e-4, atol=1e-5)

  def test_multi_in_multi_is_of_second_order(self):
    first_order = naive_multi(
      _adapted(naive_multi(), stop=jax.lax.stop_gradient)
    )
    _, expected = nnx.jit(first_order)(*stateful(), inputs())
    _, grads = _expected_adapted()[0]
    for key in grads:
      difference = jax.tree.map(lambda a, b: a - b, grads[key], expected[key])
      self.assertGreater(_sum_of_squares(difference), 1e-4, key)

  @EACH_MODE
  def test_inside_value_and_grad(self, mode):
    modules = stateful()
    step = _scaled(multi(mode), mode)
    result = nnx.jit(step, **models.MODES[mode])(*modules, inputs())
    self.assert_law(result, modules, *_expected_scaled(), rtol=1e-4, atol=1e-5)


@functools.cache
def _expected_adapted():
  modules = stateful()
  result = nnx.jit(naive_multi(_adapted(naive_multi())))(*modules, inputs())
  return result, arrays(modules)


def _scaled(step, mode):
  """The derivative of losses and gradients by a scale of the input."""

  def f(scale, actor, critic, x):
    losses, grads = step(actor, critic, scale[...] * x)
    return losses['value'] + _sum_of_squares(grads['policy']), grads

  f = nnx.value_and_grad(f, has_aux=True, **models.MODES[mode])
  return lambda actor, critic, x: f(nnx.Param(jnp.array(0.7)), actor, critic, x)


@functools.cache
def _expected_scaled():
  modules = stateful()
  result = nnx.jit(_scaled(naive_multi(), 'default'))(*modules, inputs())
  return result, arrays(modules)


def _cast(module, dtype, filter=nnx.Param):
  state = nnx.state(module, filter)
  nnx.update(module, jax.tree.map(lambda x: x.astype(dtype), state))
  return module


def _complex_pair():
  rngs = nnx.Rngs(0)
  make = functools.partial(nnx.Linear, 4, param_dtype=jnp.complex64, rngs=rngs)
  return make(3), make(1)


def _holomorphic(actor, critic, x):
  logits, value = actor(x), critic(x)
  return {
    'policy': jnp.mean(jnp.sin(logits) * value),
    'value': jnp.mean(value**2) * jnp.sum(logits[0]),
  }


def _moduli(actor, critic, x):
  logits, value = actor(x), critic(x)
  return {
    'policy': jnp.mean(jnp.abs(logits) ** 2 * jnp.real(value)),
    'value': jnp.mean(jnp.abs(value - 1j) ** 3) + jnp.mean(logits.imag * 2.0),
  }


def _double(step):
  inexact = (nnx.Param, nnx.BatchStat)
  modules = tuple(_cast(m, jnp.float64, inexact) for m in stateful())
  result = step(*modules, inputs().astype(jnp.float64))
  return result, arrays(modules)


class DtypeTest(LawTestCase):
  @parameterized.parameters(
    ('default', jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    ('tree', jnp.float16, jnp.float32, jnp.bfloat16),
  )
  def test_low_precision(self, mode, actor_dtype, critic_dtype, x_dtype):
    actor, critic = stateful()
    modules = _cast(actor, actor_dtype), _cast(critic, critic_dtype)
    x, after = inputs().astype(x_dtype), nnx.clone(modules)
    f = lambda *args: jax.tree.map(
      lambda loss: loss.astype(x_dtype), models.leaking_losses(*args)
    )
    expected = nnx.jit(naive_multi(f))(*after, x)
    weights = {'policy': 1.0, 'value': jnp.float32(1.0)}
    step = multi(mode, f, weights=weights)
    result = nnx.jit(step, **models.MODES[mode])(*modules, x)
    self.assert_law(
      result, modules, expected, arrays(after), rtol=2e-2, atol=2e-3
    )
    for key, dtype in zip(ROUTES, (actor_dtype, critic_dtype)):
      for gradient in jax.tree.leaves(result[1][key]):
        self.assertEqual(gradient.dtype, dtype)
    self.assertEqual(result[0]['policy'].dtype, x_dtype)

  @parameterized.parameters('default', 'tree')
  def test_float64(self, mode):
    with jax.enable_x64(True):
      expected, after = _double(nnx.jit(naive_multi()))
      result, state = _double(nnx.jit(multi(mode), **models.MODES[mode]))
    chex.assert_type(jax.tree.leaves(result), jnp.float64)
    self.assert_law(result, state, expected, after, rtol=1e-12, atol=1e-14)

  @parameterized.parameters(
    ('default', np.nan, False),
    ('default', np.inf, True),
    ('no_updates', np.inf, False),
    ('tree', np.nan, True),
  )
  def test_nan_of_separate_modules(self, mode, target, jit):
    target, actor, critic = jnp.full(8, target), *stateless()
    expected = naive_multi(distances)(actor, critic, inputs(), target)
    step = multi(mode, distances)
    if jit:
      step = nnx.jit(step, **models.MODES[mode])
    losses, grads = step(actor, critic, inputs(), target)
    chex.assert_tree_all_finite((losses['policy'], grads['policy']))
    self.assertFalse(np.isfinite(losses['value']))
    for gradient in jax.tree.leaves(grads['value']):
      self.assertFalse(np.any(np.isfinite(gradient)))
    self.assert_close((losses, grads), expected)

  @EACH_MODE
  def test_nan_with_a_shared_trunk(self, mode):
    model, target = Heads(nnx.Rngs(0)), jnp.full(8, np.nan)
    expected = naive_multi(head_distances, HEAD_ROUTES)(model, inputs(), target)
    losses, grads = multi(mode, head_distances, argnums=HEAD_ROUTES)(
      model, inputs(), target
    )
    chex.assert_tree_all_finite((losses['policy'], grads['policy']))
    self.assertTrue(np.all(np.isnan(grads['value']['trunk']['kernel'])))
    self.assert_close((losses, grads), expected)
    total = multi(mode, head_distances, argnums=HEAD_ROUTES, reduce='sum')(
      model, inputs(), target
    )[1]
    self.assertTrue(np.all(np.isnan(total['trunk']['kernel'])))
    self.assert_close(total['actor'], expected[1]['policy']['actor'])

  @parameterized.parameters(
    (_holomorphic, 'default', (0, 1)),
    (_holomorphic, 'tree', ROUTES),
    (_moduli, 'default', ROUTES),
    (_moduli, 'no_updates', (0, 1)),
  )
  def test_complex(self, f, mode, argnums):
    holomorphic = f is _holomorphic
    modules, x = _complex_pair(), inputs() + 1j * inputs()[::-1]
    graphdef, state = nnx.split(modules)

    def alone(i, key):
      def loss(own):
        return f(*nnx.merge(graphdef, {**state, i: own}), x)[key]

      return jax.jit(jax.value_and_grad(loss, holomorphic=holomorphic))(
        state[i]
      )

    losses, expected = zip(*(alone(*each) for each in enumerate(ROUTES)))
    expected = dict(zip(ROUTES, losses)), dict(zip(ROUTES, expected))
    step = multi(
      mode,
      f,
      holomorphic=holomorphic,
      argnums=dict(zip(ROUTES, argnums)) if argnums == (0, 1) else ROUTES,
    )
    actual, grads = nnx.jit(step, **models.MODES[mode])(*modules, x)
    grads = {key: nnx.state(gradient) for key, gradient in grads.items()}
    self.assert_law((actual, grads), modules, expected, arrays(_complex_pair()))
    chex.assert_type(jax.tree.leaves(grads), jnp.complex64)
    for gradient in jax.tree.leaves(grads):
      self.assertGreater(np.abs(np.imag(gradient)).max(), 1e-3)

  @parameterized.parameters('no_updates', 'tree')
  def test_allow_int(self, mode):
    argnums = {'policy': 0, 'value': 1}
    losses, grads = multi(mode, argnums=argnums, allow_int=True)(
      *stateful(), inputs()
    )
    for key, argnum in argnums.items():
      loss, expected = nnx.value_and_grad(
        lambda *args, key=key: models.leaking_losses(*args)[key],
        argnums=argnum,
        allow_int=True,
        **models.MODES[mode],
      )(*stateful(), inputs())
      self.assert_close(losses[key], loss)
      self.assertIs(type(grads[key]), models.MLP)
      self.assertEqual(
        jax.tree.structure(grads[key]), jax.tree.structure(expected)
      )
      for own, alone in zip(*map(jax.tree.leaves, (grads[key], expected))):
        self.assertEqual(own.dtype, alone.dtype)
        self.assertEqual(own.shape, alone.shape)
        if own.dtype != jax.dtypes.float0:
          np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-6)
    dtypes = [x.dtype for x in jax.tree.leaves(grads['policy'])]
    self.assertEqual(dtypes.count(jax.dtypes.float0), 2)  # rng key and count
