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
"""The kinds of layers that LoRA adapts, and what each must compute.

A kind is a small model, an input to it, and for each adapted weight an
einsum equation of the factors, written down from the documentation and used
by no code of the package: ``'ir,ro->io'`` says that A is (in, rank), B is
(rank, out) and the weight is (in, out). The letter r is the rank.
"""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_ext
from tests.lora import subclasses, trees

RANK = 2

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
  """A weight made of factors.

  Attributes:
    equation: the einsum that makes the weight of A and B. A magnitude has
      those of the weight's letters that B has.
    attribute: the layer's name of the weight.
    groups: A's last axis is (groups, rank) flattened, B's first is the
      groups, and the weight's last is (groups, out) flattened.
  """

  equation: str = 'ir,ro->io'
  attribute: str = 'kernel'
  groups: int = 1

  def product(self, a, b):
    """A B, in the weight's shape."""
    if self.groups == 1:
      return jnp.einsum(self.equation, a, b)
    rank = b.shape[1]
    columns = lambda g: a[..., g * rank : (g + 1) * rank]
    return jnp.concatenate(
      [jnp.einsum(self.equation, columns(g), b[g]) for g in range(self.groups)],
      axis=-1,
    )

  @property
  def axes(self) -> str:
    return self.equation.split('->')[1]

  @property
  def made(self) -> str:
    """The axes of a magnitude, in the weight's order."""
    b = self.equation.split('->')[0].split(',')[1]
    return ''.join(axis for axis in self.axes if axis in b)

  def norm(self, weight):
    return jnp.sqrt(
      jnp.einsum(f'{self.axes},{self.axes}->{self.made}', weight, weight)
    )

  def effective(self, weight, factors, scale, start=None):
    """What stands in the weight's place, from a dict of the factors."""
    delta = self.product(factors['lora_a'], factors['lora_b'])
    if start is not None:
      delta = delta - self.product(*start)
    result = weight.astype(jnp.float32) + scale * delta
    if 'magnitude' in factors:
      norm = jax.lax.stop_gradient(self.norm(result))
      result = jnp.einsum(
        f'{self.axes},{self.made}->{self.axes}',
        result,
        factors['magnitude'] / norm,
      )
    return result.astype(weight.dtype)


def _call(model, x):
  return model(x)


@dataclasses.dataclass(frozen=True)
class Kind:
  """A model, an input, and the weights that are adapted.

  Attributes:
    build: makes the model from rngs.
    shape: of the input; or the input itself, when it is ids.
    weights: by the path of the layer.
    call: the model on the input.
    dtype: of the input.
    factored: False where the weight is materialised.
    tolerance: relative to the largest entry.
  """

  build: tp.Callable[[nnx.Rngs], nnx.Module]
  shape: tuple[int, ...] | np.ndarray
  weights: tp.Mapping[Path, Weight] = dataclasses.field(
    default_factory=lambda: {(): Weight()}
  )
  call: tp.Callable = _call
  dtype: tp.Any = jnp.float32
  factored: bool = True
  tolerance: float = 2e-5

  @property
  def x(self) -> jax.Array:
    if isinstance(self.shape, np.ndarray):
      return jnp.asarray(self.shape)
    return trees.noise(self.shape, 1).astype(self.dtype)

  @property
  def half(self) -> bool:
    return self.tolerance > 1e-2

  @property
  def of_ids(self) -> bool:
    return isinstance(self.shape, np.ndarray)

  @functools.cached_property
  def model(self) -> nnx.Module:
    """The plain model, one for all tests: none may change it.

    Its Params are random numbers of numpy, biases too: nothing to compile.
    """
    return trees.fill(nnx.eval_shape(lambda: self.build(nnx.Rngs(0))))

  def apply(self, model=None, **options) -> nnx.Module:
    """The adapted model, its A from numpy unless ``options`` start it."""
    model = self.model if model is None else model
    options = {'rank': RANK, 'rngs': nnx.Rngs(1), **options}
    if not options.get('init'):
      random = lambda key, shape, dtype: trees.noise(shape, 3).astype(dtype)
      zeros = lambda key, shape, dtype: jax.device_put(np.zeros(shape, dtype))
      embedding = {w.attribute for w in self.weights.values()} == {'embedding'}
      a, b = (zeros, random) if embedding else (random, zeros)
      options = {'a_initializer': a, 'b_initializer': b, **options}
    return nnx_ext.apply_lora(model, **options)

  def of_factors(self, model: nnx.Module):
    """An adapted model's call as a function of its LoRAParams and input."""
    graphdef, factors, rest = nnx.split(model, nnx.LoRAParam, ...)

    rest = nnx.as_pure(rest)

    def call(factors, x):
      return self.call(nnx.merge(graphdef, factors, rest), x)

    return call, nnx.to_pure_dict(factors)

  def oracle(self, model: nnx.Module, scale: float, base):
    """The same function by the plain model with its weights overwritten.

    ``base`` is the plain model's state; ``model`` is the adapted one, asked
    only for what was taken off at its start.
    """
    graphdef = nnx.graphdef(self.model)
    starts = {path: start(trees.at(model, path).lora) for path in self.weights}

    def call(factors, x):
      plain = nnx.merge(graphdef, base)
      for path, weight in self.weights.items():
        variable = getattr(trees.at(plain, path), weight.attribute)
        variable.set_value(
          weight.effective(
            variable[...],
            trees.at(factors, (*path, 'lora')),
            scale,
            starts[path],
          )
        )
      return self.call(plain, x)

    return call


