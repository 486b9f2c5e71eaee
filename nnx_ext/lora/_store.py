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
"""An adapter's two files on disk, read and written whole."""

import os
import pathlib
import tempfile
import typing as tp

import numpy as np

from nnx_ext import _words
from nnx_ext.lora import _config
from nnx_ext.lora._peft import Arrays

ARRAYS = 'adapter_model.safetensors'


def folder_of(api: str, directory: tp.Any) -> pathlib.Path:
  """A directory as a path."""
  try:
    return pathlib.Path(directory)
  except TypeError as error:
    raise TypeError(
      f'{api}: `directory` must be a path, got {_words.value(directory)}.'
    ) from error


def read(path: pathlib.Path) -> Arrays:
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
  except (
    safetensors.SafetensorError,
    AttributeError,  # of a dtype that numpy has not
    KeyError,
    OSError,
    TypeError,
    ValueError,
  ) as error:
    raise ValueError(
      f'load_lora: {str(path)!r} is damaged or no safetensors file: {error}.'
    ) from error


def write(folder: pathlib.Path, arrays: Arrays, config: str):
  """Writes both files whole or neither."""
  import safetensors.numpy  # Only files need it.

  folder.mkdir(parents=True, exist_ok=True)
  arrays = {key: np.array(array, order='C') for key, array in arrays.items()}
  with tempfile.TemporaryDirectory(prefix='.', dir=folder) as name:
    scratch = pathlib.Path(name)
    safetensors.numpy.save_file(
      arrays, scratch / ARRAYS, metadata={'format': 'pt'}
    )
    (scratch / _config.FILE).write_text(config, encoding='utf-8')
    for name in (ARRAYS, _config.FILE):
      os.replace(scratch / name, folder / name)
