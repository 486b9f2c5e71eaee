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
"""Parametrizations put in the place of weights, and taken out again."""

import dataclasses
import inspect
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ext import _words
from nnx_ext._names import Names, Path
from nnx_ext.parametrizations._base import (
  Parametrization,
  Slot,
  abstract_weight,
  check_weight,
)

M = tp.TypeVar('M')
Filter = nnx.filterlib.Filter
Factory = tp.Callable[[jax.Array], Parametrization]
Rules = tp.Mapping[Filter, Factory] | tp.Sequence[tuple[Filter, Factory]]

# How a Param says where it lives; for parameters of the weight's own shape.
_SHARDING = ('out_sharding', 'sharding_names', 'sharding_rules', 'mesh')


def parametrize(model: M, rules: Rules) -> M:
  """A copy of a model with parametrizations in the place of some weights.

  Each chosen ``nnx.Param`` is replaced, at its own attribute, by a small
  Module that computes the weight from parameters of its own wherever the
  weight is read. So layers, attention, recurrent cells and user code run
  unchanged, and the parameters stand at readable paths such as
  ``l1/kernel/v``. The copy starts as the same function as far as the
  parametrization can represent it.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import WeightNorm
    ...
    >>> model = nnx.Sequential(
    ...   nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    ...   nnx.Linear(3, 1, rngs=nnx.Rngs(1)),
    ... )
    >>> normed = nnx_ext.parametrize(
    ...   model, {nnx.PathContains('kernel'): WeightNorm}
    ... )
    >>> x = jnp.ones((1, 2))
    >>> bool(jnp.allclose(model(x), normed(x)))
    True
    >>> sorted(nnx.state(normed.layers[0].kernel))
    ['g', 'v']

  Options go through a factory, and the first rule that matches wins::

    >>> from nnx_ext.parametrizations import LowRankUpdate
    >>> tuned = nnx_ext.parametrize(model, [
    ...   (lambda path, param: 1 in path and param.ndim == 2, WeightNorm),
    ...   (nnx.PathContains('kernel'), lambda w: LowRankUpdate(w, rank=1)),
    ... ])
    >>> type(tuned.layers[0].kernel).__name__
    'LowRankUpdate'
    >>> type(tuned.layers[1].kernel).__name__
    'WeightNorm'

  To stack parametrizations, parametrize a parameter of the first: a rule that
  matches ``l1/kernel/v``. Layers that are stacked by ``nnx.vmap`` are
  parametrized inside of it. The copy shares buffers with ``model``; donating
  either deletes those of both, so donate a copy of the arrays:
  ``jax.tree.map(jnp.copy, model)``.

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    model: a Module, or a pytree of Modules. It is not changed.
    rules: a mapping of filters to factories, or pairs of these. A filter is
      asked about Params only. A factory is called with the current weight, a
      plain array, and returns a
      :class:`~nnx_ext.parametrizations.Parametrization`; a class of these
      is a factory.

  Returns:
    A model of the same class. Tied weights share one parametrization.

  Raises:
    ValueError: if a filter matches no Param, or the parametrized weight has
      another shape or dtype.
    TypeError: if the rules or what a factory returns are of the wrong type.
  """
  pairs = _check_rules(rules)
  model = nnx.clone(model)
  matched = [False] * len(pairs)
  params: list[Path] = []

  def replace(path, node):
    if not isinstance(node, nnx.Param):
      return node
    params.append(path)
    for i, (filter, factory) in enumerate(pairs):
      if nnx.filterlib.to_predicate(filter)(path, node):
        matched[i] = True
        weight = node.get_value()
        return _build('parametrize', path, factory, _slot_of(node), weight)
    return node

  result = _map(replace, model)
  for (filter, _), found in zip(pairs, matched):
    if not found:
      raise _nothing_matched(filter, params)
  return result


