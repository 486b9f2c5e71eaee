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
"""Parametrizations where people use them: the places flax's wrappers fail."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations import (
  GaussianMeanField,
  Orthogonal,
  SpectralNorm,
  WeightNorm,
)
from tests import models

KERNELS = nnx.PathContains('kernel')


def _spectral(layer):
  rule = lambda path, param: path[-1] == 'kernel' and param.ndim > 1
  factory = lambda weight: SpectralNorm(weight, preserve_scale=True)
  return nnx_ext.parametrize(layer, [(rule, factory)])


class SpectralNormTest(parameterized.TestCase):
  def test_attention_with_a_mask(self):
    layer = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    x = jnp.sin(jnp.arange(40.0)).reshape(2, 5, 4)
    mask = nnx.make_causal_mask(x[..., 0])
    chex.assert_trees_all_close(
      _spectral(layer)(x, mask=mask), layer(x, mask=mask), rtol=1e-4, atol=1e-5
    )

  def test_recurrent_cell(self):
    x = jnp.sin(jnp.arange(40.0)).reshape(2, 5, 4)
    make = lambda: nnx.RNN(nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)))
    model = _spectral(make())
    chex.assert_trees_all_close(
      nnx_ext.materialize(model)(x), make()(x), rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(model(x), make()(x), rtol=1e-4, atol=1e-5)

  @parameterized.product(mode=list(models.MODES))
  def test_gan(self, mode):
    # The critic is read twice in one loss, and by both losses.
    rngs = nnx.Rngs(0)
    generator = nnx.Linear(4, 4, rngs=rngs)
    critic = nnx_ext.parametrize(
      models.MLP(4, 1, rngs=rngs),
      [(lambda path, param: path[-1] == 'kernel', SpectralNorm)],
    )
    noise, real = models.batch(), 2.0 + models.batch()

    def losses(generator, critic, noise, real):
      fake, true = critic(generator(noise)), critic(real)
      return {'generator': -jnp.mean(fake), 'critic': jnp.mean(fake - true)}

    grads = nnx_ext.grad_multi(
      losses,
      argnums={
        'generator': nnx.DiffState(0, nnx.Param),
        'critic': nnx.DiffState(1, nnx.Param),
      },
      **models.MODES[mode],
    )(generator, critic, noise, real)
    self.assertGreater(
      float(jnp.max(jnp.abs(grads['critic']['l1']['kernel']['w'][...]))), 1e-4
    )
    self.assertGreater(
      float(jnp.max(jnp.abs(grads['generator']['kernel'][...]))), 1e-4
    )
    norm = np.linalg.norm(critic.l1.kernel[...], ord=2)
    np.testing.assert_allclose(norm, 1.0, rtol=1e-3)

  def test_frozen_and_captured(self):
    critic = _spectral(models.MLP(4, 1, rngs=nnx.Rngs(0)))
    critic.eval()
    generator = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    grads = nnx.grad(lambda g: -jnp.mean(critic(g(models.batch()))))(generator)
    self.assertGreater(float(jnp.max(jnp.abs(grads['kernel'][...]))), 1e-4)


class WeightNormTest(parameterized.TestCase):
  def test_learns_as_in_the_paper_where_flax_does_not(self):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (64, 8))
    y = x @ jax.random.normal(keys[1], (8, 4))
    layer = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))

    def loss(model):
      return jnp.mean((model(x) - y) ** 2)

    def paper(theta):
      v, g = theta
      norm = jnp.sqrt(jnp.sum(v**2, axis=0, keepdims=True))
      return jnp.mean((x @ (jnp.reshape(g, (1, 4)) * v / norm) - y) ** 2)

    @nnx.jit
    def step(model):
      grads, params = nnx.grad(loss)(model), nnx.state(model, nnx.Param)
      nnx.update(model, jax.tree.map(lambda p, g: p - 0.02 * g, params, grads))

    theta = layer.kernel[...], jnp.full(4, 3.0)
    wrapped = nnx.WeightNorm(
      nnx.clone(layer),
      scale_init=nnx.initializers.constant(3.0),
      rngs=nnx.Rngs(0),
    )
    ours = nnx_ext.parametrize(layer, {KERNELS: WeightNorm})
    ours.kernel.g[...] = jnp.full(4, 3.0)
    for _ in range(20):
      theta = jax.tree.map(
        lambda t, g: t - 0.02 * g, theta, jax.grad(paper)(theta)
      )
      step(ours)
      step(wrapped)
    np.testing.assert_allclose(loss(ours), paper(theta), rtol=1e-4)
    self.assertGreater(float(loss(wrapped)), 2.0 * float(paper(theta)))


class OrthogonalTest(parameterized.TestCase):
  def test_materialize_takes_the_exponential_out_of_the_loop(self):
    cell = nnx.SimpleCell(
      4,
      4,
      recurrent_kernel_init=nnx.initializers.orthogonal(),
      rngs=nnx.Rngs(0),
    )
    model = nnx_ext.parametrize(
      nnx.RNN(cell), [(lambda path, _: 'dense_h' in path, Orthogonal)]
    )
    graphdef, state = nnx.split(model)

    def exponentials(read):
      """How often it is computed: outside of the loop, and inside."""
      forward = lambda state, x: read(nnx.merge(graphdef, state))(x)
      jaxpr = jax.make_jaxpr(forward)(state, jnp.ones((1, 100, 4)))
      outside, inside = 0, 0
      for eqn in jaxpr.eqns:
        count = str(eqn).count('name=expm')
        if eqn.primitive.name == 'scan':
          inside += count
        else:
          outside += count
      return outside, inside

    self.assertEqual(exponentials(nnx_ext.materialize), (1, 0))
    self.assertEqual(exponentials(lambda model: model), (0, 1))


class MonteCarloTest(parameterized.TestCase):
  """Samples by ``nnx.vmap`` over the rng state: what else moves, and how."""

  def _predict(self, model, x):
    @nnx.split_rngs(splits=5)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None))
    def predict(model, x):
      return nnx_ext.materialize(model)(x)

    return predict(model, x)

  def _model(self, **parts):
    rngs = nnx.Rngs(params=0, dropout=1, noise=2)
    return nnx_ext.parametrize(
      models.MLP(4, 1, rngs=rngs, **parts),
      {KERNELS: lambda w: GaussianMeanField(w, stddev=0.1, rngs=rngs)},
    )

  def _spread(self, model):
    return float(jnp.max(jnp.std(self._predict(model, models.batch()), axis=0)))

  def test_dropout_draws_a_mask_for_each_sample(self):
    model = self._model(dropout=0.5)
    for _, node in nnx.iter_graph(model):
      if isinstance(node, GaussianMeanField):
        node.eval()  # no noise of the weights: what differs is dropout
    self.assertGreater(self._spread(model), 1e-2)
    model.eval()
    self.assertLess(self._spread(model), 1e-6)

  def test_batch_norm_in_eval_mode_keeps_its_statistics(self):
    model = self._model(batch_norm=True)
    model.norm.eval()
    before = model.norm.mean[...]
    self.assertGreater(self._spread(model), 1e-3)
    chex.assert_trees_all_equal(model.norm.mean[...], before)

  def test_batch_norm_in_train_mode_is_refused_by_flax(self):
    # Its statistics would depend on the sample, but are shared by all.
    model = self._model(batch_norm=True)
    with self.assertRaisesRegex(ValueError, 'out_axes'):
      self._predict(model, models.batch())
