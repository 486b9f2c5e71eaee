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
import typing as tp

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ext import _words
from nnx_ext.lora import _config, _peft, _store
from nnx_ext.lora._contents import match
from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._kinds import kind_of
from nnx_ext.lora._layer import LoRALayer
from nnx_ext.lora._options import LoRAOptions
from nnx_ext.lora._targets import adapted_layers, find_targets, modules_of
from nnx_ext.lora._torch_names import Path, Rename, TorchNames
from nnx_ext.lora.surgery import attach, check_rngs, to_plain_lora

M = tp.TypeVar('M')


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

  A head that was trained whole is written beside the adapters, and read with
  them::

    >>> base = nnx.Sequential(
    ...   nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    ... )
    >>> model = nnx_ext.apply_lora(
    ...   base, rank=1, targets=nnx.PathContains(0), rngs=nnx.Rngs(2)
    ... )
    >>> model.layers[1].bias[...] += 1.0
    >>> nnx_ext.save_lora(model, directory, modules_to_save=['layers/1'])
    >>> nnx_ext.load_lora(base, directory).layers[1].bias[...]
    Array([1., 1.], dtype=float32)

  See :doc:`the guide on LoRA </guides/lora>`.

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
  folder = _store.folder_of('save_lora', directory)
  adapted_layers('save_lora', model)
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
    reason = _peft.why_not(layer) or _why_not_shared(layer, owner)
    if reason is None and (lora.magnitude is None) != (first.magnitude is None):
      reason = 'has DoRA where others have not, and PEFT has it for all or none'
    if reason is None:
      adapted[name] = lora.rank, alpha
    else:
      refused.append(f'{_words.path(path)} {reason}')
      if layer is not owner:
        continue  # it finds its adapter under the name of the other
      arrays[_peft.settings_key(name)] = np.array(
        [lora.rank, alpha], np.float64
      )
    keys = _peft.layout_of(layer, extended=reason is not None).keys(name)
    values = _peft.layout_of(owner, extended=reason is not None).to_file(lora)
    if layer._kind.axes(layer) != lora.axes:
      values = _peft.turned(values)
    arrays |= {keys[field]: value for field, value in values.items()}
  if refused and not extensions:
    raise ValueError(
      f'save_lora: PEFT has no form for {len(refused)} of {len(layers)} '
      f'adapters: {_words.some(refused)}. With extensions=True these are '
      f'written under keys that begin with {_peft.EXTENSION!r}, which only '
      'load_lora reads.'
    )
  whole = names.whole(modules_to_save)
  for path in whole.values():
    for key, tensor in names.tensors(path).items():
      arrays[key] = tensor.to_file()
      if key.endswith('.running_var'):  # PyTorch counts batches beside it
        count = key.replace('running_var', 'num_batches_tracked')
        arrays[count] = np.zeros((), np.int64)
  config = _config.text(
    adapted,
    names.all_names,
    list(whole),
    use_rslora=first.rslora,
    use_dora=first.magnitude is not None,
    lora_dropout=max(_dropout(layer.lora) for layer in layers.values()),
  )
  _store.write(folder, arrays, config)


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

  A model whose layers have other names in PyTorch needs ``rename``, the same
  for both ways::

    >>> def rename(path):
    ...   return f'bert.encoder.dense_{path[-1]}'
    ...
    >>> nnx_ext.save_lora(model, directory, rename=rename)
    >>> loaded = nnx_ext.load_lora(base, directory, rename=rename)
    >>> bool(jnp.array_equal(loaded(x), model(x)))
    True

  See :doc:`the guide on LoRA </guides/lora>`.

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
  folder = _store.folder_of('load_lora', directory)
  if rngs is not None:
    check_rngs('load_lora', rngs, 'dropout')
  model = nnx.clone(model)
  for path, module in modules_of(model).items():
    if isinstance(module, LoRALayer):
      raise ValueError(
        f'load_lora: {_words.path(path)} is adapted already; load into '
        'nnx_ext.remove_lora(model), or into nnx_ext.merge_lora(model).'
      )
  config = _config.read('load_lora', folder)
  arrays = _store.read(folder / _store.ARRAYS)
  names = TorchNames('load_lora', model, rename)
  adapters, whole = match(folder, names, config, arrays)
  first: dict[int, Path] = {}  # of each weight, the layer that comes first
  for path in adapters:
    layer = names.module(path)
    kind: tp.Any = kind_of(layer)
    first.setdefault(id(kind.weight(layer)), path)
  targets = find_targets(
    'load_lora',
    model,
    LoRAOptions(rank=config.r),
    nnx.filterlib.PathIn(*first.values()),
    {
      nnx.filterlib.PathIn(path): {
        **dataclasses.asdict(adapter.options),
        'dropout': 0.0 if rngs is None else config.lora_dropout,
      }
      for path, adapter in adapters.items()
      if path in first.values()
    },
  )
  streams = nnx.Rngs(params=0)
  if rngs is not None and config.lora_dropout:
    streams = nnx.Rngs(params=0, dropout=rngs.dropout())
  loaded: dict[Path, LoRAFactors] = {}
  for target in targets:
    if target.shares is None:
      loaded[target.path] = target.factors(streams)
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


def _alpha_for(rslora: bool, lora: LoRAFactors) -> float:
  """The alpha that gives an adapter its scale, by one rule for all."""
  if lora.rslora == rslora:
    return lora.alpha
  return lora.scale * (math.sqrt(lora.rank) if rslora else lora.rank)


def _dropout(lora: LoRAFactors) -> float:
  return 0.0 if lora.dropout is None else lora.dropout.rate
