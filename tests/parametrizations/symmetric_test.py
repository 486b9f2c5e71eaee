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
"""Symmetric, skew-symmetric and positive definite weights."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from nnx_ext.parametrizations.symmetric import (
  PositiveDefinite,
  Skew,
  Symmetric,
)
from tests import errors
from tests.parametrizations import laws

SQUARE = laws.noise((3, 3))
LOWER, STRICT = np.tril_indices(3), np.tril_indices(3, -1)
SPD = SQUARE @ SQUARE.T / 3 + 0.5 * np.eye(3)
RHO = 1 - 1e-5


def _positive_definite(theta):
  x = theta['x']
  lower = jnp.tril(x, -1) + jnp.diag(jnp.log1p(jnp.exp(jnp.diag(x))))
  return lower @ lower.T + 1e-6 * jnp.eye(3)


CASES = {
  'symmetric': laws.Case(
    Symmetric,
    SQUARE,
    start=lambda w: (w + w.T) / 2,
    formula=lambda theta: jnp.tril(theta['x']) + jnp.tril(theta['x'], -1).T,
    free=lambda x: x[LOWER],
    hard=(0 * SQUARE, 1e38 * np.ones((3, 3))),
  ),
  'skew': laws.Case(
    Skew,
    SQUARE,
    start=lambda w: (w - w.T) / 2,
    formula=lambda theta: jnp.tril(theta['x'], -1) - jnp.tril(theta['x'], -1).T,
    free=lambda x: x[STRICT],
    hard=(0 * SQUARE, 1e38 * (np.tri(3) - np.tri(3).T)),
  ),
  'positive_definite': laws.Case(
    PositiveDefinite,
    SPD,
    formula=_positive_definite,
    free=lambda x: x[LOWER],
    hard=(
      1e30 * SPD,
      np.diag([1e-5, 1.0, 1e5]),
      np.array([[1.0, RHO, 0.0], [RHO, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    ),
  ),
}
KEPT = {
  'symmetric': laws.Case(Symmetric, SPD - np.eye(3), free=lambda x: x[LOWER]),
  'skew': laws.Case(Skew, SQUARE - SQUARE.T, free=lambda x: x[STRICT]),
}


class SymmetricTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, law, case):
    laws.check(law, CASES[case])

  @parameterized.product(case=list(KEPT))
  def test_keeps_what_is_on_the_domain(self, case):
    laws.start(KEPT[case])
    laws.finite(KEPT[case])


class PositiveDefiniteTest(parameterized.TestCase):
  def test_far_from_the_start(self):
    built = PositiveDefinite(jnp.asarray(SPD, jnp.float32), eps=0.1)
    for shift in (-1e4, 1e4):
      call, theta = laws.pure(built)
      theta = {'x': theta['x'].at[jnp.diag_indices(3)].add(shift)}
      weight, pullback = jax.vjp(call, theta)
      self.assertTrue(jnp.all(jnp.isfinite(pullback(jnp.ones((3, 3)))[0]['x'])))
      self.assertGreater(float(jnp.linalg.eigvalsh(weight)[0]), 0.0999)

  def test_off_the_domain_under_jit(self):
    weight = jax.jit(lambda w: PositiveDefinite(w)())(-jnp.eye(2))
    self.assertTrue(bool(jnp.all(jnp.isnan(jnp.diag(weight)))))


class WordsTest(errors.ErrorsTestCase):
  @parameterized.product(
    kind=[Symmetric, Skew, PositiveDefinite],
    shape=[(2, 3), (4,), (2, 2, 2)],
  )
  def test_not_square(self, kind, shape):
    with self.refused(
      ValueError, f'{kind.__name__} needs a square matrix', f'shape {shape}'
    ):
      kind(jnp.ones(shape))

  @parameterized.parameters(
    ([[1.0, 0.5], [0.4, 1.0]], 1e-6, 'symmetric', 'by 0.1', '(w + w.T) / 2'),
    ([[1.0, 2.0], [2.0, 1.0]], 1e-6, 'eigenvalues above eps=1e-06', 'of -1'),
    ([[0.0, 0.0], [0.0, 0.0]], 1e-6, 'eigenvalues above eps=1e-06', 'of 0'),
    ([[0.1, 0.0], [0.0, 1.0]], 0.1, 'eigenvalues above eps=0.1', 'of 0.1'),
    ([[1.0, 0.0], [0.0, 1.0]], -1.0, 'eps must not be negative', 'got -1.0'),
  )
  def test_off_the_domain(self, weight, eps, *words):
    with self.refused(ValueError, 'PositiveDefinite', *words):
      PositiveDefinite(jnp.array(weight), eps=eps)
