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
"""The Multi law on random programs: random losses, leaks, routes, weights.

A program is a few matrices in random roles: each loss reads a random set of
them, some only under ``stop_gradient``, through hidden values that losses
share. The oracle is ``jax.grad`` of one loss of the pure function.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_ext
from tests import models

_WIDTH = 3


class Bank(nnx.Module):
  """A module of a few square Params."""

  def __init__(self, size: int, seed: int):
    keys = jax.random.split(jax.random.key(seed), size)
    self.weights = nnx.List(
      [nnx.Param(jax.random.normal(k, (_WIDTH, _WIDTH))) for k in keys]
    )


@dataclasses.dataclass(frozen=True)
class Program:
  sizes: tuple[int, ...]
  """Params in each argument."""
  reads: tuple[tuple[tuple[int, int, bool], ...], ...]
  """For each loss, (argument, Param, whether under stop_gradient)."""
  routes: tuple[tuple[tuple[int, int], ...], ...]
  """For each loss, the (argument, Param) that it is differentiated by."""
  weights: tuple[float, ...] | None
  mode: str

  def banks(self):
    return [Bank(size, seed) for seed, size in enumerate(self.sizes)]

  def losses(self, *banks):
    shared = jnp.eye(_WIDTH)
    losses = {}
    for k, reads in enumerate(self.reads):
      hidden = jnp.ones((_WIDTH, _WIDTH)) * (k + 1)
      for argument, i, stopped in reads:
        weight = banks[argument].weights[i][...]
        if stopped:
          weight = jax.lax.stop_gradient(weight)
        hidden = jnp.tanh(hidden @ weight + 0.1 * shared)
        shared = jnp.sin(shared + hidden) if k == 0 else shared
      losses[f'loss{k}'] = jnp.mean(hidden**2 * (k + 1.0))
    return losses

  def argnums(self):
    return {
      f'loss{k}': self._entry(route) for k, route in enumerate(self.routes)
    }

  def _entry(self, route):
    arguments = sorted({argument for argument, _ in route})
    return [
      nnx.DiffState(a, _paths({i for b, i in route if a == b}))
      for a in arguments
    ]

  def reached(self, k):
    """What loss ``k`` depends on: its own reads, and the first loss's."""
    return {
      (argument, i)
      for reads in (self.reads[0], self.reads[k])
      for argument, i, stopped in reads
      if not stopped
    }

  def weight(self, k):
    return 1.0 if self.weights is None else self.weights[k]

  def oracle(self):
    """For each loss, its gradient by every Param, weighted."""
    banks = self.banks()
    values = [[w[...] for w in bank.weights] for bank in banks]

    def loss(values, k):
      rebuilt = self.banks()
      for bank, own in zip(rebuilt, values):
        for weight, value in zip(bank.weights, own):
          weight[...] = value
      return self.weight(k) * self.losses(*rebuilt)[f'loss{k}']

    return [jax.grad(loss)(values, k) for k in range(len(self.reads))]


def _paths(indices):
  return lambda path, _: path[-1] in indices


@st.composite
def programs(draw):
  sizes = tuple(
    draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)),
  )
  params = [(a, i) for a, size in enumerate(sizes) for i in range(size)]
  count = draw(st.integers(1, 4))
  some = st.lists(st.sampled_from(params), min_size=1, max_size=5, unique=True)
  reads = tuple(
    tuple((a, i, draw(st.booleans())) for a, i in draw(some))
    for _ in range(count)
  )
  weights = st.tuples(*[st.floats(-2.0, 2.0, width=32)] * count)
  return Program(
    sizes=sizes,
    reads=reads,
    routes=tuple(tuple(draw(some)) for _ in range(count)),
    weights=draw(st.none() | weights),
    mode=draw(st.sampled_from(list(models.MODES))),
  )


class MultiRandomTest(absltest.TestCase):
  @settings(max_examples=25, deadline=None, derandomize=True)
  @given(programs())
  def test_each_loss(self, program):
    grads = nnx_ext.grad_multi(
      program.losses,
      argnums=program.argnums(),
      weights=self._weights(program),
      allow_unused=True,
      **models.MODES[program.mode],
    )(*program.banks())
    oracle = program.oracle()
    for k, route in enumerate(program.routes):
      states = grads[f'loss{k}']
      arguments = sorted({argument for argument, _ in route})
      self.assertLen(states, len(arguments))
      for a, state in zip(arguments, states):
        own = {i: oracle[k][a][i] for b, i in route if a == b}
        self._assert_state(state, own)

  @settings(max_examples=25, deadline=None, derandomize=True)
  @given(programs())
  def test_sum(self, program):
    grads = nnx_ext.grad_multi(
      program.losses,
      argnums=program.argnums(),
      weights=self._weights(program),
      reduce='sum',
      allow_unused=True,
      **models.MODES[program.mode],
    )(*program.banks())
    oracle = program.oracle()
    arguments = sorted({a for route in program.routes for a, _ in route})
    if len(arguments) == 1:
      grads = (grads,)
    self.assertLen(grads, len(arguments))
    for a, state in zip(arguments, grads):
      own: dict[int, jax.Array] = {}
      for k, route in enumerate(program.routes):
        for b, i in route:
          if a == b:
            own[i] = own.get(i, 0.0) + oracle[k][a][i]
      self._assert_state(state, own)

  @settings(max_examples=25, deadline=None, derandomize=True)
  @given(programs())
  def test_plan_tells_the_reach(self, program):
    plan = nnx_ext.multi_plan(
      program.losses,
      argnums=program.argnums(),
      allow_unused=True,
      **models.MODES[program.mode],
    )(*program.banks())
    wanted = {param for route in program.routes for param in route}
    for k, (loss, route) in enumerate(zip(plan.losses, program.routes)):
      reached = program.reached(k)
      self.assertEqual(
        sum(count for _, count, _ in loss.differentiated_by),
        len(reached & set(route)),
      )
      self.assertEqual(
        sum(count for _, count in loss.kept_out),
        len((reached & wanted) - set(route)),
      )

  def _weights(self, program):
    if program.weights is None:
      return None
    return {f'loss{k}': w for k, w in enumerate(program.weights)}

  def _assert_state(self, state, own):
    self.assertIsInstance(state, nnx.State)
    self.assertEqual(set(state['weights']), set(own))
    actual = {i: state['weights'][i][...] for i in own}
    chex.assert_trees_all_close(actual, own, rtol=1e-4, atol=1e-6)


if __name__ == '__main__':
  absltest.main()
