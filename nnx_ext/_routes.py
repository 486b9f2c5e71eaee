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
"""``argnums``: which leaves each loss is differentiated by, and the shape of
its gradient.

A *template* is a gradient with leaf numbers in place of values: the part of
the arguments' numbered twin that a target selects. So a template says both
which leaves are wanted and what the gradient looks like, in every mode.
"""

import dataclasses
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ext._call import Call, format_path
from nnx_ext._mode import Mode
from nnx_ext._per_loss import PerLoss
from nnx_ext.typing import Argnums

T = tp.TypeVar('T')
PyTree = tp.Any
Filter = nnx.filterlib.Filter


@dataclasses.dataclass(frozen=True)
class Target:
  """One argument to differentiate by, and the template of its gradient."""

  argnum: int
  filter: Filter | None
  template: PyTree

  @property
  def leaves(self) -> list[int]:
    return jax.tree.leaves(self.template)


@dataclasses.dataclass(frozen=True)
class Route:
  """All that one loss is differentiated by."""

  targets: tuple[Target, ...]
  bare: bool
  """Whether ``argnums`` was an int or ``DiffState``: one gradient, no tuple."""

  @property
  def leaves(self) -> set[int]:
    return {leaf for target in self.targets for leaf in target.leaves}

  def gradient(self, values: tp.Callable[[int], tp.Any]) -> PyTree:
    """The gradient, from the value of each leaf."""
    gradients = tuple(
      jax.tree.map(values, target.template) for target in self.targets
    )
    return gradients[0] if self.bare else gradients


def parse_argnums(api: str, argnums: Argnums) -> PerLoss[tp.Any]:
  """Checks the form of ``argnums``, as far as it goes without a call."""

  def entry(value):
    if isinstance(value, (int, np.integer, nnx.DiffState)):
      return _check_argnum(api, value)
    if not isinstance(value, (tuple, list)) or not value:
      raise TypeError(
        f'{api}: an entry of `argnums` must be an int, an nnx.DiffState or '
        f'a non-empty sequence of them, got {value!r}.'
      )
    return tuple(_check_argnum(api, one) for one in value)

  if not isinstance(
    argnums, (int, np.integer, nnx.DiffState, tp.Mapping, tuple, list)
  ):
    raise TypeError(
      f'{api}: `argnums` must be an int or nnx.DiffState for all losses, or '
      'one entry for each loss in a dict, tuple or list, got '
      f'{argnums!r}.'
    )
  return PerLoss.parse('argnums', argnums, entry)


