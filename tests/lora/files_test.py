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
"""Round trips of adapters through PEFT's files, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.lora import trees
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
from tests.lora.kinds import KINDS
from tests.lora.trees import assert_close, assert_same, leaves, noise

# Kinds of layers, and whether only nnx_ext has a form for them.
EXTENDED: dict[str, bool] = {
  'linear_vector': False,
  'linear_bf16_params': False,
  'general_axes': False,
  'general_batch': True,
  'general_batch_axes': True,
  'einsum_heads': False,
  'einsum_out_around': False,
  'einsum_batch_last': True,
  'einsum_ellipsis': False,
  'einsum_two_axes': False,
  'conv': False,
  'conv_strides': False,
  'conv_3d': False,
  'conv_dilation': True,
  'conv_input_dilation': True,
  'conv_groups': True,
  'conv_circular': True,
  'conv_causal': True,
  'conv_reflect': True,
  'conv_padding': False,
  'conv_masked': True,
  'transpose_2d': True,
  'transpose_kernel': True,
  'transpose_masked': True,
  'embed': False,
  'tied': False,
  'attention': False,
  'optimized_lstm': False,
  'bidirectional': False,
  'user_own_forward': False,
  'user_embed': False,
}


def in_net(path):
  """A name for every path, a layer that stands alone included."""
  return '.'.join(('net', *map(str, path)))


class RoundTripTest(FilesTestCase):
  @parameterized.product(name=list(EXTENDED))
  def test_kind(self, name):
    kind, extended = KINDS[name], EXTENDED[name]
    model = trees.move(kind.apply())
    if extended:
      with self.refused(ValueError, 'save_lora', 'extensions=True'):
        nnx_ext.save_lora(model, self.directory, rename=in_net)
      self.assertFalse(self.directory.exists())
    directory = self.saved(model, rename=in_net, extensions=extended)
    own = {key.startswith('nnx_ext.') for key in tensors(directory)}
    self.assertEqual(own, {extended})
    before = leaves(kind.model)
    loaded = nnx_ext.load_lora(kind.model, directory, rename=in_net)
    same(loaded, model)
    assert_same(leaves(kind.model), before)

  @parameterized.product(
    [
      {'name': name, 'options': {'dora': True}}
      for name in (
        'general_axes',
        'general_batch_axes',
        'einsum_out_around',
        'einsum_batch_last',
        'conv_strides',
        'conv_groups',
        'transpose_kernel',
        'embed',
      )
    ]
    + [
      {'name': name, 'options': options}
      for name in ('linear', 'conv_groups')
      for options in (
        {'alpha': 3.0, 'rslora': True, 'dora': True},
        {'param_dtype': jnp.bfloat16},
      )
    ]
  )
  def test_option(self, name, options):
    kind = KINDS[name]
    model = trees.move(kind.apply(**options))
    directory = self.saved(model, rename=in_net, extensions=True)
    loaded = nnx_ext.load_lora(kind.model, directory, rename=in_net)
    if 'param_dtype' in options:
      model = _in_float32(model)
    same(loaded, model)
    assert_close(kind.call(loaded, kind.x), kind.call(model, kind.x))

  @parameterized.parameters(
    ('pissa', {}), ('olora', {'alpha': 3.0, 'rslora': True})
  )
  def test_start_that_is_not_zero(self, init, options):
    # Written as the plain adapter of twice the rank, which it then is.
    base, x = make(Net), noise((2, 3))
    model = adapt(base, init=init, **options)
    directory = self.saved(model)
    self.assertEqual(config(directory)['r'], 4)
    self.assertIs(config(directory)['init_lora_weights'], True)
    loaded = nnx_ext.load_lora(base, directory)
    same(loaded, nnx_ext.to_plain_lora(model))
    assert_close(loaded(x), model(x))
    self.assertIsNotNone(model.lin.lora.start_a)

  def test_start_that_is_not_zero_with_patterns(self):
    base, x = make(Net), noise((2, 3))
    patterns = {nnx.PathContains('net'): {'rank': 3, 'alpha': 5.0}}
    model = adapt(base, init='pissa', patterns=patterns)
    loaded = nnx_ext.load_lora(base, self.saved(model))
    self.assertEqual((loaded.lin.lora.rank, loaded.net.lin.lora.rank), (4, 6))
    assert_close(loaded(x), model(x))

  def test_stacked(self):
    build = nnx.vmap(lambda rngs: Net(rngs))
    base = make(lambda rngs: build(rngs.split(3)))
    model = adapt(base)
    self.assertEqual(model.lin.lora.lora_a.shape, (3, 3, 2))
    with self.refused(ValueError, 'save_lora', "'lin'", 'stack of layers'):
      nnx_ext.save_lora(model, self.directory)
    same(nnx_ext.load_lora(base, self.saved(model, extensions=True)), model)

  def test_dora_of_some(self):
    base = make(Net)
    model = adapt(base, patterns={nnx.PathContains('net'): {'dora': True}})
    words = "'net/lin'", 'DoRA', 'extensions=True'
    with self.refused(ValueError, 'save_lora', *words):
      nnx_ext.save_lora(model, self.directory)
    directory = self.saved(model, extensions=True)
    self.assertIs(config(directory)['use_dora'], False)
    same(nnx_ext.load_lora(base, directory), model)

  def test_all_but_one_have_dora(self):
    base = make(Net)
    patterns = {nnx.PathContains('net'): {'dora': False, 'rank': 3}}
    model = adapt(base, dora=True, patterns=patterns)
    directory = self.saved(model, extensions=True)
    self.assertIs(config(directory)['use_dora'], True)
    same(nnx_ext.load_lora(base, directory), model)

  def test_some_rank_stabilized(self):
    # One rule for all in a file, so the alpha of the others is another.
    base, x = make(Net), noise((2, 3))
    patterns = {nnx.PathContains('net'): {'rslora': True, 'alpha': 3.0}}
    model = adapt(base, patterns=patterns)
    loaded = nnx_ext.load_lora(base, self.saved(model))
    self.assertAlmostEqual(loaded.net.lin.lora.scale, 3 / 2**0.5)
    assert_close(loaded(x), model(x))

  def test_again_into_the_same_directory(self):
    base = make(Net)
    first, second = adapt(base), adapt(base, rank=3, dora=True)
    self.saved(first)
    same(nnx_ext.load_lora(base, self.saved(second)), second)
    loaded = nnx_ext.load_lora(base, self.saved(first))
    same(nnx_ext.load_lora(base, self.saved(loaded)), first)

  def test_directory_as_text(self):
    base = make(Net)
    model = adapt(base)
    nnx_ext.save_lora(model, str(self.directory / 'deep' / 'er'))
    same(nnx_ext.load_lora(base, str(self.directory / 'deep' / 'er')), model)

  @parameterized.product(rate=[0.0, 0.25])
  def test_dropout(self, rate):
    base = make(Net)
    patterns = {nnx.PathContains('net'): {'dropout': rate / 2}}
    model = adapt(base, dropout=rate, patterns=patterns)
    directory = self.saved(model)
    self.assertEqual(config(directory)['lora_dropout'], rate)
    loaded = nnx_ext.load_lora(base, directory)
    self.assertIsNone(loaded.lin.lora.dropout)
    random = nnx_ext.load_lora(base, directory, rngs=nnx.Rngs(3))
    factors, found = leaves(loaded), leaves(random)
    assert_same({path: found[path] for path in factors}, factors)
    if not rate:
      self.assertIsNone(random.lin.lora.dropout)
      return
    self.assertEqual(random.lin.lora.dropout.rate, rate)
    x = noise((16, 3))
    self.assertFalse(np.array_equal(random.lin(x), random.lin(x)))
    random.eval()
    assert_close(random.lin(x), loaded.lin(x))

  @parameterized.product(
    streams=[{'dropout': 0}, {'default': 0}, {'params': 0, 'dropout': 1}]
  )
  def test_dropout_from_any_stream(self, streams):
    directory = self.saved(adapt(make(Net), dropout=0.5))
    rngs = nnx.Rngs(**streams)
    loaded = nnx_ext.load_lora(make(Net), directory, rngs=rngs)
    self.assertEqual(loaded.lin.lora.dropout.rate, 0.5)

  @parameterized.product(dtype=[np.float16, ml_dtypes.bfloat16, np.float64])
  def test_other_dtypes(self, dtype):
    # PEFT's own files are in float32, whatever the model's dtype is.
    arrays = pair('lin', (3, 4))
    written = {key: array.astype(dtype) for key, array in arrays.items()}
    loaded = nnx_ext.load_lora(make(Net), self.written(written))
    for factor, key in (('lora_a', 'lora_A'), ('lora_b', 'lora_B')):
      value = getattr(loaded.lin.lora, factor)[...]
      self.assertEqual(value.dtype, jnp.float32)
      expected = written[f'{PREFIX}lin.{key}.weight'].T
      np.testing.assert_array_equal(value, expected.astype(np.float32))


def _in_float32(model):
  """As a file is loaded: factors are float32 then."""
  factors, rest = nnx.state(model, nnx.LoRAParam, ...)
  graphdef = nnx.graphdef(model)
  up = lambda x: x.astype(jnp.float32)
  return nnx.merge(graphdef, jax.tree.map(up, factors), rest)
