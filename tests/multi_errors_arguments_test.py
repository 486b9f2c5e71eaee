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
"""Errors of ``f`` and its arguments: the words a user needs."""

import typing as tp

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

from tests import models
from tests.errors import (
  ACTOR,
  API,
  APIS,
  CRITIC,
  DIFF,
  PARAMS,
  WAYS,
  Affine,
  ErrorsTestCase,
  Moving,
  as_tuple,
  call,
  cases,
  every_api,
  every_mode,
  every_way,
  losses,
  nets,
  returning,
  together,
)


class Statistic(nnx.Module):
  """Only a statistic, no parameter."""

  def __init__(self):
    self.mean = nnx.BatchStat(jnp.ones(()))


class Empty(nnx.Module):
  pass


class Deep(nnx.Module):
  """More Variables than a message lists."""

  def __init__(self):
    self.layers = nnx.List([Affine() for _ in range(6)])
    self.readout = Affine()


FILTERS: dict[str, tuple[tp.Any, str]] = {
  'type': (nnx.BatchStat, 'BatchStat'),
  'path': (nnx.PathContains('kernle'), "PathContains('kernle'"),
  'tag': ('params', "'params'"),
  'nothing': (nnx.Nothing, 'Nothing'),
  'all': (nnx.All(nnx.Param, nnx.BatchStat), 'BatchStat'),
  'not': (nnx.Not(...), 'Not('),
  'sequence': ((nnx.BatchStat, nnx.Cache), 'BatchStat'),
  'function': (lambda path, value: False, '<lambda>'),
  'false': (False, 'False'),
}


def with_first(first, actor, critic, x):
  """Losses of arguments of which the first is the one to be refused."""
  return losses(actor, critic, x)


class LeavesTest(ErrorsTestCase):
  """Which leaves ``argnums`` selects."""

  @cases(FILTERS, WAYS)
  def test_filter_matches_nothing(self, case, api, mode):
    filter, name = FILTERS[case]
    for options in {}, {'allow_unused': True}:
      with self.refused(
        ValueError,
        api,
        name,
        'matches nothing',
        ACTOR,
        '2 Param',
        "'bias', 'kernel'",
        'nnx.DiffState(0, nnx.Param)',
      ):
        argnums = {'policy': DIFF(0, filter), 'value': 1}
        call(api, mode, losses, argnums=argnums, **options)

  @every_mode
  def test_matches_nothing_near_name(self, mode):
    model = Deep()
    with self.refused(
      ValueError, API, "PathContains('raedout'", 'matches nothing', 'readout'
    ):
      call(
        API,
        mode,
        with_first,
        model,
        *nets(),
        argnums=DIFF(0, nnx.PathContains('raedout')),
      )

  @every_mode
  def test_matches_nothing_suggests_what_there_is(self, mode):
    # It holds no Param, so to suggest nnx.Param would be of no use.
    with self.refused(
      ValueError,
      API,
      'Param matches nothing',
      'argument 0 (`first`)',
      "1 BatchStat, at 'mean'",
      'nnx.DiffState(0, nnx.BatchStat)',
    ):
      call(
        API, mode, with_first, Statistic(), *nets(), argnums=DIFF(0, nnx.Param)
      )

  def test_bare_argnum_matches_nothing(self):
    with self.refused(
      ValueError, API, 'Param', 'argument 0 (`first`)', "1 BatchStat, at 'mean'"
    ):
      call(API, 'default', with_first, Statistic(), *nets(), argnums=0)

  @parameterized.product(WAYS, value=[None, (), {}, {'a': None}, Empty])
  def test_no_leaf(self, api, mode, value):
    value = Empty() if value is Empty else value
    with self.refused(
      ValueError, api, 'argument 0 (`first`)', 'no leaf', type(value).__name__
    ):
      argnums = {'policy': 0, 'value': 2}
      call(api, mode, with_first, value, *nets(), argnums=argnums)

  @parameterized.product(
    WAYS,
    value=[
      ('text', 'str'),
      ({'a': 1.0, 'b': 'text'}, "'b' of argument 0 (`first`) (str)"),
      (jnp.tanh, 'Function'),
      (np.array(['text']), 'ndarray'),
    ],
  )
  def test_leaf_that_is_no_array(self, api, mode, value):
    # Neither a filter nor allow_int=True helps here.
    value, words = value
    for options in {}, {'allow_int': True}:
      with self.refused(
        TypeError, api, 'argument 0 (`first`)', words, without='allow_int=True'
      ):
        argnums = {'policy': 0, 'value': 2}
        call(api, mode, with_first, value, *nets(), argnums=argnums, **options)

  @parameterized.product(api=list(APIS), mode=['no_updates', 'tree'])
  def test_integer_leaves_of_a_module(self, api, mode):
    actor, critic, x = (
      nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
      Affine(),
      jnp.ones((3, 2)),
    )
    with self.refused(
      TypeError,
      api,
      f"'rngs/count' of {ACTOR} (uint32)",
      f"'rngs/key' of {ACTOR} (key<fry>)",
      'nnx.DiffState(argnum, nnx.Param)',
      'allow_int=True',
    ):
      call(api, mode, losses, actor, critic, x)

  @every_mode
  def test_suggested_filter_works(self, mode):
    _, grads = call(API, mode, losses, *nets(Moving), argnums=PARAMS)
    self.assertIsInstance(grads['policy'], nnx.State)

  @every_way
  def test_integer_argument(self, api, mode):
    def f(actor, critic, x, steps):
      return losses(actor, critic, x)

    argnums = {'policy': 3, 'value': 1}
    steps = jnp.ones(2, jnp.int32)
    with self.refused(
      TypeError, api, 'argument 3 (`steps`) (int32)', 'allow_int=True'
    ):
      call(api, mode, f, *nets(), steps, argnums=argnums)

  @every_mode
  def test_allow_int(self, mode):
    def f(actor, critic, x, steps):
      return losses(actor, critic, x)

    argnums = {'policy': (0, 3), 'value': 1}
    steps = {'count': jnp.ones(2, jnp.int32), 'key': jax.random.key(0)}
    options = {'argnums': argnums, 'allow_int': True}
    grads = call('grad_multi', mode, f, *nets(), steps, **options)
    for leaf in jax.tree.leaves(grads['policy'][1]):
      self.assertEqual(leaf.dtype, jax.dtypes.float0)


