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
"""The six kinds of layers that have a weight, adapted at the weight."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Inexact, Integer

from nnx_ext.lora import _kinds
from nnx_ext.lora._einsum import Equation
from nnx_ext.lora._kinds import equation_of
from nnx_ext.lora._layer import (
  CallOptions,
  Inputs,
  LoRALayer,
  Outputs,
  Seen,
  given,
  respec,
)


class LoRALinear(LoRALayer, nnx.Linear):
  """An ``nnx.Linear`` that computes ``x (W + s A B) + b``.

  `Hu et al. 2021 <https://arxiv.org/abs/2106.09685>`__, section 4.1. A is
  (in, r) and B is (r, out). The arguments, the state and its first values are
  those of ``nnx.LoRALinear``; scale, dropout and DoRA are beyond it.
  Without these the outputs are the same too: for a Linear, a bypass and an
  adapted weight are one thing.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> layer = nnx_ext.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    >>> layer.lora.lora_a.shape, layer.lora.lora_b.shape
    ((3, 2), (2, 4))
    >>> layer(jnp.ones((5, 3))).shape
    (5, 4)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    *args: the positional arguments of ``nnx.Linear``.
    lora_rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dropout: the probability to drop an element of the input of A.
    dora: whether a magnitude of the weight is trained apart, as in DoRA.
    init: ``'pissa'``, ``'olora'``, ``'orthogonal'``, or None for the
      initializers; see :func:`~nnx_ext.apply_lora`.
    a_initializer: of A, for its shape as a matrix; he uniform by default.
    b_initializer: of B, for its shape as a matrix; zeros by default.
    lora_dtype: the dtype of the low-rank term (default: the layer's).
    lora_param_dtype: the dtype of the factors, float32 by default.
    lora_param_type: the type of the factors' Variables.
    lora_promote_dtype: what promotes dtypes in the low-rank term (default: the
      layer's).
    a_metadata: metadata of A.
    b_metadata: metadata of B.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.
    **kwargs: the other arguments of ``nnx.Linear``.

  Attributes:
    lora: the factors: ``lora.lora_a``, ``lora.lora_b`` and, with DoRA,
      ``lora.magnitude``.
  """

  _kind = _kinds.LINEAR

  def __call__(self, inputs: Inputs, out_sharding: tp.Any = None) -> Outputs:
    return self._adapted(inputs, given(out_sharding=out_sharding))

  def _sums_last_axis(self) -> bool:
    return True


class LoRALinearGeneral(LoRALayer, nnx.LinearGeneral):
  r"""An ``nnx.LinearGeneral`` with an adapted weight.

  The weight is ``W + s A B``, as in `Hu et al. 2021
  <https://arxiv.org/abs/2106.09685>`__.

  A is (\*batch, \*in, r) and B is (\*batch, r, \*out), so each place of a
  batch axis has factors of its own.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> layer = nnx_ext.LoRALinearGeneral(
    ...   16, (2, 4), lora_rank=2, rngs=nnx.Rngs(0)
    ... )
    >>> layer.lora.lora_a.shape, layer.lora.lora_b.shape
    ((16, 2), (2, 2, 4))
    >>> layer(jnp.ones((5, 16))).shape
    (5, 2, 4)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    *args: the positional arguments of ``nnx.LinearGeneral``.
    lora_rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dropout: the probability to drop an element of the input of A.
    dora: whether a magnitude of the weight is trained apart, as in DoRA.
    init: ``'pissa'``, ``'olora'``, ``'orthogonal'``, or None for the
      initializers; see :func:`~nnx_ext.apply_lora`.
    a_initializer: of A, for its shape as a matrix; he uniform by default.
    b_initializer: of B, for its shape as a matrix; zeros by default.
    lora_dtype: the dtype of the low-rank term (default: the layer's).
    lora_param_dtype: the dtype of the factors, float32 by default.
    lora_param_type: the type of the factors' Variables.
    lora_promote_dtype: what promotes dtypes in the low-rank term (default: the
      layer's).
    a_metadata: metadata of A.
    b_metadata: metadata of B.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.
    **kwargs: the other arguments of ``nnx.LinearGeneral``.

  Attributes:
    lora: the factors: ``lora.lora_a``, ``lora.lora_b`` and, with DoRA,
      ``lora.magnitude``.
  """

  _kind = _kinds.LINEAR_GENERAL

  def __call__(self, inputs: Inputs, out_sharding: tp.Any = None) -> Outputs:
    return self._adapted(inputs, given(out_sharding=out_sharding))

  def _sums_last_axis(self) -> bool:
    return self.axis == (-1,) and not self.batch_axis


class LoRAConv(LoRALayer, nnx.Conv):
  r"""An ``nnx.Conv`` with an adapted weight.

  The weight is ``W + s A B``, as in `Hu et al. 2021
  <https://arxiv.org/abs/2106.09685>`__.

  A is (\*window, in, r), a convolution with the layer's own strides, padding
  and dilation, and B is (r, out), applied at each place. With g groups A is
  (\*window, in/g, g r) and B is (g, r, out/g). A masked weight is not of low
  rank: it is computed whole at each call.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> layer = nnx_ext.LoRAConv(
    ...   3, 8, (3, 3), strides=2, lora_rank=2, rngs=nnx.Rngs(0)
    ... )
    >>> layer.lora.lora_a.shape, layer.lora.lora_b.shape
    ((3, 3, 3, 2), (2, 8))
    >>> layer(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 8)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    *args: the positional arguments of ``nnx.Conv``.
    lora_rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dropout: the probability to drop an element of the input of A.
    dora: whether a magnitude of the weight is trained apart, as in DoRA.
    init: ``'pissa'``, ``'olora'``, ``'orthogonal'``, or None for the
      initializers; see :func:`~nnx_ext.apply_lora`.
    a_initializer: of A, for its shape as a matrix; he uniform by default.
    b_initializer: of B, for its shape as a matrix; zeros by default.
    lora_dtype: the dtype of the low-rank term (default: the layer's).
    lora_param_dtype: the dtype of the factors, float32 by default.
    lora_param_type: the type of the factors' Variables.
    lora_promote_dtype: what promotes dtypes in the low-rank term (default: the
      layer's).
    a_metadata: metadata of A.
    b_metadata: metadata of B.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.
    **kwargs: the other arguments of ``nnx.Conv``.

  Attributes:
    lora: the factors: ``lora.lora_a``, ``lora.lora_b`` and, with DoRA,
      ``lora.magnitude``.
  """

  _kind = _kinds.CONV

  def __call__(self, inputs: Inputs, out_sharding: tp.Any = None) -> Outputs:
    return self._adapted(inputs, given(out_sharding=out_sharding))

  def _expand(self, hidden: Array, b: Array, options: CallOptions) -> Outputs:
    groups = self.lora.axes.groups
    if groups == 1:
      return super()._expand(hidden, b, options)
    hidden = hidden.reshape(*hidden.shape[:-1], groups, -1)
    outputs = jnp.einsum(
      '...gr,gro->...go', hidden, b, precision=self.precision
    )
    return outputs.reshape(*outputs.shape[:-2], -1)


class LoRAConvTranspose(LoRALayer, nnx.ConvTranspose):
  r"""An ``nnx.ConvTranspose`` with an adapted weight.

  The weight is ``W + s A B``, as in `Hu et al. 2021
  <https://arxiv.org/abs/2106.09685>`__.

  A is (\*window, in, r), or (\*window, r, in) with ``transpose_kernel``, and B
  is (r, out). A masked weight is computed whole at each call.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> layer = nnx_ext.LoRAConvTranspose(
    ...   3, 8, (3, 3), strides=(2, 2), lora_rank=2, rngs=nnx.Rngs(0)
    ... )
    >>> layer.lora.lora_a.shape, layer.lora.lora_b.shape
    ((3, 3, 3, 2), (2, 8))
    >>> layer(jnp.ones((5, 4, 4, 3))).shape
    (5, 8, 8, 8)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    *args: the positional arguments of ``nnx.ConvTranspose``.
    lora_rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dropout: the probability to drop an element of the input of A.
    dora: whether a magnitude of the weight is trained apart, as in DoRA.
    init: ``'pissa'``, ``'olora'``, ``'orthogonal'``, or None for the
      initializers; see :func:`~nnx_ext.apply_lora`.
    a_initializer: of A, for its shape as a matrix; he uniform by default.
    b_initializer: of B, for its shape as a matrix; zeros by default.
    lora_dtype: the dtype of the low-rank term (default: the layer's).
    lora_param_dtype: the dtype of the factors, float32 by default.
    lora_param_type: the type of the factors' Variables.
    lora_promote_dtype: what promotes dtypes in the low-rank term (default: the
      layer's).
    a_metadata: metadata of A.
    b_metadata: metadata of B.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.
    **kwargs: the other arguments of ``nnx.ConvTranspose``.

  Attributes:
    lora: the factors: ``lora.lora_a``, ``lora.lora_b`` and, with DoRA,
      ``lora.magnitude``.
  """

  _kind = _kinds.CONV_TRANSPOSE

  def __call__(self, inputs: Inputs) -> Outputs:
    return self._adapted(inputs, {})


class LoRAEmbed(LoRALayer, nnx.Embed):
  """An ``nnx.Embed`` with an adapted table, for look-up and ``attend``.

  The table is ``W + s A B``, as in `Hu et al. 2021
  <https://arxiv.org/abs/2106.09685>`__.

  A is (num_embeddings, r) and B is (r, features). A look-up reads r numbers of
  A for each id. As in PEFT, A starts at zero and B does not.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> layer = nnx_ext.LoRAEmbed(50, 8, lora_rank=2, rngs=nnx.Rngs(0))
    >>> layer.lora.lora_a.shape, layer.lora.lora_b.shape
    ((50, 2), (2, 8))
    >>> features = layer(jnp.array([1, 4, 4]))
    >>> layer.attend(features).shape
    (3, 50)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    *args: the positional arguments of ``nnx.Embed``.
    lora_rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dropout: the probability to drop an element of the input of A.
    dora: whether a magnitude of the weight is trained apart, as in DoRA.
    init: ``'pissa'``, ``'olora'``, ``'orthogonal'``, or None for the
      initializers; see :func:`~nnx_ext.apply_lora`.
    a_initializer: of A, for its shape as a matrix; zeros by default.
    b_initializer: of B, for its shape as a matrix; normal, of deviation 1, by
      default.
    lora_dtype: the dtype of the low-rank term (default: the layer's).
    lora_param_dtype: the dtype of the factors, float32 by default.
    lora_param_type: the type of the factors' Variables.
    lora_promote_dtype: what promotes dtypes in the low-rank term (default: the
      layer's).
    a_metadata: metadata of A.
    b_metadata: metadata of B.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.
    **kwargs: the other arguments of ``nnx.Embed``.

  Attributes:
    lora: the factors: ``lora.lora_a``, ``lora.lora_b`` and, with DoRA,
      ``lora.magnitude``.
  """

  _kind = _kinds.EMBED
  precision = bias = None

  def __call__(
    self, inputs: Integer[Array, '...'], out_sharding: tp.Any = None
  ) -> Outputs:
    return self._adapted(inputs, given(out_sharding=out_sharding))

  def attend(
    self, query: Inexact[Array, '... d'], out_sharding: tp.Any = None
  ) -> Inexact[Array, '... v']:
    lora, attend = self.lora, tp.cast(tp.Any, self._kind.plain.attend)
    options = given(out_sharding=out_sharding)
    if lora.disabled:
      return attend(self, query, **options)
    if self._needs_whole(options):
      whole = Seen(self, {'embedding': lora.weight(self.embedding[...])})
      return attend(whole, query, **options)
    if lora.magnitude is not None:
      along = lora.direction_scale(self.embedding[...])
      along = self._along_outputs(along, query)
      query = (query * along).astype(query.dtype)
    a, b = lora.pair()
    dropped = super()._dropped(query)
    seen = self._seen_with(b, self._dtype(query))
    hidden = attend(seen, dropped, **self._of_rank(options)) * lora.scale
    contract = (hidden.ndim - 1,), (1,)
    delta = jax.lax.dot_general(
      hidden, a.astype(hidden.dtype), (contract, ((), ())), **options
    )
    outputs = attend(self, query, **options)
    return outputs + delta.astype(outputs.dtype)

  def _seen_with(self, a: Array, dtype: tp.Any, **others: tp.Any) -> Seen:
    return super()._seen_with(a, dtype, features=a.shape[-1], **others)

  def _dropped(self, inputs: Array) -> Array:
    return inputs  # ids


class LoRAEinsum(LoRALayer, nnx.Einsum):
  """An ``nnx.Einsum`` with an adapted weight, its axes in any order.

  The weight is ``W + s A B``, as in `Hu et al. 2021
  <https://arxiv.org/abs/2106.09685>`__.

  A is the weight with the rank in the place of the first axis that only the
  weight and the output have, and without the others of these. B has the axes
  that all three have, the rank, and those that A is without.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> layer = nnx_ext.LoRAEinsum(
    ...   'btd,dnh->btnh', (16, 2, 4), lora_rank=2, rngs=nnx.Rngs(0)
    ... )
    >>> layer.lora.lora_a.shape, layer.lora.lora_b.shape
    ((16, 2), (2, 2, 4))
    >>> layer(jnp.ones((5, 7, 16))).shape
    (5, 7, 2, 4)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    *args: the positional arguments of ``nnx.Einsum``.
    lora_rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dropout: the probability to drop an element of the input of A.
    dora: whether a magnitude of the weight is trained apart, as in DoRA.
    init: ``'pissa'``, ``'olora'``, ``'orthogonal'``, or None for the
      initializers; see :func:`~nnx_ext.apply_lora`.
    a_initializer: of A, for its shape as a matrix; he uniform by default.
    b_initializer: of B, for its shape as a matrix; zeros by default.
    lora_dtype: the dtype of the low-rank term (default: the layer's).
    lora_param_dtype: the dtype of the factors, float32 by default.
    lora_param_type: the type of the factors' Variables.
    lora_promote_dtype: what promotes dtypes in the low-rank term (default: the
      layer's).
    a_metadata: metadata of A.
    b_metadata: metadata of B.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.
    **kwargs: the other arguments of ``nnx.Einsum``.

  Attributes:
    lora: the factors: ``lora.lora_a``, ``lora.lora_b`` and, with DoRA,
      ``lora.magnitude``.
  """

  _kind = _kinds.EINSUM

  def __call__(
    self,
    inputs: Inputs,
    einsum_str: str | None = None,
    out_sharding: tp.Any = None,
  ) -> Outputs:
    options = given(einsum_str=einsum_str, out_sharding=out_sharding)
    return self._adapted(inputs, options)

  def _needs_whole(self, options: CallOptions) -> bool:
    # The equation of a call takes precedence, as upstream.
    called = Equation.parse(options.get('einsum_str', self.einsum_str))
    return called != equation_of(self) or super()._needs_whole(options)

  def _seen_with(self, a: Array, dtype: tp.Any, **others: tp.Any) -> Seen:
    of_hidden = equation_of(self).of_hidden
    return super()._seen_with(a, dtype, einsum_str=of_hidden, **others)

  def _of_rank(self, options: CallOptions) -> CallOptions:
    spec = options.get('out_sharding')
    if spec is None:
      return {}
    equation = equation_of(self)

    def names(given):
      named = zip(equation.outputs, given)
      return (*(n for k, n in named if k not in equation.made), None)

    return {'out_sharding': respec(spec, names)}

  def _expand(self, hidden: Array, b: Array, options: CallOptions) -> Outputs:
    return jnp.einsum(
      equation_of(self).of_outputs,
      hidden,
      b,
      precision=self.precision,
      out_sharding=options.get('out_sharding'),
    )

  def _along_outputs(self, value: Array, outputs: Array) -> Array:
    equation = equation_of(self)
    shape = equation.output_shape(self.kernel_shape, outputs.ndim)
    return value.transpose(equation.output_order(value.ndim)).reshape(shape)

  def _plus_bias(self, outputs: Outputs) -> Outputs:
    if self.bias is None:
      return outputs
    shape = equation_of(self).output_shape(self.kernel_shape, outputs.ndim)
    return outputs + self.bias[...].astype(outputs.dtype).reshape(shape)
