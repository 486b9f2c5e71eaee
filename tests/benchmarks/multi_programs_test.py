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
"""The ways of a program of several losses do the same work."""

import typing as tp

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from flax import nnx

from benchmarks import multi_programs as programs
from benchmarks import steps
from tests import compiler

EACH = 'nnx_ext', 'naive', 'vjp', 'vjp, vmap', 'jacrev'
SUM = 'nnx_ext, sum', 'naive, sum', 'sum of losses'
TINY = dict(width=8, size=4)

# Each with what it's called with, and the ways that are right for it.
PROGRAMS = {
  'separate': (programs.separate, TINY, EACH, SUM),
  'heads': (programs.heads, TINY, EACH, SUM),
  # Summed, the last loss would train the first head.
  'leak': (programs.heads, dict(leak=True, **TINY), EACH, SUM[:2]),
  'scanned': (programs.scanned, dict(depth=2, **TINY), EACH, SUM),
  # The naive ways draw other masks for each loss.
  'dropout': (
    programs.heads,
    dict(depth=2, dropout=0.5, **TINY),
    ('nnx_ext', 'vjp', 'vjp, vmap', 'jacrev'),
    ('nnx_ext, sum', 'sum of losses'),
  ),
  # It compiles slowly: ``jacrev`` stands for the other pullbacks, too.
  'transformer with remat': (
    programs.transformer,
    dict(depth=2, length=4, remat=True, **TINY),
    ('nnx_ext', 'naive', 'jacrev'),
    ('nnx_ext, sum', 'sum of losses'),
  ),
}


def _flat(states: tp.Any) -> dict:
  """The leaves of states by path, those of several under their places."""
  if isinstance(states, dict):
    return {key: _flat(state) for key, state in states.items()}
  if isinstance(states, tuple):
    return {i: _flat(state) for i, state in enumerate(states)}
  return {path: leaf[...] for path, leaf in nnx.to_flat_state(states)}


def _outcomes(
  program: programs.Program, names: tp.Iterable[str]
) -> tuple[dict[str, tuple], dict]:
  """What each way returns and leaves, and what one forward leaves.

  All are compiled at once, which takes half the time.
  """
  graphdef, state = nnx.split(program.arguments())
  ways = {name: program.function(name) for name in names}

  def fresh(state):
    # Other variables for each way, as some write into them.
    return nnx.merge(graphdef, jax.tree.map(lambda x: x, state))

  @jax.jit
  def run(state):
    found = {}
    for name, way in ways.items():
      arguments = fresh(state)
      values, grads = way(*arguments)
      found[name] = values, _flat(grads), _data(arguments)
    arguments = fresh(state)
    program.losses(*arguments)
    return found, _data(arguments)

  return run(state)


def _data(arguments: tuple) -> list[jax.Array]:
  """What modules hold; of random keys what they are made of."""
  return [
    jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    else leaf
    for leaf in jax.tree.leaves(nnx.state(arguments))
  ]


class WaysTest(parameterized.TestCase):
  @parameterized.parameters(*PROGRAMS)
  def test_all_give_the_same(self, name):
    make, sizes, each, summed = PROGRAMS[name]
    program = make(**sizes)
    found, after = _outcomes(program, (*each, *summed))
    moved = any(
      jnp.any(a != b) for a, b in zip(_data(program.arguments()), after)
    )
    self.assertEqual(moved, name == 'dropout')
    for ways in (each, summed):
      ours = found[ways[0]]
      values, grads, _ = ours
      self.assertEqual(set(values), set(program.argnums))
      norms = [jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(grads)]
      self.assertGreater(max(norms), 1e-2)
      for way in ways:
        with self.subTest(way):
          chex.assert_trees_all_close(found[way], ours, rtol=1e-4, atol=1e-6)
          # Each moves the state as one forward does.
          chex.assert_trees_all_equal(found[way][2], after)

  def test_leak_is_not_the_sum_of_losses(self):
    program = programs.heads(**TINY, leak=True)
    found, _ = _outcomes(program, ('nnx_ext, sum', 'sum of losses'))
    (_, ours, _), (_, theirs, _) = found.values()
    other = {
      path[0]
      for path in ours
      if not jnp.allclose(ours[path], theirs[path], rtol=1e-4, atol=1e-6)
    }
    self.assertEqual(other, {'h_0'})


class LimitTest(parameterized.TestCase):
  @parameterized.parameters('nnx_ext', 'nnx_ext, sum')
  def test_is_close_to_the_count(self, name):
    program = programs.heads(2, 64, 64, leak=True)
    limit = program.sum_limit if name in SUM else program.limit
    step = steps.jitted(program.function(name), program.arguments())
    flops = compiler.figures(step).flops
    self.assertLessEqual(limit, flops)
    self.assertLessEqual(flops, 1.2 * limit)


class StepsTest(parameterized.TestCase):
  def test_what_is_carried_is_given_to_the_next_call(self):
    def step(total, x):
      return total + x, 2 * total

    arguments = jnp.zeros(()), jnp.ones(())
    prepared = steps.Jitted(step, arguments, carried=1).prepare()
    self.assertEqual([float(*prepared.run()) for _ in range(3)], [0, 2, 4])
    self.assertEqual(prepared.figures().traces, 1)
    self.assertEqual(float(arguments[0]), 0)  # A copy was donated.

  def test_counts_traces(self):
    # The second call is given a float.
    step = steps.Jitted(lambda x: (x + 1.0,), (jnp.int32(0),), carried=1)
    prepared = step.prepare(repeat=2)
    traces = []
    for _ in range(3):
      prepared.run()
      traces.append(prepared.figures().traces)
    self.assertEqual(traces, [1, 2, 2])

  @parameterized.parameters(0, 1, 2)
  def test_counts_loops(self, count):
    def step(x):
      for _ in range(count):
        x = jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x) + i, x)
      return x

    figures = steps.Jitted(step, (jnp.zeros(()),)).prepare().figures()
    self.assertEqual(figures.loops, count)

  def test_what_is_called_on_modules_returns_their_state(self):
    def call(model):
      model.kernel[...] += 1

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    kernel = jnp.copy(model.kernel[...])
    step = steps.jitted(call, (model,))
    for _ in range(2):  # Nothing is carried.
      _, after = step.prepare().run()
      chex.assert_trees_all_close(after[0]['kernel'][...], kernel + 1)
    chex.assert_trees_all_equal(model.kernel[...], kernel)

    prepared = steps.Eager(call, (model,)).prepare()
    prepared.run()
    chex.assert_trees_all_close(model.kernel[...], kernel + 1)
    self.assertIsNone(prepared.figures)


if __name__ == '__main__':
  absltest.main()
