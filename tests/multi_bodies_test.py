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
"""Transforms inside of ``f``, and several losses on several devices."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

from tests import models
from tests.transforms import (
  EACH_MODE,
  HEAD_ROUTES,
  LawTestCase,
  P,
  arrays,
  expected_law,
  inputs,
  multi,
  naive_multi,
  on_state,
  split_for,
  stateful,
)


def _call(model, x):
  return model(x)


def _mirrored(model, x):
  return 2.0 * model(x[:, ::-1])


def _losses_through(actor_call, critic_call=None):
  """The losses of forwards run by ``call(model, x)``."""

  def f(actor, critic, x):
    return models.leaking_losses(
      functools.partial(actor_call, actor),
      functools.partial(critic_call or actor_call, critic),
      x,
    )

  return f


def _by_state(transform):
  """``call`` by a transform of JAX, over the model's split state."""

  def call(model, x):
    graphdef, state = nnx.split(model)

    def pure(forward, state, x):
      model = nnx.merge(graphdef, state)
      return forward(model, x), nnx.state(model)

    y, state = transform(pure)(state, x)
    nnx.update(model, state)
    return y

  return call


def _lax_cond(pure):
  return lambda state, x: jax.lax.cond(
    _predicate(state['l1']['kernel']),
    functools.partial(pure, _call),
    functools.partial(pure, _mirrored),
    state,
    x,
  )


def _nnx_cond(mode):
  return lambda model, x: nnx.cond(
    _predicate(model.l1.kernel), _call, _mirrored, model, x, **mode
  )


def _predicate(kernel):
  """True for the actor, False for the critic, but not before the run."""
  return jnp.sum(kernel[...]) > -0.7


def _branch(model, x):
  is_actor = model.l2.out_features == 3
  return _call(model, x) if is_actor else _mirrored(model, x)


def _lax_scan(pure):
  def body(state, x):
    y, state = pure(_call, state, x)
    return state, y

  def transformed(state, x):
    state, y = jax.lax.scan(body, state, _chunks(x))
    return jnp.concatenate(y), state

  return transformed


def _nnx_scan(mode):
  scan = nnx.scan(
    lambda model, x: (model, model(x)),
    in_axes=(nnx.Carry, 0),
    out_axes=(nnx.Carry, 0),
    **mode,
  )
  return lambda model, x: jnp.concatenate(scan(model, _chunks(x))[1])


def _loop(model, x):
  return jnp.concatenate([model(chunk) for chunk in _chunks(x)])


def _chunks(x):
  return x.reshape(2, 4, 4)


# The actor's forward through a transform of JAX, the critic's through the
# same of NNX, and both without a transform.
BODIES: dict[str, tuple[tp.Callable, tp.Callable, tp.Callable]] = {
  'remat': (
    lambda pure: jax.checkpoint(functools.partial(pure, _call)),
    lambda mode: nnx.remat(_call, **mode),
    _call,
  ),
  'cond': (_lax_cond, _nnx_cond, _branch),
  'scan': (_lax_scan, _nnx_scan, _loop),
}


# One function for each body, so that its oracle is computed once.
_plain_losses = functools.cache(_losses_through)


class Stack(nnx.Module):
  """Layers with dropout, stacked by ``nnx.vmap``, and two heads."""

  def __init__(self, rngs):
    self.layers = nnx.vmap(self._layer)(rngs.split(3))
    self.actor = nnx.Linear(4, 3, rngs=rngs)
    self.critic = nnx.Linear(4, 1, rngs=rngs)

  @staticmethod
  def _layer(rngs):
    return nnx.Sequential(
      nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.3, rngs=rngs), jnp.tanh
    )


def _stack_losses(mode):
  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
  def trunk(x, layer):
    return x + layer(x)

  def f(model, x):
    features = trunk(x, model.layers)
    head = lambda head: lambda x: head(features)
    return models.leaking_losses(head(model.actor), head(model.critic), x)

  return f


@functools.cache
def _expected_stack():
  model = Stack(nnx.Rngs(0))
  f = _stack_losses(models.MODES['default'])
  result = nnx.jit(naive_multi(f, HEAD_ROUTES))(model, inputs())
  return result, arrays(model)


def _tripled(mode):
  """``call`` of a linear layer that triples what flows back to its bias."""
  call = nnx.custom_vjp(lambda layer, x: layer(x), **mode)

  def fwd(layer, x):
    return call(layer, x), (layer, x)

  def bwd(saved, g):
    layer, x = saved
    if mode['graph_updates']:
      (gradient, _), g = g
      gradient = jax.tree.map(lambda x: x, gradient)
      kernel, bias = gradient['kernel'], gradient['bias']
    else:
      gradient = nnx.clone(layer)
      kernel, bias = gradient.kernel, gradient.bias
    kernel[...] = x.T @ g
    bias[...] = 3.0 * g.sum(0)
    return gradient, g @ layer.kernel[...].T

  call.defvjp(fwd, bwd)
  return call


