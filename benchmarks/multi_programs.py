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
"""Multi-loss steps to measure, each beside what users write by hand.

A :class:`Program` is a function of several losses with its arguments and
routes. Its steps return values and gradients:

* ``multi``: ``nnx_ext.value_and_grad_multi``, one gradient a loss;
* ``multi_sum``: the same with ``reduce='sum'``;
* ``naive``: one ``nnx.value_and_grad`` a loss;
* ``summed``: one ``nnx.value_and_grad`` of the sum of the losses, which is
  right only where no loss leaks into what only another trains.
"""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_ext

Step = tp.Callable[..., tp.Any]


@dataclasses.dataclass(frozen=True)
class Program:
  name: str
  losses: tp.Callable[..., dict[str, jax.Array]]
  arguments: tp.Callable[[], tuple]
  argnums: tp.Any

  def multi(self) -> Step:
    return nnx_ext.value_and_grad_multi(self.losses, argnums=self.argnums)

  def multi_sum(self) -> Step:
    return nnx_ext.value_and_grad_multi(
      self.losses, argnums=self.argnums, reduce='sum'
    )

  def naive(self) -> Step:
    def alone(key):
      return lambda *args: self.losses(*args)[key]

    steps = {
      key: nnx.value_and_grad(alone(key), argnums=argnums)
      for key, argnums in self.argnums.items()
    }
    return lambda *args: {key: step(*args) for key, step in steps.items()}

  def summed(self) -> Step:
    argnums = sorted(
      {
        entry.argnum if isinstance(entry, nnx.DiffState) else entry
        for entry in self.argnums.values()
      }
    )
    return nnx.value_and_grad(
      lambda *args: sum(self.losses(*args).values()), argnums=tuple(argnums)
    )

  def steps(self) -> dict[str, Step]:
    return {
      'multi': self.multi(),
      'multi_sum': self.multi_sum(),
      'naive': self.naive(),
      'summed': self.summed(),
    }


class MLP(nnx.Module):
  def __init__(self, sizes, *, dropout: float = 0.0, rngs: nnx.Rngs):
    self.layers = nnx.List(
      [nnx.Linear(i, o, rngs=rngs) for i, o in zip(sizes, sizes[1:])]
    )
    self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

  def __call__(self, x):
    for layer in self.layers:
      x = jnp.tanh(layer(x))
      if self.dropout is not None:
        x = self.dropout(x)
    return x


