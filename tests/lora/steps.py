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
"""Models, losses and steps that the tests of LoRA in transforms share."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.lora import kinds, trees
from tests.lora.kinds import Kind, Weight

MLP = Kind(
  lambda rngs: models.MLP(4, 3, rngs=rngs),
  (8, 4),
  {('l1',): Weight(), ('l2',): Weight()},
)
X = MLP.x
IDS = kinds.KINDS['embed'].x

every_mode = parameterized.product(mode=list(models.MODES))


def squashed(y):
  """Around 2, so that float32 is exact to the tolerance in sums."""
  return jnp.sin(y) + 2.0


def mean_loss(model, x):
  return jnp.mean(squashed(model(x)))


@functools.cache
def moved(**options) -> nnx.Module:
  return trees.move(trees.built(lambda: MLP.apply(**options)))


def adapted(**options) -> nnx.Module:
  """An adapted model with factors that are not those of a start."""
  return nnx.clone(moved(**options))


def pure(model):
  """The loss as a function of the factors, and the factors."""
  graphdef, factors, rest = nnx.split(model, nnx.LoRAParam, ...)
  rest = nnx.as_pure(rest)

  def loss(factors, x=X):
    return mean_loss(nnx.merge(graphdef, factors, rest), x)

  return loss, nnx.to_pure_dict(factors)


def oracle(scale=1.0):
  model = moved()
  call = MLP.oracle(model, scale, nnx.as_pure(nnx.state(MLP.model)))
  return lambda factors, x=X: jnp.mean(squashed(call(factors, x)))


@functools.cache
def expected():
  """The loss and its gradients by the factors."""
  return jax.jit(jax.value_and_grad(oracle()))(pure(moved())[1])


def value_and_grad(mode, loss=mean_loss):
  """A step ``(model, x)`` to the loss and gradients by the factors."""
  if mode == 'default':
    step = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
  else:
    graph = models.MODES[mode]['graph']

    def step(model, x):
      graphdef, factors, rest = nnx.split(
        model, nnx.LoRAParam, ..., graph=graph
      )
      rest = nnx.as_pure(rest)
      return jax.value_and_grad(
        lambda factors: loss(nnx.merge(graphdef, factors, rest), x)
      )(factors)

  def as_dict(model, x):
    value, grads = step(model, x)
    return value, nnx.to_pure_dict(grads)

  return as_dict


def through_remat(mode):
  return nnx.remat(mean_loss, **mode)


def through_cond(mode):
  def loss(model, x):
    other = lambda model, x: 3.0 * mean_loss(model, x)
    return nnx.cond(jnp.mean(x) < 10.0, mean_loss, other, model, x, **mode)

  return loss


def through_vmap(mode):
  rows = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0), **mode)
  return lambda model, x: jnp.mean(squashed(rows(model, x)))


def through_scan(mode):
  @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0), **mode)
  def body(total, model, x):
    y = squashed(model(x))
    return total + jnp.sum(y), y

  return lambda model, x: body(jnp.zeros(()), model, x)[0] / (3 * len(x))


def layers(make, *counts):
  """Layers stacked once for each count, the last one innermost."""
  rngs = nnx.Rngs(params=0, dropout=1)
  for count in reversed(counts):
    make = functools.partial(stacked, make, count)
  return make(rngs)


def stacked(make, count, rngs):
  return nnx.vmap(make)(rngs.split(count))


def linear(rngs):
  return nnx.Linear(4, 4, rngs=rngs)


def adapted_inside(rngs, **options):
  layer = nnx.Linear(4, 4, rngs=rngs)
  return nnx_ext.apply_lora(layer, rank=2, rngs=rngs, **options)


def apply(model, **options):
  rngs = nnx.Rngs(params=5, dropout=6)
  return nnx_ext.apply_lora(model, rank=2, rngs=rngs, **options)


def trunk(mode):
  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **models.MODES[mode])
  def trunk(x, layer):
    return jnp.tanh(layer(x))

  return lambda model, x: trunk(x, model)


WAYS: dict[str, tp.Callable] = {
  'after': lambda **options: apply(layers(linear, 3), **options),
  'inside': lambda **options: layers(
    functools.partial(adapted_inside, **options), 3
  ),
}


# Every mode after, one of them inside.
every_way = parameterized.parameters(
  *(('after', mode) for mode in models.MODES), ('inside', 'default')
)


@functools.cache
def kept(way, **options):
  return trees.built(functools.partial(WAYS[way], **options))


def stack(way, **options):
  return nnx.clone(kept(way, **options))


# Kinds whose weights have a batch axis, groups or no kernel.
STACKABLE = ['linear', 'general_batch', 'einsum_batch_last', 'conv_groups']
STACKABLE += ['transpose_kernel', 'embed', 'user_relu', 'user_own_forward']
