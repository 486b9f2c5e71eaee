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
"""Parametrizations of weights that are sharded."""

import jax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations import Orthogonal, WeightNorm


class ShardingTest(parameterized.TestCase):
  def test_sharding_metadata(self):
    init = nnx.with_partitioning(
      nnx.initializers.lecun_normal(), ('data', 'model')
    )
    mesh = jax.make_mesh(
      (2, 2),
      ('data', 'model'),
      axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    with jax.set_mesh(mesh):
      plain = nnx.Linear(4, 6, kernel_init=init, rngs=nnx.Rngs(0))
      model = nnx_ext.parametrize(
        plain, {nnx.PathContains('kernel'): WeightNorm}
      )
    key = next(
      k
      for k, v in plain.kernel.get_metadata().items()
      if v == ('data', 'model')
    )
    self.assertEqual(model.kernel.v.get_metadata()[key], ('data', 'model'))
    self.assertEqual(nnx.graphdef(nnx_ext.bake(model)), nnx.graphdef(plain))

  @parameterized.product(jit=[False, True])
  def test_sharded_theta_stands_where_the_weight_stood(self, jit):
    def make():
      metadata = {'out_sharding': (None, 'model')}
      plain = nnx.Linear(4, 4, kernel_metadata=metadata, rngs=nnx.Rngs(0))
      rules = {nnx.PathContains('kernel'): Orthogonal}
      return plain, nnx_ext.parametrize(plain, rules)

    mesh = jax.make_mesh(
      (4,), ('model',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    with jax.set_mesh(mesh):
      plain, model = nnx.jit(make)() if jit else make()
      self.assertEqual(
        model.kernel.x[...].sharding.spec, plain.kernel[...].sharding.spec
      )
    # Out of the mesh the names are kept, and nothing is moved.
    again = nnx_ext.parametrize(plain, {nnx.PathContains('kernel'): Orthogonal})
    self.assertEqual(
      again.kernel.x.get_metadata()['out_sharding'],
      plain.kernel.get_metadata()['out_sharding'],
    )
