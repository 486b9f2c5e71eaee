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
"""Options that are given once for all losses, or one entry for each."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnx_ext import _words
from nnx_ext._losses import Losses
from nnx_ext.typing import Weight, Weights

T = tp.TypeVar('T')
U = tp.TypeVar('U')


@dataclasses.dataclass(frozen=True)
class PerLoss(tp.Generic[T]):
  """An option given once for all losses, or one entry for each loss."""

  name: str
  common: T | None = None
  entries: dict[tp.Any, T] | tuple[T, ...] | None = None

  @classmethod
  def parse(cls, name: str, option: tp.Any, entry: tp.Callable[[tp.Any], T]):
    """``entry`` checks and converts one entry."""
    if isinstance(option, tp.Mapping):
      return cls(name, entries={k: entry(v) for k, v in option.items()})
    if isinstance(option, (tuple, list)):
      return cls(name, entries=tuple(map(entry, option)))
    return cls(name, common=entry(option))

  def map(self, f: tp.Callable[[T], U]) -> 'PerLoss[U]':
    if isinstance(self.entries, dict):
      entries = {k: f(v) for k, v in self.entries.items()}
      return PerLoss(self.name, entries=entries)
    if self.entries is not None:
      return PerLoss(self.name, entries=tuple(map(f, self.entries)))
    return PerLoss(self.name, common=f(tp.cast(T, self.common)))

  def values(self) -> list[T]:
    """Every entry, before it is known which losses there are."""
    if isinstance(self.entries, dict):
      return list(self.entries.values())
    if self.entries is not None:
      return list(self.entries)
    return [tp.cast(T, self.common)]

  def match(self, losses: Losses) -> list[T]:
    """One entry for each loss, in the order of ``losses.keys``."""
    if self.entries is None:
      return [tp.cast(T, self.common)] * len(losses)
    if losses.named != isinstance(self.entries, dict):
      raise self._wrong_form(losses)
    if isinstance(self.entries, dict):
      if set(self.entries) != set(losses.keys):
        raise self._wrong_names(losses, self.entries)
      return [self.entries[key] for key in losses.keys]
    if len(self.entries) != len(losses):
      raise ValueError(
        f'{losses.api}: `{self.name}` has {len(self.entries)} entries, but '
        f'`f` returned {len(losses)} losses {_words.keys(losses.keys)}; give '
        'one entry for each loss, or a single one for all.'
      )
    return list(self.entries)

  def _wrong_form(self, losses: Losses) -> ValueError:
    given = 'a dict' if isinstance(self.entries, dict) else 'a sequence'
    if losses.named:
      wanted = (
        'a dict with the same keys, '
        f'{self.name}={{{", ".join(f"{k!r}: ..." for k in losses.keys)}}}'
      )
    else:
      wanted = f'a tuple of {len(losses)} entries, in order'
    return ValueError(
      f'{losses.api}: `{self.name}` is {given}, but `f` returned its losses '
      f'as a {losses.kind.__name__}, {_words.keys(losses.keys)}; give '
      f'{wanted}, or a single entry for all losses.'
    )

  def _wrong_names(self, losses: Losses, entries: dict) -> ValueError:
    missing = [k for k in losses.keys if k not in entries]
    unknown = [k for k in entries if k not in losses.keys]
    parts = []
    if missing:
      parts.append(f'has no entry for the losses {_words.keys(missing)}')
    if unknown:
      parts.append(f'names {_words.keys(unknown)}, which `f` did not return')
    return ValueError(
      f'{losses.api}: `{self.name}` {" and ".join(parts)}; the losses are '
      f'{_words.keys(losses.keys)}.{_words.did_you_mean(unknown, losses.keys)}'
    )


def parse_weights(api: str, weights: Weights | None) -> PerLoss[Weight | None]:
  """Checks ``weights``: real scalars, which may be traced."""

  def entry(value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    if not number and not (array and _is_real(value.dtype)):
      raise TypeError(
        f'{api}: `weights` are numbers, one for all losses or one for each '
        f'in a dict, tuple or list, got {value!r}.'
      )
    if np.shape(value) != ():
      raise ValueError(
        f'{api}: a weight must be a scalar, got shape {np.shape(value)}. For '
        'one weight a loss, give a dict, tuple or list of scalars.'
      )
    return value

  if weights is None:
    return PerLoss('weights', common=None)
  return PerLoss.parse('weights', weights, entry)


def _is_real(dtype) -> bool:
  return jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating)
