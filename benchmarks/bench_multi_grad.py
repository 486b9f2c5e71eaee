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
"""What a multi-loss step costs beside what users write by hand."""

import functools
import typing as tp

import jax.numpy as jnp

from benchmarks import a2c_example
from benchmarks import multi_programs as programs
from benchmarks.steps import Case, Sized

PILLAR = 'multi'
EACH = ('nnx_ext', 'naive', 'vjp', 'vjp, vmap', 'jacrev')
SUM = ('nnx_ext, sum', 'naive, sum', 'sum of losses')

# Programs by name, with their sizes.
_DEEP = dict(depth=8, hidden=False, dropout=0.3)
_BF16 = dict(dtype=jnp.bfloat16)
_MLP = dict(
  cpu=dict(width=256, size=256),
  small=dict(width=8, size=4),
  gpu=dict(width=4096, size=8192, **_BF16),
)
_SCANNED = dict(
  cpu=dict(width=256, size=256),
  small=dict(depth=2, width=8, size=4),
  gpu=dict(width=4096, size=8192, **_BF16),
)
_TRANSFORMER = dict(
  cpu=dict(),
  small=dict(depth=2, width=8, size=2, length=4),
  gpu=dict(width=4096, size=4, length=2048, **_BF16),
)


def _sized(
  program: tp.Callable[..., programs.Program],
  names: tuple[str, ...],
  sizes: dict[str, tp.Any],
  jit: bool = True,
  series: tuple[str, int] | None = None,
) -> Sized:
  def make(**sizes) -> Case:
    return program(**sizes).case(*names, jit=jit)

  return Sized(make, names, series=series, **sizes)


def _both(name: str, program: tp.Callable, sizes: dict) -> dict[str, Sized]:
  return {
    name: _sized(program, EACH, sizes),
    f'{name}, summed': _sized(program, SUM, sizes),
  }


def _heads(count: int) -> dict[str, Sized]:
  program = functools.partial(programs.heads, count)
  sizes = dict(
    cpu=dict(width=128, size=256),
    small=dict(width=8, size=4),
    gpu=dict(width=1024, size=8192, **_BF16),
  )
  return {
    f'{count} heads': _sized(program, EACH, sizes, series=('losses', count)),
    f'{count} heads, summed': _sized(
      program, SUM, sizes, series=('losses, summed', count)
    ),
  }


def _layers(depth: int) -> Sized:
  program = functools.partial(programs.heads, depth=depth)
  sizes = dict(cpu=dict(width=128, size=256), small=dict(width=8, size=4))
  names = ('nnx_ext', 'naive')
  return _sized(program, names, sizes, series=('layers', depth))


def _eager(program: tp.Callable, names: tuple[str, ...]) -> Sized:
  sizes = dict(cpu=dict(width=64, size=32), small=dict(width=8, size=4))
  return _sized(program, names, sizes, jit=False)


CASES: dict[str, Sized] = {
  'separate': _sized(programs.separate, (*EACH, 'sum of losses'), _MLP),
  **_both('shared trunk', programs.heads, _MLP),
  'leak': _sized(functools.partial(programs.heads, leak=True), EACH, _MLP),
  'leak, summed': _sized(
    functools.partial(programs.heads, leak=True), SUM[:2], _MLP
  ),
  **_both('dropout', functools.partial(programs.heads, **_DEEP), _MLP),
  'scanned actor and critic': _sized(programs.scanned, EACH, _SCANNED),
  **_both('transformer', programs.transformer, _TRANSFORMER),
  **_both(
    'transformer, remat',
    functools.partial(programs.transformer, remat=True),
    _TRANSFORMER,
  ),
  **{
    name: sized
    for count in (2, 4, 8, 16)
    for name, sized in _heads(count).items()
  },
  **{f'{depth} layers': _layers(depth) for depth in (2, 4, 8, 16)},
  **{
    f'A2C, {name}': Sized(
      functools.partial(a2c_example.case, name),
      a2c_example.STEPS,
      cpu=dict(),
      small=dict(steps=2, envs=2),
      gpu=dict(),
    )
    for name in ('two networks', 'shared trunk')
  },
  'eager, separate': _eager(programs.separate, EACH),
  'eager, shared trunk': _eager(programs.heads, EACH),
  'eager, shared trunk, summed': _eager(programs.heads, SUM),
}


def test_step(measure, case, step):
  measure(case, step)
