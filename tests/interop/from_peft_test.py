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
"""An adapter trained and saved by PEFT, loaded by ``load_lora``, and back."""

import contextlib
import functools
import tempfile
import typing as tp

import numpy as np
import torch
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.interop import cases, files, twins

_directories = contextlib.ExitStack()


def tearDownModule():
  _directories.close()


class Trained(tp.NamedTuple):
  """What PEFT made of a case."""

  directory: str
  outputs: np.ndarray
  merged: dict[str, torch.Tensor]
  layers: dict[str, tuple]


@functools.cache
def _trained(name: str) -> Trained:
  case = cases.CASES[name]
  directory = _directories.enter_context(tempfile.TemporaryDirectory())
  adapted = files.adapt(case.pair, case.peft, case.allowed)
  files.train(case.pair, adapted)
  files.save(adapted, directory, case.allowed)
  outputs, layers = twins.logits(case.pair, adapted), files.layers(adapted)
  _assert_trained(case.pair, outputs)
  with files.strict(case.allowed):
    merged = adapted.merge_and_unload().state_dict()
  return Trained(directory, outputs, merged, layers)


@functools.cache
def _loaded(name: str) -> nnx.Module:
  pair = cases.CASES[name].pair
  return nnx_ext.load_lora(
    pair.load_nnx(), _trained(name).directory, rename=pair.rename
  )


def _assert_trained(pair, outputs):
  """Outputs that would not pass for those of the base model."""
  base = twins.logits(pair, pair.make_torch())
  assert np.max(np.abs(outputs - base)) > 0.02


