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
"""The kinds of layers that can be adapted, and what the weight of each is."""

import dataclasses
import typing as tp

from flax import nnx

from nnx_ext.lora._axes import Axes
from nnx_ext.lora._einsum import Equation

Initializer = nnx.Initializer


@dataclasses.dataclass(frozen=True)
class Kind:
  """One of flax's layers that have a weight.

  Attributes:
    plain: the class.
    axes: what the axes of a layer's weight are.
    shape: the shape of a layer's weight, where it is not stacked.
    weight_name: the attribute of the weight.
    initializers: of A and of B, unless others are given.
    why_not: why a layer of the class cannot be adapted, or None.
  """

  plain: tp.Any
  axes: tp.Callable[[tp.Any], Axes]
  shape: tp.Callable[[tp.Any], tuple[int, ...]]
  weight_name: str = 'kernel'
  initializers: tuple[Initializer, Initializer] = (
    nnx.initializers.he_uniform(),
    nnx.initializers.zeros,
  )
  why_not: tp.Callable[[tp.Any], str | None] = lambda layer: None

  def weight(self, layer: tp.Any) -> tp.Any:
    """The Variable of a layer's weight."""
    return getattr(layer, self.weight_name)

  def stack(self, layer: tp.Any) -> tuple[int, ...]:
    """The leading axes of a layer's weight that stand for stacked layers."""
    shape = self.weight(layer).shape
    return shape[: len(shape) - len(self.shape(layer))]


def kind_of(layer: tp.Any) -> Kind | None:
  """The kind of a layer, of flax's own class or a subclass, adapted or not."""
  return next((kind for kind in KINDS if isinstance(layer, kind.plain)), None)


def equation_of(layer: tp.Any) -> Equation:
  """The equation that an Einsum was made with."""
  return Equation.parse(layer.einsum_str)


def _kernel_shape(layer: tp.Any) -> tuple[int, ...]:
  return tuple(layer.kernel_shape)


def _general_axes(layer: nnx.LinearGeneral) -> Axes:
  parts = layer.batch_axis, layer.in_features, layer.out_features
  return Axes(''.join(kind * len(part) for kind, part in zip('bio', parts)))


def _general_shape(layer: nnx.LinearGeneral) -> tuple[int, ...]:
  batch = layer.batch_axis.values()
  return (*batch, *layer.in_features, *layer.out_features)


def _conv_axes(layer: nnx.Conv) -> Axes:
  return Axes('i' * len(layer.kernel_size) + 'io', layer.feature_group_count)


def _conv_transpose_axes(layer: nnx.ConvTranspose) -> Axes:
  channels = 'oi' if layer.transpose_kernel else 'io'
  return Axes('i' * len(layer.kernel_size) + channels)


def _einsum_axes(layer: nnx.Einsum) -> Axes:
  return Axes(equation_of(layer).kinds(len(layer.kernel_shape)))


def _why_not_einsum(layer: nnx.Einsum) -> str | None:
  if layer.einsum_str is None:
    return 'its `einsum_str` is given by its calls, not its constructor'
  weight = equation_of(layer).weight
  if len(set(weight)) < len(weight):
    return f'its equation {layer.einsum_str!r} takes a diagonal of the weight'
  if not {'i', 'o'} <= set(_einsum_axes(layer).kinds):
    return (
      f'in its equation {layer.einsum_str!r} the weight sums over no axis or '
      'makes none, so a low rank saves nothing'
    )
  return None


LINEAR = Kind(
  plain=nnx.Linear,
  axes=lambda layer: Axes('io'),
  shape=lambda layer: (layer.in_features, layer.out_features),
)
LINEAR_GENERAL = Kind(nnx.LinearGeneral, _general_axes, _general_shape)
EINSUM = Kind(nnx.Einsum, _einsum_axes, _kernel_shape, why_not=_why_not_einsum)
CONV = Kind(nnx.Conv, _conv_axes, _kernel_shape)
CONV_TRANSPOSE = Kind(nnx.ConvTranspose, _conv_transpose_axes, _kernel_shape)
EMBED = Kind(
  plain=nnx.Embed,
  axes=lambda layer: Axes('io'),
  shape=lambda layer: (layer.num_embeddings, layer.features),
  weight_name='embedding',
  initializers=(nnx.initializers.zeros, nnx.initializers.normal(1.0)),
)

KINDS = LINEAR, LINEAR_GENERAL, EINSUM, CONV, CONV_TRANSPOSE, EMBED
