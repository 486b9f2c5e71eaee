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
"""PEFT at work, and its files."""

import contextlib
import pathlib
import tempfile
import typing as tp
import unittest
import warnings

import numpy as np
import peft
import torch
from peft.utils.save_and_load import load_peft_weights

from tests.interop import twins

STEPS = 3
LEARNING_RATE = 0.02

torch.set_num_threads(1)  # the models are tiny


@contextlib.contextmanager
def strict(allowed: tp.Iterable[str] = ()):
  """Makes an error of each warning but those that begin like these."""
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    # PEFT asks transformers for something that it is about to rename.
    for message in ('`is_gradient_checkpointing` is deprecated', *allowed):
      warnings.filterwarnings('ignore', message)
    yield


def directory(test: unittest.TestCase) -> pathlib.Path:
  """An empty directory, until the test ends."""
  made = tempfile.TemporaryDirectory()
  test.addCleanup(made.cleanup)
  return pathlib.Path(made.name)


def adapt(
  pair: twins.Twins, options: dict, allowed: tp.Iterable[str] = ()
) -> peft.PeftModel:
  """The torch model with an adapter, as it starts."""
  torch.manual_seed(1)
  with strict(allowed):
    return peft.get_peft_model(pair.make_torch(), peft.LoraConfig(**options))


def train(pair: twins.Twins, model: torch.nn.Module) -> torch.nn.Module:
  """A few steps, after which neither A nor B is zero."""
  model.eval()  # without dropout
  parameters = [p for p in model.parameters() if p.requires_grad]
  optimizer = torch.optim.AdamW(parameters, LEARNING_RATE)
  for _ in range(STEPS):
    outputs = pair.run_torch(model)
    loss = (outputs - torch.from_numpy(goal(outputs.shape))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
  return model


def goal(shape: tuple[int, ...]) -> np.ndarray:
  """Outputs to train towards."""
  return np.random.RandomState(2).randn(*shape).astype(np.float32)


def save(
  model: peft.PeftModel, directory, allowed: tp.Iterable[str] = (), **options
):
  with strict(allowed):
    model.save_pretrained(directory, **options)


def load(
  pair: twins.Twins, directory, allowed: tp.Iterable[str] = ()
) -> peft.PeftModel:
  """The torch model with the adapter of a file; no tensor too many or few."""
  with strict(allowed):
    model = peft.PeftModel.from_pretrained(pair.make_torch(), directory)
    # That warns of missing tensors, and says nothing of unexpected ones.
    result = peft.set_peft_model_state_dict(model, tensors(directory))
  assert not result.unexpected_keys, result.unexpected_keys
  missing = [key for key in result.missing_keys if 'lora_' in key]
  assert not missing, missing
  return model


def tensors(directory) -> dict[str, torch.Tensor]:
  return load_peft_weights(str(directory))


def layers(model: peft.PeftModel) -> dict[str, tuple]:
  """What PEFT makes of the configuration: name to rank, alpha and scale."""
  found = {}
  for name, module in model.named_modules():
    if isinstance(module, peft.tuners.lora.LoraLayer):
      values = module.r, module.lora_alpha, module.scaling, module.use_dora
      found[name] = tuple(value['default'] for value in values)
  return found
