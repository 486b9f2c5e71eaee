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

from benchmarks import reparam_models as models
from benchmarks import reparam_programs as programs
from tests import compiler

WIDTH, DEPTH, SIZE = 64, 6, 32


def _mlp():
  return models.MLP(DEPTH, WIDTH, rngs=nnx.Rngs(0))


def _scanned():
  return models.Scanned(DEPTH, WIDTH, rngs=nnx.Rngs(0))


def _drawn(mean, rho, noise):
  return mean + jax.nn.softplus(rho) * noise


def _mean_field(params):
  def gaussian(x):
    noise = jax.random.normal(jax.random.key(3), x.shape)
    return {'mean': x, 'rho': jnp.full_like(x, -3.0), 'noise': noise}

  theta = jax.tree.map(gaussian, params)
  return theta, models.made_of(_drawn, 'mean', 'rho', 'noise')


def _weight_norm(params):
  def directions(path, x):
    if path[-1].key != 'kernel':
      return x
    return {'v': x, 'g': jnp.linalg.norm(x, axis=-2)}

  return jax.tree.map_with_path(directions, params), models.NORMED


class ReparamBarsTest(parameterized.TestCase):
  @parameterized.product(
    make_theta=[_mean_field, _weight_norm], make=[_mlp, _scanned]
  )
  def test_flops_and_temporary_bytes(self, make_theta, make):
    model, x = make(), jnp.ones((SIZE, WIDTH))
    params = nnx.to_pure_dict(nnx.state(model))
    theta, weights = make_theta(params)
    hand, step = (
      compiler.figures(of(weights, theta, model, x))
      for of in (models.hand_step, models.reparam_step)
    )
    self._assert_no_more(step, hand)

  def test_weight_norm_at_the_weight(self):
    case = programs.weight_norm(3, 256, 256, peers=False)
    step, hand = (
      compiler.figures(case.steps[name]())
      for name in ('parametrize', 'by hand')
    )
    self._assert_no_more(step, hand)

  def _assert_no_more(self, step, hand):
    self.assertGreater(hand.flops, 1e5)
    self.assertLessEqual(step.flops, 1.01 * hand.flops)
    self.assertLessEqual(step.temporary_bytes, 1.05 * hand.temporary_bytes)
