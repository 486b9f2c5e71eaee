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
"""How a multi-loss function may be written, called and reduced."""

import functools
import typing as tp
import warnings

import chex
import jax
import jax.numpy as jnp
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

ROUTES = {
  'policy': nnx.DiffState(0, nnx.Param),
  'value': nnx.DiffState(1, nnx.Param),
}


def _nets(**parts):
  rngs = nnx.Rngs(params=0, dropout=1)
  return (
    models.MLP(4, 3, rngs=rngs, **parts),
    models.MLP(4, 1, rngs=rngs, **parts),
  )


def _expected():
  """The gradients of ``actor_critic_losses`` from plain JAX."""
  nets, x = _nets(), models.batch()
  graphdefs, params = zip(*map(nnx.split, nets))

  def loss(params, key):
    merged = map(nnx.merge, graphdefs, params)
    return models.actor_critic_losses(*merged, x)[key]

  return {
    key: jax.grad(loss)(params, key)[i]
    for i, key in enumerate(('policy', 'value'))
  }


class CallFormsTest(parameterized.TestCase):
  def _check(self, grads):
    chex.assert_trees_all_close(grads, _expected(), rtol=1e-5, atol=1e-7)

  @parameterized.product(mode=list(models.MODES))
  def test_decorator(self, mode):
    options = models.MODES[mode]

    @nnx_ext.value_and_grad_multi(argnums=ROUTES, **options)
    def step(actor, critic, x):
      """The user's words."""
      return models.actor_critic_losses(actor, critic, x)

    @nnx_ext.grad_multi(argnums=ROUTES, **options)
    def only(actor, critic, x):
      return models.actor_critic_losses(actor, critic, x)

    self.assertEqual(step.__name__, 'step')
    self.assertEqual(step.__doc__, "The user's words.")
    self._check(step(*_nets(), models.batch())[1])
    self._check(only(*_nets(), models.batch()))

  @parameterized.product(mode=list(models.MODES))
  def test_arguments_by_keyword(self, mode):
    step = nnx_ext.grad_multi(
      models.actor_critic_losses, argnums=ROUTES, **models.MODES[mode]
    )
    actor, critic = _nets()
    self._check(step(x=models.batch(), critic=critic, actor=actor))
    self._check(step(actor, x=models.batch(), critic=critic))

  @parameterized.product(mode=list(models.MODES))
  def test_keyword_only(self, mode):
    def losses(actor, critic, *, x, scale=1.0, norm=None):
      out = models.actor_critic_losses(actor, critic, x)
      return {key: scale * value for key, value in out.items()}

    step = nnx_ext.grad_multi(losses, argnums=ROUTES, **models.MODES[mode])
    self._check(step(*_nets(), x=models.batch()))
    doubled = step(*_nets(), x=models.batch(), scale=2.0)
    self._check(jax.tree.map(lambda g: g / 2, doubled))

  @parameterized.product(mode=list(models.MODES))
  def test_a_keyword_only_module_keeps_its_state(self, mode):
    def losses(actor, critic, x, *, norm):
      return models.actor_critic_losses(actor, critic, norm(x))

    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    reference = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    reference(models.batch())
    nnx_ext.grad_multi(losses, argnums=ROUTES, **models.MODES[mode])(
      *_nets(), models.batch(), norm=norm
    )
    chex.assert_trees_all_close(nnx.state(norm), nnx.state(reference))

  @parameterized.product(mode=list(models.MODES))
  def test_defaults_can_be_differentiated_by(self, mode):
    def losses(x, scale=3.0):
      return {'a': jnp.sum(x) * scale**2, 'b': jnp.sum(x**2) * scale}

    grads = nnx_ext.grad_multi(
      losses, argnums={'a': 1, 'b': 1}, **models.MODES[mode]
    )(jnp.arange(3.0))
    chex.assert_trees_all_close(grads, {'a': 18.0, 'b': 5.0})

  @parameterized.product(mode=list(models.MODES))
  def test_partial(self, mode):
    def losses(scale, actor, critic, x, *, shift):
      assert shift == 1.0
      out = models.actor_critic_losses(actor, critic, x)
      return {key: scale * value for key, value in out.items()}

    f = functools.partial(losses, 1.0, shift=1.0)
    step = nnx_ext.grad_multi(f, argnums=ROUTES, **models.MODES[mode])
    self._check(step(*_nets(), models.batch()))
    actor, critic = _nets()
    self._check(step(actor, critic=critic, x=models.batch()))

  @parameterized.product(mode=list(models.MODES))
  def test_unbound_method(self, mode):
    class Agent(nnx.Module):
      def __init__(self):
        self.actor, self.critic = _nets()

      def losses(self, x):
        return models.actor_critic_losses(self.actor, self.critic, x)

    grads = nnx_ext.grad_multi(
      Agent.losses,
      argnums={
        'policy': nnx.DiffState(0, nnx.PathContains('actor')),
        'value': nnx.DiffState(0, nnx.PathContains('critic')),
      },
      **models.MODES[mode],
    )(Agent(), models.batch())
    self._check(
      {'policy': grads['policy']['actor'], 'value': grads['value']['critic']}
    )

  @parameterized.product(mode=list(models.MODES))
  def test_odd_arguments(self, mode):
    def losses(actor, critic, x, name, function, nothing, table, *rest):
      assert name == 'name' and nothing is None and table == {'k': 'v'}
      assert rest == ('a', 2)
      return models.actor_critic_losses(actor, critic, function(x))

    step = nnx_ext.grad_multi(losses, argnums=ROUTES, **models.MODES[mode])
    self._check(
      step(
        *_nets(),
        models.batch(),
        'name',
        lambda x: x,
        None,
        {'k': 'v'},
        'a',
        2,
      )
    )

  @parameterized.product(mode=list(models.MODES))
  def test_negative_argnum(self, mode):
    step = nnx_ext.grad_multi(
      models.leaking_losses, argnums=-1, **models.MODES[mode]
    )
    positive = nnx_ext.grad_multi(
      models.leaking_losses, argnums=2, **models.MODES[mode]
    )
    nets, x = _nets(), models.batch()
    chex.assert_trees_all_close(step(*nets, x), positive(*nets, x))

  def test_modes_are_read_when_decorating(self):
    with nnx.set_graph_mode(False):
      tree = nnx_ext.grad_multi(models.leaking_losses, argnums=0)
    default = nnx_ext.grad_multi(models.leaking_losses, argnums=0)
    args = (*_nets(), models.batch())
    self.assertIsInstance(tree(*args)['policy'], models.MLP)
    self.assertIsInstance(default(*args)['policy'], nnx.State)


