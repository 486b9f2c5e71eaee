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
"""The Multi law: each loss's gradient is that of the loss alone.

The oracle is ``nnx.value_and_grad`` on one loss at a time, each time from the
same starting state; where flax itself raises, it is ``jax.grad`` of a pure
function.
"""

import typing as tp

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

Case = tuple[tp.Callable, tp.Callable[[], tuple], tp.Any]

DIFF = nnx.DiffState


def _separate(**parts) -> tp.Callable[[], tuple]:
  def make():
    rngs = nnx.Rngs(params=0, dropout=1)
    return (
      models.MLP(4, 3, rngs=rngs, **parts),
      models.MLP(4, 1, rngs=rngs, **parts),
      models.batch(),
    )

  return make


def _as_list(actor, critic, x):
  return list(models.leaking_losses(actor, critic, x).values())


def _as_tuple(actor, critic, x):
  return tuple(models.actor_critic_losses(actor, critic, x).values())


class Pair(tp.NamedTuple):
  policy: tp.Any
  value: tp.Any


def _as_namedtuple(actor, critic, x):
  return Pair(**models.actor_critic_losses(actor, critic, x))


def _one_module(model, x):
  logits, value = model(x)
  return {
    'value': jnp.mean((value - 1.0) ** 2),
    'policy': jnp.mean(jax.nn.log_softmax(logits)[:, 0] * value[:, 0]),
  }


def _container(nets, x):
  return models.leaking_losses(nets['actor'], nets['critic'], x)


def _sequence(nets, x):
  return models.leaking_losses(*nets, x)


def _sac(actor, critic, log_alpha, x):
  logits, value = actor(x), critic(x)[:, 0]
  log_prob = jax.nn.log_softmax(logits)[:, 0]
  entropy = -jnp.mean(log_prob)
  alpha = jnp.exp(
    log_alpha[...] if isinstance(log_alpha, nnx.Variable) else log_alpha
  )
  stop = jax.lax.stop_gradient
  return {
    'actor': jnp.mean(stop(alpha) * log_prob - value),
    'alpha': alpha * stop(entropy - 0.5),
    'critic': jnp.mean((value - 1.0) ** 2),
  }


def _with_temperature(make_alpha):
  def make():
    actor, critic, x = _separate()()
    return actor, critic, make_alpha(), x

  return make


class Rich(nnx.Module):
  """More than ten layers, a pytree in a Variable, a raw array, statics."""

  def __init__(self, *, rngs: nnx.Rngs):
    self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(12)])
    self.affine = nnx.Param({'scale': jnp.ones(4), 'bias': jnp.zeros(4)})
    self.raw = jnp.linspace(0.5, 1.0, 4)
    self.name = 'rich'
    self.activation = jnp.tanh
    self.nothing = None

  def __call__(self, x):
    for layer in self.layers:
      x = self.activation(layer(x)) * self._row(self.raw)
    affine = self.affine.get_value()
    return x * self._row(affine['scale']) + self._row(affine['bias'])

  def _row(self, x):
    return x[None]


def _rich(model, x, name, function, nothing):
  assert name == 'rich' and nothing is None
  y = function(model(x))
  return {'a': jnp.mean(y[:, 0]), 'b': jnp.mean(y**2)}


def _rich_arguments():
  return Rich(rngs=nnx.Rngs(0)), models.batch(), 'rich', jnp.sin, None


# Losses, arguments and argnums that flax takes in every mode.
EVERY_MODE: dict[str, Case] = {
  'ints': (
    models.actor_critic_losses,
    _separate(),
    {'policy': 0, 'value': 1},
  ),
  'leaks': (models.leaking_losses, _separate(), {'policy': 0, 'value': 1}),
  'common_int': (models.leaking_losses, _separate(), 0),
  'swapped': (models.leaking_losses, _separate(), {'policy': 1, 'value': 0}),
  'sequences': (
    models.leaking_losses,
    _separate(),
    {'policy': [1, 0], 'value': (0,)},
  ),
  'tuple': (_as_tuple, _separate(), (0, 1)),
  'tuple_by_list': (_as_tuple, _separate(), [0, (1,)]),
  'list': (_as_list, _separate(), ((0, 1), 1)),
  'namedtuple': (_as_namedtuple, _separate(), (0, 1)),
  'namedtuple_common': (_as_namedtuple, _separate(), Pair(0, 1)),
  'one_module': (
    _one_module,
    lambda: (models.TwoHeads(4, rngs=nnx.Rngs(0)), models.batch()),
    0,
  ),
  'dict_argument': (
    _container,
    lambda: (
      dict(zip(('actor', 'critic'), _separate()()[:2])),
      models.batch(),
    ),
    0,
  ),
  'tuple_argument': (
    _sequence,
    lambda: (_separate()()[:2], models.batch()),
    0,
  ),
  'list_argument': (
    _sequence,
    lambda: (list(_separate()()[:2]), models.batch()),
    {'policy': 0, 'value': 0},
  ),
  'array_target': (
    _sac,
    _with_temperature(lambda: jnp.array(0.3)),
    {'actor': 0, 'critic': 1, 'alpha': 2},
  ),
  'float_target': (
    _sac,
    _with_temperature(lambda: 0.3),
    {'actor': (0, 1), 'critic': 1, 'alpha': 2},
  ),
  'variable_target': (
    _sac,
    _with_temperature(lambda: nnx.Param(jnp.array(0.3))),
    {'actor': 0, 'critic': 1, 'alpha': 2},
  ),
  'inputs_too': (models.leaking_losses, _separate(), {'policy': 2, 'value': 1}),
  'rich': (_rich, _rich_arguments, 0),
  'state_argument': (
    lambda state, x: (
      jnp.mean(x @ state['l1']['kernel'][...]),
      jnp.mean(state['l2']['bias'][...] ** 2),
    ),
    lambda: (
      nnx.clone(nnx.state(models.MLP(4, 3, rngs=nnx.Rngs(0)))),
      models.batch(),
    ),
    0,
  ),
  'batch_norm': (
    models.actor_critic_losses,
    _separate(batch_norm=True),
    {'policy': 0, 'value': 1},
  ),
}

