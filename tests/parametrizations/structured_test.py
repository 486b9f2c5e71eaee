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
"""Kronecker products, circulant and Monarch matrices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from nnx_ext.parametrizations.structured import Circulant, Kronecker, Monarch
from tests import errors
from tests.parametrizations import laws


def _kronecker(weight):
  return Kronecker(weight, left=(2, 3))


def _nearest_kronecker(weight):
  a, b = _split_kronecker(np.asarray(weight, np.float64))
  return np.kron(a, b)


def _split_kronecker(weight):
  """By alternating least squares, for a left factor of shape (2, 3)."""
  blocks = weight.reshape(2, weight.shape[0] // 2, 3, weight.shape[1] // 3)
  b = blocks[0, :, 0] + 1e-3
  for _ in range(300):
    a = np.einsum('imjn,mn->ij', blocks, b) / (np.sum(b**2) or 1)
    b = np.einsum('imjn,ij->mn', blocks, a) / (np.sum(a**2) or 1)
  return a, b


def _circulant(c):
  return np.stack([np.roll(np.asarray(c), j) for j in range(len(c))], axis=1)


def _nearest_circulant(weight):
  n = len(weight)
  rolled = [np.roll(np.asarray(weight)[:, j], -j) for j in range(n)]
  return _circulant(np.mean(rolled, axis=0))


def _monarch(left, right):
  """As the paper writes it: permutations and block-diagonal matrices."""
  m, p, _ = left.shape
  s = right.shape[2]
  block_diagonal = lambda blocks: np.asarray(
    jax.scipy.linalg.block_diag(*blocks)
  )
  swap = lambda i, j: (
    np.eye(i * j).reshape(i, j, i * j).swapaxes(0, 1).reshape(i * j, i * j)
  )
  # From (k, j) to (j, k), and from (j, l) to (l, j).
  return (
    swap(m, p) @ block_diagonal(left) @ swap(m, m) @ block_diagonal(right)
  ) + np.zeros((m * p, m * s))


def _nearest_monarch(weight, m=2):
  slices = np.asarray(weight, np.float64)
  slices = slices.reshape(len(weight) // m, m, m, -1)
  nearest = np.zeros_like(slices)
  for j in range(m):
    for k in range(m):
      u, s, vt = np.linalg.svd(slices[:, j, k])
      nearest[:, j, k] = s[0] * np.outer(u[:, 0], vt[0])
  return nearest.reshape(weight.shape)


LEFT, RIGHT = laws.noise((2, 3)), laws.noise((2, 1), 1)
MATRIX = laws.noise((4, 3), 2)
SQUARE = laws.noise((4, 4), 3)
WIDE = laws.noise((4, 6), 4)

CASES = {
  'kronecker_projects': laws.Case(
    _kronecker, MATRIX, start=_nearest_kronecker, atol=3e-6
  ),
  'circulant_projects': laws.Case(
    Circulant,
    SQUARE,
    start=_nearest_circulant,
    formula=lambda theta: jnp.stack(
      [jnp.roll(theta['c'], j) for j in range(4)], axis=1
    ),
  ),
  'monarch_projects': laws.Case(
    Monarch, SQUARE, start=_nearest_monarch, atol=2e-6
  ),
  'monarch_wide': laws.Case(
    lambda weight: Monarch(weight, blocks=2),
    WIDE,
    start=_nearest_monarch,
    formula=lambda theta: jnp.einsum(
      'jlk,kji->ljki', theta['left'], theta['right']
    ).reshape(4, 6),
    atol=2e-6,
  ),
}
KEPT = {
  'kronecker': laws.Case(
    _kronecker,
    np.kron(LEFT, RIGHT),
    formula=lambda theta: jnp.kron(theta['a'], theta['b']),
    hard=(0 * MATRIX, 1e25 * np.kron(LEFT, RIGHT)),
  ),
  'circulant': laws.Case(
    Circulant,
    _circulant(LEFT[0]),
    hard=(np.zeros((3, 3)), 1e25 * np.ones((3, 3))),
  ),
  'monarch': laws.Case(
    Monarch,
    _monarch(laws.noise((2, 2, 2)), laws.noise((2, 2, 2), 1)),
    hard=(np.zeros((4, 4)), 1e25 * np.ones((4, 4))),
  ),
}


class StructuredTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, law, case):
    laws.check(law, CASES[case])

  @parameterized.product(case=list(KEPT))
  def test_keeps_what_is_on_the_domain(self, case):
    laws.start(KEPT[case])
    laws.finite(KEPT[case])


class KroneckerTest(parameterized.TestCase):
  def test_zeros_train(self):
    call, theta = laws.pure(_kronecker(jnp.zeros((4, 3))))
    (grads,) = jax.vjp(call, theta)[1](jnp.ones((4, 3)))
    self.assertGreater(float(jnp.max(jnp.abs(grads['b']))), 0.1)


class CirculantTest(parameterized.TestCase):
  def test_is_a_convolution(self):
    weight, x = Circulant(jnp.asarray(SQUARE, jnp.float32)), jnp.arange(4.0)
    expected = jnp.fft.ifft(jnp.fft.fft(weight.c[...]) * jnp.fft.fft(x)).real
    chex.assert_trees_all_close(weight() @ x, expected, atol=1e-5)


class MonarchTest(parameterized.TestCase):
  @parameterized.parameters((4, 4, 2), (9, 9, 3), (4, 6, 2), (9, 3, 3))
  def test_is_the_product_of_the_paper(self, rows, columns, blocks):
    weight = jnp.asarray(laws.noise((rows, columns)), jnp.float32)
    built = Monarch(weight, blocks=blocks)
    expected = _monarch(built.left[...], built.right[...])
    chex.assert_trees_all_close(built(), jnp.asarray(expected), atol=1e-5)


class WordsTest(errors.ErrorsTestCase):
  @parameterized.parameters((3, 1), (1, 2), (0, 1), (2,))
  def test_left_does_not_divide(self, *left):
    with self.refused(
      ValueError, f'Kronecker: left={left}', 'divide', '(4, 3)'
    ):
      Kronecker(jnp.ones((4, 3)), left=left)

  @parameterized.parameters(((4, 6), None), ((6, 6), None), ((4, 6), 4))
  def test_blocks_do_not_divide(self, shape, blocks):
    with self.refused(
      ValueError, f'Monarch: blocks={blocks}', 'divide', f'{shape}', 'such as'
    ):
      Monarch(jnp.ones(shape), blocks=blocks)

  @parameterized.parameters(
    (Kronecker, (2,), {'left': (1, 1)}),
    (Circulant, (2, 3), {}),
    (Monarch, (2, 2, 2), {}),
  )
  def test_shape(self, kind, shape, options):
    with self.refused(
      ValueError, f'{kind.__name__} needs', 'matrix', f'shape {shape}'
    ):
      kind(jnp.ones(shape), **options)
