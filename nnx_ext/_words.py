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
"""The vocabulary of messages: how values, paths and names are spoken of."""

import difflib
import re
import typing as tp

import jax
import numpy as np


def path(parts: tp.Sequence[tp.Any]) -> str:
  """``('layers', 0, 'kernel')`` as ``'layers/0/kernel'``, quoted."""
  if not parts:
    return 'the model itself'
  return repr('/'.join(map(str, parts)))


def keys(values: tp.Iterable[tp.Any]) -> str:
  """Keys of losses, as a list."""
  return '[' + ', '.join(map(repr, values)) + ']'


def value(x: tp.Any) -> str:
  """What an unwelcome value is."""
  if isinstance(x, (jax.Array, np.ndarray)):
    return f'{x.dtype} of shape {x.shape}'
  if isinstance(x, (tuple, list, dict)):
    return f'a {type(x).__name__} of {len(x)}'
  return f'{type(x).__name__} ({x!r})'[:80]


def some(texts: tp.Iterable[str]) -> str:
  """The first of the texts, and how many more there are."""
  texts = list(texts)
  more = f' and {len(texts) - 8} more' if len(texts) > 8 else ''
  return (', '.join(texts[:8]) or 'none') + more


def filter_(filter: tp.Any) -> str:
  """A filter as its user wrote it, or nearly so."""
  return filter.__name__ if isinstance(filter, type) else repr(filter)


def quoted(text: str) -> list[str]:
  """The names that stand in quotes in ``text``, such as a filter's."""
  return re.findall(r"'([^']+)'", text)


def did_you_mean(
  unknown: tp.Iterable[tp.Any], known: tp.Iterable[tp.Any]
) -> str:
  """`` Did you mean 'value' for 'valeu'?``, or nothing."""
  known = {str(key): key for key in known}
  hints = [
    f'{known[near[0]]!r} for {key!r}'
    for key in unknown
    if (near := difflib.get_close_matches(str(key), known, n=1))
  ]
  return f' Did you mean {", ".join(hints)}?' if hints else ''
