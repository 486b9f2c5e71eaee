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
"""Modules saved whole, names in PyTorch, and weights that are tied."""

import typing as tp

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.errors import cases
from tests.lora.files import (
  PREFIX,
  FilesTestCase,
  Net,
  adapt,
  config,
  make,
  pair,
  same,
  tensors,
)
from tests.lora.trees import assert_close, assert_same, leaves, noise

LINEAR = nnx.PathContains('lin')


class WithHead(nnx.Module):
  """A layer that is adapted and one that is trained whole."""

  def __init__(self, rngs, head):
    self.lin = nnx.Linear(3, 4, rngs=rngs)
    self.head = head(rngs)


class Inner(nnx.Module):
  """Parameters of its own, in a list, and layers within."""

  def __init__(self, rngs):
    self.gain = nnx.Param(jnp.zeros((2, 3)))
    self.parts = nnx.List([nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(3))])
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dense = nnx.Linear(4, 5, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)


# By kind of module: what makes it, and of each Variable by its PyTorch name,
# the shape and how it is turned.
WHOLE: dict[str, tuple[tp.Callable, dict[str, tuple]]] = {
  'linear': (
    lambda rngs: nnx.Linear(4, 5, rngs=rngs),
    {
      'head.weight': ((5, 4), lambda m: m.kernel[...].T),
      'head.bias': ((5,), lambda m: m.bias[...]),
    },
  ),
  'general': (
    lambda rngs: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs),
    {
      'head.weight': ((20, 6), lambda m: m.kernel[...].reshape(6, 20).T),
      'head.bias': ((20,), lambda m: m.bias[...].reshape(20)),
    },
  ),
  'conv': (
    lambda rngs: nnx.Conv(4, 6, (3, 5), rngs=rngs),
    {
      'head.weight': (
        (6, 4, 3, 5),
        lambda m: m.kernel[...].transpose(3, 2, 0, 1),
      ),
      'head.bias': ((6,), lambda m: m.bias[...]),
    },
  ),
  'grouped_conv': (
    lambda rngs: nnx.Conv(4, 6, 3, feature_group_count=2, rngs=rngs),
    {
      'head.weight': ((6, 2, 3), lambda m: m.kernel[...].transpose(2, 1, 0)),
      'head.bias': ((6,), lambda m: m.bias[...]),
    },
  ),
  'embed': (
    lambda rngs: nnx.Embed(7, 5, rngs=rngs),
    {'head.weight': ((7, 5), lambda m: m.embedding[...])},
  ),
  'layer_norm': (
    lambda rngs: nnx.LayerNorm(4, rngs=rngs),
    {
      'head.weight': ((4,), lambda m: m.scale[...]),
      'head.bias': ((4,), lambda m: m.bias[...]),
    },
  ),
  'rms_norm': (
    lambda rngs: nnx.RMSNorm(4, rngs=rngs),
    {'head.weight': ((4,), lambda m: m.scale[...])},
  ),
  'batch_norm': (
    lambda rngs: nnx.BatchNorm(4, rngs=rngs),
    {
      'head.weight': ((4,), lambda m: m.scale[...]),
      'head.bias': ((4,), lambda m: m.bias[...]),
      'head.running_mean': ((4,), lambda m: m.mean[...]),
      'head.running_var': ((4,), lambda m: m.var[...]),
      'head.num_batches_tracked': ((), lambda m: np.int64(0)),
    },
  ),
  'sequential': (
    lambda rngs: nnx.Sequential(
      nnx.Linear(4, 5, use_bias=False, rngs=rngs), nnx.LayerNorm(5, rngs=rngs)
    ),
    {
      'head.layers.0.weight': ((5, 4), lambda m: m.layers[0].kernel[...].T),
      'head.layers.1.weight': ((5,), lambda m: m.layers[1].scale[...]),
      'head.layers.1.bias': ((5,), lambda m: m.layers[1].bias[...]),
    },
  ),
  'inner': (
    Inner,
    {
      'head.gain': ((2, 3), lambda m: m.gain[...]),
      'head.parts.0': ((2,), lambda m: m.parts[0][...]),
      'head.parts.1': ((3,), lambda m: m.parts[1][...]),
      'head.norm.weight': ((4,), lambda m: m.norm.scale[...]),
      'head.norm.bias': ((4,), lambda m: m.norm.bias[...]),
      'head.norm.running_mean': ((4,), lambda m: m.norm.mean[...]),
      'head.norm.running_var': ((4,), lambda m: m.norm.var[...]),
      'head.norm.num_batches_tracked': ((), lambda m: np.int64(0)),
      'head.dense.weight': ((5, 4), lambda m: m.dense.kernel[...].T),
      'head.dense.bias': ((5,), lambda m: m.dense.bias[...]),
    },
  ),
}


