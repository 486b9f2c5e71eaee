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

import typing as tp

from flax import nnx

from nnx_ext import _words
from nnx_ext._names import Names
from nnx_ext.lora import _peft
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
    self._api = api
    self._model = model
    self._rename = rename
    self._modules = modules_of(model)
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
      for path, module in self._modules.items()
      if _has_variables(module) and self._has(path)
      if any(name.endswith(ends) for name in _outer_names(self.of(path)))
    ]

  def tensors(self, path: Path) -> dict[str, _peft.Tensor]:
    """All that a module and those in it hold, by the keys of a file."""
    found: dict[str, _peft.Tensor] = {}
    for place, module in self._modules.items():
      if place[: len(path)] == path and _has_variables(module):
        found |= self.own_tensors(place)
    return found

  def own_tensors(self, path: Path) -> dict[str, _peft.Tensor]:
    """What a module itself holds, by the keys of a file."""
    module = self._modules[path]
    if isinstance(module, nnx.ConvTranspose):
      raise ValueError(
        f'{self._api}: {_words.path(path)} is a ConvTranspose, whose kernel '
        'PyTorch turns round; leave it out of `modules_to_save`.'
      )
    kind = kind_of(module)
    tensors = _peft.tensors(module, kind.axes(module) if kind else None)
    prefix = f'{_peft.PREFIX}{self.of(path)}'
    return {f'{prefix}.{name}': tensor for name, tensor in tensors.items()}

  @property
  def all_names(self) -> set[str]:
    """The names of the layers, and of all that these are in."""
    return {outer for name in self.layers for outer in _outer_names(name)}

  def _checked(self, path: Path) -> str:
    """The name of a module that can be saved whole."""
    name = self.of(path)
    inside = set()
    for layer, place in self.layers.items():
      if place[: len(path)] != path:
        continue
      inside.add(layer)
      if isinstance(self._modules[place], LoRALayer):
        raise ValueError(
          f'{self._api}: `modules_to_save` has {_words.path(path)}, in which '
          f'{_words.path(place)} is adapted; PEFT trains a module whole or '
          'adapts it. Leave one out.'
        )
    for other in self.all_names - inside - {name}:
      if other.endswith(name):
        raise ValueError(
          f'{self._api}: `modules_to_save` has {_words.path(path)}, named '
          f'{name!r}, and PEFT would take {other!r} for it too, as that ends '
          'in the same letters; give it a longer name by `rename`.'
        )
    return name


def _outer_names(name: str) -> list[str]:
  """A dotted name, and those of all that it is in."""
  parts = name.split('.')
  return ['.'.join(parts[:end]) for end in range(1, len(parts) + 1)]


def _has_variables(module: tp.Any) -> bool:
  return any(isinstance(x, nnx.Variable) for x in vars(module).values())