class AuxTest(parameterized.TestCase):
  @parameterized.product(mode=list(models.MODES))
  def test_any_pytree(self, mode):
    def losses(actor, critic, x):
      out = models.actor_critic_losses(actor, critic, x)
      aux = {'x': x, 'n': 3, 's': 'text', 'f': len, 'none': None}
      return out, aux

    step = nnx_ext.value_and_grad_multi(
      losses, argnums=ROUTES, has_aux=True, **models.MODES[mode]
    )
    (values, aux), grads = step(*_nets(), models.batch())
    chex.assert_trees_all_close(
      values, models.actor_critic_losses(*_nets(), models.batch())
    )
    chex.assert_trees_all_close(aux['x'], models.batch())
    self.assertEqual((aux['n'], aux['s'], aux['f']), (3, 'text', len))
    self.assertIsNone(aux['none'])
    chex.assert_trees_all_close(grads, _expected(), rtol=1e-5, atol=1e-7)
    only = nnx_ext.grad_multi(
      losses, argnums=ROUTES, has_aux=True, **models.MODES[mode]
    )
    grads_only, aux = only(*_nets(), models.batch())
    chex.assert_trees_all_close(grads_only, grads)
    self.assertEqual(aux['s'], 'text')

  @parameterized.product(mode=list(models.MODES))
  def test_a_new_module(self, mode):
    def losses(actor, critic, x):
      out = models.actor_critic_losses(actor, critic, x)
      return out, nnx.Linear(2, 3, rngs=nnx.Rngs(5))

    (_, layer), _ = nnx_ext.value_and_grad_multi(
      losses, argnums=ROUTES, has_aux=True, **models.MODES[mode]
    )(*_nets(), models.batch())
    expected = nnx.Linear(2, 3, rngs=nnx.Rngs(5))
    chex.assert_trees_all_close(
      layer(jnp.ones((1, 2))), expected(jnp.ones((1, 2)))
    )

  def test_an_input_module_is_itself_in_the_default_mode(self):
    def losses(actor, critic, x):
      return models.actor_critic_losses(actor, critic, x), actor

    actor, critic = _nets()
    (_, same), _ = nnx_ext.value_and_grad_multi(
      losses, argnums=ROUTES, has_aux=True, **models.MODES['default']
    )(actor, critic, models.batch())
    self.assertIs(same, actor)


