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
"""Adapters in files, in the layout of Hugging Face's PEFT."""

import dataclasses
import math
import os
import pathlib
import re
import typing as tp

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ext import _words
from nnx_ext.lora import _config, _peft
from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._kinds import kind_of
from nnx_ext.lora._layer import LoRALayer
from nnx_ext.lora._options import LoRAOptions
from nnx_ext.lora._targets import adapted_layers, find_targets, modules_of
from nnx_ext.lora._torch_names import Path, Rename, TorchNames
from nnx_ext.lora.surgery import attach, to_plain_lora

M = tp.TypeVar('M')

FILE = 'adapter_model.safetensors'


def save_lora(
  model: tp.Any,
  directory: str | os.PathLike,
  *,
  rename: Rename | None = None,
  modules_to_save: tp.Sequence[str | Path] = (),
  extensions: bool = False,
):
  """Writes a model's adapters in the layout of Hugging Face's PEFT.

  The directory gets ``adapter_config.json`` and ``adapter_model.safetensors``,
  which ``peft.PeftModel.from_pretrained(torch_model, directory)`` loads, with
  PEFT's names and orientations. A Linear, and a LinearGeneral or Einsum whose
  weight is a matrix from some axes to others, are PEFT's Linear; an Embed is
  its Embedding; a Conv its Conv1d, Conv2d or Conv3d.

  Example::

    >>> from flax import nnx
    >>> import json, pathlib, tempfile
    >>> import nnx_ext
    ...
    >>> base = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> model = nnx_ext.apply_lora(base, rank=1, rngs=nnx.Rngs(1))
    >>> directory = tempfile.mkdtemp()
    >>> nnx_ext.save_lora(
    ...   model, directory, rename=lambda path: f'bert.dense.{path[-1]}'
    ... )
    >>> config = pathlib.Path(directory, 'adapter_config.json').read_text()
    >>> json.loads(config)['target_modules']
    ['bert.dense.0']

  Args:
    model: a model that has adapted layers.
    directory: where to write; it is made if it is not there.
    rename: a function of a layer's path in the model, a tuple, to the name of
      the module in PyTorch, or to None if there is none; by default the path
      joined by dots.
    modules_to_save: paths of modules that were trained whole, like
      ``'classifier'``; all of their parameters and statistics are written.
    extensions: whether to write what PEFT has no form for, under keys that
      begin with ``nnx_ext.``: ConvTranspose, groups, batch axes, masks,
      dilations, stacked layers. PEFT passes over these keys in silence, and
      :func:`load_lora` reads them.

  Returns:
    None. A weight that two layers share is written under the names of both.
    PEFT adapts modules and not weights: what calls one layer in two places, as
    a tied embedding is by ``attend``, it adapts in the first place only.

  Raises:
    ValueError: if the model has no adapted layer, PEFT has no form for one and
      ``extensions`` is False, no module stands at a path of
      ``modules_to_save``, or two layers get one name.
    TypeError: if ``rename`` returns something else than a string.
  """
  model = to_plain_lora(model)
  names = TorchNames('save_lora', model, rename)
  layers = adapted_layers('save_lora', model)
  owners = _owners(layers.values())
  first = next(iter(layers.values())).lora
  adapted: dict[str, tuple[int, float]] = {}
  arrays: _peft.Arrays = {}
  refused: list[str] = []
  for path, layer in layers.items():
    lora, name = layer.lora, names.of(path)
    owner = owners[id(lora)]
    alpha = _alpha_for(first.rslora, lora)
    reason = _why_not(layer) or _why_not_shared(layer, owner)
    if reason is None and (lora.magnitude is None) != (first.magnitude is None):
      reason = 'has DoRA where others have not, and PEFT has it for all or none'
    if reason is None:
      adapted[name] = lora.rank, alpha
    else:
      refused.append(f'{_words.path(path)} {reason}')
      if layer is not owner:
        continue  # it finds its adapter under the name of the other
      arrays[_settings(name)] = np.array([lora.rank, alpha], np.float64)
    keys = _layout(layer, extended=reason is not None).keys(name)
    values = _layout(owner, extended=reason is not None).to_file(lora)
    if layer._kind.axes(layer) != lora.axes:
      values = _turned(values)
    arrays |= {keys[field]: value for field, value in values.items()}
  if refused and not extensions:
    raise ValueError(
      f'save_lora: PEFT has no form for {len(refused)} of {len(layers)} '
      f'adapters: {_some(refused)}. With extensions=True these are written '
      f'under keys that begin with {_peft.EXTENSION!r}, which only load_lora '
      'reads.'
    )
  whole = names.whole(modules_to_save)
  for path in whole.values():
    for key, tensor in names.tensors(path).items():
      arrays[key] = tensor.to_file()
      if key.endswith('.running_var'):  # PyTorch counts batches beside it
        count = key.replace('running_var', 'num_batches_tracked')
        arrays[count] = np.zeros((), np.int64)
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  _write(folder / FILE, arrays)
  _config.write(
    folder,
    adapted,
    names.all_names,
    list(whole),
    use_rslora=first.rslora,
    use_dora=first.magnitude is not None,
    lora_dropout=max(_dropout(layer.lora) for layer in layers.values()),
  )


