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
"""Which layers are to be adapted, and how, for people to read."""

import dataclasses
import math
import typing as tp

import jax.numpy as jnp
from flax import nnx

from nnx_ext import _words
from nnx_ext.lora._options import Init, Initializer, LoRAOptions
from nnx_ext.lora._targets import Filter, Path, Patterns, Target, find_targets


@dataclasses.dataclass(frozen=True)
class LoRALayerPlan:
  """How one layer is to be adapted.

  Attributes:
    path: where the layer stands in the model.
    kind: the name of its class.
    weight_shape: the shape of its weight.
    a_shape: the shape of the factor A.
    b_shape: the shape of the factor B.
    rank: the rank of A B.
    alpha: the numerator of the scale.
    scale: what A B is multiplied by.
    num_params: how many numbers are trained, DoRA's magnitude included.
    shares: the path of an earlier layer whose weight this one shares, and so
      its adapter, or None.
  """

  path: Path
  kind: str
  weight_shape: tuple[int, ...]
  a_shape: tuple[int, ...]
  b_shape: tuple[int, ...]
  rank: int
  alpha: float
  scale: float
  num_params: int
  shares: Path | None = None

  def __str__(self) -> str:
    name = _words.path(self.path)
    if self.shares is not None:
      return f'{name}: {self.kind}, shares that of {_words.path(self.shares)}'
    return (
      f'{name}: {self.kind} {self.weight_shape}, A {self.a_shape}, '
      f'B {self.b_shape}, scale {self.scale:g}, {self.num_params:,} trained'
    )


@dataclasses.dataclass(frozen=True)
class LoRAPlan:
  """What :func:`apply_lora` would do to a model. It prints as a table.

  :func:`lora_plan` returns it. See :doc:`the guide on LoRA </guides/lora>`.

  Attributes:
    layers: the layers that are to be adapted, in the model's order.
    trainable: how many numbers the adapters train.
    total: how many parameters the adapted model has, its own included.
  """

  layers: tuple[LoRALayerPlan, ...]
  trainable: int
  total: int

  def __str__(self) -> str:
    share = 100 * self.trainable / self.total
    summary = (
      f'{len(self.layers)} layers, {self.trainable:,} of {self.total:,} '
      f'parameters trained ({share:.2f} %)'
    )
    return '\n'.join([*map(str, self.layers), summary])


def lora_plan(
  model: tp.Any,
  *,
  rank: int,
  alpha: float | None = None,
  targets: Filter = ...,
  patterns: Patterns | None = None,
  dropout: float = 0.0,
  rslora: bool = False,
  dora: bool = False,
  init: Init | None = None,
  a_initializer: Initializer | None = None,
  b_initializer: Initializer | None = None,
  param_dtype: tp.Any = jnp.float32,
) -> LoRAPlan:
  """What :func:`apply_lora` would do, without doing it.

  Filters that choose too much, or too little, show here before anything is
  made or trained. It computes nothing, so the model may be abstract, of any
  size.

  Example::

    >>> from flax import nnx
    >>> import nnx_ext
    ...
    >>> model = nnx.Sequential(
    ...   nnx.Linear(64, 256, rngs=nnx.Rngs(0)),
    ...   nnx.Conv(3, 8, (3,), rngs=nnx.Rngs(1)),
    ... )
    >>> print(nnx_ext.lora_plan(model, rank=4))
    'layers/0': Linear (64, 256), A (64, 4), B (4, 256), scale 1, 1,280 trained
    'layers/1': Conv (3, 3, 8), A (3, 3, 4), B (4, 8), scale 1, 68 trained
    2 layers, 1,348 of 18,068 parameters trained (7.46 %)

  With filters, for a model that is too large to be made here::

    >>> attention = nnx.eval_shape(lambda: nnx.MultiHeadAttention(
    ...   num_heads=64, in_features=8192, decode=False, rngs=nnx.Rngs(0)
    ... ))
    >>> plan = nnx_ext.lora_plan(
    ...   attention,
    ...   rank=8,
    ...   targets=nnx.Any(nnx.PathContains('query'), nnx.PathContains('value')),
    ...   patterns={nnx.PathContains('value'): dict(rank=4)},
    ... )
    >>> [(layer.path, layer.rank, layer.num_params) for layer in plan.layers]
    [(('query',), 8, 131072), (('value',), 4, 65536)]

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    model: a Module, or a pytree of Modules; it may be abstract.
    rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    targets: an nnx filter over (path, module), like
      ``nnx.PathContains('query')``, ``nnx.Linear``, ``nnx.Any(...)`` or a
      function; by default every layer that can be adapted.
    patterns: filters of some of these layers, with the options that these have
      instead, ``{nnx.PathContains('out'): dict(rank=4)}``; the first that
      matches counts.
    dropout: the probability to drop an element of the input of A, in train
      mode; ids are never dropped.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dora: whether the weight's magnitude is trained apart, as in DoRA.
    init: how the factors start: None, ``'pissa'``, ``'olora'`` or
      ``'orthogonal'``.
    a_initializer: of A, for its shape as a matrix (in, r).
    b_initializer: of B, for its shape as a matrix (r, out).
    param_dtype: the dtype of the factors; they are cast to the layer's.

  Returns:
    The plan. It prints as a table.

  Raises:
    ValueError: if an option is out of range, a filter matches no layer, a layer
      that it chooses cannot be adapted, has an adapter already or is stacked on
      another axis than the first, or its weight is held elsewhere too.
    TypeError: if an argument is of the wrong type.
  """
  options = LoRAOptions(
    rank=rank,
    alpha=alpha,
    dropout=dropout,
    rslora=rslora,
    dora=dora,
    init=init,
    a_initializer=a_initializer,
    b_initializer=b_initializer,
    param_dtype=param_dtype,
  )
  found = find_targets('lora_plan', model, options, targets, patterns)
  layers = tuple(map(_planned, found))
  trainable = sum(layer.num_params for layer in layers)
  params = nnx.to_flat_state(nnx.state(model, nnx.Param))
  own = sum(math.prod(param.shape) for _, param in params)
  return LoRAPlan(layers, trainable, own + trainable)


def _planned(target: Target) -> LoRALayerPlan:
  options, shape = target.options, target.weight.shape
  axes = target.kind.axes(target.layer)
  stack = shape[: len(shape) - len(axes.kinds)]
  own = shape[len(stack) :]
  a, b = axes.factor_shapes(own, options.rank)
  made = [size for size, kind in zip(own, axes.kinds) if kind != 'i']
  trained = math.prod(a) + math.prod(b) + options.dora * math.prod(made)
  return LoRALayerPlan(
    path=target.path,
    kind=type(target.layer).__name__,
    weight_shape=shape,
    a_shape=(*stack, *a),
    b_shape=(*stack, *b),
    rank=options.rank,
    alpha=float(options.rank if options.alpha is None else options.alpha),
    scale=options.scale,
    num_params=0 if target.shares is not None else math.prod(stack) * trained,
    shares=target.shares,
  )