# Those that need a DiffState; flax takes them in the default mode only.
FILTERED: dict[str, Case] = {
  'params': (
    models.leaking_losses,
    _separate(batch_norm=True, dropout=0.4),
    {'policy': DIFF(0, nnx.Param), 'value': DIFF(1, nnx.Param)},
  ),
  'common': (
    models.leaking_losses,
    _separate(dropout=0.4),
    DIFF(1, nnx.PathContains('l1')),
  ),
  'kernel_and_input': (
    models.leaking_losses,
    _separate(batch_norm=True),
    {
      'policy': (DIFF(0, nnx.PathContains('kernel')), 2),
      'value': (2, DIFF(0, nnx.PathContains('bias')), DIFF(1, nnx.Param)),
    },
  ),
  'two_filters_on_one_argument': (
    _one_module,
    lambda: (models.TwoHeads(4, rngs=nnx.Rngs(0)), models.batch()),
    {
      'policy': DIFF(0, nnx.Not(nnx.PathContains('critic'))),
      'value': DIFF(
        0, nnx.Any(nnx.PathContains('critic'), nnx.PathContains('trunk'))
      ),
    },
  ),
  'reads_the_variable': (
    models.leaking_losses,
    _separate(),
    {
      'policy': DIFF(0, lambda path, v: v.get_value().ndim == 2),
      'value': DIFF(1, lambda path, v: v.get_value().size > 1),
    },
  ),
  'everything': (_rich, _rich_arguments, DIFF(0, ...)),
  'dict_argument': (
    _container,
    lambda: (
      dict(zip(('actor', 'critic'), _separate()()[:2])),
      models.batch(),
    ),
    {'policy': DIFF(0, nnx.PathContains('l2')), 'value': DIFF(0, nnx.Param)},
  ),
  'variable_ignores_filter': (
    _sac,
    _with_temperature(lambda: nnx.Param(jnp.array(0.3))),
    {
      'actor': DIFF(0, nnx.Param),
      'critic': DIFF(1, nnx.Param),
      'alpha': DIFF(2, nnx.BatchStat),
    },
  ),
}


def _entries(argnums, losses):
  """The entry of each loss, by its key."""
  if isinstance(argnums, (int, DIFF)):
    return {key: argnums for key in losses}
  if isinstance(argnums, dict):
    return argnums
  return dict(zip(losses, argnums))


def _alone(f, key):
  """The loss ``key`` of ``f`` as a function of its own."""
  return lambda *args: _by_key(f(*args))[key]


def _by_key(losses):
  if isinstance(losses, dict):
    return losses
  return dict(enumerate(losses))


def _state(args):
  """All arrays in the arguments, with keys as numbers."""
  unkey = lambda x: (
    jax.random.key_data(x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    else x
  )
  leaves = jax.tree.leaves(args)
  return [unkey(x) for x in leaves if isinstance(x, jax.Array)]


class MultiLawTest(parameterized.TestCase):
  @parameterized.product(case=list(EVERY_MODE), mode=list(models.MODES))
  def test_equals_each_loss_alone(self, case, mode):
    self._check(*EVERY_MODE[case], models.MODES[mode])

  @parameterized.product(case=list(FILTERED))
  def test_filters(self, case):
    self._check(*FILTERED[case], models.MODES['default'])

  @parameterized.product(case=list(FILTERED), mode=['no_updates', 'tree'])
  def test_filters_in_other_modes_equal_default(self, case, mode):
    f, make, argnums = FILTERED[case]
    args, reference = make(), make()
    expected = nnx_ext.value_and_grad_multi(
      f, argnums=argnums, **models.MODES['default']
    )(*reference)
    actual = nnx_ext.value_and_grad_multi(
      f, argnums=argnums, **models.MODES[mode]
    )(*args)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
    chex.assert_trees_all_close(_state(args), _state(reference))

  def _check(self, f, make, argnums, mode):
    args = make()
    losses, grads = nnx_ext.value_and_grad_multi(f, argnums=argnums, **mode)(
      *args
    )
    self.assertIs(type(losses), type(grads))
    losses, grads = _by_key(losses), _by_key(grads)
    for key, entry in _entries(argnums, losses).items():
      reference = make()
      value, grad = nnx.value_and_grad(_alone(f, key), argnums=entry, **mode)(
        *reference
      )
      own = grads[key]
      chex.assert_trees_all_close(losses[key], value, rtol=1e-6)
      chex.assert_trees_all_close(own, grad, rtol=1e-5, atol=1e-7)
      self.assertEqual(jax.tree.structure(own), jax.tree.structure(grad))
      self.assertIs(type(own), type(grad))
      chex.assert_trees_all_close(_state(args), _state(reference))
    only = nnx_ext.grad_multi(f, argnums=argnums, **mode)(*make())
    chex.assert_trees_all_close(_by_key(only), grads, rtol=1e-6)
