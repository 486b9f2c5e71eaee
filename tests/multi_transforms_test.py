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
"""Several losses under, over and beside the transforms of JAX and NNX.

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
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

DIFF = nnx.DiffState
P = jax.sharding.PartitionSpec

# Routes that mean the same in every mode.
ROUTES = {'policy': DIFF(0, nnx.Param), 'value': DIFF(1, nnx.Param)}


def _all_but(name: str):
  """The Params of argument 0 that have no ``name`` in their path."""
  return DIFF(0, nnx.All(nnx.Param, nnx.Not(nnx.PathContains(name))))


# Two heads on a trunk, in one module.
HEAD_ROUTES = {'policy': _all_but('critic'), 'value': _all_but('actor')}

_SEEDS = (0, 3, 7)

EACH_MODE = parameterized.parameters(*models.MODES)


def setUpModule():
  # Compiling is most of the time these tests take.
  jax.config.update('jax_disable_most_optimizations', True)


def tearDownModule():
  jax.config.update('jax_disable_most_optimizations', False)


def _plain(seed: int = 0) -> tuple[models.MLP, models.MLP]:
  """An actor and a critic."""
  rngs = nnx.Rngs(params=seed, dropout=seed + 1)
  return models.MLP(4, 3, rngs=rngs), models.MLP(4, 1, rngs=rngs)


def _stateful(seed: int = 0) -> tuple[models.MLP, models.MLP]:
  """An actor with dropout and a critic with running statistics."""
  rngs = nnx.Rngs(params=seed, dropout=seed + 1)
  return (
    models.MLP(4, 3, dropout=0.4, rngs=rngs),
    models.MLP(4, 1, batch_norm=True, rngs=rngs),
  )


_batch = functools.partial(models.batch, size=8)


def _step(mode: str, f: tp.Callable = models.leaking_losses, **options):
  options = {'argnums': ROUTES, **models.MODES[mode], **options}
  return nnx_ext.value_and_grad_multi(f, **options)


def _naive(f: tp.Callable = models.leaking_losses, argnums=None):
  """The oracle of ``_step``: each loss by ``nnx.value_and_grad``, all from
  the same starting state, which then moves as by one of these calls.
  """

  def step(*args):
    modules = _modules(args)
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


def _modules(args) -> tuple[nnx.Module, ...]:
  return tuple(x for x in args if isinstance(x, nnx.Module))


@functools.cache
def _expected(f: tp.Callable = models.leaking_losses):
  """What ``_naive`` gives for ``_stateful()`` and ``_batch()``."""
  modules = _stateful()
  return _naive(f)(*modules, _batch()), _state(modules)


def _state(tree) -> list[np.ndarray]:
  """All arrays that ``tree`` holds, with keys as numbers."""
  return [
    np.asarray(
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    )
    for x in jax.tree.leaves(nnx.state(tree))
  ]


def _split(modules, mode: str):
  return nnx.split(modules, graph=models.MODES[mode]['graph'])


def _on_state(step, graphdef):
  """``step`` as a pure function of the modules' state."""

  def pure(state, x):
    actor, critic = nnx.merge(graphdef, state)
    return step(actor, critic, x), nnx.state((actor, critic))

  return pure


def _stack(trees):
  return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


class TestCase(parameterized.TestCase):
  def assert_close(self, actual, expected, rtol=1e-5, atol=1e-6):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)
    chex.assert_trees_all_equal_dtypes(actual, expected)
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))

  def assert_law(self, actual, modules, expected=None, after=None, **tolerance):
    """``actual`` is ``(losses, gradients)``, ``modules`` are those after."""
    if expected is None:
      expected, after = _expected()
    for gradient in jax.tree.leaves(expected):
      self.assertGreater(np.abs(gradient).max(), 1e-6)
    self.assert_close(actual, expected, **tolerance)
    self.assert_close(_state(modules), after, **tolerance)


