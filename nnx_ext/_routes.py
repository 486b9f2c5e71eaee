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

from nnx_ext import _words
from nnx_ext._call import Call
from nnx_ext._mode import Mode, Selector
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
    self._selectors = [
      Selector(mode, tree, twin)
      for tree, twin in zip(call.args, self._twin_args)
    ]
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
          f'filter: nnx.DiffState({argnum}, nnx.Any(filter_a, filter_b)).'
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
    moved = jnp.complexfloating if holomorphic else jnp.inexact
    dtypes = {leaf: _dtype(self._leaves[leaf]) for leaf in sorted(leaves)}
    foreign = [leaf for leaf, dtype in dtypes.items() if dtype is None]
    if foreign:
      raise TypeError(
        f'{self._call.api}: cannot differentiate by {self._list(foreign)}: '
        'no array. Pass what is not differentiated as another argument.'
      )
    inexact = [
      leaf for leaf, dtype in dtypes.items() if jnp.issubdtype(dtype, moved)
    ]
    others = sorted(dtypes.keys() - set(inexact))
    if others and holomorphic:
      raise TypeError(
        f'{self._call.api}: with holomorphic=True every leaf must be '
        f'complex, got {self._list(others)}.'
      )
    if others and not allow_int:
      raise TypeError(
        f'{self._call.api}: some leaves to differentiate by are neither real '
        f'nor complex: {self._list(others)}. Select with '
        'nnx.DiffState(argnum, nnx.Param), which works in every mode (outside '
        'the default mode a bare argnum means every leaf), or pass '
        'allow_int=True for gradients of dtype float0.'
      )
    return inexact

  def owners(self, leaves: tp.Mapping[int, T]) -> dict[T, str]:
    """For each of ``leaves``, the first argument that holds it."""
    owners: dict[T, str] = {}
    for argnum, twin in enumerate(self._twin_args):
      for leaf in jax.tree.leaves(twin):
        if leaf in leaves:
          owners.setdefault(leaves[leaf], self._call.argument(argnum))
    return owners

  def _list(self, leaves: tp.Sequence[int]) -> str:
    """How messages speak of leaves: path, argument, dtype."""
    listing = ', '.join(
      f'{self._where(leaf)} ({_dtype_name(self._leaves[leaf])})'
      for leaf in leaves[:4]
    )
    more = f' and {len(leaves) - 4} more' if len(leaves) > 4 else ''
    return listing + more

  def _where(self, leaf: int) -> str:
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
      template = self._selectors[argnum].select(filter)
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
    paths = ', '.join(_words.path(path) for path, _ in variables[:6])
    more = f' and {len(variables) - 6} more' if len(variables) > 6 else ''
    filter = _words.filter_(target.filter)
    parts = {str(part) for path, _ in variables for part in path}
    hint = _words.did_you_mean(_words.quoted(filter), sorted(parts))
    kind = 'Param' if 'Param' in kinds else next(iter(kinds))
    raise ValueError(
      f'{self._call.api}: the filter {filter} matches nothing in {argument}, '
      f'which holds {holds}, at {paths}{more}.{hint} Select, for example, '
      f'with nnx.DiffState({target.argnum}, nnx.{kind}).'
    )

  def _refuse_shared(self, targets: tp.Sequence[Target]) -> None:
    owner: dict[int, Target] = {}
    for target in targets:
      for path, leaf in _leaves_with_path(target.template):
        first = owner.setdefault(leaf, target)
        if first is target:
          continue
        argnum = target.argnum
        leave_out = (
          ' or leave it out of one: nnx.DiffState'
          f'({argnum}, nnx.Not(nnx.PathContains({path[0]!r}))).'
          if path
          else '.'
        )
        raise ValueError(
          f"{self._call.api}: with reduce='sum', "
          f'{self._call.where((0, argnum, *path))} is also part of '
          f'{self._call.argument(first.argnum)}, so two optimizers would '
          'step it twice. Pass both in one argument, as a dict of Modules'
          f'{"," if path else ""}{leave_out}'
        )


def _check_argnum(api: str, value: tp.Any) -> int | nnx.DiffState:
  argnum = value.argnum if isinstance(value, nnx.DiffState) else value
  if isinstance(argnum, bool) or not isinstance(argnum, (int, np.integer)):
    raise TypeError(
      f'{api}: argnums are ints or nnx.DiffState(int, filter), got {value!r}.'
    )
  if not isinstance(value, nnx.DiffState):
    return operator.index(value)
  try:
    nnx.filterlib.to_predicate(value.filter)
  except (TypeError, ValueError) as error:
    raise TypeError(
      f'{api}: argnums: {value.filter!r} is no nnx filter, in '
      f'DiffState({argnum}, {value.filter!r}). Use a Variable type, '
      'nnx.PathContains(name), a predicate of (path, value), or another '
      'filter of nnx.filterlib.'
    ) from error
  return value


def _any(filters: tp.Sequence[Filter | None]) -> Filter | None:
  if any(f is None for f in filters):
    return None
  return filters[0] if len(filters) == 1 else nnx.Any(*filters)


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
