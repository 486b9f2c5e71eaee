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
"""What an adapted model computes, and what its oracle does, side by side."""

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_ext
from tests.lora import kinds, trees
from tests.lora.trees import at, noise


class Run(tp.NamedTuple):
  """What one run of a case gives.

  ``actual`` and ``expected`` are outputs and gradients by the factors and, if
  it is not ids, by the input. Weights are by the layer's path.
  """

  actual: tuple
  expected: tuple
  weights: dict
  expected_weights: dict
  merged: nnx.State
  state: nnx.State


class Results(tp.NamedTuple):
  """A case at its start and somewhere else, from one compiled program."""

  start: Run
  moved: Run
  graphdef: nnx.GraphDef
  merged_graphdef: nnx.GraphDef


def results_of(kind: kinds.Kind, options: dict, scale: float) -> Results:
  plain, base = nnx.split(kind.model)
  base, x, static = nnx.as_pure(base), kind.x, []
  outputs = jax.eval_shape(lambda: kind.call(nnx.merge(plain, base), x))
  cotangent = noise(outputs.shape, 2).astype(outputs.dtype)

  def of(f, factors, x):
    of_x = () if kind.of_ids else (x,)
    y, pullback = jax.vjp(
      lambda factors, *of_x: f(factors, *(of_x or (x,))), factors, *of_x
    )
    return y, pullback(cotangent)

  def run(base, steps, x):
    model = kind.apply(nnx.merge(plain, base), **options)
    call, start = kind.of_factors(model)
    values = jax.tree.map(jnp.add, start, steps)
    oracle = kind.oracle(model, scale, base)
    adapted = nnx.merge(*trees.replaced(model, values))
    merged = nnx_ext.merge_lora(adapted)
    static[:] = nnx.graphdef(adapted), nnx.graphdef(merged)
    weights, expected = {}, {}
    for path, weight in kind.weights.items():
      layer = at(adapted, path)
      variable = getattr(layer, weight.attribute)[...]
      weights[path] = layer.lora.weight(variable)
      expected[path] = weight.effective(
        variable,
        at(values, (*path, 'lora')),
        scale,
        kinds.start(layer.lora),
      )
    return Run(
      of(call, values, x),
      of(oracle, values, x),
      weights,
      expected,
      nnx.as_pure(nnx.state(merged)),
      nnx.as_pure(nnx.state(adapted)),
    )

  steps = trees.values(nnx.eval_shape(lambda: kind.apply(**options)))
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), steps)
  run = jax.jit(run)
  return Results(run(base, zeros, x), run(base, steps, x), *static)