class JitTest(TestCase):
  def test_state_moves(self):
    before, (_, after) = _state(_stateful()), _expected()
    moved = sum(not np.array_equal(a, b) for a, b in zip(before, after))
    self.assertEqual(moved, 3)  # rng count, mean and variance

  @parameterized.parameters(
    ('default', 'tree'), ('no_updates', 'default'), ('tree', 'no_updates')
  )
  def test_jit_of_another_mode(self, inner, outer):
    modules = _stateful()
    step = nnx.jit(_step(inner), **models.MODES[outer])
    self.assert_law(step(*modules, _batch()), modules)

  @EACH_MODE
  def test_one_run_a_call(self, mode):
    runs = []

    def f(*args):
      runs.append(None)
      return models.leaking_losses(*args)

    for i in range(3):
      modules = _stateful()
      self.assert_law(_step(mode, f)(*modules, _batch()), modules)
      self.assertLen(runs, i + 1)

  @parameterized.parameters('no_updates', 'tree')
  def test_jax_jit_over_modules(self, mode):
    @jax.jit
    def step(actor, critic, x):
      return _step(mode)(actor, critic, x), (actor, critic)

    result, modules = step(*_stateful(), _batch())
    self.assert_law(result, modules)

  @EACH_MODE
  def test_modules_made_inside(self, mode):
    @jax.jit
    def step(x):
      actor, critic = _stateful()
      return _step(mode)(actor, critic, x), nnx.state((actor, critic))

    result, state = step(_batch())
    self.assert_law(result, state)

  @EACH_MODE
  def test_no_leak(self, mode):
    # Nothing that is compiled is kept while leaks are checked, so that the
    # losses are slow unless jitted.
    f = nnx.jit(models.leaking_losses, **models.MODES[mode])
    modules = _stateful()
    with jax.checking_leaks():
      result = _step(mode, f)(*modules, _batch())
    self.assert_law(result, modules)

  @EACH_MODE
  def test_no_leak_under_jit(self, mode):
    modules = _stateful()
    with jax.checking_leaks():
      step = nnx.jit(_step(mode), **models.MODES[mode])
      result = step(*modules, _batch())
    self.assert_law(result, modules)

  @EACH_MODE
  def test_one_trace_with_donated_modules(self, mode):
    runs = []

    def f(*args):
      runs.append(None)
      return models.leaking_losses(*args)

    modules = _stateful()
    step = nnx.jit(_step(mode, f), donate_argnums=(0, 1), **models.MODES[mode])
    donated = jax.tree.leaves(nnx.state(modules, nnx.Param))
    first = step(*modules, _batch())
    self.assertTrue(all(x.is_deleted() for x in donated))
    self.assert_law(first, modules)
    for _ in range(99):
      step(*modules, _batch())
    self.assertLen(runs, 1)
    self.assertEqual(
      jax.tree.leaves(nnx.state(modules[0], nnx.RngCount)), [100]
    )
    self.assert_close(first, _expected()[0])  # not donated with what followed

  @EACH_MODE
  def test_donated_state(self, mode):
    graphdef, state = _split(_stateful(), mode)
    step = jax.jit(_on_state(_step(mode), graphdef), donate_argnums=0)
    first, after = step(state, _batch())
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(state)))
    self.assert_law(first, nnx.merge(graphdef, nnx.clone(after)))
    step(after, _batch())
    self.assert_close(first, _expected()[0])


@functools.cache
def _expected_members():
  """The oracle of three pairs, stacked."""
  results, states = [], []
  for seed in _SEEDS:
    modules = _stateful(seed)
    results.append(_naive()(*modules, _batch()))
    states.append(_state(modules))
  return _stack(results), [np.stack(xs) for xs in zip(*states)]


def _examples():
  return _batch()[:3, None]


@functools.cache
def _expected_examples():
  """The oracle of ``_plain()`` on each of three examples, stacked."""
  step = nnx.jit(_naive())
  return _stack([step(*_plain(), x) for x in _examples()]), _state(_plain())


def _collective_losses(*args):
  return jax.lax.pmean(models.leaking_losses(*args), 'example')


def _over_examples(step, mode='default', **options):
  graphdef, state = _split(_plain(), mode)
  step = _on_state(step, graphdef)
  return jax.jit(jax.vmap(step, (None, 0), (0, None), **options))(
    state, _examples()
  )


@functools.cache
def _expected_collective():
  result, _ = _over_examples(_naive(_collective_losses), axis_name='example')
  return result, _state(_plain())


class VmapTest(TestCase):
  def _members(self, mode):
    graphdefs, states = zip(*(_split(_stateful(s), mode) for s in _SEEDS))
    return graphdefs[0], _stack(states)

  @EACH_MODE
  def test_jax_vmap_over_members(self, mode):
    graphdef, state = self._members(mode)
    step = jax.vmap(_on_state(_step(mode), graphdef), in_axes=(0, None))
    result, state = jax.jit(step)(state, _batch())
    self.assert_law(result, nnx.merge(graphdef, state), *_expected_members())

  @EACH_MODE
  def test_nnx_vmap_over_members(self, mode):
    modules = nnx.merge(*self._members(mode))
    step = nnx.vmap(_step(mode), in_axes=(0, 0, None), **models.MODES[mode])
    result = nnx.jit(step, **models.MODES[mode])(*modules, _batch())
    self.assert_law(result, modules, *_expected_members())

  @EACH_MODE
  def test_jax_vmap_over_examples(self, mode):
    self.assert_law(*_over_examples(_step(mode), mode), *_expected_examples())

  @EACH_MODE
  def test_nnx_vmap_over_examples(self, mode):
    modules = _plain()
    step = nnx.vmap(_step(mode), in_axes=(None, None, 0), **models.MODES[mode])
    result = nnx.jit(step, **models.MODES[mode])(*modules, _examples())
    self.assert_law(result, modules, *_expected_examples())

  @EACH_MODE
  def test_collective_over_examples(self, mode):
    step = _step(mode, _collective_losses)
    result, state = _over_examples(step, mode, axis_name='example')
    self.assert_law(result, state, *_expected_collective())


