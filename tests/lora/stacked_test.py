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
"""The law of LoRA on layers that nnx.vmap stacks, before and after."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.lora import kinds, steps, trees
from tests.lora.steps import STACKABLE, X, every_way


class StackedTest(parameterized.TestCase):
  @every_way
  def test_scan_over_layers(self, way, mode):
    model = trees.move(steps.stack(way))
    self.assertEqual(model.lora.lora_a.shape, (3, 4, 2))
    self.assertEqual(model.lora.lora_b.shape, (3, 2, 4))

    def loss(model, x):
      return jnp.mean(steps.squashed(steps.trunk(mode)(model, x)))

    def expected(factors):
      lora, x = factors['lora'], X
      for i in range(3):
        weight = model.kernel[...][i] + lora['lora_a'][i] @ lora['lora_b'][i]
        x = jnp.tanh(x @ weight + model.bias[...][i][None])
      return jnp.mean(steps.squashed(x))

    factors = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    trees.assert_close(
      nnx.jit(steps.value_and_grad(mode, loss), **models.MODES[mode])(model, X),
      jax.jit(jax.value_and_grad(expected))(factors),
    )
    merged = nnx_ext.merge_lora(model)
    trees.assert_close(
      steps.trunk(mode)(merged, X), steps.trunk(mode)(model, X)
    )
    plain = steps.layers(steps.linear, 3)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(plain))

  @parameterized.parameters(*STACKABLE)
  def test_each_layer_is_adapted_as_alone(self, name):
    kind, weight = kinds.KINDS[name], kinds.KINDS[name].weights[()]
    layers = trees.fill(nnx.eval_shape(lambda: steps.layers(kind.build, 3)))
    stack = trees.built(lambda: steps.apply(layers, alpha=3.0))
    alone = nnx.eval_shape(lambda: steps.apply(kind.model))
    for factor in ('lora_a', 'lora_b'):
      value, one = getattr(stack.lora, factor), getattr(alone.lora, factor)
      self.assertEqual(value.shape, (3, *one.shape))
    factors = nnx.to_pure_dict(nnx.state(stack, nnx.LoRAParam))['lora']
    random = factors['lora_b' if 'embed' in name else 'lora_a']
    self.assertGreater(float(np.max(np.abs(np.diff(random, axis=0)))), 1e-3)

    graphdef, state = nnx.split(trees.move(stack))

    @jax.jit
    def run(state, x):
      stack = nnx.merge(graphdef, state)
      call = nnx.vmap(kind.call, in_axes=(0, None))
      a, b = stack.lora.lora_a[...], stack.lora.lora_b[...]
      products = [1.5 * weight.product(a[i], b[i]) for i in range(3)]
      merged = nnx_ext.merge_lora(stack)
      delta = stack.lora.delta()
      return (delta, call(stack, x)), (jnp.stack(products), call(merged, x))

    trees.assert_close(*run(nnx.as_pure(state), kind.x), 1e-4)

  @parameterized.parameters(
    ('after', 'dora'),
    ('after', 'pissa'),
    ('after', 'olora'),
    ('after', 'orthogonal'),
    ('inside', 'dora'),
    ('inside', 'pissa'),
  )
  def test_starts(self, way, option):
    options = {'dora': True} if option == 'dora' else {'init': option}
    stack = steps.stack(way, **options)
    if option == 'dora':
      self.assertEqual(stack.lora.magnitude.shape, (3, 4))
    if option in ('pissa', 'olora'):
      self.assertEqual(stack.lora.start_a.shape, (3, 4, 2))
    base = nnx_ext.remove_lora(stack)
    call = steps.trunk('default')
    trees.assert_close(call(stack, X), call(base, X))
    trees.move(stack)
    merged = nnx_ext.merge_lora(stack)
    trees.assert_close(call(stack, X), call(merged, X))

  def test_stacked_twice(self):
    stack = trees.built(lambda: steps.apply(steps.layers(steps.linear, 2, 3)))
    trees.move(stack)
    self.assertEqual(stack.lora.lora_a.shape, (2, 3, 4, 2))
    self.assertEqual(stack.lora.lora_b.shape, (2, 3, 2, 4))
    delta = jnp.einsum(
      'abir,abro->abio', stack.lora.lora_a[...], stack.lora.lora_b[...]
    )
    trees.assert_close(stack.lora.delta(), delta)
    outer = nnx.scan(
      lambda x, layer: steps.trunk('default')(layer, x),
      in_axes=(nnx.Carry, 0),
      out_axes=nnx.Carry,
    )
    merged = nnx_ext.merge_lora(stack)
    trees.assert_close(outer(X, stack), outer(X, merged))

  def test_stacked_beside_single_layers(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.layers = steps.layers(steps.linear, 3)
        self.head = nnx.Linear(4, 2, rngs=rngs)

      def __call__(self, x):
        return self.head(steps.trunk('default')(self.layers, x))

    plain = Model(nnx.Rngs(0))
    model = steps.apply(plain)
    trees.assert_close(model(X), plain(X), 0.0)
    trees.move(model)
    trees.assert_close(model(X), nnx_ext.merge_lora(model)(X))
    trees.assert_close(nnx_ext.remove_lora(model)(X), plain(X), 0.0)
