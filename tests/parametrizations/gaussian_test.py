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
"""GaussianMeanField, local_reparametrization and flipout."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import errors, nnx

import nnx_ext
from nnx_ext.parametrizations.constraints import Positive
from nnx_ext.parametrizations.gaussian import (
  GaussianMeanField,
  flipout,
  local_reparametrization,
)
from tests import models
from tests.errors import ErrorsTestCase
from tests.parametrizations import laws

KERNEL = laws.noise((3, 4))
C = jnp.asarray(laws.noise((3, 4), 2), jnp.float32)


def _gaussian(weight, *, stddev=0.5, **options):
  return GaussianMeanField(
    weight, stddev=stddev, rngs=nnx.Rngs(noise=7), **options
  )


def _built(dtype=jnp.float32, **options):
  return _gaussian(jnp.asarray(KERNEL, dtype), **options)


def _eps(built, count):
  """The noise of the ``count``-th read."""
  key = jax.random.fold_in(built.rngs.key[...], count)
  return jax.random.normal(key, built.shape)


def _count(built):
  return int(built.rngs.count[...])


CASES = {  # In eval mode: the mean.
  'mean': laws.Case(
    lambda weight: _gaussian(weight),
    KERNEL,
    formula=lambda theta: theta['mean'],
    hard=[np.zeros((3, 4)), np.full((3, 4), 1e30)],
  ),
}


class GaussianLawTest(parameterized.TestCase):
  # Flax can differentiate by no rng keys, as modes without updates do.
  @laws.every_law(CASES, skip=['every_mode'])
  def test_law(self, case, law):
    laws.check(law, CASES[case])

  @parameterized.parameters(*laws.OPTIMIZERS)
  def test_trains(self, optimizer):
    tx, built = laws.OPTIMIZERS[optimizer](), _built()
    loss = lambda weight, kl: jnp.sum((weight - C) ** 2) + 0.1 * kl

    def formula(theta, eps):
      mean, sigma = theta['mean'], jnp.log1p(jnp.exp(theta['rho']))
      kl = jnp.sum(-jnp.log(sigma) + (sigma**2 + mean**2) / 2 - 0.5)
      return loss(mean + sigma * eps, kl)

    theta = laws.pure(built)[1]
    state, train = tx.init(theta), nnx.Optimizer(built, tx, wrt=nnx.Param)

    @jax.jit
    def expected_step(theta, state, eps):
      updates, state = tx.update(jax.grad(formula)(theta, eps), state, theta)
      return optax.apply_updates(theta, updates), state

    @nnx.jit
    def step(built, train):
      grads = nnx.grad(lambda built: loss(built(), built.kl()))(built)
      train.update(built, grads)

    for count in range(10):
      theta, state = expected_step(theta, state, _eps(built, count))
      step(built, train)
    chex.assert_trees_all_close(
      laws.pure(built)[1], theta, rtol=1e-4, atol=1e-5
    )

  @parameterized.parameters(*models.MODES)
  def test_gradients_in_every_mode(self, mode):
    built = _built()
    read = lambda built: {'loss': jnp.sum(C * built())}
    _, grads = nnx_ext.value_and_grad_multi(
      read, argnums=nnx.DiffState(0, nnx.Param), **models.MODES[mode]
    )(built)
    eps, rho = _eps(built, 0), built.rho[...]
    chex.assert_trees_all_equal(grads['loss']['mean'][...], C)
    chex.assert_trees_all_close(
      grads['loss']['rho'][...], C * eps * jax.nn.sigmoid(rho), rtol=1e-6
    )
    self.assertEqual(_count(built), 1)


class GaussianMeanFieldTest(parameterized.TestCase):
  @parameterized.parameters(1e-8, 0.01, 1.0, 50.0, 1e4)
  def test_stddev_at_the_start(self, stddev):
    built = _built(stddev=stddev)
    chex.assert_trees_all_close(
      built.sigma, jnp.full((3, 4), stddev), rtol=2e-6
    )
    self.assertEqual(built.stddev, stddev)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_each_read_draws(self, dtype):
    built = _built(dtype)
    for count in range(3):
      weight = built[...]
      expected = built.mean[...] + built.sigma * _eps(built, count)
      self.assertEqual(weight.dtype, dtype)
      chex.assert_trees_all_close(weight, expected.astype(dtype), rtol=1e-6)
    shape = built.shape, built.dtype  # Known without a read.
    self.assertEqual(shape, ((3, 4), dtype))
    self.assertEqual(_count(built), 3)

  def test_modes(self):
    model = nnx_ext.parametrize(
      laws.layer(jnp.asarray(KERNEL, jnp.float32))[0],
      {nnx.PathContains('kernel'): _gaussian},
    )
    baked = nnx_ext.bake(model)
    chex.assert_trees_all_equal(baked.kernel[...], model.kernel.mean[...])
    self.assertFalse(model.kernel.deterministic)
    view = nnx_ext.materialize(model)
    chex.assert_trees_all_equal(view.kernel[...], view.kernel[...])
    self.assertTrue(jnp.any(model.kernel[...] != model.kernel[...]))
    model.eval()
    chex.assert_trees_all_equal(model.kernel[...], model.kernel.mean[...])
    self.assertEqual(_count(model.kernel), 3)
    model.train()
    self.assertTrue(jnp.any(model.kernel[...] != model.kernel.mean[...]))

  def test_assign_keeps_options_and_mode(self):
    model = nnx_ext.parametrize(
      nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
      {
        nnx.PathContains('kernel'): lambda w: _gaussian(
          w, stddev=0.25, prior_stddev=2.0, deterministic=True
        )
      },
    )
    model.kernel.rho[...] += 1
    model = nnx_ext.assign(model, 'kernel', C)
    chex.assert_trees_all_equal(model.kernel[...], C)
    chex.assert_trees_all_close(model.kernel.sigma, jnp.full((3, 4), 0.25))
    self.assertEqual(model.kernel.prior_stddev, 2.0)

  def test_weights_have_streams_of_their_own(self):
    rngs = nnx.Rngs(0)  # The default stream serves as well.
    first, second = (
      GaussianMeanField(jnp.zeros(3), rngs=rngs) for _ in range(2)
    )
    self.assertTrue(jnp.all(first() != second()))
    chex.assert_trees_all_equal(
      GaussianMeanField(jnp.zeros(3), rngs=nnx.Rngs(1, noise=2))(),
      GaussianMeanField(jnp.zeros(3), rngs=nnx.Rngs(noise=2).noise)(),
    )

  def test_transforms_move_the_noise(self):
    built = _built()
    read = nnx.jit(lambda built: built())
    first, second = read(built), read(built)
    chex.assert_trees_all_close(
      (first, second),
      tuple(built.mean[...] + built.sigma * _eps(built, i) for i in (0, 1)),
      rtol=1e-5,
    )
    length = 3
    scan = nnx.scan(
      lambda built, _: (built, built()),
      in_axes=(nnx.Carry, 0),
      out_axes=(nnx.Carry, 0),
    )
    built, weights = scan(built, jnp.arange(length))
    expected = [
      built.mean[...] + built.sigma * _eps(built, i) for i in (2, 3, 4)
    ]
    chex.assert_trees_all_close(weights, jnp.stack(expected), rtol=1e-5)
    with self.assertRaises(errors.TraceContextError):
      jax.jit(lambda: built())()
    self.assertEqual(_count(built), 5)

  def test_monte_carlo(self):
    n, model = 2000, _built()

    @nnx.split_rngs(splits=n)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}),))
    def sample(built):
      return built()

    noise = (sample(model) - model.mean[...][None]) / model.sigma[None]
    noise = np.asarray(noise).reshape(n, -1)
    covariance = noise.T @ noise / n
    np.testing.assert_allclose(noise.mean(0), np.zeros(12), atol=0.1)
    np.testing.assert_allclose(covariance, np.eye(12), atol=0.15)
    self.assertEqual(len(np.unique(noise[:, 0])), n)


class KLTest(parameterized.TestCase):
  def test_two_gaussians(self):
    kl = _gaussian(jnp.ones(()), stddev=2.0).kl()
    chex.assert_trees_all_close(kl, 2.5 - np.log(2) - 0.5, rtol=1e-6)
    chex.assert_trees_all_close(kl, 1.30685, rtol=1e-5)

  def test_zero_at_the_prior(self):
    built = _gaussian(jnp.zeros((3, 4)), stddev=0.3, prior_stddev=0.3)
    kl, grads = nnx.value_and_grad(lambda built: built.kl())(built)
    chex.assert_trees_all_close(
      (kl, nnx.to_pure_dict(grads)),
      (
        jnp.zeros(()),
        {'mean': jnp.zeros((3, 4)), 'rho': jnp.zeros((3, 4))},
      ),
      atol=2e-6,
    )

  def test_equals_the_formula_and_monte_carlo(self):
    built, prior = _built(prior_stddev=0.8), 0.8
    mean, sigma = np.float64(built.mean[...]), np.float64(built.sigma)
    expected = np.sum(
      np.log(prior / sigma) + (sigma**2 + mean**2) / (2 * prior**2) - 0.5
    )
    np.testing.assert_allclose(built.kl(), expected, rtol=1e-5)
    eps = laws.noise((20_000, 3, 4), 3)
    log_q = -(eps**2) / 2 - np.log(sigma)
    log_p = -(((mean + sigma * eps) / prior) ** 2) / 2 - np.log(prior)
    np.testing.assert_allclose(
      np.mean(np.sum(log_q - log_p, (1, 2))), expected, rtol=0.02
    )

  @parameterized.parameters(-1e4, -200.0, -20.0, 0.0, 100.0)
  def test_finite_wherever_rho_is(self, rho):
    built = _built()
    built.rho[...] = jnp.full((3, 4), rho)
    kl, grads = nnx.value_and_grad(lambda built: built.kl() + jnp.sum(built()))(
      built
    )
    chex.assert_tree_all_finite((kl, grads))

  def test_log_of_a_tiny_sigma(self):
    built = _gaussian(jnp.zeros(3))
    built.rho[...] = jnp.array([-20.5, -19.5, -100.0])
    chex.assert_trees_all_close(built.kl(), 140.0 - 1.5, rtol=1e-6)

  def test_of_a_model(self):
    model = nnx_ext.parametrize(
      nnx.Dict(a=nnx.Linear(3, 4, rngs=nnx.Rngs(0)), b=nnx.Dict()),
      {nnx.PathContains('kernel'): _gaussian},
    )
    model.b.tied = model.a.kernel
    chex.assert_trees_all_equal(nnx_ext.kl(model), model.a.kernel.kl())


def _layer(kind):
  """A layer with Gaussian weights, and a batch."""
  rngs, chosen = nnx.Rngs(0), nnx.Param
  if kind == 'linear':
    layer, x = nnx.Linear(3, 4, rngs=rngs), laws.noise((2, 5, 3))
  elif kind == 'no_bias':
    layer, x = nnx.Linear(3, 4, use_bias=False, rngs=rngs), laws.noise((2, 3))
  elif kind == 'plain_bias':
    layer, x = nnx.Linear(3, 4, rngs=rngs), laws.noise((2, 3))
    layer.bias[...] += 1.0
    chosen = nnx.PathContains('kernel')
  else:
    assert kind == 'conv'
    mask = jnp.resize(jnp.array([1.0, 0.0, 0.5]), (3, 2, 2, 4))
    layer = nnx.Conv(
      4, 4, (3, 2), 2,
      padding='CIRCULAR', feature_group_count=2, mask=mask, rngs=rngs,
    )  # fmt: skip
    x = laws.noise((2, 4, 3, 4))
  stream = nnx.RngStream(1, tag='noise')
  layer = nnx_ext.parametrize(
    layer, {chosen: lambda w: GaussianMeanField(w, stddev=0.5, rngs=stream)}
  )
  return layer, jnp.asarray(x, jnp.float32)


def _variance(layer, x):
  """Of the output under one draw of the weights, in which it is linear."""
  plain = nnx_ext.bake(layer)
  call, theta = laws.pure(plain)
  squares = jax.tree.map(jnp.square, jax.jit(jax.jacobian(call))(theta, x))
  variance = 0.0
  for name, square in squares.items():
    weight = getattr(layer, name)
    if isinstance(weight, GaussianMeanField):
      variance = variance + jnp.tensordot(square, weight.sigma**2, weight.ndim)
  return variance


LAYERS = ('linear', 'no_bias', 'plain_bias', 'conv')
METHODS = {'local': local_reparametrization, 'flipout': flipout}


class LayersTest(parameterized.TestCase):
  @parameterized.parameters(*LAYERS)
  def test_local_reparametrization_distribution(self, kind):
    layer, x = _layer(kind)
    n, mean = 4000, nnx_ext.bake(layer)(x)
    y = local_reparametrization(
      layer, jnp.asarray(np.concatenate([x] * n)), nnx.RngStream(3, tag='noise')
    ).reshape(n, *mean.shape)
    std = jnp.sqrt(_variance(layer, x))
    noise = (y - mean[None]) / jnp.maximum(std, 1e-6)[None]
    ones = jnp.ones(mean.shape)
    chex.assert_trees_all_close(jnp.mean(noise, 0), 0 * ones, atol=0.1)
    chex.assert_trees_all_close(jnp.std(noise, 0), ones, atol=0.1)
    correlation = jnp.mean(noise[:, 0] * noise[:, 1], 0)
    chex.assert_trees_all_close(correlation, 0 * ones[0], atol=0.1)

  def test_flipout_distribution(self):
    layer, x = _layer('linear')
    n, mean = 4000, nnx_ext.bake(layer)(x)
    stream = nnx.RngStream(3, tag='noise').split(n)
    draw = nnx.vmap(lambda stream: flipout(layer, x, stream))
    y = nnx.jit(draw)(stream)
    noise = (y - mean[None]) / jnp.sqrt(_variance(layer, x))[None]
    ones = jnp.ones(mean.shape)
    chex.assert_trees_all_close(jnp.mean(noise, 0), 0 * ones, atol=0.1)
    chex.assert_trees_all_close(jnp.std(noise, 0), ones, atol=0.1)
    correlation = jnp.mean(noise[:, 0] * noise[:, 1], 0)
    chex.assert_trees_all_close(correlation, 0 * ones[0], atol=0.1)

  @parameterized.parameters('linear', 'no_bias', 'plain_bias')
  def test_flipout_equals_weights_of_each_example(self, kind):
    layer, x = _layer(kind)
    y = flipout(layer, x, nnx.RngStream(5, tag='noise'))
    stream, kernel, bias = (
      nnx.RngStream(5, tag='noise'),
      layer.kernel,
      layer.bias,
    )
    d_kernel = kernel.sigma * jax.random.normal(stream(), kernel.shape)
    d_bias, b = jnp.zeros(4), jnp.zeros(4)
    if kind == 'linear':
      d_bias = bias.sigma * jax.random.normal(stream(), bias.shape)
      b = bias.mean[...]
    elif kind == 'plain_bias':
      b = bias[...]
    signs = lambda n: jax.random.rademacher(
      stream(), (2, *(1 for _ in x.shape[1:-1]), n), jnp.float32
    )
    r, s = signs(3).reshape(2, 3), signs(4).reshape(2, 4)
    for i in range(2):
      weight = kernel.mean[...] + d_kernel * jnp.outer(r[i], s[i])
      expected = jnp.matmul(x[i], weight)
      expected += jnp.broadcast_to(b + d_bias * s[i], expected.shape)
      chex.assert_trees_all_close(y[i], expected, rtol=1e-5, atol=1e-6)

  def test_flipout_equals_kernels_of_each_example(self):
    layer = nnx.Conv(2, 3, (2, 2), 2, padding='SAME', rngs=nnx.Rngs(0))
    gaussian = nnx_ext.parametrize(
      layer, {nnx.PathContains('kernel'): _gaussian}
    )
    x = jnp.asarray(laws.noise((2, 3, 3, 2)), jnp.float32)
    y = flipout(gaussian, x, nnx.RngStream(5, tag='noise'))
    stream, kernel = nnx.RngStream(5, tag='noise'), gaussian.kernel
    delta = kernel.sigma * jax.random.normal(stream(), kernel.shape)
    r = jax.random.rademacher(stream(), (2, 1, 1, 2), jnp.float32)
    s = jax.random.rademacher(stream(), (2, 1, 1, 3), jnp.float32)
    for i in range(2):
      signs = jnp.outer(r[i, 0, 0], s[i, 0, 0])[None, None]
      layer.kernel[...] = kernel.mean[...] + delta * signs
      chex.assert_trees_all_close(y[i], layer(x[i]), rtol=1e-5, atol=1e-6)

  def test_local_reparametrization_gradients(self):
    layer, x = _layer('linear')
    x = x.at[0, 0].set(0.0)  # And ReLUs give such rows.
    layer.bias = nnx.Param(jnp.ones(4))

    def loss(layer):
      y = local_reparametrization(layer, x, nnx.RngStream(5, tag='noise'))
      return jnp.sum(y**2)

    def formula(mean, rho):
      eps = jax.random.normal(nnx.RngStream(5, tag='noise')(), (2, 5, 4))
      square = jnp.matmul(x**2, jax.nn.softplus(rho) ** 2)
      std = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
      y = jnp.matmul(x, mean) + 1.0 + std * eps
      return jnp.sum(y**2)

    grads = nnx.jit(nnx.grad(loss))(layer)
    expected = jax.jit(jax.grad(formula, (0, 1)))(
      layer.kernel.mean[...], layer.kernel.rho[...]
    )
    actual = grads['kernel']['mean'][...], grads['kernel']['rho'][...]
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)
    self.assertTrue(jnp.all(actual[1] != 0))

  @parameterized.parameters(('conv', 'local'), ('linear', 'flipout'))
  def test_gradients_reach_every_param(self, kind, method):
    layer, x = _layer(kind)

    @nnx.jit
    def step(layer, rngs):
      return nnx.grad(
        lambda layer, rngs: jnp.sum(METHODS[method](layer, x, rngs) ** 2)
      )(layer, rngs)

    rngs = nnx.Rngs(noise=3)
    grads = step(layer, rngs)
    self.assertEqual(set(grads), {'kernel', 'bias'})
    for name in ('kernel', 'bias'):
      for theta in ('mean', 'rho'):
        self.assertTrue(jnp.any(grads[name][theta][...] != 0))
    chex.assert_tree_all_finite(grads)
    self.assertEqual(int(rngs.noise.count[...]), 1 if method == 'local' else 4)
    self.assertEqual(_count(layer.kernel), 0)

  @parameterized.product(kind=LAYERS, method=list(METHODS))
  def test_eval_mode_is_the_mean(self, kind, method):
    layer, x = _layer(kind)
    layer.eval()
    rngs = nnx.Rngs(0)
    y = METHODS[method](layer, x, rngs)
    chex.assert_trees_all_equal(y, nnx_ext.bake(layer)(x))
    self.assertEqual(int(rngs.default.count[...]), 0)

  @parameterized.parameters(
    ('local', jnp.bfloat16), ('local', None), ('flipout', None)
  )
  def test_half_precision(self, method, dtype):
    layer = nnx_ext.parametrize(
      nnx.Linear(3, 4, dtype=dtype, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
      {nnx.Param: _gaussian},
    )
    x = jnp.ones((2, 3), jnp.bfloat16)
    self.assertEqual(layer(x).dtype, jnp.bfloat16)
    y = METHODS[method](layer, x, nnx.Rngs(0))
    self.assertEqual(y.dtype, jnp.bfloat16)


class GaussianErrorsTest(ErrorsTestCase):
  @parameterized.product(
    name=['stddev', 'prior_stddev'], value=[0.0, -1.0, jnp.inf, jnp.nan]
  )
  def test_stddev(self, name, value):
    with self.refused(
      ValueError, 'GaussianMeanField', f'`{name}` must be positive', str(value)
    ):
      GaussianMeanField(jnp.ones(3), rngs=nnx.Rngs(0), **{name: value})

  @parameterized.parameters(*METHODS)
  def test_other_layers(self, method):
    f, x, rngs = METHODS[method], jnp.ones((2, 3)), nnx.Rngs(0)
    gaussian, _ = _layer('linear')
    lora = nnx.LoRALinear(3, 4, lora_rank=1, rngs=rngs)
    for layer in (lora, nnx.Sequential(gaussian), 'linear', nnx.Linear):
      name = type(layer).__name__
      with self.refused(TypeError, f.__name__, 'nnx.Linear or nnx.Conv', name):
        f(layer, x, rngs)

  @parameterized.parameters(*METHODS)
  def test_other_weights(self, method):
    f, x, rngs = METHODS[method], jnp.ones((2, 3)), nnx.Rngs(0)
    plain = nnx.Linear(3, 4, rngs=rngs)
    with self.refused(
      TypeError, f.__name__, 'kernel', 'got Param', 'nnx_ext.parametrize'
    ):
      f(plain, x, rngs)
    plain.bias[...] = jnp.ones(4)
    mixed = nnx_ext.parametrize(
      plain,
      {
        nnx.PathContains('kernel'): _gaussian,
        nnx.PathContains('bias'): Positive,
      },
    )
    with self.refused(TypeError, f.__name__, 'bias', 'got Positive'):
      f(mixed, x, rngs)

  def test_no_axis_of_examples(self):
    for kind in ('linear', 'conv'):
      layer, x = _layer(kind)
      x = x[0, 0] if kind == 'linear' else x[0]
      with self.refused(
        ValueError, 'flipout', 'first axis', str(x.shape), 'x[None]'
      ):
        flipout(layer, x, nnx.Rngs(0))
      local_reparametrization(layer, x, nnx.Rngs(0))