def _learners():
  actor, critic = _stateful()
  return (
    actor,
    critic,
    nnx.Optimizer(actor, optax.adam(1e-2), wrt=nnx.Param),
    nnx.Optimizer(critic, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param),
  )


def _batches():
  return jax.random.normal(jax.random.key(3), (3, 8, 4))


@functools.cache
def _expected_training():
  """A python loop with one call for each loss."""
  learners = _learners()
  losses = [_train(_naive(), learners, x) for x in _batches()]
  return _stack(losses), _state(learners)


def _train(step, learners, x):
  actor, critic, actor_optimizer, critic_optimizer = learners
  losses, grads = step(actor, critic, x)
  actor_optimizer.update(actor, grads['policy'])
  critic_optimizer.update(critic, grads['value'])
  return losses


class TrainTest(TestCase):
  """Training steps with two optimizers."""

  def _check(self, losses, learners):
    expected, after = _expected_training()
    self.assert_close(losses, expected, rtol=1e-4)
    self.assert_close(_state(learners), after, rtol=1e-4, atol=1e-5)

  @EACH_MODE
  def test_lax_scan(self, mode):
    graphdef, state = _split(_learners(), mode)

    def body(state, x):
      learners = nnx.merge(graphdef, state)
      losses = _train(_step(mode), learners, x)
      return nnx.state(learners), losses

    state, losses = jax.lax.scan(body, state, _batches())
    self._check(losses, nnx.merge(graphdef, state))

  @EACH_MODE
  def test_nnx_scan(self, mode):
    @nnx.scan(
      in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), **models.MODES[mode]
    )
    def scan(learners, x):
      return learners, _train(_step(mode), learners, x)

    learners = _learners()
    after, losses = scan(learners, _batches())
    self._check(losses, after)
    self._check(losses, learners)


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
  result = nnx.jit(_naive(f, HEAD_ROUTES))(model, _batch())
  return result, _state(model)


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


class BodyTest(TestCase):
  """Transforms inside the function that returns the losses."""

  @parameterized.product(body=list(BODIES), mode=list(models.MODES))
  def test_forward_through(self, body, mode):
    jax_transform, nnx_transform, plain = BODIES[body]
    f = _losses_through(
      _by_state(jax_transform), nnx_transform(models.MODES[mode])
    )
    modules = _stateful()
    step = nnx.jit(_step(mode, f), **models.MODES[mode])
    result = step(*modules, _batch())
    self.assert_law(result, modules, *_expected(_plain_losses(plain)))

  def test_branches_differ(self):
    actor, critic = _stateful()
    self.assertTrue(_predicate(actor.l1.kernel))
    self.assertFalse(_predicate(critic.l1.kernel))

  @EACH_MODE
  def test_scan_over_layers(self, mode):
    step = _step(mode, _stack_losses(models.MODES[mode]), argnums=HEAD_ROUTES)
    model = Stack(nnx.Rngs(0))
    result = nnx.jit(step, **models.MODES[mode])(model, _batch())
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

    (losses, grads), after = _expected()
    tripled_value = jax.tree.map(lambda g: 3.0 * g, grads['value'])
    expected = losses, {**grads, 'value': tripled_value}
    actor, critic = _stateful()
    result = _step(mode, f)(actor, critic, _batch())
    self.assert_law(result, (actor, critic), expected, after)

  @EACH_MODE
  def test_nnx_custom_vjp(self, mode):
    rngs = nnx.Rngs(0)
    actor, critic = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
    losses, grads = _naive()(actor, critic, _batch())
    for gradient in grads.values():
      gradient['bias'][...] *= 3.0
    f = _losses_through(_tripled(models.MODES[mode]))
    before = _state((actor, critic))
    result = _step(mode, f)(actor, critic, _batch())
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
  return _naive()(*modules, _batch()), _state(modules)


def _per_device(step):
  """Each device's losses and the gradients of their sum."""
  graphdef, state = nnx.split(_normalized())

  def run(state, x):
    (losses, grads), _ = _on_state(step, graphdef)(state, x)
    return jax.tree.map(lambda x: x[None], losses), grads

  specs = {'in_specs': (P(), P('data')), 'out_specs': (P('data'), P())}
  return jax.jit(jax.shard_map(run, mesh=_mesh(), **specs))(state, _batch())


@functools.cache
def _expected_per_device():
  return _per_device(_naive())


