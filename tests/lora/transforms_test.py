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

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.lora import kinds, steps, trees
from tests.lora.kinds import Kind
from tests.lora.steps import MLP, X, every_mode
from tests.lora.trees import noise

P = jax.sharding.PartitionSpec


class TransformTest(parameterized.TestCase):
  def _check(self, actual, expected=None, tolerance=2e-5):
    expected = steps.expected() if expected is None else expected
    trees.assert_close(actual, expected, tolerance)

  @every_mode
  def test_eager(self, mode):
    self._check(steps.value_and_grad(mode)(steps.adapted(), X))

  @every_mode
  def test_nnx_jit(self, mode):
    step = nnx.jit(steps.value_and_grad(mode), **models.MODES[mode])
    model = steps.adapted()
    before = trees.leaves(model)
    self._check(step(model, X))
    trees.assert_same(trees.leaves(model), before)

  @every_mode
  def test_jax_jit_on_split_state(self, mode):
    graph = models.MODES[mode]['graph']
    graphdef, state = nnx.split(steps.adapted(), graph=graph)

    @jax.jit
    def step(state, x):
      return steps.value_and_grad(mode)(nnx.merge(graphdef, state), x)

    self._check(step(state, X))

  @parameterized.product(
    mode=list(models.MODES),
    through=[
      steps.through_remat,
      steps.through_cond,
      steps.through_vmap,
      steps.through_scan,
    ],
  )
  def test_within_the_loss(self, mode, through):
    loss = through(models.MODES[mode])
    self._check(steps.value_and_grad(mode, loss)(steps.adapted(), X))

  @every_mode
  def test_jax_vmap_over_adapters(self, mode):
    # Three adapters of one base, as one batch.
    graph = models.MODES[mode]['graph']
    graphdef, factors, rest = nnx.split(
      steps.adapted(), nnx.LoRAParam, ..., graph=graph
    )
    several = jax.tree.map(lambda x: jnp.stack([x, 2.0 * x, -x]), factors)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def step(factors, x):
      return steps.mean_loss(nnx.merge(graphdef, factors, rest), x)

    pure = nnx.to_pure_dict(factors)
    scaled = lambda s: jax.tree.map(lambda x: s * x, pure)
    expected = jnp.stack([steps.oracle()(scaled(s)) for s in (1.0, 2.0, -1.0)])
    self._check(step(several, X), expected)

  @every_mode
  def test_shard_map(self, mode):
    self.assertLen(jax.devices(), 4)
    mesh = jax.make_mesh(
      (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    graphdef, state = nnx.split(steps.adapted())
    averaged = lambda model, x: jax.lax.pmean(steps.mean_loss(model, x), 'data')

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P('data')), out_specs=P())
    def step(state, x):
      return steps.value_and_grad(mode, averaged)(nnx.merge(graphdef, state), x)

    self._check(step(state, X))

  @every_mode
  def test_no_tracer_is_left(self, mode):
    model = steps.adapted()
    step = nnx.jit(steps.value_and_grad(mode), **models.MODES[mode])
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
    loss, factors = steps.pure(steps.adapted())
    tangents = trees.values(steps.adapted())

    @functools.partial(jax.jit, static_argnums=0)
    def both(loss, factors):
      def grad(factors, x):
        return jax.grad(loss, argnums=(0, 1))(factors, x)

      return jax.jvp(grad, (factors, X), (tangents, noise(X.shape, 4)))

    expected = both(steps.oracle(), factors)
    self._check(both(loss, factors), expected, 1e-4)
    for leaf in jax.tree.leaves(expected):
      self.assertGreater(float(jnp.max(jnp.abs(leaf))), 1e-4)

  def test_second_derivatives_of_dora(self):
    kind = Kind(lambda rngs: nnx.Linear(5, 7, rngs=rngs), (3, 5))
    model = kind.apply(dora=True)
    oracle = kind.oracle(model, 1.0, nnx.as_pure(nnx.state(kind.model)))
    values = trees.values(model)

    @functools.partial(jax.jit, static_argnums=0)
    def both(call, factors):
      grad = jax.grad(lambda f: jnp.sum(jnp.sin(call(f, kind.x))))
      return jax.jvp(grad, (factors,), (factors,))

    call, _ = kind.of_factors(model)
    self._check(both(call, values), both(oracle, values), 1e-4)

  @every_mode
  def test_value_and_grad_multi(self, mode):
    losses = lambda model, x: {
      'a': steps.mean_loss(model, x),
      'b': jnp.mean(model(x)),
    }
    route = nnx.DiffState(0, nnx.LoRAParam)
    got, grads = nnx_ext.value_and_grad_multi(
      losses, argnums={'a': route, 'b': route}, **models.MODES[mode]
    )(steps.adapted(), X)
    self._check((got['a'], nnx.to_pure_dict(grads['a'])))

  @every_mode
  def test_one_trace(self, mode):
    traces, model = [], steps.adapted()

    @nnx.jit(**models.MODES[mode])
    def step(model, x):
      traces.append(None)
      return model(x)

    for i in range(20):
      for param in trees.factors(model).values():
        param.set_value(noise(param.shape, i))
      outputs = step(model, X)
    self.assertLen(traces, 1)
    call = MLP.oracle(model, 1.0, nnx.as_pure(nnx.state(MLP.model)))
    self._check(outputs, call(steps.pure(model)[1], X))

    for alpha in (4.0, 4.0):
      for layer in (model.l1, model.l2):
        layer.lora.alpha = alpha
      outputs = step(model, X)
    self.assertLen(traces, 2)
    call = MLP.oracle(model, 2.0, nnx.as_pure(nnx.state(MLP.model)))
    self._check(outputs, call(steps.pure(model)[1], X))


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
    nnx.update(abstract, nnx.state(steps.moved()))
    trees.assert_close(abstract(X), steps.moved()(X), 0.0)


