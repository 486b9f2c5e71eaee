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
"""What the tests of transforms share: nets, steps, the law and its oracle.

Unless a test says otherwise the model has running statistics and dropout,
its losses leak into each other, and three things are compared with each loss
alone from the same starting state: values, gradients and the state after.
"""

import functools
import typing as tp

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

DIFF = nnx.DiffState
P = jax.sharding.PartitionSpec

# Routes that mean the same in every mode.
ROUTES = {'policy': DIFF(0, nnx.Param), 'value': DIFF(1, nnx.Param)}


def all_but(name: str):
  """The Params of argument 0 that have no ``name`` in their path."""
  return DIFF(0, nnx.All(nnx.Param, nnx.Not(nnx.PathContains(name))))


# Two heads on a trunk, in one module.
HEAD_ROUTES = {'policy': all_but('critic'), 'value': all_but('actor')}

SEEDS = (0, 3, 7)

EACH_MODE = parameterized.parameters(*models.MODES)


def stateless(seed: int = 0) -> tuple[models.MLP, models.MLP]:
  """An actor and a critic."""
  rngs = nnx.Rngs(params=seed, dropout=seed + 1)
  return models.MLP(4, 3, rngs=rngs), models.MLP(4, 1, rngs=rngs)


def stateful(seed: int = 0) -> tuple[models.MLP, models.MLP]:
  """An actor with dropout and a critic with running statistics."""
  rngs = nnx.Rngs(params=seed, dropout=seed + 1)
  return (
    models.MLP(4, 3, dropout=0.4, rngs=rngs),
    models.MLP(4, 1, batch_norm=True, rngs=rngs),
  )


inputs = functools.partial(models.batch, size=8)


def multi(mode: str, f: tp.Callable = models.leaking_losses, **options):
  options = {'argnums': ROUTES, **models.MODES[mode], **options}
  return nnx_ext.value_and_grad_multi(f, **options)


def naive_multi(f: tp.Callable = models.leaking_losses, argnums=None):
  """The oracle of ``multi``: each loss by ``nnx.value_and_grad``, all from
  the same starting state, which then moves as by one of these calls.
  """

  def step(*args):
    modules = modules_of(args)
    losses, grads, after = {}, {}, ()
    for key, entry in (argnums or ROUTES).items():
      after = nnx.clone(modules)
      alone = functools.partial(lambda key, *args: f(*args)[key], key)
      losses[key], grads[key] = nnx.value_and_grad(
        alone, argnums=entry, **models.MODES['default']
      )(*after, *args[len(after) :])
    nnx.update(modules, nnx.state(after))
    return losses, grads

  return step


def modules_of(args) -> tuple[nnx.Module, ...]:
  return tuple(x for x in args if isinstance(x, nnx.Module))


@functools.cache
def expected_law(f: tp.Callable = models.leaking_losses):
  """What ``naive_multi`` gives for ``stateful()`` and ``inputs()``."""
  modules = stateful()
  return naive_multi(f)(*modules, inputs()), arrays(modules)


def arrays(tree) -> list[np.ndarray]:
  """All arrays that ``tree`` holds, with keys as numbers."""
  return [
    np.asarray(
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    )
    for x in jax.tree.leaves(nnx.state(tree))
  ]


def split_for(modules, mode: str):
  return nnx.split(modules, graph=models.MODES[mode]['graph'])


def on_state(step, graphdef):
  """``step`` as a pure function of the modules' state."""

  def pure(state, x):
    actor, critic = nnx.merge(graphdef, state)
    return step(actor, critic, x), nnx.state((actor, critic))

  return pure


def distances(actor, critic, x, target):
  """Losses of which only the second reads the target."""
  logits, value = actor(x), critic(x)[:, 0]
  return {
    'policy': jnp.mean(jnp.sum(logits, axis=1) * value),
    'value': jnp.mean((value - target) ** 2) * jnp.mean(jnp.exp(logits)),
  }


class Heads(nnx.Module):
  """The same networks, with a trunk that both losses reach."""

  def __init__(self, rngs):
    self.trunk = nnx.Linear(4, 4, rngs=rngs)
    self.actor = nnx.Linear(4, 3, rngs=rngs)
    self.critic = nnx.Linear(4, 1, rngs=rngs)


def head_distances(model, x, target):
  return distances(model.actor, model.critic, jnp.tanh(model.trunk(x)), target)


def stack_trees(trees):
  return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


class LawTestCase(parameterized.TestCase):
  def assert_close(self, actual, expected, rtol=1e-5, atol=1e-6):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)
    chex.assert_trees_all_equal_dtypes(actual, expected)
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))

  def assert_law(self, actual, modules, expected=None, after=None, **tolerance):
    """``actual`` is ``(losses, gradients)``, ``modules`` are those after."""
    if expected is None:
      expected, after = expected_law()
    for gradient in jax.tree.leaves(expected):
      self.assertGreater(np.abs(gradient).max(), 1e-6)
    self.assert_close(actual, expected, **tolerance)
    self.assert_close(arrays(modules), after, **tolerance)