def materialize(model: M) -> M:
  """A view of a model with plain weights, each computed once.

  A parametrized weight is computed at every read. Where a weight is read
  many times in one forward (a recurrent cell) or drawn at random, call this
  inside the loss: gradients flow through it to the parameters. The view shares
  every other Variable, so statistics and rng counts move on the model itself.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import WeightNorm
    ...
    >>> model = nnx_ext.parametrize(
    ...   nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    ...   {nnx.PathContains('kernel'): WeightNorm},
    ... )
    >>> grads = nnx.grad(
    ...   lambda m: jnp.sum(nnx_ext.materialize(m)(jnp.ones((1, 2))))
    ... )(model)
    >>> sorted(grads['kernel'])
    ['g', 'v']

  Weights that are drawn at random are drawn once for all reads of a view::

    >>> from nnx_ext.parametrizations import GaussianMeanField
    ...
    >>> rngs, x = nnx.Rngs(params=0, noise=1), jnp.ones((1, 2))
    >>> noisy = nnx_ext.parametrize(
    ...   nnx.Linear(2, 3, rngs=rngs),
    ...   {nnx.Param: lambda w: GaussianMeanField(w, rngs=rngs)},
    ... )
    >>> view = nnx_ext.materialize(noisy)
    >>> bool(jnp.all(noisy(x) == noisy(x))), bool(jnp.all(view(x) == view(x)))
    (False, True)

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    model: a Module, or a pytree of Modules.

  Returns:
    A model of the same class with a Variable in the place of each
    parametrization. A model without any is returned as a view of itself.

  Raises:
    ValueError: if a weight has another shape than when it was parametrized,
      as for layers stacked by ``nnx.vmap`` and seen from outside.
  """
  return _materialize('materialize', model)


def bake(model: M) -> M:
  """The plain model of a parametrized one, detached, for saving or serving.

  Like :func:`materialize`, but nothing is shared, and random weights are at
  their mean. The result is the model that was parametrized, with other
  values: whoever loads or serves it needs no parametrization.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import WeightNorm
    ...
    >>> plain = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model = nnx_ext.parametrize(
    ...   plain, {nnx.PathContains('kernel'): WeightNorm}
    ... )
    >>> baked = nnx_ext.bake(model)
    >>> nnx.graphdef(baked) == nnx.graphdef(plain)
    True

  Random weights are at their mean, and averaged ones at their average::

    >>> from nnx_ext.parametrizations import GaussianMeanField
    ...
    >>> rngs = nnx.Rngs(noise=1)
    >>> noisy = nnx_ext.parametrize(
    ...   plain, {nnx.Param: lambda w: GaussianMeanField(w, rngs=rngs)}
    ... )
    >>> baked = nnx_ext.bake(noisy)
    >>> bool(jnp.all(baked.kernel[...] == plain.kernel[...]))
    True

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    model: a Module, or a pytree of Modules.

  Returns:
    A model of the same class and, if it was made by :func:`parametrize`, of
    the structure of the original.

  Raises:
    ValueError: as :func:`materialize` does.
  """
  model = nnx.clone(model)
  for _, node in _parametrizations(model):
    node.eval()
  return nnx.clone(_materialize('bake', model))