def trained(model: tp.Any, seed: int = 9) -> tp.Any:
  """A copy with other Params and statistics in the module saved whole."""
  model = nnx.clone(model)
  for i, (_, node) in enumerate(nnx.iter_graph(model.head, graph=True)):
    if isinstance(node, (nnx.Param, nnx.BatchStat)):
      node.set_value(noise(node.shape, seed + i).astype(node.dtype))
  return model


class ModulesToSaveTest(FilesTestCase):
  @cases(WHOLE)
  def test_module(self, case):
    build, expected = WHOLE[case]
    base = make(lambda rngs: WithHead(rngs, build))
    model = trained(adapt(base, targets=LINEAR))
    directory = self.saved(model, modules_to_save=['head'])
    self.assertEqual(config(directory)['modules_to_save'], ['head'])
    found = tensors(directory)
    found = {k: v for k, v in found.items() if k.startswith(f'{PREFIX}head')}
    self.assertCountEqual(found, [PREFIX + key for key in expected])
    for key, (shape, turned) in expected.items():
      array = found[PREFIX + key]
      self.assertEqual(array.shape, shape, key)
      np.testing.assert_array_equal(array, turned(model.head), key)
    before = leaves(base)
    same(nnx_ext.load_lora(base, directory), model)
    assert_same(leaves(base), before)

  def test_integers(self):
    class Counts(nnx.Module):
      def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros(2))
        self.seen = nnx.BatchStat(jnp.int32(3))

    base = make(lambda rngs: WithHead(rngs, Counts))
    model = adapt(base, targets=LINEAR)
    model.head.seen.set_value(jnp.int32(5))
    directory = self.saved(model, modules_to_save=['head'])
    same(nnx_ext.load_lora(base, directory), model)

  @parameterized.product(dtype=[jnp.bfloat16, jnp.float16])
  def test_dtypes(self, dtype):
    head = lambda rngs: nnx.Linear(4, 5, param_dtype=dtype, rngs=rngs)
    base = make(lambda rngs: WithHead(rngs, head))
    model = trained(adapt(base, targets=LINEAR))
    directory = self.saved(model, modules_to_save=['head'])
    self.assertEqual(tensors(directory)[f'{PREFIX}head.bias'].dtype, dtype)
    same(nnx_ext.load_lora(base, directory), model)

  @parameterized.product(
    spelling=['net/lin', ('net', 'lin')], several=[False, True]
  )
  def test_spellings(self, spelling, several):
    base = make(Net)
    model = adapt(base, targets=lambda path, _: path == ('lin',))
    model.net.lin.kernel.set_value(noise((4, 5), 8))
    paths = [spelling, 'norm'] if several else [spelling]
    directory = self.saved(model, modules_to_save=paths)
    names = ['net.lin', 'norm'] if several else ['net.lin']
    self.assertCountEqual(config(directory)['modules_to_save'], names)
    same(nnx_ext.load_lora(base, directory), model)

  def test_one_as_text(self):
    model = adapt(make(Net))
    found = config(self.saved(model, modules_to_save='norm'))
    self.assertEqual(found['modules_to_save'], ['norm'])

  def test_a_layer_that_is_shared_with_the_rest(self):
    base = make(lambda rngs: WithHead(rngs, lambda rngs: nnx.Dict()))
    base.head.norm = base.before = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    model = adapt(base, targets=LINEAR)
    found = tensors(self.saved(model, modules_to_save=['head']))
    self.assertIn(f'{PREFIX}head.norm.weight', found)
    same(nnx_ext.load_lora(base, self.directory), model)

  def test_names_without_a_module_are_passed_over(self):
    # PEFT lists the usual names of heads, whether or not there are any.
    arrays = pair('lin', (3, 4))
    directory = self.written(arrays, modules_to_save=['classifier', 'score'])
    nnx_ext.load_lora(make(Net), directory)

  def test_unknown(self):
    model = adapt(make(Net), targets=LINEAR)
    words = '`modules_to_save`', "'nrom'", "Did you mean 'norm'"
    with self.refused(ValueError, 'save_lora', *words):
      self.saved(model, modules_to_save=['nrom'])
    self.assertFalse(self.directory.exists())

  @parameterized.product(path=['lin', 'net', 'net/lin', ()])
  def test_adapted_too(self, path):
    model = adapt(make(Net))
    words = '`modules_to_save`', "lin' is adapted", 'out'
    with self.refused(ValueError, 'save_lora', *words):
      self.saved(model, modules_to_save=[path])
    self.assertFalse(self.directory.exists())

  @parameterized.product(given=[3, [3], None, [None]])
  def test_of_wrong_type(self, given):
    model = adapt(make(Net))
    with self.refused(TypeError, 'save_lora', '`modules_to_save`', 'path'):
      self.saved(model, modules_to_save=given)
    self.assertFalse(self.directory.exists())

  def test_name_that_ends_another(self):
    # PEFT compares the ends of names, without the dot: 'lin' is 'net.lin'.
    model = adapt(make(Net), targets=nnx.PathContains('net'))
    words = '`modules_to_save`', "'lin'", "'net.lin'", '`rename`'
    with self.refused(ValueError, 'save_lora', *words):
      self.saved(model, modules_to_save=['lin'])

  def test_name_that_ends_that_of_another_norm(self):
    base = make(Net)
    base.net.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    model = adapt(base)
    words = '`modules_to_save`', "'norm'", "'net.norm'", '`rename`'
    with self.refused(ValueError, 'save_lora', *words):
      self.saved(model, modules_to_save=['norm'])
    rename = lambda path: '.'.join(('top', *path) if len(path) < 2 else path)
    self.saved(model, modules_to_save=['norm'], rename=rename)

  def test_conv_transpose(self):
    head = lambda rngs: nnx.ConvTranspose(4, 5, 3, rngs=rngs)
    base = make(lambda rngs: WithHead(rngs, head))
    model = adapt(base, targets=LINEAR)
    words = "'head'", 'ConvTranspose', '`modules_to_save`'
    with self.refused(ValueError, 'save_lora', *words):
      self.saved(model, modules_to_save=['head'])
    self.assertFalse(self.directory.exists())

  def test_stacked(self):
    build = nnx.vmap(lambda rngs: nnx.Linear(4, 5, rngs=rngs))
    base = make(lambda rngs: WithHead(rngs, lambda r: build(r.split(2))))
    model = adapt(base, targets=LINEAR)
    words = "'head'", 'stack', '`modules_to_save`'
    with self.refused(ValueError, 'save_lora', *words):
      self.saved(model, modules_to_save=['head'])
    self.assertFalse(self.directory.exists())