class Router:
  """Resolves argnums against the arguments of one call."""

  def __init__(self, mode: Mode, call: Call, leaves: tp.Sequence[tp.Any]):
    self._mode, self._call, self._leaves = mode, call, leaves
    self._twin_args, _ = mode.number(call.tree)
    self._targets: dict[tuple[int, tp.Any], Target] = {}

  def route(self, entry: tp.Any) -> Route:
    """The route of one loss, from its entry of ``argnums``."""
    bare = isinstance(entry, (int, nnx.DiffState))
    targets = tuple(self._target(e) for e in ((entry,) if bare else entry))
    argnums = [target.argnum for target in targets]
    for argnum in argnums:
      if argnums.count(argnum) > 1:
        raise ValueError(
          f'{self._call.api}: {self._call.argument(argnum)} is repeated in '
          f'the argnums of one loss, {entry!r}. To select more of it use one '
          f'filter: nnx.DiffState({argnum}, nnx.Any(...)).'
        )
    return Route(targets, bare)

  def union(self, routes: tp.Iterable[Route]) -> Route:
    """One target an argument, in ascending order, of all that any loss has."""
    filters: dict[int, list[Filter | None]] = {}
    for route in routes:
      for target in route.targets:
        known = filters.setdefault(target.argnum, [])
        if not any(target.filter is f for f in known):
          known.append(target.filter)
    targets = tuple(
      self._select(argnum, _any(filters[argnum])) for argnum in sorted(filters)
    )
    self._refuse_shared(targets)
    return Route(targets, bare=len(targets) == 1)

  def inexact(
    self, leaves: tp.Iterable[int], allow_int: bool, holomorphic: bool
  ) -> list[int]:
    """The leaves that can be moved infinitesimally, in ascending order.

    With ``allow_int`` the others have a gradient too, of dtype float0.
    """
    inexact, refused = [], []
    for leaf in sorted(leaves):
      dtype = _dtype(self._leaves[leaf])
      if dtype is not None and jnp.issubdtype(
        dtype, jnp.complexfloating if holomorphic else jnp.inexact
      ):
        inexact.append(leaf)
      elif holomorphic or not allow_int or dtype is None:
        refused.append(leaf)
    if refused:
      raise self._not_differentiable(refused, holomorphic)
    return inexact

  def owners(self, leaves: tp.Mapping[int, T]) -> dict[T, str]:
    """For each of ``leaves``, the first argument that holds it."""
    owners: dict[T, str] = {}
    for argnum, twin in enumerate(self._twin_args):
      for leaf in jax.tree.leaves(twin):
        if leaf in leaves:
          owners.setdefault(leaves[leaf], self._call.argument(argnum))
    return owners

  def path(self, leaf: int) -> str:
    """How messages speak of a leaf: its argument and path."""
    for argnum, twin in enumerate(self._twin_args):
      for path, number in _leaves_with_path(twin):
        if number == leaf:
          return self._call.where((0, argnum, *path))
    return f'leaf {leaf}'

  def _target(self, entry: int | nnx.DiffState) -> Target:
    if isinstance(entry, nnx.DiffState):
      return self._select(self._call.position(entry.argnum), entry.filter)
    return self._select(self._call.position(entry), self._mode.default_filter)

  def _select(self, argnum: int, filter: Filter | None) -> Target:
    # Losses often share an entry: filters run once for each.
    key = (argnum, id(filter))
    if key not in self._targets:
      template = self._mode.select(
        self._call.args[argnum], self._twin_args[argnum], filter
      )
      target = Target(argnum, filter, template)
      self._refuse_empty(target)
      self._targets[key] = target
    return self._targets[key]

  def _refuse_empty(self, target: Target) -> None:
    if target.leaves:
      return
    argument = self._call.argument(target.argnum)
    variables = self._mode.variables(self._call.args[target.argnum])
    if not variables:
      raise ValueError(
        f'{self._call.api}: {argument} has no leaf to differentiate by, got '
        f'{type(self._call.args[target.argnum]).__name__}.'
      )
    kinds: dict[str, int] = {}
    for _, variable in variables:
      name = type(variable).__name__
      kinds[name] = kinds.get(name, 0) + 1
    holds = ', '.join(f'{count} {kind}' for kind, count in kinds.items())
    paths = ', '.join(format_path(path) for path, _ in variables[:6])
    more = ', ...' if len(variables) > 6 else ''
    raise ValueError(
      f'{self._call.api}: the filter {_filter_name(target.filter)} matches '
      f'nothing in {argument}, which holds {holds}, at {paths}{more}. '
      f'Select with nnx.DiffState({target.argnum}, ...), for example '
      f'nnx.DiffState({target.argnum}, nnx.Param).'
    )

  def _not_differentiable(self, leaves, holomorphic) -> TypeError:
    listing = ', '.join(
      f'{self.path(leaf)} ({_dtype_name(self._leaves[leaf])})'
      for leaf in leaves[:4]
    )
    more = f' and {len(leaves) - 4} more' if len(leaves) > 4 else ''
    api = self._call.api
    if holomorphic:
      return TypeError(
        f'{api}: with holomorphic=True every leaf must be complex, got '
        f'{listing}{more}.'
      )
    return TypeError(
      f'{api}: some leaves to differentiate by are neither real nor complex: '
      f'{listing}{more}. Select with nnx.DiffState(argnum, nnx.Param), which '
      'works in every mode (outside the default mode a bare argnum means '
      'every leaf), or pass allow_int=True for gradients of dtype float0.'
    )

  def _refuse_shared(self, targets: tp.Sequence[Target]) -> None:
    owner: dict[int, Target] = {}
    for target in targets:
      for path, leaf in _leaves_with_path(target.template):
        first = owner.setdefault(leaf, target)
        if first is not target:
          raise ValueError(
            f"{self._call.api}: with reduce='sum', "
            f'{self._call.where((0, target.argnum, *path))} is also part of '
            f'{self._call.argument(first.argnum)}, so two optimizers would '
            'step it twice. Pass both in one argument, as a dict of Modules, '
            'or leave it out of one with a filter, nnx.DiffState'
            f'({target.argnum}, nnx.All(nnx.Param, nnx.Not(...))).'
          )


def _check_argnum(api: str, value: tp.Any) -> int | nnx.DiffState:
  argnum = value.argnum if isinstance(value, nnx.DiffState) else value
  if isinstance(argnum, bool) or not isinstance(argnum, (int, np.integer)):
    raise TypeError(
      f'{api}: argnums are ints or nnx.DiffState(int, filter), got {value!r}.'
    )
  if isinstance(value, nnx.DiffState):
    return value
  return operator.index(value)


def _any(filters: tp.Sequence[Filter | None]) -> Filter | None:
  if any(f is None for f in filters):
    return None
  return filters[0] if len(filters) == 1 else nnx.Any(*filters)


def _filter_name(filter: tp.Any) -> str:
  return filter.__name__ if isinstance(filter, type) else repr(filter)


def _dtype(leaf: tp.Any) -> tp.Any:
  try:
    return jnp.result_type(leaf)
  except TypeError:
    return None


def _dtype_name(leaf: tp.Any) -> str:
  dtype = _dtype(leaf)
  return type(leaf).__name__ if dtype is None else str(dtype)


def _leaves_with_path(tree: PyTree) -> tp.Iterator[tuple[tp.Any, int]]:
  """Leaf numbers of a twin or template, by the path of their Variable."""
  is_variable = lambda x: isinstance(x, nnx.Variable)
  for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
    for leaf in jax.tree.leaves(node):
      yield nnx.graphlib.jax_to_nnx_path(path), leaf
