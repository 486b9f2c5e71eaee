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
"""The three NNX modes, behind one face.

Everything that depends on how NNX represents objects happens here: turning
arguments into numbered leaves, rebuilding them inside a pure function, and
moving the state that changed back onto the caller's objects, last of all.
No other file asks which mode is on.

* default (``graph=True, graph_updates=True``): an ``nnx.update_context``
  carries Variables and graph structure across the boundary.
* ``graph_updates=False``: objects are rebuilt from a graph definition;
  only Variables' values are carried back.
* tree mode (``graph=False``): objects are plain pytrees; only Variables'
  values are carried back, and no Variable may appear twice.
"""

import contextlib
import dataclasses
import typing as tp

import jax
from flax import nnx

# One tag for all calls: flax keeps a stack for each tag, so calls may nest.
_CONTEXT_TAG = 'nnx_ext'

PyTree = tp.Any


class Crossing(tp.Protocol):
  """One passage of objects into a pure function and of their state back."""

  leaves: list[tp.Any]
  """Every leaf of the arguments, in the order that ``Mode.number`` counts."""

  def call(
    self, f: tp.Callable[..., tuple[tp.Any, tp.Any]], leaves: tp.Sequence
  ) -> tuple[tp.Any, PyTree]:
    """Calls ``f`` on objects rebuilt from ``leaves``; pure.

    ``f`` returns ``(result, aux)``. Returns the result, which must be a
    pytree of arrays, and the luggage for ``settle``: the aux and all
    state that changed, as a pytree without objects.
    """

  def settle(self, luggage: PyTree) -> tp.Any:
    """Writes changed state to the caller's objects and returns the aux."""


@dataclasses.dataclass(frozen=True)
class Mode:
  """How NNX objects are seen: flax's ``graph`` and ``graph_updates``."""

  graph: bool
  graph_updates: bool

  @classmethod
  def resolve(cls, graph: bool | None, graph_updates: bool | None) -> 'Mode':
    """The mode asked for, and where None, the one flax is set to now."""
    if graph is None:
      graph = nnx.set_graph_mode.current_value()
    if graph_updates is None:
      graph_updates = nnx.set_graph_updates.current_value()
    return cls(graph, graph and graph_updates)

  @property
  def default_filter(self) -> nnx.filterlib.Filter | None:
    """What a bare argnum selects: its Params, or (None) every leaf."""
    return nnx.Param if self.graph_updates else None

  def number(self, tree: PyTree) -> PyTree:
    """The twin of ``tree``: the same objects, with a leaf's number in its
    place. NNX itself resolves sharing, so a shared Variable has one number.
    """
    leaves, treedef = jax.tree.flatten(self._pure(tree))
    return self._objects(jax.tree.unflatten(treedef, range(len(leaves))))

  def select(
    self, tree: PyTree, twin: PyTree, filter: nnx.filterlib.Filter | None
  ) -> PyTree:
    """The part of ``twin`` that a gradient by ``tree`` mirrors.

    Without a filter that is all of it. With one, each object becomes the
    ``State`` of its leaves that match; bare Variables and arrays stay whole,
    as in flax. The filter sees the real objects, since it may read them.
    """
    if filter is None:
      return twin
    chosen: list[frozenset] = []

    def choose(split, node):
      kept = split(node, filter)
      chosen.append(frozenset(path for path, _ in nnx.to_flat_state(kept)))

    self._map_objects(choose, tree)
    choices = iter(chosen)

    def pick(split, node):
      paths = next(choices)
      return split(node, lambda path, _: path in paths)

    return self._map_objects(pick, twin)

  @contextlib.contextmanager
  def crossing(self, api: str, tree: PyTree) -> tp.Iterator[Crossing]:
    """Opens the boundary of a pure function for ``tree = (args, kwargs)``."""
    if self.graph_updates:
      with nnx.update_context(_CONTEXT_TAG):
        yield _GraphCrossing(tree)
    else:
      yield _VariableCrossing(api, tree, self)

  def variables(self, tree: PyTree) -> list[tuple[tp.Any, nnx.Variable]]:
    """Paths and Variables of ``tree``, each once, in a fixed order."""
    if self.graph:
      return [
        (path, node)
        for path, node in nnx.iter_graph(tree, graph=True)
        if isinstance(node, nnx.Variable)
      ]
    return [
      (nnx.graphlib.jax_to_nnx_path(path), leaf)
      for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_variable)
      if _is_variable(leaf)
    ]

  def _pure(self, tree: PyTree) -> PyTree:
    return nnx.to_tree(tree) if self.graph else tree

  def _objects(self, pure: PyTree) -> PyTree:
    return nnx.from_tree(pure) if self.graph else pure

  def _map_objects(self, f, tree: PyTree) -> PyTree:
    """Maps ``f(split, object)`` over the outermost objects of ``tree``.

    ``split(object, filter)`` is the State of the matching leaves; what an
    earlier object of the same tree holds already is left out, as in flax.
    """
    with nnx.split_context() as context:

      def split(node, filter):
        if self.graph:
          return context.split(node, filter, ...)[1]
        return nnx.split(node, filter, ..., graph=False)[1]

      return jax.tree.map(
        lambda x: f(split, x) if _is_object(x) else x,
        tree,
        is_leaf=lambda x: _is_object(x) or _is_variable(x),
      )