TORCH = {
  ('lin',): 'bert.encoder.dense',
  ('net', 'lin'): 'bert.pooler.dense',
  ('norm',): 'bert.norm',
  ('net',): 'bert.pooler',
  (): '',
}


class Other(nnx.Module):
  """The same layers in other places."""

  def __init__(self, rngs):
    self.encoder = nnx.List([nnx.Linear(3, 4, rngs=rngs)])
    self.pooler = nnx.Linear(4, 5, rngs=rngs)


class RenameTest(FilesTestCase):
  def test_both_ways(self):
    base = make(Net)
    model = adapt(base, patterns={nnx.PathContains('net'): {'rank': 1}})
    directory = self.saved(model, rename=TORCH.get)
    found = config(directory)
    self.assertEqual(
      found['target_modules'], ['bert.encoder.dense', 'bert.pooler.dense']
    )
    self.assertIn(
      f'{PREFIX}bert.pooler.dense.lora_A.weight', tensors(directory)
    )
    same(nnx_ext.load_lora(base, directory, rename=TORCH.get), model)

  def test_into_another_structure(self):
    model = adapt(make(Net))
    directory = self.saved(model, rename=TORCH.get)
    names = {
      ('encoder', 0): 'bert.encoder.dense',
      ('pooler',): 'bert.pooler.dense',
    }
    other = make(Other)
    loaded = nnx_ext.load_lora(other, directory, rename=names.get)
    x = noise((2, 3))
    np.testing.assert_array_equal(
      loaded.encoder[0].lora.delta(), model.lin.lora.delta()
    )
    np.testing.assert_array_equal(
      loaded.pooler.lora.lora_a[...], model.net.lin.lora.lora_a[...]
    )
    self.assertEqual(loaded.encoder[0](x).shape, (2, 4))

  def test_modules_to_save(self):
    base = make(Net)
    model = adapt(base)
    model.norm.scale.set_value(noise((4,), 3))
    directory = self.saved(
      model, modules_to_save=['norm'], rename=TORCH.__getitem__
    )
    self.assertIn(f'{PREFIX}bert.norm.weight', tensors(directory))
    self.assertEqual(config(directory)['modules_to_save'], ['bert.norm'])
    same(nnx_ext.load_lora(base, directory, rename=TORCH.__getitem__), model)

  @parameterized.product(
    name=[3, ('bert', 'dense'), b'bert'], api=['save_lora', 'load_lora']
  )
  def test_no_text(self, name, api):
    directory = self.saved(adapt(make(Net)))
    files = {path: path.read_bytes() for path in directory.iterdir()}
    words = '`rename`', "'lin'", "'encoder.layer.0.dense'"
    with self.refused(TypeError, api, *words):
      self._call(api, lambda path: name)
    for path, data in files.items():
      self.assertEqual(path.read_bytes(), data)

  def test_none_is_no_module_of_pytorch(self):
    rename = {('lin',): 'dense'}.get
    base = make(Net)
    model = adapt(base, targets=lambda path, _: path == ('lin',))
    directory = self.saved(model, rename=rename)
    self.assertCountEqual(tensors(directory), pair('dense', (3, 4)))
    same(nnx_ext.load_lora(base, directory, rename=rename), model)
    with self.refused(TypeError, 'save_lora', '`rename`', "'net/lin'"):
      nnx_ext.save_lora(adapt(base), self.root / 'other', rename=rename)
    self.assertFalse((self.root / 'other').exists())

  @parameterized.product(
    rename=[{('lin',): 'dense'}, 'dense'], api=['save_lora', 'load_lora']
  )
  def test_no_function(self, rename, api):
    self.saved(adapt(make(Net)))
    with self.refused(TypeError, api, '`rename`', 'function'):
      self._call(api, rename)

  @parameterized.product(api=['save_lora', 'load_lora'])
  def test_one_name_for_two(self, api):
    self.saved(adapt(make(Net)))
    words = '`rename`', "'lin'", "'net/lin'", "'dense'", 'name of its own'
    with self.refused(ValueError, api, *words):
      self._call(api, lambda path: 'dense')

  def _call(self, api, rename):
    if api == 'save_lora':
      nnx_ext.save_lora(adapt(make(Net)), self.directory, rename=rename)
    else:
      nnx_ext.load_lora(make(Net), self.directory, rename=rename)