class ShardTest(TestCase):
  """Four devices: parameters replicated, the batch sharded."""

  def _check(self, result, modules):
    self.assert_law(
      result, modules, *_expected_whole_batch(), rtol=1e-4, atol=1e-5
    )

  def test_four_devices(self):
    self.assertLen(jax.devices(), 4)

  @EACH_MODE
  def test_gradients_averaged_outside(self, mode):
    graphdef, state = _split(_normalized(), mode)

    @jax.jit
    @functools.partial(
      jax.shard_map, mesh=_mesh(), in_specs=(P(), P('data')), out_specs=P()
    )
    def step(state, x):
      local = jax.tree.map(
        lambda x: jax.lax.pcast(x, 'data', to='varying'), state
      )
      actor, critic = nnx.merge(graphdef, local)
      result = _step(mode)(actor, critic, x)
      return jax.lax.pmean((result, nnx.state((actor, critic))), 'data')

    result, state = step(state, _batch())
    self._check(result, nnx.merge(graphdef, state))

  @EACH_MODE
  def test_local_losses(self, mode):
    """Types over mesh axes are those of each loss alone."""
    expected = _expected_per_device()
    self.assert_close(_per_device(_step(mode)), expected)
    self.assertGreater(float(jnp.std(expected[0]['policy'])), 1e-3)

  @EACH_MODE
  def test_nnx_shard_map(self, mode):
    actor, critic = _normalized()
    step = nnx.shard_map(
      _step(mode, _averaged_losses),
      mesh=_mesh(),
      in_specs=(P(), P(), P('data')),
      out_specs=P(),
      **models.MODES[mode],
    )
    result = nnx.jit(step, **models.MODES[mode])(actor, critic, _batch())
    self._check(result, (actor, critic))

  @EACH_MODE
  def test_sharded_batch(self, mode):
    actor, critic = _normalized(axis=None)
    x = jax.device_put(_batch(), jax.sharding.NamedSharding(_mesh(), P('data')))
    result = nnx.jit(_step(mode), **models.MODES[mode])(actor, critic, x)
    self._check(result, (actor, critic))
    self.assertLen(result[1]['value']['l1']['kernel'][...].devices(), 4)


def _sum_of_squares(tree):
  return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


def _gradient_norm(step):
  """A function of what ``step`` returns, to differentiate once more."""

  def norm(actor, critic, x):
    losses, grads = step(actor, critic, x)
    return (
      _sum_of_squares(grads['policy'])
      + 2.0 * _sum_of_squares(grads['value'])
      + losses['value'] ** 2
    )

  return norm


def _adapted(step, stop=lambda x: x):
  """Outer losses of the actor after a step along the inner gradient."""

  def f(actor, critic, x):
    losses, grads = step(actor, critic, x[:4])
    adapted, params = nnx.clone(actor), nnx.state(actor, nnx.Param)
    nnx.update(
      adapted,
      jax.tree.map(lambda p, g: p - 0.3 * stop(g), params, grads['policy']),
    )
    outer = models.leaking_losses(adapted, critic, x[4:])
    return {**outer, 'value': outer['value'] + 0.5 * losses['value']}

  return f


@functools.cache
def _expected_second_order():
  """Value, state and gradient by Params of the gradient norm."""
  (value, after), grads = _second_order(_naive())
  return (value, grads), _state(after)


def _second_order(step, transform=lambda f: f):
  graphdef, params, rest = nnx.split(_stateful(), nnx.Param, ...)

  @transform
  def norm(params, rest):
    modules = nnx.merge(graphdef, params, rest, copy=True)
    value = _gradient_norm(step)(*modules, _batch())
    return value, nnx.state(modules, nnx.Not(nnx.Param))

  return jax.jit(jax.value_and_grad(norm, has_aux=True))(params, rest)


@functools.cache
def _expected_pure_second_order():
  """Value and gradient of the gradient norm of ``_plain()``, without NNX."""
  graphdef, state = nnx.split(_plain())

  def loss(key, *params):
    modules = nnx.merge(graphdef, dict(enumerate(params)))
    return models.leaking_losses(*modules, _batch())[key]

  def step(actor, critic, _):
    losses, grads = {}, {}
    for i, key in enumerate(ROUTES):
      losses[key], grads[key] = jax.value_and_grad(
        functools.partial(loss, key), argnums=i
      )(actor, critic)
    return losses, grads

  norm = _gradient_norm(step)
  value, grads = jax.jit(jax.value_and_grad(norm, argnums=(0, 1)))(
    state[0], state[1], None
  )
  return value, jax.tree.leaves(grads)


@functools.cache
def _expected_adapted():
  modules = _stateful()
  result = nnx.jit(_naive(_adapted(_naive())))(*modules, _batch())
  return result, _state(modules)


