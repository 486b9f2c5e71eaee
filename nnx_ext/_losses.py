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
"""What ``f`` returns: a flat container of scalar losses."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnx_ext.typing import Loss


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Losses:
  """The container that ``f`` returned, without its values: static in JAX.

  ``keys`` name the losses in JAX's order: sorted dict keys, positions, or
  a NamedTuple's fields.
  """

  api: str
  kind: type
  keys: tuple[tp.Any, ...]
  treedef: tp.Any

  def __len__(self) -> int:
    return len(self.keys)

  @property
  def named(self) -> bool:
    return issubclass(self.kind, dict)

  def pack(self, values: tp.Sequence[tp.Any]) -> tp.Any:
    """Values in the order of ``keys``, in a container like the user's."""
    return self.treedef.unflatten(values)


def read_output(
  api: str, out: tp.Any, has_aux: bool, holomorphic: bool
) -> tuple[Losses, list[Loss], tp.Any]:
  """Takes ``f``'s return value apart: container, losses, aux."""
  aux = None
  if has_aux:
    if type(out) is not tuple or len(out) != 2:
      raise ValueError(
        f'{api}: with has_aux=True `f` must return a pair (losses, aux), got '
        f'{_describe(out)}.'
      )
    out, aux = out
  if not isinstance(out, (dict, tuple, list)):
    raise _not_a_container(api, out, has_aux)
  children, treedef = jax.tree_util.tree_flatten_with_path(
    out, is_leaf=lambda x: x is not out
  )
  if not children:
    raise ValueError(
      f'{api}: `f` returned an empty {type(out).__name__}; it must hold one '
      'scalar loss or more.'
    )
  keys = tuple(_key(path[0]) for path, _ in children)
  values = [
    _scalar(api, key, value, has_aux, holomorphic)
    for key, (_, value) in zip(keys, children)
  ]
  return Losses(api, type(out), keys, treedef), values, aux


def _scalar(api, key, value, has_aux, holomorphic) -> Loss:
  try:
    loss = jnp.asarray(value)
  except (TypeError, ValueError):
    loss = None
  if loss is None or loss.shape != ():
    hint = ''
    if not has_aux and isinstance(key, int):
      hint = ' If it is not a loss but aux, pass has_aux=True.'
    elif loss is not None:
      hint = ' Reduce it, for example with `.mean()`.'
    raise (TypeError if loss is None else ValueError)(
      f'{api}: loss {key!r} must be a scalar, got {_describe(value)}.{hint}'
    )
  wanted = jnp.complexfloating if holomorphic else jnp.floating
  if not jnp.issubdtype(loss.dtype, wanted):
    kind = 'complex' if holomorphic else 'real and inexact'
    why = (
      ' because of holomorphic=True'
      if holomorphic
      else '; take its real part, or pass holomorphic=True'
      if jnp.issubdtype(loss.dtype, jnp.complexfloating)
      else ''
    )
    raise TypeError(
      f'{api}: loss {key!r} must be {kind}{why}, got {_describe(value)}.'
    )
  return loss


def _not_a_container(api, out, has_aux) -> TypeError:
  if isinstance(out, (jax.Array, np.ndarray, float)) and np.shape(out) == ():
    pair = ' (or (losses, aux), since has_aux=True)' if has_aux else ''
    upstream = 'nnx.grad' if api == 'grad_multi' else 'nnx.value_and_grad'
    return TypeError(
      f'{api}: `f` returned a lone scalar; it must return several losses as '
      f"a dict, tuple, list or NamedTuple{pair}, like {{'loss': loss}}. For "
      f'one loss use {upstream}.'
    )
  return TypeError(
    f'{api}: `f` must return its losses as a flat dict, tuple, list or '
    f'NamedTuple of scalars, got {_describe(out)}.'
  )


def _key(entry: tp.Any) -> tp.Any:
  for attribute in ('key', 'idx', 'name'):
    if hasattr(entry, attribute):
      return getattr(entry, attribute)
  return str(entry)


def _describe(value: tp.Any) -> str:
  if isinstance(value, (jax.Array, np.ndarray)):
    return f'{value.dtype} of shape {value.shape}'
  if isinstance(value, (tuple, list, dict)):
    return f'a {type(value).__name__} of {len(value)}'
  return f'{type(value).__name__} ({value!r})'[:80]


def list_keys(keys: tp.Iterable[tp.Any]) -> str:
  return '[' + ', '.join(map(repr, keys)) + ']'
