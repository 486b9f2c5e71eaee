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
"""How a layer computes its own forward with an adapted weight.

A layer is linear in its weight. So its own forward, run with A in the weight's
place and without a bias, gives the hidden activations of the low-rank term,
whatever its strides, padding, axes or precision are, and B makes of them what
is added to the output. No layer's arithmetic is written a second time here.
"""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Inexact, Shaped

from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._kinds import Kind
from nnx_ext.lora._options import Init, LoRAOptions
from nnx_ext.lora._starts import check_start

Initializer = nnx.Initializer
Inputs = Shaped[Array, '...']
Outputs = Inexact[Array, '...']
CallOptions = dict[str, tp.Any]

# What A is run without, and what a user may have put in place of these.
_NO_BIAS = {'bias': None, 'use_bias': False}
_PLAIN_OPERATIONS = {
  'dot_general': jax.lax.dot_general,
  'dot_general_cls': None,
  'einsum_op': jnp.einsum,
  'conv_general_dilated': jax.lax.conv_general_dilated,
}


class LoRALayer(nnx.Module):
  """What all adapted layers share. It comes before the flax class.

  A subclass names its kind, and has the ``__call__`` of that kind's flax class
  in terms of ``_adapted``.
  """

  _kind: tp.ClassVar[Kind]

  if tp.TYPE_CHECKING:  # what the flax class has
    lora: LoRAFactors
    dtype: tp.Any
    bias: tp.Any
    precision: tp.Any
    promote_dtype: tp.Any

  def __init__(
    self,
    *args,
    lora_rank: int,
    alpha: float | None = None,
    rslora: bool = False,
    dropout: float = 0.0,
    dora: bool = False,
    init: Init | None = None,
    a_initializer: Initializer | None = None,
    b_initializer: Initializer | None = None,
    lora_dtype: tp.Any = None,
    lora_param_dtype: tp.Any = jnp.float32,
    lora_param_type: type[nnx.Variable] = nnx.LoRAParam,
    lora_promote_dtype: tp.Callable | None = None,
    a_metadata: tp.Mapping[str, tp.Any] = {},  # noqa: B006
    b_metadata: tp.Mapping[str, tp.Any] = {},  # noqa: B006
    rngs: nnx.Rngs,
    **kwargs,
  ):
    api = type(self).__name__
    options = LoRAOptions(
      rank=lora_rank,
      alpha=alpha,
      dropout=dropout,
      rslora=rslora,
      dora=dora,
      init=init,
      a_initializer=a_initializer,
      b_initializer=b_initializer,
      param_dtype=lora_param_dtype,
    ).check(api, 'lora_rank')
    super().__init__(*args, rngs=rngs, **kwargs)  # type: ignore[call-arg]
    kind = self._kind
    reason = kind.why_not(self)
    if reason is not None:
      raise ValueError(f'{api}: the layer cannot be adapted: {reason}.')
    axes, weight = kind.axes(self), kind.weight(self).get_value()
    check_start(api, axes, weight.shape, options)
    self.lora = LoRAFactors(
      weight,
      axes,
      options,
      initializers=kind.initializers,
      dtype=lora_dtype,
      promote_dtype=lora_promote_dtype,
      param_type=lora_param_type,
      metadata=(a_metadata, b_metadata),
      rngs=rngs,
    )

  def _adapted(self, inputs: Array, options: CallOptions) -> Outputs:
    """The layer's own forward with the effective weight."""
    lora, kind = self.lora, self._kind
    forward = kind.plain.__call__
    if lora.disabled:
      return forward(self, inputs, **options)
    if self._needs_whole(options):
      weight = lora.weight(kind.weight(self)[...])
      whole = Seen(self, {kind.weight_name: weight})
      return forward(whole, inputs, **options)
    a, b = lora.pair()
    hidden = self._hidden(inputs, a, options)
    if lora.scale != 1:
      hidden = hidden * lora.scale
    delta = self._expand(hidden, b.astype(hidden.dtype), options)
    if lora.magnitude is None:
      outputs = forward(self, inputs, **options)
      return outputs + delta.astype(outputs.dtype)
    bare = forward(Seen(self, _NO_BIAS), inputs, **options)
    along = lora.direction_scale(kind.weight(self)[...])
    along = self._along_outputs(along, bare)
    outputs = ((bare + delta) * along).astype(bare.dtype)
    return self._plus_bias(outputs)

  def _needs_whole(self, options: CallOptions) -> bool:
    """Whether only the whole effective weight will do.

    So for a masked weight, which is not of low rank, and for one that is
    shared with a layer to which its axes are something else.
    """
    del options
    masked = getattr(self, 'mask', None) is not None
    return masked or self.lora.axes != self._kind.axes(self)

  def _hidden(
    self, inputs: Array, a: Array, options: CallOptions
  ) -> Inexact[Array, '...']:
    """The layer's own forward with A in the place of the weight."""
    seen = self._seen_with(a, self._dtype(inputs))
    inputs = self._dropped(inputs)
    unflatten = lambda hidden: hidden
    if self._sums_last_axis():
      inputs, unflatten = flatten(inputs)
    forward = self._kind.plain.__call__
    return unflatten(forward(seen, inputs, **self._of_rank(options)))

  def _seen_with(self, a: Array, dtype: tp.Any, **others: tp.Any) -> 'Seen':
    values = {
      **_NO_BIAS,
      **_PLAIN_OPERATIONS,
      self._kind.weight_name: a.astype(dtype),
      'dtype': dtype,
      'promote_dtype': self.lora.promote_dtype or self.promote_dtype,
      **others,
    }
    return Seen(self, values)

  def _dtype(self, inputs: Array) -> tp.Any:
    """The dtype in which the layer computes."""
    dtype = self.lora.dtype or self.dtype
    if dtype:
      return dtype
    bias = [] if self.bias is None else [self.bias[...]]
    return jnp.result_type(inputs, self._kind.weight(self)[...], *bias)

  def _sums_last_axis(self) -> bool:
    """Whether all but the last axis of the input are kept as they are."""
    return False

  def _dropped(self, inputs: Array) -> Array:
    return self.lora.dropout(inputs) if self.lora.dropout else inputs

  def _of_rank(self, options: CallOptions) -> CallOptions:
    """The call's options, where the rank stands for what is made."""
    spec = options.get('out_sharding')
    if spec is None:
      return options
    made = self.lora.axes.kinds.count('o')
    sharding = respec(spec, lambda names: (*names[:-made], None))
    return {**options, 'out_sharding': sharding}

  def _expand(self, hidden: Array, b: Array, options: CallOptions) -> Outputs:
    """What B makes of the hidden activations."""
    batch = tuple(range(self.lora.axes.kinds.count('b')))
    if not batch:
      hidden, unflatten = flatten(hidden)
      # Outside of jit this is called in a quarter of dot_general's time.
      return unflatten(
        jnp.tensordot(hidden, b, 1, precision=self.precision, **options)
      )
    contract = (hidden.ndim - 1,), (len(batch),)
    return jax.lax.dot_general(
      hidden,
      b,
      (contract, (batch, batch)),
      precision=self.precision,
      **options,
    )

  def _along_outputs(self, value: Array, outputs: Array) -> Array:
    """A value for each made feature, so that it broadcasts to the outputs."""
    batch = self.lora.axes.kinds.count('b')
    ones = (1,) * (outputs.ndim - value.ndim)
    return value.reshape(value.shape[:batch] + ones + value.shape[batch:])

  def _plus_bias(self, outputs: Outputs) -> Outputs:
    if self.bias is None:
      return outputs
    bias = self.bias[...].astype(outputs.dtype)
    return outputs + self._along_outputs(bias, outputs)


