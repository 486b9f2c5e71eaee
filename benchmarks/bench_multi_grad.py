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
"""What a multi-loss step costs beside what users write by hand.

``make bench`` prints a table of ratios to ``naive``, one
``nnx.value_and_grad`` a loss: XLA's flops, which repeat to the digit, loops,
temporary bytes, and the median time of interleaved runs, which does not.
``--check`` compiles every case at small sizes and times nothing.
"""

import argparse
import dataclasses
import platform
import statistics
import time
import typing as tp

import flax
import jax

from benchmarks import multi_programs as programs


@dataclasses.dataclass(frozen=True)
class Row:
  program: str
  step: str
  flops: float
  temporary_bytes: float
  loops: int
  time: float | None


def cases(small: bool) -> list[programs.Program]:
  width, size = (16, 8) if small else (256, 256)
  deep = dict(depth=8, hidden=False)
  return [
    programs.separate(width, size),
    programs.scanned(6, width, size),
    programs.heads(2, width, size),
    programs.heads(16, width // 4, size),
    programs.heads(2, width, size, leak=True),
    programs.heads(2, width, size, dropout=0.3, **deep),
  ]


def median_times(
  runs: dict[str, tp.Callable[[], tp.Any]], repeat: int
) -> dict[str, float]:
  """Seconds of a call, the runs taking turns, after one warm call each."""
  times: dict[str, list[float]] = {name: [] for name in runs}
  for run in runs.values():
    jax.block_until_ready(run())
  for _ in range(repeat):
    for name, run in runs.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      times[name].append(time.perf_counter() - start)
  return {name: statistics.median(each) for name, each in times.items()}


def measure(program: programs.Program, repeat: int) -> list[Row]:
  arguments = program.arguments()
  compiled, runs = {}, {}
  for name, step in program.steps().items():
    compiled[name], state = programs.compiled(step, arguments)
    runs[name] = lambda run=compiled[name], state=state: run(state)
  seconds = median_times(runs, repeat) if repeat else {}
  naive = compiled['naive']
  return [
    Row(
      program=program.name,
      step=name,
      flops=programs.flops(one) / programs.flops(naive),
      temporary_bytes=(
        programs.temporary_bytes(one) / programs.temporary_bytes(naive)
      ),
      loops=programs.loops(one),
      time=seconds[name] / seconds['naive'] if seconds else None,
    )
    for name, one in compiled.items()
  ]


def table(rows: tp.Iterable[Row]) -> str:
  lines = [
    '| program | step | flops | temporary bytes | loops | time |',
    '| --- | --- | ---: | ---: | ---: | ---: |',
  ]
  for row in rows:
    seconds = '' if row.time is None else f'{row.time:.2f}'
    lines.append(
      f'| {row.program} | {row.step} | {row.flops:.3f} | '
      f'{row.temporary_bytes:.2f} | {row.loops} | {seconds} |'
    )
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--check', action='store_true', help='small, untimed')
  parser.add_argument('--repeat', type=int, default=15, help='timed runs')
  args = parser.parse_args()
  print(
    f'Python {platform.python_version()}, flax {flax.__version__}, '
    f'jax {jax.__version__}, {jax.devices()[0].device_kind}; '
    'ratios to naive\n'
  )
  rows = []
  for program in cases(args.check):
    rows += measure(program, 0 if args.check else args.repeat)
  print(table(rows))


if __name__ == '__main__':
  main()
