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
"""Values of models and of their factors: made, moved, read and compared."""

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Path = tuple[tp.Any, ...]


def at(tree, path: Path):
  """What a module or a dict holds at a path."""
  for key in path:
    tree = tree[key] if isinstance(tree, dict) else getattr(tree, key)
  return tree


def noise(shape, seed: int = 0) -> jax.Array:
  values = np.random.RandomState(seed).normal(size=shape)
  return jax.device_put(values.astype(np.float32))


def built(make: tp.Callable[[], nnx.Module]) -> nnx.Module:
  """A model made by one compiled program, which is quicker than many."""
  graphdefs = []

  @jax.jit
  def run():
    graphdef, state = nnx.split(make())
    graphdefs.append(graphdef)
    return nnx.as_pure(state)

  state = run()
  return nnx.merge(graphdefs[0], state)


def fill(abstract: nnx.Module) -> nnx.Module:
  """An abstract model made concrete, also where something is traced."""
  graphdef, state = nnx.split(abstract)
  flat = nnx.to_flat_state(nnx.as_pure(state))
  with jax.ensure_compile_time_eval():
    values = [_value(path[-1], x, i) for i, (path, x) in enumerate(flat)]
  state = nnx.from_flat_state(zip([path for path, _ in flat], values))
  return nnx.merge(graphdef, state)


def is_key(x) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _value(name, x, seed):
  if is_key(x):
    return jax.random.key(seed)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return jax.device_put(np.zeros(x.shape, x.dtype))
  value = np.asarray(noise(x.shape, 50 + seed))
  value = {'mask': value > 0, 'kernel': 0.5 * value}.get(name, value)
  return jax.device_put(value.astype(x.dtype))


def values(model: nnx.Module):
  """Values of its LoRAParams that are none of a start's, as a dict."""
  flat = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
  return nnx.to_pure_dict(
    nnx.from_flat_state(
      [
        (path, noise(param.shape, 100 + i).astype(param.dtype))
        for i, (path, param) in enumerate(flat)
      ]
    )
  )


def replaced(model: nnx.Module, values) -> tuple[nnx.GraphDef, tp.Any, tp.Any]:
  """The model split, with other values of its LoRAParams."""
  graphdef, _, rest = nnx.split(model, nnx.LoRAParam, ...)
  return graphdef, values, nnx.as_pure(rest)


def move(model: nnx.Module) -> nnx.Module:
  """Every LoRAParam moved to somewhere else, in place."""
  nnx.update(model, values(model))
  return model


def factors(model: nnx.Module) -> dict[Path, nnx.Variable]:
  return {
    path: node
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.LoRAParam)
  }


def leaves(model: nnx.Module) -> dict[Path, np.ndarray]:
  """A model's values by path, keys as numbers."""
  return {
    path: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    for path, x in nnx.to_flat_state(nnx.as_pure(nnx.state(model)))
  }


def assert_close(actual, expected, tolerance: float = 2e-5) -> None:
  """Close relative to the largest entry of each leaf."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    assert a.shape == e.shape and a.dtype == e.dtype, (a, e)
    a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
    largest = max(float(np.max(np.abs(e), initial=0.0)), 1e-3)
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * largest)


def assert_same(actual: dict, expected: dict) -> None:
  """Equal bit for bit, and at the same paths."""
  assert list(actual) == list(expected), (list(actual), list(expected))
  for path in expected:
    assert actual[path].dtype == expected[path].dtype, path
    assert actual[path].tobytes() == expected[path].tobytes(), path
