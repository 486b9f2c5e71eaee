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
import functools
import typing as tp

import jax
from flax import errors, nnx

from nnx_ext import _words
from nnx_ext._call import Call

# One tag for all calls: flax keeps a stack for each tag, so calls may nest.
_CONTEXT_TAG = 'nnx_ext'

PyTree = tp.Any
Variables = list[tuple[tuple, nnx.Variable]]


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

  @contextlib.contextmanager
  def crossing(self, call: Call) -> tp.Iterator[Crossing]:
    """Opens the boundary of a pure function for the arguments of ``call``."""
    variables = self.variables(call.tree)
    _refuse_references(call, variables)
    if self.graph_updates:
      # flax writes every Variable back, changed or not.
      _check_writable(call, variables)
      with nnx.update_context(_CONTEXT_TAG):
        yield _GraphCrossing(call)
    else:
      _refuse_repeats(call, variables)
      yield _VariableCrossing(call, self, variables)

  def variables(self, tree: PyTree) -> Variables:
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

  def states(self, tree: PyTree) -> PyTree:
    """``tree`` with a ``WholeState`` in the place of each outermost object.

    What an earlier object of the same tree holds is left out, as in flax.
    """
    with nnx.split_context() as context:

      def split(node):
        if self.graph:
          return context.split(node)[1]
        return nnx.split(node, graph=False)[1]

      return jax.tree.map(
        lambda x: WholeState(split(x)) if _is_object(x) else x,
        tree,
        is_leaf=lambda x: _is_object(x) or _is_variable(x),
      )


@dataclasses.dataclass(frozen=True)
class WholeState:
  """The State of an object, told apart from a State that a user passes."""

  state: nnx.State


class Selector:
  """Chooses what of an argument gradients are taken by, by any filter.

  An argument is split once, however many losses filter it.
  """

  def __init__(self, mode: Mode, tree: PyTree, twin: PyTree):
    self._mode, self._tree, self._twin = mode, tree, twin

  def select(self, filter: nnx.filterlib.Filter | None) -> PyTree:
    """The part of the twin that a gradient by the argument mirrors.

    Without a filter that is all of it. With one, each object becomes the
    ``State`` of its leaves that match; bare Variables and arrays stay whole,
    as in flax. The filter sees the real objects, since it may read them.
    """
    if filter is None:
      return self._twin

    def choose(real, twin):
      if not isinstance(real, WholeState):
        return twin
      kept = nnx.filter_state(real.state, filter)
      paths = {path for path, _ in nnx.to_flat_state(kept)}
      return nnx.filter_state(twin.state, lambda path, _: path in paths)

    return jax.tree.map(
      choose,
      *self._states,
      is_leaf=lambda x: isinstance(x, WholeState) or _is_variable(x),
    )

  @functools.cached_property
  def _states(self) -> tuple[PyTree, PyTree]:
    return self._mode.states(self._tree), self._mode.states(self._twin)


class _GraphCrossing:
  """Default mode: flax's update context moves values and structure."""

  def __init__(self, call: Call):
    pure = nnx.to_tree(call.tree, ctxtag=_CONTEXT_TAG)
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

  def __init__(self, call: Call, mode: Mode, variables: Variables):
    self._call, self._mode, self._variables = call, mode, variables
    self.leaves, self._treedef = jax.tree.flatten(mode._pure(call.tree))

  def call(self, f, leaves):
    pure = jax.tree.unflatten(self._treedef, leaves)
    args, kwargs = self._mode._objects(pure)
    inputs = self._mode.variables((args, kwargs))
    before = [jax.tree.flatten(variable) for _, variable in inputs]
    result, aux = f(*args, **kwargs)
    self._refuse_inputs(aux, inputs)
    changed = {
      i: variable
      for i, ((_, variable), was) in enumerate(zip(inputs, before))
      if _changed(jax.tree.flatten(variable), was)
    }
    return result, (changed, self._mode._pure(aux))

  def settle(self, luggage):
    changed, aux = luggage
    _check_writable(self._call, [self._variables[i] for i in changed])
    for i, new in changed.items():
      _, variable = self._variables[i]
      variable.update_from_state(new)
    return self._mode._objects(aux)

  def _refuse_inputs(self, aux, inputs):
    sources = {id(variable): path for path, variable in inputs}
    for path, variable in self._mode.variables(aux):
      if id(variable) in sources:
        place = f'at {_words.path(path)}' if path else 'itself'
        raise ValueError(
          f'{self._call.api}: the aux holds, {place}, a Variable of the '
          f'arguments: {self._call.where(sources[id(variable)])}. Outside '
          'the default mode a Variable cannot be both an input and an '
          'output: return its value, `variable[...]`, or a copy from '
          '`nnx.clone`.'
        )


def _check_writable(call: Call, variables: Variables) -> None:
  """Raises, before anything is written, where flax would raise in between."""
  for path, variable in variables:
    try:
      variable.update_from_state(variable)  # keeps the very same array
    except errors.TraceContextError as error:
      raise errors.TraceContextError(
        f'{call.api}: {call.where(path)} was made outside of the jit (or '
        'other transform) that this call runs in, so its new value cannot be '
        'written back. Pass the Module into the transform as an argument, '
        f'and use nnx.jit: nnx.jit(step)(module, ...). Flax says: {error}'
      ) from error


def _refuse_references(call: Call, variables: Variables) -> None:
  # A reference is written while f runs: an error could not leave it as it
  # was, and JAX accumulates its gradient in place instead of returning it.
  for path, variable in variables:
    if variable.ref or variable.hijax:
      kind = 'ref' if variable.ref else 'hijax'
      raise TypeError(
        f'{call.api}: {call.where(path)} is a Variable with '
        f'{kind}=True, which cannot be differentiated through as a value. '
        'Pass plain Variables, for example from '
        f'nnx.with_vars(model, {kind}=False).'
      )


def _refuse_repeats(call: Call, variables: Variables) -> None:
  seen: dict[int, tuple] = {}
  for path, variable in variables:
    first = seen.setdefault(id(variable), path)
    if first is not path:
      raise ValueError(
        f'{call.api}: duplicate {type(variable).__name__}: '
        f'{call.where(path)} is also {call.where(first)}. Tree mode '
        '(graph=False) refuses shared Variables; pass graph=True.'
      )


def _changed(now: tuple[list, tp.Any], was: tuple[list, tp.Any]) -> bool:
  return now[1] != was[1] or any(a is not b for a, b in zip(now[0], was[0]))


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, nnx.Variable)


def _is_object(x: tp.Any) -> bool:
  """A Module or another graph node, but not a Variable."""
  return nnx.graphlib.is_graph_node(x) and not _is_variable(x)
