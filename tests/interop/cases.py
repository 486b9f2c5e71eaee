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
"""How a model is adapted, said to PEFT and said to nnx_ext."""

import dataclasses
import typing as tp

from flax import nnx

from tests.interop import bert, gpt2, small, twins


@dataclasses.dataclass(frozen=True)
class Case:
  """One way to adapt one model.

  Attributes:
    pair: the model.
    peft: arguments of ``peft.LoraConfig``.
    nnx: arguments of ``nnx_ext.apply_lora``.
    saved: modules that are trained and saved whole.
    allowed: what PEFT may warn of.
  """

  pair: twins.Twins
  peft: dict[str, tp.Any]
  nnx: dict[str, tp.Any]
  saved: tuple[str, ...] = ()
  allowed: tuple[str, ...] = ()


def either(*names: str) -> nnx.filterlib.Filter:
  return nnx.Any(*(nnx.PathContains(name) for name in names))


_BERT = bert.BertTwins()
_GPT2 = gpt2.GPT2Twins()
_WORDS = small.WordsTwins()
_NESTED = small.NestedTwins()

_QV = (
  {'target_modules': ['query', 'value']},
  {'targets': either('query', 'value')},
)

# What PEFT says of any GPT-2; the numbers are the same.
_CONV1D = ('fan_in_fan_out is set to False but the target module is `Conv1D`',)
# Then the file holds the base weight too.
EMBEDDINGS = ('Setting `save_embedding_layers` to `True`',)


def _case(pair, peft, nnx_, **options) -> Case:
  return Case(
    pair,
    {'r': 4, 'lora_alpha': 6, **peft},
    {'rank': 4, 'alpha': 6, **nnx_},
    **options,
  )


def _bert(peft=None, nnx_=None, **options) -> Case:
  return _case(
    _BERT, {**_QV[0], **(peft or {})}, {**_QV[1], **(nnx_ or {})}, **options
  )


def _conv(ndim: int, dora: bool = False) -> Case:
  # PEFT cannot merge a window of 1 in three dimensions.
  names = ['conv', 'head'] if ndim == 3 else ['conv', 'pointwise', 'head']
  return _case(
    small.ConvTwins(ndim),
    {'target_modules': names, 'use_dora': dora},
    {'targets': either(*names), 'dora': dora},
  )


CASES = {
  'bert': _bert(),
  'bert_rslora_patterns': _bert(
    {
      'use_rslora': True,
      'rank_pattern': {'value': 2, r'^bert\.encoder\.layer\.1\..*query': 3},
      'alpha_pattern': {'value': 2.5},
    },
    {
      'rslora': True,
      'patterns': {
        nnx.PathContains('value'): {'rank': 2, 'alpha': 2.5},
        lambda path, module: path == ('layers', 1, 'query'): {'rank': 3},
      },
    },
  ),
  # Every layer of a transformer that multiplies.
  'bert_linear_dora': _bert(
    {
      'target_modules': r'bert\.encoder\..*\.(query|key|value|dense)',
      'use_dora': True,
    },
    {'targets': nnx.PathContains('layers'), 'dora': True},
  ),
  # A name in PEFT is the end of a name, of a module that may hold others.
  'bert_saved': _bert(
    {
      'target_modules': ['word_embeddings', 'position_embeddings', 'query'],
      'modules_to_save': ['pooler', 'classifier', 'embeddings.LayerNorm'],
    },
    {'targets': either('words', 'positions', 'query')},
    saved=('pooler', 'classifier', 'norm'),
  ),
  'gpt2': _case(
    _GPT2,
    {'target_modules': ['c_attn', 'c_proj']},
    {'targets': either('c_attn', 'c_proj')},
    allowed=_CONV1D,
  ),
  'gpt2_dora_rslora': _case(
    _GPT2,
    {
      'target_modules': ['c_attn', 'c_fc'],
      'use_dora': True,
      'use_rslora': True,
    },
    {'targets': either('c_attn', 'c_fc'), 'dora': True, 'rslora': True},
    allowed=_CONV1D,
  ),
  'words': _case(
    _WORDS,
    {'target_modules': ['embed_tokens', 'head']},
    {},
    allowed=EMBEDDINGS,
  ),
  'words_dora': _case(
    _WORDS,
    {'target_modules': ['embed_tokens'], 'use_dora': True},
    {'targets': nnx.Embed, 'dora': True},
    allowed=EMBEDDINGS,
  ),
  # One name ends in the other: a list of names would mean both.
  'nested_one': _case(
    _NESTED,
    {'target_modules': 'head'},
    {'targets': lambda path, module: path == ('head',)},
  ),
  'nested_both': _case(
    _NESTED,
    {
      'target_modules': ['head'],
      'rank_pattern': {'^head': 2},
      'alpha_pattern': {'inner.head': 3},
    },
    {
      'targets': nnx.PathContains('head'),
      'patterns': {
        lambda path, module: path == ('head',): {'rank': 2},
        lambda path, module: path == ('inner', 'head'): {'alpha': 3},
      },
    },
  ),
  'conv1d': _conv(1),
  'conv2d': _conv(2),
  'conv2d_dora': _conv(2, dora=True),
  'conv3d_dora': _conv(3, dora=True),
}


def named() -> list[tuple[str, str]]:
  return [(name, name) for name in CASES]
