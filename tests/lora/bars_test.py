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
"""What an adapted layer may cost: flops, temporary bytes, primitives.

Never a time: these repeat to the digit.
"""

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from benchmarks import lora_programs as programs
from benchmarks import steps
from tests import compiler

WIDTH, HIDDEN, TOKENS, RANK, DEPTH = 1024, 4096, 512, 8, 4


def figures(case: steps.Case, name: str) -> steps.Figures:
  return compiler.figures(case.steps[name]())


class BlocksTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    case = programs.blocks(WIDTH, HIDDEN, TOKENS, RANK, DEPTH)
    names = 'nnx_ext', 'nnx.LoRA', 'W + s A B', 'full'
    cls.figures = {name: figures(case, name) for name in names}

  def test_flops_are_those_of_the_factored_form(self):
    # Forward 2Tkn + 2Tr(k + n); backward 2Tkn for the input, twice 2Tr(k + n).
    layer = 4 * TOKENS * WIDTH * HIDDEN + 6 * TOKENS * RANK * (WIDTH + HIDDEN)
    self.assertLessEqual(self._flops('nnx_ext'), 2 * DEPTH * layer)
    self.assertGreater(self._flops('W + s A B'), 2 * DEPTH * layer)

  def test_flops_beside_full_fine_tuning(self):
    self.assertLessEqual(self._flops('nnx_ext'), 0.65 * self._flops('full'))

  def test_temporary_bytes_are_those_of_a_bypass(self):
    ours, peer = (
      self.figures[name].temporary_bytes for name in ('nnx_ext', 'nnx.LoRA')
    )
    self.assertGreater(peer, 1e7)
    self.assertLessEqual(ours, 1.01 * peer)

  def _flops(self, name: str) -> float:
    return self.figures[name].flops


class LayersTest(parameterized.TestCase):
  def test_a_lookup_never_makes_the_table(self):
    vocabulary, width = 32_000, 1024
    case = programs.embed(vocabulary, width)
    table = 4 * vocabulary * width
    ours, merged = (
      figures(case, name).temporary_bytes for name in ('nnx_ext', 'W + s A B')
    )
    self.assertLessEqual(ours, table / 50)
    self.assertGreater(merged, table)

  @parameterized.parameters(
    ('conv', 0.6), ('recurrent', 0.5), ('attend', 0.52), ('attention', 0.7)
  )
  def test_flops_beside_the_merged_weight(self, program, bar):
    case = getattr(programs, program)()
    ours, merged = (
      figures(case, name).flops for name in ('nnx_ext', 'W + s A B')
    )
    self.assertGreater(merged, 1e7)
    self.assertLessEqual(ours / merged, bar)

  def test_dora_forms_no_gradient_of_the_weight(self):
    case = programs.dora()
    ours, plain, full = (
      figures(case, name).flops for name in ('nnx_ext', 'LoRA', 'full')
    )
    self.assertLessEqual(ours, 1.02 * plain)
    self.assertLessEqual(ours, 0.65 * full)


class FrozenATest(parameterized.TestCase):
  @parameterized.parameters(
    (nnx.LoRAParam, True), (nnx_ext.lora_fa_filter, False)
  )
  def test_the_input_is_kept_for_a_alone(self, wrt, is_kept):
    layer = nnx_ext.apply_lora(
      nnx.Linear(24, 40, rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(1)
    )
    graphdef, trained, rest = nnx.split(layer, wrt, ...)

    def forward(trained, x):
      return nnx.merge(graphdef, trained, rest)(x)

    x = jnp.ones((17, 24))
    _, pullback = jax.vjp(lambda trained: forward(trained, x), trained)
    kept = [leaf.shape for leaf in jax.tree.leaves(pullback)]
    self.assertIn((17, 2), kept)
    self.assertEqual(x.shape in kept, is_kept)


class RowsTest(parameterized.TestCase):
  def test_gradients_of_factors_sum_over_one_axis(self):
    # XLA:CPU transposes the larger operand of one that sums over several.
    layer = nnx_ext.apply_lora(
      nnx.Linear(24, 40, rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(1)
    )
    graphdef, trained, rest = nnx.split(layer, nnx.LoRAParam, ...)

    def loss(trained, x):
      return jnp.sum(nnx.merge(graphdef, trained, rest)(x) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(trained, jnp.ones((5, 7, 24)))
    sums = [
      len(equation.params['dimension_numbers'][0][0])
      for equation in jaxpr.eqns
      if equation.primitive.name == 'dot_general'
    ]
    self.assertLen(sums, 6)  # three forward; of A, of B, and of what is between
    self.assertEqual(set(sums), {1})


class EagerTest(parameterized.TestCase):
  def test_a_call_is_two_linear_calls_a_product_a_scale_and_an_add(self):
    plain = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    layer = nnx_ext.apply_lora(plain, rank=2, alpha=4, rngs=nnx.Rngs(1))
    x = jnp.ones((3, 8))
    ours, once = (
      len(jax.make_jaxpr(lambda x, f=f: f(x))(x).eqns) for f in (layer, plain)
    )
    self.assertGreater(ours, once)
    self.assertLessEqual(ours, 2 * once + 3)
