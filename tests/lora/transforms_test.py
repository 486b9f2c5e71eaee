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
"""The law of LoRA within the transforms of NNX and JAX, in the three modes.

The oracle is that of ``kinds``: the plain model's weights overwritten, in the
same pure function without the transform.
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
from tests.lora import kinds
from tests.lora.kinds import Kind, Weight, noise

P = jax.sharding.PartitionSpec
MLP = Kind(
  lambda rngs: models.MLP(4, 3, rngs=rngs),
  (8, 4),
  {('l1',): Weight(), ('l2',): Weight()},
)
X = MLP.x
IDS = kinds.KINDS['embed'].x

every_mode = parameterized.product(mode=list(models.MODES))


def _squashed(y):
  """Around 2, so that float32 is exact to the tolerance in sums."""
  return jnp.sin(y) + 2.0


def _loss(model, x):
  return jnp.mean(_squashed(model(x)))


@functools.cache
def _moved(**options) -> nnx.Module:
  return kinds.move(kinds.built(lambda: MLP.apply(**options)))


def _model(**options) -> nnx.Module:
  """An adapted model with factors that are not those of a start."""
  return nnx.clone(_moved(**options))


def _pure(model):
  """The loss as a function of the factors, and the factors."""
  graphdef, factors, rest = nnx.split(model, nnx.LoRAParam, ...)
  rest = nnx.as_pure(rest)

  def loss(factors, x=X):
    return _loss(nnx.merge(graphdef, factors, rest), x)

  return loss, nnx.to_pure_dict(factors)


def _oracle(scale=1.0):
  model = _moved()
  call = MLP.oracle(model, scale, nnx.as_pure(nnx.state(MLP.model)))
  return lambda factors, x=X: jnp.mean(_squashed(call(factors, x)))


@functools.cache
def _expected():
  """The loss and its gradients by the factors."""
  return jax.jit(jax.value_and_grad(_oracle()))(_pure(_moved())[1])


def _value_and_grad(mode, loss=_loss):
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


def _through_remat(mode):
  return nnx.remat(_loss, **mode)


def _through_cond(mode):
  def loss(model, x):
    other = lambda model, x: 3.0 * _loss(model, x)
    return nnx.cond(jnp.mean(x) < 10.0, _loss, other, model, x, **mode)

  return loss


def _through_vmap(mode):
  rows = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0), **mode)
  return lambda model, x: jnp.mean(_squashed(rows(model, x)))


def _through_scan(mode):
  @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0), **mode)
  def body(total, model, x):
    y = _squashed(model(x))
    return total + jnp.sum(y), y

  return lambda model, x: body(jnp.zeros(()), model, x)[0] / (3 * len(x))


class TransformTest(parameterized.TestCase):
  def _check(self, actual, expected=None, tolerance=2e-5):
    expected = _expected() if expected is None else expected
    kinds.assert_close(actual, expected, tolerance)

  @every_mode
  def test_eager(self, mode):
    self._check(_value_and_grad(mode)(_model(), X))

  @every_mode
  def test_nnx_jit(self, mode):
    step = nnx.jit(_value_and_grad(mode), **models.MODES[mode])
    model = _model()
    before = kinds.leaves(model)
    self._check(step(model, X))
    kinds.assert_same(kinds.leaves(model), before)

  @every_mode
  def test_jax_jit_on_split_state(self, mode):
    graph = models.MODES[mode]['graph']
    graphdef, state = nnx.split(_model(), graph=graph)

    @jax.jit
    def step(state, x):
      return _value_and_grad(mode)(nnx.merge(graphdef, state), x)

    self._check(step(state, X))

  @parameterized.product(
    mode=list(models.MODES),
    through=[
      _through_remat,
      _through_cond,
      _through_vmap,
      _through_scan,
    ],
  )
  def test_within_the_loss(self, mode, through):
    loss = through(models.MODES[mode])
    self._check(_value_and_grad(mode, loss)(_model(), X))

  @every_mode
  def test_jax_vmap_over_adapters(self, mode):
    # Three adapters of one base, as one batch.
    graph = models.MODES[mode]['graph']
    graphdef, factors, rest = nnx.split(
      _model(), nnx.LoRAParam, ..., graph=graph
    )
    several = jax.tree.map(lambda x: jnp.stack([x, 2.0 * x, -x]), factors)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def step(factors, x):
      return _loss(nnx.merge(graphdef, factors, rest), x)

    pure = nnx.to_pure_dict(factors)
    scaled = lambda s: jax.tree.map(lambda x: s * x, pure)
    expected = jnp.stack([_oracle()(scaled(s)) for s in (1.0, 2.0, -1.0)])
    self._check(step(several, X), expected)

  @every_mode
  def test_shard_map(self, mode):
    self.assertLen(jax.devices(), 4)
    mesh = jax.make_mesh(
      (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    graphdef, state = nnx.split(_model())
    averaged = lambda model, x: jax.lax.pmean(_loss(model, x), 'data')

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P('data')), out_specs=P())
    def step(state, x):
      return _value_and_grad(mode, averaged)(nnx.merge(graphdef, state), x)

    self._check(step(state, X))

  @every_mode
  def test_no_tracer_is_left(self, mode):
    model = _model()
    step = nnx.jit(_value_and_grad(mode), **models.MODES[mode])
    with jax.checking_leaks():
      self._check(step(model, X))

  def test_apply_and_merge_leave_no_tracer(self):
    graphdef, state = nnx.split(MLP.model)

    @jax.jit
    def through(state):
      model = MLP.apply(nnx.merge(graphdef, state))
      return nnx_ext.merge_lora(model)(X), nnx_ext.remove_lora(model)(X)

    with jax.checking_leaks():
      merged, removed = through(nnx.as_pure(state))
    self._check(merged, removed)

  def test_second_derivatives(self):
    loss, factors = _pure(_model())
    tangents = kinds.values(_model())

    @functools.partial(jax.jit, static_argnums=0)
    def both(loss, factors):
      def grad(factors, x):
        return jax.grad(loss, argnums=(0, 1))(factors, x)

      return jax.jvp(grad, (factors, X), (tangents, noise(X.shape, 4)))

    expected = both(_oracle(), factors)
    self._check(both(loss, factors), expected, 1e-4)
    for leaf in jax.tree.leaves(expected):
      self.assertGreater(float(jnp.max(jnp.abs(leaf))), 1e-4)

  def test_second_derivatives_of_dora(self):
    kind = Kind(lambda rngs: nnx.Linear(5, 7, rngs=rngs), (3, 5))
    model = kind.apply(dora=True)
    oracle = kind.oracle(model, 1.0, nnx.as_pure(nnx.state(kind.model)))
    values = kinds.values(model)

    @functools.partial(jax.jit, static_argnums=0)
    def both(call, factors):
      grad = jax.grad(lambda f: jnp.sum(jnp.sin(call(f, kind.x))))
      return jax.jvp(grad, (factors,), (factors,))

    call, _ = kind.of_factors(model)
    self._check(both(call, values), both(oracle, values), 1e-4)

  @every_mode
  def test_value_and_grad_multi(self, mode):
    losses = lambda model, x: {'a': _loss(model, x), 'b': jnp.mean(model(x))}
    route = nnx.DiffState(0, nnx.LoRAParam)
    got, grads = nnx_ext.value_and_grad_multi(
      losses, argnums={'a': route, 'b': route}, **models.MODES[mode]
    )(_model(), X)
    self._check((got['a'], nnx.to_pure_dict(grads['a'])))

  @every_mode
  def test_one_trace(self, mode):
    traces, model = [], _model()

    @nnx.jit(**models.MODES[mode])
    def step(model, x):
      traces.append(None)
      return model(x)

    for i in range(20):
      for param in kinds.factors(model).values():
        param.set_value(noise(param.shape, i))
      outputs = step(model, X)
    self.assertLen(traces, 1)
    call = MLP.oracle(model, 1.0, nnx.as_pure(nnx.state(MLP.model)))
    self._check(outputs, call(_pure(model)[1], X))

    for alpha in (4.0, 4.0):
      for layer in (model.l1, model.l2):
        layer.lora.alpha = alpha
      outputs = step(model, X)
    self.assertLen(traces, 2)
    call = MLP.oracle(model, 2.0, nnx.as_pure(nnx.state(MLP.model)))
    self._check(outputs, call(_pure(model)[1], X))


class AbstractTest(parameterized.TestCase):
  @parameterized.parameters({}, {'dora': True}, {'init': 'pissa'})
  def test_apply_within_eval_shape(self, **options):
    apply = lambda: nnx_ext.apply_lora(
      models.MLP(4, 3, rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(1), **options
    )
    abstract, model = nnx.eval_shape(apply), apply()
    self.assertEqual(nnx.graphdef(abstract), nnx.graphdef(model))
    chex.assert_trees_all_equal_shapes_and_dtypes(
      nnx.state(abstract), nnx.state(model)
    )
    merged = nnx.eval_shape(lambda: nnx_ext.merge_lora(apply()))
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(MLP.model))

  @parameterized.parameters({}, {'dora': True}, {'init': 'pissa'})
  def test_apply_to_an_abstract_model(self, **options):
    abstract = nnx.eval_shape(lambda: models.MLP(4, 3, rngs=nnx.Rngs(0)))
    apply = lambda model: nnx_ext.apply_lora(
      model, rank=2, rngs=nnx.Rngs(1), **options
    )
    adapted = apply(abstract) if not options else nnx.eval_shape(
      apply, abstract
    )  # fmt: skip
    model = apply(MLP.model)
    self.assertEqual(nnx.graphdef(adapted), nnx.graphdef(model))
    chex.assert_trees_all_equal_shapes_and_dtypes(
      nnx.state(adapted), nnx.state(model)
    )
    self.assertIsInstance(adapted.l1.kernel.get_value(), jax.ShapeDtypeStruct)

  def test_values_put_into_an_abstract_model(self):
    abstract = nnx.eval_shape(MLP.apply)
    nnx.update(abstract, nnx.state(_moved()))
    kinds.assert_close(abstract(X), _moved()(X), 0.0)


def _layers(make, *counts):
  """Layers stacked once for each count, the last one innermost."""
  rngs = nnx.Rngs(params=0, dropout=1)
  for count in reversed(counts):
    make = functools.partial(_stacked, make, count)
  return make(rngs)


def _stacked(make, count, rngs):
  return nnx.vmap(make)(rngs.split(count))


def _linear(rngs):
  return nnx.Linear(4, 4, rngs=rngs)


def _adapted_inside(rngs, **options):
  layer = nnx.Linear(4, 4, rngs=rngs)
  return nnx_ext.apply_lora(layer, rank=2, rngs=rngs, **options)


def _apply(model, **options):
  rngs = nnx.Rngs(params=5, dropout=6)
  return nnx_ext.apply_lora(model, rank=2, rngs=rngs, **options)


def _trunk(mode):
  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **models.MODES[mode])
  def trunk(x, layer):
    return jnp.tanh(layer(x))

  return lambda model, x: trunk(x, model)


WAYS: dict[str, tp.Callable] = {
  'after': lambda **options: _apply(_layers(_linear, 3), **options),
  'inside': lambda **options: _layers(
    functools.partial(_adapted_inside, **options), 3
  ),
}


# Every mode after, one of them inside.
every_way = parameterized.parameters(
  *(('after', mode) for mode in models.MODES), ('inside', 'default')
)


@functools.cache
def _kept(way, **options):
  return kinds.built(functools.partial(WAYS[way], **options))


def _stack(way, **options):
  return nnx.clone(_kept(way, **options))


# Kinds whose weights have a batch axis, groups or no kernel.
STACKABLE = ['linear', 'general_batch', 'einsum_batch_last', 'conv_groups']
STACKABLE += ['transpose_kernel', 'embed', 'user_relu', 'user_own_forward']


class StackedTest(parameterized.TestCase):
  @every_way
  def test_scan_over_layers(self, way, mode):
    model = kinds.move(_stack(way))
    self.assertEqual(model.lora.lora_a.shape, (3, 4, 2))
    self.assertEqual(model.lora.lora_b.shape, (3, 2, 4))

    def loss(model, x):
      return jnp.mean(_squashed(_trunk(mode)(model, x)))

    def expected(factors):
      lora, x = factors['lora'], X
      for i in range(3):
        weight = model.kernel[...][i] + lora['lora_a'][i] @ lora['lora_b'][i]
        x = jnp.tanh(x @ weight + model.bias[...][i][None])
      return jnp.mean(_squashed(x))

    factors = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    kinds.assert_close(
      nnx.jit(_value_and_grad(mode, loss), **models.MODES[mode])(model, X),
      jax.jit(jax.value_and_grad(expected))(factors),
    )
    merged = nnx_ext.merge_lora(model)
    kinds.assert_close(_trunk(mode)(merged, X), _trunk(mode)(model, X))
    plain = _layers(_linear, 3)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(plain))

  @parameterized.parameters(*STACKABLE)
  def test_each_layer_is_adapted_as_alone(self, name):
    kind, weight = kinds.KINDS[name], kinds.KINDS[name].weights[()]
    layers = kinds.fill(nnx.eval_shape(lambda: _layers(kind.build, 3)))
    stack = kinds.built(lambda: _apply(layers, alpha=3.0))
    alone = nnx.eval_shape(lambda: _apply(kind.model))
    for factor in ('lora_a', 'lora_b'):
      value, one = getattr(stack.lora, factor), getattr(alone.lora, factor)
      self.assertEqual(value.shape, (3, *one.shape))
    factors = nnx.to_pure_dict(nnx.state(stack, nnx.LoRAParam))['lora']
    random = factors['lora_b' if 'embed' in name else 'lora_a']
    self.assertGreater(float(np.max(np.abs(np.diff(random, axis=0)))), 1e-3)

    graphdef, state = nnx.split(kinds.move(stack))

    @jax.jit
    def run(state, x):
      stack = nnx.merge(graphdef, state)
      call = nnx.vmap(kind.call, in_axes=(0, None))
      a, b = stack.lora.lora_a[...], stack.lora.lora_b[...]
      products = [1.5 * weight.product(a[i], b[i]) for i in range(3)]
      merged = nnx_ext.merge_lora(stack)
      delta = stack.lora.delta()
      return (delta, call(stack, x)), (jnp.stack(products), call(merged, x))

    kinds.assert_close(*run(nnx.as_pure(state), kind.x), 1e-4)

  @parameterized.parameters(
    ('after', 'dora'),
    ('after', 'pissa'),
    ('after', 'olora'),
    ('after', 'orthogonal'),
    ('inside', 'dora'),
    ('inside', 'pissa'),
  )
  def test_starts(self, way, option):
    options = {'dora': True} if option == 'dora' else {'init': option}
    stack = _stack(way, **options)
    if option == 'dora':
      self.assertEqual(stack.lora.magnitude.shape, (3, 4))
    if option in ('pissa', 'olora'):
      self.assertEqual(stack.lora.start_a.shape, (3, 4, 2))
    base = nnx_ext.remove_lora(stack)
    call = _trunk('default')
    kinds.assert_close(call(stack, X), call(base, X))
    kinds.move(stack)
    merged = nnx_ext.merge_lora(stack)
    kinds.assert_close(call(stack, X), call(merged, X))

  def test_stacked_twice(self):
    stack = kinds.built(lambda: _apply(_layers(_linear, 2, 3)))
    kinds.move(stack)
    self.assertEqual(stack.lora.lora_a.shape, (2, 3, 4, 2))
    self.assertEqual(stack.lora.lora_b.shape, (2, 3, 2, 4))
    delta = jnp.einsum(
      'abir,abro->abio', stack.lora.lora_a[...], stack.lora.lora_b[...]
    )
    kinds.assert_close(stack.lora.delta(), delta)
    outer = nnx.scan(
      lambda x, layer: _trunk('default')(layer, x),
      in_axes=(nnx.Carry, 0),
      out_axes=nnx.Carry,
    )
    merged = nnx_ext.merge_lora(stack)
    kinds.assert_close(outer(X, stack), outer(X, merged))

  def test_stacked_beside_single_layers(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.layers = _layers(_linear, 3)
        self.head = nnx.Linear(4, 2, rngs=rngs)

      def __call__(self, x):
        return self.head(_trunk('default')(self.layers, x))

    plain = Model(nnx.Rngs(0))
    model = _apply(plain)
    kinds.assert_close(model(X), plain(X), 0.0)
    kinds.move(model)
    kinds.assert_close(model(X), nnx_ext.merge_lora(model)(X))
    kinds.assert_close(nnx_ext.remove_lora(model)(X), plain(X), 0.0)


class DisabledTest(parameterized.TestCase):
  def test_the_base_alone(self):
    model = _model()
    base, adapted = MLP.model(X), model(X)
    before = nnx.graphdef(model)
    with nnx_ext.lora_disabled(model):
      kinds.assert_close(model(X), base, 0.0)
      with nnx_ext.lora_disabled(model):
        kinds.assert_close(model(X), base, 0.0)
      kinds.assert_close(model(X), base, 0.0)
    kinds.assert_close(model(X), adapted, 0.0)
    self.assertEqual(nnx.graphdef(model), before)

  def test_a_part_of_a_model(self):
    model, base = _model(), MLP.model
    with nnx_ext.lora_disabled(model.l1):
      expected = model.l2(jnp.tanh(base.l1(X)))
      kinds.assert_close(model(X), expected, 0.0)
      with nnx_ext.lora_disabled(model):
        kinds.assert_close(model(X), base(X), 0.0)
      kinds.assert_close(model(X), expected, 0.0)

  def test_exceptions(self):
    model = _model()
    adapted = model(X)
    with self.assertRaisesRegex(KeyError, 'mine'):
      with nnx_ext.lora_disabled(model):
        raise KeyError('mine')
    kinds.assert_close(model(X), adapted, 0.0)

  @every_mode
  def test_jit_sees_it(self, mode):
    traces, model = [], _model()
    base, adapted = MLP.model(X), model(X)

    @nnx.jit(**models.MODES[mode])
    def call(model, x):
      traces.append(None)
      return model(x)

    for _ in range(2):
      kinds.assert_close(call(model, X), adapted)
      with nnx_ext.lora_disabled(model):
        kinds.assert_close(call(model, X), base)
    self.assertLen(traces, 2)

  @every_mode
  def test_within_a_loss(self, mode):
    # A reference without the adapter, as in preference learning.
    def loss(model, x):
      with nnx_ext.lora_disabled(model):
        reference = model(x)
      return jnp.mean(jnp.sin(model(x)) * jax.lax.stop_gradient(reference))

    model = _model()
    call = MLP.oracle(model, 1.0, nnx.as_pure(nnx.state(MLP.model)))
    expected = lambda f: jnp.mean(jnp.sin(call(f, X)) * MLP.model(X))
    step = nnx.jit(_value_and_grad(mode, loss), **models.MODES[mode])
    kinds.assert_close(
      step(model, X), jax.jit(jax.value_and_grad(expected))(_pure(model)[1])
    )
    self.assertFalse(model.l1.lora.disabled)

  @parameterized.parameters(
    'linear', 'conv_masked', 'attend', 'embed', 'user_own_forward'
  )
  def test_kinds(self, name):
    kind = kinds.KINDS[name]
    for options in ({}, {'dora': True}):
      if options and 'masked' in name:
        continue
      model = kinds.move(kind.apply(**options))
      with nnx_ext.lora_disabled(model):
        kinds.assert_close(
          kind.call(model, kind.x), kind.call(kind.model, kind.x), 0.0
        )


class Twice(nnx.Module):
  """One layer in two places."""

  def __init__(self, rngs):
    self.first = nnx.Linear(4, 4, rngs=rngs)
    self.second = self.first

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Tied(nnx.Module):
  """Two layers with one kernel."""

  def __init__(self, rngs):
    self.first = nnx.Linear(4, 4, rngs=rngs)
    self.second = nnx.Linear(4, 4, rngs=rngs)
    self.second.kernel = self.first.kernel

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class TiedKinds(nnx.Module):
  """An embedding that is another layer's kernel, read from the other side."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 4, rngs=rngs)
    self.head = nnx.Einsum('btd,vd->btv', (7, 4), rngs=rngs)
    self.head.kernel = self.embed.embedding

  def __call__(self, ids):
    return self.head(jnp.tanh(self.embed(ids)))


