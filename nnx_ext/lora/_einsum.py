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
"""Einsum equations of an input and a weight, taken apart by its axes."""

import dataclasses
import functools
import string
import typing as tp

_ELLIPSIS = '...'


@dataclasses.dataclass(frozen=True)
class Equation:
  """An equation such as ``'btd,dnh->btnh'``, its terms in letters.

  Axes behind an ellipsis of the weight are kept in the output, so each has a
  weight of its own.
  """

  inputs: tuple[str, ...]
  weight: tuple[str, ...]
  outputs: tuple[str, ...]

  @classmethod
  @functools.cache  # a layer asks at each call
  def parse(cls, text: str) -> 'Equation':
    terms, outputs = text.replace(' ', '').split('->')
    return cls(*map(_letters, (*terms.split(','), outputs)))

  def kinds(self, ndim: int) -> str:
    """The kind of each axis of a weight of so many axes."""
    axes = _axes(self.weight, ndim)
    return ''.join(self._kind(n) * len(axes[n]) for n in self.weight)

  @property
  def of_hidden(self) -> str:
    """The equation of the input and A."""
    a = [self._rank if n == self.made[0] else n for n in self.weight]
    a = [letter for letter in a if letter not in self.made]
    return _text(self.inputs, a, self._hidden)

  @property
  def of_outputs(self) -> str:
    """The equation of the hidden activations and B."""
    kept = [letter for letter in self.weight if self._kind(letter) == 'b']
    b = (*kept, self._rank, *self.made)
    return _text(self._hidden, b, self.outputs)

  def output_shape(self, shape: tp.Sequence[int], ndim: int) -> tuple[int, ...]:
    """How what a weight of this shape makes broadcasts to the outputs."""
    axes = _axes(self.weight, len(shape))
    result: list[int] = []
    for letter in self.outputs:
      sizes = [shape[axis] for axis in axes.get(letter, ())]
      count = 1 if letter != _ELLIPSIS else ndim - len(self.outputs) + 1
      result += [1] * (count - len(sizes)) + sizes
    return tuple(result)

  def output_order(self, ndim: int) -> list[int]:
    """The kept and made axes of a weight, in the order of the outputs.

    They are counted as they stand in the weight, without those summed over.
    """
    letters = [letter for letter in self.weight if self._kind(letter) != 'i']
    axes = _axes(letters, ndim)
    return [axis for n in self.outputs for axis in axes.get(n, ())]

  def _kind(self, letter: str) -> str:
    if letter not in self.outputs:
      return 'i'
    return 'b' if letter in self.inputs or letter == _ELLIPSIS else 'o'

  @property
  def made(self) -> list[str]:
    """The letters that only the weight and the output have."""
    return [letter for letter in self.weight if self._kind(letter) == 'o']

  @property
  def _hidden(self) -> list[str]:
    return [n for n in self.outputs if n not in self.made] + [self._rank]

  @property
  def _rank(self) -> str:
    """A letter that the equation does not use."""
    used = (*self.inputs, *self.weight, *self.outputs)
    return next(letter for letter in string.ascii_letters if letter not in used)


def _axes(letters: tp.Sequence[str], ndim: int) -> dict[str, range]:
  """Which of the axes each letter, and the ellipsis, stands for."""
  behind = ndim - len([letter for letter in letters if letter != _ELLIPSIS])
  axes, start = {}, 0
  for letter in letters:
    end = start + (behind if letter == _ELLIPSIS else 1)
    axes[letter], start = range(start, end), end
  return axes


def _letters(term: str) -> tuple[str, ...]:
  before, ellipsis, after = term.partition(_ELLIPSIS)
  return (*before, ellipsis, *after) if ellipsis else tuple(before)


def _text(inputs, weight, outputs) -> str:
  return f'{"".join(inputs)},{"".join(weight)}->{"".join(outputs)}'