class Scanned(nnx.Module):
  """Layers of one width, their weights stacked, run by a scan."""

  def __init__(self, depth: int, width: int, *, rngs: nnx.Rngs):
    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def stack(rngs):
      return nnx.Linear(width, width, rngs=rngs)

    self.layers = stack(rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return jnp.tanh(layer(x))

    return forward(x, self.layers)


class Heads(nnx.Module):
  def __init__(self, trunk: nnx.Module, sizes, names, *, rngs: nnx.Rngs):
    self.trunk = trunk
    for name in names:
      setattr(self, name, MLP(sizes, rngs=rngs))

  def __call__(self, x):
    h = self.trunk(x)
    return {name: head(h)[:, 0] for name, head in self._heads()}

  def _heads(self):
    return [
      (name, head) for name, head in vars(self).items() if name.startswith('h_')
    ]


def _batch(size: int, width: int) -> jax.Array:
  return jax.random.normal(jax.random.key(7), (size, width))


def actor_critic_losses(actor, critic, x) -> dict[str, jax.Array]:
  log_prob = jax.nn.log_softmax(actor(x))[:, 0]
  value = critic(x)[:, 0]
  advantage = jax.lax.stop_gradient(1.0 - value)
  return {
    'policy': -jnp.mean(log_prob * advantage),
    'value': jnp.mean((1.0 - value) ** 2),
  }


def separate(width: int = 128, size: int = 64) -> Program:
  """An actor and a critic, each with a loss of its own."""

  def arguments():
    rngs = nnx.Rngs(0)
    actor = MLP((width, width, width, 8), rngs=rngs)
    critic = MLP((width, width, width, 1), rngs=rngs)
    return actor, critic, _batch(size, width)

  argnums = {'policy': 0, 'value': 1}
  return Program('separate', actor_critic_losses, arguments, argnums)


def scanned(depth: int = 6, width: int = 64, size: int = 32) -> Program:
  """The same with scanned networks: XLA does not merge the naive forwards."""

  def arguments():
    rngs = nnx.Rngs(0)
    actor = Scanned(depth, width, rngs=rngs)
    critic = Scanned(depth, width, rngs=rngs)
    return actor, critic, _batch(size, width)

  argnums = {'policy': 0, 'value': 1}
  return Program('scanned', actor_critic_losses, arguments, argnums)


def heads(
  count: int = 2,
  width: int = 128,
  size: int = 64,
  *,
  depth: int = 4,
  hidden: bool = True,
  leak: bool = False,
  dropout: float = 0.0,
) -> Program:
  """Heads on one trunk, each trained with the trunk by a loss of its own.

  ``depth`` counts the trunk's layers; with ``hidden`` a head has one more
  than its output layer. With ``leak`` the last loss reads the first head's
  output too. ``dropout`` draws from a stream of the model's own.
  """
  names = [f'h_{i}' for i in range(count)]

  def losses(model, x):
    y = model(x)
    out = {name: jnp.mean((y[name] - i) ** 2) for i, name in enumerate(names)}
    if leak:
      out[names[-1]] += jnp.mean(y[names[-1]] * y[names[0]])
    return out

  def arguments():
    rngs = nnx.Rngs(0)
    trunk = MLP((width,) * (depth + 1), dropout=dropout, rngs=rngs)
    sizes = (width, width, 1) if hidden else (width, 1)
    return Heads(trunk, sizes, names, rngs=rngs), _batch(size, width)

  argnums = {name: nnx.DiffState(0, _trunk_and(name)) for name in names}
  name = 'heads_leak' if leak else 'heads_dropout' if dropout else 'heads'
  return Program(f'{name}_{count}', losses, arguments, argnums)


def _trunk_and(name: str):
  return nnx.All(
    nnx.Param, nnx.Any(nnx.PathContains('trunk'), nnx.PathContains(name))
  )


def a2c_step(program: Program, step: str = 'multi') -> tuple[Step, tuple]:
  """A whole training step of an actor-critic program, with two Adams."""
  actor, critic, x = program.arguments()
  optimizers = tuple(
    nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    for module in (actor, critic)
  )
  value_and_grad = program.steps()[step]

  def train(actor, critic, actor_optimizer, critic_optimizer, x):
    out = value_and_grad(actor, critic, x)
    if step == 'naive':
      losses = {key: value for key, (value, _) in out.items()}
      grads = {key: grad for key, (_, grad) in out.items()}
    else:
      losses, grads = out
    actor_optimizer.update(actor, grads['policy'])
    critic_optimizer.update(critic, grads['value'])
    return losses

  return train, (actor, critic, *optimizers, x)


def compiled(step: Step, arguments: tuple) -> tuple[tp.Any, nnx.State]:
  """``step`` compiled as a pure function of the arguments' state, and that
  state.
  """
  graphdef, state = nnx.split(arguments)

  def pure(state):
    arguments = nnx.merge(graphdef, state)
    out = step(*arguments)
    return out, nnx.state(arguments)

  return jax.jit(pure).lower(state).compile(), state


def flops(compiled) -> float:
  """XLA's count of floating point operations; a loop's body counts once."""
  return compiled.cost_analysis()['flops']


def temporary_bytes(compiled) -> int:
  return compiled.memory_analysis().temp_size_in_bytes


def loops(compiled) -> int:
  return compiled.as_text().count(' while(')
