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
"""What is measured: cases, their steps, and what of a compiled step repeats.

A case is one piece of work done in several ways, its steps. A step is a
function of arrays that XLA compiles, a call that Python runs operation by
operation, or a call of another framework; whichever it is, it is prepared once
and then run again and again.
"""

import dataclasses
import statistics
import time
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

Run = tp.Callable[[], tp.Any]


class Figures(tp.NamedTuple):
  """What is known of a compiled step; all but the seconds repeat.

  Attributes:
    flops: as XLA counts them; a loop's body counts once.
    temporary_bytes: that are held while the step runs.
    moved_bytes: those of its arguments and results.
    accessed_bytes: read or written by its operations, as XLA counts them.
    loops: how many there are.
    traces: how often the function was traced, over all calls so far.
    trace_seconds: of tracing it and lowering it to StableHLO, the median of
      what was asked for.
    compile_seconds: of compiling that.
  """

  flops: float
  temporary_bytes: int
  moved_bytes: int
  accessed_bytes: float
  loops: int
  traces: int
  trace_seconds: float
  compile_seconds: float


class Prepared(tp.NamedTuple):
  """A step ready to run, and its figures, if it is compiled by XLA."""

  run: Run
  figures: tp.Callable[[], Figures] | None = None


class Step(tp.Protocol):
  def prepare(self, repeat: int = 1) -> Prepared:
    """Makes it ready to run; ``repeat`` says how often tracing is timed."""


@dataclasses.dataclass(frozen=True)
class Jitted:
  """A function of arrays, run under ``jax.jit``.

  Attributes:
    function: of pytrees of arrays.
    arguments: what it is called with first.
    carried: how many of the first arguments are donated. The function then
      returns a tuple that begins with what the next call gets in their places.
    compiler_options: those of XLA, if others than its own.
  """

  function: tp.Callable[..., tp.Any]
  arguments: tuple
  carried: int = 0
  compiler_options: dict[str, tp.Any] | None = None

  def prepare(self, repeat: int = 1) -> Prepared:
    traces = 0

    def counted(*arguments):
      nonlocal traces
      traces += 1
      return self.function(*arguments)

    def lower():
      # A new function each time, as JAX remembers those that it has traced.
      jitted = jax.jit(
        lambda *arguments: counted(*arguments),
        donate_argnums=tuple(range(self.carried)),
        compiler_options=self.compiler_options,
      )
      return jitted, jitted.lower(*self.arguments)

    several = [_timed(lower) for _ in range(repeat)]
    trace_seconds = statistics.median(seconds for _, seconds in several)
    jitted, lowered = several[-1][0]
    compiled, compile_seconds = _timed(lowered.compile)
    traces = 1
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()

    # Donated buffers are copies, as models share those of their base.
    carried, rest = self._split(self.arguments)
    state = [*jax.tree.map(jnp.copy, carried), *rest]

    def run():
      out = jitted(*state)
      state[: self.carried], rest = self._split(out)
      return rest

    def figures():
      return Figures(
        flops=cost.get('flops', 0.0),
        temporary_bytes=memory.temp_size_in_bytes,
        moved_bytes=(
          memory.argument_size_in_bytes + memory.output_size_in_bytes
        ),
        accessed_bytes=cost.get('bytes accessed', 0.0),
        loops=compiled.as_text().count(' while('),
        traces=traces,
        trace_seconds=trace_seconds,
        compile_seconds=compile_seconds,
      )

    return Prepared(run, figures)

  def _split(self, values: tp.Any) -> tuple[tp.Any, tp.Any]:
    if not self.carried:
      return (), values
    return values[: self.carried], values[self.carried :]


@dataclasses.dataclass(frozen=True)
class Eager:
  """A call outside of jit, on modules as they are."""

  function: tp.Callable[..., tp.Any]
  arguments: tuple

  def prepare(self, repeat: int = 1) -> Prepared:
    return Prepared(lambda: self.function(*self.arguments))


def _timed(call: tp.Callable[[], tp.Any]) -> tuple[tp.Any, float]:
  start = time.perf_counter()
  out = call()
  return out, time.perf_counter() - start


def jitted(function: tp.Callable[..., tp.Any], arguments: tuple) -> Jitted:
  """A call on modules as a function of their state, which it returns too."""
  graphdef, state = nnx.split(arguments)

  def pure(state):
    arguments = nnx.merge(graphdef, state)
    out = function(*arguments)
    return out, nnx.state(arguments)

  return Jitted(pure, (state,))


@dataclasses.dataclass(frozen=True)
class Case:
  """One piece of work, done in several ways.

  Attributes:
    steps: each way under its name; made when it is asked for.
    baseline: the name of the step that all others are measured beside.
    limit: the fewest flops that the work needs: its matrix products and
      convolutions, the body of a loop once, as XLA counts.
    whole_limit: the same with every round of a loop, if that differs.
  """

  steps: dict[str, tp.Callable[[], Step]]
  baseline: str
  limit: float | None = None
  whole_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Sized:
  """A case at the sizes of a processor, of a GPU, and of a check.

  Attributes:
    make: the case, given its sizes.
    steps: the names of its steps, to select them without making it.
    cpu: keyword arguments of ``make`` where time is measured on a processor.
    gpu: those on a GPU; None where the case is too small to be of use there.
    small: those for running it at all.
    series: the name of the series that it is of, and its size in it, where
      the cost is fitted as it grows.
  """

  make: tp.Callable[..., Case]
  steps: tuple[str, ...]
  cpu: dict[str, tp.Any]
  small: dict[str, tp.Any]
  gpu: dict[str, tp.Any] | None = None
  series: tuple[str, int] | None = None

  def case(self, sizes: str) -> Case:
    case = self.make(**getattr(self, sizes))
    if set(case.steps) != set(self.steps):
      raise ValueError(f'{list(case.steps)} are not {list(self.steps)}.')
    return case