def _scaled(step, mode):
  """The derivative of losses and gradients by a scale of the input."""

  def f(scale, actor, critic, x):
    losses, grads = step(actor, critic, scale[...] * x)
    return losses['value'] + _sum_of_squares(grads['policy']), grads

  f = nnx.value_and_grad(f, has_aux=True, **models.MODES[mode])
  return lambda actor, critic, x: f(nnx.Param(jnp.array(0.7)), actor, critic, x)


@functools.cache
def _expected_scaled():
  modules = _stateful()
  result = nnx.jit(_scaled(_naive(), 'default'))(*modules, _batch())
  return result, _state(modules)


class HigherOrderTest(TestCase):
  @EACH_MODE
  def test_nnx_grad_of_gradient_norm(self, mode):
    modules = _plain()
    second_order = nnx.value_and_grad(
      _gradient_norm(_step(mode)), argnums=(0, 1), **models.MODES[mode]
    )
    value, grads = nnx.jit(second_order, **models.MODES[mode])(
      *modules, _batch()
    )
    result = value, jax.tree.leaves(grads)
    expected = _expected_pure_second_order()
    self.assert_law(result, modules, expected, _state(_plain()), atol=1e-5)

  @parameterized.parameters(
    ('default', 'none'),
    ('no_updates', 'jax.checkpoint'),
    ('tree', 'nnx.remat'),
  )
  def test_jax_grad_of_gradient_norm(self, mode, remat):
    step, transform = _step(mode), lambda f: f
    if remat == 'nnx.remat':
      step = nnx.remat(step, **models.MODES[mode])
    elif remat == 'jax.checkpoint':
      transform = jax.checkpoint
    (value, after), grads = _second_order(step, transform)
    self.assert_law(
      (value, grads), after, *_expected_second_order(), rtol=1e-4, atol=1e-4
    )

  @EACH_MODE
  def test_hessian(self, mode):
    modules = _plain()

    def at(bias):
      actor, critic = nnx.clone(modules)
      critic.l1.bias[...] = bias
      return actor, critic, _batch()

    @jax.jit
    def hessians(bias):
      loss = lambda bias: models.leaking_losses(*at(bias))['value']
      gradient = lambda bias: _step(mode)(*at(bias))[1]['value']['l1']['bias'][
        ...
      ]
      return (
        jax.hessian(loss)(bias),
        jax.jacfwd(gradient)(bias),
        jax.jacrev(gradient)(bias),
      )

    expected, forward, reverse = hessians(jnp.linspace(-0.5, 1.0, 6))
    self.assertGreater(jnp.abs(expected).min(), 1e-4)
    self.assert_close(forward, expected)
    self.assert_close(reverse, expected)

  @EACH_MODE
  def test_multi_in_multi(self, mode):
    modules = _stateful()
    step = _step(mode, _adapted(_step(mode)))
    result = nnx.jit(step, **models.MODES[mode])(*modules, _batch())
    self.assert_law(result, modules, *_expected_adapted(), rtol=1e-4, atol=1e-5)

  def test_multi_in_multi_is_of_second_order(self):
    first_order = _naive(_adapted(_naive(), stop=jax.lax.stop_gradient))
    _, expected = nnx.jit(first_order)(*_stateful(), _batch())
    _, grads = _expected_adapted()[0]
    for key in grads:
      difference = jax.tree.map(lambda a, b: a - b, grads[key], expected[key])
      self.assertGreater(_sum_of_squares(difference), 1e-4, key)

  @EACH_MODE
  def test_inside_value_and_grad(self, mode):
    modules = _stateful()
    step = _scaled(_step(mode), mode)
    result = nnx.jit(step, **models.MODES[mode])(*modules, _batch())
    self.assert_law(result, modules, *_expected_scaled(), rtol=1e-4, atol=1e-5)


def _cast(module, dtype, filter=nnx.Param):
  state = nnx.state(module, filter)
  nnx.update(module, jax.tree.map(lambda x: x.astype(dtype), state))
  return module


def _distances(actor, critic, x, target):
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


def _head_distances(model, x, target):
  return _distances(model.actor, model.critic, jnp.tanh(model.trunk(x)), target)


def _complex_pair():
  rngs = nnx.Rngs(0)
  make = functools.partial(nnx.Linear, 4, param_dtype=jnp.complex64, rngs=rngs)
  return make(3), make(1)


def _holomorphic(actor, critic, x):
  logits, value = actor(x), critic(x)
  return {
    'policy': jnp.mean(jnp.sin(logits) * value),
    'value': jnp.mean(value**2) * jnp.sum(logits[0]),
  }


def _moduli(actor, critic, x):
  logits, value = actor(x), critic(x)
  return {
    'policy': jnp.mean(jnp.abs(logits) ** 2 * jnp.real(value)),
    'value': jnp.mean(jnp.abs(value - 1j) ** 3) + jnp.mean(logits.imag * 2.0),
  }


def _double(step):
  inexact = (nnx.Param, nnx.BatchStat)
  modules = tuple(_cast(m, jnp.float64, inexact) for m in _stateful())
  result = step(*modules, _batch().astype(jnp.float64))
  return result, _state(modules)