class SharedTest(parameterized.TestCase):
  @parameterized.parameters(Twice, Tied)
  def test_adapted_once(self, cls):
    plain = cls(nnx.Rngs(0))
    model = kinds.move(_apply(plain))
    self.assertLen(kinds.factors(model), 2)
    lora = model.first.lora
    weight = model.first.kernel[...] + lora.lora_a @ lora.lora_b

    hidden = jnp.tanh(X @ weight + plain.first.bias[...][None])
    expected = hidden @ weight + plain.second.bias[...][None]
    copies = {
      'itself': model,
      'clone': nnx.clone(model),
      'merge': nnx.merge(*nnx.split(model)),
    }
    for copy in copies.values():
      self.assertIs(copy.first.lora, copy.second.lora)
      self.assertIs(copy.first.kernel, copy.second.kernel)
      kinds.assert_close(copy(X), expected)
    merged = nnx_ext.merge_lora(model)
    kinds.assert_close(merged(X), expected)
    kinds.assert_close(merged.first.kernel[...], weight)
    self.assertIs(merged.first.kernel, merged.second.kernel)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(plain))
    self.assertEqual(
      nnx.graphdef(nnx_ext.remove_lora(model)), nnx.graphdef(plain)
    )
    with nnx_ext.lora_disabled(model):
      kinds.assert_close(model(X), plain(X), 0.0)

  @parameterized.parameters(Twice, Tied)
  def test_gradients_come_from_both(self, cls):
    model = kinds.move(_apply(cls(nnx.Rngs(0))))
    graphdef, factors, rest = nnx.split(model, nnx.LoRAParam, ...)
    plain_def, base = nnx.split(nnx_ext.remove_lora(model))
    base = nnx.as_pure(base)

    def expected(factors):
      plain = nnx.merge(plain_def, base)
      lora = factors['first']['lora']
      kernel = plain.first.kernel
      kernel.set_value(kernel[...] + lora['lora_a'] @ lora['lora_b'])
      return _loss(plain, X)

    grads = nnx.grad(_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, X)
    kinds.assert_close(
      nnx.to_pure_dict(grads), jax.grad(expected)(nnx.to_pure_dict(factors))
    )

  def test_a_weight_of_two_kinds(self):
    plain = TiedKinds(nnx.Rngs(0))
    model = _apply(plain)
    self.assertIs(model.embed.lora, model.head.lora)
    kinds.assert_close(model(IDS), plain(IDS))
    kinds.move(model)
    lora = model.embed.lora
    merged = nnx_ext.merge_lora(model)
    kinds.assert_close(
      merged.embed.embedding[...],
      plain.embed.embedding[...] + lora.lora_a @ lora.lora_b,
    )
    kinds.assert_close(model(IDS), merged(IDS))


