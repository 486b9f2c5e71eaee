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
"""Positive, Interval and Simplex."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations.constraints import Interval, Positive, Simplex
from tests.errors import ErrorsTestCase
from tests.parametrizations import laws

POSITIVE = np.abs(laws.noise((3, 4))) + 0.1
UNIT = np.abs(laws.noise((2, 3, 2))) / 3
ROWS = POSITIVE / POSITIVE.sum(-1, keepdims=True)
EDGES = np.resize([1e-30, 1e-6, 1.0, 700.0, 1e30], POSITIVE.shape)


def _exp(weight):
  return Positive(weight, map='exp')


def _interval(weight):
  return Interval(weight, low=-0.5, high=1.5)


CASES = {
  'softplus': laws.Case(
    Positive,
    POSITIVE,
    formula=lambda theta: jnp.log1p(jnp.exp(theta['x'])),
    free=jnp.ravel,
    hard=[EDGES],
  ),
  'exp': laws.Case(
    _exp,
    POSITIVE,
    formula=lambda theta: jnp.exp(theta['x']),
    free=jnp.ravel,
    hard=[EDGES],
  ),
  'interval': laws.Case(
    _interval,
    UNIT,
    formula=lambda theta: -0.5 + 2 / (1 + jnp.exp(-theta['x'])),
    free=jnp.ravel,
    hard=[np.full(UNIT.shape, -0.5), np.full(UNIT.shape, 1.5)],
  ),
  'simplex': laws.Case(
    Simplex,
    ROWS,
    formula=lambda theta: (
      jnp.exp(theta['x']) / jnp.sum(jnp.exp(theta['x']), -1, keepdims=True)
    ),
    hard=[np.eye(3, 4), np.full((3, 4), 0.25)],
  ),
}


class ConstraintsLawTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, case, law):
    laws.check(law, CASES[case])

  @parameterized.parameters(*CASES)
  def test_trains(self, case):
    laws.trains(CASES[case], 'adamw')


class ConstraintsTest(parameterized.TestCase):
  @parameterized.parameters(
    (Positive, 1e-6), (Positive, 700.0), (_exp, 1e-6), (_exp, 700.0)
  )
  def test_small_and_large_weights_return(self, factory, value):
    weight = jnp.full((3,), value)
    chex.assert_trees_all_close(factory(weight)(), weight, rtol=2e-6)

  def test_softplus_of_large_and_small(self):
    built = Positive(jnp.ones(3))
    built.x[...] = jnp.array([100.0, 1e4, -1e4])
    value, grad = jax.vmap(jax.value_and_grad(jax.nn.softplus))(built.x[...])
    chex.assert_trees_all_equal(built(), jnp.array([100.0, 1e4, 0.0]))
    chex.assert_tree_all_finite((value, grad, built.log_det()))

  @parameterized.parameters(-1e4, 1e4)
  def test_interval_stays_inside(self, x):
    built = Interval(jnp.array([0.1, 0.2]), low=-0.1, high=0.3)
    built.x[...] = jnp.full((2,), x)
    bound = -0.1 if x < 0 else 0.3
    chex.assert_trees_all_close(built(), jnp.full((2,), bound), rtol=1e-6)
    chex.assert_tree_all_finite(built.log_det())
    read = Interval(built(), low=-0.1, high=0.3)
    chex.assert_trees_all_close(read(), built(), atol=1e-6)

  def test_a_weight_on_the_bound_can_move(self):
    built = Interval(jnp.array([0.0, 1.0]), low=0.0, high=1.0)
    grads = nnx.grad(lambda built: jnp.sum(built()))(built)
    self.assertTrue(jnp.all(grads['x'][...] > 0))

  def test_simplex_rows_sum_to_one_wherever_x_is(self):
    built = Simplex(jnp.asarray(ROWS, jnp.float32))
    for scale in (0.0, 1e3, 1e30):
      built.x[...] = scale * jnp.asarray(laws.noise((3, 4)), jnp.float32)
      chex.assert_trees_all_close(jnp.sum(built(), -1), jnp.ones(3))


class ConstraintsErrorsTest(ErrorsTestCase):
  @parameterized.parameters(0.0, -1.0, jnp.inf, jnp.nan)
  def test_not_positive(self, value):
    words = ('positive and finite', 'got values from', 'jnp.abs(weight)')
    for factory in (Positive, _exp):
      with self.refused(ValueError, 'Positive', *words):
        factory(jnp.array([1.0, value]))

  def test_the_cure_works(self):
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with self.refused(ValueError, 'Positive', 'lambda weight: Positive('):
      nnx_ext.parametrize(layer, {nnx.PathContains('kernel'): Positive})
    cured = nnx_ext.parametrize(
      layer,
      {
        nnx.PathContains('kernel'): lambda weight: Positive(
          jnp.abs(weight) + 1e-3
        )
      },
    )
    self.assertTrue(jnp.all(cured.kernel[...] > 0))

  def test_map(self):
    with self.refused(
      ValueError, 'Positive', "'softplus' or 'exp'", "'square'"
    ):
      Positive(jnp.ones(2), map='square')  # type: ignore

  @parameterized.parameters(-0.51, 1.51, jnp.nan)
  def test_outside_of_the_interval(self, value):
    with self.refused(
      ValueError, 'Interval', 'between low=-0.5 and high=1.5', 'jnp.clip'
    ):
      _interval(jnp.array([0.0, value]))

  @parameterized.parameters(
    (1.0, 1.0), (2.0, 1.0), (0.0, jnp.inf), (jnp.nan, 1)
  )
  def test_bounds(self, low, high):
    with self.refused(ValueError, 'Interval', 'less than', 'low=', 'high='):
      Interval(jnp.ones(2), low=low, high=high)

  @parameterized.parameters(
    ([0.5, 0.4],), ([1.5, -0.5],), ([[0.5, 0.5], [1.0, 0.1]],)
  )
  def test_off_the_simplex(self, weight):
    with self.refused(
      ValueError, 'Simplex', 'sum to one over the last axis', 'jax.nn.softmax'
    ):
      Simplex(jnp.array(weight))

  def test_simplex_of_a_scalar(self):
    with self.refused(ValueError, 'Simplex', 'axis', '()'):
      Simplex(jnp.ones(()))

  def test_known_weights_are_checked_inside_of_jit(self):
    known = -jnp.ones(2)
    with self.refused(ValueError, 'Positive', 'positive'):
      jax.jit(lambda: Positive(known)())()
    unknown = jax.jit(lambda weight: Positive(weight)())(known)
    self.assertTrue(jnp.all(jnp.isnan(unknown)))

  def test_assign_off_the_domain(self):
    model = nnx_ext.parametrize(
      nnx.LayerNorm(2, rngs=nnx.Rngs(0)), {nnx.PathContains('scale'): _exp}
    )
    with self.refused(ValueError, 'Positive', 'got values from -1.0 to 1.0'):
      nnx_ext.assign(model, 'scale', jnp.array([1.0, -1.0]))
    assigned = nnx_ext.assign(model, 'scale', jnp.array([1.0, 2.0]))
    self.assertEqual(assigned.scale.map, 'exp')