def load_lora(
  model: M,
  directory: str | os.PathLike,
  *,
  rename: Rename | None = None,
  rngs: nnx.Rngs | None = None,
) -> M:
  """A copy of a plain model with the adapters that a directory holds.

  Reads what :func:`save_lora` writes, and PEFT's ``save_pretrained``. Here an
  adapter belongs to a weight: one on an embedding acts in ``attend`` too. Which
  layers are adapted follows from the arrays; ranks, scales and DoRA are checked
  against the config. All that does not fit is reported at once, before
  anything is loaded.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext, tempfile
    ...
    >>> base = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> model = nnx_ext.apply_lora(base, rank=1, rngs=nnx.Rngs(1))
    >>> model.layers[0].lora.lora_b[...] = jnp.ones((1, 3))
    >>> directory = tempfile.mkdtemp()
    >>> nnx_ext.save_lora(model, directory)
    >>> loaded = nnx_ext.load_lora(base, directory)
    >>> x = jnp.ones((1, 2))
    >>> bool(jnp.array_equal(loaded(x), model(x)))
    True

  Args:
    model: a plain model, of the base that the adapters were trained on. It is
      not changed.
    directory: where ``adapter_config.json`` and ``adapter_model.safetensors``
      are.
    rename: a function of a layer's path in the model, a tuple, to the name of
      the module in PyTorch, or to None if there is none; by default the path
      joined by dots.
    rngs: rng keys for the dropout that the config names; without them the
      adapters have none.

  Returns:
    A model as from :func:`apply_lora`, with the loaded factors in float32.

  Raises:
    FileNotFoundError: if one of the files is not there.
    ValueError: if a file is damaged, arrays are missing, unexpected or of
      another shape, the config has an option that changes what an adapter
      computes and is not known here, or the model is adapted already.
    TypeError: if ``rename`` returns something else than a string.
  """
  model = nnx.clone(model)
  for path, module in modules_of(model).items():
    if isinstance(module, LoRALayer):
      raise ValueError(
        f'load_lora: {_words.path(path)} is adapted already; load into '
        'nnx_ext.remove_lora(model), or into nnx_ext.merge_lora(model).'
      )
  folder = pathlib.Path(directory)
  config = _config.read('load_lora', folder)
  arrays = _read(folder / FILE)
  names = TorchNames('load_lora', model, rename)
  adapters, whole = _matched(folder, names, config, arrays)
  targets = find_targets(
    'load_lora',
    model,
    LoRAOptions(rank=config.r),
    nnx.filterlib.PathIn(*adapters),
    {
      nnx.filterlib.PathIn(path): {
        **dataclasses.asdict(adapter.options),
        'dropout': 0.0 if rngs is None else config.lora_dropout,
      }
      for path, adapter in adapters.items()
    },
  )
  loaded: dict[Path, LoRAFactors] = {}
  for target in targets:
    if target.shares is None:
      loaded[target.path] = target.factors(rngs or nnx.Rngs(0))
      adapters[target.path].fill(loaded[target.path])
  for target in targets:
    lora = loaded[target.path if target.shares is None else target.shares]
    if target.shares is not None and target.path in adapters:
      adapters[target.path].check_same(folder, adapters[target.shares])
    attach(target.layer, lora)
  for tensor, array in whole:
    variable = tensor.variable
    variable.set_value(jnp.asarray(tensor.from_file(array), variable.dtype))
  return model


