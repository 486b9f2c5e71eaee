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
"""What training adapters costs beside full fine-tuning and other ways.

``make bench`` prints a table of ratios to ``full``, the same step that trains
the weights themselves: XLA's flops and temporary bytes, which repeat to the
digit, and the median time of interleaved runs, which does not. ``--check``
compiles every case at small sizes and times nothing.
"""

import argparse
import platform
import typing as tp

import flax
import jax
import jax.numpy as jnp
from flax import nnx

import nnx_ext
from benchmarks import lora_programs as programs
from benchmarks.bench_multi_grad import median_times
from benchmarks.multi_programs import flops, temporary_bytes

# Each program at the sizes of the table, and at small ones.
PROGRAMS: dict[str, tuple[tp.Callable, dict, dict]] = {
  'blocks': (programs.blocks, {}, dict(width=16, hidden=32, tokens=8, depth=1)),
  'blocks, T = 64': (
    programs.blocks,
    dict(tokens=64),
    dict(width=8, hidden=8, tokens=4, depth=1),
  ),
  'blocks, 64 x 6 tokens': (
    programs.blocks,
    dict(width=384, hidden=1536, tokens=(64, 6), exact=True),
    dict(width=8, hidden=8, tokens=(2, 3), depth=1),
  ),
  'DoRA': (programs.dora, {}, dict(width=16, hidden=32, tokens=8)),
  'attention': (programs.attention, {}, dict(width=16, heads=2, tokens=8)),
  'conv': (programs.conv, {}, dict(channels=4, size=6, batch=2)),
  'recurrent': (programs.recurrent, {}, dict(width=8, batch=2, length=4)),
  'embed': (programs.embed, {}, dict(vocabulary=32, width=8, tokens=4)),
  'attend': (programs.attend, {}, dict(vocabulary=32, width=8, tokens=4)),
}


def measure(name: str, small: bool, repeat: int) -> list[str]:
  """The rows of one program."""
  make, sizes, small_sizes = PROGRAMS[name]
  steps = make(**(small_sizes if small else sizes))
  compiled, runs = {}, {}
  for step, program in steps.items():
    compiled[step], runs[step] = program.compile()
  seconds = median_times(runs, repeat) if repeat else {}
  full = compiled['full']
  rows = []
  for step, one in compiled.items():
    time = f'{seconds[step] / seconds["full"]:.2f}' if seconds else ''
    rows.append(
      f'| {name} | {step} | {flops(one) / flops(full):.3f} | '
      f'{temporary_bytes(one) / max(temporary_bytes(full), 1):.2f} | {time} |'
    )
  return rows


def eager(repeat: int) -> str:
  """The time of an eager call beside upstream's layer."""
  base = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  layers = {
    'nnx_ext': nnx_ext.apply_lora(base, rank=8, alpha=16, rngs=nnx.Rngs(1)),
    'nnx.LoRALinear': nnx.LoRALinear(64, 64, lora_rank=8, rngs=nnx.Rngs(1)),
  }
  x = jnp.ones((8, 64))
  runs = {name: lambda layer=layer: layer(x) for name, layer in layers.items()}
  seconds = median_times(runs, repeat)
  return f'{seconds["nnx_ext"] / seconds["nnx.LoRALinear"]:.2f}'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--check', action='store_true', help='small, untimed')
  parser.add_argument('--repeat', type=int, default=15, help='timed runs')
  args = parser.parse_args()
  repeat = 0 if args.check else args.repeat
  print(
    f'Python {platform.python_version()}, flax {flax.__version__}, '
    f'jax {jax.__version__}, {jax.devices()[0].device_kind}; '
    'ratios to full\n'
  )
  print('| program | step | flops | temporary bytes | time |')
  print('| --- | --- | ---: | ---: | ---: |')
  for name in PROGRAMS:
    print('\n'.join(measure(name, args.check, repeat)), flush=True)
  if repeat:
    print(f'\neager call, to nnx.LoRALinear: {eager(40 * repeat)}')


if __name__ == '__main__':
  main()
