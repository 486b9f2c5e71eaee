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
"""The layers of a model that filters choose to be adapted, each checked."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ext import _words
from nnx_ext.lora._factors import LoRAFactors, sharding_of
from nnx_ext.lora._kinds import KINDS, Kind, kind_of
from nnx_ext.lora._layer import LoRALayer
from nnx_ext.lora._options import LoRAOptions
from nnx_ext.lora._starts import check_start

Filter = nnx.filterlib.Filter
Path = tuple[tp.Any, ...]
Patterns = tp.Mapping[Filter, tp.Mapping[str, tp.Any]]

_OVERRIDES = [field.name for field in dataclasses.fields(LoRAOptions)]


@dataclasses.dataclass
class Target:
  """A layer to be adapted, found in a model."""

  path: Path
  layer: tp.Any
  kind: Kind
  options: LoRAOptions
  shares: Path | None = None

  @property
  def weight(self) -> nnx.Variable:
    return self.kind.weight(self.layer)

  def factors(self, rngs: nnx.Rngs) -> LoRAFactors:
    """The factors of this layer, abstract if its weight is."""
    axes, value = self.kind.axes(self.layer), self.weight.get_value()
    make = lambda weight, rngs: LoRAFactors(
      weight,
      axes,
      self.options,
      initializers=self.kind.initializers,
      metadata=sharding_of(self.weight, axes),
      rngs=rngs,
    )
    if not isinstance(value, jax.ShapeDtypeStruct):
      return make(value, rngs)
    streams = {name: jax.random.key(0) for name in ('params', 'dropout')}
    return nnx.eval_shape(
      lambda: make(jnp.zeros(value.shape, value.dtype), nnx.Rngs(**streams))
    )


def find_targets(
  api: str,
  model: tp.Any,
  options: LoRAOptions,
  targets: Filter,
  patterns: Patterns | None,
) -> list[Target]:
  """The layers of a model that the filters choose, each checked."""
  options.check(api)
  modules = modules_of(model)
  wanted = _matches(api, '`targets`', targets, modules)
  refused = _refusals(modules)
  able = {p: node for p, node in modules.items() if _why_not(node) is None}
  found: list[Target] = []
  for path in wanted:
    if path in refused:
      raise ValueError(f'{api}: {_words.path(path)} {refused[path]}')
    if path in able:
      found.append(_target(api, path, able[path], options))
  _check_each_has_one(api, targets, modules, wanted, found)
  found = _with_sharers(api, model, able, found)
  _override(api, found, patterns or {}, modules)
  for target in found:
    if target.shares is None:
      axes = target.kind.axes(target.layer)
      where = f'{api}: {_words.path(target.path)}'
      check_start(where, axes, target.weight.shape, target.options)
  return found


def adapted_layers(api: str, model: tp.Any) -> dict[Path, LoRALayer]:
  """The adapted layers of a model, one at least."""
  modules = modules_of(model).items()
  found = {path: node for path, node in modules if isinstance(node, LoRALayer)}
  if not found:
    raise ValueError(
      f'{api}: the model has no adapted layer; make one with '
      'nnx_ext.apply_lora(model, rank=8, rngs=nnx.Rngs(0)).'
    )
  return found


def modules_of(model: tp.Any) -> dict[Path, tp.Any]:
  """Every module, under the first of its paths."""
  return {
    path: node
    for path, node in nnx.iter_graph(model, graph=True)
    if isinstance(node, nnx.Module)
  }


def _matches(
  api: str, argument: str, filter: Filter, modules: dict[Path, tp.Any]
) -> list[Path]:
  """The paths of the modules that a filter matches, one at least."""
  try:
    predicate = nnx.filterlib.to_predicate(filter)
  except (TypeError, ValueError) as error:
    raise TypeError(
      f'{api}: {argument} must be an nnx filter over (path, module), like '
      "nnx.PathContains('query') or nnx.Linear, got "
      f'{_words.value(filter)}.'
    ) from error
  found = [path for path, node in modules.items() if predicate(path, node)]
  if not found:
    text = _words.filter_(filter)
    able = [path for path, node in modules.items() if _why_not(node) is None]
    parts = sorted({str(part) for path in able for part in path})
    hint = _words.did_you_mean(_words.quoted(text), parts)
    raise ValueError(
      f'{api}: {argument} {text} matches none of the layers: '
      f'{_words.some(map(_words.path, able))}.{hint}'
    )
  return found


def _why_not(layer: tp.Any) -> str | None:
  """Why a module cannot be adapted, or None if it can."""
  kind = kind_of(layer)
  name = type(layer).__name__
  if kind is None:
    return f'is a {name}, which is not a layer that can be adapted'
  weight = kind.weight(layer)
  if not isinstance(weight, nnx.Variable):
    return (
      f'has a {type(weight).__name__} in the place of its {kind.weight_name}: '
      'adapt a model first, and parametrize it then'
    )
  if not jnp.issubdtype(weight.dtype, jnp.floating):
    return f'has a {kind.weight_name} of dtype {weight.dtype}'
  reason = kind.why_not(layer)
  if reason is None and hasattr(layer, 'lora'):
    return f'is a {name} with an attribute `lora` of its own'
  return reason and f'cannot be adapted: {reason}'


def _refusals(modules: dict[Path, tp.Any]) -> dict[Path, str]:
  """Layers that must not be adapted, though they could be, and why."""
  refused = {}
  inside = {
    id(child): node
    for node in modules.values()
    if isinstance(node, (nnx.WeightNorm, nnx.SpectralNorm, nnx.LoRA))
    for child in modules_of(node).values()
  }
  for path, node in modules.items():
    leave = f'or leave it out: targets=nnx.Not(nnx.filterlib.PathIn({path!r})).'
    if isinstance(node, LoRALayer):
      refused[path] = (
        'is adapted already. Merge the first adapter with '
        f'nnx_ext.merge_lora(model), take it off with remove_lora, {leave}'
      )
    elif isinstance(node, nnx.LoRALinear):
      refused[path] = (
        f'is an nnx.LoRALinear, which has an adapter of its own. Make it an '
        f'nnx.Linear, {leave}'
      )
    elif id(node) in inside and kind_of(node) is not None:
      wrapper = type(inside[id(node)]).__name__
      refused[path] = (
        f'is wrapped in an nnx.{wrapper}, which changes its weight or output '
        f'by itself. Adapt the plain layer, {leave}'
      )
  return refused


def _target(api: str, path: Path, layer: tp.Any, options: LoRAOptions):
  """A layer with its kind, if its weight is stacked as it can be."""
  kind: tp.Any = kind_of(layer)
  own, shape = kind.shape(layer), kind.weight(layer).shape
  stack, bias = kind.stack(layer), getattr(layer, 'bias', None)
  behind = bias is None or bias.shape[: len(stack)] == stack
  if shape[len(shape) - len(own) :] != own or not behind:
    raise ValueError(
      f'{api}: the {kind.weight_name} of {_words.path(path)} has shape '
      f'{shape}, which is not {own} behind axes of stacked layers. Layers '
      'that nnx.vmap stacks on another axis than 0 are adapted inside of it, '
      'or stacked with out_axes=0.'
    )
  return Target(path, layer, kind, options)


def _check_each_has_one(
  api: str,
  targets: Filter,
  modules: dict[Path, tp.Any],
  wanted: list[Path],
  found: list[Target],
):
  """Raises for a module that was chosen, if nothing in it can be adapted."""
  kinds = ', '.join(sorted(kind.plain.__name__ for kind in KINDS))
  instead = (
    f'LoRA is for {kinds}; on any other weight use nnx_ext.parametrize(model, '
    '{filter: lambda w: LowRankUpdate(w, rank=8)}).'
  )
  # These say what to leave out, and ask for whatever there is of the rest.
  if targets in (..., True) or isinstance(targets, nnx.Not):
    if not found:
      reason: str | None = 'has no layer that can be adapted'
      if kind_of(modules.get(())) is not None:
        reason = _why_not(modules[()])
      raise ValueError(f'{api}: {_words.path(())} {reason}. {instead}')
    return
  chosen = set(wanted)
  for path in wanted:
    if any(path[:end] in chosen for end in range(len(path))):
      continue  # it was chosen with what it stands in
    if any(target.path[: len(path)] == path for target in found):
      continue
    reason = _why_not(modules[path])
    raise ValueError(f'{api}: {_words.path(path)} {reason}. {instead}')


def _with_sharers(
  api: str, model: tp.Any, able: dict[Path, tp.Any], found: list[Target]
) -> list[Target]:
  """The layers found, and those that share a weight with one of them."""
  first: dict[int, Target] = {}
  for target in found:
    first.setdefault(id(target.weight), target)
  result = []
  for path, layer in able.items():
    kind: tp.Any = kind_of(layer)
    owner = first.get(id(kind.weight(layer)))
    if owner is not None:
      target = _target(api, path, layer, owner.options)
      target.shares = None if owner.path == path else owner.path
      result.append(target)
  _check_holders(api, model, result)
  return result


def _check_holders(api: str, model: tp.Any, found: list[Target]):
  """Raises if a weight is held by something that would read it unadapted."""
  layers = {id(target.layer) for target in found}
  weights = {id(target.weight): target for target in found}
  for paths in nnx.find_duplicates(model):
    target = weights.get(id(_at(model, paths[0])))
    if target is None:
      continue
    for path in paths:
      if id(_at(model, path[:-1])) not in layers:
        raise ValueError(
          f'{api}: the weight of {_words.path(target.path)} is also held at '
          f'{_words.path(path)}, where it would be read without its adapter. '
          'Call the layer there instead, like `embed.attend(x)`, or leave it '
          f'out: targets=nnx.Not(nnx.filterlib.PathIn({target.path!r})).'
        )


def _at(model: tp.Any, path: Path) -> tp.Any:
  """What stands at a path of a model."""
  for part in path:
    is_dict = isinstance(model, tp.Mapping)
    by_name = isinstance(part, str) and hasattr(model, part) and not is_dict
    model = getattr(model, part) if by_name else model[part]
  return model


def _override(
  api: str,
  found: list[Target],
  patterns: Patterns,
  modules: dict[Path, tp.Any],
):
  """Gives each layer the options of the first pattern that matches it."""
  if not isinstance(patterns, tp.Mapping):
    raise TypeError(
      f'{api}: `patterns` must be a dict of filters to options, like '
      "{nnx.PathContains('query'): dict(rank=4)}, got "
      f'{_words.value(patterns)}.'
    )
  left = list(found)
  for filter, options in patterns.items():
    text = f'`patterns` {_words.filter_(filter)}'
    if not isinstance(options, tp.Mapping):
      raise TypeError(
        f'{api}: {text} must have a dict of options, like dict(rank=4), got '
        f'{_words.value(options)}.'
      )
    unknown = [name for name in options if name not in _OVERRIDES]
    if unknown:
      raise ValueError(
        f'{api}: {text} has unknown options {unknown}; known are '
        f'{_OVERRIDES}.{_words.did_you_mean(unknown, _OVERRIDES)}'
      )
    paths = set(_matches(api, '`patterns`', filter, modules))
    # Layers that share a weight have one adapter, so options of one are all's.
    weights = {id(target.weight) for target in left if target.path in paths}
    matched = [target for target in left if id(target.weight) in weights]
    if not matched:
      raise ValueError(
        f'{api}: {text} matches none of the layers that `targets` chose and '
        f'earlier patterns left: '
        f'{_words.some(_words.path(target.path) for target in left)}.'
      )
    for target in matched:
      left.remove(target)
      changed = dataclasses.replace(target.options, **options)
      target.options = changed.check(f'{api}: {text}')