class DisabledTest(parameterized.TestCase):
  def test_the_base_alone(self):
    model = steps.adapted()
    base, adapted = MLP.model(X), model(X)
    before = nnx.graphdef(model)
    with nnx_ext.lora_disabled(model):
      trees.assert_close(model(X), base, 0.0)
      with nnx_ext.lora_disabled(model):
        trees.assert_close(model(X), base, 0.0)
      trees.assert_close(model(X), base, 0.0)
    trees.assert_close(model(X), adapted, 0.0)
    self.assertEqual(nnx.graphdef(model), before)

  def test_a_part_of_a_model(self):
    model, base = steps.adapted(), MLP.model
    with nnx_ext.lora_disabled(model.l1):
      expected = model.l2(jnp.tanh(base.l1(X)))
      trees.assert_close(model(X), expected, 0.0)
      with nnx_ext.lora_disabled(model):
        trees.assert_close(model(X), base(X), 0.0)
      trees.assert_close(model(X), expected, 0.0)

  def test_exceptions(self):
    model = steps.adapted()
    adapted = model(X)
    with self.assertRaisesRegex(KeyError, 'mine'):
      with nnx_ext.lora_disabled(model):
        raise KeyError('mine')
    trees.assert_close(model(X), adapted, 0.0)

  @every_mode
  def test_jit_sees_it(self, mode):
    traces, model = [], steps.adapted()
    base, adapted = MLP.model(X), model(X)

    @nnx.jit(**models.MODES[mode])
    def call(model, x):
      traces.append(None)
      return model(x)

    for _ in range(2):
      trees.assert_close(call(model, X), adapted)
      with nnx_ext.lora_disabled(model):
        trees.assert_close(call(model, X), base)
    self.assertLen(traces, 2)

  @every_mode
  def test_within_a_loss(self, mode):
    # A reference without the adapter, as in preference learning.
    def loss(model, x):
      with nnx_ext.lora_disabled(model):
        reference = model(x)
      return jnp.mean(jnp.sin(model(x)) * jax.lax.stop_gradient(reference))

    model = steps.adapted()
    call = MLP.oracle(model, 1.0, nnx.as_pure(nnx.state(MLP.model)))
    expected = lambda f: jnp.mean(jnp.sin(call(f, X)) * MLP.model(X))
    step = nnx.jit(steps.value_and_grad(mode, loss), **models.MODES[mode])
    trees.assert_close(
      step(model, X),
      jax.jit(jax.value_and_grad(expected))(steps.pure(model)[1]),
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
      model = trees.move(kind.apply(**options))
      with nnx_ext.lora_disabled(model):
        trees.assert_close(
          kind.call(model, kind.x), kind.call(kind.model, kind.x), 0.0
        )


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
      model = steps.apply(layer)
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
    expected = trees.move(steps.apply(plain))(X)
    with jax.set_mesh(_mesh()):
      if by_initializer:
        init = nnx.initializers.lecun_normal()
        options = {'kernel_init': nnx.with_partitioning(init, ('x', 'y'))}
      else:
        options = {'kernel_metadata': {'out_sharding': ('x', 'y')}}
      sharded = nnx.Linear(4, 6, rngs=nnx.Rngs(0), **options)
      model = trees.move(steps.apply(sharded))
      self.assertEqual(
        tuple(model.lora.lora_a.get_metadata('out_sharding')), ('x', None)
      )
      trees.assert_close(nnx.jit(lambda m, x: m(x))(model, X), expected)
      merged = nnx_ext.merge_lora(model)
      self.assertEqual(nnx.graphdef(merged), nnx.graphdef(sharded))
      trees.assert_close(merged(X), expected)

  def test_stacked(self):
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: 'x'})
    def layers(rngs):
      return nnx.Linear(
        *(4, 6), kernel_metadata={'out_sharding': (None, 'y')}, rngs=rngs
      )

    with jax.set_mesh(_mesh()):
      model = steps.apply(layers(nnx.Rngs(0).split(2)))
      names = lambda v: tuple(v.get_metadata('out_sharding'))
      self.assertEqual(names(model.lora.lora_a), ('x', None, None))
      self.assertEqual(names(model.lora.lora_b), ('x', None, 'y'))