def start(lora):
  if getattr(lora, 'start_a', None) is None:
    return None
  return lora.start_a[...], lora.start_b[...]


# The class of an adapted layer, by that of a plain one.
CLASSES = {
  nnx.Linear: nnx_ext.LoRALinear,
  nnx.LinearGeneral: nnx_ext.LoRALinearGeneral,
  nnx.Einsum: nnx_ext.LoRAEinsum,
  nnx.Conv: nnx_ext.LoRAConv,
  nnx.ConvTranspose: nnx_ext.LoRAConvTranspose,
  nnx.Embed: nnx_ext.LoRAEmbed,
}

IDS = np.array([[0, 3, 3], [6, 1, -1]])

_general = functools.partial(nnx.LinearGeneral, use_bias=True)


def _linear(shape=(3, 5), cls=nnx.Linear, dtype=jnp.float32, **options):
  parts = {
    key: options.pop(key) for key in ('factored', 'tolerance') if key in options
  }
  build = lambda rngs: cls(5, 7, rngs=rngs, **options)
  return Kind(build, shape, dtype=dtype, **parts)


def _own(cls):
  return _linear(cls=cls, factored=False)


def _layer(cls, *args, x, equation, call=_call, factored=True, **options):
  weight = Weight(equation, groups=options.get('feature_group_count', 1))
  build = lambda rngs: cls(*args, rngs=rngs, **options)
  return Kind(build, x, {(): weight}, call, factored=factored)


def _rnn(cell, names, **options):
  weights = {('cell', name): Weight() for name in names}
  build = lambda rngs: nnx.RNN(cell(5, 3, rngs=rngs), **options)
  return Kind(build, (2, 4, 5), weights, tolerance=1e-4)


def _bidirectional(rngs):
  forward = nnx.RNN(nnx.GRUCell(5, 3, rngs=rngs))
  return nnx.Bidirectional(
    forward, nnx.RNN(nnx.SimpleCell(5, 3, rngs=rngs)), rngs=rngs
  )


def _mask(*shape):
  """Keeps about half of the entries."""
  return (trees.noise(shape, 5) > 0).astype(jnp.float32)


_ONE, _TWO, _THREE = 'kir,ro->kio', 'hwir,ro->hwio', 'xyzir,ro->xyzio'
_conv = functools.partial(_layer, nnx.Conv)
_back = functools.partial(_layer, nnx.ConvTranspose)
_einsum = functools.partial(_layer, nnx.Einsum)
_EMBED = {(): Weight('vr,rd->vd', 'embedding')}
_HALF = {'tolerance': 4e-2, 'dtype': jnp.bfloat16}


def _attend(model, x):
  return model.attend(x)