class SharedVariablesTest(parameterized.TestCase):
  """Two Module arguments that hold one trunk."""

  def _owners(self):
    rngs = nnx.Rngs(0)
    body = nnx.Linear(4, 5, rngs=rngs)
    actor = models.Owner(body, 3, rngs=rngs)
    critic = models.Owner(body, 1, rngs=rngs)
    return actor, critic, models.batch()

  def _expected(self, key, which):
    """The gradient of a loss by one owner, from the pure function."""
    actor, critic, x = self._owners()
    graphdef, params = nnx.split((actor, critic))

    def loss(params):
      return models.leaking_losses(*nnx.merge(graphdef, params), x)[key]

    grads = nnx.merge(graphdef, jax.grad(loss)(params))
    return nnx.state(grads[which])

  @parameterized.product(mode=['default', 'no_updates'])
  def test_each_gradient_holds_the_shared_part(self, mode):
    grads = nnx_ext.grad_multi(
      models.leaking_losses,
      argnums={'policy': (0, 1), 'value': 1},
      **models.MODES[mode],
    )(*self._owners())
    actual = {
      ('policy', 0): grads['policy'][0],
      ('policy', 1): grads['policy'][1],
      ('value', 1): grads['value'],
    }
    for (key, which), grad in actual.items():
      chex.assert_trees_all_close(
        nnx.state(grad), self._expected(key, which), rtol=1e-5, atol=1e-7
      )

  @parameterized.product(mode=['default', 'no_updates'])
  def test_each_fits_its_optimizer(self, mode):
    actor, critic, x = self._owners()
    grads = nnx_ext.grad_multi(
      models.leaking_losses, argnums=ROUTES, **models.MODES[mode]
    )(actor, critic, x)
    body = actor.body.kernel[...]
    for module, key in ((actor, 'policy'), (critic, 'value')):
      optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
      optimizer.update(module, grads[key])
    both = (
      grads['policy']['body']['kernel'][...]
      + grads['value']['body']['kernel'][...]
    )
    chex.assert_trees_all_close(
      actor.body.kernel[...], body - 0.1 * both, rtol=1e-5, atol=1e-7
    )

  @parameterized.product(mode=['default', 'no_updates'])
  def test_the_same_module_twice(self, mode):
    model, x = models.MLP(4, 1, rngs=nnx.Rngs(0)), models.batch()

    def losses(a, b, x):
      return {'one': jnp.mean(a(x) * b(x)), 'two': jnp.mean(a(x))}

    grads = nnx_ext.grad_multi(
      losses, argnums={'one': (0, 1), 'two': 0}, **models.MODES[mode]
    )(model, model, x)
    alone = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
    for grad in grads['one']:
      chex.assert_trees_all_close(nnx.state(grad), alone, rtol=1e-5, atol=1e-7)


