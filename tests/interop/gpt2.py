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
"""A GPT-2 of two layers, in transformers and in NNX.

The paths agree with torch's names. transformers keeps its kernels as (in,
out), in layers that it calls Conv1D, and the output weight is the embedding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from tests.interop import twins

VOCABULARY, POSITIONS, LAYERS, WIDTH, HEADS = 40, 16, 2, 32, 2


class Attention(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.c_attn = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
    self.c_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
    query, key, value = (
      part.reshape(heads) for part in jnp.split(self.c_attn(x), 3, axis=-1)
    )
    mask = nnx.make_causal_mask(x[..., 0])
    x = nnx.dot_product_attention(query, key, value, mask=mask)
    return self.c_proj(x.reshape(*x.shape[:-2], WIDTH))


class MLP(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.c_fc = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
    self.c_proj = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.c_proj(nnx.gelu(self.c_fc(x), approximate=True))


class Block(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.ln_1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
    self.attn = Attention(rngs)
    self.ln_2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
    self.mlp = MLP(rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_2(x))


class Transformer(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.wpe = nnx.Embed(POSITIONS, WIDTH, rngs=rngs)
    self.h = nnx.List([Block(rngs) for _ in range(LAYERS)])
    self.ln_f = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

  def __call__(self, ids: jax.Array) -> jax.Array:
    x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1])[None])
    for block in self.h:
      x = block(x)
    return self.ln_f(x)


class GPT2(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.transformer = Transformer(rngs)

  def __call__(self, ids: jax.Array) -> jax.Array:
    return self.transformer.wte.attend(self.transformer(ids))


class GPT2Twins(twins.Twins):
  """Sequences of eight ids to the next ids."""

  inputs = np.random.RandomState(0).randint(0, VOCABULARY, (3, 8))
  fan_in_fan_out = True

  def make_torch(self) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
      vocab_size=VOCABULARY,
      n_embd=WIDTH,
      n_layer=LAYERS,
      n_head=HEADS,
      n_positions=POSITIONS,
      initializer_range=0.2,
      bos_token_id=0,
      eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)

  def run_torch(self, model: torch.nn.Module) -> torch.Tensor:
    return model(torch.from_numpy(self.inputs)).logits

  def make_nnx(self) -> GPT2:
    return GPT2(nnx.Rngs(0))