def assign(model: M, path: str | Path, weight: jax.Array) -> M:
  """A copy of a model with a weight put in through the right inverse.

  So a plain checkpoint can be loaded into a parametrized model. The parameters
  are those from which the parametrization computes that weight, found as when
  it was made.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import Positive
    ...
    >>> model = nnx_ext.parametrize(
    ...   nnx.LayerNorm(3, rngs=nnx.Rngs(0)),
    ...   {nnx.PathContains('scale'): Positive},
    ... )
    >>> model = nnx_ext.assign(model, 'scale', jnp.array([1.0, 2.0, 3.0]))
    >>> model.scale[...].round(4)
    Array([1., 2., 3.], dtype=float32)

  A path may be a tuple. A weight that the parametrization cannot have is an
  error::

    >>> model = nnx_ext.parametrize(
    ...   nnx.Sequential(nnx.LayerNorm(2, rngs=nnx.Rngs(0))),
    ...   {nnx.PathContains('scale'): Positive},
    ... )
    >>> path = ('layers', 0, 'scale')
    >>> model = nnx_ext.assign(model, path, jnp.array([2.0, 3.0]))
    >>> model.layers[0].scale[...].round(4)
    Array([2., 3.], dtype=float32)
    >>> nnx_ext.assign(model, path, jnp.array([2.0, -3.0]))
    Traceback (most recent call last):
      ...
    ValueError: Positive: ...

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    model: a Module, or a pytree of Modules. It is not changed.
    path: where the parametrization stands, like ``'l1/kernel'`` or
      ``('l1', 'kernel')``.
    weight: the effective weight, of the shape of the one that it replaces; it
      is cast to its dtype.

  Returns:
    A model of the same class.

  Raises:
    ValueError: if no parametrization stands at ``path``, the weight has
      another shape, it lies outside of the parametrization's domain, or an
      argument of the parametrization's ``__init__`` is not to be found.
  """
  wanted = tuple(path.split('/')) if isinstance(path, str) else path
  model = nnx.clone(model)
  known = dict(_parametrizations(model))
  place = Names(model, known).resolve(wanted)
  if place is None:
    names = sorted('/'.join(map(str, name)) for name in known)
    name = '/'.join(map(str, wanted))
    raise ValueError(
      f'assign: no parametrization stands at {name!r}; they stand at '
      f'{names}.{_words.did_you_mean([name], names)}'
    )
  old = known[place]
  shape, dtype = old.shape, old.dtype
  if jnp.shape(weight) != shape:
    raise ValueError(
      f'assign: the weight at {_words.path(wanted)} has shape {shape}, got '
      f'{jnp.shape(weight)}.'
    )
  slot = old._slot or Slot(shape, dtype, nnx.Param, ())
  new = _build('assign', place, _like(old), slot, jnp.asarray(weight, dtype))
  for mode in ('deterministic', 'use_running_average'):
    if mode in vars(old):
      setattr(new, mode, getattr(old, mode))
  # Mapping makes new objects, but static attributes stay the very same.
  old._slot = mark = dataclasses.replace(slot)
  return _map(
    lambda _, node: new if getattr(node, '_slot', None) is mark else node,
    model,
  )


def kl(model: tp.Any) -> jax.Array:
  """The sum of all parametrizations' penalties, each once, also when tied.

  What random weights are trained by is the loss of the data plus this: for
  :class:`~nnx_ext.parametrizations.GaussianMeanField`, the KL divergence from
  the prior. Parametrizations of your own add to it through their ``kl``.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import GaussianMeanField
    ...
    >>> model = nnx_ext.parametrize(
    ...   nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    ...   {nnx.Param: lambda w: GaussianMeanField(
    ...     w, stddev=0.1, rngs=nnx.Rngs(noise=1)
    ...   )},
    ... )
    >>> float(nnx_ext.kl(model)) > 0
    True

  The loss of a batch is a mean over examples, so there it is divided by the
  number of examples of the whole data set::

    >>> def loss(model, x, y):
    ...   errors = jnp.sum((model(x) - y) ** 2, axis=1)
    ...   return jnp.mean(errors) / 2 + nnx_ext.kl(model) / 60_000
    ...
    >>> grads = nnx.grad(loss)(model, jnp.ones((4, 2)), jnp.ones((4, 3)))
    >>> sorted(grads['kernel'])
    ['mean', 'rho']

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    model: a Module, or a pytree of Modules.

  Returns:
    A scalar; zero for a model without penalties.
  """
  penalties = [node.kl() for _, node in _parametrizations(model)]
  return sum(penalties, jnp.zeros(()))


def _materialize(api: str, model: M) -> M:
  def replace(path, node):
    if not isinstance(node, Parametrization):
      return node
    weight = node()
    slot = node._slot
    if slot is None:
      return nnx.Param(weight)
    check_weight(api, path, slot, weight, type(node).__name__)
    return slot.fill(weight)

  return _map(replace, model)