class DtypeTest(TestCase):
  @parameterized.parameters(
    ('default', jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    ('tree', jnp.float16, jnp.float32, jnp.bfloat16),
  )
  def test_low_precision(self, mode, actor_dtype, critic_dtype, x_dtype):
    actor, critic = _stateful()
    modules = _cast(actor, actor_dtype), _cast(critic, critic_dtype)
    x, after = _batch().astype(x_dtype), nnx.clone(modules)
    f = lambda *args: jax.tree.map(
      lambda loss: loss.astype(x_dtype), models.leaking_losses(*args)
    )
    expected = nnx.jit(_naive(f))(*after, x)
    weights = {'policy': 1.0, 'value': jnp.float32(1.0)}
    step = _step(mode, f, weights=weights)
    result = nnx.jit(step, **models.MODES[mode])(*modules, x)
    self.assert_law(
      result, modules, expected, _state(after), rtol=2e-2, atol=2e-3
    )
    for key, dtype in zip(ROUTES, (actor_dtype, critic_dtype)):
      for gradient in jax.tree.leaves(result[1][key]):
        self.assertEqual(gradient.dtype, dtype)
    self.assertEqual(result[0]['policy'].dtype, x_dtype)

  def test_float64(self):
    with jax.enable_x64(True):
      expected, after = _double(nnx.jit(_naive()))
      result, state = _double(nnx.jit(_step('default')))
    chex.assert_type(jax.tree.leaves(result), jnp.float64)
    self.assert_law(result, state, expected, after, rtol=1e-12, atol=1e-14)

  @parameterized.parameters(
    ('default', np.nan, False),
    ('default', np.inf, True),
    ('no_updates', np.inf, False),
    ('tree', np.nan, True),
  )
  def test_nan_of_separate_modules(self, mode, target, jit):
    target, actor, critic = jnp.full(8, target), *_plain()
    expected = _naive(_distances)(actor, critic, _batch(), target)
    step = _step(mode, _distances)
    if jit:
      step = nnx.jit(step, **models.MODES[mode])
    losses, grads = step(actor, critic, _batch(), target)
    chex.assert_tree_all_finite((losses['policy'], grads['policy']))
    self.assertFalse(np.isfinite(losses['value']))
    for gradient in jax.tree.leaves(grads['value']):
      self.assertFalse(np.any(np.isfinite(gradient)))
    self.assert_close((losses, grads), expected)

  @EACH_MODE
  def test_nan_with_a_shared_trunk(self, mode):
    model, target = Heads(nnx.Rngs(0)), jnp.full(8, np.nan)
    expected = _naive(_head_distances, HEAD_ROUTES)(model, _batch(), target)
    losses, grads = _step(mode, _head_distances, argnums=HEAD_ROUTES)(
      model, _batch(), target
    )
    chex.assert_tree_all_finite((losses['policy'], grads['policy']))
    self.assertTrue(np.all(np.isnan(grads['value']['trunk']['kernel'])))
    self.assert_close((losses, grads), expected)
    total = _step(mode, _head_distances, argnums=HEAD_ROUTES, reduce='sum')(
      model, _batch(), target
    )[1]
    self.assertTrue(np.all(np.isnan(total['trunk']['kernel'])))
    self.assert_close(total['actor'], expected[1]['policy']['actor'])

  @parameterized.parameters(
    (_holomorphic, 'default', (0, 1)),
    (_moduli, 'tree', ROUTES),
    (_moduli, 'no_updates', (0, 1)),
  )
  def test_complex(self, f, mode, argnums):
    holomorphic = f is _holomorphic
    modules, x = _complex_pair(), _batch() + 1j * _batch()[::-1]
    graphdef, state = nnx.split(modules)

    def alone(i, key):
      def loss(own):
        return f(*nnx.merge(graphdef, {**state, i: own}), x)[key]

      return jax.jit(jax.value_and_grad(loss, holomorphic=holomorphic))(
        state[i]
      )

    losses, expected = zip(*(alone(*each) for each in enumerate(ROUTES)))
    expected = dict(zip(ROUTES, losses)), dict(zip(ROUTES, expected))
    step = _step(
      mode,
      f,
      holomorphic=holomorphic,
      argnums=dict(zip(ROUTES, argnums)) if argnums == (0, 1) else ROUTES,
    )
    actual, grads = nnx.jit(step, **models.MODES[mode])(*modules, x)
    grads = {key: nnx.state(gradient) for key, gradient in grads.items()}
    self.assert_law((actual, grads), modules, expected, _state(_complex_pair()))
    chex.assert_type(jax.tree.leaves(grads), jnp.complex64)
    for gradient in jax.tree.leaves(grads):
      self.assertGreater(np.abs(np.imag(gradient)).max(), 1e-3)

  @parameterized.parameters('no_updates', 'tree')
  def test_allow_int(self, mode):
    argnums = {'policy': 0, 'value': 1}
    losses, grads = _step(mode, argnums=argnums, allow_int=True)(
      *_stateful(), _batch()
    )
    for key, argnum in argnums.items():
      loss, expected = nnx.value_and_grad(
        lambda *args, key=key: models.leaking_losses(*args)[key],
        argnums=argnum,
        allow_int=True,
        **models.MODES[mode],
      )(*_stateful(), _batch())
      self.assert_close(losses[key], loss)
      self.assertIs(type(grads[key]), models.MLP)
      self.assertEqual(
        jax.tree.structure(grads[key]), jax.tree.structure(expected)
      )
      for own, alone in zip(*map(jax.tree.leaves, (grads[key], expected))):
        self.assertEqual(own.dtype, alone.dtype)
        self.assertEqual(own.shape, alone.shape)
        if own.dtype != jax.dtypes.float0:
          np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-6)
    dtypes = [x.dtype for x in jax.tree.leaves(grads['policy'])]
    self.assertEqual(dtypes.count(jax.dtypes.float0), 2)  # rng key and count


