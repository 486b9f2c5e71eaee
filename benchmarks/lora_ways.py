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
"""The ways to train an adapted model, and what they are compared with.

All train the same factors, from the same values, by the same loss, at a scale
of 1, as upstream's ``nnx.LoRA`` has no other. Only ``full``, which trains the
weights, is other work.
"""

import dataclasses
import functools
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_ext
from benchmarks import steps
from benchmarks.models import squares

Loss = tp.Callable[[tp.Any, jax.Array], jax.Array]

LEARNING_RATE = 1e-4
OURS, UPSTREAM, QWIX, NAIVE, PEFT, FULL = (
  'nnx_ext',
  'nnx.LoRA',
  'qwix',
  'W + s A B',
  'PEFT, torch',
  'full',
)


@dataclasses.dataclass(frozen=True)
class Training:
  """A training step of one model, in each of the ways.

  Attributes:
    base: the model without adapters.
    x: the input.
    rank: that of the adapters.
    loss: of a model and the input.
    train: whether Adam updates what is trained; else gradients are returned.
    dora: whether the weight's magnitude is trained apart.
    weight: the name of a layer's weight.
  """

  base: tp.Any
  x: jax.Array
  rank: int
  loss: Loss = squares
  train: bool = True
  dora: bool = False
  weight: str = 'kernel'

  def nnx_ext(self) -> steps.Jitted:
    return self._of(self._adapted, nnx.LoRAParam)

  def naive(self) -> steps.Jitted:
    """What is written by hand: the adapted weight is made, then used."""
    graphdef, weights = nnx.split(self.base)
    weights = dict(nnx.to_flat_state(nnx.as_pure(weights)))
    trained: dict[tuple, list[jax.Array]] = {}
    for (*path, _, _), factor in nnx.to_flat_state(self._factors):
      trained.setdefault((*path, self.weight), []).append(factor)

    def loss(trained, weights, x):
      adapted = {k: merged(weights[k], *trained[k]) for k in trained}
      state = nnx.from_flat_state(weights | adapted)
      return self.loss(nnx.merge(graphdef, state), x)

    return self._step(loss, trained, weights)

  def upstream(self) -> steps.Jitted:
    """A bypass beside each Linear."""
    model = nnx.clone(self.base)
    found = [
      (module, name, layer)
      for _, module in nnx.iter_modules(model)
      for name, layer in vars(module).items()
      if isinstance(layer, nnx.Linear)
    ]
    for module, name, layer in found:
      wrapper = nnx.LoRA(
        layer.in_features,
        self.rank,
        layer.out_features,
        base_module=layer,
        param_dtype=layer.param_dtype,
        rngs=nnx.Rngs(0),
      )
      setattr(module, name, wrapper)
    return self._of(model, nnx.LoRAParam, same=True)

  def qwix(self) -> steps.Jitted:
    model = qwix_model(self.base, self.rank, self.x)
    return self._of(model, nnx.LoRAParam, same=True)

  def full(self) -> steps.Jitted:
    return self._of(self.base, nnx.Param)

  def case(self, limit: float, *without: str, **options) -> steps.Case:
    made = {
      OURS: self.nnx_ext,
      UPSTREAM: self.upstream,
      QWIX: self.qwix,
      NAIVE: self.naive,
      FULL: self.full,
      **options.pop('others', {}),
    }
    made = {name: step for name, step in made.items() if name not in without}
    return steps.Case(made, FULL, limit, **options)

  @functools.cached_property
  def _adapted(self) -> tp.Any:
    """With factors that aren't zero, so that no gradient is."""
    model = nnx_ext.apply_lora(
      self.base,
      rank=self.rank,
      dora=self.dora,
      param_dtype=jax.tree.leaves(nnx.state(self.base, nnx.Param))[0].dtype,
      rngs=nnx.Rngs(1),
    )
    state = nnx.state(model, nnx.LoRAParam)
    leaves, treedef = jax.tree.flatten(state)
    random = np.random.default_rng(2)
    drawn = [
      jnp.asarray(leaf + 0.02 * random.standard_normal(leaf.shape), leaf.dtype)
      for leaf in map(np.asarray, leaves)
    ]
    nnx.update(model, treedef.unflatten(drawn))
    return model

  @property
  def _factors(self) -> nnx.State:
    return nnx.as_pure(nnx.state(self._adapted, nnx.LoRAParam))

  def _of(self, model: tp.Any, wrt: tp.Any, same: bool = False) -> steps.Jitted:
    """The step of a model; if ``same``, its factors become ours."""
    graphdef, trained, rest = nnx.split(model, wrt, ...)
    trained, rest = nnx.as_pure(trained), nnx.as_pure(rest)
    if same:
      # Their names differ, but not in how they are sorted.
      leaves, treedef = jax.tree.flatten(trained)
      pairs = zip(jax.tree.leaves(self._factors), leaves, strict=True)
      trained = treedef.unflatten([a.reshape(b.shape) for a, b in pairs])

    def loss(trained, rest, x):
      return self.loss(nnx.merge(graphdef, trained, rest), x)

    return self._step(loss, trained, rest)

  def _step(self, loss: tp.Callable, trained, rest) -> steps.Jitted:
    value_and_grad = jax.value_and_grad(loss)
    if not self.train:
      gradients = lambda *arguments: value_and_grad(*arguments)[::-1]
      return steps.Jitted(gradients, (trained, rest, self.x))
    tx = optax.adam(LEARNING_RATE)

    def step(trained, opt_state, rest, x):
      value, grads = value_and_grad(trained, rest, x)
      updates, opt_state = tx.update(grads, opt_state, trained)
      return optax.apply_updates(trained, updates), opt_state, value

    return steps.Jitted(step, (trained, tx.init(trained), rest, self.x), 2)


def merged(
  weight: jax.Array,
  a: jax.Array,
  b: jax.Array,
  magnitude: jax.Array | None = None,
) -> jax.Array:
  """The adapted weight, with DoRA's magnitudes if there are any."""
  weight = weight + jnp.tensordot(a, b, 1)
  if magnitude is None:
    return weight
  norm = jax.lax.stop_gradient(jnp.linalg.norm(weight, axis=0, keepdims=True))
  return weight * (magnitude[None] / norm)


def qwix_model(base: tp.Any, rank: int, x: jax.Array) -> tp.Any:
  qwix = pytest.importorskip('qwix')
  # Of what it calls in flax; pytest forgets the filter after each test.
  warnings.filterwarnings('ignore', '', DeprecationWarning, r'qwix\.')
  provider = qwix.LoraProvider(module_path='.*', rank=rank, alpha=rank)
  return qwix.apply_lora_to_model(base, provider, x, rngs=nnx.Rngs(0))
