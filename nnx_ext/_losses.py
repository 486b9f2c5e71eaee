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

from nnx_ext import _words
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
        f'{_words.value(out)}.'
      )
    out, aux = out
  if not isinstance(out, (dict, tuple, list)):
    raise _not_a_container(api, out, has_aux)
  if not out:
    raise ValueError(
      f'{api}: `f` returned an empty {type(out).__name__}; it must hold one '
      'scalar loss or more.'
    )
  children, treedef = _children(api, out)
  keys = tuple(_key(path[0]) for path, _ in children)
  maybe_aux = not has_aux and type(out) is tuple and len(out) == 2
  values = [
    _scalar(api, key, value, maybe_aux, holomorphic)
    for key, (_, value) in zip(keys, children)
  ]
  return Losses(api, type(out), keys, treedef), values, aux


def _children(api: str, out: tp.Any) -> tuple[list, tp.Any]:
  try:
    return jax.tree_util.tree_flatten_with_path(
      out, is_leaf=lambda x: x is not out
    )
  except (TypeError, ValueError) as error:  # JAX sorts the keys of a dict
    kinds = ', '.join(f'{key!r} ({type(key).__name__})' for key in out)
    raise TypeError(
      f"{api}: the losses' keys must be of one sortable type, got {kinds}."
    ) from error


def _scalar(api, key, value, maybe_aux, holomorphic) -> Loss:
  aux = ' If `f` returns (losses, aux), pass has_aux=True.' if maybe_aux else ''
  wrong = f'{api}: loss {key!r} must be a scalar, got {_words.value(value)}.'
  if value is None or isinstance(value, (tuple, list, dict)):
    raise TypeError(wrong + aux)
  try:
    loss = jnp.asarray(value)
  except (TypeError, ValueError) as error:
    raise TypeError(wrong + aux) from error
  if loss.shape != ():
    raise ValueError(wrong + (aux or ' Reduce it, for example with `.mean()`.'))
  is_complex = jnp.issubdtype(loss.dtype, jnp.complexfloating)
  is_real = jnp.issubdtype(loss.dtype, jnp.floating)
  if holomorphic and not is_complex:
    wanted, hint = 'a complex scalar, because of holomorphic=True', ''
  elif not holomorphic and is_complex:
    wanted = 'a real floating-point scalar'
    hint = '; take its real part, or pass holomorphic=True'
  elif not holomorphic and not is_real:
    wanted = 'a real floating-point scalar'
    hint = '; cast it, for example with `.astype(jnp.float32)`'
  else:
    return loss
  raise TypeError(
    f'{api}: loss {key!r} must be {wanted}, got {_words.value(value)}{hint}.'
  )


def _not_a_container(api, out, has_aux) -> TypeError:
  scalars = (jax.Array, np.ndarray, np.generic, float, int)
  if isinstance(out, scalars) and np.ndim(out) == 0:
    pair = ' (or (losses, aux), since has_aux=True)' if has_aux else ''
    both = ' If both are losses, drop has_aux=True.' if has_aux else ''
    upstream = 'nnx.grad' if api == 'grad_multi' else 'nnx.value_and_grad'
    return TypeError(
      f'{api}: `f` returned a lone scalar; it must return several losses as '
      f"a dict, tuple, list or NamedTuple{pair}, like {{'loss': loss}}. For "
      f'one loss use {upstream}.{both}'
    )
  return TypeError(
    f'{api}: `f` must return its losses as a flat dict, tuple, list or '
    f'NamedTuple of scalars, got {_words.value(out)}.'
  )


def _key(entry: tp.Any) -> tp.Any:
  for attribute in ('key', 'idx', 'name'):
    if hasattr(entry, attribute):
      return getattr(entry, attribute)
  return str(entry)