def _parametrizations(model) -> list[tuple[Path, Parametrization]]:
  return [
    (path, node)
    for path, node in nnx.iter_graph(model, graph=True)
    if isinstance(node, Parametrization)
  ]


def _map(f, model):
  """Maps over objects from the leaves up; Variables stay the same objects."""
  return nnx.recursive_map(f, model, graph=True)


def _slot_of(variable: nnx.Variable) -> Slot:
  value = variable.get_value()
  return Slot(
    shape=jnp.shape(value),
    dtype=jnp.result_type(value),
    kind=type(variable),
    metadata=tuple(sorted(variable.get_metadata().items())),
  )


def _build(
  api: str, path: Path, factory: Factory, slot: Slot, weight: jax.Array
) -> Parametrization:
  """The parametrization of a weight, checked against its place."""
  built = factory(weight)
  name = getattr(factory, '__name__', repr(factory))
  if not isinstance(built, Parametrization):
    raise TypeError(
      f'{api}: the factory `{name}` for {_words.path(path)} must return '
      f'a Parametrization, got {_words.value(built)}.'
    )
  built._slot = slot  # first: a call may ask for the shape
  check_weight(api, path, slot, abstract_weight(built), type(built).__name__)
  sharding = {k: v for k, v in slot.metadata if k in _SHARDING and v}
  for _, theta in nnx.iter_graph(built, graph=True):
    if isinstance(theta, nnx.Variable):
      if getattr(theta.get_value(), 'shape', None) == slot.shape:
        _shard(theta, sharding)
  return built


def _shard(theta: nnx.Variable, sharding: dict[str, tp.Any]) -> None:
  """Names the axes of theta, and places it as flax does a new Variable."""
  own = theta.get_metadata()
  added = {k: value for k, value in sharding.items() if not own.get(k)}
  for key, value in added.items():
    theta.set_metadata(key, value)
  has_mesh = 'mesh' in added or not jax.sharding.get_abstract_mesh().empty
  if added and has_mesh:
    new = type(theta)(theta.get_value(), **theta.get_metadata())
    theta.set_raw_value(new.get_raw_value())


def _like(old: Parametrization) -> Factory:
  """A factory of the like, with the arguments that ``old`` keeps."""
  cls: tp.Any = type(old)
  _, _, *parameters = inspect.signature(cls.__init__).parameters.values()
  arguments = {}
  for parameter in parameters:
    name = parameter.name
    if name in vars(old):
      arguments[name] = getattr(old, name)
    elif parameter.default is parameter.empty:
      raise ValueError(
        f'assign: {cls.__name__}.__init__ takes `{name}`, but keeps no '
        f'attribute of that name; set `self.{name} = {name}` in it.'
      )

  def like(weight):
    return cls(weight, **arguments)

  like.__name__ = cls.__name__
  return like


def _check_rules(rules: tp.Any) -> list[tuple[Filter, Factory]]:
  items = rules.items() if isinstance(rules, tp.Mapping) else rules
  try:
    pairs = [(filter, factory) for filter, factory in items]
  except (TypeError, ValueError) as error:
    raise TypeError(
      'parametrize: the rules are a dict of filters to factories, or pairs '
      f'of these, like {{nnx.PathContains("kernel"): WeightNorm}}, got '
      f'{_words.value(rules)}.'
    ) from error
  for filter, factory in pairs:
    if not callable(factory) or isinstance(factory, Parametrization):
      raise TypeError(
        f'parametrize: the factory for {_words.filter_(filter)} must be a '
        'class of Parametrization or a function of the weight, got '
        f'{_words.value(factory)}.'
      )
  return pairs


def _nothing_matched(filter: Filter, params: list[Path]) -> ValueError:
  text = _words.filter_(filter)
  parts = sorted({str(part) for path in params for part in path})
  hint = _words.did_you_mean(_words.quoted(text), parts)
  return ValueError(
    f'parametrize: the filter {text} matches none of the Params that earlier '
    f'rules left: {_words.some(map(_words.path, params))}.{hint}'
  )