def _only_l1(tree):
  return jax.tree.map_with_path(
    lambda path, _: 'l1' in jax.tree_util.keystr(path), tree
  )


def _labels(tree):
  return jax.tree.map(lambda l1: 'slow' if l1 else 'frozen', _only_l1(tree))


TRANSFORMATIONS: dict[str, optax.GradientTransformation] = {
  'adam': optax.adam(1e-2),
  'partition': optax.partition(
    {'slow': optax.sgd(0.1), 'frozen': optax.set_to_zero()}, _labels
  ),
  'masked': optax.chain(
    optax.masked(optax.add_decayed_weights(0.3), _only_l1), optax.sgd(0.1)
  ),
  'clip': optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1.0)),
}


def _optimized(tx, step):
  """Losses and learners after 10 steps of Adam or 2 of another optimizer."""
  actor, critic = _plain()
  make = functools.partial(nnx.Optimizer, tx=TRANSFORMATIONS[tx], wrt=nnx.Param)
  learners = actor, critic, make(actor), make(critic)
  steps = 10 if tx == 'adam' else 2
  losses = [_train(step, learners, _batch()) for _ in range(steps)]
  return losses, _state(learners)


@functools.cache
def _expected_optimized(tx):
  return _optimized(tx, _naive())


def _train_critic(step, learners, x):
  actor, critic, _, critic_optimizer = learners
  losses, grads = step(actor, critic, x)
  critic_optimizer.update(critic, grads['value'])
  return losses


@functools.cache
def _expected_delayed():
  """Training in which the actor learns only every second step."""
  learners = _learners()
  losses = [
    (_train_critic if i % 2 else _train)(_naive(), learners, x)
    for i, x in enumerate(_batches())
  ]
  return losses, _state(learners)


