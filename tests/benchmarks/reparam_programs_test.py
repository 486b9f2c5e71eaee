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
"""The steps of each reparam case give the same numbers."""

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from benchmarks import bench_reparam

# It starts at another theta and trains another function of it.
DIFFERENT = {'nnx.WeightNorm'}

# One of each program.
CASES = (
  'weight norm',
  'weight norm, scanned',
  'weight norm, not jitted',
  'mean field, 1 sample',
  'mean field, 2 samples',
  'orthogonal recurrent',
  'hypernetwork',
)


def _value_and_gradient(step):
  """What a step returns, without what else it changes."""
  out, rest = step.prepare().run()
  value, gradient = out if isinstance(out, tuple) else (out, rest)
  return value, jax.tree.leaves(gradient)


class ReparamProgramsTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_steps_agree(self, name):
    case = bench_reparam.CASES[name].case('small')
    value, gradient = _value_and_gradient(case.steps[case.baseline]())
    for leaf in gradient:
      self.assertTrue(jnp.any(leaf != 0))
    for step in case.steps.keys() - DIFFERENT - {case.baseline}:
      with self.subTest(step):
        made = _value_and_gradient(case.steps[step]())
        chex.assert_trees_all_close(
          made, (value, gradient), rtol=1e-4, atol=1e-6
        )


if __name__ == '__main__':
  absltest.main()