class DropoutTest(parameterized.TestCase):
  def _counts(self, model):
    return {
      path: int(jnp.sum(count.get_value()))
      for path, count in nnx.iter_graph(model)
      if isinstance(count, nnx.RngCount)
    }

  def test_on_the_input_of_the_adapter(self):
    model = kinds.move(kinds.KINDS['linear'].apply(dropout=0.5, alpha=3.0))
    x, lora = kinds.KINDS['linear'].x, model.lora
    dropped = nnx.clone(lora.dropout)(x)
    base = kinds.KINDS['linear'].model(x)
    expected = base + 1.5 * (dropped @ lora.lora_a) @ lora.lora_b
    first, second = model(x), model(x)
    kinds.assert_close(first, expected)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-2)

  def test_eval_is_the_merged_model(self):
    model = _model(dropout=0.5)
    merged = nnx_ext.merge_lora(model)
    model.eval()
    kinds.assert_close(model(X), merged(X))
    before = self._counts(model)
    model(X)
    self.assertEqual(self._counts(model), before)
    model.train()
    self.assertGreater(float(jnp.max(jnp.abs(model(X) - merged(X)))), 1e-2)

  @parameterized.parameters(
    'general_batch', 'einsum_batched', 'conv_groups', 'transpose', 'attend',
  )  # fmt: skip
  def test_kinds(self, name):
    kind = kinds.KINDS[name]
    first, second, outputs, merged = _with_dropout(kind, kind.x)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-3)
    kinds.assert_close(outputs, merged, kind.tolerance)

  def test_none_on_ids(self):
    kind = kinds.KINDS['embed']
    model = kinds.move(kind.apply(dropout=0.5))
    kinds.assert_close(model(kind.x), nnx_ext.merge_lora(model)(kind.x))

  @every_mode
  def test_own_stream(self, mode):
    rngs = nnx.Rngs(params=0, dropout=1)
    plain = models.MLP(4, 3, dropout=0.5, rngs=rngs)
    model = kinds.move(_apply(plain, dropout=0.5))
    before = self._counts(model)
    step = nnx.jit(lambda model, x: model(x), **models.MODES[mode])
    first, second = step(model, X), step(model, X)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-3)
    for path, count in self._counts(model).items():
      self.assertEqual(count, before[path] + 2, path)
    # The model's own dropout draws what it drew.
    with nnx_ext.lora_disabled(model):
      plain(X), plain(X)
      kinds.assert_close(model(X), plain(X), 0.0)

  @every_way
  def test_in_scanned_layers(self, way, mode):
    model = _stack(way, dropout=0.5)
    # The same factors in each layer: only the masks differ.
    for param in kinds.factors(model).values():
      param.set_value(jnp.stack([noise(param.shape[1:], param.ndim)] * 3))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0),
              **models.MODES[mode])  # fmt: skip
    def masks(x, layer):
      return x, layer(x) - x @ layer.kernel - layer.bias[None]

    scan = nnx.jit(lambda model, x: masks(x, model)[1], **models.MODES[mode])
    first, second = scan(model, X), scan(model, X)
    deltas = [*first, *second]
    for i, a in enumerate(deltas):
      for b in deltas[:i]:
        self.assertGreater(float(jnp.max(jnp.abs(a - b))), 1e-2)
    model.eval()
    merged = nnx_ext.merge_lora(model)
    call = _trunk(mode)
    kinds.assert_close(call(model, X), call(merged, X))

  def test_in_a_recurrent_cell(self):
    kind = kinds.KINDS['simple_cell']
    first, second, outputs, merged = _with_dropout(kind, kind.x)
    self.assertGreater(float(jnp.max(jnp.abs(first - second))), 1e-3)
    kinds.assert_close(outputs, merged, kind.tolerance)

  def test_a_mask_for_each_step_of_a_recurrent_cell(self):
    # The same input at each step and nothing recurrent.
    x = jnp.stack([noise((2, 5))] * 4, axis=1)

    def forget(cell):
      cell.dense_h.kernel.set_value(jnp.zeros((3, 3)))
      cell.dense_h.lora.lora_b.set_value(jnp.zeros((2, 3)))

    _, outputs, last, _ = _with_dropout(
      kinds.KINDS['simple_cell'], x, lambda model: forget(model.cell)
    )
    differ = lambda y: float(jnp.max(jnp.abs(y[:, 0] - y[:, 1])))
    self.assertGreater(differ(outputs), 1e-3)
    self.assertLess(differ(last), 1e-6)


