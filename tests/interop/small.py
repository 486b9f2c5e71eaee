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
"""Small models: convolutions, an embedding, equal names and tied weights."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from tests.interop import twins

CHANNELS, INNER, CLASSES = 3, 6, 4
WINDOW = 3, 5, 2  # of which a model takes as many as it has dimensions
STRIDES = 2, 1, 1
PADDING = 1, 2, 0
SIZES = 7, 6, 5

VOCABULARY, WIDTH = 20, 8


class TorchConvNet(torch.nn.Module):
  def __init__(self, ndim: int):
    super().__init__()
    conv = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[ndim - 1]
    self.conv = conv(
      CHANNELS, INNER, WINDOW[:ndim], STRIDES[:ndim], PADDING[:ndim]
    )
    self.pointwise = conv(INNER, INNER, 1, bias=False)
    self.head = torch.nn.Linear(INNER, CLASSES)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(self.pointwise(torch.tanh(self.conv(x))))
    return self.head(x.flatten(2).mean(2))


class ConvNet(nnx.Module):
  def __init__(self, ndim: int, rngs: nnx.Rngs):
    self.conv = nnx.Conv(
      CHANNELS,
      INNER,
      WINDOW[:ndim],
      STRIDES[:ndim],
      padding=[(size, size) for size in PADDING[:ndim]],
      rngs=rngs,
    )
    self.pointwise = nnx.Conv(
      INNER, INNER, (1,) * ndim, use_bias=False, rngs=rngs
    )
    self.head = nnx.Linear(INNER, CLASSES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = jnp.tanh(self.pointwise(jnp.tanh(self.conv(x))))
    return self.head(jnp.mean(x, axis=range(1, x.ndim - 1)))


class ConvTwins(twins.Twins):
  """Arrays to four classes; torch's channels are first and flax's last."""

  def __init__(self, ndim: int):
    self.ndim = ndim
    shape = 2, CHANNELS, *SIZES[:ndim]
    self.inputs = np.random.RandomState(0).randn(*shape).astype(np.float32)

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    return TorchConvNet(self.ndim)

  def make_nnx(self) -> ConvNet:
    return ConvNet(self.ndim, nnx.Rngs(0))

  def run_nnx(self, model: nnx.Module) -> jax.Array:
    return model(jnp.moveaxis(jnp.asarray(self.inputs), 1, -1))


class TorchWords(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
    self.head = torch.nn.Linear(WIDTH, CLASSES)

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    return self.head(torch.tanh(self.embed_tokens(ids).sum(1)))

  # PEFT asks models from transformers for these.
  def get_input_embeddings(self) -> torch.nn.Module:
    return self.embed_tokens

  def get_output_embeddings(self) -> None:
    return None


class Words(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.embed_tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, ids: jax.Array) -> jax.Array:
    return self.head(jnp.tanh(jnp.sum(self.embed_tokens(ids), axis=1)))


class WordsTwins(twins.Twins):
  """Bags of four ids to four classes."""

  inputs = np.random.RandomState(0).randint(0, VOCABULARY, (5, 4))

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    return TorchWords()

  def make_nnx(self) -> Words:
    return Words(nnx.Rngs(0))


class TorchInner(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.head = torch.nn.Linear(WIDTH, WIDTH)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.head(x))


class TorchNested(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.inner = TorchInner()
    self.head = torch.nn.Linear(WIDTH, CLASSES)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.inner(x))


class Inner(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return jnp.tanh(self.head(x))


class Nested(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.inner = Inner(rngs)
    self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.head(self.inner(x))


class NestedTwins(twins.Twins):
  """Vectors to four classes, by two layers of nearly the same name."""

  inputs = np.random.RandomState(0).randn(5, WIDTH).astype(np.float32)

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    return TorchNested()

  def make_nnx(self) -> Nested:
    return Nested(nnx.Rngs(0))


class TorchTied(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.first = torch.nn.Linear(WIDTH, WIDTH)
    self.second = torch.nn.Linear(WIDTH, WIDTH)
    self.second.weight = self.first.weight

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self.second(torch.tanh(self.first(x)))


class Tied(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.second.kernel = self.first.kernel

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.second(jnp.tanh(self.first(x)))


class TiedTwins(twins.Twins):
  """Vectors to vectors, by the same weight twice."""

  inputs = np.random.RandomState(0).randn(5, WIDTH).astype(np.float32)

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    return TorchTied()

  def make_nnx(self) -> Tied:
    return Tied(nnx.Rngs(0))


class TorchBlocks(torch.nn.Module):
  def __init__(self):
    super().__init__()
    inner = torch.nn.ModuleDict({'dense': torch.nn.Linear(WIDTH, WIDTH)})
    self.block = torch.nn.ModuleDict({'head': inner})
    self.head = torch.nn.Linear(WIDTH, CLASSES)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self.head(torch.tanh(self.block['head']['dense'](x)))


class Blocks(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    inner = nnx.Dict(dense=nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    self.block = nnx.Dict(head=inner)
    self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.head(jnp.tanh(self.block['head']['dense'](x)))


class BlocksTwins(twins.Twins):
  """Vectors to four classes, with a layer called as a block is."""

  inputs = np.random.RandomState(0).randn(5, WIDTH).astype(np.float32)

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    return TorchBlocks()

  def make_nnx(self) -> Blocks:
    return Blocks(nnx.Rngs(0))
