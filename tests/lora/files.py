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
"""What the tests of files share: directories, written and read by hand."""

import json
import pathlib
import shutil
import tempfile
import typing as tp

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

import nnx_ext
from tests.errors import ErrorsTestCase
from tests.lora.trees import assert_same, fill, leaves, move, noise

CONFIG, MODEL = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'

Arrays = dict[str, np.ndarray]


def tensors(directory: pathlib.Path) -> Arrays:
  return safetensors.numpy.load_file(directory / MODEL)


def config(directory: pathlib.Path) -> dict[str, tp.Any]:
  return json.loads((directory / CONFIG).read_text())


def write(directory: pathlib.Path, arrays: Arrays, **options) -> pathlib.Path:
  """A directory as PEFT writes it, of these tensors and options."""
  directory.mkdir(exist_ok=True)
  arrays = {key: np.array(array, order='C') for key, array in arrays.items()}
  safetensors.numpy.save_file(arrays, directory / MODEL)
  options = {'peft_type': 'LORA', 'r': 2, 'target_modules': ['x'], **options}
  (directory / CONFIG).write_text(json.dumps(options))
  return directory


def pair(
  name: str, weight: tuple[int, int], rank: int = 2, seed: int = 0
) -> Arrays:
  """A Linear's factors by PEFT's keys, for an nnx kernel of this shape."""
  a, b = (rank, weight[0]), (weight[1], rank)
  return {
    f'{PREFIX}{name}.lora_A.weight': np.asarray(noise(a, seed)),
    f'{PREFIX}{name}.lora_B.weight': np.asarray(noise(b, seed + 1)),
  }


def make(build: tp.Callable[[nnx.Rngs], tp.Any]) -> tp.Any:
  """A model of random numbers that come from numpy: nothing to compile."""
  return fill(nnx.eval_shape(lambda: build(nnx.Rngs(0))))


def adapt(model: tp.Any, **options) -> tp.Any:
  """An adapted model, each of its LoRAParams moved to random numbers."""
  zeros = lambda key, shape, dtype: jnp.asarray(np.zeros(shape, dtype))
  start = {} if 'init' in options else {'a_initializer': zeros}
  start |= {} if 'init' in options else {'b_initializer': zeros}
  options = {'rank': 2, 'rngs': nnx.Rngs(1), **start, **options}
  return move(nnx_ext.apply_lora(model, **options))


def same(actual: tp.Any, expected: tp.Any) -> None:
  """One model is another, bit for bit."""
  assert nnx.graphdef(actual) == nnx.graphdef(expected)
  assert_same(leaves(actual), leaves(expected))


class Net(nnx.Module):
  """Two Linears, one of them deeper, and a norm."""

  def __init__(self, rngs):
    self.lin = nnx.Linear(3, 4, rngs=rngs)
    self.net = nnx.Dict(lin=nnx.Linear(4, 5, rngs=rngs))
    self.norm = nnx.LayerNorm(4, rngs=rngs)

  def __call__(self, x):
    return self.net.lin(self.norm(self.lin(x)))


class FilesTestCase(ErrorsTestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.root)

  @property
  def directory(self) -> pathlib.Path:
    return self.root / 'adapter'

  def saved(self, model: tp.Any, **options) -> pathlib.Path:
    nnx_ext.save_lora(model, self.directory, **options)
    return self.directory

  def written(self, arrays: Arrays, **options) -> pathlib.Path:
    return write(self.directory, arrays, **options)
