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
"""How a layer is adapted: rank, scale, start, and what may be wrong with it."""

import dataclasses
import math
import typing as tp

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ext import _words

Initializer = nnx.Initializer
Init = tp.Literal['pissa', 'olora', 'orthogonal']


@dataclasses.dataclass(frozen=True)
class LoRAOptions:
  """The options of one adapter, the same for every way to make one."""

  rank: int
  alpha: float | None = None
  dropout: float = 0.0
  rslora: bool = False
  dora: bool = False
  init: Init | None = None
  a_initializer: Initializer | None = None
  b_initializer: Initializer | None = None
  param_dtype: tp.Any = jnp.float32

  @property
  def scale(self) -> float:
    """What the product of the factors is multiplied by."""
    alpha = self.rank if self.alpha is None else self.alpha
    return scale(alpha, self.rank, self.rslora)

  def check(self, api: str, rank_name: str = 'rank') -> 'LoRAOptions':
    """Raises for what no layer can be adapted by."""
    rank, alpha, dropout = self.rank, self.alpha, self.dropout
    if not _is_number(rank, int):
      raise TypeError(
        f'{api}: `{rank_name}` must be an int, like {rank_name}=8, got '
        f'{_words.value(rank)}.'
      )
    if rank < 1:
      raise ValueError(
        f'{api}: `{rank_name}` must be at least 1, got {rank}; '
        f'{rank_name}=8 is a usual start.'
      )
    if alpha is not None and not _is_number(alpha):
      raise TypeError(
        f'{api}: `alpha` must be a number, like alpha={2 * rank}, got '
        f'{_words.value(alpha)}. It is static: the factors change while '
        'training, the scale does not.'
      )
    if alpha is not None and not (0 < alpha < math.inf):
      raise ValueError(
        f'{api}: `alpha` must be positive and finite, got {alpha}; it '
        f'defaults to the rank, {rank}.'
      )
    if not _is_number(dropout):
      raise TypeError(
        f'{api}: `dropout` must be a number, like dropout=0.1, got '
        f'{_words.value(dropout)}.'
      )
    if not 0 <= dropout < 1:
      raise ValueError(
        f'{api}: `dropout` is a probability, at least 0 and less than 1, got '
        f'{dropout}.'
      )
    for name in ('rslora', 'dora'):
      flag = getattr(self, name)
      if not isinstance(flag, bool):
        raise TypeError(
          f'{api}: `{name}` must be True or False, got {_words.value(flag)}.'
        )
    self._check_init(api, rank_name)
    try:
      is_float = jnp.issubdtype(self.param_dtype, jnp.floating)
    except TypeError:  # no dtype at all
      is_float = False
    if not is_float:
      raise TypeError(
        f'{api}: `param_dtype` must be a floating dtype, like jnp.float32, '
        f'got {_words.value(self.param_dtype)}.'
      )
    return self

  def _check_init(self, api: str, rank_name: str):
    known = tp.get_args(Init)
    if self.init is not None and self.init not in known:
      hint = _words.did_you_mean([self.init], known)
      raise ValueError(
        f'{api}: `init` must be None or one of {list(known)}, got '
        f'{self.init!r}.{hint}'
      )
    for name in ('a_initializer', 'b_initializer'):
      initializer = getattr(self, name)
      if initializer is None:
        continue
      if not callable(initializer):
        raise TypeError(
          f'{api}: `{name}` must be an initializer, like '
          f'nnx.initializers.he_uniform(), got {_words.value(initializer)}.'
        )
      if self.init is not None:
        raise ValueError(
          f'{api}: `init` and `{name}` both say how the factors start, got '
          f'init={self.init!r} too; give one of them.'
        )
    if self.init == 'orthogonal' and self.rank % 2:
      raise ValueError(
        f"{api}: init='orthogonal' gives A one half of the directions and B "
        f'the other, so `{rank_name}` must be even, got {self.rank}.'
      )


def scale(alpha: float, rank: int, rslora: bool) -> float:
  """What the product of the factors is multiplied by.

  ``alpha / rank`` (https://arxiv.org/abs/2106.09685, section 4.1) or, rank
  stabilized, ``alpha / sqrt(rank)`` (https://arxiv.org/abs/2312.03732).
  """
  return alpha / (math.sqrt(rank) if rslora else rank)


def _is_number(x: tp.Any, kind: type = float) -> bool:
  kinds = (int, np.integer) if kind is int else (int, float, np.number)
  return isinstance(x, kinds) and not isinstance(x, bool)
