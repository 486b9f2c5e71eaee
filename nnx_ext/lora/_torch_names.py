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
"""The PyTorch names of a model's modules, and what they hold."""

import itertools
import typing as tp

from flax import nnx

from nnx_ext import _words
from nnx_ext._names import Names
from nnx_ext.lora import _peft
from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._kinds import kind_of
from nnx_ext.lora._layer import LoRALayer
from nnx_ext.lora._targets import modules_of

Path = tuple[tp.Any, ...]
Rename = tp.Callable[[Path], str | None]


class TorchNames:
  """The names that PEFT calls a model's modules by.

  Attributes:
    layers: the layers that are or could be adapted, by name, with their paths.
  """

  def __init__(self, api: str, model: tp.Any, rename: Rename | None):
    if rename is not None and not callable(rename):
      raise TypeError(
        f'{api}: `rename` must be a function of a path, a tuple, to a name, '
        "like lambda path: '.'.join(map(str, path)), got "
        f'{_words.value(rename)}.'
      )
    self._api = api
    self._model = model
    self._rename = rename
    self._modules = modules_of(model)
    self._everywhere = _everywhere(model, self._modules)
    self.layers: dict[str, Path] = {}
    for path, module in self._modules.items():
      if kind_of(module) is None or not self._has(path):
        continue
      name = self.of(path)
      if name in self.layers:
        raise ValueError(
          f'{api}: `rename` calls both {_words.path(self.layers[name])} and '
          f'{_words.path(path)} {name!r}; each needs a name of its own.'
        )
      self.layers[name] = path

  def of(self, path: Path) -> str:
    """The name of the module at a path."""
    if self._rename is None:
      return '.'.join(map(str, path))
    name = self._rename(path)
    if not isinstance(name, str):
      raise TypeError(
        f'{self._api}: `rename` must return the name of the PyTorch module '
        f"at {_words.path(path)}, like 'encoder.layer.0.dense', got "
        f'{_words.value(name)}.'
      )
    return name

  def _has(self, path: Path) -> bool:
    """Whether the module at a path has a counterpart at all."""
    return self._rename is None or self._rename(path) is not None

  def module(self, path: Path) -> tp.Any:
    return self._modules[path]

  def whole(self, paths: tp.Sequence[str | Path]) -> dict[str, Path]:
    """The modules that are saved whole, by name."""
    if isinstance(paths, str):
      paths = [paths]
    is_list = isinstance(paths, (list, tuple))
    if not is_list or not all(isinstance(path, (str, tuple)) for path in paths):
      raise TypeError(
        f'{self._api}: `modules_to_save` must be a list of paths, like '
        f"['classifier'], got {_words.value(paths)}."
      )
    places = Names(self._model, self._modules)
    found = {}
    for path in paths:
      wanted = tuple(path.split('/')) if isinstance(path, str) else path
      place = places.resolve(wanted)
      if place is None:
        known = ['/'.join(map(str, known)) for known in self._modules if known]
        hint = _words.did_you_mean(['/'.join(map(str, wanted))], known)
        raise ValueError(
          f'{self._api}: `modules_to_save` has {_words.path(wanted)}, and no '
          f'module stands there.{hint}'
        )
      found[self._checked(place)] = place
    return found

  def whole_by_name(self, ends: tp.Iterable[str]) -> list[Path]:
    """The modules that PEFT saves whole, as a name that they are in ends so.

    Names that no module has are left out, as PEFT does.
    """
    ends = tuple(ends)
    return [
      path
      for path, module in self._everywhere.items()
      if _has_variables(module) and self._has(path)
      if any(name.endswith(ends) for name in _outer_names(self.of(path)))
    ]

  def tensors(self, path: Path) -> dict[str, _peft.Tensor]:
    """All that a module and those in it hold, by the keys of a file."""
    found: dict[str, _peft.Tensor] = {}
    for inner, module in modules_of(self._modules[path]).items():
      if _has_variables(module):
        found |= self._tensors((*path, *inner), module)
    return found

  def own_tensors(self, path: Path) -> dict[str, _peft.Tensor]:
    """What a module itself holds, by the keys of a file."""
    return self._tensors(path, self._everywhere[path])

  def _tensors(self, path: Path, module: tp.Any) -> dict[str, _peft.Tensor]:
    kind = kind_of(module)
    reason = None
    if isinstance(module, nnx.ConvTranspose):
      reason = 'is a ConvTranspose, whose kernel PyTorch turns round'
    elif kind is not None and kind.stack(module):
      reason = 'is a stack of layers, for which PyTorch has no form'
    if reason is not None:
      raise ValueError(
        f'{self._api}: {_words.path(path)} {reason}; leave it out of '
        '`modules_to_save`.'
      )
    tensors = _peft.tensors(module, kind.axes(module) if kind else None)
    prefix = f'{_peft.PREFIX}{self.of(path)}'
    return {f'{prefix}.{name}': tensor for name, tensor in tensors.items()}

  @property
  def all_names(self) -> set[str]:
    """The names of all that hold parameters, and of all that these are in."""
    return self._outer_names_of(self._modules)

  def _outer_names_of(self, paths: tp.Iterable[Path]) -> set[str]:
    holders = [p for p in paths if _has_variables(self._modules[p])]
    names = [self.of(path) for path in holders if self._has(path)]
    return {outer for name in names for outer in _outer_names(name)}

  def _checked(self, path: Path) -> str:
    """The name of a module that can be saved whole."""
    name = self.of(path)
    inner = {id(module) for module in modules_of(self._modules[path]).values()}
    outside = []
    for place, module in self._modules.items():
      if id(module) not in inner:
        outside.append(place)
      elif isinstance(module, LoRALayer):
        raise ValueError(
          f'{self._api}: `modules_to_save` has {_words.path(path)}, in which '
          f'{_words.path(place)} is adapted; PEFT trains a module whole or '
          'adapts it. Leave one out.'
        )
    for other in self._outer_names_of(outside) - {*_outer_names(name)}:
      if other.endswith(name):
        raise ValueError(
          f'{self._api}: `modules_to_save` has {_words.path(path)}, named '
          f'{name!r}, and PEFT would take {other!r} for it too, as that ends '
          'in the same letters; give it a longer name by `rename`.'
        )
    return name


def _everywhere(
  model: tp.Any, modules: dict[Path, tp.Any]
) -> dict[Path, tp.Any]:
  """The modules under each of their paths, and not just the first."""
  found = dict(modules)
  for group in nnx.find_duplicates(model):
    for one, other in itertools.permutations(group, 2):
      for path, module in modules.items():
        if path[: len(one)] == one:
          found.setdefault((*other, *path[len(one) :]), module)
  return found


def _outer_names(name: str) -> list[str]:
  """A dotted name, and those of all that it is in."""
  parts = name.split('.')
  return ['.'.join(parts[:end]) for end in range(1, len(parts) + 1)]


def _has_variables(module: tp.Any) -> bool:
  """Whether a module holds Variables itself, other than an adapter's."""
  if isinstance(module, LoRAFactors):
    return False
  return any(isinstance(x, nnx.Variable) for x in vars(module).values())