class BodyTest(LawTestCase):
  """Transforms inside the function that returns the losses."""

  @parameterized.product(body=list(BODIES), mode=list(models.MODES))
  def test_forward_through(self, body, mode):
    jax_transform, nnx_transform, plain = BODIES[body]
    f = _losses_through(
      _by_state(jax_transform), nnx_transform(models.MODES[mode])
    )
    modules = stateful()
    step = nnx.jit(multi(mode, f), **models.MODES[mode])
    result = step(*modules, inputs())
    self.assert_law(result, modules, *expected_law(_plain_losses(plain)))

  def test_branches_differ(self):
    actor, critic = stateful()
    self.assertTrue(_predicate(actor.l1.kernel))
    self.assertFalse(_predicate(critic.l1.kernel))

  @EACH_MODE
  def test_scan_over_layers(self, mode):
    step = multi(mode, _stack_losses(models.MODES[mode]), argnums=HEAD_ROUTES)
    model = Stack(nnx.Rngs(0))
    result = nnx.jit(step, **models.MODES[mode])(model, inputs())
    self.assert_law(result, model, *_expected_stack())
    counts = jax.tree.leaves(nnx.state(model.layers, nnx.RngCount))
    self.assertNotEqual(int(counts[0].sum()), 0)

  @EACH_MODE
  def test_jax_custom_vjp(self, mode):
    @jax.custom_vjp
    def tripled(x):
      return x

    tripled.defvjp(lambda x: (x, None), lambda _, g: (3.0 * g,))

    def f(actor, critic, x):
      return models.leaking_losses(actor, lambda x: tripled(critic(x)), x)

    (losses, grads), after = expected_law()
    tripled_value = jax.tree.map(lambda g: 3.0 * g, grads['value'])
    expected = losses, {**grads, 'value': tripled_value}
    actor, critic = stateful()
    result = multi(mode, f)(actor, critic, inputs())
    self.assert_law(result, (actor, critic), expected, after)

  @EACH_MODE
  def test_nnx_custom_vjp(self, mode):
    rngs = nnx.Rngs(0)
    actor, critic = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
    losses, grads = naive_multi()(actor, critic, inputs())
    for gradient in grads.values():
      gradient['bias'][...] *= 3.0
    f = _losses_through(_tripled(models.MODES[mode]))
    before = arrays((actor, critic))
    result = multi(mode, f)(actor, critic, inputs())
    self.assert_law(result, (actor, critic), (losses, grads), before)


def _mesh():
  return jax.make_mesh(
    (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )


def _normalized(axis='data'):
  """An actor and a critic with statistics of the whole batch."""
  rngs = nnx.Rngs(0)
  actor, critic = (
    models.MLP(4, dout, batch_norm=True, rngs=rngs) for dout in (3, 1)
  )
  for module in actor, critic:
    module.norm.axis_name = axis
  return actor, critic


def _averaged_losses(*args):
  return jax.lax.pmean(models.leaking_losses(*args), 'data')


@functools.cache
def _expected_whole_batch():
  """The oracle on one device."""
  modules = _normalized(axis=None)
  return naive_multi()(*modules, inputs()), arrays(modules)


def _per_device(step):
  """Each device's losses and the gradients of their sum."""
  graphdef, state = nnx.split(_normalized())

  def run(state, x):
    (losses, grads), _ = on_state(step, graphdef)(state, x)
    return jax.tree.map(lambda x: x[None], losses), grads

  specs = {'in_specs': (P(), P('data')), 'out_specs': (P('data'), P())}
  return jax.jit(jax.shard_map(run, mesh=_mesh(), **specs))(state, inputs())


@functools.cache
def _expected_per_device():
  return _per_device(naive_multi())


class ShardTest(LawTestCase):
  """Four devices: parameters replicated, the batch sharded."""

  def _check(self, result, modules):
    self.assert_law(
      result, modules, *_expected_whole_batch(), rtol=1e-4, atol=1e-5
    )

  def test_four_devices(self):
    self.assertLen(jax.devices(), 4)

  @EACH_MODE
  def test_gradients_averaged_outside(self, mode):
    graphdef, state = split_for(_normalized(), mode)

    @jax.jit
    @functools.partial(
      jax.shard_map, mesh=_mesh(), in_specs=(P(), P('data')), out_specs=P()
    )
    def step(state, x):
      local = jax.tree.map(
        lambda x: jax.lax.pcast(x, 'data', to='varying'), state
      )
      actor, critic = nnx.merge(graphdef, local)
      result = multi(mode)(actor, critic, x)
      return jax.lax.pmean((result, nnx.state((actor, critic))), 'data')

    result, state = step(state, inputs())
    self._check(result, nnx.merge(graphdef, state))

  @EACH_MODE
  def test_local_losses(self, mode):
    """Types over mesh axes are those of each loss alone."""
    expected = _expected_per_device()
    self.assert_close(_per_device(multi(mode)), expected)
    self.assertGreater(float(jnp.std(expected[0]['policy'])), 1e-3)

  @EACH_MODE
  def test_nnx_shard_map(self, mode):
    actor, critic = _normalized()
    step = nnx.shard_map(
      multi(mode, _averaged_losses),
      mesh=_mesh(),
      in_specs=(P(), P(), P('data')),
      out_specs=P(),
      **models.MODES[mode],
    )
    result = nnx.jit(step, **models.MODES[mode])(actor, critic, inputs())
    self._check(result, (actor, critic))

  @EACH_MODE
  def test_sharded_batch(self, mode):
    actor, critic = _normalized(axis=None)
    x = jax.device_put(inputs(), jax.sharding.NamedSharding(_mesh(), P('data')))
    result = nnx.jit(multi(mode), **models.MODES[mode])(actor, critic, x)
    self._check(result, (actor, critic))
    self.assertLen(result[1]['value']['l1']['kernel'][...].devices(), 4)
