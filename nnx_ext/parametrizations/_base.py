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
"""What stands in the place of a weight and answers as the weight."""

import dataclasses
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Inexact

from nnx_ext import _words


@dataclasses.dataclass(frozen=True)
class Slot:
  """The Variable that a parametrization replaced, without its value.

  Equal for equal Variables, wherever they stand: it is part of the structure
  of the model, and equal layers can be stacked.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  kind: type[nnx.Variable]
  metadata: tuple[tuple[str, tp.Any], ...]

  def fill(self, weight: jax.Array) -> nnx.Variable:
    """A Variable like the replaced one that holds ``weight``."""
    return self.kind.from_metadata(weight, dict(self.metadata))


class Parametrization(nnx.Module):
  """Base class of what stands in the place of a weight.

  A subclass defines ``__init__(self, weight, ...)``, where ``weight`` is the
  current value as a plain array: it is the right inverse, which finds
  parameters that give that weight. And it defines ``__call__(self)``, the
  weight from the parameters. ``super().__init__()`` need not be called.
  Further arguments are kept under their own names (``self.rank = rank``), so
  that :func:`nnx_ext.assign` can build the like from another weight.

  Wherever a layer or user code reads the weight, by ``w[...]``, in arithmetic
  or in a ``jax.numpy`` function, it gets the value of a fresh call. ``shape``,
  ``dtype``, ``ndim`` and ``size`` are known without a call.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> class Doubled(nnx_ext.parametrizations.Parametrization):
    ...   def __init__(self, weight):
    ...     self.half = nnx.Param(weight / 2)
    ...   def __call__(self):
    ...     return 2 * self.half[...]
    ...
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> doubled = nnx_ext.parametrize(
    ...   layer, {nnx.PathContains('kernel'): Doubled}
    ... )
    >>> x = jnp.ones((1, 2))
    >>> bool(jnp.allclose(layer(x), doubled(x)))
    True
    >>> sorted(nnx.state(doubled, nnx.Param))
    ['bias', 'kernel']
    >>> doubled.kernel.half.shape, doubled.kernel.shape
    ((2, 3), (2, 3))

  Modes follow ``Module.train()`` and ``Module.eval()`` through the attributes
  that these set: a subclass with random weights has ``deterministic``, one
  with running state has ``use_running_average``.

  See :doc:`the guide on parameters </guides/parameters>`.
  """

  _slot: Slot | None = None

  def __call__(self) -> jax.Array:
    """The weight, from the parameters."""
    raise TypeError(
      f'{type(self).__name__} must define `__call__(self)`, which returns the '
      'weight.'
    )

  def kl(self) -> Inexact[jax.Array, '']:
    """What this adds to a training loss, such as a KL divergence."""
    return jnp.zeros(())

  def log_det(self) -> Inexact[jax.Array, '']:
    """The log absolute determinant of the map from parameters to weight."""
    raise TypeError(
      f'{type(self).__name__} has no `log_det`: its map from parameters to '
      'weight is no bijection.'
    )

  @property
  def shape(self) -> tuple[int, ...]:
    return self._spec().shape

  @property
  def dtype(self) -> np.dtype:
    return self._spec().dtype

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return int(np.prod(self.shape))

  def __jax_array__(self) -> jax.Array:
    return self()

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return np.asarray(self(), dtype=dtype)

  def __getitem__(self, key) -> jax.Array:
    weight = self()
    return weight if key is ... else weight[key]

  def get_value(self) -> jax.Array:
    """The weight, as ``nnx.Variable.get_value`` gives it."""
    return self()

  def __len__(self) -> int:
    return self.shape[0]

  def __iter__(self) -> tp.Iterator[jax.Array]:
    # Without it, iteration would index for ever: JAX clamps indices.
    return iter(self())

  def __bool__(self) -> bool:
    # Layers ask `if self.scale`; __len__ would answer for an empty weight.
    return True

  def __getattr__(self, name: str) -> tp.Any:
    """Attributes of arrays, such as ``T`` or ``astype``, are the weight's."""
    if name.startswith('_') or not hasattr(jax.Array, name):
      raise AttributeError(
        f'{type(self).__name__!r} object has no attribute {name!r}'
      )
    return getattr(self(), name)

  def _spec(self) -> Slot | jax.ShapeDtypeStruct:
    if self._slot is not None:
      return self._slot
    return abstract_weight(self)


def abstract_weight(parametrization: Parametrization) -> jax.ShapeDtypeStruct:
  """The shape and dtype of the weight; computes nothing, moves nothing."""
  graphdef, state = nnx.split(parametrization, graph=True)
  return jax.eval_shape(lambda state: nnx.merge(graphdef, state)(), state)


def check_weight(
  api: str, path: tp.Sequence[tp.Any], slot: Slot, weight: tp.Any, by: str
) -> None:
  """The weight must fit the place that it stands in."""
  if not hasattr(weight, 'shape') or not hasattr(weight, 'dtype'):
    raise TypeError(
      f'{api}: {by} at {_words.path(path)} must return an array, got '
      f'{_words.value(weight)}.'
    )
  if weight.shape != slot.shape or weight.dtype != slot.dtype:
    hint = ''
    if weight.shape[1:] == slot.shape:
      hint = (
        ' It looks like a stack of layers, made under nnx.vmap and read under '
        'nnx.scan: parametrize inside the vmap, and materialize inside the '
        'scan.'
      )
    raise ValueError(
      f'{api}: {by} at {_words.path(path)} returned {weight.dtype} of '
      f'shape {weight.shape}, but the weight there is {slot.dtype} of shape '
      f'{slot.shape}.{hint}'
    )


def _binary(name: str):
  operation = getattr(operator, name)

  def method(self, other):
    return operation(self(), jnp.asarray(other) if _answers(other) else other)

  def reflected(self, other):
    return operation(other, self())

  return method, reflected


def _unary(name: str):
  operation = getattr(operator, name)
  return lambda self: operation(self())


def _answers(x: tp.Any) -> bool:
  return isinstance(x, (Parametrization, nnx.Variable))


for _name in (
  'add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor'
).split():
  _method, _reflected = _binary(_name)
  _dunder = _name.strip('_')
  setattr(Parametrization, f'__{_dunder}__', _method)
  setattr(Parametrization, f'__r{_dunder}__', _reflected)
for _name in ('lt', 'le', 'gt', 'ge'):
  setattr(Parametrization, f'__{_name}__', _binary(_name)[0])
for _name in ('neg', 'pos', 'abs', 'invert'):
  setattr(Parametrization, f'__{_name}__', _unary(_name))