class Seen:
  """A layer as its own forward sees it, some attributes being others.

  NNX does not let a layer be changed inside of a transform that it came into
  from outside, and a copy of a layer is more work. A forward only reads.
  """

  def __init__(self, layer: LoRALayer, others: dict[str, tp.Any]):
    self._layer = layer
    for name, value in others.items():
      if name == layer._kind.weight_name:
        value = _Value(value)
      setattr(self, name, value)

  def __getattr__(self, name: str) -> tp.Any:
    return getattr(self._layer, name)


class _Value:
  """An array that is read as a Variable is."""

  def __init__(self, array: Array):
    self._array = array

  def __getitem__(self, key: tp.Any) -> Array:
    return self._array if key is ... else self._array[key]

  def __iter__(self):
    return iter(self._array)


def flatten(x: Array) -> tuple[Array, tp.Callable[[Array], Array]]:
  """An array as rows, and what gives the leading axes back to a result.

  A gradient that sums over several leading axes makes XLA:CPU transpose the
  larger of its factors, which takes longer than the thin product itself. Other
  backends do without, and where a mesh is set the axes may be sharded apart.
  """
  leading = x.shape[:-1]
  if (
    len(leading) < 2
    or jax.default_backend() != 'cpu'
    or not jax.sharding.get_abstract_mesh().empty
  ):
    return x, lambda rows: rows
  rows = x.reshape(-1, x.shape[-1])
  return rows, lambda rows: rows.reshape(*leading, *rows.shape[1:])


def given(**options: tp.Any) -> CallOptions:
  """The options of a call that are not None."""
  return {k: value for k, value in options.items() if value is not None}


def respec(spec: tp.Any, change: tp.Callable[[tuple], tuple]) -> tp.Any:
  """A sharding, or the names of its axes, with the names changed."""
  if isinstance(spec, jax.sharding.NamedSharding):
    names = jax.sharding.PartitionSpec(*change(tuple(spec.spec)))
    return jax.sharding.NamedSharding(spec.mesh, names)
  return jax.sharding.PartitionSpec(*change(tuple(spec)))
