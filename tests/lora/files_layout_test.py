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
"""Names, shapes, orientations and configs in PEFT's files.

PEFT's rules are written down here as they were measured with PEFT 0.21.2;
``tests/interop`` asks PEFT itself.
"""

import re

import numpy as np
import safetensors
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.errors import cases
from tests.lora.files import (
  CONFIG,
  MODEL,
  PREFIX,
  FilesTestCase,
  Net,
  adapt,
  config,
  make,
  same,
  tensors,
)


class Zoo(nnx.Module):
  """Every layer that PEFT has a form for."""

  def __init__(self, rngs):
    self.lin = nnx.Linear(12, 20, rngs=rngs)
    self.gen = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs)
    self.ein = nnx.Einsum('btd,ndh->bthn', (2, 3, 4), rngs=rngs)
    self.emb = nnx.Embed(50, 12, rngs=rngs)
    self.c1 = nnx.Conv(4, 6, 3, rngs=rngs)
    self.c2 = nnx.Conv(4, 6, (3, 5), rngs=rngs)
    self.c3 = nnx.Conv(4, 6, (3, 5, 2), rngs=rngs)


# By module: the keys and shapes of A and B for rank 2, how ours stand in
# them, and the shape of a magnitude.
LAYOUT: dict[str, tuple[dict, str, str, tuple]] = {
  'lin': (
    {'lora_A.weight': (2, 12), 'lora_B.weight': (20, 2)},
    'ir->ri',
    'ro->or',
    (20,),
  ),
  'gen': (
    {'lora_A.weight': (2, 6), 'lora_B.weight': (20, 2)},
    'ijr->rij',
    'rop->opr',
    (20,),
  ),
  'ein': (
    # A stands in the weight's place, so its axes are (rank, d).
    {'lora_A.weight': (2, 3), 'lora_B.weight': (8, 2)},
    'rd->rd',
    'rnh->nhr',
    (8,),
  ),
  'emb': (
    {'lora_embedding_A': (2, 50), 'lora_embedding_B': (12, 2)},
    'vr->rv',
    'rd->dr',
    (12,),
  ),
  'c1': (
    {'lora_A.weight': (2, 4, 3), 'lora_B.weight': (6, 2, 1)},
    'wir->riw',
    'ro->or',
    (1, 6, 1),
  ),
  'c2': (
    {'lora_A.weight': (2, 4, 3, 5), 'lora_B.weight': (6, 2, 1, 1)},
    'hwir->rihw',
    'ro->or',
    (1, 6, 1, 1),
  ),
  'c3': (
    {'lora_A.weight': (2, 4, 3, 5, 2), 'lora_B.weight': (6, 2, 1, 1, 1)},
    'dhwir->ridhw',
    'ro->or',
    (1, 6, 1, 1, 1),
  ),
}


class LayoutTest(FilesTestCase):
  def test_keys_and_shapes(self):
    found = tensors(self.saved(adapt(make(Zoo), dora=True)))
    expected = {}
    for name, (shapes, *_, magnitude) in LAYOUT.items():
      expected |= {f'{PREFIX}{name}.{k}': v for k, v in shapes.items()}
      expected[f'{PREFIX}{name}.lora_magnitude_vector'] = magnitude
    self.assertEqual({k: v.shape for k, v in found.items()}, expected)
    self.assertEqual({v.dtype for v in found.values()}, {np.dtype('float32')})

  @cases(LAYOUT)
  def test_orientation(self, case):
    model = adapt(make(Zoo), targets=nnx.PathContains(case))
    found = tensors(self.saved(model))
    shapes, *equations, _ = LAYOUT[case]
    self.assertCountEqual(found, [f'{PREFIX}{case}.{key}' for key in shapes])
    lora = getattr(model, case).lora
    for key, factor, equation in zip(
      shapes, (lora.lora_a, lora.lora_b), equations
    ):
      expected = np.einsum(equation, np.asarray(factor[...]))
      expected = expected.reshape(shapes[key])
      np.testing.assert_array_equal(found[f'{PREFIX}{case}.{key}'], expected)

  def test_magnitude_in_the_order_of_the_weight(self):
    model = adapt(make(Zoo), dora=True, targets=nnx.PathContains('ein'))
    found = tensors(self.saved(model))[f'{PREFIX}ein.lora_magnitude_vector']
    magnitude = model.ein.lora.magnitude[...]
    self.assertEqual(magnitude.shape, (2, 4))
    np.testing.assert_array_equal(found, np.ravel(magnitude))

  def test_metadata(self):
    path = self.saved(adapt(make(Net))) / MODEL
    with safetensors.safe_open(path, framework='numpy') as file:
      self.assertEqual(file.metadata(), {'format': 'pt'})

  def test_no_other_files(self):
    names = [path.name for path in self.saved(adapt(make(Net))).iterdir()]
    self.assertCountEqual(names, [CONFIG, MODEL])


def peft_targets(found: dict, names: list[str]) -> list[str]:
  """The modules of these names that PEFT adapts."""
  targets = found['target_modules']
  if isinstance(targets, str):
    return [name for name in names if re.fullmatch(targets, name)]
  return [n for n in names if any(f'.{n}'.endswith(f'.{t}') for t in targets)]