def _with_dropout(kind, x, change=lambda model: None):
  """Two calls with dropout, one in eval mode, and one of the merged model."""
  plain, base = nnx.split(kind.model)

  @jax.jit
  def run(base, x):
    model = kinds.move(kind.apply(nnx.merge(plain, base), dropout=0.5))
    change(model)
    first, second = kind.call(model, x), kind.call(model, x)
    merged = kind.call(nnx_ext.merge_lora(model), x)
    model.eval()
    return first, second, kind.call(model, x), merged

  return run(nnx.as_pure(base), x)


def _mesh():
  return jax.make_mesh(
    (2, 2), ('x', 'y'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


class ShardedTest(parameterized.TestCase):
  """The names of the weight's axes are those of the factors' axes."""

  @parameterized.parameters(
    (nnx.Linear, (4, 6), ('x', 'y'), ('x', None), (None, 'y')),
    (
      nnx.LinearGeneral,
      (4, (2, 6)),
      ('x', 'y', None),
      ('x', None),
      (None, 'y', None),
    ),
    (
      nnx.Einsum,
      ('btd,nhd->btnh', (2, 6, 4)),
      ('y', None, 'x'),
      (None, 'x'),
      (None, 'y', None),
    ),
    (
      nnx.Conv,
      (4, 6, 3),
      (None, 'x', 'y'),
      (None, 'x', None),
      (None, 'y'),
    ),
    (nnx.Embed, (4, 6), ('x', 'y'), ('x', None), (None, 'y')),
  )  # fmt: skip
  def test_names(self, cls, args, names, of_a, of_b):
    embed = cls is nnx.Embed
    attribute = 'embedding' if embed else 'kernel'
    options = {f'{attribute}_metadata': {'out_sharding': names}}
    with jax.set_mesh(_mesh()):
      layer = cls(*args, rngs=nnx.Rngs(0), **options)
      model = _apply(layer)
      a, b = model.lora.lora_a, model.lora.lora_b
      self.assertEqual(tuple(a.get_metadata('out_sharding')), of_a)
      self.assertEqual(tuple(b.get_metadata('out_sharding')), of_b)
      same = lambda array, names: self.assertTrue(
        array.sharding.is_equivalent_to(
          jax.sharding.NamedSharding(_mesh(), P(*names)), array.ndim
        ),
        array.sharding,
      )
      same(a.get_value(), of_a)
      same(b.get_value(), of_b)

  @parameterized.parameters(False, True)
  def test_outputs(self, by_initializer):
    plain = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    expected = kinds.move(_apply(plain))(X)
    with jax.set_mesh(_mesh()):
      if by_initializer:
        init = nnx.initializers.lecun_normal()
        options = {'kernel_init': nnx.with_partitioning(init, ('x', 'y'))}
      else:
        options = {'kernel_metadata': {'out_sharding': ('x', 'y')}}
      sharded = nnx.Linear(4, 6, rngs=nnx.Rngs(0), **options)
      model = kinds.move(_apply(sharded))
      self.assertEqual(
        tuple(model.lora.lora_a.get_metadata('out_sharding')), ('x', None)
      )
      kinds.assert_close(nnx.jit(lambda m, x: m(x))(model, X), expected)
      merged = nnx_ext.merge_lora(model)
      self.assertEqual(nnx.graphdef(merged), nnx.graphdef(sharded))
      kinds.assert_close(merged(X), expected)

  def test_stacked(self):
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: 'x'})
    def layers(rngs):
      return nnx.Linear(
        *(4, 6), kernel_metadata={'out_sharding': (None, 'y')}, rngs=rngs
      )

    with jax.set_mesh(_mesh()):
      model = _apply(layers(nnx.Rngs(0).split(2)))
      names = lambda v: tuple(v.get_metadata('out_sharding'))
      self.assertEqual(names(model.lora.lora_a), ('x', None, None))
      self.assertEqual(names(model.lora.lora_b), ('x', None, 'y'))