class FromPeftTest(parameterized.TestCase):
  @parameterized.named_parameters(*cases.named())
  def test_outputs_and_merged_weights(self, name):
    pair, trained = cases.CASES[name].pair, _trained(name)
    loaded = _loaded(name)
    found = twins.logits(pair, loaded)
    np.testing.assert_allclose(found, trained.outputs, rtol=0, atol=1e-4)

    expected = nnx.to_flat_state(nnx.state(pair.read(trained.merged)))
    found = nnx.to_flat_state(nnx.state(nnx_ext.merge_lora(loaded)))
    for (path, value), (_, other) in zip(found, expected, strict=True):
      np.testing.assert_allclose(
        value[...], other[...], rtol=0, atol=1e-5, err_msg=str(path)
      )

  @parameterized.named_parameters(*cases.named())
  def test_and_back_without_a_bit_lost(self, name):
    case, trained = cases.CASES[name], _trained(name)
    pair, directory = case.pair, files.directory(self)
    nnx_ext.save_lora(
      _loaded(name),
      directory,
      rename=pair.rename,
      modules_to_save=case.saved,
    )
    expected, found = files.tensors(trained.directory), files.tensors(directory)
    # The base weights that PEFT saves with an embedding are not the adapter's.
    expected = {k: v for k, v in expected.items() if '.base_layer.' not in k}
    self.assertEqual(sorted(found), sorted(expected))
    for key, value in expected.items():
      self.assertEqual(found[key].dtype, value.dtype, key)
      self.assertTrue(torch.equal(found[key], value), key)

    again = files.load(pair, directory, case.allowed)
    self.assertEqual(files.layers(again), trained.layers)
    np.testing.assert_array_equal(twins.logits(pair, again), trained.outputs)

  @parameterized.parameters(
    ('bert', torch.bfloat16), ('words_dora', torch.float16)
  )
  def test_half_precision(self, name, dtype):
    case = cases.CASES[name]
    pair, directory = case.pair, files.directory(self)
    adapted = files.adapt(pair, case.peft, case.allowed)
    files.train(pair, adapted)
    state = adapted.state_dict()
    state = {k: v.to(dtype) if 'lora_' in k else v for k, v in state.items()}
    files.save(adapted, directory, case.allowed, state_dict=state)
    stored = files.tensors(directory)
    self.assertIn(dtype, [value.dtype for value in stored.values()])

    expected = twins.logits(pair, files.load(pair, directory, case.allowed))
    _assert_trained(pair, expected)
    loaded = nnx_ext.load_lora(pair.load_nnx(), directory, rename=pair.rename)
    found = twins.logits(pair, loaded)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

  @parameterized.named_parameters(
    ('pissa', 'pissa', False),
    ('pissa_rslora', 'pissa', True),
    ('olora', 'olora', False),
  )
  def test_a_start_that_peft_converted(self, init, rslora):
    case = cases.CASES['bert']
    pair, directory = case.pair, files.directory(self)
    start, end = directory / 'start', directory / 'end'
    options = {**case.peft, 'init_lora_weights': init, 'use_rslora': rslora}
    adapted = files.adapt(pair, options)
    adapted.peft_config['default'].init_lora_weights = True
    files.save(adapted, start)
    files.train(pair, adapted)
    expected = twins.logits(pair, adapted)
    _assert_trained(pair, expected)
    files.save(adapted, end, path_initial_model_for_weight_conversion=start)

    loaded = nnx_ext.load_lora(pair.load_nnx(), end, rename=pair.rename)
    self.assertEqual(loaded.layers[0].query.lora.rank, 8)
    found = twins.logits(pair, loaded)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

  @parameterized.named_parameters(
    ('one_layer', {'layers_to_transform': [1], 'layers_pattern': 'layer'}, 2),
    ('excluded', {'exclude_modules': ['value']}, 2),
    ('all_linear', {'target_modules': 'all-linear'}, 14),
    # PEFT saves the head by itself, and names another that there is not.
    ('a_task', {'task_type': 'SEQ_CLS'}, 4),
    ('orthogonal', {'init_lora_weights': 'orthogonal'}, 4),
    ('random', {'init_lora_weights': False}, 4),
  )
  def test_other_options(self, options, num_layers):
    case = cases.CASES['bert']
    pair, directory = case.pair, files.directory(self)
    adapted = files.adapt(pair, {**case.peft, **options})
    files.train(pair, adapted)
    files.save(adapted, directory)
    self.assertLen(files.layers(adapted), num_layers)
    expected = twins.logits(pair, adapted)
    _assert_trained(pair, expected)
    loaded = nnx_ext.load_lora(pair.load_nnx(), directory, rename=pair.rename)
    found = twins.logits(pair, loaded)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

  @parameterized.named_parameters(
    ('bias', {'bias': 'lora_only'}, 'bias'),
    ('lora_bias', {'lora_bias': True}, 'lora_bias'),
    (
      'trainable_tokens',
      {'trainable_token_indices': {'word_embeddings': [1, 2]}},
      'trainable_token_indices',
    ),
    (
      'target_parameters',
      {'target_modules': [], 'target_parameters': ['classifier.weight']},
      'target_parameters',
    ),
    (
      'layer_replication',
      {'layer_replication': [[0, 2], [1, 2]]},
      'layer_replication',
    ),
    ('pissa', {'init_lora_weights': 'pissa'}, 'init_lora_weights'),
    ('olora', {'init_lora_weights': 'olora'}, 'init_lora_weights'),
  )
  def test_refuses_what_it_cannot_hold(self, options, words):
    case = cases.CASES['bert']
    pair, directory = case.pair, files.directory(self)
    adapted = files.adapt(pair, {**case.peft, **options})
    # PEFT takes the bias for a factor of a wrong shape.
    files.save(adapted, directory, ["Adapter 'default': "])
    with self.assertRaisesRegex(ValueError, words):
      nnx_ext.load_lora(pair.load_nnx(), directory, rename=pair.rename)

  def test_refuses_the_head_of_a_tied_embedding(self):
    case = cases.CASES['gpt2']
    pair, directory = case.pair, files.directory(self)
    options = {**case.peft, 'target_modules': ['wte', 'lm_head']}
    tied = (*cases.EMBEDDINGS, 'Model has `tie_word_embeddings=True`')
    files.save(files.adapt(pair, options, tied), directory, tied)
    with self.assertRaisesRegex(ValueError, 'lm_head'):
      nnx_ext.load_lora(pair.load_nnx(), directory)
