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
"""What an adapter's files hold, matched with the layers of a model."""

import dataclasses
import pathlib
import re
import typing as tp

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ext import _words
from nnx_ext.lora import _config, _peft
from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._options import LoRAOptions
from nnx_ext.lora._store import ARRAYS
from nnx_ext.lora._torch_names import Path, TorchNames


@dataclasses.dataclass
class Adapter:
  """What a file holds for one layer."""

  path: Path
  layout: _peft.Layout
  options: LoRAOptions
  arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def fill(self, lora: LoRAFactors):
    for field, array in self.arrays.items():
      variable = getattr(lora, field)
      value = self.layout.from_file(field, array)
      variable.set_value(jnp.asarray(value, variable.dtype))

  def check_same(self, folder: pathlib.Path, other: 'Adapter'):
    """Raises if another layer of the same weight has another adapter."""
    turned = self.layout.axes != other.layout.axes
    others = _peft.turned(other.arrays) if turned else other.arrays
    is_same = self.options == other.options and all(
      np.array_equal(self.arrays[field], others[field]) for field in self.arrays
    )
    if not is_same:
      raise ValueError(
        f'load_lora: {_words.path(self.path)} and {_words.path(other.path)} '
        f'share a weight, and so one adapter, but {str(folder)!r} has two '
        'that differ; untie the weight, or leave one out.'
      )


def match(
  folder: pathlib.Path,
  names: TorchNames,
  config: _config.Config,
  arrays: _peft.Arrays,
) -> tuple[dict[Path, Adapter], list[tuple[_peft.Tensor, np.ndarray]]]:
  """What a file holds, by layer, once all of it is known to fit."""
  report = _Report(folder, names)
  left = dict(arrays)
  adapters: dict[Path, Adapter] = {}
  for name, path in names.layers.items():
    for extended in (False, True):
      layout = _peft.layout_of(names.module(path), extended)
      if path not in adapters and not left.keys().isdisjoint(
        layout.keys(name).values()
      ):
        adapters[path] = _adapter(report, names, config, left, name, layout)
  whole = []
  for path in names.whole_by_name(config.modules_to_save):
    for key, tensor in names.own_tensors(path).items():
      array = left.pop(key, None)
      left.pop(f'{key.rpartition(".")[0]}.num_batches_tracked', None)
      if array is None:
        report.missing.append(key)
      elif report.fits(key, array, tensor.shape, tensor.variable.dtype):
        whole.append((tensor, array))
  for key in left:
    is_own = _is_base(left, key, names)
    if is_own is None:
      report.unexpected.append(key)
    elif not is_own:
      report.misshaped.append(f'{key!r} is the weight of another base')
  report.raise_if_any()
  if not adapters:
    raise ValueError(
      f'load_lora: {str(folder / ARRAYS)!r} holds no adapter of this model.'
    )
  return adapters, whole


def _adapter(
  report: '_Report',
  names: TorchNames,
  config: _config.Config,
  left: _peft.Arrays,
  name: str,
  layout: _peft.Layout,
) -> Adapter:
  """The adapter of one layer, its arrays taken out of what is left."""
  path = names.layers[name]
  layer, keys = names.module(path), layout.keys(name)
  has_magnitude = config.use_dora
  rank, alpha = config.rank_of(name), config.alpha_of(name)
  if layout.extended:
    has_magnitude = keys['magnitude'] in left
    settings = left.pop(_peft.settings_key(name), None)
    if settings is None or not _are_settings(settings):
      report.missing.append(_peft.settings_key(name))
      settings = np.array([rank, alpha])
    rank, alpha = int(settings[0]), float(settings[1])
  elif (reason := _peft.why_not(layer)) is not None:
    report.misshaped.append(f'{_words.path(path)} {reason}')
  zeros = nnx.initializers.zeros  # nothing is drawn that is overwritten
  options = LoRAOptions(
    rank=rank,
    alpha=alpha,
    rslora=config.use_rslora,
    dora=has_magnitude,
    a_initializer=zeros,
    b_initializer=zeros,
  )
  adapter = Adapter(path, layout, options)
  wanted = layout.shapes(rank, layout.kind.stack(layer))
  if not has_magnitude:
    del wanted['magnitude']
  for field, shape in wanted.items():
    array = left.pop(keys[field], None)
    if array is None:
      report.missing.append(keys[field])
    elif report.fits(keys[field], array, shape):
      adapter.arrays[field] = array
  return adapter


def _are_settings(settings: np.ndarray) -> bool:
  """Whether an array is a rank and an alpha."""
  is_pair = settings.shape == (2,) and np.all(np.isfinite(settings))
  return bool(is_pair and 1 <= settings[0] < 2**31 and settings[1] > 0)


class _Report:
  """All that does not fit between a file and a model."""

  def __init__(self, folder: pathlib.Path, names: TorchNames):
    self._folder = folder
    self._names = names
    self.missing: list[str] = []
    self.unexpected: list[str] = []
    self.misshaped: list[str] = []

  def fits(
    self,
    key: str,
    array: np.ndarray,
    shape: tuple[int, ...],
    dtype: tp.Any = jnp.float32,
  ) -> bool:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    kind = jnp.floating if is_float else jnp.integer
    if array.shape == shape and jnp.issubdtype(array.dtype, kind):
      return True
    self.misshaped.append(
      f'{key!r} is {array.dtype} of shape {array.shape} and not '
      f'{kind.__name__} of shape {shape}'
    )
    return False

  def raise_if_any(self):
    parts = []
    if self.missing:
      parts.append(f'missing are {_words.some(map(repr, self.missing))}')
    if self.unexpected:
      parts.append(f'unexpected are {_words.some(map(repr, self.unexpected))}')
    if self.misshaped:
      parts.append(f'not fitting are {_words.some(self.misshaped)}')
    if not parts:
      return
    hint = ''
    if self.unexpected:
      named = dict.fromkeys(map(_module_of, self.unexpected))
      unknown = [name for name in named if name not in self._names.layers]
      hint = _words.did_you_mean(unknown, self._names.layers) or (
        ' The layers of this model are called '
        f'{_words.some(map(repr, self._names.layers))}; `rename` maps the path '
        'of each to its name in PyTorch.'
      )
    raise ValueError(
      f'load_lora: {str(self._folder / ARRAYS)!r} does not fit the model: '
      f'{"; ".join(parts)}.{hint}'
    )


def _is_base(left: _peft.Arrays, key: str, names: TorchNames) -> bool | None:
  """Whether a base weight, which PEFT may save too, is the model's own.

  None if the array is no base weight.
  """
  name, is_base, _ = key.removeprefix(_peft.PREFIX).partition('.base_layer.')
  if not is_base or name not in names.layers:
    return None
  own = names.own_tensors(names.layers[name])
  tensor = own.get(key.replace('.base_layer.', '.'))
  if tensor is None:
    return None
  return tensor.shape == left[key].shape and np.array_equal(
    tensor.to_file(), left[key]
  )


def _module_of(key: str) -> str:
  """The module that a key seems to name."""
  pattern = r'\.(lora_|magnitude|rank_and|weight$|bias$).*'
  name = key.removeprefix(_peft.PREFIX).removeprefix(_peft.EXTENSION)
  return re.sub(pattern, '', name)
