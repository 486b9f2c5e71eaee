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
"""Adapted layers by their own constructors, beside upstream's."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.lora import kinds, trees
from tests.lora.trees import noise


def each(names):
  return parameterized.named_parameters(
    [{'testcase_name': f'_{name}', 'name': name} for name in names]
  )


# Layers by their own constructors: class, arguments, options, input.
CONSTRUCTED = {
  'linear': (nnx.Linear, (5, 7), {'use_bias': False}, (3, 5)),
  'general': (nnx.LinearGeneral, ((3, 4), 5), {'axis': (1, -1)}, (2, 3, 6, 4)),
  'einsum': (
    nnx.Einsum,
    ('btd,dnh->btnh', (5, 3, 4), (3, 4)),
    {},
    (2, 6, 5),
  ),
  'conv': (nnx.Conv, (4, 6, 3), {'feature_group_count': 2}, (2, 8, 4)),
  'transpose': (nnx.ConvTranspose, (4, 6, 3), {'strides': 2}, (2, 5, 4)),
  'embed': (nnx.Embed, (7, 5), {}, kinds.IDS),
}


class ConstructorTest(parameterized.TestCase):
  @each(CONSTRUCTED)
  def test_is_the_plain_layer_with_an_adapter(self, name):
    cls, args, options, shape = CONSTRUCTED[name]
    plain = cls(*args, **options, rngs=nnx.Rngs(0))
    layer = kinds.CLASSES[cls](
      *args, **options, lora_rank=2, alpha=3.0, rngs=nnx.Rngs(0)
    )
    x = kinds.Kind(lambda _: plain, shape).x
    before, after = trees.leaves(plain), trees.leaves(layer)
    trees.assert_same({path: after[path] for path in before}, before)
    np.testing.assert_array_equal(layer(x), plain(x))
    self.assertEqual(layer.lora.scale, 1.5)
    adapted = nnx_ext.apply_lora(plain, rank=2, alpha=3.0, rngs=nnx.Rngs(1))
    self.assertEqual(nnx.graphdef(layer), nnx.graphdef(adapted))
    removed = nnx_ext.remove_lora(layer)
    self.assertEqual(nnx.graphdef(removed), nnx.graphdef(plain))
    trees.move(layer)
    merged = nnx_ext.merge_lora(layer)
    trees.assert_close(merged(x), layer(x))
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(plain))

  @parameterized.parameters(
    {},
    {'use_bias': False},
    {'param_dtype': jnp.bfloat16, 'lora_param_dtype': jnp.bfloat16},
    {'dtype': jnp.bfloat16, 'lora_dtype': jnp.bfloat16},
    {'a_initializer': nnx.initializers.normal(2.0)},
    {'b_initializer': nnx.initializers.normal(2.0)},
    {'lora_param_type': nnx.Param},
    {'a_metadata': {'color': 'red'}, 'b_metadata': {'color': 'blue'}},
  )
  def test_linear_is_compatible_with_flax(self, **options):
    make = lambda cls: cls(5, 7, lora_rank=2, rngs=nnx.Rngs(3), **options)
    theirs, ours = make(nnx.LoRALinear), make(nnx_ext.LoRALinear)
    trees.assert_same(trees.leaves(ours), trees.leaves(theirs))
    describe = lambda layer: {
      path: (type(v), v.get_metadata())
      for path, v in nnx.iter_graph(layer)
      if isinstance(v, nnx.Variable)
    }
    self.assertEqual(describe(ours), describe(theirs))

    state = nnx.state(theirs)
    state = jax.tree.map(
      lambda v: noise(v.shape, v.size).astype(v.dtype), state
    )
    nnx.update(theirs, state)
    nnx.update(ours, state)
    x = noise((3, 5))
    half = jnp.bfloat16 in options.values()
    trees.assert_close(ours(x), theirs(x), 2e-2 if half else 1e-6)

  def test_options(self):
    layer = nnx_ext.LoRALinear(
      *(5, 7), lora_rank=2, dora=True, rslora=True, dropout=0.5,
      rngs=nnx.Rngs(0),
    )  # fmt: skip
    self.assertEqual(layer.lora.magnitude.shape, (7,))
    self.assertAlmostEqual(layer.lora.scale, 2**0.5)
    self.assertIsInstance(layer.lora.dropout, nnx.Dropout)
    layer = nnx_ext.LoRALinear(
      5, 7, lora_rank=2, init='pissa', rngs=nnx.Rngs(0)
    )
    plain, x = nnx.Linear(5, 7, rngs=nnx.Rngs(0)), noise((3, 5))
    trees.assert_close(layer(x), plain(x))

  def test_a_subclass_of_ours(self):
    class Doubled(nnx_ext.LoRALinear):
      def __call__(self, x):
        return 2.0 * super().__call__(x)

    layer = trees.move(Doubled(5, 7, lora_rank=2, rngs=nnx.Rngs(0)))
    x = noise((3, 5))
    weight = layer.kernel[...] + layer.lora.lora_a @ layer.lora.lora_b
    trees.assert_close(layer(x), 2.0 * (x @ weight))
