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
"""What training adapters costs beside full fine-tuning and other libraries."""

import jax.numpy as jnp

from benchmarks import lora_programs as programs
from benchmarks.lora_ways import FULL, NAIVE, OURS, PEFT, QWIX, UPSTREAM
from benchmarks.steps import Sized

PILLAR = 'lora'

BF16 = jnp.bfloat16
LINEAR = OURS, UPSTREAM, QWIX, NAIVE, FULL
LINEAR_AND_PEFT = *LINEAR, PEFT
OTHERS = OURS, QWIX, NAIVE, FULL
EMBED = OURS, NAIVE, FULL

_BLOCKS = dict(width=1024, hidden=4096, depth=4)
_SMALL = dict(width=16, hidden=32, tokens=8, rank=2, depth=1)
_LARGE = dict(width=4096, hidden=16_384, depth=2, dtype=BF16)


def _at_rank(rank: int) -> Sized:
  return Sized(
    programs.blocks,
    LINEAR_AND_PEFT if rank == 8 else LINEAR,
    cpu=dict(**_BLOCKS, tokens=512, rank=rank, peft=rank == 8),
    small=dict(**_SMALL, peft=rank == 8),
    gpu=dict(**_LARGE, tokens=8192, rank=rank, peft=rank == 8),
    series=('rank', rank),
  )


def _at_tokens(tokens: int, peft: bool = False) -> Sized:
  return Sized(
    programs.blocks,
    LINEAR_AND_PEFT if peft else LINEAR,
    cpu=dict(**_BLOCKS, tokens=tokens, peft=peft),
    small=dict(**_SMALL, peft=peft),
    gpu=dict(**_LARGE, tokens=tokens, peft=peft),
  )


def _at_depth(depth: int) -> Sized:
  return Sized(
    programs.blocks,
    LINEAR,
    cpu=dict(width=256, hidden=1024, tokens=128, depth=depth),
    small=_SMALL | dict(depth=min(depth, 2)),
    series=('layers', depth),
  )


CASES = {
  'blocks': _at_rank(8),
  'blocks, T = 64': _at_tokens(64, peft=True),
  'blocks, T = 2048': _at_tokens(2048),
  **{f'blocks, rank {rank}': _at_rank(rank) for rank in (4, 16, 64)},
  **{f'blocks, {depth} deep': _at_depth(depth) for depth in (1, 2, 4, 8)},
  'blocks, 64 x 6 tokens': Sized(
    programs.blocks,
    LINEAR,
    cpu=dict(width=384, hidden=1536, tokens=(64, 6), exact=True),
    small=_SMALL | dict(tokens=(2, 3), exact=True),
  ),
  'transformer layer': Sized(
    programs.layer,
    OTHERS,
    cpu=dict(width=512, hidden=2048, heads=8, tokens=256),
    small=dict(width=16, hidden=32, heads=2, tokens=8, rank=2),
    gpu=dict(
      width=4096, hidden=16_384, heads=32, batch=4, tokens=2048, dtype=BF16
    ),
  ),
  'attention': Sized(
    programs.attention,
    OTHERS,
    cpu=dict(width=512, heads=8, tokens=256),
    small=dict(width=16, heads=2, tokens=8, rank=2),
    gpu=dict(width=4096, heads=32, batch=4, tokens=2048, dtype=BF16),
  ),
  'DoRA': Sized(
    programs.dora,
    (OURS, 'LoRA', NAIVE, FULL),
    cpu=dict(width=1024, hidden=4096, tokens=512),
    small=dict(width=16, hidden=32, tokens=8, rank=2),
    gpu=dict(width=4096, hidden=16_384, tokens=8192, dtype=BF16),
  ),
  'conv': Sized(
    programs.conv,
    OTHERS,
    cpu=dict(channels=128, size=32, batch=8),
    small=dict(channels=4, size=6, batch=2, rank=2),
    gpu=dict(channels=512, size=64, batch=64, dtype=BF16),
  ),
  'recurrent': Sized(
    programs.recurrent,
    (OURS, UPSTREAM, NAIVE, FULL),
    cpu=dict(width=512, batch=8, length=64),
    small=dict(width=8, batch=2, length=4, rank=2),
    gpu=dict(width=2048, batch=64, length=128),  # no QR in bfloat16
  ),
  'embed': Sized(
    programs.embed,
    EMBED,
    cpu=dict(vocabulary=32_000, width=1024, tokens=512),
    small=dict(vocabulary=32, width=8, tokens=4, rank=2),
    gpu=dict(vocabulary=128_000, width=4096, tokens=8192, dtype=BF16),
  ),
  'attend': Sized(
    programs.attend,
    EMBED,
    cpu=dict(vocabulary=32_000, width=1024, tokens=512),
    small=dict(vocabulary=32, width=8, tokens=4, rank=2),
    gpu=dict(vocabulary=128_000, width=4096, tokens=8192, dtype=BF16),
  ),
  'eager call': Sized(
    programs.eager,
    (OURS, 'nnx.LoRALinear', QWIX, 'nnx.Linear'),
    cpu=dict(width=64, tokens=8),
    small=dict(width=4, tokens=2),
  ),
}


def test_step(measure, case, step):
  measure(case, step)