def _outside(actor, critic, x):
  policy, value = jnp.mean(actor(x)), jnp.mean(critic(x))
  return lambda actor, critic, x: {'policy': policy, 'value': value}


# What makes, from the arguments, an f whose policy loss leaves the actor out.
UNREACHABLE: dict[str, tp.Callable] = {
  'forward_outside': _outside,
  'stop_gradient': lambda *_: returning(
    lambda out: {**out, 'policy': jax.lax.stop_gradient(out['policy'])}
  ),
  'constant': lambda *_: returning(lambda out: {**out, 'policy': 0.5}),
  'other_module': lambda *_: returning(
    lambda out: {**out, 'policy': out['value']}
  ),
  'rounded_away': lambda *_: returning(
    lambda out: {**out, 'policy': (out['policy'] > 0).astype(jnp.float32)}
  ),
}

# Zero everywhere, but no mistake.
REACHED: dict[str, tp.Callable] = {
  'dead_relu': lambda loss: jax.nn.relu(loss - 100.0),
  'times_zero': lambda loss: 0.0 * loss,
  'clipped': lambda loss: jnp.clip(loss, 100.0, 200.0),
}


class ReachTest(ErrorsTestCase):
  @cases(UNREACHABLE, WAYS)
  def test_unreachable(self, case, api, mode):
    args = nets()
    f = UNREACHABLE[case](*args)
    with self.refused(
      ValueError, api, "loss 'policy'", ACTOR, 'outside', 'allow_unused=True'
    ):
      call(api, mode, f, *args)

  @every_way
  def test_forward_outside_passed_as_arguments(self, api, mode):
    def f(actor, critic, policy, value):
      return {'policy': policy, 'value': value}

    actor, critic, x = nets()
    with self.refused(
      ValueError, api, "loss 'policy'", ACTOR, 'outside', 'allow_unused=True'
    ):
      call(api, mode, f, actor, critic, *as_tuple(losses(actor, critic, x)))

  @every_way
  def test_one_of_several_arguments(self, api, mode):
    with self.refused(
      ValueError, api, "loss 'value'", ACTOR, 'allow_unused=True'
    ):
      call(api, mode, losses, argnums={'policy': 0, 'value': (1, 0)})

  @every_way
  def test_by_position(self, api, mode):
    with self.refused(ValueError, api, 'loss 1', ACTOR):
      call(api, mode, returning(as_tuple), argnums=0)

  @every_way
  def test_names_the_filter(self, api, mode):
    model = nnx.Dict(actor=Affine(), critic=Affine())
    with self.refused(
      ValueError,
      api,
      "loss 'value'",
      'argument 0 (`nets`)',
      "PathContains('actor'",
    ):
      argnums = DIFF(0, nnx.PathContains('actor'))
      call(api, mode, together, model, nets()[2], argnums=argnums)

  @cases(REACHED, mode=list(models.MODES))
  def test_zero_is_no_mistake(self, case, mode):
    f = returning(lambda out: {**out, 'policy': REACHED[case](out['policy'])})
    grads = call('grad_multi', mode, f)
    chex.assert_trees_all_equal(
      jax.tree.leaves(grads['policy']), [jnp.zeros(())] * 2
    )

  @cases(UNREACHABLE, mode=list(models.MODES))
  def test_allow_unused(self, case, mode):
    args = nets()
    f = UNREACHABLE[case](*args)
    grads = call('grad_multi', mode, f, *args, allow_unused=True)
    expected = nnx.grad(
      lambda actor, x: jnp.mean(actor(x)), **models.MODES[mode]
    )(args[0], args[2])
    chex.assert_trees_all_equal(
      grads['policy'], jax.tree.map(jnp.zeros_like, expected)
    )
    self.assertEqual(
      jax.tree.structure(grads['policy']), jax.tree.structure(expected)
    )


