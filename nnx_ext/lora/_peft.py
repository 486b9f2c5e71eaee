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
"""PEFT's names and orientations of an adapter's arrays, and which fit them.

PEFT is Hugging Face's library of adapters for PyTorch, whose weights are
(out, in) and whose convolutions are (out, in, window).
"""

import dataclasses
import math
import typing as tp

import numpy as np
from flax import nnx

from nnx_ext.lora._axes import Axes
from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._kinds import (
  CONV,
  CONV_TRANSPOSE,
  EMBED,
  Kind,
  kind_of,
)

Arrays = dict[str, np.ndarray]

PREFIX = 'base_model.model.'
EXTENSION = 'nnx_ext.'
FIELDS = ('lora_a', 'lora_b', 'magnitude')


@dataclasses.dataclass(frozen=True)
class Layout:
  """How one layer's arrays stand in a file.

  Attributes:
    axes: those of the layer's weight.
    shape: that of the layer's weight.
    kind: that of the layer.
    extended: whether under keys of our own, which PEFT passes over.
  """

  axes: Axes
  shape: tuple[int, ...]
  kind: Kind
  extended: bool

  def keys(self, name: str) -> dict[str, str]:
    """The keys of A, B and the magnitude of a module of this name."""
    if self.extended:
      return {field: f'{EXTENSION}{name}.{field}' for field in FIELDS}
    a, b = 'lora_A.weight', 'lora_B.weight'
    if self.kind is EMBED:
      a, b = 'lora_embedding_A', 'lora_embedding_B'
    keys = {'lora_a': a, 'lora_b': b, 'magnitude': 'lora_magnitude_vector'}
    return {field: f'{PREFIX}{name}.{key}' for field, key in keys.items()}

  def to_file(self, lora: LoRAFactors) -> Arrays:
    """The arrays of an adapter as they stand in a file."""
    variables = {field: getattr(lora, field) for field in FIELDS}
    return {
      field: self._to_file(field, np.asarray(variable.get_value()))
      for field, variable in variables.items()
      if variable is not None
    }

  def _to_file(self, field: str, array: np.ndarray) -> np.ndarray:
    if self.extended:
      return array
    window = (1,) * self._window
    if field == 'magnitude':
      return array.reshape((1, -1, *window) if window else -1)
    if field == 'lora_b':
      flat = array.reshape(array.shape[0], -1).T
      return flat.reshape(*flat.shape, *window)
    by_rank = np.moveaxis(array, self.axes.rank_axis_of_a, 0)
    if not window:
      return by_rank.reshape(by_rank.shape[0], -1)
    return np.moveaxis(by_rank, -1, 1)

  def from_file(self, field: str, array: np.ndarray) -> np.ndarray:
    """An array of a file as it stands in the layer."""
    if self.extended:
      return array
    rank = array.shape[0 if field == 'lora_a' else 1] if array.ndim > 1 else 1
    a_shape, b_shape = self.axes.factor_shapes(self.shape, rank)
    if field == 'magnitude':
      kept = zip(self.shape, self.axes.kinds)
      return array.reshape([size for size, kind in kept if kind != 'i'])
    if field == 'lora_b':
      return array.reshape(array.shape[0], rank).T.reshape(b_shape)
    axis = self.axes.rank_axis_of_a
    moved = np.moveaxis(array, 1, -1) if self._window else array
    rest = a_shape[:axis] + a_shape[axis:][1:]
    return np.moveaxis(moved.reshape(rank, *rest), 0, axis)

  def shapes(self, rank: int, stack: tuple[int, ...]) -> dict[str, tuple]:
    """The shapes in a file of A, B and the magnitude."""
    a, b = self.axes.factor_shapes(self.shape, rank)
    kept = zip(self.shape, self.axes.kinds)
    magnitude = tuple(size for size, kind in kept if kind != 'i')
    own = {'lora_a': a, 'lora_b': b, 'magnitude': magnitude}
    return {
      field: self._to_file(field, np.broadcast_to(0, (*stack, *shape))).shape
      for field, shape in own.items()
    }

  @property
  def _window(self) -> int:
    """How many axes a convolution slides over."""
    return len(self.shape) - 2 if self.kind is CONV else 0