class TwoLinears(nnx.Module):
  def __init__(self, rngs):
    self.a = nnx.Linear(3, 3, rngs=rngs)
    self.b = nnx.Linear(3, 3, rngs=rngs)
    self.b.kernel = self.a.kernel


class EmbedAndHead(nnx.Module):
  """A head that shares the table, its axes the other way round."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 5, rngs=rngs)
    self.head = nnx.Einsum('btd,vd->btv', (7, 5), rngs=rngs)
    self.head.kernel = self.embed.embedding

  def __call__(self, ids):
    return self.head(self.embed(ids))


class TiedTest(FilesTestCase):
  def test_two_linears(self):
    base = make(TwoLinears)
    model = adapt(base)
    directory = self.saved(model)
    # PEFT adapts modules, so both names have it.
    found = tensors(directory)
    self.assertCountEqual(found, pair('a', (3, 3)) | pair('b', (3, 3)))
    for key in pair('a', (3, 3)):
      other = key.replace('model.a.', 'model.b.')
      np.testing.assert_array_equal(found[key], found[other])
    loaded = nnx_ext.load_lora(base, directory)
    same(loaded, model)
    self.assertIs(loaded.a.lora, loaded.b.lora)

  @parameterized.product(names=[['a'], ['b'], ['a', 'b']])
  def test_under_either_name(self, names):
    arrays = {}
    for name in names:
      arrays |= pair(name, (3, 3))
    loaded = nnx_ext.load_lora(make(TwoLinears), self.written(arrays))
    self.assertIs(loaded.a.lora, loaded.b.lora)
    expected = arrays[f'{PREFIX}{names[0]}.lora_A.weight'].T
    np.testing.assert_array_equal(loaded.a.lora.lora_a[...], expected)

  def test_two_that_differ(self):
    arrays = {**pair('a', (3, 3)), **pair('b', (3, 3), seed=5)}
    words = "'a'", "'b'", 'share a weight', 'differ'
    with self.refused(ValueError, 'load_lora', *words):
      nnx_ext.load_lora(make(TwoLinears), self.written(arrays))

  def test_two_whose_scales_differ(self):
    arrays = {**pair('a', (3, 3)), **pair('b', (3, 3))}
    directory = self.written(arrays, alpha_pattern={'^b': 5})
    words = "'a'", "'b'", 'share a weight', 'differ'
    with self.refused(ValueError, 'load_lora', *words):
      nnx_ext.load_lora(make(TwoLinears), directory)

  def test_embedding_and_head(self):
    base, ids = make(EmbedAndHead), np.array([[1, 4, 4]])
    model = adapt(base)
    directory = self.saved(model)
    found = tensors(directory)
    self.assertLen(found, 4)
    for a, b in ('AB', 'BA'):  # the head's weight is the table turned round
      np.testing.assert_array_equal(
        found[f'{PREFIX}head.lora_{a}.weight'],
        found[f'{PREFIX}embed.lora_embedding_{b}'].T,
      )
    loaded = nnx_ext.load_lora(base, directory)
    same(loaded, model)
    assert_close(loaded(ids), model(ids))

  def test_embedding_and_head_both_written(self):
    # PEFT adapts the two apart, with each other's transposes.
    base = make(EmbedAndHead)
    model = adapt(base)
    arrays = tensors(self.saved(model))
    name = f'{PREFIX}embed.lora_embedding_'
    arrays[f'{PREFIX}head.lora_A.weight'] = arrays[f'{name}B'].T
    arrays[f'{PREFIX}head.lora_B.weight'] = arrays[f'{name}A'].T
    directory = self.written(arrays, lora_alpha=2)
    same(nnx_ext.load_lora(base, directory), model)
    arrays[f'{PREFIX}head.lora_B.weight'] = arrays[f'{name}A'].T + 1
    with self.refused(ValueError, 'load_lora', "'head'", "'embed'", 'differ'):
      nnx_ext.load_lora(base, self.written(arrays, lora_alpha=2))

  def test_a_layer_in_two_places(self):
    base = make(Net)
    base.again = base.lin
    model = adapt(base)
    found = tensors(self.saved(model))
    self.assertLen(found, 4)
    loaded = nnx_ext.load_lora(base, self.directory)
    same(loaded, model)
    self.assertIs(loaded.again, loaded.lin)