class Owner(Affine):
  def __init__(self, body):
    super().__init__()
    self.body = body

  def __call__(self, x):
    return super().__call__(self.body(x))


def _shared():
  body = Affine()
  return Owner(body), Owner(body), jnp.ones((3, 2))


class SharedTest(ErrorsTestCase):
  @every_api
  def test_tree_mode(self, api):
    with self.refused(
      ValueError, api, "'body/bias'", ACTOR, CRITIC, 'graph=True'
    ):
      call(api, 'tree', losses, *_shared())

  @every_api
  def test_tree_mode_with_one_argument(self, api):
    actor, critic, x = _shared()
    with self.refused(
      ValueError,
      api,
      "'actor/body/bias'",
      "'critic/body/bias'",
      'argument 0 (`nets`)',
      'graph=True',
    ):
      both = {'actor': actor, 'critic': critic}
      call(api, 'tree', together, both, x, argnums=0)

  @every_api
  def test_tree_mode_with_bare_variable(self, api):
    scale = nnx.Param(jnp.ones(()))
    with self.refused(
      ValueError, api, 'Param', 'argument 0 (`a`)', 'argument 1 (`b`)'
    ):
      call(api, 'tree', lambda a, b: {'l': a * b}, scale, scale, argnums=0)

  @parameterized.product(api=list(APIS), mode=['default', 'no_updates'])
  def test_reduce(self, api, mode):
    with self.refused(
      ValueError,
      api,
      "reduce='sum'",
      "'body/bias'",
      ACTOR,
      CRITIC,
      'nnx.DiffState(1, ',
      without='nnx.Not(...)',  # which matches nothing
    ):
      call(api, mode, losses, *_shared(), reduce='sum')

  @parameterized.product(mode=['default', 'no_updates'])
  def test_suggestions_work(self, mode):
    # One argument of both, or the shared part left out of one.
    actor, critic, x = _shared()
    both = {'actor': actor, 'critic': critic}
    options = {'reduce': 'sum', 'argnums': 0}
    call(API, mode, together, both, x, **options)
    own = DIFF(1, nnx.All(nnx.Param, nnx.Not(nnx.PathContains('body'))))
    options['argnums'] = {'policy': 0, 'value': own}
    call(API, mode, losses, actor, critic, x, **options)

  @parameterized.product(api=list(APIS), reduce=['mean', 'Sum', ''])
  def test_wrong_reduce(self, api, reduce):
    with self.refused(
      ValueError, api, '`reduce`', 'None', "'sum'", repr(reduce)
    ):
      APIS[api](losses, reduce=reduce)

  @parameterized.product(api=list(APIS), reduce=[True, sum, 1])
  def test_wrong_type_of_reduce(self, api, reduce):
    with self.refused(
      TypeError, api, '`reduce`', 'None', "'sum'", repr(reduce)
    ):
      APIS[api](losses, reduce=reduce)


# What the aux is, its path in the aux, and its path in the call.
AUX_INPUTS: dict[str, tuple[tp.Callable, str, str]] = {
  'module': (lambda actor, critic: actor, "'bias'", ACTOR),
  'variable': (lambda actor, critic: critic.kernel, 'aux', CRITIC),
  'within_dict': (
    lambda actor, critic: {'seen': [critic.bias]},
    "'seen/0'",
    f"'bias' of {CRITIC}",
  ),
  'within_module': (
    lambda actor, critic: nnx.List([critic]),
    "'0/bias'",
    f"'bias' of {CRITIC}",
  ),
  'state': (lambda actor, critic: nnx.state(actor), "'bias'", ACTOR),
}

