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
"""An adapter belongs to a weight: layers and weights that are shared."""

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.lora import steps, trees
from tests.lora.steps import IDS, X


class Twice(nnx.Module):
  """One layer in two places."""

  def __init__(self, rngs):
    self.first = nnx.Linear(4, 4, rngs=rngs)
    self.second = self.first

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Tied(nnx.Module):
  """Two layers with one kernel."""

  def __init__(self, rngs):
    self.first = nnx.Linear(4, 4, rngs=rngs)
    self.second = nnx.Linear(4, 4, rngs=rngs)
    self.second.kernel = self.first.kernel

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class TiedKinds(nnx.Module):
  """An embedding that is another layer's kernel, read from the other side."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 4, rngs=rngs)
    self.head = nnx.Einsum('btd,vd->btv', (7, 4), rngs=rngs)
    self.head.kernel = self.embed.embedding

  def __call__(self, ids):
    return self.head(jnp.tanh(self.embed(ids)))


class SharedTest(parameterized.TestCase):
  @parameterized.parameters(Twice, Tied)
  def test_adapted_once(self, cls):
    plain = cls(nnx.Rngs(0))
    model = trees.move(steps.apply(plain))
    self.assertLen(trees.factors(model), 2)
    lora = model.first.lora
    weight = model.first.kernel[...] + lora.lora_a @ lora.lora_b

    hidden = jnp.tanh(X @ weight + plain.first.bias[...][None])
    expected = hidden @ weight + plain.second.bias[...][None]
    copies = {
      'itself': model,
      'clone': nnx.clone(model),
      'merge': nnx.merge(*nnx.split(model)),
    }
    for copy in copies.values():
      self.assertIs(copy.first.lora, copy.second.lora)
      self.assertIs(copy.first.kernel, copy.second.kernel)
      trees.assert_close(copy(X), expected)
    merged = nnx_ext.merge_lora(model)
    trees.assert_close(merged(X), expected)
    trees.assert_close(merged.first.kernel[...], weight)
    self.assertIs(merged.first.kernel, merged.second.kernel)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(plain))
    self.assertEqual(
      nnx.graphdef(nnx_ext.remove_lora(model)), nnx.graphdef(plain)
    )
    with nnx_ext.lora_disabled(model):
      trees.assert_close(model(X), plain(X), 0.0)

  @parameterized.parameters(Twice, Tied)
  def test_gradients_come_from_both(self, cls):
    model = trees.move(steps.apply(cls(nnx.Rngs(0))))
    graphdef, factors, rest = nnx.split(model, nnx.LoRAParam, ...)
    plain_def, base = nnx.split(nnx_ext.remove_lora(model))
    base = nnx.as_pure(base)

    def expected(factors):
      plain = nnx.merge(plain_def, base)
      lora = factors['first']['lora']
      kernel = plain.first.kernel
      kernel.set_value(kernel[...] + lora['lora_a'] @ lora['lora_b'])
      return steps.mean_loss(plain, X)

    grads = nnx.grad(steps.mean_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(
      model, X
    )
    trees.assert_close(
      nnx.to_pure_dict(grads), jax.grad(expected)(nnx.to_pure_dict(factors))
    )

  def test_a_weight_of_two_kinds(self):
    plain = TiedKinds(nnx.Rngs(0))
    model = steps.apply(plain)
    self.assertIs(model.embed.lora, model.head.lora)
    trees.assert_close(model(IDS), plain(IDS))
    trees.move(model)
    lora = model.embed.lora
    merged = nnx_ext.merge_lora(model)
    trees.assert_close(
      merged.embed.embedding[...],
      plain.embed.embedding[...] + lora.lora_a @ lora.lora_b,
    )
    trees.assert_close(model(IDS), merged(IDS))