def layout_of(layer: tp.Any, extended: bool) -> Layout:
  """How the arrays of a layer's adapter stand in a file."""
  kind: tp.Any = kind_of(layer)
  return Layout(kind.axes(layer), kind.shape(layer), kind, extended)


def turned(arrays: Arrays) -> Arrays:
  """The factors of the transposed weight, as they stand in a file."""
  return {'lora_a': arrays['lora_b'].T, 'lora_b': arrays['lora_a'].T}


def settings_key(name: str) -> str:
  """The key of the rank and alpha of a layer that PEFT has no form for."""
  return f'{EXTENSION}{name}.rank_and_alpha'


def why_not(layer: tp.Any) -> str | None:
  """Why PEFT cannot hold an adapter of this layer, or None if it can."""
  kind: tp.Any = kind_of(layer)
  axes = kind.axes(layer)
  if kind.stack(layer):
    return 'is a stack of layers'
  if axes.groups > 1:
    return (
      f'is a grouped convolution ({axes.groups} groups), of which PEFT has '
      'another form'
    )
  if 'b' in axes.kinds:
    return 'has a weight of its own for each place of an axis'
  if kind is CONV_TRANSPOSE:
    return 'is a ConvTranspose'
  if getattr(layer, 'mask', None) is not None:
    return 'has a masked weight'
  if kind is not CONV:
    return None
  for name in ('kernel_dilation', 'input_dilation'):
    if set(np.ravel(getattr(layer, name) or 1)) != {1}:
      return f'has {name}={getattr(layer, name)}, which PEFT leaves out'
  if layer.padding in ('CIRCULAR', 'REFLECT'):
    return f'has padding={layer.padding!r}, for which PEFT pads with zeros'
  return None


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One Variable of a module that is saved whole, as PyTorch has it.

  Attributes:
    variable: the Variable.
    order: its axes in the order of the file's.
    shape: the shape in a file.
  """

  variable: nnx.Variable
  order: tuple[int, ...]
  shape: tuple[int, ...]

  def to_file(self) -> np.ndarray:
    value = np.asarray(self.variable.get_value())
    return value.transpose(self.order).reshape(self.shape)

  def from_file(self, array: np.ndarray) -> np.ndarray:
    moved = array.reshape([self.variable.shape[axis] for axis in self.order])
    return moved.transpose(np.argsort(self.order))


_TORCH_NAMES = {
  'kernel': 'weight',
  'embedding': 'weight',
  'scale': 'weight',
  'mean': 'running_mean',
  'var': 'running_var',
}


def tensors(module: tp.Any, axes: Axes | None) -> dict[str, Tensor]:
  """A module's own Variables by PyTorch's names.

  Args:
    module: a layer of any kind.
    axes: those of its kernel or embedding, if it has one.
  """
  named = {}
  for name, variable in vars(module).items():
    if not isinstance(variable, nnx.Variable):
      continue
    order, shape = tuple(range(variable.ndim)), tuple(variable.shape)
    if name == 'kernel' and axes is not None:
      order, shape = _torch_order(module, axes, shape)
    elif name == 'bias':
      shape = (math.prod(shape),)
    named[_TORCH_NAMES.get(name, name)] = Tensor(variable, order, shape)
  return named


def _torch_order(module, axes: Axes, shape: tuple[int, ...]):
  """The axes of a kernel as (out, in, window), or as (out, in)."""
  made, summed = (
    tuple(k for k, its in enumerate(axes.kinds) if its == kind) for kind in 'oi'
  )
  if isinstance(module, nnx.Conv):
    order = (*made, summed[-1], *summed[:-1])
    return order, tuple(shape[axis] for axis in order)
  sizes = [math.prod(shape[axis] for axis in its) for its in (made, summed)]
  return (*made, *summed), tuple(sizes)
