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
"""Orthogonal weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from nnx_ext.parametrizations.orthogonal import Orthogonal
from tests import errors
from tests.parametrizations import laws

METHODS = ['expm', 'cayley', 'householder']
every_method = parameterized.product(method=METHODS)


def _nearest(weight):
  matrix = np.asarray(weight, np.float64).reshape(-1, weight.shape[-1])
  u, _, vt = np.linalg.svd(matrix, full_matrices=False)
  return (u @ vt).reshape(weight.shape)


def _factory(method):
  def factory(weight):
    return Orthogonal(weight, method=method)

  return factory


TALL = laws.noise((4, 2))
WEIGHTS = {
  'tall': _nearest(TALL),
  'wide_conv': _nearest(laws.noise((2, 1, 4))),
  'mirror': np.diag([1.0, -1.0, 1.0]),
}
KEPT = {
  f'{method}_{shape}': laws.Case(_factory(method), weight, atol=2e-6)
  for method in METHODS
  for shape, weight in WEIGHTS.items()
}
CASES = {
  'expm': laws.Case(
    _factory('expm'),
    TALL,
    start=_nearest,
    hard=(1e25 * TALL, 1e-25 * TALL),
    atol=2e-6,
  ),
  'cayley': KEPT['cayley_wide_conv'],
  'householder': laws.Case(
    _factory('householder'), laws.noise((3, 3)), start=_nearest, atol=2e-6
  ),
}


def _matrix(weight):
  matrix = weight.reshape(-1, weight.shape[-1])
  return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T


class OrthogonalTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, law, case):
    laws.check(law, CASES[case])

  @parameterized.product(case=list(KEPT))
  def test_keeps_what_is_on_the_domain(self, case):
    laws.start(KEPT[case])

  @parameterized.product(case=list(KEPT))
  def test_stays_orthogonal(self, case):
    built = KEPT[case].build()
    for scale in (1.0, 30.0):
      weight, theta = laws.pure(built)
      w = _matrix(weight(laws.moved(theta, scale)))
      chex.assert_trees_all_close(w.T @ w, jnp.eye(w.shape[1]), atol=2e-5)

  @parameterized.product(case=list(CASES))
  def test_as_many_directions_as_the_manifold(self, case):
    call, theta = laws.pure(CASES[case].build())
    jacobian = jax.jit(jax.jacobian(call))(laws.moved(theta))['x']
    jacobian = jacobian.reshape(theta['x'].size, -1)
    n, k = _matrix(theta['x']).shape
    rank = jnp.linalg.matrix_rank(jacobian, rtol=1e-4)
    self.assertEqual(int(rank), n * k - k * (k + 1) // 2)

  @every_method
  def test_zeros(self, method):
    call, theta = laws.pure(_factory(method)(jnp.zeros((4, 2))))
    w, pullback = jax.vjp(call, theta)
    chex.assert_trees_all_close(w.T @ w, jnp.eye(2), atol=1e-6)
    chex.assert_tree_all_finite(pullback(jnp.ones((4, 2))))

  @every_method
  def test_the_formula(self, method):
    with jax.enable_x64(True):
      n, k = 4, 3
      built = laws.move(_factory(method)(jnp.asarray(laws.noise((n, k)))))
      lower = np.tril(built.x[...], -1)
      skew = np.pad(lower, ((0, 0), (0, n - k)))
      skew = skew - skew.T
      eye = np.eye(n)
      if method == 'householder':
        product = eye
        for u in (lower + eye[:, :k]).T:
          product = product @ (eye - 2 * np.outer(u, u) / (u @ u))
        expected = product[:, :k] * np.asarray(built.signs[...])[None]
      elif method == 'cayley':
        rotation = np.linalg.inv(eye - skew / 2) @ (eye + skew / 2)
        expected = (built.base[...] @ rotation)[:, :k]
      else:
        values, vectors = np.linalg.eig(skew)
        inverse = np.linalg.inv(vectors)
        rotation = (vectors * np.exp(values)[None] @ inverse).real
        expected = (built.base[...] @ rotation)[:, :k]
      chex.assert_trees_all_close(built(), jnp.asarray(expected), atol=1e-12)


class WordsTest(errors.ErrorsTestCase):
  def test_vector(self):
    with self.refused(
      ValueError, 'Orthogonal', 'two or more axes', 'float32 of shape (3,)'
    ):
      Orthogonal(jnp.ones(3))

  def test_method(self):
    with self.refused(
      ValueError, 'Orthogonal: method', *METHODS, "Did you mean 'cayley'"
    ):
      Orthogonal(jnp.ones((2, 2)), method='caley')
