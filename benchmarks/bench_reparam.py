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
"""What training by theta costs beside what users write by hand."""

import functools

import jax.numpy as jnp

from benchmarks import reparam_programs as programs
from benchmarks.steps import Sized

PILLAR = 'reparam'

NORM_STEPS = ('parametrize', 'reparam_grad', 'by hand')
SMALL = dict(depth=2, width=16, size=8)
LOW = dict(dtype=jnp.bfloat16)


def _samples(samples: int) -> Sized:
  return Sized(
    functools.partial(programs.mean_field, samples),
    steps=NORM_STEPS,
    cpu=dict(depth=3, width=256, size=256),
    gpu=dict(depth=3, width=4096, size=2048, **LOW),
    small=SMALL | dict(depth=1),
    series=('samples', samples),
  )


def _layers(depth: int) -> Sized:
  return Sized(
    functools.partial(programs.weight_norm, peers=False),
    steps=NORM_STEPS,
    cpu=dict(depth=depth, width=128, size=128),
    gpu=dict(depth=depth, width=2048, size=2048, **LOW),
    small=SMALL | dict(depth=depth),
    series=('layers', depth),
  )


CASES = {
  'weight norm': Sized(
    programs.weight_norm,
    steps=(*NORM_STEPS, 'nnx.WeightNorm', 'paramax'),
    cpu=dict(depth=3, width=512, size=512),
    gpu=dict(depth=3, width=4096, size=8192, **LOW),
    small=SMALL,
  ),
  'weight norm, scanned': Sized(
    programs.weight_norm_scanned,
    steps=NORM_STEPS,
    cpu=dict(depth=6, width=256, size=256),
    gpu=dict(depth=8, width=4096, size=4096, **LOW),
    small=SMALL,
  ),
  'weight norm, not jitted': Sized(
    programs.weight_norm_eager,
    steps=NORM_STEPS,
    cpu=dict(depth=2, width=32, size=32),
    small=SMALL | dict(depth=1),
  ),
  'mean field, 1 sample': _samples(1),
  **{f'mean field, {n} samples': _samples(n) for n in (2, 4, 8)},
  'orthogonal recurrent': Sized(
    programs.orthogonal_recurrent,
    steps=('materialize', 'lazy', 'by hand'),
    cpu=dict(width=128, time=32, size=32),
    gpu=dict(width=1024, time=64, size=256),
    small=dict(width=8, time=3, size=2),
  ),
  'hypernetwork': Sized(
    programs.hypernetwork,
    steps=('reparam_grad', 'by hand'),
    cpu=dict(depth=4, width=64, size=512, embedding=32, hidden=64),
    gpu=dict(depth=4, width=512, size=8192, embedding=256, hidden=512, **LOW),
    small=dict(depth=2, width=8, size=4, embedding=4, hidden=6),
  ),
  **{f'weight norm, {n} layers': _layers(n) for n in (2, 4, 8, 16)},
}


def test_step(measure, case, step):
  measure(case, step)
