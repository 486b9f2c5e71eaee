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
"""The A2C example learns, and does what it says."""

import contextlib
import functools
import io
import os
import pathlib
import re
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx

from tests import examples

a2c = examples.load('a2c_cartpole')

AGENTS = (
  ('separate', a2c.SeparateAgent),
  ('shared_trunk', a2c.SharedTrunkAgent),
)


@functools.cache
def _rollout():
  @nnx.jit
  def collect(agent, key):
    envs = a2c.reset(key, a2c.NUM_ENVS)
    return a2c.collect(agent, envs, key, steps=100)

  agent = a2c.SeparateAgent(optax.sgd(1.0), nnx.Rngs(0))
  _, rollout = collect(agent, jax.random.key(0))
  return jax.tree.map(np.asarray, rollout)


def _params(module):
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@nnx.jit
def _update(agent, rollout):
  """Updates by plain gradient descent, and returns the gradients."""
  before = _params(agent)
  agent.update(rollout)
  return jax.tree.map(jnp.subtract, before, _params(agent))


class RolloutTest(absltest.TestCase):
  def test_next_obs_is_of_the_same_episode(self):
    rollout = _rollout()
    done = rollout.done[:-1]
    self.assertTrue(done.any())
    np.testing.assert_array_equal(
      rollout.next_obs[:-1][~done], rollout.obs[1:][~done]
    )
    # An episode starts in the middle and ends out of bounds.
    self.assertLessEqual(np.abs(rollout.obs[1:][done]).max(), 0.05)
    position, angle = rollout.next_obs[..., 0], rollout.next_obs[..., 2]
    np.testing.assert_array_equal(
      (np.abs(position) > 2.4) | (np.abs(angle) > np.deg2rad(12)),
      rollout.terminated,
    )

  def test_episode_return_is_the_sum_of_rewards(self):
    rollout = _rollout()
    for reward, done, episode_return in zip(
      rollout.reward.T, rollout.done.T, rollout.episode_return.T
    ):
      ends = np.flatnonzero(done)
      totals = np.diff(np.cumsum(reward)[ends], prepend=0.0)
      np.testing.assert_array_equal(episode_return[ends], totals)


class A2CTest(parameterized.TestCase):
  def test_gae_is_a_discounted_sum_of_errors(self):
    rng = np.random.default_rng(0)
    steps, envs = 40, 4
    shape = (steps, envs)
    reward, value, next_value = rng.normal(size=(3, *shape)).astype('float32')
    terminated, truncated = rng.random((2, *shape)) < 0.1
    done = terminated | truncated

    expected = np.zeros(shape)
    for start in range(steps):
      for env in range(envs):
        factor = 1.0
        for t in range(start, steps):
          later = 0.0 if terminated[t, env] else next_value[t, env]
          target = a2c.REWARD_SCALE * reward[t, env] + a2c.GAMMA * later
          expected[start, env] += factor * (target - value[t, env])
          factor *= a2c.GAMMA * a2c.GAE_LAMBDA
          if done[t, env]:
            break

    rollout = a2c.Rollout(
      obs=None,
      action=None,
      reward=jnp.asarray(reward),
      next_obs=None,
      terminated=jnp.asarray(terminated),
      done=jnp.asarray(done),
      episode_return=None,
    )
    advantage = a2c.gae(rollout, jnp.asarray(value), jnp.asarray(next_value))
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)

  @parameterized.named_parameters(*AGENTS)
  def test_one_pullback_serves_both_losses(self, make_agent):
    agent = make_agent(optax.sgd(0.1), nnx.Rngs(0))
    plan = nnx.eval_shape(a2c.plan_update, agent, jax.random.key(0))
    self.assertLen(plan.pullbacks, 1)
    self.assertEqual(plan.pullbacks[0].losses, ('policy', 'value'))
    self.assertEqual([loss.kept_out for loss in plan.losses], [(), ()])

  def test_each_loss_trains_its_own_network(self):
    agent = a2c.SeparateAgent(optax.sgd(1.0), nnx.Rngs(0))

    @nnx.jit
    def expected(actor, critic, rollout):
      policy = lambda *args: a2c.losses(*args)['policy']
      value = lambda *args: a2c.losses(*args)['value']
      return {
        'actor': nnx.grad(policy, argnums=0)(actor, critic, rollout),
        'critic': nnx.grad(value, argnums=1)(actor, critic, rollout),
      }

    grads = expected(agent.actor, agent.critic, _rollout())
    self._check_update(agent, nnx.to_pure_dict(nnx.State(grads)))

  def test_shared_trunk_learns_from_the_weighted_sum(self):
    agent = a2c.SharedTrunkAgent(optax.sgd(1.0), nnx.Rngs(0))

    @nnx.jit
    @nnx.grad
    def expected(network, rollout):
      losses = a2c.shared_losses(network, rollout)
      return losses['policy'] + a2c.VALUE_COEF * losses['value']

    grads = expected(agent.network, _rollout())
    self._check_update(agent, {'network': nnx.to_pure_dict(grads)})

  def _check_update(self, agent, expected):
    grads = _update(agent, _rollout())
    chex.assert_trees_all_close(grads, expected, rtol=1e-3, atol=1e-6)
    for leaf in jax.tree.leaves(grads):
      self.assertGreater(np.abs(leaf).max(), 1e-5)

  def test_a_seed_repeats_itself(self):
    tx = optax.adam(a2c.LEARNING_RATE)
    results = []
    for seed in (0, 0, 1):
      agent = a2c.SeparateAgent(tx, nnx.Rngs(seed))
      curve = a2c.train(agent, nnx.Rngs(seed), updates=2, quiet=True)
      results.append((_params(agent), curve))
    (params, curve), (same_params, same_curve), (other_params, _) = results
    chex.assert_trees_all_equal(params, same_params)
    self.assertEqual(curve, same_curve)
    with self.assertRaises(AssertionError):
      chex.assert_trees_all_equal(params, other_params)

  @parameterized.named_parameters(
    ('separate', [], 'argument 1 (`critic`)'),
    ('shared_trunk', ['--shared-trunk'], 'argument 0 (`network`)'),
  )
  def test_program_learns(self, options, argument):
    out, err = io.StringIO(), io.StringIO()
    with (
      tempfile.TemporaryDirectory() as directory,
      contextlib.chdir(directory),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
    ):
      a2c.main(['--seed', '3', '--updates', '100', *options])
      self.assertEqual(os.listdir(), ['a2c_cartpole.png'])
      picture = pathlib.Path('a2c_cartpole.png').read_bytes()
    self.assertStartsWith(picture, b'\x89PNG')
    *plan, last = out.getvalue().splitlines()
    self.assertIn(argument, '\n'.join(plan))
    self.assertStartsWith(plan[-1], 'pullback 1 of 1: policy + value')
    self.assertRegex(err.getvalue(), r'100/100 .*return \d+\.\d')
    evaluation = re.fullmatch(
      r'evaluation: mean return (\d+\.\d) \(128 episodes, seed 3\)', last
    )
    self.assertIsNotNone(evaluation, last)
    # Untrained networks balance the pole for 50 to 65 steps.
    self.assertGreater(float(evaluation[1]), 120)


if __name__ == '__main__':
  absltest.main()
