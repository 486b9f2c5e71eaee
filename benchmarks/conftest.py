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
"""How cases are measured: pytest-benchmark, in pairs with a baseline.

Each ``bench_*.py`` has a mapping ``CASES`` and one test, which runs for each
step of each case. A step and its baseline take turns, now one and now the other
first, so what else the machine does meets both, and their ratio is that of
neighbours.
"""

import itertools
import os
import statistics
import time
import typing as tp

import jax
import pytest

from benchmarks import environment, peft_peer, steps

SECONDS = 2.0  # spent on the runs of one step and its baseline
ROUNDS = 6, 100  # at least, at most; in half of them the baseline is first
TRACES = 3  # of a step, that are timed


def pytest_addoption(parser):
  group = parser.getgroup('nnx_ext')
  group.addoption(
    '--sizes',
    choices=('small', 'cpu', 'gpu'),
    help='of the cases; those of the device unless given',
  )
  group.addoption(
    '--deadline',
    type=float,
    help='seconds after which no further step is begun',
  )
  group.addoption(
    '--torch-python',
    metavar='PATH',
    help='an interpreter with PyTorch and PEFT, to measure beside',
  )


def pytest_configure(config):
  config.started = time.monotonic()
  # To run a case at all, no optimized program is needed.
  small = config.getoption('--sizes') == 'small'
  jax.config.update('jax_disable_most_optimizations', small)
  if config.getoption('--torch-python'):
    python = os.path.abspath(config.getoption('--torch-python'))
    os.environ[peft_peer.PYTHON] = python
  config.load = os.getloadavg()[0]


def sizes(config) -> str:
  default = 'gpu' if jax.default_backend() == 'gpu' else 'cpu'
  return config.getoption('--sizes') or default


def pytest_generate_tests(metafunc):
  if {'case', 'step'} <= set(metafunc.fixturenames):
    pairs = [
      (name, step)
      for name, sized in metafunc.module.CASES.items()
      if getattr(sized, sizes(metafunc.config)) is not None
      for step in sized.steps
    ]
    metafunc.parametrize(('case', 'step'), pairs, ids=map(' | '.join, pairs))


def pytest_benchmark_update_json(config, benchmarks, output_json):
  """Where and of what the numbers are, beside them."""
  output_json['environment'] = environment.describe()
  output_json['sizes'] = sizes(config)
  output_json['load'] = [config.load, os.getloadavg()[0]]
  if benchmarks and sizes(config) != 'small':
    output_json['ceilings'] = environment.ceilings()


class _Preparing:
  """The steps of one case at a time, each prepared once."""

  def __init__(self, repeat: int):
    self.repeat = repeat
    self._of: tuple[str, str] | None = None

  def __call__(self, module: tp.Any, name: str, sizes: str):
    if self._of != (module.__name__, name):
      self._of = module.__name__, name
      self.case = module.CASES[name].case(sizes)
      self._prepared: dict[str, steps.Prepared] = {}
    return self

  def __getitem__(self, step: str) -> steps.Prepared:
    if step not in self._prepared:
      made = self.case.steps[step]()
      self._prepared[step] = made.prepare(self.repeat)
    return self._prepared[step]


@pytest.fixture(scope='session')
def preparing(request) -> _Preparing:
  # The first compilation of a process takes longer than others.
  jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
  untimed = request.config.getoption('benchmark_disable')
  return _Preparing(1 if untimed else TRACES)


@pytest.fixture
def measure(benchmark, request, preparing):
  """Runs a step beside its case's baseline, and notes what there is to know."""

  def measure(name: str, step: str) -> None:
    config = request.config
    deadline = config.getoption('--deadline')
    if deadline and time.monotonic() - config.started > deadline:
      pytest.skip(f'the deadline of {deadline:g} s is over')
    of_case = preparing(request.module, name, sizes(config))
    case, one = of_case.case, of_case[step]
    baseline = of_case[case.baseline] if benchmark.enabled else one

    def seconds(run: steps.Run) -> float:
      start = time.perf_counter()
      jax.block_until_ready(run())
      return time.perf_counter() - start

    beside: list[float] = []
    # Before the first run of the step, after the second, and so on.
    turns = itertools.cycle((True, False, False, True))

    def turn() -> None:
      if next(turns) and benchmark.enabled:
        beside.append(seconds(baseline.run))

    rounds = 1
    if benchmark.enabled:
      seconds(one.run), seconds(baseline.run)
      pair = seconds(one.run) + seconds(baseline.run)
      rounds = min(max(int(SECONDS / pair), ROUNDS[0]), ROUNDS[1])
    benchmark.pedantic(
      lambda: jax.block_until_ready(one.run()),
      setup=turn,
      teardown=turn,
      rounds=rounds,
    )
    sized = request.module.CASES[name]
    benchmark.extra_info |= {
      'pillar': request.module.PILLAR,
      'case': name,
      'step': step,
      'baseline': case.baseline,
      'limit': case.limit,
      'whole_limit': case.whole_limit or case.limit,
      'series': sized.series,
    }
    if one.figures is not None:
      benchmark.extra_info |= one.figures()._asdict()
    if benchmark.enabled:
      times = benchmark.stats.stats.data
      ratios = [time / base for time, base in zip(times, beside)]
      quartiles = statistics.quantiles(ratios, n=4)
      benchmark.extra_info['ratio'] = quartiles[1]
      benchmark.extra_info['ratio_quartiles'] = [quartiles[0], quartiles[2]]

  return measure
