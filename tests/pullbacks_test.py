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
"""The core in pure JAX: reach, planning, transposes."""

from unittest import mock

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_ext import _pullbacks
from nnx_ext._pullbacks import Linearization, Request


def _independent_carries(a, b):
  def body(carry, _):
    x, y = carry
    return (jnp.sin(x * a), jnp.cos(y * b)), None

  (x, y), _ = jax.lax.scan(body, (a, b), None, length=3)
  return x, y


@jax.custom_vjp
def _square(x):
  return x**2


_square.defvjp(lambda x: (x**2, x), lambda x, ct: (2.0 * x * ct,))

# Two losses of leaves a and b, and what each reaches.
PROGRAMS = {
  'plain': (lambda a, b: (a * 2.0, a * b), ({0}, {0, 1})),
  'stop_gradient': (
    lambda a, b: (a * jax.lax.stop_gradient(b), b * 1.0),
    ({0}, {1}),
  ),
  'constant': (lambda a, b: (jnp.float32(3.0), a + b), (set(), {0, 1})),
  'dead_relu': (lambda a, b: (jax.nn.relu(-jnp.abs(a)), b * 0.0), ({0}, {1})),
  'independent_carries': (_independent_carries, ({0}, {1})),
  'jit': (
    lambda a, b: jax.jit(lambda a, b: (a**2, b**2))(a, b),
    ({0}, {1}),
  ),
  'remat': (
    lambda a, b: jax.checkpoint(lambda a, b: (a**2, b**2))(a, b),
    ({0}, {1}),
  ),
  'cond': (
    lambda a, b: (
      jax.lax.cond(a > 0, lambda a: a**2, lambda a: -a, a),
      b**2,
    ),
    ({0}, {1}),
  ),
  'custom_vjp': (lambda a, b: (_square(a), _square(b)), ({0}, {1})),
}


def _run(f, *point):
  return _pullbacks.linearize(lambda *p: (f(*p), 'aux'), point)


class ReachTest(parameterized.TestCase):
  @parameterized.product(name=list(PROGRAMS))
  def test_reach(self, name):
    f, reach = PROGRAMS[name]
    linearization, aux = _run(f, jnp.float32(0.7), jnp.float32(-0.4))
    self.assertEqual(linearization.reach, tuple(map(frozenset, reach)))
    self.assertEqual(aux, 'aux')

  @parameterized.product(name=list(PROGRAMS))
  def test_gradients(self, name):
    f, _ = PROGRAMS[name]
    point = jnp.float32(0.7), jnp.float32(-0.4)
    linearization, _ = _run(f, *point)
    requests = [Request(i, frozenset({k})) for i in (0, 1) for k in (0, 1)]
    plan = linearization.plan(requests)
    found = linearization.gradients(plan, [None, 0.5])
    for request in requests:
      (k,) = request.losses
      expected = (1.0, 0.5)[k] * jax.grad(
        lambda *p, k=k: f(*p)[k], argnums=request.leaf
      )(*point)
      actual = found.get(request, jnp.float32(0.0))
      chex.assert_trees_all_close(actual, expected, rtol=1e-6)

  def test_without_dce_every_leaf_is_reached_and_gradients_hold(self):
    f, _ = PROGRAMS['stop_gradient']
    point = jnp.float32(0.7), jnp.float32(-0.4)
    with mock.patch.object(_pullbacks, '_dce_jaxpr', None):
      linearization, _ = _run(f, *point)
    self.assertEqual(linearization.reach, (frozenset({0, 1}),) * 2)
    requests = [Request(0, frozenset({0})), Request(1, frozenset({1}))]
    plan = linearization.plan(requests)
    self.assertLen(plan, 2)
    found = linearization.gradients(plan, [None, None])
    chex.assert_trees_all_close(list(found.values()), [point[1], 1.0])

  def test_the_private_name_is_there(self):
    # On both ends of the support window; see the comment beside the name.
    self.assertIsNotNone(_pullbacks._dce_jaxpr)


_COUNT = 4
_subsets = st.frozensets(st.integers(0, _COUNT - 1))
_cases = st.lists(
  st.tuples(
    _subsets,  # the losses that reach a leaf
    st.lists(_subsets.filter(len), max_size=4, unique=True),  # its requests
  ),
  min_size=1,
  max_size=6,
)


def _no_pull(chosen, cotangents):
  raise AssertionError('A plan computes nothing.')


def _linearization(cases) -> Linearization:
  reach = tuple(
    frozenset(
      leaf for leaf, (reached_by, _) in enumerate(cases) if k in reached_by
    )
    for k in range(_COUNT)
  )
  return Linearization((), _no_pull, reach)


class PlanTest(parameterized.TestCase):
  @settings(max_examples=200, deadline=None, derandomize=True)
  @given(_cases)
  def test_every_request_is_served_once_and_right(self, cases):
    requests = [
      Request(leaf, losses)
      for leaf, (_, wishes) in enumerate(cases)
      for losses in wishes
    ]
    plan = _linearization(cases).plan(requests)
    served = [request for pullback in plan for request in pullback.requests]
    self.assertLen(served, len(set(served)))
    for pullback in plan:
      for request in pullback.requests:
        reached_by, _ = cases[request.leaf]
        self.assertEqual(
          pullback.losses & reached_by, request.losses & reached_by
        )
    zero = {r for r in requests if not r.losses & cases[r.leaf][0]}
    self.assertEqual(set(served), set(requests) - zero)

  @settings(max_examples=200, deadline=None, derandomize=True)
  @given(_cases)
  def test_no_two_pullbacks_could_be_one(self, cases):
    plan = _linearization(cases).plan(
      Request(leaf, losses)
      for leaf, (_, wishes) in enumerate(cases)
      for losses in wishes
    )
    for i, one in enumerate(plan):
      for other in plan[:i]:
        union = one.losses | other.losses
        right = all(
          union & cases[r.leaf][0] == r.losses & cases[r.leaf][0]
          for r in one.requests + other.requests
        )
        self.assertFalse(right)

  def test_separate_losses_share_one(self):
    linearization = Linearization(
      (), _no_pull, (frozenset({0}), frozenset({1}))
    )
    plan = linearization.plan(
      [Request(0, frozenset({0})), Request(1, frozenset({1}))]
    )
    self.assertLen(plan, 1)
    self.assertEqual(plan[0].losses, frozenset({0, 1}))


class AloneTest(parameterized.TestCase):
  @parameterized.product(name=list(PROGRAMS))
  def test_equals_the_linearization_of_one(self, name):
    f, _ = PROGRAMS[name]
    point = jnp.float32(0.7), jnp.float32(-0.4)

    def gradients(linearize):
      found, aux = linearize(lambda *p: (f(*p)[:1], 'aux'), point)
      self.assertEqual(aux, 'aux')
      requests = [Request(leaf, frozenset({0})) for leaf in (0, 1)]
      numbers = found.gradients(found.plan(requests), [2.0])
      zero = jnp.float32(0.0)
      return found.losses, [numbers.get(r, zero) for r in requests]

    chex.assert_trees_all_equal(
      gradients(_pullbacks.linearize_alone), gradients(_pullbacks.linearize)
    )
