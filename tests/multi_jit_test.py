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
"""Several losses under jit and vmap."""

import functools

import jax
import numpy as np
from absl.testing import parameterized
from flax import nnx

from tests import models
from tests.transforms import (
  EACH_MODE,
  SEEDS,
  LawTestCase,
  arrays,
  expected_law,
  inputs,
  multi,
  naive_multi,
  on_state,
  split_for,
  stack_trees,
  stateful,
  stateless,
)


class JitTest(LawTestCase):
  def test_state_moves(self):
    before, (_, after) = arrays(stateful()), expected_law()
    moved = sum(not np.array_equal(a, b) for a, b in zip(before, after))
    self.assertEqual(moved, 3)  # rng count, mean and variance

  @parameterized.parameters(
    ('default', 'tree'), ('no_updates', 'default'), ('tree', 'no_updates')
  )
  def test_jit_of_another_mode(self, inner, outer):
    modules = stateful()
    step = nnx.jit(multi(inner), **models.MODES[outer])
    self.assert_law(step(*modules, inputs()), modules)

  @EACH_MODE
  def test_one_run_a_call(self, mode):
    runs = []

    def f(*args):
      runs.append(None)
      return models.leaking_losses(*args)

    for i in range(3):
      modules = stateful()
      self.assert_law(multi(mode, f)(*modules, inputs()), modules)
      self.assertLen(runs, i + 1)

  @parameterized.parameters('no_updates', 'tree')
  def test_jax_jit_over_modules(self, mode):
    @jax.jit
    def step(actor, critic, x):
      return multi(mode)(actor, critic, x), (actor, critic)

    result, modules = step(*stateful(), inputs())
    self.assert_law(result, modules)

  @EACH_MODE
  def test_modules_made_inside(self, mode):
    @jax.jit
    def step(x):
      actor, critic = stateful()
      return multi(mode)(actor, critic, x), nnx.state((actor, critic))

    result, state = step(inputs())
    self.assert_law(result, state)

  @EACH_MODE
  def test_no_leak(self, mode):
    # Nothing that is compiled is kept while leaks are checked, so that the
    # losses are slow unless jitted.
    f = nnx.jit(models.leaking_losses, **models.MODES[mode])
    modules = stateful()
    with jax.checking_leaks():
      result = multi(mode, f)(*modules, inputs())
    self.assert_law(result, modules)

  @EACH_MODE
  def test_no_leak_under_jit(self, mode):
    modules = stateful()
    with jax.checking_leaks():
      step = nnx.jit(multi(mode), **models.MODES[mode])
      result = step(*modules, inputs())
    self.assert_law(result, modules)

  @EACH_MODE
  def test_one_trace_with_donated_modules(self, mode):
    runs = []

    def f(*args):
      runs.append(None)
      return models.leaking_losses(*args)

    modules = stateful()
    step = nnx.jit(multi(mode, f), donate_argnums=(0, 1), **models.MODES[mode])
    donated = jax.tree.leaves(nnx.state(modules, nnx.Param))
    first = step(*modules, inputs())
    self.assertTrue(all(x.is_deleted() for x in donated))
    self.assert_law(first, modules)
    for _ in range(99):
      step(*modules, inputs())
    self.assertLen(runs, 1)
    self.assertEqual(
      jax.tree.leaves(nnx.state(modules[0], nnx.RngCount)), [100]
    )
    self.assert_close(
      first, expected_law()[0]
    )  # not donated with what followed

  @EACH_MODE
  def test_donated_state(self, mode):
    graphdef, state = split_for(stateful(), mode)
    step = jax.jit(on_state(multi(mode), graphdef), donate_argnums=0)
    first, after = step(state, inputs())
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(state)))
    self.assert_law(first, nnx.merge(graphdef, nnx.clone(after)))
    step(after, inputs())
    self.assert_close(first, expected_law()[0])


@functools.cache
def _expected_members():
  """The oracle of three pairs, stacked."""
  results, states = [], []
  for seed in SEEDS:
    modules = stateful(seed)
    results.append(naive_multi()(*modules, inputs()))
    states.append(arrays(modules))
  return stack_trees(results), [np.stack(xs) for xs in zip(*states)]


def _examples():
  return inputs()[:3, None]


@functools.cache
def _expected_examples():
  """The oracle of ``stateless()`` on each of three examples, stacked."""
  step = nnx.jit(naive_multi())
  return stack_trees([step(*stateless(), x) for x in _examples()]), arrays(
    stateless()
  )


def _collective_losses(*args):
  return jax.lax.pmean(models.leaking_losses(*args), 'example')


def _over_examples(step, mode='default', **options):
  graphdef, state = split_for(stateless(), mode)
  step = on_state(step, graphdef)
  return jax.jit(jax.vmap(step, (None, 0), (0, None), **options))(
    state, _examples()
  )


@functools.cache
def _expected_collective():
  result, _ = _over_examples(
    naive_multi(_collective_losses), axis_name='example'
  )
  return result, arrays(stateless())


class VmapTest(LawTestCase):
  def _members(self, mode):
    graphdefs, states = zip(*(split_for(stateful(s), mode) for s in SEEDS))
    return graphdefs[0], stack_trees(states)

  @EACH_MODE
  def test_jax_vmap_over_members(self, mode):
    graphdef, state = self._members(mode)
    step = jax.vmap(on_state(multi(mode), graphdef), in_axes=(0, None))
    result, state = jax.jit(step)(state, inputs())
    self.assert_law(result, nnx.merge(graphdef, state), *_expected_members())

  @EACH_MODE
  def test_nnx_vmap_over_members(self, mode):
    modules = nnx.merge(*self._members(mode))
    step = nnx.vmap(multi(mode), in_axes=(0, 0, None), **models.MODES[mode])
    result = nnx.jit(step, **models.MODES[mode])(*modules, inputs())
    self.assert_law(result, modules, *_expected_members())

  @EACH_MODE
  def test_jax_vmap_over_examples(self, mode):
    self.assert_law(*_over_examples(multi(mode), mode), *_expected_examples())

  @EACH_MODE
  def test_nnx_vmap_over_examples(self, mode):
    modules = stateless()
    step = nnx.vmap(multi(mode), in_axes=(None, None, 0), **models.MODES[mode])
    result = nnx.jit(step, **models.MODES[mode])(*modules, _examples())
    self.assert_law(result, modules, *_expected_examples())

  @EACH_MODE
  def test_collective_over_examples(self, mode):
    step = multi(mode, _collective_losses)
    result, state = _over_examples(step, mode, axis_name='example')
    self.assert_law(result, state, *_expected_collective())