@dataclasses.dataclass
class _Adapter:
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

  def check_same(self, folder: pathlib.Path, other: '_Adapter'):
    """Raises if another layer of the same weight has other arrays."""
    turned = self.layout.axes != other.layout.axes
    others = _turned(other.arrays) if turned else other.arrays
    if not all(np.array_equal(self.arrays[f], others[f]) for f in self.arrays):
      raise ValueError(
        f'load_lora: {_words.path(self.path)} and {_words.path(other.path)} '
        f'share a weight, and so one adapter, but {str(folder)!r} has two '
        'that differ; untie the weight, or leave one out.'
      )


def _turned(arrays: _peft.Arrays) -> _peft.Arrays:
  """The factors of the transposed weight."""
  return {'lora_a': arrays['lora_b'].T, 'lora_b': arrays['lora_a'].T}


def _matched(
  folder: pathlib.Path,
  names: TorchNames,
  config: _config.Config,
  arrays: _peft.Arrays,
) -> tuple[dict[Path, _Adapter], list[tuple[_peft.Tensor, np.ndarray]]]:
  """What a file holds, by layer, once all of it is known to fit."""
  report = _Report(folder, names)
  left = dict(arrays)
  adapters: dict[Path, _Adapter] = {}
  for name, path in names.layers.items():
    for extended in (False, True):
      layer = names.module(path)
      layout = _layout(layer, extended)
      keys = {f: k for f, k in layout.keys(name).items() if k in left}
      if not keys:
        continue
      reason = None if extended else _why_not(layer)
      if reason is not None:
        report.misshaped.append(f'{_words.path(path)} {reason}')
      settings = left.pop(_settings(name), None) if extended else None
      options = _options(config, name, settings)
      if options is None:
        report.missing.append(_settings(name))
        continue
      adapter = _Adapter(path, layout, options)
      stack = layout.kind.stack(layer)
      wanted = layout.shapes(options.rank, stack)
      if not extended and config.use_dora or 'magnitude' in keys and extended:
        adapter.options = dataclasses.replace(options, dora=True)
      else:
        wanted.pop('magnitude')
      for field, shape in wanted.items():
        key = layout.keys(name)[field]
        array = left.pop(key, None)
        if array is None:
          report.missing.append(key)
        elif report.fits(key, array, shape):
          adapter.arrays[field] = array
      adapters[path] = adapter
  whole = []
  for path in names.whole_by_name(config.modules_to_save):
    for key, tensor in names.own_tensors(path).items():
      array = left.pop(key, None)
      left.pop(f'{key.rpartition(".")[0]}.num_batches_tracked', None)
      if array is None:
        report.missing.append(key)
      elif report.fits(key, array, tensor.shape):
        whole.append((tensor, array))
  report.unexpected += [key for key in left if not _is_base(left, key, names)]
  report.raise_if_any()
  if not adapters:
    raise ValueError(
      f'load_lora: {str(folder / FILE)!r} holds no adapter of this model.'
    )
  return adapters, whole


class _Report:
  """All that does not fit between a file and a model."""

  def __init__(self, folder: pathlib.Path, names: TorchNames):
    self._folder = folder
    self._names = names
    self.missing: list[str] = []
    self.unexpected: list[str] = []
    self.misshaped: list[str] = []

  def fits(self, key: str, array: np.ndarray, shape: tuple[int, ...]) -> bool:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    if array.shape == shape and is_float:
      return True
    self.misshaped.append(
      f'{key!r} is {array.dtype} of shape {array.shape} and not of shape '
      f'{shape}'
    )
    return False

  def raise_if_any(self):
    parts = []
    if self.missing:
      parts.append(f'missing are {_some(map(repr, self.missing))}')
    if self.unexpected:
      parts.append(f'unexpected are {_some(map(repr, self.unexpected))}')
    if self.misshaped:
      parts.append(f'not fitting are {_some(self.misshaped)}')
    if not parts:
      return
    hint = ''
    if self.unexpected:
      unknown = [_module_of(key) for key in self.unexpected]
      hint = _words.did_you_mean(unknown, self._names.layers) or (
        f' The layers of this model are called '
        f'{_some(map(repr, self._names.layers))}; `rename` maps the path of '
        'each to its name in PyTorch.'
      )
    raise ValueError(
      f'load_lora: {str(self._folder / FILE)!r} does not fit the model: '
      f'{"; ".join(parts)}.{hint}'
    )


