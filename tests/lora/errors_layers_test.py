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
"""Errors of layers that cannot be adapted, or must not be."""

import typing as tp

import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations import LowRankUpdate, WeightNorm
from tests.errors import cases
from tests.lora.errors import (
  APPLIES,
  ONES,
  LoRATestCase,
  Net,
  adapted,
  apply_lora,
  linear,
  spelled,
)
from tests.lora.trees import fill


class OwnLoRA(nnx.Linear):
  """A user's layer with an adapter of its own making."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.lora = nnx.Param(jnp.ones((3, 4)))


def _einsum(equation: str, *shape: int, ask: bool = False):
  layer = nnx.Einsum(equation, shape, kernel_init=ONES, rngs=nnx.Rngs(0))
  if ask:
    layer.einsum_str = None
  return layer


def _int8():
  layer = linear()
  layer.kernel.set_value(jnp.ones((3, 4), jnp.int8))
  return layer


# Modules that cannot be adapted, and why.
UNFIT: dict[str, tuple[tp.Callable, tuple]] = {
  'layer_norm': (
    lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
    ('LayerNorm', 'not a layer that can be adapted'),
  ),
  'batch_norm': (lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)), ('BatchNorm',)),
  'dropout': (lambda: nnx.Dropout(0.5), ('Dropout',)),
  'container': (
    lambda: nnx.Sequential(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), nnx.relu),
    ('Sequential',),
  ),
  'einsum_of_calls': (
    lambda: _einsum('bd,dk->bk', 3, 4, ask=True),
    ('`einsum_str`', 'constructor'),
  ),
  'einsum_diagonal': (
    lambda: _einsum('bd,dd->bd', 3, 3),
    ("'bd,dd->bd'", 'diagonal'),
  ),
  'einsum_sums_nothing': (
    lambda: _einsum('bd,dk->bdk', 3, 4),
    ("'bd,dk->bdk'", 'sums over no axis'),
  ),
  'einsum_makes_nothing': (
    lambda: _einsum('bd,d->b', 3),
    ("'bd,d->b'", 'makes none'),
  ),
  'parametrized': (
    lambda: nnx_ext.parametrize(
      linear(), {nnx.PathContains('kernel'): WeightNorm}
    ),
    ('WeightNorm', 'kernel'),
  ),
  'int8': (_int8, ('kernel', 'int8')),
  'own_lora': (lambda: linear(OwnLoRA), ('OwnLoRA', '`lora` of its own')),
}
_IS_LAYER = [name for name in UNFIT if 'einsum' in name] + [
  'parametrized',
  'int8',
  'own_lora',
]


class UnfitTest(LoRATestCase):
  @cases(UNFIT, api=list(APPLIES))
  def test_chosen(self, case, api):
    make, words = UNFIT[case]
    model = Net(make())
    words = ("'target", 'Linear', 'parametrize', 'LowRankUpdate', *words)
    with self.kept(model, ValueError, api, *words):
      APPLIES[api](model, targets=nnx.PathContains('target'))

  @cases(UNFIT)
  def test_passed_over_by_default(self, case):
    model = Net(UNFIT[case][0]())
    self.assertEqual(adapted(apply_lora(model)), ['out', 'query'])
    paths = [layer.path for layer in nnx_ext.lora_plan(model, rank=2).layers]
    self.assertEqual(paths, [('out',), ('query',)])

  @cases(UNFIT, api=list(APPLIES))
  def test_alone(self, case, api):
    model = UNFIT[case][0]()
    words = UNFIT[case][1] if case in _IS_LAYER else ('no layer that can be',)
    words = ('the model itself', 'Linear', 'LowRankUpdate', *words)
    with self.kept(model, ValueError, api, *words):
      APPLIES[api](model)

  def test_low_rank_update_works_instead(self):
    model = Net(_einsum('bd,dk->bk', 3, 4, ask=True))
    updated = nnx_ext.parametrize(
      model,
      {nnx.PathContains('target'): lambda w: LowRankUpdate(w, rank=2)},
    )
    self.assertIsInstance(updated.target.kernel, LowRankUpdate)

  def test_chosen_with_what_it_stands_in(self):
    # A filter of a part of the model asks for what can be adapted in it.
    part = nnx.Sequential(nnx.LayerNorm(3, rngs=nnx.Rngs(0)), linear())
    model = apply_lora(Net(part), targets=nnx.PathContains('target'))
    self.assertEqual(adapted(model), ['target/layers/1'])


# Layers that could be adapted but must not, and words of the error.
REFUSED: dict[str, tuple[tp.Callable, str, tuple]] = {
  'adapted': (
    lambda: apply_lora(linear()),
    "'target'",
    ('adapted already', 'nnx_ext.merge_lora(model)', 'remove_lora'),
  ),
  'constructed': (
    lambda: nnx_ext.LoRAConv(3, 4, 3, lora_rank=2, rngs=nnx.Rngs(0)),
    "'target'",
    ('adapted already', 'merge_lora'),
  ),
  'nnx_lora_linear': (
    lambda: nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0)),
    "'target'",
    ('nnx.LoRALinear', 'nnx.Linear'),
  ),
  'nnx_lora': (
    lambda: nnx.LoRA(3, 2, 4, base_module=linear(), rngs=nnx.Rngs(0)),
    "'target/base_module'",
    ('wrapped in an nnx.LoRA', 'plain layer'),
  ),
  'weight_norm': (
    lambda: nnx.WeightNorm(linear(), rngs=nnx.Rngs(0)),
    "'target/layer_instance'",
    ('wrapped in an nnx.WeightNorm', 'plain layer'),
  ),
  'spectral_norm': (
    lambda: nnx.SpectralNorm(linear(), rngs=nnx.Rngs(0)),
    "'target/layer_instance'",
    ('wrapped in an nnx.SpectralNorm', 'plain layer'),
  ),
}


class RefusedTest(LoRATestCase):
  @cases(REFUSED, api=list(APPLIES))
  def test_refused(self, case, api):
    make, path, words = REFUSED[case]
    model = Net(make())
    with self.kept(model, ValueError, api, path, *words) as caught:
      APPLIES[api](model)
    # Without it the others are adapted, and it stays what it was.
    left_out = spelled(str(caught.exception), 'targets')
    plan = nnx_ext.lora_plan(model, rank=2, **left_out)
    self.assertEqual([p.path for p in plan.layers], [('out',), ('query',)])
    result = apply_lora(model, **left_out)
    self.assertLessEqual({'out', 'query'}, set(adapted(result)))
    self.assertIs(type(result.target), type(model.target))

  def test_second_adapter_after_merging(self):
    model = Net(apply_lora(linear()))
    again = apply_lora(nnx_ext.merge_lora(model))
    self.assertEqual(adapted(again), ['out', 'query', 'target'])

  def test_two_that_are_refused(self):
    model = Net(nnx.Sequential(apply_lora(linear()), apply_lora(linear())))
    part = nnx.PathContains('target')
    plan = nnx_ext.lora_plan(model, rank=2, targets=nnx.Not(part))
    self.assertEqual([p.path for p in plan.layers], [('out',), ('query',)])

  @parameterized.product(kind=['linear', 'conv', 'embed', 'general'])
  def test_stacked_on_another_axis(self, kind):
    make = {
      'linear': lambda rngs: nnx.Linear(3, 4, rngs=rngs),
      'conv': lambda rngs: nnx.Conv(3, 4, 2, rngs=rngs),
      'embed': lambda rngs: nnx.Embed(3, 4, rngs=rngs),
      'general': lambda rngs: nnx.LinearGeneral(3, (2, 2), rngs=rngs),
    }[kind]

    def stacked(axis):
      build = nnx.vmap(make, in_axes=0, out_axes=axis)
      return fill(nnx.eval_shape(lambda: build(nnx.Rngs(0).split(5))))

    model = Net(stacked(1))
    words = "'target'", '5', 'nnx.vmap', 'out_axes=0'
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(model)
    layer = nnx_ext.lora_plan(Net(stacked(0)), rank=2).layers[-1]
    self.assertEqual((layer.path, layer.a_shape[0]), (('target',), 5))

  def test_stacked_on_another_axis_of_the_same_size(self):
    # Three layers of 3 inputs: only the bias tells.
    build = nnx.vmap(lambda rngs: linear(), out_axes=1)
    model = fill(nnx.eval_shape(lambda: build(nnx.Rngs(0).split(3))))
    self.assertEqual(model.kernel.shape, (3, 3, 4))
    with self.refused(ValueError, 'apply_lora', 'nnx.vmap', 'out_axes=0'):
      apply_lora(model)

  @parameterized.product(api=list(APPLIES))
  def test_weight_held_elsewhere(self, api):
    model = Net(linear())
    model.head = nnx.Module()
    model.head.weight = model.target.kernel
    words = "'target'", "'head/weight'", 'embed.attend(x)'
    with self.kept(model, ValueError, api, *words) as caught:
      APPLIES[api](model)
    left_out = spelled(str(caught.exception), 'targets')
    self.assertEqual(adapted(apply_lora(model, **left_out)), ['out', 'query'])

  def test_weight_shared_with_a_layer_that_cannot_be_adapted(self):
    model = Net(linear())
    model.head = _einsum('bd,dk->bk', 3, 4, ask=True)
    model.head.kernel = model.target.kernel
    with self.kept(model, ValueError, 'apply_lora', "'target'", "'head/kernel"):
      apply_lora(model)
