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
"""A BERT of two layers that classifies, in transformers and in NNX.

The paths of the NNX model are shorter than torch's names, and its attention
has its heads as an axis of the kernels, so the files need both a ``rename``
and a change of shape.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from tests.interop import twins

VOCABULARY, POSITIONS, LAYERS, WIDTH, HEADS, INNER, CLASSES = (
  40,
  16,
  2,
  32,
  4,
  48,
  5,
)


class Layer(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    heads = HEADS, WIDTH // HEADS
    self.query = nnx.LinearGeneral(WIDTH, heads, rngs=rngs)
    self.key = nnx.LinearGeneral(WIDTH, heads, rngs=rngs)
    self.value = nnx.LinearGeneral(WIDTH, heads, rngs=rngs)
    self.out = nnx.LinearGeneral(heads, WIDTH, axis=(-2, -1), rngs=rngs)
    self.attention_norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
    self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
    self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)
    self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    attended = nnx.dot_product_attention(
      self.query(x), self.key(x), self.value(x)
    )
    x = self.attention_norm(x + self.out(attended))
    hidden = nnx.gelu(self.up(x), approximate=False)
    return self.norm(x + self.down(hidden))


class Bert(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.positions = nnx.Embed(POSITIONS, WIDTH, rngs=rngs)
    self.types = nnx.Embed(2, WIDTH, rngs=rngs)
    self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
    self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
    self.pooler = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.classifier = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, ids: jax.Array) -> jax.Array:
    positions = jnp.arange(ids.shape[1])[None]
    x = self.words(ids) + self.positions(positions)
    x = self.norm(x + self.types(jnp.zeros_like(positions)))
    for layer in self.layers:
      x = layer(x)
    return self.classifier(jnp.tanh(self.pooler(x[:, 0])))


_EMBEDDINGS = {
  'words': 'word_embeddings',
  'positions': 'position_embeddings',
  'types': 'token_type_embeddings',
  'norm': 'LayerNorm',
}
_LAYER = {
  'query': 'attention.self.query',
  'key': 'attention.self.key',
  'value': 'attention.self.value',
  'out': 'attention.output.dense',
  'attention_norm': 'attention.output.LayerNorm',
  'up': 'intermediate.dense',
  'down': 'output.dense',
  'norm': 'output.LayerNorm',
}


def torch_name(path: tuple) -> str:
  """``('layers', 0, 'query')`` is ``bert.encoder.layer.0.attention...``."""
  match path:
    case ('layers', index, name):
      return f'bert.encoder.layer.{index}.{_LAYER[name]}'
    case ('pooler',):
      return 'bert.pooler.dense'
    case ('classifier',):
      return 'classifier'
    case (name,):
      return f'bert.embeddings.{_EMBEDDINGS[name]}'


class BertTwins(twins.Twins):
  """Sequences of eight ids to five classes."""

  inputs = np.random.RandomState(0).randint(1, VOCABULARY, (3, 8))
  rename = staticmethod(torch_name)

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
      vocab_size=VOCABULARY,
      hidden_size=WIDTH,
      num_hidden_layers=LAYERS,
      num_attention_heads=HEADS,
      intermediate_size=INNER,
      max_position_embeddings=POSITIONS,
      num_labels=CLASSES,
      initializer_range=0.2,
    )
    return transformers.BertForSequenceClassification(config)

  def run_torch(self, model: torch.nn.Module) -> torch.Tensor:
    return model(torch.from_numpy(self.inputs)).logits

  def make_nnx(self) -> Bert:
    return Bert(nnx.Rngs(0))
