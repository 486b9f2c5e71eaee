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
"""Files that do not fit a model, and configs that mean something else."""

import re

import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.errors import Snapshot, cases
from tests.lora.files import (
  CONFIG,
  PREFIX,
  FilesTestCase,
  Net,
  adapt,
  make,
  pair,
  tensors,
  write,
)
from tests.lora.trees import assert_close, leaves, noise

BOTH = {**pair('lin', (3, 4)), **pair('net.lin', (4, 5), seed=3)}


class LoadTestCase(FilesTestCase):
  def not_loaded(self, model, error, *words, **options):
    """Expects an error with these words that leaves the model as it was."""
    before = Snapshot(model)
    with self.refused(error, 'load_lora', *words) as caught:
      nnx_ext.load_lora(model, self.directory, **options)
    before.check(self)
    return str(caught.exception)


class FitTest(LoadTestCase):
  def test_all_in_one_report(self):
    arrays = dict(BOTH)
    del arrays[f'{PREFIX}lin.lora_B.weight']
    arrays[f'{PREFIX}net.lin.lora_A.weight'] = np.zeros((2, 9), np.float32)
    arrays |= pair('net.lni', (3, 4))
    arrays['classifier.weight'] = np.zeros((2, 2), np.float32)
    self.written(arrays)
    message = self.not_loaded(
      make(Net),
      ValueError,
      str(self.directory),
      f"missing are '{PREFIX}lin.lora_B.weight'",
      f"'{PREFIX}net.lni.lora_A.weight'",
      f"'{PREFIX}net.lni.lora_B.weight'",
      "'classifier.weight'",
      f"'{PREFIX}net.lin.lora_A.weight' is float32 of shape (2, 9)",
      '(2, 4)',
      "'net.lin' for 'net.lni'",
    )
    # Each once.
    for key in ('lin.lora_B.weight', 'net.lni.lora_A', 'classifier.weight'):
      self.assertEqual(message.count(f'{key}'), 1, key)

  def test_names_of_another_model(self):
    self.written(pair('transformer.h.0.attn', (3, 4)))
    words = "'lin'", "'net.lin'", '`rename`', 'transformer.h.0.attn'
    self.not_loaded(make(Net), ValueError, *words)
    nnx_ext.load_lora(
      make(Net),
      self.directory,
      rename={('lin',): 'transformer.h.0.attn'}.get,
    )

  def test_many(self):
    arrays = {}
    for i in range(20):
      arrays |= pair(f'layers.{i}', (3, 4))
    self.written(arrays)
    message = self.not_loaded(make(Net), ValueError, 'and 32 more')
    self.assertLess(len(message), 3000)

  def test_nothing_of_the_model(self):
    self.written({})
    self.not_loaded(make(Net), ValueError, 'no adapter of this model')

  @parameterized.product(rank=[1, 3, 8, 2**31 - 1])
  def test_rank_of_the_config(self, rank):
    self.written(BOTH, r=rank)
    words = 'lin.lora_A.weight', '(2, 3)', str(rank)
    self.not_loaded(make(Net), ValueError, *words)

  @parameterized.product(dtype=[np.int32, np.int8, np.bool_, np.complex64])
  def test_dtype(self, dtype):
    key = f'{PREFIX}lin.lora_A.weight'
    self.written({**BOTH, key: BOTH[key].astype(dtype)})
    words = 'lin.lora_A.weight', np.dtype(dtype).name
    self.not_loaded(make(Net), ValueError, *words)

  def test_transposed(self):
    arrays = {key: array.T for key, array in BOTH.items()}
    self.written(arrays)
    self.not_loaded(make(Net), ValueError, '(3, 2)', '(2, 3)', 'lora_B')

  def test_dora_without_magnitudes(self):
    self.written(BOTH, use_dora=True)
    words = 'missing', 'lin.lora_magnitude_vector', 'net.lin.lora_magnitude'
    self.not_loaded(make(Net), ValueError, *words)

  def test_magnitudes_without_dora(self):
    magnitude = {f'{PREFIX}lin.lora_magnitude_vector': np.ones(4, np.float32)}
    self.written({**BOTH, **magnitude})
    words = 'unexpected', 'lin.lora_magnitude_vector'
    self.not_loaded(make(Net), ValueError, *words)

  def test_bias_of_a_factor(self):
    self.written({**BOTH, f'{PREFIX}lin.lora_B.bias': np.ones(4, np.float32)})
    self.not_loaded(make(Net), ValueError, 'unexpected', 'lin.lora_B.bias')

  def test_module_saved_whole_without_its_arrays(self):
    arrays = {**BOTH, f'{PREFIX}norm.weight': np.ones(4, np.float32)}
    self.written(arrays, modules_to_save=['norm'])
    self.not_loaded(make(Net), ValueError, 'missing', f'{PREFIX}norm.bias')

  def test_module_saved_whole_that_is_not_listed(self):
    arrays = {**BOTH, f'{PREFIX}norm.weight': np.ones(4, np.float32)}
    self.written(arrays)
    self.not_loaded(make(Net), ValueError, 'unexpected', f'{PREFIX}norm.weight')

  def test_module_saved_whole_of_another_shape(self):
    arrays = {f'{PREFIX}norm.weight': np.ones(7, np.float32)}
    arrays[f'{PREFIX}norm.bias'] = np.ones(4, np.float32)
    self.written({**BOTH, **arrays}, modules_to_save=['norm'])
    self.not_loaded(make(Net), ValueError, 'norm.weight', '(7,)', '(4,)')

  @parameterized.product(extensions=[False, True])
  def test_layer_that_peft_computes_otherwise(self, extensions):
    conv = lambda rngs: nnx.Dict(
      c=nnx.Conv(4, 6, 3, kernel_dilation=2, rngs=rngs)
    )
    base = make(conv)
    model = adapt(base)
    directory = self.saved(model, extensions=True)
    if extensions:
      loaded = nnx_ext.load_lora(base, directory)
      assert_close(loaded.c(noise((1, 9, 4))), model.c(noise((1, 9, 4))))
      return
    arrays = {
      f'{PREFIX}c.lora_A.weight': np.ones((2, 4, 3), np.float32),
      f'{PREFIX}c.lora_B.weight': np.ones((6, 2, 1), np.float32),
    }
    self.written(arrays)
    self.not_loaded(base, ValueError, "'c'", 'kernel_dilation', '2')

  @parameterized.product(
    settings=[[np.nan, 2], [0, 2], [2, -1], [2, np.inf], [1e300, 2], [2], []]
  )
  def test_settings_of_an_extension(self, settings):
    conv = lambda rngs: nnx.Dict(c=nnx.ConvTranspose(4, 6, 3, rngs=rngs))
    arrays = tensors(self.saved(adapt(make(conv)), extensions=True))
    arrays['nnx_ext.c.rank_and_alpha'] = np.array(settings, np.float64)
    self.written(arrays)
    self.not_loaded(make(conv), ValueError, 'nnx_ext.c.rank_and_alpha')

  def test_extension_without_its_settings(self):
    # These are no option, so they have no default.
    conv = lambda rngs: nnx.Dict(c=nnx.ConvTranspose(4, 6, 3, rngs=rngs))
    arrays = tensors(self.saved(adapt(make(conv)), extensions=True))
    del arrays['nnx_ext.c.rank_and_alpha']
    self.written(arrays, r=2)
    self.not_loaded(make(conv), ValueError, 'missing', 'rank_and_alpha')

  def test_both_forms_of_one_adapter(self):
    a = {'nnx_ext.lin.lora_a': np.ones((3, 2), np.float32)}
    b = {'nnx_ext.lin.lora_b': np.ones((2, 4), np.float32)}
    settings = {'nnx_ext.lin.rank_and_alpha': np.array([2.0, 2.0])}
    self.written({**BOTH, **a, **b, **settings})
    self.not_loaded(make(Net), ValueError, 'nnx_ext.lin.lora_a')

  @parameterized.product(place=['lin', 'net.lin'])
  def test_base_weight_that_is_the_models(self, place):
    base = make(Net)
    layer = base.lin if place == 'lin' else base.net.lin
    own = np.asarray(layer.kernel[...]).T
    self.written({**BOTH, f'{PREFIX}{place}.base_layer.weight': own})
    loaded = nnx_ext.load_lora(base, self.directory)
    self.assertIs(loaded.lin.kernel.get_value(), base.lin.kernel.get_value())

  def test_base_weight_that_is_another(self):
    base = make(Net)
    own = np.asarray(base.lin.kernel[...]).T + 1
    key = f'{PREFIX}lin.base_layer.weight'
    self.written({**BOTH, key: own})
    self.not_loaded(base, ValueError, key, 'another base')
    self.written({**BOTH, key: own[:2]})
    self.not_loaded(base, ValueError, key, 'another base')

  @parameterized.product(path=['lin', 'net'])
  def test_adapted_already(self, path):
    self.written(BOTH)
    model = adapt(make(Net), targets=nnx.PathContains(path))
    words = "lin' is adapted", 'nnx_ext.remove_lora(model)', 'merge_lora(model)'
    self.not_loaded(model, ValueError, *words)
    nnx_ext.load_lora(nnx_ext.remove_lora(model), self.directory)

  def test_wrapped_layer(self):
    base = make(Net)
    base.lin = nnx.SpectralNorm(base.lin, rngs=nnx.Rngs(0))
    self.written(pair('lin.layer_instance', (3, 4)))
    self.not_loaded(base, ValueError, 'SpectralNorm', "'lin/layer_instance'")

  @parameterized.product(rngs=[7, 0, 'dropout', nnx.Rngs])
  def test_rngs(self, rngs):
    self.written(BOTH, lora_dropout=0.5)
    words = '`rngs`', 'nnx.Rngs(0)'
    self.not_loaded(make(Net), TypeError, *words, rngs=rngs)

  @parameterized.product(directory=[3, None, ['a']])
  def test_directory(self, directory):
    with self.refused(TypeError, 'load_lora', '`directory`'):
      nnx_ext.load_lora(make(Net), directory)
    with self.refused(TypeError, 'save_lora', '`directory`'):
      nnx_ext.save_lora(adapt(make(Net)), directory)


