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
"""FakeQuant."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

from nnx_ext.parametrizations.quantize import FakeQuant
from tests.errors import ErrorsTestCase
from tests.parametrizations import laws

KERNEL = laws.noise((3, 4))


def _scale(weight, bits=8, axis=None):
  xp = jnp if isinstance(weight, jax.Array) else np
  largest = xp.max(xp.abs(weight), axis=axis, keepdims=axis is not None)
  return xp.where(largest > 0, largest / (2 ** (bits - 1) - 1), 1.0)


def _grid(bits=8, axis=None):
  """A weight on its own grid."""

  def start(weight):
    xp = jnp if isinstance(weight, jax.Array) else np
    scale = _scale(weight, bits, axis)
    return scale * xp.round(weight / scale)

  return start


def _formula(bits=8, axis=None):
  """Clipped to the range of the first weight, and straight through."""
  scale = _scale(KERNEL, bits, axis)
  top = 2 ** (bits - 1) - 1

  def formula(theta):
    v = theta['v']
    inside = jnp.abs(v) <= top * scale * (1 + 1e-6)  # A tie for jnp.clip.
    weight = scale * jnp.round(jnp.clip(v / scale, -top, top))
    through = jnp.where(inside, v, 0.0)
    return through + jax.lax.stop_gradient(weight - through)

  return formula


HARD = [np.zeros((3, 4)), np.full((3, 4), 1e30), 1e-40 * KERNEL]

CASES = {
  'int8': laws.Case(
    FakeQuant,
    KERNEL,
    start=_grid(),
    formula=_formula(),
    hard=HARD,
    smooth=False,
  ),
  'int4_per_output': laws.Case(
    lambda weight: FakeQuant(weight, bits=4, per_output=True),
    KERNEL,
    start=_grid(4, axis=0),
    formula=_formula(4, axis=0),
    hard=HARD,
    smooth=False,
  ),
}


class QuantizeLawTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, case, law):
    laws.check(law, CASES[case])

  @parameterized.parameters(*CASES)
  def test_trains(self, case):
    laws.trains(CASES[case], 'adamw')


class FakeQuantTest(parameterized.TestCase):
  @parameterized.parameters(2, 4, 8, 16)
  def test_equals_the_formula_bit_for_bit(self, bits):
    weight = jnp.asarray(laws.noise((100_000,)), jnp.float32)
    built = FakeQuant(weight, bits=bits)
    v, top = 1.2 * weight, 2 ** (bits - 1) - 1  # Some are clipped.
    built.v[...] = v
    scale = built.scale[...]
    expected = scale * jnp.round(jnp.clip(v / scale, -top, top))
    as_bits = lambda x: np.asarray(x).view(np.uint32)
    np.testing.assert_array_equal(as_bits(built()), as_bits(expected))
    self.assertTrue(np.any(as_bits(expected) == 1 << 31))  # There are -0.0.
    naive = v + (expected - v)
    self.assertTrue(np.any(as_bits(naive) != as_bits(expected)))

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_residual(self, dtype):
    weight = jnp.asarray(laws.noise((50, 20)), dtype)
    for per_output in (False, True):
      built = FakeQuant(weight, per_output=per_output)
      scale = built.scale[...]
      self.assertEqual(scale.shape, (1, 20) if per_output else ())
      error = jnp.abs(built().astype(jnp.float32) - weight.astype(jnp.float32))
      slack = jnp.finfo(dtype).eps * 4
      self.assertTrue(jnp.all(error <= scale / 2 + slack))

  def test_gradient_inside_and_outside_of_the_range(self):
    built = FakeQuant(jnp.array([0.3, -1.0, 0.7]), bits=4)
    built.v[...] = jnp.array([1.001, -1.0, -50.0])
    grads = nnx.grad(lambda built: jnp.sum(3 * built()))(built)
    chex.assert_trees_all_equal(grads['v'][...], jnp.array([0.0, 3.0, 0.0]))
    chex.assert_trees_all_close(built(), jnp.array([1.0, -1.0, -1.0]))

  def test_every_first_weight_is_in_range(self):
    for seed in range(20):
      weight = jnp.asarray(laws.noise((7, 5), seed), jnp.float32)
      for bits, per_output in ((2, False), (5, True), (16, True)):
        built = FakeQuant(weight, bits=bits, per_output=per_output)
        grads = nnx.grad(lambda built: jnp.sum(built()))(built)
        chex.assert_trees_all_equal(grads['v'][...], jnp.ones((7, 5)))

  def test_infinite_weights_are_clipped(self):
    built = FakeQuant(jnp.ones(2))
    built.v[...] = jnp.array([jnp.inf, -jnp.inf])
    chex.assert_trees_all_close(built(), jnp.array([1.0, -1.0]))
    grads = nnx.grad(lambda built: jnp.sum(built()))(built)
    chex.assert_trees_all_equal(grads['v'][...], jnp.zeros(2))


class QuantizeErrorsTest(ErrorsTestCase):
  @parameterized.parameters(1, 0, 17)
  def test_bits(self, bits):
    with self.refused(ValueError, 'FakeQuant', 'from 2 to 16', str(bits)):
      FakeQuant(jnp.ones(3), bits=bits)

  def test_no_output_axis(self):
    with self.refused(ValueError, 'FakeQuant', 'per_output', '()'):
      FakeQuant(jnp.ones(()), per_output=True)
