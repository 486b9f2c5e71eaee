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
"""Models and modes that several tests share."""

import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

MODES: dict[str, dict[str, bool]] = {
  'default': {'graph': True, 'graph_updates': True},
  'no_updates': {'graph': True, 'graph_updates': False},
  'tree': {'graph': False, 'graph_updates': False},
}


class MLP(nnx.Module):
  """Two layers, with the stateful parts that ``parts`` asks for."""

  def __init__(
    self,
    din: int,
    dout: int,
    *,
    hidden: int = 6,
    batch_norm: bool = False,
    dropout: float = 0.0,
    rngs: nnx.Rngs,
  ):
    self.l1 = nnx.Linear(din, hidden, rngs=rngs)
    self.norm = nnx.BatchNorm(hidden, rngs=rngs) if batch_norm else None
    self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
    self.l2 = nnx.Linear(hidden, dout, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    h = jnp.tanh(self.l1(x))
    if self.norm is not None:
      h = self.norm(h)
    if self.dropout is not None:
      h = self.dropout(h)
    return self.l2(h)


class TwoHeads(nnx.Module):
  """A trunk and two heads: the usual shared actor and critic."""

  def __init__(self, din: int, *, rngs: nnx.Rngs, trunk: tp.Any = None):
    self.trunk = trunk or MLP(din, 5, rngs=rngs)
    self.actor = nnx.Linear(5, 3, rngs=rngs)
    self.critic = nnx.Linear(5, 1, rngs=rngs)

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.tanh(self.trunk(x))
    return self.actor(h), self.critic(h)


class Owner(nnx.Module):
  """A head on a body that another Module may hold as well."""

  def __init__(self, body: nnx.Module, dout: int, *, rngs: nnx.Rngs):
    self.body = body
    self.head = nnx.Linear(5, dout, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.head(jnp.tanh(self.body(x)))


def actor_critic_losses(actor, critic, x) -> dict[str, jax.Array]:
  """An actor and a critic loss that both need both forwards."""
  logits, value = actor(x), critic(x)[:, 0]
  advantage = jax.lax.stop_gradient(1.0 - value)
  return {
    'policy': -jnp.mean(jax.nn.log_softmax(logits)[:, 0] * advantage),
    'value': jnp.mean((1.0 - value) ** 2),
  }


def leaking_losses(actor, critic, x) -> dict[str, jax.Array]:
  """The same without ``stop_gradient``, and the value reads the policy."""
  logits, value = actor(x), critic(x)[:, 0]
  log_prob = jax.nn.log_softmax(logits)[:, 0]
  return {
    'policy': -jnp.mean(log_prob * (1.0 - value)),
    'value': jnp.mean((1.0 - value) ** 2 * jnp.exp(log_prob)),
  }


def batch(din: int = 4, size: int = 7) -> jax.Array:
  return jax.random.normal(jax.random.key(42), (size, din))
