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
"""Values by path in the place of a model's Variables, checked."""

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ext import _words
from nnx_ext._names import Names, Path
from nnx_ext.typing import Values

M = tp.TypeVar('M')


def substitute(
  model: M, values: Values, *, wrt: nnx.filterlib.Filter = nnx.Param
) -> M:
  """A view of ``model`` with other values in the place of some Variables.

  NNX's ``torch.func.functional_call``: nothing is written to ``model``, and
  gradients flow to whatever ``values`` were computed from. The view shares
  every Variable that is not replaced, so statistics and rng counts move on the
  model itself.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    >>> view = nnx_ext.substitute(model, {'kernel': jnp.ones((2, 3))})
    >>> view(jnp.array([1.0, 2.0]))
    Array([3., 3., 3.], dtype=float32)
    >>> bool(jnp.all(model.kernel[...] == 1.0))
    False

  Gradients go to what the values are made of::

    >>> def loss(scale, x):
    ...   view = nnx_ext.substitute(model, {'kernel': scale * jnp.ones((2, 3))})
    ...   return jnp.sum(view(x))
    ...
    >>> float(jax.grad(loss)(2.0, jnp.array([1.0, 2.0])))
    9.0

  ``wrt`` selects other Variables than Params. Under ``jax.vmap`` one model is
  an ensemble, with a value for each member::

    >>> norm = nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))
    >>> def member(mean, x):
    ...   view = nnx_ext.substitute(norm, {'mean': mean}, wrt=nnx.BatchStat)
    ...   return view(x)
    ...
    >>> means = jnp.zeros((5, 3))
    >>> jax.vmap(member, in_axes=(0, None))(means, jnp.ones((1, 3))).shape
    (5, 1, 3)

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    model: a Module, or a pytree of Modules.
    values: arrays, or Variables that hold them, by path: an ``nnx.State`` or a
      nested dict of a part of what ``wrt`` selects. Each has its Variable's
      shape and kind of dtype, and is cast to its dtype. A list's index may be
      written as an int or as a string. A tied Variable may be named by any of
      its paths, and by several if all give the same object.
    wrt: the filter of the Variables that may be replaced.

  Returns:
    An object of ``model``'s structure and classes.

  Raises:
    ValueError: if a path is unknown, or a value has another shape or kind, or
      a tied Variable is given two different values, or ``wrt`` matches nothing.
    TypeError: if ``values`` is no State or dict, or a value is no array.
  """
  graphdef, selected, *rest = nnx.split(model, wrt, ..., graph=True)
  flat = dict(nnx.to_flat_state(selected))
  slots = find_slots('substitute', model, flat, values, wrt)
  for path, (variable, value) in slots.items():
    flat[path] = variable.replace(value)
  return nnx.merge(graphdef, nnx.from_flat_state(flat), *rest)


def find_slots(
  api: str,
  model: tp.Any,
  variables: tp.Mapping[Path, nnx.Variable],
  values: Values,
  wrt: nnx.filterlib.Filter,
) -> dict[Path, tuple[nnx.Variable, tp.Any]]:
  """Which of ``variables``, what ``wrt`` selects from the model, ``values``
  replace, and the checked, cast values.
  """
  if not variables:
    raise ValueError(
      f'{api}: `wrt`={_words.filter_(wrt)} matches nothing in the model.'
    )
  if not isinstance(values, tp.Mapping):
    raise TypeError(
      f'{api}: the values must be an nnx.State or a dict by path, like '
      f'{_example(variables)}, got {_words.value(values)}.'
    )
  names = Names(model, variables)
  slots: dict[Path, tuple[nnx.Variable, tp.Any]] = {}
  given: dict[Path, tuple[Path, tp.Any]] = {}
  for path, raw in _walk(values, (), names):
    slot = names.resolve(path)
    if slot is None:
      known = ['/'.join(map(str, p)) for p in variables]
      name = '/'.join(map(str, path))
      hint = _words.did_you_mean([name], known)
      raise ValueError(
        f'{api}: no Variable at {_words.path(path)} among those that '
        f'{_words.filter_(wrt)} selects: {", ".join(map(repr, known[:8]))}'
        f'{", ..." if len(known) > 8 else ""}.{hint}'
      )
    value = raw.get_value() if isinstance(raw, nnx.Variable) else raw
    if slot in given and given[slot][1] is not value:
      raise ValueError(
        f'{api}: {_words.path(path)} and {_words.path(given[slot][0])} are '
        'one tied Variable, but were given two different values; give one, '
        'or the same object twice.'
      )
    given[slot] = path, value
    slots[slot] = variables[slot], _cast(api, path, variables[slot], value)
  return slots


def _walk(
  values: tp.Any, path: Path, names: Names
) -> tp.Iterator[tuple[Path, tp.Any]]:
  # A Variable may hold a dict: what stands at its path is a value.
  if isinstance(values, tp.Mapping) and names.resolve(path) is None:
    for key, value in values.items():
      yield from _walk(value, (*path, key), names)
  else:
    yield path, values


def _cast(api: str, path: Path, variable: nnx.Variable, value: tp.Any):
  slot, slot_tree = jax.tree.flatten(variable.get_value())
  new, new_tree = jax.tree.flatten(value)
  if tp.cast(tp.Any, slot_tree) != new_tree:
    raise ValueError(
      f'{api}: the value at {_words.path(path)} has the structure '
      f'{new_tree}, but its Variable holds {slot_tree}.'
    )
  cast = [_cast_leaf(api, path, a, b) for a, b in zip(slot, new)]
  return jax.tree.unflatten(slot_tree, cast)


def _cast_leaf(api: str, path: Path, slot: tp.Any, value: tp.Any):
  if not isinstance(value, (jax.Array, np.ndarray, np.generic, float, int)):
    raise TypeError(
      f'{api}: the value at {_words.path(path)} must be an array, got '
      f'{_words.value(value)}.'
    )
  shape, dtype = np.shape(slot), jnp.result_type(slot)
  if np.shape(value) != shape:
    raise ValueError(
      f'{api}: the value at {_words.path(path)} has shape {np.shape(value)}, '
      f'but its Variable has shape {shape}.'
    )
  if _kind(jnp.result_type(value)) != _kind(dtype):
    raise ValueError(
      f'{api}: the value at {_words.path(path)} has dtype '
      f'{jnp.result_type(value)}, which is of another kind than its '
      f"Variable's {dtype}; cast it."
    )
  if isinstance(value, jax.Array) and value.dtype == dtype:
    if not value.weak_type:
      return value  # a conversion would be traced all the same
  return jnp.asarray(value, dtype)


def _kind(dtype: tp.Any) -> str:
  for kind in ('bool_', 'integer', 'floating', 'complexfloating'):
    if jnp.issubdtype(dtype, getattr(jnp, kind)):
      return kind
  return str(dtype)


def _example(variables: tp.Mapping[Path, tp.Any]) -> str:
  path = next(iter(variables))
  example = 'array'
  for part in reversed(path):
    example = f'{{{part!r}: {example}}}'
  return example