AUX_OUTPUTS: dict[str, tp.Callable] = {
  'value': lambda actor: actor.kernel[...],
  'clone': lambda actor: nnx.clone(actor),
  'new_variable': lambda actor: nnx.Intermediate(jnp.ones(2)),
  'text': lambda actor: 'seen',
}


class AuxTest(ErrorsTestCase):
  @cases(AUX_INPUTS, api=list(APIS), mode=['no_updates', 'tree'])
  def test_aux_that_is_an_input(self, case, api, mode):
    aux, path, source = AUX_INPUTS[case]

    def f(actor, critic, x):
      return losses(actor, critic, x), aux(actor, critic)

    with self.refused(
      ValueError, api, 'aux', path, source, 'variable[...]', 'nnx.clone'
    ):
      call(api, mode, f, has_aux=True)

  @cases(AUX_OUTPUTS, mode=list(models.MODES))
  def test_aux_that_is_no_input(self, case, mode):
    def f(actor, critic, x):
      return losses(actor, critic, x), AUX_OUTPUTS[case](actor)

    call(API, mode, f, has_aux=True)

  def test_default_mode_returns_the_input(self):
    def f(actor, critic, x):
      return losses(actor, critic, x), actor

    args = nets()
    _, aux = call('grad_multi', 'default', f, *args, has_aux=True)
    self.assertIs(aux, args[0])


class Held(nnx.Module):
  """A Variable held by reference, in path order before a plain one."""

  def __init__(self, **kind):
    self.held = nnx.Param(jnp.ones(2), **kind)
    self.plain = nnx.Param(jnp.ones(2))


class ReferencesTest(ErrorsTestCase):
  """Variables with ``ref=True`` or ``hijax=True``."""

  @parameterized.product(
    api=list(APIS), mode=list(models.MODES), kind=['ref', 'hijax']
  )
  def test_target(self, api, mode, kind):
    f = lambda model: {'a': jnp.sum(model.held * model.plain)}
    for argnums in 0, DIFF(0, nnx.PathContains('held')):
      with self.refused(
        TypeError,
        api,
        "'held' of argument 0 (`model`)",
        f'{kind}=True',
        f'nnx.with_vars(model, {kind}=False)',
      ):
        call(api, mode, f, Held(**{kind: True}), argnums=argnums)

  @parameterized.product(
    api=list(APIS), mode=list(models.MODES), kind=['ref', 'hijax']
  )
  def test_bare_target(self, api, mode, kind):
    f = lambda scale: {'a': jnp.sum(scale[...])}
    with self.refused(
      TypeError, api, 'argument 0 (`scale`)', f'{kind}=True', 'nnx.with_vars'
    ):
      scale = nnx.Param(jnp.ones(2), **{kind: True})
      call(api, mode, f, scale, argnums=0)

  @parameterized.product(mode=list(models.MODES), kind=['ref', 'hijax'])
  def test_suggestion_works(self, mode, kind):
    f = lambda model: {'a': jnp.sum(model.held * model.plain)}
    model = nnx.with_vars(Held(**{kind: True}), **{kind: False})
    call(API, mode, f, model, argnums=0)

  @parameterized.product(WAYS, kind=['ref', 'hijax'])
  def test_beside_the_target(self, api, mode, kind):
    # What f writes while it runs could not be taken back after an error.
    f = lambda model: {'a': jnp.sum(model.plain[...])}
    with self.refused(
      TypeError, api, "'held' of argument 0 (`model`)", f'{kind}=True'
    ):
      argnums = DIFF(0, nnx.PathContains('plain'))
      call(api, mode, f, Held(**{kind: True}), argnums=argnums)

  @parameterized.product(WAYS, kind=['ref', 'hijax'])
  def test_keyword_argument(self, api, mode, kind):
    def f(x, *, model):
      return {'a': jnp.sum(x * model.plain)}

    model = Held(**{kind: True})
    step = APIS[api](f, **models.MODES[mode])
    with self.refused(
      TypeError, api, "'held' of", '`model`', f'{kind}=True', 'nnx.with_vars'
    ):
      step(jnp.ones(2), model=model)

  @every_mode
  def test_a_reference_does_not_move(self, mode):
    count = nnx.BatchStat(jnp.zeros(()), ref=True)

    def f(scale, count):
      count[...] += 1.0
      return {'a': scale * 1.0}

    with self.refused(TypeError, API, 'argument 1 (`count`)', 'ref=True'):
      call(API, mode, f, jnp.ones(()), count, argnums=0)
    self.assertEqual(count[...], 0.0)