class OptimizerTest(TestCase):
  @parameterized.parameters(
    ('adam', 'default'),
    ('adam', 'no_updates'),
    ('adam', 'tree'),
    ('partition', 'default'),
    ('masked', 'no_updates'),
    ('clip', 'tree'),
  )
  def test_equals_two_calls(self, tx, mode):
    actual = _optimized(tx, _step(mode))
    self.assert_close(actual, _expected_optimized(tx), rtol=1e-4, atol=1e-5)
    before = jax.tree.leaves(nnx.state(_plain()))
    moved = [np.any(a != b) for a, b in zip(before, actual[1])]
    self.assertEqual(sum(moved), 4 if tx == 'partition' else 8)

  @EACH_MODE
  def test_sum_into_one_optimizer(self, mode):
    target = jnp.linspace(-1.0, 2.0, 8)

    def trained(gradient):
      model = Heads(nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      optimizer.update(model, gradient(model))
      return _state(model)

    def naive(model):
      grads = _naive(_head_distances, HEAD_ROUTES)(model, _batch(), target)[1]
      trunk = jax.tree.map(
        lambda a, b: a + 0.5 * b, *(g['trunk'] for g in grads.values())
      )
      critic = jax.tree.map(lambda b: 0.5 * b, grads['value']['critic'])
      return nnx.State(
        {'trunk': trunk, 'actor': grads['policy']['actor'], 'critic': critic}
      )

    step = nnx_ext.grad_multi(
      _head_distances,
      argnums=HEAD_ROUTES,
      reduce='sum',
      weights={'policy': 1.0, 'value': 0.5},
      **models.MODES[mode],
    )
    own = trained(lambda model: step(model, _batch(), target))
    self.assert_close(own, trained(naive))

  @EACH_MODE
  def test_delayed_updates(self, mode):
    @functools.partial(nnx.jit, **models.MODES[mode])
    def train(learners, x, is_even):
      branches = (
        functools.partial(f, _step(mode)) for f in (_train, _train_critic)
      )
      return nnx.cond(is_even, *branches, learners, x, **models.MODES[mode])

    learners = _learners()
    losses = [train(learners, x, i % 2 == 0) for i, x in enumerate(_batches())]
    expected, after = _expected_delayed()
    self.assert_close(losses, expected, rtol=1e-4)
    self.assert_close(_state(learners), after, rtol=1e-4, atol=1e-5)


class ArgumentTest(TestCase):
  @EACH_MODE
  def test_numpy_and_floats(self, mode):
    def f(actor, critic, x, gain, offset=0.25):
      losses = models.leaking_losses(actor, critic, x * gain)
      return {
        'policy': losses['policy'] * gain + offset,
        'value': losses['value'] * offset,
      }

    routes = {'policy': (DIFF(0, nnx.Param), 3), 'value': (2, DIFF(1, ...))}
    expected = _naive(f, routes)(*_plain(), np.asarray(_batch()), 1.5)
    modules = _plain()
    result = _step(mode, f, argnums=routes)(
      *modules, np.asarray(_batch()), gain=1.5
    )
    self.assert_law(result, modules, expected, _state(_plain()))

  @EACH_MODE
  def test_traced_weights(self, mode):
    def step(actor, critic, x, w):
      weights = {'policy': w, 'value': -2.0}
      return _step(mode, weights=weights)(actor, critic, x)

    (losses, grads), after = _expected()
    scale = {'policy': 3.0, 'value': -2.0}
    expected = (
      losses,
      {
        key: jax.tree.map(lambda g, s=scale[key]: s * g, grads[key])
        for key in grads
      },
    )
    modules = _stateful()
    step = nnx.jit(step, **models.MODES[mode])
    result = step(*modules, _batch(), jnp.array(3.0))
    self.assert_law(result, modules, expected, after)

  @parameterized.parameters(
    ('default', None), ('no_updates', 'sum'), ('tree', None)
  )
  def test_derivative_by_weight(self, mode, reduce):
    """How the loss after a step depends on the weight of a loss."""
    modules = _plain()

    def updated(w, direction):
      actor, critic = nnx.clone(modules)
      gradient = direction(w, actor, critic)
      params = nnx.state(actor, nnx.Param)
      nnx.update(
        actor, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
      )
      return models.leaking_losses(actor, critic, _batch()[::-1])['value']

    def own(w, actor, critic):
      _, grads = _step(
        mode,
        argnums=DIFF(0, nnx.Param),
        reduce=reduce,
        weights={'policy': w, 'value': w**2},
      )(actor, critic, _batch())
      return grads if reduce else grads['value']

    def naive(w, actor, critic):
      argnums = dict.fromkeys(ROUTES, DIFF(0, nnx.Param))
      _, grads = _naive(argnums=argnums)(actor, critic, _batch())
      return jax.tree.map(
        lambda p, v: (w * p if reduce else 0.0) + w**2 * v,
        *grads.values(),
      )

    @jax.jit
    def derivatives(w):
      return (
        jax.grad(updated)(w, naive),
        jax.grad(updated)(w, own),
        jax.jacfwd(updated)(w, own),
      )

    expected, reverse, forward = derivatives(0.7)
    self.assertGreater(abs(expected), 1e-3)
    self.assert_close(reverse, expected)
    self.assert_close(forward, expected)


@functools.cache
def _trained_state():
  """The state after one step in train mode."""
  modules = _stateful()
  _naive()(*modules, _batch())
  return nnx.state(modules)


def _trained(is_eval=False):
  modules = _stateful()
  nnx.update(modules, _trained_state())
  for module in modules:
    module.eval() if is_eval else module.train()
  return modules


@functools.cache
def _expected_trained(is_eval):
  modules = _trained(is_eval)
  return _naive()(*modules, _batch()), _state(modules)


class EvalTest(TestCase):
  @parameterized.parameters(
    ('default', False),
    ('default', True),
    ('no_updates', False),
    ('tree', False),
  )
  def test_eval_and_train(self, mode, jit):
    modules, step = _trained(is_eval=True), _step(mode)
    if jit:
      step = nnx.jit(step, **models.MODES[mode])
    result = step(*modules, _batch())
    self.assert_law(result, modules, *_expected_trained(is_eval=True))
    for module in modules:
      module.train()
    result = step(*modules, _batch())
    self.assert_law(result, modules, *_expected_trained(is_eval=False))

  def test_eval_differs(self):
    (losses, _), after = _expected_trained(is_eval=True)
    (train_losses, _), _ = _expected_trained(is_eval=False)
    chex.assert_trees_all_equal(after, _state(_trained()))
    for key in losses:
      self.assertGreater(abs(losses[key] - train_losses[key]), 1e-3)