# What PEFT's configs may hold that changes the numbers.
REFUSED: dict[str, tuple] = {
  'peft_type': ('ADALORA', 'IA3', None, 'lora'),
  'bias': ('all', 'lora_only', None),
  'lora_bias': (True,),
  'trainable_token_indices': ([1, 2], {'emb': [1]}),
  'target_parameters': (['lin.weight'],),
  'layer_replication': ([[0, 2], [1, 2]],),
  'use_qalora': (True,),
  'use_bdlora': ({'nblocks': 2}, True),
  'alora_invocation_tokens': ([1, 2],),
  'kasa_config': ({},),
  'monteclora_config': ({},),
  'arrow_config': ({'top_k': 3},),
  'megatron_config': ({},),
  'init_lora_weights': (
    'pissa',
    'pissa_niter_4',
    'PiSSA',
    'olora',
    'corda',
    'loftq',
    'lora_ga',
  ),
}

# What changes nothing once an adapter is trained, or says its default.
ACCEPTED: dict[str, tuple] = {
  'bias': ('none',),
  'lora_bias': (False,),
  'target_parameters': (None, []),
  'init_lora_weights': (True, False, 'gaussian', 'eva', 'mica', 'orthogonal'),
  'fan_in_fan_out': (True, False),
  'target_modules': (['lin'], '(lin|net)', 'all-linear', None),
  'exclude_modules': (['head'], 'head'),
  'layers_to_transform': ([1], 1),
  'layers_pattern': ('h',),
  'loftq_config': ({},),
  'eva_config': ({'rho': 2.0},),
  'corda_config': (None,),
  'rank_pattern': (None, {}, {'other': 3}),
  'alpha_pattern': (None, {}, {'other': 3.5}),
  'modules_to_save': (None, [], ['score']),
  'velora_config': ({},),
  'peft_version': ('0.99.0',),
  'task_type': ('CAUSAL_LM',),
  'auto_mapping': ({'base_model_class': 'Net'},),
  'inference_mode': (False,),
}

