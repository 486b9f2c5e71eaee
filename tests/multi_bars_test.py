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
"""What a compiled step may cost: flops, loops, temporary bytes, traces.

Never a time: these repeat to the digit.
"""

import jax
import jax.numpy as jnp
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from benchmarks import multi_programs as programs
from benchmarks import steps
from tests import compiler

# Program, step to hold, peer, and the most that step / peer may be.
FLOPS = {
  'separate': (programs.separate(), 'nnx_ext', 'naive', 1.01),
  'heads': (programs.heads(2), 'nnx_ext', 'naive', 1.01),
  'heads_sum': (programs.heads(2), 'nnx_ext, sum', 'sum of losses', 1.01),
  'heads_16': (programs.heads(16, 32, 16), 'nnx_ext', 'naive', 1.01),
  'leak': (programs.heads(2, leak=True), 'nnx_ext, sum', 'naive', 0.75),
  'dropout': (
    programs.heads(2, depth=8, hidden=False, dropout=0.3),
    'nnx_ext',
    'naive',
    0.86,
  ),
  'scanned': (programs.scanned(), 'nnx_ext', 'naive', 0.87),
}


def _figures(program: programs.Program, name: str) -> steps.Figures:
  step = steps.jitted(program.function(name), program.arguments())
  return compiler.figures(step)


class MultiBarsTest(parameterized.TestCase):
  @parameterized.product(case=list(FLOPS))
  def test_flops(self, case):
    program, step, peer, bar = FLOPS[case]
    flops, of_peer = (_figures(program, name).flops for name in (step, peer))
    self.assertGreater(of_peer, 1e4)
    self.assertLessEqual(flops / of_peer, bar)

  def test_scanned_loops(self):
    program = programs.scanned()
    self.assertEqual(_figures(program, 'nnx_ext').loops, 4)
    self.assertEqual(_figures(program, 'naive').loops, 5)

  def test_temporary_bytes_of_a_scanned_step(self):
    program = programs.scanned(depth=12)
    actor, critic, x = program.arguments()
    graphdefs, states = zip(nnx.split(actor), nnx.split(critic))

    def by_hand(states):
      def losses(states):
        actor, critic = map(nnx.merge, graphdefs, states)
        out = program.losses(actor, critic, x)
        return out['policy'], out['value']

      values, differential = jax.linearize(losses, states)
      transpose = jax.linear_transpose(differential, states)
      (grads,) = transpose(tuple(jnp.ones_like(v) for v in values))
      return values, grads, states

    hand = compiler.figures(steps.Jitted(by_hand, (states,)))
    ours = _figures(program, 'nnx_ext')
    self.assertGreater(hand.temporary_bytes, 1e4)
    self.assertLessEqual(ours.temporary_bytes, 1.05 * hand.temporary_bytes)

  def test_one_trace_over_100_calls(self):
    program = programs.separate(width=8, size=4)
    calls = []

    def counted(*args):
      calls.append(None)
      return program.losses(*args)

    value_and_grad = nnx_ext.value_and_grad_multi(
      counted, argnums=program.argnums
    )

    @nnx.jit
    def step(actor, critic, actor_optimizer, critic_optimizer, x):
      values, grads = value_and_grad(actor, critic, x)
      actor_optimizer.update(actor, grads['policy'])
      critic_optimizer.update(critic, grads['value'])
      return values

    *modules, x = program.arguments()
    optimizers = [
      nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
      for module in modules
    ]
    first = step(*modules, *optimizers, x)
    for _ in range(99):
      last = step(*modules, *optimizers, x)
    self.assertLen(calls, 1)
    self.assertLess(float(last['value']), float(first['value']))

  def test_runs_once_without_jit(self):
    program = programs.heads(3, 8, 4)
    calls = []

    def counted(*args):
      calls.append(None)
      return program.losses(*args)

    nnx_ext.value_and_grad_multi(counted, argnums=program.argnums)(
      *program.arguments()
    )
    self.assertLen(calls, 1)

  def test_the_plan_counts_the_pullbacks(self):
    pullbacks = {}
    for leak in (False, True):
      program = programs.heads(2, 8, 4, leak=leak)
      plan = nnx_ext.multi_plan(
        program.losses, argnums=program.argnums, reduce='sum'
      )(*program.arguments())
      pullbacks[leak] = [(p.losses, p.leaves) for p in plan.pullbacks]
    trunk, head = 8, 4
    self.assertEqual(pullbacks[False], [(('h_0', 'h_1'), trunk + head + head)])
    # The last loss leaks into h_0: only that head needs a pullback alone.
    self.assertEqual(
      pullbacks[True], [(('h_0', 'h_1'), trunk + head), (('h_0',), head)]
    )
