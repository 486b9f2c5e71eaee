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
"""The update of the actor-critic example, as it is and as written by hand.

Each step updates the agent, optimizers and all, by a given rollout.
"""

import functools
import importlib.util
import pathlib
import types
import typing as tp

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from benchmarks import steps as measured
from benchmarks.multi_programs import dense, first_saves

STEPS = ('nnx_ext', 'naive')
_PATH = pathlib.Path(__file__).parents[1] / 'docs/examples/a2c_cartpole.py'


@functools.cache
def _example() -> types.ModuleType:
  pytest.importorskip('gymnax')
  spec = importlib.util.spec_from_file_location(_PATH.stem, _PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def case(networks: str, steps: int = 128, envs: int = 64) -> measured.Case:
  """The example's update of ``steps`` in ``envs`` environments."""
  naive = {'two networks': _naive, 'shared trunk': _naive_shared}[networks]
  limit = {'two networks': _limit, 'shared trunk': _limit_shared}[networks]
  make = functools.partial(_step, networks, steps, envs)
  return measured.Case(
    steps={
      'nnx_ext': functools.partial(
        make, lambda agent, data: agent.update(data)
      ),
      'naive': functools.partial(make, naive),
    },
    baseline='naive',
    limit=limit(steps * envs),
  )


def _limit(rows: int) -> float:
  """Of the products of an actor and a critic, 4 to 64 to 64 to 2 or 1."""
  actor = first_saves(dense(rows, (4, 64, 64, 2)))
  critic = first_saves(dense(rows, (4, 64, 64, 1)))
  return actor + critic + sum(dense(rows, (4, 64, 64, 1)))


def _limit_shared(rows: int) -> float:
  """The same of one network with both heads."""
  network = first_saves(dense(rows, (4, 64, 64, 3)))
  return network + sum(dense(rows, (4, 64, 64, 1)))


def _step(
  networks: str, steps: int, envs: int, update: tp.Callable
) -> measured.Jitted:
  a2c = _example()
  kinds = {
    'two networks': a2c.SeparateAgent,
    'shared trunk': a2c.SharedTrunkAgent,
  }
  agent = kinds[networks](optax.adam(1e-3), nnx.Rngs(0))
  graphdef, state = nnx.split(agent)

  def pure(state, rollout):
    agent = nnx.merge(graphdef, state)
    update(agent, rollout)
    return (nnx.state(agent),)

  return measured.Jitted(pure, (state, _rollout(a2c, steps, envs)), carried=1)


def _rollout(a2c: types.ModuleType, steps: int, envs: int) -> tp.Any:
  keys = iter(jax.random.split(jax.random.key(0), 4))
  shape = steps, envs
  obs, next_obs = (
    jax.random.normal(next(keys), (*shape, *a2c.ENV.obs_shape)) for _ in '12'
  )
  return a2c.Rollout(
    obs=obs,
    action=jax.random.randint(next(keys), shape, 0, a2c.ENV.num_actions),
    reward=jnp.ones(shape),
    next_obs=next_obs,
    terminated=jnp.zeros(shape, bool),
    done=jax.random.bernoulli(next(keys), 0.1, shape),
    episode_return=jnp.ones(shape),
  )


def _alone(losses: tp.Callable, key: str) -> tp.Callable:
  return lambda *args: losses(*args)[key]


def _naive(agent: tp.Any, rollout: tp.Any) -> None:
  losses = _example().losses
  networks = agent.actor, agent.critic
  policy = nnx.grad(_alone(losses, 'policy'), argnums=0)
  value = nnx.grad(_alone(losses, 'value'), argnums=1)
  actor_grads = policy(*networks, rollout)
  critic_grads = value(*networks, rollout)
  agent.actor_optimizer.update(agent.actor, actor_grads)
  agent.critic_optimizer.update(agent.critic, critic_grads)


def _naive_shared(agent: tp.Any, rollout: tp.Any) -> None:
  losses = _example().shared_losses
  policy, value = (
    nnx.grad(_alone(losses, key))(agent.network, rollout)
    for key in ('policy', 'value')
  )
  weight = agent.weights['value']
  grads = jax.tree.map(lambda p, v: p + weight * v, policy, value)
  agent.optimizer.update(agent.network, grads)
