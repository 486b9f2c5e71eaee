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
"""The ways of a case to train adapters do the same work."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from benchmarks import lora_programs as programs
from benchmarks import steps
from benchmarks.lora_ways import FULL, NAIVE, OURS

BLOCK = dict(width=16, hidden=32, tokens=8, rank=2, depth=1)
# Each with what it's called with.
CASES = {
  'blocks': (programs.blocks, BLOCK),
  'attention': (
    programs.attention,
    dict(width=16, heads=2, tokens=8, rank=2),
  ),
  'dora': (programs.dora, dict(width=16, hidden=32, tokens=8, rank=2)),
  'recurrent': (programs.recurrent, dict(width=8, batch=2, length=4, rank=2)),
  'attend': (programs.attend, dict(vocabulary=32, width=8, tokens=4, rank=2)),
}


class WaysTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_all_give_the_same(self, name):
    make, sizes = CASES[name]
    case = make(**sizes)
    flops, ours = self._run(case.steps[OURS]())
    self.assertLessEqual(case.limit, flops)
    for other in set(case.steps) - {OURS, FULL, 'LoRA'}:
      with self.subTest(other):
        _, theirs = self._run(case.steps[other]())
        self.assertEqual(len(ours), len(theirs))
        for mine, its in zip(ours, theirs):
          # Of what Adam keeps, the first moments are the gradients.
          self.assertGreater(np.max(np.abs(mine)), 0)
          atol = 1e-4 * np.max(np.abs(mine))
          np.testing.assert_allclose(mine, its, rtol=0, atol=atol)

  def _run(self, step: steps.Jitted) -> tuple[float, list[np.ndarray]]:
    """The flops of a step, and the leaves of what it returns."""
    compiled = jax.jit(step.function).lower(*step.arguments).compile()
    out = compiled(*step.arguments)
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(out)]
    return compiled.cost_analysis()['flops'], leaves

  def test_in_bfloat16_nothing_is_wider(self):
    case = programs.blocks(**BLOCK, dtype=jnp.bfloat16)
    for name in (OURS, 'nnx.LoRA', NAIVE, FULL):
      trained, *_ = case.steps[name]().arguments
      dtypes = {leaf.dtype for leaf in jax.tree.leaves(trained)}
      self.assertEqual(dtypes, {jnp.dtype(jnp.bfloat16)})