def peft_option(found: dict, key: str, pattern: str, name: str):
  """The rank or alpha that PEFT gives a module of this name."""
  for regex, value in found[pattern].items():
    if re.match(rf'(.*\.)?({regex})$', name):
      return value
  return found[key]


# All keys that PEFT 0.21 knows; it warns of others.
PEFT_KEYS = set(
  """alora_invocation_tokens alpha_pattern arrow_config auto_mapping
  base_model_name_or_path bias corda_config ensure_weight_tying eva_config
  exclude_modules fan_in_fan_out inference_mode init_lora_weights kasa_config
  layer_replication layers_pattern layers_to_transform loftq_config lora_alpha
  lora_bias lora_dropout lora_ga_config megatron_config megatron_core
  modules_to_save monteclora_config peft_type peft_version qalora_group_size r
  rank_pattern revision target_modules target_parameters task_type
  trainable_token_indices use_bdlora use_dora use_qalora use_rslora
  velora_config""".split()
)


class Suffixes(nnx.Module):
  """Names that are the ends of others, and one that is a wildcard in one."""

  def __init__(self, rngs):
    layer = lambda: nnx.Linear(2, 3, rngs=rngs)
    self.lin = layer()
    self.net = nnx.Dict(lin=layer(), net=nnx.Dict(lin=layer(), linear=layer()))
    self.net_lin = layer()


SUFFIXES = ['lin', 'net.lin', 'net.net.lin', 'net.net.linear', 'net_lin']


class ConfigTest(FilesTestCase):
  def test_plain(self):
    found = config(self.saved(adapt(make(Net), rank=3, alpha=6)))
    self.assertEqual(found['target_modules'], ['lin', 'net.lin'])
    self.assertLessEqual(set(found), PEFT_KEYS)
    expected = {
      'peft_type': 'LORA',
      'r': 3,
      'lora_alpha': 6,
      'lora_dropout': 0.0,
      'bias': 'none',
      'init_lora_weights': True,
      'fan_in_fan_out': False,
      'use_rslora': False,
      'use_dora': False,
      'rank_pattern': {},
      'alpha_pattern': {},
      'modules_to_save': None,
      'task_type': None,
    }
    self.assertEqual({key: found[key] for key in expected}, expected)
    text = (self.directory / CONFIG).read_text()
    self.assertIn('\n  "lora_alpha": 6,\n', text)  # no 6.0, two spaces
    self.assertEqual(list(found), sorted(found))

  @parameterized.product(
    flags=[{'rslora': True}, {'dora': True}, {'alpha': 2.5}]
  )
  def test_flags(self, flags):
    found = config(self.saved(adapt(make(Net), **flags)))
    self.assertIs(found['use_rslora'], 'rslora' in flags)
    self.assertIs(found['use_dora'], 'dora' in flags)
    self.assertEqual(found['lora_alpha'], flags.get('alpha', 2))

  @parameterized.product(chosen=[[0], [1], [0, 2], [3], [4, 2], range(5)])
  def test_targets_are_those_and_no_others(self, chosen):
    chosen = [SUFFIXES[i] for i in chosen]
    model = adapt(
      make(Suffixes),
      targets=lambda path, _: '.'.join(path) in chosen,
    )
    found = config(self.saved(model))
    self.assertEqual(peft_targets(found, SUFFIXES), sorted(chosen))

  def test_targets_as_a_list_where_it_can_be(self):
    part = nnx.PathContains('net', exact=True)
    found = config(self.saved(adapt(make(Suffixes), targets=part)))
    self.assertIsInstance(found['target_modules'], list)
    one = lambda path, _: path == ('lin',)
    found = config(self.saved(adapt(make(Suffixes), targets=one)))
    self.assertIsInstance(found['target_modules'], str)

  @parameterized.product(special=SUFFIXES)
  def test_patterns(self, special):
    # Whichever layer has options of its own, each has those it should.
    is_special = lambda path, _: '.'.join(path) == special
    model = adapt(
      make(Suffixes),
      alpha=5.5,
      patterns={is_special: {'rank': 1, 'alpha': 4}},
    )
    found = config(self.saved(model))
    for name in SUFFIXES:
      rank = peft_option(found, 'r', 'rank_pattern', name)
      alpha = peft_option(found, 'lora_alpha', 'alpha_pattern', name)
      self.assertEqual((rank, alpha), (1, 4) if name == special else (2, 5.5))
    self.assertLen(found['rank_pattern'], 1)
    same(nnx_ext.load_lora(make(Suffixes), self.directory), model)

  def test_the_most_frequent_is_no_pattern(self):
    patterns = {nnx.PathContains('net'): {'rank': 1}}
    model = adapt(make(Suffixes), patterns=patterns)
    found = config(self.saved(model))
    self.assertEqual(found['r'], 1)
    self.assertEqual(set(found['rank_pattern'].values()), {2})

  def test_names_are_no_wildcards(self):
    rename = {'net_lin': 'netXlin', 'lin': 'lin'}.get
    name = lambda path: rename('.'.join(path)) or '.'.join(path)
    model = adapt(
      make(Suffixes),
      patterns={lambda path, _: path == ('net', 'lin'): {'rank': 1}},
    )
    found = config(self.saved(model, rename=name))
    rank = peft_option(found, 'r', 'rank_pattern', 'netXlin')
    self.assertEqual(rank, 2)
    same(nnx_ext.load_lora(make(Suffixes), self.directory, rename=name), model)
