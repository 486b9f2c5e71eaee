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
"""Dropout on the input of A: its stream, its modes, scanned and recurrent."""

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.lora import kinds, steps, trees
from tests.lora.steps import X, every_mode, every_way
from tests.lora.trees import noise


class DropoutTest(parameterized.TestCase):
  def _counts(self, model):
    return {
      path: int(jnp.sum(count.get_value()))
      for path, count in nnx.iter_graph(model)
      if isinstance(count, nnx.RngCount)
    }

  def test_on_the_input_of_the_adapter(self):
    model = trees.move(kinds.KINDS['linear'].apply(dropout=0.5, alpha=3.0))
    x, lora = kinds.KINDS['linear'].x, model.lora
    dropped = nnx.clone(lora.dropout)(x)
    base = kinds.KINDS['linear'].model(x)
    expected = base + 1.5 * (dropped @ lora.lora_a) @ lora.lora_b
    first, second = model(x), model(x)
    trees.assert_close(first, expected)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-2)

  def test_eval_is_the_merged_model(self):
    model = steps.adapted(dropout=0.5)
    merged = nnx_ext.merge_lora(model)
    model.eval()
    trees.assert_close(model(X), merged(X))
    before = self._counts(model)
    model(X)
    self.assertEqual(self._counts(model), before)
    model.train()
    self.assertGreater(float(jnp.max(jnp.abs(model(X) - merged(X)))), 1e-2)

  @parameterized.parameters(
    'general_batch', 'einsum_batched', 'conv_groups', 'transpose', 'attend',
  )  # fmt: skip
  def test_kinds(self, name):
    kind = kinds.KINDS[name]
    first, second, outputs, merged = _with_dropout(kind, kind.x)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-3)
    trees.assert_close(outputs, merged, kind.tolerance)

  def test_none_on_ids(self):
    kind = kinds.KINDS['embed']
    model = trees.move(kind.apply(dropout=0.5))
    trees.assert_close(model(kind.x), nnx_ext.merge_lora(model)(kind.x))

  @every_mode
  def test_own_stream(self, mode):
    rngs = nnx.Rngs(params=0, dropout=1)
    plain = models.MLP(4, 3, dropout=0.5, rngs=rngs)
    model = trees.move(steps.apply(plain, dropout=0.5))
    before = self._counts(model)
    step = nnx.jit(lambda model, x: model(x), **models.MODES[mode])
    first, second = step(model, X), step(model, X)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-3)
    for path, count in self._counts(model).items():
      self.assertEqual(count, before[path] + 2, path)
    # The model's own dropout draws what it drew.
    with nnx_ext.lora_disabled(model):
      plain(X), plain(X)
      trees.assert_close(model(X), plain(X), 0.0)

  @every_way
  def test_in_scanned_layers(self, way, mode):
    model = steps.stack(way, dropout=0.5)
    # The same factors in each layer: only the masks differ.
    for param in trees.factors(model).values():
      param.set_value(jnp.stack([noise(param.shape[1:], param.ndim)] * 3))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0),
              **models.MODES[mode])  # fmt: skip
    def masks(x, layer):
      return x, layer(x) - x @ layer.kernel - layer.bias[None]

    scan = nnx.jit(lambda model, x: masks(x, model)[1], **models.MODES[mode])
    first, second = scan(model, X), scan(model, X)
    deltas = [*first, *second]
    for i, a in enumerate(deltas):
      for b in deltas[:i]:
        self.assertGreater(float(jnp.max(jnp.abs(a - b))), 1e-2)
    model.eval()
    merged = nnx_ext.merge_lora(model)
    call = steps.trunk(mode)
    trees.assert_close(call(model, X), call(merged, X))

  def test_in_a_recurrent_cell(self):
    kind = kinds.KINDS['simple_cell']
    first, second, outputs, merged = _with_dropout(kind, kind.x)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-3)
    trees.assert_close(outputs, merged, kind.tolerance)

  def test_a_mask_for_each_step_of_a_recurrent_cell(self):
    # The same input at each step and nothing recurrent.
    x = jnp.stack([noise((2, 5))] * 4, axis=1)

    def forget(cell):
      cell.dense_h.kernel.set_value(jnp.zeros((3, 3)))
      cell.dense_h.lora.lora_b.set_value(jnp.zeros((2, 3)))

    _, outputs, last, _ = _with_dropout(
      kinds.KINDS['simple_cell'], x, lambda model: forget(model.cell)
    )
    differ = lambda y: float(jnp.max(jnp.abs(y[:, 0] - y[:, 1])))
    self.assertGreater(differ(outputs), 1e-3)
    self.assertLess(differ(last), 1e-6)


def _with_dropout(kind, x, change=lambda model: None):
  """Two calls with dropout, one in eval mode, and one of the merged model."""
  plain, base = nnx.split(kind.model)

  @jax.jit
  def run(base, x):
    model = trees.move(kind.apply(nnx.merge(plain, base), dropout=0.5))
    change(model)
    first, second = kind.call(model, x), kind.call(model, x)
    merged = kind.call(nnx_ext.merge_lora(model), x)
    model.eval()
    return first, second, kind.call(model, x), merged

  return run(nnx.as_pure(base), x)
