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
"""What the axes of a weight are to its layer, and the factors they allow."""

import dataclasses
import math
import string

import jax
import jax.numpy as jnp
from jaxtyping import Float, Inexact

Weight = Inexact[jax.Array, '...']
Factor = Inexact[jax.Array, '...']

_RANK = 'R'


@dataclasses.dataclass(frozen=True)
class Axes:
  """The kind of each axis of a weight, a letter an axis.

  ``i`` is summed over (a convolution's window is), ``o`` is made, and ``b``
  stands in the input and in the output, as if each place had a weight of its
  own. A factor A holds the ``b`` and ``i`` axes, and the rank in the place of
  the first ``o``, so that it can stand in the weight's place. A factor B holds
  the ``b`` axes, the rank and the ``o`` axes. Arrays may have further axes
  before these, of layers that are stacked.

  Attributes:
    kinds: such as ``'io'`` for a Linear.
    groups: blocks of the last axis, each made from inputs of its own, as in a
      grouped convolution; they count as a ``b`` axis before it.
  """

  kinds: str
  groups: int = 1

  @property
  def letters(self) -> str:
    """A letter an axis, with the groups as an axis of their own."""
    return string.ascii_lowercase[: len(self._split_kinds)]

  @property
  def a_letters(self) -> str:
    made = self._of('o')
    replaced = self.letters.replace(made[0], _RANK)
    return ''.join(letter for letter in replaced if letter not in made)

  @property
  def rank_axis_of_a(self) -> int:
    """Where the rank stands in A, of a weight without groups."""
    return self.a_letters.index(_RANK)

  @property
  def b_letters(self) -> str:
    return self._of('b') + _RANK + self._of('o')

  @property
  def summed(self) -> tuple[int, ...]:
    """The axes that are summed over, counted from the end."""
    count = len(self.kinds)
    return tuple(k - count for k in range(count) if self.kinds[k] == 'i')

  @property
  def turned(self) -> 'Axes':
    """What the axes are to a layer that uses the weight transposed."""
    return dataclasses.replace(
      self, kinds=self.kinds.translate(str.maketrans('io', 'oi'))
    )

  def factor_shapes(
    self, shape: tuple[int, ...], rank: int
  ) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B for a weight of this shape, not stacked."""
    sizes = dict(zip(self.letters, self._split_shape(shape)))
    sizes[_RANK] = rank
    a = tuple(sizes[letter] for letter in self.a_letters)
    if self.groups > 1:
      a = (*a[:-2], a[-2] * a[-1])
    return a, tuple(sizes[letter] for letter in self.b_letters)

  def factor_names(self, names: tuple) -> tuple[tuple, tuple]:
    """The names of A's and B's axes, for a weight whose axes have names.

    The names may begin with those of stacked layers. The rank has none; a
    name of the outputs is that of the groups, if there are any.
    """
    count = len(names) - len(self.kinds)
    stack, names = names[:count], names[count:]
    named = dict(zip(self.letters, names))
    named[_RANK] = None
    if self.groups > 1:
      named[self.letters[-2]], named[self.letters[-1]] = names[-1], None
    a = tuple(named[letter] for letter in self.a_letters)
    if self.groups > 1:
      a = a[:-1]
    return (*stack, *a), (*stack, *(named[n] for n in self.b_letters))

  def matrix_sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """How many matrices the weight is, their rows and their columns."""
    sizes = dict(zip(self.letters, self._split_shape(shape)))

    def size(kind):
      return math.prod(sizes[letter] for letter in self._of(kind))

    return size('b'), size('i'), size('o')

  def product(self, a: Factor, b: Factor) -> Weight:
    """A B in the weight's shape."""
    equation = f'...{self.a_letters},...{self.b_letters}->...{self.letters}'
    return self._join(jnp.einsum(equation, self._split(a), b))

  def matrices(self, weight: Weight) -> Float[jax.Array, '... b i o']:
    """The weight as matrices, in float32."""
    order = self._of('b') + self._of('i') + self._of('o')
    split = self._split(weight.astype(jnp.float32))
    moved = jnp.einsum(f'...{self.letters}->...{order}', split)
    stack = moved.shape[: moved.ndim - len(order)]
    shape = weight.shape[len(stack) :]
    return moved.reshape(*stack, *self.matrix_sizes(shape))

  def a_from_matrices(
    self, matrices: Float[jax.Array, '... b i r'], shape: tuple[int, ...]
  ) -> Factor:
    """A in its own shape, for a weight of this shape."""
    sizes = dict(zip(self.letters, self._split_shape(shape)))
    order = self._of('b') + self._of('i')
    stack, rank = matrices.shape[:-3], matrices.shape[-1]
    split = matrices.reshape(*stack, *(sizes[n] for n in order), rank)
    return self._join(
      jnp.einsum(f'...{order}{_RANK}->...{self.a_letters}', split)
    )

  def b_from_matrices(
    self, matrices: Float[jax.Array, '... b r o'], shape: tuple[int, ...]
  ) -> Factor:
    """B in its own shape, for a weight of this shape."""
    _, b_shape = self.factor_shapes(shape, matrices.shape[-2])
    return matrices.reshape(*matrices.shape[:-3], *b_shape)

  def join_ranks(self, factors: list[tuple[Factor, Factor]]):
    """One pair of factors whose product is the sum of the products."""
    a_axis = self.a_letters.index(_RANK) - len(self.a_letters)
    b_axis = self.b_letters.index(_RANK) - len(self.b_letters)
    a = jnp.concatenate([self._split(a) for a, _ in factors], a_axis)
    return self._join(a), jnp.concatenate([b for _, b in factors], b_axis)

  def rank_of(self, b_shape: tuple[int, ...]) -> int:
    return b_shape[self.b_letters.index(_RANK) - len(self.b_letters)]

  @property
  def _split_kinds(self) -> str:
    if self.groups == 1:
      return self.kinds
    return self.kinds[:-1] + 'b' + self.kinds[-1]

  def _of(self, kind: str) -> str:
    pairs = zip(self.letters, self._split_kinds)
    return ''.join(letter for letter, its in pairs if its == kind)

  def _split_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    if self.groups == 1:
      return shape
    return (*shape[:-1], self.groups, shape[-1] // self.groups)

  def _split(self, array: jax.Array) -> jax.Array:
    return array.reshape(self._split_shape(array.shape))

  def _join(self, array: jax.Array) -> jax.Array:
    if self.groups == 1:
      return array
    return array.reshape(*array.shape[:-2], -1)