# Values of the wrong type or out of range.
WRONG: dict[str, tuple] = {
  'r': (0, -1, 2.0, '2', True, [2], {}, None, 2**40, 10**30),
  'lora_alpha': (0, -1.5, '2', True, [2], None, 10**400),
  'lora_dropout': (-0.1, 1, 1.5, '0', None, True, []),
  'use_rslora': (1, 0, 'true', None, {}),
  'use_dora': (1, 'false', None, []),
  'rank_pattern': (['lin'], 'lin', 3, True, {'lin': 0}, {'lin': 1.5}),
  'alpha_pattern': (['lin'], 2.0, {'lin': '2'}, {'lin': None}, {'lin': -1}),
  'modules_to_save': ('norm', {'norm': 1}, [3], [None], 7, True),
}


def each(table):
  return parameterized.parameters(
    (key, value) for key, values in table.items() for value in values
  )


class ConfigTest(LoadTestCase):
  @each(REFUSED)
  def test_refused(self, key, value):
    self.written(BOTH, lora_alpha=2, **{key: value})
    message = self.not_loaded(make(Net), ValueError, key, CONFIG)
    self.assertIn(repr(value), message)

  @each(ACCEPTED)
  def test_accepted(self, key, value):
    options = {'lora_alpha': 3, key: value}
    write(self.directory, BOTH, **options)
    loaded = nnx_ext.load_lora(make(Net), self.directory)
    np.testing.assert_array_equal(
      loaded.lin.lora.lora_a[...], BOTH[f'{PREFIX}lin.lora_A.weight'].T
    )
    self.assertEqual(loaded.lin.lora.scale, 1.5)

  @each(WRONG)
  def test_wrong(self, key, value):
    self.written(BOTH, **{key: value})
    message = self.not_loaded(make(Net), ValueError, key, CONFIG, 'must be')
    self.assertLess(len(message), 500)

  def test_defaults(self):
    # Of PEFT's configs any key may be absent but two.
    arrays = pair('lin', (3, 4), rank=8)
    self.written(arrays)
    text = '{"peft_type": "LORA", "target_modules": ["lin"]}'
    (self.directory / CONFIG).write_text(text)
    loaded = nnx_ext.load_lora(make(Net), self.directory)
    self.assertEqual((loaded.lin.lora.rank, loaded.lin.lora.scale), (8, 1.0))

  def test_no_peft_type(self):
    self.written(BOTH)
    (self.directory / CONFIG).write_text('{"r": 2}')
    self.not_loaded(make(Net), ValueError, 'peft_type', "'LORA'", 'None')

  def test_patterns_as_peft_reads_them(self):
    # Ends of names, the first that matches, ranks and alphas apart.
    arrays = {**pair('lin', (3, 4), 1), **pair('net.lin', (4, 5), 3)}
    self.written(
      arrays,
      r=5,
      lora_alpha=7,
      rank_pattern={r'net\.lin': 3, 'lin': 1, 'net.*': 9},
      alpha_pattern={'^lin': 4, r'(net|other)\.l[ij]n': 2.5, 'lin': 9},
    )
    loaded = nnx_ext.load_lora(make(Net), self.directory)
    self.assertEqual(loaded.lin.lora.scale, 4)
    self.assertAlmostEqual(loaded.net.lin.lora.scale, 2.5 / 3)

  def test_rank_stabilized(self):
    self.written(BOTH, lora_alpha=3.0, use_rslora=True)
    loaded = nnx_ext.load_lora(make(Net), self.directory)
    self.assertAlmostEqual(loaded.lin.lora.scale, 3 / 2**0.5)

  @cases({'r': 0, 'lora_alpha': 0, 'lora_dropout': 0})
  def test_not_a_number(self, case):
    self.written(BOTH)
    path = self.directory / CONFIG
    for value in ('NaN', 'Infinity', '-Infinity', '1e999'):
      text = re.sub(r'"r": 2', f'"r": 2, "{case}": {value}', '{"r": 2}')
      text = text.replace('{', '{"peft_type": "LORA", ')
      path.write_text(text)
      self.not_loaded(make(Net), ValueError, case, 'must be')

  def test_loaded_leaves_the_file_alone(self):
    files = {p: p.read_bytes() for p in self.written(BOTH).iterdir()}
    before = leaves(base := make(Net))
    nnx_ext.load_lora(base, self.directory)
    self.assertEqual({p: p.read_bytes() for p in files}, files)
    self.assertEqual(list(leaves(base)), list(before))