def _is_base(left: _peft.Arrays, key: str, names: TorchNames) -> bool:
  """Whether an array is the model's own weight, which PEFT may save too."""
  name, is_base, _ = key.removeprefix(_peft.PREFIX).partition('.base_layer.')
  if not is_base or name not in names.layers:
    return False
  own = names.own_tensors(names.layers[name])
  tensor = own.get(key.replace('.base_layer.', '.'))
  return (
    tensor is not None
    and tensor.shape == left[key].shape
    and np.array_equal(tensor.to_file(), left[key])
  )


def _options(
  config: _config.Config, name: str, settings: np.ndarray | None
) -> LoRAOptions | None:
  """The options of one layer, or None if its own settings are no good."""
  rank, alpha = config.rank_of(name), config.alpha_of(name)
  if settings is not None:
    if settings.shape != (2,) or not np.all(np.isfinite(settings)):
      return None
    rank, alpha = int(settings[0]), float(settings[1])
  if not (0 < rank < 2**31 and alpha > 0):
    return None
  return LoRAOptions(rank=rank, alpha=alpha, rslora=config.use_rslora)


def _owners(layers: tp.Iterable[LoRALayer]) -> dict[int, LoRALayer]:
  """For each adapter the layer that it was made for."""
  owners: dict[int, LoRALayer] = {}
  for layer in layers:
    if layer.lora.axes == layer._kind.axes(layer):
      owners.setdefault(id(layer.lora), layer)
  return owners


def _why_not_shared(layer: LoRALayer, owner: LoRALayer) -> str | None:
  """Why PEFT has no form for an adapter in a second layer, or None."""
  axes, others = layer._kind.axes(layer), owner.lora.axes
  if axes == others:
    return None
  if axes.turned != others or owner.lora.magnitude is not None:
    return 'shares a weight with a layer to which its axes are something else'
  return None


def _layout(layer: tp.Any, extended: bool) -> _peft.Layout:
  kind: tp.Any = kind_of(layer)
  return _peft.Layout(kind.axes(layer), kind.shape(layer), kind, extended)


def _why_not(layer: tp.Any) -> str | None:
  """Why PEFT has no form for the adapter of a layer, or None if it has."""
  kind: tp.Any = kind_of(layer)
  return _peft.why_not(layer, kind, kind.axes(layer), kind.stack(layer))


def _alpha_for(rslora: bool, lora: LoRAFactors) -> float:
  """The alpha that gives an adapter its scale, by one rule for all."""
  if lora.rslora == rslora:
    return lora.alpha
  return lora.scale * (math.sqrt(lora.rank) if rslora else lora.rank)


def _dropout(lora: LoRAFactors) -> float:
  return 0.0 if lora.dropout is None else lora.dropout.rate


def _settings(name: str) -> str:
  """The key of the rank and alpha of a layer that PEFT has no form for."""
  return f'{_peft.EXTENSION}{name}.rank_and_alpha'


def _module_of(key: str) -> str:
  """The module that a key seems to name."""
  pattern = r'\.(lora_|magnitude|rank_and|weight$|bias$).*'
  name = key.removeprefix(_peft.PREFIX).removeprefix(_peft.EXTENSION)
  return re.sub(pattern, '', name)


def _some(items: tp.Iterable[str]) -> str:
  items = list(items)
  more = f' and {len(items) - 8} more' if len(items) > 8 else ''
  return ', '.join(items[:8]) + more


def _read(path: pathlib.Path) -> _peft.Arrays:
  """The arrays of a file, by key."""
  import safetensors  # Only files need it.

  if not path.is_file():
    raise FileNotFoundError(
      f'load_lora: there is no {path.name} in {str(path.parent)!r}. Adapters '
      'that are pickled (adapter_model.bin) are not read; save them with '
      'safe_serialization=True.'
    )
  try:
    with safetensors.safe_open(path, framework='numpy') as file:
      return {key: file.get_tensor(key) for key in file.keys()}
  except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
    raise ValueError(
      f'load_lora: {str(path)!r} is damaged or no safetensors file: {error}.'
    ) from error


def _write(path: pathlib.Path, arrays: _peft.Arrays):
  """Writes a file whole or not at all."""
  import safetensors.numpy  # Only files need it.

  unfinished = path.with_suffix('.tmp')
  arrays = {key: np.array(array, order='C') for key, array in arrays.items()}
  safetensors.numpy.save_file(arrays, unfinished, metadata={'format': 'pt'})
  os.replace(unfinished, path)
