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
"""The factors of one weight's adapter: how they start, what they make."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Inexact

from nnx_ext.lora._axes import Axes
from nnx_ext.lora._options import LoRAOptions, scale
from nnx_ext.lora._starts import start

Weight = Inexact[Array, '...']
Metadata = tp.Mapping[str, tp.Any]

_SHARDING = ('sharding_rules', 'mesh')


class LoRAFactors(nnx.Module):
  """What a weight is adapted by: ``W + s A B``.

  Layers that share a weight share this object too.

  Attributes:
    lora_a: A, an ``nnx.LoRAParam``.
    lora_b: B, an ``nnx.LoRAParam``.
    magnitude: with DoRA, the norms of the effective weight over what it sums,
      an ``nnx.LoRAParam``; else None.
    start_a: with a start that is not zero, A as it was then; it is not trained.
    start_b: the same of B.
    dropout: on the input of A, with an rng stream of its own, or None.
    alpha: the numerator of the scale; static, so a change retraces once.
    disabled: whether the layer stands alone, without its adapter; static.
  """

  def __init__(
    self,
    weight: Weight,
    axes: Axes,
    options: LoRAOptions,
    *,
    initializers: tuple[nnx.Initializer, nnx.Initializer],
    dtype: tp.Any = None,
    promote_dtype: tp.Callable | None = None,
    param_type: type[nnx.Variable] = nnx.LoRAParam,
    metadata: tuple[Metadata, Metadata] = ({}, {}),
    rngs: nnx.Rngs,
  ):
    self.axes = axes
    self.alpha = float(options.rank if options.alpha is None else options.alpha)
    self.rslora = options.rslora
    self.dtype = dtype
    self.promote_dtype = promote_dtype
    self.disabled = False

    a, b = start(weight, axes, options, initializers, rngs)
    self.lora_a = param_type(a, **metadata[0])
    self.lora_b = param_type(b, **metadata[1])
    self.start_a = self.start_b = self.magnitude = self.dropout = nnx.data(None)
    if options.init in ('pissa', 'olora'):
      self.start_a = nnx.Variable(a, **metadata[0])
      self.start_b = nnx.Variable(b, **metadata[1])
    if options.dora:
      self.magnitude = param_type(self._norm(weight).astype(a.dtype))
    if options.dropout:
      self.dropout = nnx.Dropout(options.dropout, rngs=rngs)
      _stack_rngs(self.dropout, weight.shape[: weight.ndim - len(axes.kinds)])

  @property
  def rank(self) -> int:
    """The rank of A B."""
    return self.axes.rank_of(self.lora_b.shape)

  @property
  def scale(self) -> float:
    """``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    return scale(self.alpha, self.rank, self.rslora)

  def pair(self) -> tuple[Float[Array, '...'], Float[Array, '...']]:
    """A and B; with a start that is not zero, A B - A0 B0 as one pair."""
    pair = self.lora_a[...], self.lora_b[...]
    if self.start_a is None or self.start_b is None:
      return pair
    negated = self.start_a[...], -self.start_b[...]
    return self.axes.join_ranks([pair, negated])

  def delta(self) -> Weight:
    """``s A B``, what is added to the weight, in its shape."""
    return self.axes.product(*self.pair()) * self.scale

  def make_plain(self):
    """Takes the start into the factors, at twice the rank."""
    if self.start_a is None:
      return
    a, b = self.pair()
    # The scale is alpha over the rank or its root.
    self.alpha *= 2**0.5 if self.rslora else 2
    self.lora_a.set_value(a)
    self.lora_b.set_value(b)
    self.start_a = self.start_b = nnx.data(None)

  def direction_scale(self, weight: Weight) -> Float[Array, '...']:
    """DoRA's factor on the outputs, the magnitude over the norm.

    The norm is held constant (https://arxiv.org/abs/2402.09353, section 4.3),
    and taken as 1 where the weight is zero.
    """
    norm = self._norm(jax.lax.stop_gradient(weight))
    norm = jnp.where(norm == 0, 1, norm)
    magnitude: tp.Any = self.magnitude
    return magnitude[...] / jax.lax.stop_gradient(norm)

  def weight(self, weight: Weight) -> Weight:
    """The effective weight, in the dtype of the weight given."""
    effective = weight + self.delta()
    if self.magnitude is not None:
      along = jnp.expand_dims(self.direction_scale(weight), self.axes.summed)
      effective = effective * along
    return effective.astype(weight.dtype)

  def _norm(self, weight: Weight) -> Float[Array, '...']:
    effective = weight.astype(jnp.float32) + self.delta()
    return jnp.sqrt(jnp.sum(effective**2, axis=self.axes.summed))


def sharding_of(
  weight: nnx.Variable, axes: Axes
) -> tuple[dict[str, tp.Any], dict[str, tp.Any]]:
  """The sharding metadata of A and B, that of the weight's matching axes."""
  metadata = weight.get_metadata()
  kept = {key: metadata[key] for key in _SHARDING if metadata.get(key)}
  spec = metadata.get('out_sharding')
  if not spec:
    return {}, {}
  names = (*spec, *(None,) * (weight.ndim - len(spec)))
  a, b = axes.factor_names(names)
  return {**kept, 'out_sharding': a}, {**kept, 'out_sharding': b}


def _stack_rngs(dropout: nnx.Dropout, stack: tuple[int, ...]):
  """An rng stream for each of the stacked layers."""
  for _, node in nnx.iter_graph(dropout, graph=True):
    if isinstance(node, nnx.RngKey) and stack:
      node.set_value(jax.random.split(node.get_value(), stack))
    elif isinstance(node, nnx.RngCount) and stack:
      node.set_value(jnp.broadcast_to(node.get_value(), stack))