class _GraphCrossing:
  """Default mode: flax's update context moves values and structure."""

  def __init__(self, tree: PyTree):
    pure = nnx.to_tree(tree, ctxtag=_CONTEXT_TAG)
    self.leaves, self._treedef = jax.tree.flatten(pure)

  def call(self, f, leaves):
    pure = jax.tree.unflatten(self._treedef, leaves)
    args, kwargs = nnx.from_tree(pure, ctxtag=_CONTEXT_TAG, is_inner=True)
    result, aux = f(*args, **kwargs)
    objects = jax.tree.map(
      lambda x: x if _is_object(x) or _is_variable(x) else None,
      (args, kwargs),
      is_leaf=lambda x: _is_object(x) or _is_variable(x),
    )
    return result, nnx.to_tree((objects, aux), ctxtag=_CONTEXT_TAG)

  def settle(self, luggage):
    _, aux = nnx.from_tree(luggage, ctxtag=_CONTEXT_TAG, is_inner=False)
    return aux


class _VariableCrossing:
  """The other modes: only Variables' new values leave the function."""

  def __init__(self, api: str, tree: PyTree, mode: Mode):
    self._api, self._mode = api, mode
    self._variables = mode.variables(tree)
    _refuse_repeats(api, self._variables)
    self.leaves, self._treedef = jax.tree.flatten(mode._pure(tree))

  def call(self, f, leaves):
    pure = jax.tree.unflatten(self._treedef, leaves)
    args, kwargs = self._mode._objects(pure)
    variables = [v for _, v in self._mode.variables((args, kwargs))]
    before = [jax.tree.flatten(v) for v in variables]
    result, aux = f(*args, **kwargs)
    self._refuse_inputs(aux, variables)
    changed = {
      i: variable
      for i, (variable, was) in enumerate(zip(variables, before))
      if _changed(jax.tree.flatten(variable), was)
    }
    return result, (changed, self._mode._pure(aux))

  def settle(self, luggage):
    changed, aux = luggage
    for i, new in changed.items():
      self._variables[i][1].update_from_state(new)
    return self._mode._objects(aux)

  def _refuse_inputs(self, aux, variables):
    inputs = {id(v): i for i, v in enumerate(variables)}
    for path, variable in self._mode.variables(aux):
      if id(variable) in inputs:
        source, _ = self._variables[inputs[id(variable)]]
        raise ValueError(
          f'{self._api}: the aux holds a Variable of the arguments: '
          f'{format_path(path)} of the aux is {format_path(source[1:])} of '
          'the call. '
          'Outside the default mode a Variable cannot be both an input and '
          'an output: return its value, `variable[...]`, or a copy from '
          '`nnx.clone`.'
        )


def format_path(path: tp.Sequence[tp.Any]) -> str:
  """``('layers', 0, 'kernel')`` as ``'layers/0/kernel'``."""
  return repr('/'.join(map(str, path))) if path else 'itself'


def _refuse_repeats(
  api: str, variables: list[tuple[tp.Any, nnx.Variable]]
) -> None:
  seen: dict[int, tp.Any] = {}
  for path, variable in variables:
    first = seen.setdefault(id(variable), path)
    if first is not path:
      raise ValueError(
        f'{api}: duplicate {type(variable).__name__} in the arguments, at '
        f'{format_path(first[1:])} and at {format_path(path[1:])}. Tree mode '
        '(graph=False) refuses shared Variables; pass graph=True.'
      )


def _changed(now: tuple[list, tp.Any], was: tuple[list, tp.Any]) -> bool:
  return now[1] != was[1] or any(a is not b for a, b in zip(now[0], was[0]))


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, nnx.Variable)


def _is_object(x: tp.Any) -> bool:
  """A Module or another graph node, but not a Variable."""
  return nnx.graphlib.is_graph_node(x) and not _is_variable(x)