class ReduceTest(parameterized.TestCase):
  @parameterized.product(mode=list(models.MODES))
  def test_separate_modules(self, mode):
    grads = nnx_ext.grad_multi(
      models.leaking_losses,
      argnums=ROUTES,
      reduce='sum',
      **models.MODES[mode],
    )(*_nets(), models.batch())
    each = nnx_ext.grad_multi(models.leaking_losses, argnums=ROUTES)(
      *_nets(), models.batch()
    )
    self.assertIsInstance(grads, tuple)
    chex.assert_trees_all_close(
      grads, (each['policy'], each['value']), rtol=1e-5, atol=1e-7
    )

  @parameterized.product(mode=list(models.MODES))
  def test_a_single_argument_has_no_tuple(self, mode):
    def losses(model, x):
      logits, value = model(x)
      return {'p': jnp.mean(logits[:, 0]), 'v': jnp.mean(value**2)}

    model = models.TwoHeads(4, rngs=nnx.Rngs(0))
    grads = nnx_ext.grad_multi(
      losses, argnums=0, reduce='sum', **models.MODES[mode]
    )(model, models.batch())
    summed = nnx.grad(
      lambda m, x: sum(losses(m, x).values()), **models.MODES[mode]
    )(model, models.batch())
    self.assertIs(type(grads), type(summed))
    self.assertEqual(jax.tree.structure(grads), jax.tree.structure(summed))
    chex.assert_trees_all_close(grads, summed, rtol=1e-5, atol=1e-7)

  @parameterized.product(mode=list(models.MODES))
  def test_filters_of_an_argument_are_joined(self, mode):
    def losses(model, x):
      logits, value = model(x)
      return {
        'p': jnp.mean(logits[:, 0] * value[:, 0]),
        'v': jnp.mean(value**2),
      }

    routes = {
      'p': nnx.DiffState(0, nnx.Not(nnx.PathContains('critic'))),
      'v': nnx.DiffState(0, nnx.Not(nnx.PathContains('actor'))),
    }
    make = lambda: (models.TwoHeads(4, rngs=nnx.Rngs(0)), models.batch())
    options = models.MODES[mode]
    total = nnx_ext.grad_multi(losses, argnums=routes, reduce='sum', **options)(
      *make()
    )
    each = nnx_ext.grad_multi(losses, argnums=routes, **options)(*make())
    self.assertEqual(
      jax.tree.structure(total),
      jax.tree.structure(nnx.state(make()[0], nnx.Param)),
    )
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    chex.assert_trees_all_close(
      total['trunk'],
      add(each['p']['trunk'], each['v']['trunk']),
      rtol=1e-5,
      atol=1e-7,
    )
    chex.assert_trees_all_close(total['actor'], each['p']['actor'])
    chex.assert_trees_all_close(total['critic'], each['v']['critic'])

  def test_ascending_order(self):
    grads = nnx_ext.grad_multi(
      models.leaking_losses,
      argnums={'policy': (2, 1), 'value': 0},
      reduce='sum',
    )(*_nets(), models.batch())
    shapes = [jax.tree.leaves(g)[-1].shape for g in grads]
    self.assertEqual(shapes, [(6, 3), (6, 1), (7, 4)])

  @parameterized.product(
    mode=list(models.MODES),
    weights=[
      {'policy': 0.5, 'value': -2.0},
      {'policy': 0.5, 'value': jnp.array(-2.0)},
      3,
    ],
  )
  def test_weights(self, mode, weights):
    options = dict(argnums=ROUTES, **models.MODES[mode])
    args = (*_nets(), models.batch())
    values, grads = nnx_ext.value_and_grad_multi(
      models.leaking_losses, weights=weights, **options
    )(*args)
    plain_values, plain = nnx_ext.value_and_grad_multi(
      models.leaking_losses, **options
    )(*args)
    chex.assert_trees_all_close(values, plain_values)
    for key in grads:
      weight = weights[key] if isinstance(weights, dict) else weights
      chex.assert_trees_all_close(
        grads[key],
        jax.tree.map(lambda g, w=weight: g * w, plain[key]),
        rtol=1e-5,
        atol=1e-7,
      )

  @parameterized.parameters(((0.5, -2.0),), ([0.5, -2.0],))
  def test_weights_by_position(self, weights):
    class Losses(tp.NamedTuple):
      policy: tp.Any
      value: tp.Any

    def losses(*args):
      return Losses(**models.leaking_losses(*args))

    args = (*_nets(), models.batch())
    grads = nnx_ext.grad_multi(losses, argnums=(0, 1), weights=weights)(*args)
    plain = nnx_ext.grad_multi(losses, argnums=(0, 1))(*args)
    self.assertIsInstance(grads, Losses)
    chex.assert_trees_all_close(
      grads,
      Losses(
        jax.tree.map(lambda g: 0.5 * g, plain.policy),
        jax.tree.map(lambda g: -2.0 * g, plain.value),
      ),
      rtol=1e-5,
      atol=1e-7,
    )


