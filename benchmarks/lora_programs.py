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
"""Models to adapt, their inputs, and the fewest flops that training needs."""

import dataclasses
import math
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_ext
from benchmarks import lora_flops as flops
from benchmarks import peft_peer, steps
from benchmarks.lora_ways import (
  LEARNING_RATE,
  OURS,
  PEFT,
  QWIX,
  UPSTREAM,
  Training,
  qwix_model,
)
from benchmarks.models import Block, Layer, attention_of, normal


def blocks(
  width: int = 1024,
  hidden: int = 4096,
  tokens: int | tuple[int, ...] = 512,
  rank: int = 8,
  depth: int = 4,
  exact: bool = False,
  peft: bool = False,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """Feed-forward blocks.

  Args:
    width: features of a token.
    hidden: features inside of a block.
    tokens: how many there are, or the axes that they are on.
    rank: that of the adapters.
    depth: how many blocks there are.
    exact: whether gelu is computed by erf and not by tanh.
    peft: whether PEFT is among the ways.
    dtype: of weights, factors and input.
  """
  rngs = nnx.Rngs(0)
  make = lambda: Block(width, hidden, exact=exact, dtype=dtype, rngs=rngs)
  base = nnx.Sequential(*(make() for _ in range(depth)))
  leading = tokens if isinstance(tokens, tuple) else (tokens,)
  x = normal(*leading, width, dtype=dtype)
  training = Training(base, x, rank)
  others = {}
  if peft:
    others[PEFT] = lambda: _peft(training, exact)
  count = math.prod(leading)
  limit = flops.blocks(count, width, hidden, rank, depth=depth)
  return training.case(limit, others=others)


def layer(
  width: int = 512,
  hidden: int = 2048,
  heads: int = 8,
  batch: int = 1,
  tokens: int = 256,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """A transformer's layer, all of its six weights adapted."""
  base = Layer(width, hidden, heads, dtype=dtype, rngs=nnx.Rngs(0))
  x = normal(batch, tokens, width, dtype=dtype)
  limit = flops.attention(batch, tokens, width, rank)
  limit += flops.blocks(batch * tokens, width, hidden, rank, to_input=True)
  return Training(base, x, rank).case(limit, UPSTREAM)


def attention(
  width: int = 512,
  heads: int = 8,
  batch: int = 1,
  tokens: int = 256,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """The four projections of self-attention."""
  base = attention_of(width, heads, dtype, nnx.Rngs(0))
  x = normal(batch, tokens, width, dtype=dtype)
  limit = flops.attention(batch, tokens, width, rank)
  return Training(base, x, rank).case(limit, UPSTREAM)


def dora(
  width: int = 1024,
  hidden: int = 4096,
  tokens: int = 512,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """One block with DoRA, and with LoRA, which is less work."""
  base = Block(width, hidden, dtype=dtype, rngs=nnx.Rngs(0))
  training = Training(base, normal(tokens, width, dtype=dtype), rank, dora=True)
  lora = dataclasses.replace(training, dora=False)
  limit = flops.blocks(tokens, width, hidden, rank, whole=True)
  others = {'LoRA': lora.nnx_ext}
  return training.case(limit, UPSTREAM, QWIX, others=others)


def conv(
  channels: int = 128,
  size: int = 32,
  batch: int = 8,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """A 3 by 3 convolution: gradients alone."""
  base = nnx.Conv(
    channels, channels, (3, 3), param_dtype=dtype, rngs=nnx.Rngs(0)
  )
  x = normal(batch, size, size, channels, dtype=dtype)
  limit = flops.conv(batch, size, channels, rank)
  return Training(base, x, rank, train=False).case(limit, UPSTREAM)


def recurrent(
  width: int = 512,
  batch: int = 8,
  length: int = 64,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """An LSTM over a sequence: gradients alone."""
  cell = nnx.OptimizedLSTMCell(
    width, width, param_dtype=dtype, rngs=nnx.Rngs(0)
  )
  x = normal(batch, length, width, dtype=dtype)
  return Training(nnx.RNN(cell), x, rank, train=False).case(
    flops.recurrent(batch, width, rank),
    QWIX,
    whole_limit=flops.recurrent(batch * length, width, rank),
  )


def embed(
  vocabulary: int = 32_000,
  width: int = 1024,
  tokens: int = 512,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """The look-up of an embedding: gradients alone, from those of its output."""
  base = nnx.Embed(vocabulary, width, param_dtype=dtype, rngs=nnx.Rngs(0))
  ids = jax.random.randint(jax.random.key(1), (tokens,), 0, vocabulary)
  direction = normal(tokens, width)
  loss = lambda model, ids: jnp.vdot(model(ids), direction)
  training = Training(base, ids, rank, loss, train=False, weight='embedding')
  return training.case(6 * tokens * rank * width, UPSTREAM, QWIX)


def attend(
  vocabulary: int = 32_000,
  width: int = 1024,
  tokens: int = 512,
  rank: int = 8,
  dtype: tp.Any = jnp.float32,
) -> steps.Case:
  """The logits of a tied embedding: gradients alone."""
  base = nnx.Embed(vocabulary, width, param_dtype=dtype, rngs=nnx.Rngs(0))
  x = normal(tokens, width, dtype=dtype)
  loss = lambda model, x: jnp.mean(
    jax.nn.logsumexp(model.attend(x).astype(jnp.float32), -1)
  )
  training = Training(base, x, rank, loss, train=False, weight='embedding')
  limit = flops.weight(tokens, width, vocabulary, rank, to_input=False)
  return training.case(limit, UPSTREAM, QWIX)


def eager(width: int = 64, tokens: int = 8, rank: int = 8) -> steps.Case:
  """One call of an adapted Linear outside of jit."""
  x = jnp.ones((tokens, width))
  base = nnx.Linear(width, width, rngs=nnx.Rngs(0))
  linear = nnx.LoRALinear(width, width, lora_rank=rank, rngs=nnx.Rngs(0))
  call = lambda make: lambda: steps.Eager(make(), (x,))
  made = {
    OURS: lambda: nnx_ext.apply_lora(base, rank=rank, rngs=nnx.Rngs(1)),
    'nnx.LoRALinear': lambda: linear,
    QWIX: lambda: qwix_model(base, rank, x),
    'nnx.Linear': lambda: base,
  }
  made = {name: call(make) for name, make in made.items()}
  return steps.Case(made, 'nnx.LoRALinear')


def _peft(training: Training, exact: bool) -> peft_peer.Peft:
  trained, _, weights, x = training.naive().arguments
  return peft_peer.Peft(
    trained, weights, x, exact=exact, learning_rate=LEARNING_RATE
  )
