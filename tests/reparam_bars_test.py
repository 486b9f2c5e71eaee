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
"""What a compiled reparam step may cost beside a hand-written one."""

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from benchmarks import multi_programs as programs

WIDTH, DEPTH, SIZE = 64, 6, 32


def _mlp():
  return programs.MLP((WIDTH,) * (DEPTH + 1), rngs=nnx.Rngs(0))


def _scanned():
  return programs.Scanned(DEPTH, WIDTH, rngs=nnx.Rngs(0))


def _noise(params):
  keys = jax.random.split(jax.random.key(3), len(jax.tree.leaves(params)))
  leaves, treedef = jax.tree.flatten(params)
  drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
  return jax.tree.unflatten(treedef, drawn)


def _mean_field(theta, params):
  """One draw of Gaussian weights, given its noise."""
  return jax.tree.map(
    lambda mean, rho, noise: mean + jax.nn.softplus(rho) * noise,
    theta['mean'],
    theta['rho'],
    theta['noise'],
  )


def _weight_norm(theta, params):
  def normed(v, g):
    if v.ndim < 2:
      return v
    norm = jnp.sqrt(jnp.sum(v**2, axis=-2, keepdims=True))
    return v * g[..., None, :] / norm

  return jax.tree.map(normed, theta['v'], theta['g'])


def _theta(kind, params):
  if kind == 'mean_field':
    rho = jax.tree.map(lambda x: jnp.full(x.shape, -3.0), params)
    return {'mean': params, 'rho': rho, 'noise': _noise(params)}
  norms = jax.tree.map(
    lambda x: jnp.sqrt(jnp.sum(x**2, axis=-2)) if x.ndim > 1 else x, params
  )
  return {'v': params, 'g': norms}


TRANSFORMS = {'mean_field': _mean_field, 'weight_norm': _weight_norm}


def _loss(model, x):
  return jnp.mean((model(x) - 1.0) ** 2)


def setUpModule():
  jax.config.update('jax_disable_most_optimizations', False)


def tearDownModule():
  jax.config.update('jax_disable_most_optimizations', True)


class ReparamBarsTest(parameterized.TestCase):
  @parameterized.product(kind=list(TRANSFORMS), make=[_mlp, _scanned])
  def test_flops_and_temporary_bytes(self, kind, make):
    transform = TRANSFORMS[kind]
    model, x = make(), jnp.ones((SIZE, WIDTH))
    graphdef, state = nnx.split(model)
    params = nnx.as_pure(state)
    theta = _theta(kind, params)

    def by_hand(theta, state):
      def loss(theta):
        return _loss(nnx.merge(graphdef, transform(theta, None)), x)

      return jax.value_and_grad(loss)(theta), state

    def ours(theta, state):
      model = nnx.merge(graphdef, state)
      out = nnx_ext.reparam_value_and_grad(_loss, transform)(theta, model, x)
      return out, nnx.state(model)

    hand, step = (
      jax.jit(f).lower(theta, state).compile() for f in (by_hand, ours)
    )
    self.assertGreater(programs.flops(hand), 1e5)
    self.assertLessEqual(programs.flops(step), 1.01 * programs.flops(hand))
    self.assertLessEqual(
      programs.temporary_bytes(step), 1.05 * programs.temporary_bytes(hand)
    )