class StateTest(parameterized.TestCase):
  """Variables move as by one plain call."""

  @parameterized.product(mode=list(models.MODES), train=[True, False])
  def test_moves_once(self, mode, train):
    nets = _nets(batch_norm=True, dropout=0.3)
    reference = _nets(batch_norm=True, dropout=0.3)
    if not train:
      for net in (*nets, *reference):
        net.eval()
    values = nnx_ext.value_and_grad_multi(
      models.leaking_losses, argnums=ROUTES, **models.MODES[mode]
    )(*nets, models.batch())[0]
    expected = models.leaking_losses(*reference, models.batch())
    chex.assert_trees_all_close(values, expected, rtol=1e-6)
    counts = nnx.state(nets, nnx.RngCount)
    chex.assert_trees_all_equal(counts, nnx.state(reference, nnx.RngCount))
    chex.assert_trees_all_close(
      nnx.state(nets, nnx.Param, nnx.BatchStat),
      nnx.state(reference, nnx.Param, nnx.BatchStat),
    )
    moved = float(nets[0].norm.mean[0]) != 0.0
    self.assertEqual(moved, train)
    self.assertEqual(int(jax.tree.leaves(counts)[0]), int(train))

  def test_graph_updates_reach_the_caller(self):
    class Net(models.MLP):
      def __call__(self, x):
        self.sow(nnx.Intermediate, 'seen', x)
        self.extra = nnx.Variable(jnp.array(5.0))
        self.calls = getattr(self, 'calls', 0) + 1
        return super().__call__(x)

    rngs = nnx.Rngs(0)
    actor, critic = Net(4, 3, rngs=rngs), Net(4, 1, rngs=rngs)
    kernel = actor.l1.kernel
    step = nnx_ext.grad_multi(
      models.leaking_losses, argnums=ROUTES, **models.MODES['default']
    )
    with warnings.catch_warnings():  # flax deprecates sow outside nnx.capture
      warnings.simplefilter('ignore', DeprecationWarning)
      step(actor, critic, models.batch())
    for net in (actor, critic):
      chex.assert_trees_all_equal(net.seen.get_value()[0], models.batch())
      self.assertEqual(float(net.extra[...]), 5.0)
      self.assertEqual(net.calls, 1)
    self.assertIs(actor.l1.kernel, kernel)

  @parameterized.product(mode=list(models.MODES))
  def test_a_parameter_set_inside_moves_too(self, mode):
    def losses(actor, critic, x):
      out = models.leaking_losses(actor, critic, x)
      actor.l1.bias[...] = actor.l1.bias[...] + 1.0
      return out

    actor, critic = _nets()
    bias = actor.l1.bias
    nnx_ext.grad_multi(losses, argnums=ROUTES, **models.MODES[mode])(
      actor, critic, models.batch()
    )
    self.assertIs(actor.l1.bias, bias)
    chex.assert_trees_all_close(bias[...], jnp.ones(6))