KINDS: dict[str, Kind] = {
  'linear': _linear(),
  'linear_no_bias': _linear(use_bias=False),
  'linear_vector': _linear((5,)),
  'linear_batches': _linear((2, 3, 5)),
  'linear_bf16': Kind(
    lambda rngs: nnx.Linear(5, 7, dtype=jnp.bfloat16, rngs=rngs),
    (3, 5),
    tolerance=4e-2,
  ),
  'linear_bf16_params': Kind(
    lambda rngs: nnx.Linear(5, 7, param_dtype=jnp.bfloat16, rngs=rngs),
    (3, 5),
    **_HALF,
  ),
  'linear_mixed': Kind(
    lambda rngs: nnx.Linear(5, 7, param_dtype=jnp.bfloat16, rngs=rngs),
    (3, 5),
    tolerance=4e-2,
  ),
  'general_heads': _layer(
    nnx.LinearGeneral, 16, (2, 4), x=(3, 5, 16), equation='ir,rnh->inh'
  ),
  'general_axes': _layer(
    nnx.LinearGeneral,
    *((3, 4), 5),
    axis=(-2, -1),
    x=(2, 6, 3, 4),
    equation='nhr,ro->nho',
  ),
  'general_far_axes': _layer(
    nnx.LinearGeneral,
    *((3, 4), (5, 6)),
    axis=(1, -1),
    x=(2, 3, 7, 4),
    equation='nhr,rop->nhop',
  ),
  'general_batch': _layer(
    nnx.LinearGeneral,
    *(5, 7),
    batch_axis={0: 3},
    x=(3, 4, 5),
    equation='bir,bro->bio',
  ),
  'general_batch_axes': _layer(
    nnx.LinearGeneral,
    *((4, 5), (6, 7)),
    axis=(-2, -1),
    batch_axis={0: 3},
    x=(3, 2, 4, 5),
    equation='bijr,brop->bijop',
  ),
  'einsum_heads': _einsum(
    *('btd,dnh->btnh', (5, 3, 4), (3, 4)), x=(2, 6, 5), equation='dr,rnh->dnh'
  ),
  'einsum_out_first': _einsum(
    'btd,nhd->bthn', (3, 4, 5), x=(2, 6, 5), equation='rd,rnh->nhd'
  ),
  'einsum_out_around': _einsum(
    'bti,oip->bopt', (3, 5, 4), x=(2, 6, 5), equation='ri,rop->oip'
  ),
  'einsum_batched': _einsum(
    *('bthd,hdk->bthk', (3, 4, 5), (3, 5)),
    x=(2, 6, 3, 4),
    equation='hdr,hrk->hdk',
  ),
  'einsum_batch_last': _einsum(
    'bthd,kdh->bthk', (5, 4, 3), x=(2, 6, 3, 4), equation='rdh,hrk->kdh'
  ),
  'einsum_ellipsis': _einsum(
    *('...d,dk->...k', (5, 7), (7,)), x=(2, 3, 5), equation='dr,rk->dk'
  ),
  'einsum_two_axes': _einsum(
    *('btnh,nhd->btd', (3, 4, 5), (5,)),
    x=(2, 6, 3, 4),
    equation='nhr,rd->nhd',
  ),
  # Another equation at the call may do anything with the weight's axes.
  'einsum_at_the_call': _einsum(
    *('btd,dk->btk', (5, 7)),
    x=(3, 5),
    equation='dr,rk->dk',
    call=lambda model, x: model(x, einsum_str='b d, d k -> k b'),
    factored=False,
  ),
  'einsum_backwards': _einsum(
    *('btd,dk->btk', (5, 7)),
    x=(3, 7),
    equation='dr,rk->dk',
    call=lambda model, x: model(x, einsum_str='bk,dk->bd'),
    factored=False,
  ),
  'conv': _conv(4, 6, 3, x=(2, 8, 4), equation=_ONE),
  'conv_strides': _conv(*(4, 6, (3, 2), (2, 1)), x=(2, 6, 5, 4), equation=_TWO),
  'conv_3d': _conv(
    *(4, 6, (2, 3, 2)), padding='VALID', x=(2, 3, 4, 5, 4), equation=_THREE
  ),
  'conv_dilation': _conv(
    *(4, 6, (3, 3)),
    kernel_dilation=(2, 1),
    padding='VALID',
    x=(2, 7, 5, 4),
    equation=_TWO,
  ),
  'conv_input_dilation': _conv(
    *(4, 6, 3), input_dilation=2, padding=1, x=(2, 8, 4), equation=_ONE
  ),
  'conv_groups': _conv(
    *(4, 6, (3, 3)), feature_group_count=2, x=(2, 5, 7, 4), equation=_TWO
  ),
  'conv_groups_circular': _conv(
    *(6, 9, 3, 2),
    feature_group_count=3,
    padding='CIRCULAR',
    x=(2, 8, 6),
    equation=_ONE,
  ),
  'conv_depthwise': _conv(
    *(4, 12, 3), feature_group_count=4, x=(2, 9, 4), equation=_ONE
  ),
  'conv_circular': _conv(
    *(4, 6, (3, 2), 2), padding='CIRCULAR', x=(2, 6, 5, 4), equation=_TWO
  ),
  'conv_causal': _conv(
    *(4, 6, 3),
    padding='CAUSAL',
    kernel_dilation=2,
    x=(2, 8, 4),
    equation=_ONE,
  ),
  'conv_reflect': _conv(
    *(4, 6, 3), padding='REFLECT', x=(2, 8, 4), equation=_ONE
  ),
  'conv_padding': _conv(
    *(4, 6, (3, 2)),
    padding=((1, 2), (0, 1)),
    use_bias=False,
    x=(2, 6, 5, 4),
    equation=_TWO,
  ),
  'conv_masked': _conv(
    *(4, 6, 3),
    mask=_mask(3, 4, 6),
    x=(2, 8, 4),
    equation=_ONE,
    factored=False,
  ),
  'conv_batches': _conv(4, 6, 3, x=(2, 3, 8, 4), equation=_ONE),
  'conv_unbatched': _conv(4, 6, 3, x=(8, 4), equation=_ONE),
  'conv_bf16': dataclasses.replace(
    _conv(4, 6, 3, dtype=jnp.bfloat16, x=(2, 8, 4), equation=_ONE),
    tolerance=4e-2,
  ),
  'transpose': _back(
    *(4, 6, 3, 2), padding='VALID', x=(2, 5, 4), equation=_ONE
  ),
  'transpose_2d': _back(
    *(4, 6, (3, 2), (2, 1)),
    kernel_dilation=(1, 2),
    x=(2, 3, 5, 4),
    equation=_TWO,
  ),
  'transpose_circular': _back(
    *(4, 6, 3, 2), padding='CIRCULAR', x=(2, 5, 4), equation=_ONE
  ),
  'transpose_kernel': _back(
    *(4, 6, (3, 2), 2),
    transpose_kernel=True,
    x=(2, 3, 5, 4),
    equation='hwri,ro->hwoi',
  ),
  'transpose_kernel_circular': _back(
    *(4, 6, 3, 2),
    transpose_kernel=True,
    padding='CIRCULAR',
    x=(2, 5, 4),
    equation='kri,ro->koi',
  ),
  'transpose_masked': _back(
    *(4, 6, 3),
    mask=_mask(3, 4, 6),
    x=(2, 5, 4),
    equation=_ONE,
    factored=False,
  ),
  'transpose_unbatched': _back(*(4, 6, 3), x=(5, 4), equation=_ONE),
  'embed': Kind(lambda rngs: nnx.Embed(7, 5, rngs=rngs), IDS, _EMBED),
  'embed_one': Kind(lambda rngs: nnx.Embed(1, 5, rngs=rngs), 0 * IDS, _EMBED),
  'embed_bf16': Kind(
    lambda rngs: nnx.Embed(7, 5, dtype=jnp.bfloat16, rngs=rngs),
    IDS,
    _EMBED,
    tolerance=4e-2,
  ),
  'attend': Kind(
    lambda rngs: nnx.Embed(7, 5, rngs=rngs), (2, 3, 5), _EMBED, _attend
  ),
  'attend_one': Kind(
    lambda rngs: nnx.Embed(1, 5, rngs=rngs), (2, 3, 5), _EMBED, _attend
  ),
  'tied': Kind(subclasses.Tied, IDS, {('embed',): _EMBED[()]}),
  'attention': Kind(
    subclasses.Attention,
    (2, 5, 6),
    {
      ('attention', 'query'): Weight('ir,rnh->inh'),
      ('attention', 'key'): Weight('ir,rnh->inh'),
      ('attention', 'value'): Weight('ir,rnh->inh'),
      ('attention', 'out'): Weight('nhr,ro->nho'),
    },
    tolerance=1e-4,
  ),
  'lstm': _rnn(nnx.LSTMCell, ['ii', 'if_', 'ig', 'io', 'hi', 'hf', 'hg', 'ho']),
  'optimized_lstm': _rnn(nnx.OptimizedLSTMCell, ['dense_i', 'dense_h']),
  'gru': _rnn(nnx.GRUCell, ['dense_i', 'dense_h'], reverse=True),
  'simple_cell': _rnn(nnx.SimpleCell, ['dense_i', 'dense_h']),
  'bidirectional': Kind(
    _bidirectional,
    (2, 4, 5),
    {
      (rnn, 'cell', dense): Weight()
      for rnn in ('forward_rnn', 'backward_rnn')
      for dense in ('dense_i', 'dense_h')
    },
    tolerance=1e-4,
  ),
  'user_relu': _linear(cls=subclasses.Relu),
  'user_gated': _linear(cls=subclasses.Gated),
  'user_own_forward': _own(subclasses.OwnForward),
  'user_both': _own(subclasses.Both),
  'user_helper': _own(subclasses.Helper),
  'user_property': _own(subclasses.Property),
  'user_mixin': _own(subclasses.Mixed),
  'user_derived': _own(subclasses.Derived),
  'user_named': _own(subclasses.Named),
  'user_jitted': _own(subclasses.Jitted),
  'user_embed': Kind(
    lambda rngs: subclasses.ScaledEmbed(7, 5, rngs=rngs), IDS, _EMBED
  ),
  'user_conv': _layer(
    subclasses.PooledConv, 4, 6, 3, x=(2, 8, 4), equation=_ONE
  ),
}
