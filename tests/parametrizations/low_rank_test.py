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
"""Weights of low rank, and low-rank updates."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations.low_rank import LowRank, LowRankUpdate
from tests import errors
from tests.parametrizations import laws


def _truncated(weight, rank=2):
  matrix = np.asarray(weight, np.float64).reshape(-1, weight.shape[-1])
  u, s, vt = np.linalg.svd(matrix, full_matrices=False)
  return (u[:, :rank] * s[None, :rank] @ vt[:rank]).reshape(weight.shape)


def _low_rank(weight):
  return LowRank(weight, rank=2)


def _update(weight):
  return LowRankUpdate(weight, rank=2, alpha=6.0)


def _product(theta):
  return jnp.tensordot(theta['a'], theta['b'], 1)


MATRIX = laws.noise((4, 3))
CONV = laws.noise((2, 2, 3))
HARD = (0 * MATRIX, 1e25 * MATRIX, 1e-25 * MATRIX)

CASES = {
  'low_rank': laws.Case(
    _low_rank, MATRIX, start=_truncated, formula=_product, hard=HARD
  ),
  'low_rank_conv': laws.Case(
    _low_rank, CONV, start=_truncated, formula=_product, atol=2e-6
  ),
  'update': laws.Case(
    _update,
    MATRIX,
    formula=lambda theta: MATRIX + 3.0 * _product(theta),
    hard=HARD,
  ),
  'update_conv': laws.Case(
    _update, CONV, formula=lambda theta: CONV + 3.0 * _product(theta)
  ),
}
KEPT = {
  'low_rank': laws.Case(_low_rank, _truncated(MATRIX), atol=2e-6),
}


class LowRankTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, law, case):
    laws.check(law, CASES[case])

  @parameterized.product(case=list(KEPT))
  def test_keeps_what_is_on_the_domain(self, case):
    laws.start(KEPT[case])
    laws.finite(KEPT[case])

  @parameterized.parameters(1, 2, 3)
  def test_the_residual_is_the_next_singular_value(self, rank):
    weight = jnp.asarray(MATRIX, jnp.float32)
    lost = jnp.linalg.norm(LowRank(weight, rank=rank)() - weight, 2)
    expected = [*np.linalg.svd(MATRIX)[1], 0.0][rank]
    self.assertAlmostEqual(float(lost), expected, places=5)

  def test_factors_are_balanced(self):
    built = _low_rank(jnp.asarray(MATRIX, jnp.float32))
    a, b = built.a[...], built.b[...]
    chex.assert_trees_all_close(a.T @ a, b @ b.T, atol=1e-5)

  def test_zeros_train(self):
    call, theta = laws.pure(_low_rank(jnp.zeros((4, 3))))
    (grads,) = jax.vjp(call, theta)[1](jnp.ones((4, 3)))
    self.assertGreater(float(jnp.max(jnp.abs(grads['b']))), 0.1)


class LowRankUpdateTest(parameterized.TestCase):
  def test_only_the_factors_train(self):
    model, x = laws.parametrized(CASES['update'])
    wrt = nnx.PathContains('kernel')
    optimizer = nnx.Optimizer(
      model, optax.adamw(0.1), wrt=nnx.All(nnx.Param, wrt)
    )
    base = model.kernel.base[...]
    for _ in range(3):
      grads = nnx.grad(
        lambda model: jnp.sum(model(x) ** 2),
        argnums=nnx.DiffState(0, nnx.All(nnx.Param, wrt)),
      )(model)
      self.assertEqual(sorted(grads['kernel']), ['a', 'b'])
      optimizer.update(model, grads)
    self.assertIs(model.kernel.base[...], base)
    self.assertGreater(float(jnp.max(jnp.abs(model.kernel() - base))), 0.1)
    chex.assert_trees_all_close(nnx_ext.bake(model)(x), model(x), rtol=1e-6)

  def test_starts_bit_for_bit(self):
    weight = jnp.asarray(MATRIX, jnp.bfloat16)
    chex.assert_trees_all_equal(_update(weight)(), weight)

  def test_rngs(self):
    weight = jnp.ones((4, 3))
    rngs = nnx.Rngs(7)
    first = LowRankUpdate(weight, rank=2, rngs=rngs)
    second = LowRankUpdate(weight, rank=2, rngs=rngs)
    again = LowRankUpdate(weight, rank=2, rngs=nnx.Rngs(7))
    chex.assert_trees_all_equal(first.a[...], again.a[...])
    self.assertGreater(float(jnp.max(jnp.abs(first.a - second.a[...]))), 0.1)

  def test_alpha_is_the_rank_by_default(self):
    built = laws.move(LowRankUpdate(jnp.zeros((4, 3)), rank=2))
    chex.assert_trees_all_close(
      built(), built.a[...] @ built.b[...], rtol=1e-6, atol=1e-7
    )


class WordsTest(errors.ErrorsTestCase):
  @parameterized.parameters(0, 4)
  def test_rank(self, rank):
    with self.refused(
      ValueError, 'LowRank: rank', 'from 1 to 3', '(4, 3)', f'got {rank}'
    ):
      LowRank(jnp.ones((4, 3)), rank=rank)

  def test_rank_of_an_update(self):
    with self.refused(ValueError, 'LowRankUpdate: rank', 'least 1', 'got 0'):
      LowRankUpdate(jnp.ones((4, 3)), rank=0)

  @parameterized.parameters(LowRank, LowRankUpdate)
  def test_vector(self, kind):
    with self.refused(
      ValueError, f'{kind.__name__} needs', 'two or more axes', 'shape (3,)'
    ):
      kind(jnp.ones(3), rank=1)
