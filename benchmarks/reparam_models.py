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
"""The models of the reparam cases, and how to make weights of theta."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_ext
from benchmarks import steps
from benchmarks.models import squares, stacked

Theta = dict[tp.Any, tp.Any]


class MLP(nnx.Module):
  """Layers of one width."""

  def __init__(self, depth: int, width: int, *, dtype=jnp.float32, rngs):
    self.layers = nnx.List(
      [_linear(width, width, dtype=dtype, rngs=rngs) for _ in range(depth)]
    )

  def __call__(self, x):
    for layer in self.layers:
      x = nnx.relu(layer(x))
    return x


class Scanned(nnx.Module):
  """The same with stacked weights, run by a scan.

  Args:
    of_layer: what each layer becomes before they are stacked.
  """

  def __init__(
    self,
    depth: int,
    width: int,
    *,
    of_layer: tp.Callable = lambda layer: layer,
    dtype=jnp.float32,
    rngs,
  ):
    def layer(rngs):
      return of_layer(_linear(width, width, dtype=dtype, rngs=rngs))

    self.layers = stacked(layer, depth, rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return nnx.relu(nnx_ext.materialize(layer)(x))

    return forward(x, self.layers)


class Recurrent(nnx.Module):
  """A recurrent layer that starts at zeros."""

  def __init__(self, width: int, *, dtype=jnp.float32, rngs):
    cell = nnx.SimpleCell(
      width, width, dtype=dtype, param_dtype=dtype, rngs=rngs
    )
    self.rnn = nnx.RNN(cell, rngs=False)

  def __call__(self, x):
    return self.rnn(x, initial_carry=jnp.zeros_like(x[:, 0]))


class Hyper(nnx.Module):
  """Makes an MLP's weights, those of a layer from its embedding."""

  def __init__(
    self,
    depth: int,
    width: int,
    embedding: int,
    hidden: int,
    *,
    dtype=jnp.float32,
    rngs,
  ):
    self.embedding = nnx.Param(
      jax.random.normal(rngs.params(), (depth, embedding), dtype)
    )
    self.hidden = _linear(embedding, hidden, dtype=dtype, rngs=rngs)
    self.out = _linear(hidden, (width + 1) * width, dtype=dtype, rngs=rngs)
    self.width = width

  def __call__(self, params=None) -> Theta:
    made = self.out(nnx.relu(self.hidden(self.embedding[...])))
    made = made.reshape(len(made), self.width + 1, self.width)
    made = made * self.width**-0.5
    return {
      'layers': {
        i: {'kernel': layer[1:], 'bias': layer[0]}
        for i, layer in enumerate(made)
      }
    }


def _linear(inputs: int, outputs: int, *, dtype, rngs) -> nnx.Linear:
  return nnx.Linear(inputs, outputs, dtype=dtype, param_dtype=dtype, rngs=rngs)


def materialized_loss(model, x) -> jax.Array:
  return squares(nnx_ext.materialize(model), x)


def theta_of(parametrized: nnx.Module) -> Theta:
  """What a parametrized model trains, in dicts of arrays."""
  return nnx.to_pure_dict(nnx.state(parametrized, nnx.Param))


def made_of(function: tp.Callable, *names: str) -> tp.Callable:
  """A function of theta that gives weights.

  Args:
    function: gives a weight, from parameters by name, and what else is given
      with theta for that weight.
    *names: of these parameters.
  """

  def is_parameters(x):
    return isinstance(x, dict) and set(x) == set(names)

  def weights(theta: Theta, *rest: tp.Any) -> Theta:
    def weight(x, *rest):
      return function(*rest, **x) if is_parameters(x) else x

    return jax.tree.map(weight, theta, *rest, is_leaf=is_parameters)

  return weights


def normed(v, g):
  """A weight of direction ``v`` and length ``g``, computed in float32."""
  wide = v.astype(jnp.float32)
  norm = jnp.sqrt(jnp.sum(wide**2, axis=-2, keepdims=True))
  return (wide * (g[..., None, :] / norm)).astype(v.dtype)


def drawn(key, mean, rho):
  """A Gaussian weight, drawn in float32."""
  sigma = jax.nn.softplus(rho.astype(jnp.float32))
  noise = jax.random.normal(key, mean.shape)
  return (mean + sigma * noise).astype(mean.dtype)


def drawn_keys(keys: tp.Any, count: jax.Array, samples: int) -> tp.Any:
  """For each weight a key, or one for each of several samples."""

  def draw(key):
    key = jax.random.fold_in(key, count)
    if samples == 1:
      return key
    each = jax.random.split(key, samples)
    return jax.vmap(jax.random.fold_in, (0, None))(each, 0)

  return jax.tree.map(draw, keys)


NORMED = made_of(normed, 'v', 'g')
DRAWN = made_of(drawn, 'mean', 'rho')


def on_model(step: tp.Callable, model, *rest) -> steps.Jitted:
  """A call of a step on a model, jitted; its random state moves."""
  graphdef, state = nnx.split(model)

  def pure(state, *rest):
    model = nnx.merge(graphdef, state)
    return step(model, *rest), nnx.state(model, nnx.RngState)

  return steps.Jitted(pure, (state, *rest))


def reparam_step(weights: tp.Callable, theta, model, x) -> steps.Jitted:
  """By ``nnx_ext.reparam_value_and_grad``."""
  step = nnx_ext.reparam_value_and_grad(
    squares, lambda theta, params: weights(theta)
  )
  return on_model(
    lambda model, theta, x: step(theta, model, x), model, theta, x
  )


def hand_step(weights: tp.Callable, theta, model, x, *rest) -> steps.Jitted:
  """By weights, of theta and the rest, that are merged into the model."""
  graphdef = nnx.graphdef(model)

  def pure(theta, x, *rest):
    def of_theta(theta):
      return squares(nnx.merge(graphdef, weights(theta, *rest)), x)

    return jax.value_and_grad(of_theta)(theta), ()

  return steps.Jitted(pure, (theta, x, *rest))
