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
"""A torch model and the same model in NNX, which hold the same numbers."""

import abc
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx


class Twins(abc.ABC):
  """Two models, each made anew by every call, and what both are called with.

  Attributes:
    inputs: what the torch model is called with.
    fan_in_fan_out: whether the torch model's linear weights are (in, out).
    rename: from a path in NNX to a name in torch, or None where they agree.
  """

  inputs: np.ndarray
  fan_in_fan_out = False
  rename = None

  @abc.abstractmethod
  def make_torch(self) -> torch.nn.Module:
    """The torch model, always with the same weights."""

  @abc.abstractmethod
  def make_nnx(self) -> nnx.Module:
    """The NNX model, with any weights."""

  def run_torch(self, model: torch.nn.Module) -> torch.Tensor:
    return model(torch.from_numpy(self.inputs))

  def run_nnx(self, model: nnx.Module) -> jax.Array:
    return model(jnp.asarray(self.inputs))

  def name(self, path: tuple) -> str:
    return (self.rename or default_name)(path)

  def load_nnx(self) -> nnx.Module:
    """The NNX model with the torch model's weights."""
    return self.read(self.make_torch().state_dict())

  def read(self, tensors: tp.Mapping[str, torch.Tensor]) -> nnx.Module:
    """The NNX model with weights of the torch model."""
    model = nnx.eval_shape(self.make_nnx)
    for (*path, last), variable in nnx.to_flat_state(nnx.state(model)):
      module = model
      for key in path:
        module = module[key] if isinstance(key, int) else getattr(module, key)
      end = 'bias' if last == 'bias' else 'weight'
      value = tensors[f'{self.name(tuple(path))}.{end}'].detach().numpy()
      if last == 'kernel' and isinstance(module, nnx.Conv):
        value = np.moveaxis(value, (1, 0), (-2, -1))
      elif last == 'kernel' and not self.fan_in_fan_out:
        value = value.T
      variable.set_value(jnp.array(value.reshape(variable.shape)))
    return model


def default_name(path: tuple) -> str:
  return '.'.join(map(str, path))


def logits(twins: Twins, model: torch.nn.Module | nnx.Module) -> np.ndarray:
  """What either of the models makes of the inputs."""
  if isinstance(model, nnx.Module):
    model.eval()
    return np.asarray(twins.run_nnx(model))
  model.eval()
  with torch.no_grad():
    return twins.run_torch(model).numpy()
