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
"""In no mode does anything move when an error is raised, however late."""

import functools
import typing as tp

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import errors, nnx

from tests import models
from tests.errors import (
  ACTOR,
  API,
  APIS,
  PARAMS,
  ErrorsTestCase,
  Moving,
  Snapshot,
  as_tuple,
  call,
  cases,
  every_mode,
  losses,
  nets,
)


def moving(actor, critic, x):
  """Losses that move statistics, rng counts, attributes and structure."""
  actor.inputs = nnx.Intermediate((x,))  # as `sow` does
  actor.extra = nnx.Variable(jnp.ones(()))
  critic.note = 'seen'
  return losses(actor, critic, x)


def then(change: tp.Callable) -> tp.Callable:
  return lambda actor, critic, x: change(moving(actor, critic, x))


def _raise(*_):
  raise RuntimeError('my own')


@jax.custom_vjp
def _no_backward(x):
  return x


_no_backward.defvjp(lambda x: (x, None), _raise)

# Found only after f has moved its arguments: f, options, error, words.
LATE: dict[str, tuple[tp.Callable, dict, type[Exception], tuple]] = {
  'misspelt': (
    moving,
    {'argnums': {'policy': PARAMS['policy'], 'valeu': PARAMS['value']}},
    ValueError,
    ("'valeu'", "'value'"),
  ),
  'wrong_number': (
    then(as_tuple),
    {'argnums': (PARAMS['policy'],)},
    ValueError,
    ('2 losses',),
  ),
  'wrong_weights': (
    moving,
    {'weights': {'policy': 1.0}},
    ValueError,
    ('`weights`', "'value'"),
  ),
  'unreachable': (
    then(lambda out: {**out, 'policy': 0.5}),
    {},
    ValueError,
    ("loss 'policy'", ACTOR),
  ),
  'non_scalar': (
    then(lambda out: {**out, 'value': jnp.ones(3)}),
    {},
    ValueError,
    ("loss 'value'", '(3,)'),
  ),
  'lone_scalar': (then(lambda out: out['value']), {}, TypeError, ('scalar',)),
  'no_aux': (moving, {'has_aux': True}, ValueError, ('(losses, aux)',)),
  'own': (then(_raise), {}, RuntimeError, ('my own',)),
  'backward': (
    then(lambda out: {**out, 'value': _no_backward(out['value'])}),
    {},
    RuntimeError,
    ('my own',),
  ),
}


class NothingMovesTest(ErrorsTestCase):
  """However late an error is, and then the same objects still work."""

  def tearDown(self):
    super().tearDown()
    # No public name tells whether a context was left open.
    self.assertEmpty(nnx.graphlib.GRAPH_CONTEXT.update_context_stacks)

  def refuse(self, case, api, mode, args):
    f, options, error, words = LATE[case]
    if (case, api) == ('backward', 'multi_plan'):  # a plan runs no backward
      return
    before = Snapshot(*args[:2])
    by = '' if error is RuntimeError else api
    with self.refused(error, by, *words):
      call(api, mode, f, *args, **{'argnums': PARAMS, **options})
    before.check(self)

  def check_works(self, run, mode, args):
    """``run`` now gives what it gives to objects that met no error."""
    fresh = nets(Moving)
    step = lambda *args: call(API, mode, moving, *args, argnums=PARAMS)
    expected = step(*fresh)
    chex.assert_trees_all_close(
      run(step)(*args), expected, rtol=1e-4, atol=1e-6
    )
    self.assertEqual(nnx.graphdef(args[:2]), nnx.graphdef(fresh[:2]))
    for own, other in zip(
      jax.tree.leaves(nnx.to_pure_dict(nnx.state(args[:2]))),
      jax.tree.leaves(nnx.to_pure_dict(nnx.state(fresh[:2]))),
    ):
      if jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
        own, other = jax.random.key_data(own), jax.random.key_data(other)
      chex.assert_trees_all_close(own, other, rtol=1e-4, atol=1e-6)

  @cases(LATE, mode=list(models.MODES))
  def test_eager(self, case, mode):
    args = nets(Moving)
    for api in APIS:
      self.refuse(case, api, mode, args)
    self.check_works(lambda step: step, mode, args)

  @every_mode
  def test_inside_jit(self, mode):
    def after_errors(step):
      def stepping(*args):
        for case in LATE:
          self.refuse(case, API, mode, args)
        return step(*args)

      return nnx.jit(stepping, **models.MODES[mode])

    self.check_works(after_errors, mode, nets(Moving))

  @every_mode
  def test_through_jit(self, mode):
    jit = functools.partial(nnx.jit, **models.MODES[mode])
    args = nets(Moving)
    before = Snapshot(*args[:2])
    for f, options, error, words in LATE.values():
      step = functools.partial(
        call, API, mode, f, **{'argnums': PARAMS, **options}
      )
      by = '' if error is RuntimeError else API
      with self.refused(error, by, *words):
        jit(step)(*args)
      before.check(self)
    self.check_works(jit, mode, args)

  @every_mode
  def test_inside_another_call(self, mode):
    def f(actor, critic, x):
      for case in LATE:
        self.refuse(case, API, mode, (actor, critic, x))
      return moving(actor, critic, x)

    args, fresh = nets(Moving), nets(Moving)
    actual = call(API, mode, f, *args, argnums=PARAMS)
    expected = call(API, mode, moving, *fresh, argnums=PARAMS)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
    self.assertEqual(nnx.graphdef(args[:2]), nnx.graphdef(fresh[:2]))

  @parameterized.product(mode=['no_updates', 'tree'])
  def test_aux_that_is_an_input(self, mode):
    args = nets(Moving)
    before = Snapshot(*args[:2])
    with self.refused(ValueError, API, 'aux', ACTOR):
      call(
        API,
        mode,
        lambda actor, critic, x: (moving(actor, critic, x), actor),
        *args,
        argnums=PARAMS,
        has_aux=True,
      )
    before.check(self)
    self.check_works(lambda step: step, mode, args)

  @parameterized.product(mode=['default', 'no_updates'])
  def test_shared_with_reduce(self, mode):
    actor, _, x = nets(Moving)
    before = Snapshot(actor)
    with self.refused(ValueError, API, "reduce='sum'"):
      call(API, mode, moving, actor, actor, x, argnums=PARAMS, reduce='sum')
    before.check(self)

  @every_mode
  def test_captured_after_moving(self, mode):
    args, captured = nets(Moving), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    before = Snapshot(*args[:2], captured)

    def f(actor, critic, x):
      return moving(actor, critic, captured(x))

    with self.refused(errors.TraceContextError, API, 'captured'):
      call(API, mode, f, *args, argnums=PARAMS)
    before.check(self)

  @every_mode
  def test_plan_moves_nothing(self, mode):
    args = nets(Moving)
    before = Snapshot(*args[:2])
    call('multi_plan', mode, moving, *args, argnums=PARAMS)
    before.check(self)
    self.check_works(lambda step: step, mode, args)
