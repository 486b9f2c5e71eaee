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
"""Weight norm, spectral norm, unit norm."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations.norms import SpectralNorm, UnitNorm, WeightNorm
from tests import errors
from tests.parametrizations import laws


def _norms(weight, axes=None):
  axes = tuple(range(weight.ndim - 1)) if axes is None else axes
  return jnp.sqrt(jnp.sum(weight**2, axes, keepdims=True))


def _weight_norm(theta):
  return (
    theta['v']
    * (theta['g'].reshape(_norms(theta['v']).shape))
    / _norms(theta['v'])
  )


def _attention_norm(theta):
  return theta['v'] / _norms(theta['v'], 0) * theta['g'][None]


def _unit_columns(weight):
  flat = np.asarray(weight).reshape(-1, weight.shape[-1])
  norm = np.linalg.norm(flat, axis=0)
  flat = np.where(
    norm > 0, flat / np.where(norm > 0, norm, 1), 1 / len(flat) ** 0.5
  )
  return flat.reshape(weight.shape)


def _unit_spectrum(weight):
  flat = np.asarray(weight, np.float64).reshape(-1, weight.shape[-1])
  sigma = np.linalg.norm(flat, 2)
  return (flat / (sigma or 1)).reshape(weight.shape)


def _preserving(weight):
  return SpectralNorm(weight, preserve_scale=True)


def _attention(weight):
  return WeightNorm(weight, feature_axes=(-2, -1))


MATRIX = laws.noise((3, 4))
CONV = laws.noise((2, 3, 4))
HOLE = MATRIX * np.array([[1.0, 0.0, 1.0, 1.0]])
HARD = (0 * MATRIX, HOLE, 1e25 * MATRIX, 1e-25 * MATRIX)

CASES = {
  'weight_norm': laws.Case(WeightNorm, MATRIX, formula=_weight_norm, hard=HARD),
  'weight_norm_conv': laws.Case(WeightNorm, CONV, formula=_weight_norm),
  'weight_norm_attention': laws.Case(_attention, CONV, formula=_attention_norm),
  'unit_norm': laws.Case(
    UnitNorm,
    MATRIX,
    start=_unit_columns,
    formula=lambda theta: theta['v'] / _norms(theta['v']),
    hard=HARD,
  ),
  'spectral_norm': laws.Case(
    SpectralNorm, MATRIX, start=_unit_spectrum, hard=HARD
  ),
  'preserve_scale': laws.Case(_preserving, MATRIX, hard=HARD),
}
KEPT = {
  'spectral_norm_conv': laws.Case(SpectralNorm, CONV, start=_unit_spectrum),
  'weight_norm': laws.Case(WeightNorm, MATRIX[0], hard=HARD[0][:1]),
  'unit_norm': laws.Case(UnitNorm, _unit_columns(CONV)),
  'spectral_norm': laws.Case(
    SpectralNorm, _unit_spectrum(MATRIX.T), start=_unit_spectrum
  ),
}


class NormsLawTest(parameterized.TestCase):
  @laws.every_law(CASES)
  def test_law(self, law, case):
    laws.check(law, CASES[case])

  @parameterized.product(case=list(KEPT))
  def test_keeps_what_is_on_the_domain(self, case):
    laws.start(KEPT[case])
    laws.finite(KEPT[case])

  @parameterized.product(
    case=['weight_norm', 'unit_norm'], optimizer=list(laws.OPTIMIZERS)
  )
  def test_trains(self, case, optimizer):
    laws.trains(CASES[case], optimizer)


class WeightNormTest(parameterized.TestCase):
  def test_gradients_of_the_paper(self):
    # Equation 3.
    call, theta = laws.pure(WeightNorm(jnp.asarray(MATRIX, jnp.float32)))
    theta = laws.moved(theta)
    d_w = jnp.asarray(laws.noise((3, 4), 5), jnp.float32)
    (grads,) = jax.vjp(call, theta)[1](d_w)
    unit = theta['v'] / _norms(theta['v'])
    d_g = jnp.sum(d_w * unit, axis=0)
    ratio = theta['g'][None] / _norms(theta['v'])
    chex.assert_trees_all_close(grads['g'], d_g, rtol=1e-5)
    chex.assert_trees_all_close(
      grads['v'], ratio * (d_w - d_g[None] * unit), rtol=1e-4, atol=1e-6
    )
    radial = jnp.sum(grads['v'] * theta['v'], axis=0)
    chex.assert_trees_all_close(radial, jnp.zeros(4), atol=1e-5)

  def test_zeros_train(self):
    call, theta = laws.pure(WeightNorm(jnp.zeros((3, 4))))
    (grads,) = jax.vjp(call, theta)[1](jnp.ones((3, 4)))
    chex.assert_trees_all_close(grads['g'], jnp.full(4, 3**0.5), rtol=1e-6)

  def test_zeros_on_the_way(self):
    call, theta = laws.pure(WeightNorm(jnp.asarray(MATRIX, jnp.float32)))
    theta['v'] = theta['v'].at[:, 1].set(0.0)
    weight, pullback = jax.vjp(call, theta)
    chex.assert_tree_all_finite((weight, pullback(jnp.ones((3, 4)))))

  def test_attention(self):
    model = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    normed = nnx_ext.parametrize(
      model,
      {
        nnx.All(
          nnx.PathContains('query'), nnx.PathContains('kernel')
        ): _attention
      },
    )
    self.assertEqual(normed.query.kernel.g.shape, (2, 3))
    x = jnp.asarray(laws.noise((1, 4, 6)), jnp.float32)
    chex.assert_trees_all_close(normed(x), model(x), rtol=1e-5, atol=1e-6)

  def test_is_parametrized_again(self):
    model, x = laws.parametrized(CASES['weight_norm'])
    twice = nnx_ext.parametrize(model, {nnx.PathContains('v'): UnitNorm})
    self.assertEqual(
      sorted(nnx.to_pure_dict(nnx.state(twice))['kernel']), ['g', 'v']
    )
    chex.assert_trees_all_close(twice(x), model(x), rtol=1e-5)


class SpectralNormTest(parameterized.TestCase):
  def test_train_moves_the_vectors_eval_does_not(self):
    module = laws.move(SpectralNorm(jnp.asarray(MATRIX, jnp.float32)))
    w = module.w[...]
    u, v = module.u[...], module.v[...]
    module.eval()
    weights = [module() for _ in range(3)]
    chex.assert_trees_all_equal(weights[0], weights[1], weights[2])
    chex.assert_trees_all_equal((module.u[...], module.v[...]), (u, v))
    module.train()
    weight = module()
    v = w.T @ u / jnp.linalg.norm(w.T @ u)
    u = w @ v / jnp.linalg.norm(w @ v)
    chex.assert_trees_all_close(
      (module.u[...], module.v[...], weight), (u, v, w / (u @ w @ v)), rtol=1e-5
    )
    for _ in range(60):
      weight = module()
    self.assertAlmostEqual(float(jnp.linalg.norm(weight, 2)), 1.0, places=4)
    chex.assert_trees_all_equal(module.w[...], w)

  def test_num_iters(self):
    one = SpectralNorm(jnp.asarray(MATRIX, jnp.float32))
    three = SpectralNorm(jnp.asarray(MATRIX, jnp.float32), num_iters=3)
    laws.move(one), laws.move(three)
    one(), one()
    chex.assert_trees_all_close(one(), three(), rtol=1e-6)

  def test_no_gradient_through_the_vectors(self):
    # At any u and v, as if they were constants.
    module = SpectralNorm(jnp.asarray(MATRIX, jnp.float32))
    module.u[...] = u = jnp.array([0.6, 0.0, 0.8])
    module.v[...] = v = jnp.array([0.0, 1.0, 0.0, 0.0])
    d_w = jnp.asarray(laws.noise((3, 4), 5), jnp.float32)

    def expected(w):
      return jnp.sum(d_w * w / (u @ w @ v))

    module.eval()
    grads = nnx.grad(lambda module: jnp.sum(d_w * module()))(module)
    self.assertEqual(list(grads), ['w'])
    chex.assert_trees_all_close(
      grads['w'][...], jax.grad(expected)(module.w[...]), rtol=1e-4
    )

  def test_vectors_move_under_grad_and_jit(self):
    case = CASES['spectral_norm']
    model, x = laws.parametrized(case)
    laws.move(model.kernel)
    model.train()
    before = model.kernel.u[...]

    @nnx.jit
    def step(model):
      return nnx.grad(lambda model: jnp.sum(model(x)))(model)

    reference = nnx.clone(model)
    reference.kernel()
    step(model)
    self.assertGreater(float(jnp.max(jnp.abs(model.kernel.u - before))), 1e-4)
    chex.assert_trees_all_close(
      model.kernel.u[...], reference.kernel.u[...], rtol=1e-5
    )

  def test_a_frozen_critic_inside_of_a_gradient(self):
    critic, x = laws.parametrized(CASES['spectral_norm'])
    grad = jax.jit(jax.grad(lambda x: jnp.sum(critic(x) ** 2)))(x)
    self.assertEqual(grad.shape, x.shape)

  def test_leaves_zero(self):
    module = SpectralNorm(jnp.zeros((3, 4)))
    module()
    module.w[...] = jnp.asarray(MATRIX, jnp.float32)
    for _ in range(60):
      weight = module()
    self.assertAlmostEqual(float(jnp.linalg.norm(weight, 2)), 1.0, places=4)

  def test_the_mode_is_assigned(self):
    model, _ = laws.parametrized(CASES['spectral_norm'])
    model = nnx_ext.assign(model, 'kernel', jnp.ones((3, 4)))
    self.assertTrue(model.kernel.use_running_average)


class WordsTest(errors.ErrorsTestCase):
  @parameterized.product(kind=[WeightNorm, UnitNorm], shape=[(2, 2), ()])
  def test_no_such_axis(self, kind, shape):
    with self.refused(
      ValueError, f'{kind.__name__}: feature_axes=3', f'shape {shape}'
    ):
      kind(jnp.ones(shape), feature_axes=3)

  def test_vector(self):
    with self.refused(
      ValueError, 'SpectralNorm', 'two or more axes', 'float32 of shape (3,)'
    ):
      SpectralNorm(jnp.ones(3))

  def test_no_steps(self):
    with self.refused(ValueError, 'SpectralNorm: num_iters', 'got 0'):
      SpectralNorm(jnp.ones((2, 2)), num_iters=0)
