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
"""Several losses in training: loops, optimizers, odd arguments, modes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.transforms import (
  DIFF,
  EACH_MODE,
  HEAD_ROUTES,
  ROUTES,
  Heads,
  LawTestCase,
  arrays,
  expected_law,
  head_distances,
  inputs,
  multi,
  naive_multi,
  split_for,
  stack_trees,
  stateful,
  stateless,
)


def _learners():
  actor, critic = stateful()
  return (
    actor,
    critic,
    nnx.Optimizer(actor, optax.adam(1e-2), wrt=nnx.Param),
    nnx.Optimizer(critic, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param),
  )


def _batches():
  return jax.random.normal(jax.random.key(3), (3, 8, 4))


@functools.cache
def _expected_training():
  """A python loop with one call for each loss."""
  learners = _learners()
  losses = [_train(naive_multi(), learners, x) for x in _batches()]
  return stack_trees(losses), arrays(learners)


def _train(step, learners, x):
  actor, critic, actor_optimizer, critic_optimizer = learners
  losses, grads = step(actor, critic, x)
  actor_optimizer.update(actor, grads['policy'])
  critic_optimizer.update(critic, grads['value'])
  return losses


class TrainTest(LawTestCase):
  """Training steps with two optimizers."""

  def _check(self, losses, learners):
    expected, after = _expected_training()
    self.assert_close(losses, expected, rtol=1e-4)
    self.assert_close(arrays(learners), after, rtol=1e-4, atol=1e-5)

  @EACH_MODE
  def test_lax_scan(self, mode):
    graphdef, state = split_for(_learners(), mode)

    def body(state, x):
      learners = nnx.merge(graphdef, state)
      losses = _train(multi(mode), learners, x)
      return nnx.state(learners), losses

    state, losses = jax.lax.scan(body, state, _batches())
    self._check(losses, nnx.merge(graphdef, state))

  @EACH_MODE
  def test_nnx_scan(self, mode):
    @nnx.scan(
      in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), **models.MODES[mode]
    )
    def scan(learners, x):
      return learners, _train(multi(mode), learners, x)

    learners = _learners()
    after, losses = scan(learners, _batches())
    self._check(losses, after)
    self._check(losses, learners)


def _only_l1(tree):
  return jax.tree.map_with_path(
    lambda path, _: 'l1' in jax.tree_util.keystr(path), tree
  )


def _labels(tree):
  return jax.tree.map(lambda l1: 'slow' if l1 else 'frozen', _only_l1(tree))


TRANSFORMATIONS: dict[str, optax.GradientTransformation] = {
  'adam': optax.adam(1e-2),
  'partition': optax.partition(
    {'slow': optax.sgd(0.1), 'frozen': optax.set_to_zero()}, _labels
  ),
  'masked': optax.chain(
    optax.masked(optax.add_decayed_weights(0.3), _only_l1), optax.sgd(0.1)
  ),
  'clip': optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1.0)),
}


def _optimized(tx, step):
  """Losses and learners after 10 steps of Adam or 2 of another optimizer."""
  actor, critic = stateless()
  make = functools.partial(nnx.Optimizer, tx=TRANSFORMATIONS[tx], wrt=nnx.Param)
  learners = actor, critic, make(actor), make(critic)
  steps = 10 if tx == 'adam' else 2
  losses = [_train(step, learners, inputs()) for _ in range(steps)]
  return losses, arrays(learners)


@functools.cache
def _expected_optimized(tx):
  return _optimized(tx, naive_multi())


def _train_critic(step, learners, x):
  actor, critic, _, critic_optimizer = learners
  losses, grads = step(actor, critic, x)
  critic_optimizer.update(critic, grads['value'])
  return losses


@functools.cache
def _expected_delayed():
  """Training in which the actor learns only every second step."""
  learners = _learners()
  losses = [
    (_train_critic if i % 2 else _train)(naive_multi(), learners, x)
    for i, x in enumerate(_batches())
  ]
  return losses, arrays(learners)


class OptimizerTest(LawTestCase):
  @parameterized.parameters(
    ('adam', 'default'),
    ('adam', 'no_updates'),
    ('adam', 'tree'),
    ('partition', 'default'),
    ('masked', 'no_updates'),
    ('clip', 'tree'),
  )
  def test_equals_two_calls(self, tx, mode):
    actual = _optimized(tx, multi(mode))
    self.assert_close(actual, _expected_optimized(tx), rtol=1e-4, atol=1e-5)
    before = jax.tree.leaves(nnx.state(stateless()))
    moved = [np.any(a != b) for a, b in zip(before, actual[1])]
    self.assertEqual(sum(moved), 4 if tx == 'partition' else 8)

  @EACH_MODE
  def test_sum_into_one_optimizer(self, mode):
    target = jnp.linspace(-1.0, 2.0, 8)

    def trained(gradient):
      model = Heads(nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      optimizer.update(model, gradient(model))
      return arrays(model)

    def naive(model):
      grads = naive_multi(head_distances, HEAD_ROUTES)(model, inputs(), target)[
        1
      ]
      trunk = jax.tree.map(
        lambda a, b: a + 0.5 * b, *(g['trunk'] for g in grads.values())
      )
      critic = jax.tree.map(lambda b: 0.5 * b, grads['value']['critic'])
      return nnx.State(
        {'trunk': trunk, 'actor': grads['policy']['actor'], 'critic': critic}
      )

    step = nnx_ext.grad_multi(
      head_distances,
      argnums=HEAD_ROUTES,
      reduce='sum',
      weights={'policy': 1.0, 'value': 0.5},
      **models.MODES[mode],
    )
    own = trained(lambda model: step(model, inputs(), target))
    self.assert_close(own, trained(naive))

  @EACH_MODE
  def test_delayed_updates(self, mode):
    @functools.partial(nnx.jit, **models.MODES[mode])
    def train(learners, x, is_even):
      branches = (
        functools.partial(f, multi(mode)) for f in (_train, _train_critic)
      )
      return nnx.cond(is_even, *branches, learners, x, **models.MODES[mode])

    learners = _learners()
    losses = [train(learners, x, i % 2 == 0) for i, x in enumerate(_batches())]
    expected, after = _expected_delayed()
    self.assert_close(losses, expected, rtol=1e-4)
    self.assert_close(arrays(learners), after, rtol=1e-4, atol=1e-5)


class ArgumentTest(LawTestCase):
  @EACH_MODE
  def test_numpy_and_floats(self, mode):
    def f(actor, critic, x, gain, offset=0.25):
      losses = models.leaking_losses(actor, critic, x * gain)
      return {
        'policy': losses['policy'] * gain + offset,
        'value': losses['value'] * offset,
      }

    routes = {'policy': (DIFF(0, nnx.Param), 3), 'value': (2, DIFF(1, ...))}
    expected = naive_multi(f, routes)(*stateless(), np.asarray(inputs()), 1.5)
    modules = stateless()
    result = multi(mode, f, argnums=routes)(
      *modules, np.asarray(inputs()), gain=1.5
    )
    self.assert_law(result, modules, expected, arrays(stateless()))

  @EACH_MODE
  def test_traced_weights(self, mode):
    def step(actor, critic, x, w):
      weights = {'policy': w, 'value': -2.0}
      return multi(mode, weights=weights)(actor, critic, x)

    (losses, grads), after = expected_law()
    scale = {'policy': 3.0, 'value': -2.0}
    expected = (
      losses,
      {
        key: jax.tree.map(lambda g, s=scale[key]: s * g, grads[key])
        for key in grads
      },
    )
    modules = stateful()
    step = nnx.jit(step, **models.MODES[mode])
    result = step(*modules, inputs(), jnp.array(3.0))
    self.assert_law(result, modules, expected, after)

  @parameterized.parameters(
    ('default', None), ('no_updates', 'sum'), ('tree', None)
  )
  def test_derivative_by_weight(self, mode, reduce):
    """How the loss after a step depends on the weight of a loss."""
    modules = stateless()

    def updated(w, direction):
      actor, critic = nnx.clone(modules)
      gradient = direction(w, actor, critic)
      params = nnx.state(actor, nnx.Param)
      nnx.update(
        actor, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
      )
      return models.leaking_losses(actor, critic, inputs()[::-1])['value']

    def own(w, actor, critic):
      _, grads = multi(
        mode,
        argnums=DIFF(0, nnx.Param),
        reduce=reduce,
        weights={'policy': w, 'value': w**2},
      )(actor, critic, inputs())
      return grads if reduce else grads['value']

    def naive(w, actor, critic):
      argnums = dict.fromkeys(ROUTES, DIFF(0, nnx.Param))
      _, grads = naive_multi(argnums=argnums)(actor, critic, inputs())
      return jax.tree.map(
        lambda p, v: (w * p if reduce else 0.0) + w**2 * v,
        *grads.values(),
      )

    @jax.jit
    def derivatives(w):
      return (
        jax.grad(updated)(w, naive),
        jax.grad(updated)(w, own),
        jax.jacfwd(updated)(w, own),
      )

    expected, reverse, forward = derivatives(0.7)
    self.assertGreater(abs(expected), 1e-3)
    self.assert_close(reverse, expected)
    self.assert_close(forward, expected)


@functools.cache
def _trained_state():
  """The state after one step in train mode."""
  modules = stateful()
  naive_multi()(*modules, inputs())
  return nnx.state(modules)


def _trained(is_eval=False):
  modules = stateful()
  nnx.update(modules, _trained_state())
  for module in modules:
    module.eval() if is_eval else module.train()
  return modules


@functools.cache
def _expected_trained(is_eval):
  modules = _trained(is_eval)
  return naive_multi()(*modules, inputs()), arrays(modules)


class EvalTest(LawTestCase):
  @parameterized.parameters(
    ('default', False),
    ('default', True),
    ('no_updates', False),
    ('tree', False),
  )
  def test_eval_and_train(self, mode, jit):
    modules, step = _trained(is_eval=True), multi(mode)
    if jit:
      step = nnx.jit(step, **models.MODES[mode])
    result = step(*modules, inputs())
    self.assert_law(result, modules, *_expected_trained(is_eval=True))
    for module in modules:
      module.train()
    result = step(*modules, inputs())
    self.assert_law(result, modules, *_expected_trained(is_eval=False))

  def test_eval_differs(self):
    (losses, _), after = _expected_trained(is_eval=True)
    (train_losses, _), _ = _expected_trained(is_eval=False)
    chex.assert_trees_all_equal(after, arrays(_trained()))
    for key in losses:
      self.assertGreater(abs(losses[key] - train_losses[key]), 1e-3)
