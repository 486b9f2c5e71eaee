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
"""Masked, Scaled and EMA."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations.fixed import EMA, Masked, Scaled
from tests.errors import ErrorsTestCase
from tests.parametrizations import laws

KERNEL = laws.noise((3, 4))
MASK = laws.noise((3, 4), 1) > 0
WINDOW = laws.noise((2, 3, 4))
HARD = [np.zeros((3, 4)), np.full((3, 4), 1e30)]

CASES = {
  'masked': laws.Case(
    lambda weight: Masked(weight, mask=MASK),
    KERNEL,
    start=lambda weight: weight * MASK,
    formula=lambda theta: theta['v'] * MASK,
    hard=HARD,
  ),
  'scaled': laws.Case(
    Scaled,
    KERNEL,
    formula=lambda theta: np.sqrt(2 / 3) * theta['v'],
    free=jnp.ravel,
    hard=HARD,
  ),
  'scaled_conv': laws.Case(
    lambda weight: Scaled(weight, scale=-0.3),
    WINDOW,
    formula=lambda theta: -0.3 * theta['v'],
    free=jnp.ravel,
  ),
  'ema': laws.Case(EMA, KERNEL, hard=HARD),  # In eval mode: the average.
}


class FixedLawTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, case, law):
    laws.check(law, CASES[case])

  @parameterized.parameters('masked', 'scaled', 'scaled_conv')
  def test_trains(self, case):
    laws.trains(CASES[case], 'adamw')


class MaskedTest(parameterized.TestCase):
  def test_masked_gradients_are_exactly_zero(self):
    weight = jnp.where(MASK, jnp.asarray(KERNEL, jnp.float32), jnp.inf)
    built = Masked(weight, mask=MASK)
    value, grads = nnx.value_and_grad(lambda built: jnp.sum(built() ** 2))(
      built
    )
    expected = jnp.where(MASK, 2 * weight, 0.0)
    chex.assert_trees_all_equal(grads['v'][...], expected)
    chex.assert_tree_all_finite(value)

  @parameterized.parameters('sgd', 'momentum', 'adam', 'adamw')
  def test_no_optimizer_revives(self, optimizer):
    built = Masked(jnp.asarray(KERNEL, jnp.float32), mask=MASK)
    train = nnx.Optimizer(built, laws.OPTIMIZERS[optimizer](), wrt=nnx.Param)
    # A step of momentum, gathered before some more were masked.
    train.update(built, nnx.grad(lambda built: jnp.sum(built() ** 2))(built))
    built.mask[...] *= KERNEL > 0
    for _ in range(3):
      train.update(built, nnx.grad(lambda built: jnp.sum(built() ** 2))(built))
      self.assertFalse(jnp.any(built()[built.mask[...] == 0]))

  @parameterized.parameters(bool, int, np.float32)
  def test_masks_of_numbers(self, dtype):
    built = Masked(jnp.asarray(KERNEL), mask=MASK.astype(dtype))
    chex.assert_trees_all_equal(built.mask[...], jnp.asarray(MASK, jnp.float32))
    again = Masked(built(), mask=built.mask)
    chex.assert_trees_all_equal(again(), built())
    self.assertIsNot(again.mask, built.mask)


class ScaledTest(parameterized.TestCase):
  def test_he_constant(self):
    self.assertEqual(Scaled(jnp.ones((5, 4, 2))).scale, np.sqrt(2 / 20))
    self.assertEqual(Scaled(jnp.ones(3)).scale, np.sqrt(2))
    self.assertEqual(Scaled(jnp.ones((0, 3))).scale, np.sqrt(2))

  def test_scale_is_kept_by_assign(self):
    model = nnx_ext.parametrize(
      nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
      {nnx.PathContains('kernel'): lambda w: Scaled(w, scale=4.0)},
    )
    model = nnx_ext.assign(model, 'kernel', jnp.ones((2, 3)))
    chex.assert_trees_all_equal(model.kernel.v[...], jnp.full((2, 3), 0.25))


class EMATest(parameterized.TestCase):
  def test_modes(self):
    weight = jnp.asarray(KERNEL, jnp.float32)
    model = nnx_ext.parametrize(
      laws.layer(weight)[0], {nnx.PathContains('kernel'): EMA}
    )
    for mode in (model.train, model.eval):
      mode()
      chex.assert_trees_all_equal(model.kernel[...], weight)
    model.kernel.v[...] += 1
    chex.assert_trees_all_equal(model.kernel[...], weight)
    chex.assert_trees_all_equal(nnx_ext.bake(model).kernel[...], weight)
    assigned = nnx_ext.assign(model, 'kernel', 2 * weight)
    self.assertTrue(assigned.kernel.use_running_average)
    model.train()
    chex.assert_trees_all_equal(model.kernel[...], weight + 1)
    chex.assert_trees_all_equal(nnx_ext.bake(model).kernel[...], weight)

  def test_gradient_goes_to_the_param_in_train_mode(self):
    built = EMA(jnp.ones(3))
    for mode, expected in ((built.train, 1.0), (built.eval, 0.0)):
      mode()
      grads = nnx.grad(lambda built: jnp.sum(built()))(built)
      self.assertEqual(list(grads), ['v'])
      chex.assert_trees_all_equal(grads['v'][...], jnp.full((3,), expected))

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_update_in_a_jitted_step(self, dtype):
    built, tx = EMA(jnp.ones(3, dtype), decay=0.99), optax.sgd(0.125)
    optimizer = nnx.Optimizer(built, tx, wrt=nnx.Param)

    @nnx.jit
    def step(built, optimizer):
      optimizer.update(built, nnx.grad(lambda built: jnp.sum(built()))(built))
      built.update()

    average, v = np.ones(3), np.ones(3)
    for _ in range(5):
      step(built, optimizer)
      v = v - 0.125
      average = 0.99 * average + 0.01 * v
    self.assertEqual(built.average[...].dtype, jnp.float32)
    chex.assert_trees_all_close(
      built.average[...], jnp.asarray(average, jnp.float32), rtol=1e-6
    )
    self.assertEqual(built().dtype, dtype)
    built.eval()
    self.assertEqual(built().dtype, dtype)
    chex.assert_trees_all_equal(built(), built.average[...].astype(dtype))

  def test_start_shares_no_buffer(self):
    # An optimizer step that donates the Params must not delete the average.
    built = EMA(jnp.ones(3))
    self.assertIsNot(built.v.get_value(), built.average.get_value())
    jax.jit(lambda v: v + 1, donate_argnums=0)(built.v.get_value())
    chex.assert_trees_all_equal(built.average[...], jnp.ones(3))

  def test_update_of_stacked_layers(self):
    built = nnx.vmap(lambda w: EMA(w, decay=0.5))(jnp.ones((2, 3)))
    built.v[...] = jnp.zeros((2, 3))
    built.update()
    chex.assert_trees_all_equal(built.average[...], jnp.full((2, 3), 0.5))


class FixedErrorsTest(ErrorsTestCase):
  @parameterized.parameters((3,), (4, 3))
  def test_mask_shape(self, *shape):
    with self.refused(
      ValueError, 'Masked', '(3, 4)', str(shape), 'jnp.broadcast_to'
    ):
      Masked(jnp.asarray(KERNEL), mask=jnp.ones(shape))

  @parameterized.parameters(0.0, jnp.inf, jnp.nan)
  def test_scale(self, scale):
    with self.refused(ValueError, 'Scaled', 'scale', str(scale)):
      Scaled(jnp.ones(3), scale=scale)

  @parameterized.parameters(-0.1, 1.0, jnp.nan)
  def test_decay(self, decay):
    with self.refused(ValueError, 'EMA', 'decay', str(decay)):
      EMA(jnp.ones(3), decay=decay)
