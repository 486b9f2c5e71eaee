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
"""Parametrizations at the weight: every layer runs unchanged."""

import pickle
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from nnx_ext.parametrizations import Parametrization
from tests import models
from tests.errors import ErrorsTestCase

every_mode = parameterized.product(mode=list(models.MODES))


class Cubed(Parametrization):
  """weight = root**3, entry by entry: not linear, with an exact inverse."""

  def __init__(self, weight):
    self.root = nnx.Param(jnp.cbrt(weight.astype(jnp.float32)))
    self.kept = str(weight.dtype)

  def __call__(self):
    return (self.root[...] ** 3).astype(self.kept)

  def kl(self):
    return jnp.sum(self.root[...] ** 2)


class Counted(Cubed):
  """Counts its evaluations, in Python."""

  calls = 0

  def __call__(self):
    Counted.calls += 1
    return super().__call__()


class Noisy(Parametrization):
  """Random in train mode."""

  def __init__(self, weight, *, rngs):
    self.mean = nnx.Param(weight)
    self.rngs = rngs
    self.deterministic = False

  def __call__(self):
    if self.deterministic:
      return self.mean[...]
    return self.mean[...] + jax.random.normal(self.rngs.noise(), self.shape)


class Own(nnx.Module):
  """A user's module that reads its weights in every way."""

  def __init__(self, *, rngs):
    self.w = nnx.Param(jax.random.normal(rngs(), (3, 3)))
    self.v = nnx.Param(jax.random.normal(rngs(), (3,)))

  def __call__(self, x):
    w, v = self.w, self.v
    row = jnp.reshape(v[...], (1, 3))
    y = x @ w + jnp.dot(x, w.T) - (2.0 * w)[0:1] + w[1:2] / 3.0
    y = jnp.einsum('bi,ij->bj', y, w) * row + abs(-w).sum() + w.ndim
    rows = sum(jnp.reshape(r, (1, 3)) for r in w)
    return y + rows + len(w) + jnp.asarray(w, w.dtype)[0:1] ** 2


def _rngs():
  return nnx.Rngs(0)


def _seq(x):
  return jnp.stack([x, jnp.sin(x), jnp.cos(x)], axis=1)


X = models.batch(4, 2)
IDS = jnp.array([[0, 2], [1, 1]])
IMAGE = jax.random.normal(jax.random.key(1), (2, 5, 5, 4))

LAYERS = {
  'linear': (lambda: nnx.Linear(4, 3, rngs=_rngs()), lambda m: m(X)),
  'linear_general': (
    lambda: nnx.LinearGeneral(4, (2, 3), rngs=_rngs()),
    lambda m: m(X),
  ),
  'einsum': (
    lambda: nnx.Einsum('bi,ijk->bjk', (4, 2, 3), (2, 3), rngs=_rngs()),
    lambda m: m(X),
  ),
  'conv': (
    lambda: nnx.Conv(4, 6, (3, 3), feature_group_count=2, rngs=_rngs()),
    lambda m: m(IMAGE),
  ),
  'conv_transpose': (
    lambda: nnx.ConvTranspose(4, 3, (3, 3), strides=(2, 2), rngs=_rngs()),
    lambda m: m(IMAGE),
  ),
  'embed': (
    lambda: nnx.Embed(5, 4, rngs=_rngs()),
    lambda m: (m(IDS), m.attend(X)),
  ),
  'attention': (
    lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=_rngs()),
    lambda m: m(_seq(X), mask=nnx.make_causal_mask(_seq(X)[..., 0])),
  ),
  'lstm': (
    lambda: nnx.RNN(nnx.LSTMCell(4, 3, rngs=_rngs())),
    lambda m: m(_seq(X)),
  ),
  'optimized_lstm': (
    lambda: nnx.RNN(nnx.OptimizedLSTMCell(4, 3, rngs=_rngs())),
    lambda m: m(_seq(X)),
  ),
  'gru': (
    lambda: nnx.RNN(nnx.GRUCell(4, 3, rngs=_rngs())),
    lambda m: m(_seq(X)),
  ),
  'simple_cell': (
    lambda: nnx.RNN(nnx.SimpleCell(4, 3, rngs=_rngs())),
    lambda m: m(_seq(X)),
  ),
  'layer_norm': (lambda: nnx.LayerNorm(4, rngs=_rngs()), lambda m: m(X)),
  'rms_norm': (lambda: nnx.RMSNorm(4, rngs=_rngs()), lambda m: m(X)),
  'batch_norm': (lambda: nnx.BatchNorm(4, rngs=_rngs()), lambda m: m(X)),
  'group_norm': (
    lambda: nnx.GroupNorm(4, num_groups=2, rngs=_rngs()),
    lambda m: m(X),
  ),
  'instance_norm': (
    lambda: nnx.InstanceNorm(4, rngs=_rngs()),
    lambda m: m(IMAGE),
  ),
  'prelu': (lambda: nnx.PReLU(), lambda m: m(X)),
  'lora': (
    lambda: nnx.LoRALinear(4, 3, lora_rank=2, rngs=_rngs()),
    lambda m: m(X),
  ),
  'sequential': (
    lambda: nnx.Sequential(
      nnx.Linear(4, 3, rngs=_rngs()), nnx.relu, nnx.Linear(3, 2, rngs=_rngs())
    ),
    lambda m: m(X),
  ),
  'own': (lambda: Own(rngs=_rngs()), lambda m: m(X[:, :3])),
}
# A matrix of zeros has no gradient through a cube root; these start at ones.
ALL = {nnx.Param: Cubed}


def _matrices(factory=Cubed):
  return {lambda path, param: param.ndim > 1: factory}


class LayersTest(parameterized.TestCase):
  @parameterized.product(name=list(LAYERS))
  def test_same_outputs(self, name):
    make, run = LAYERS[name]
    plain, model = make(), nnx_ext.parametrize(make(), ALL)
    self.assertIs(type(model), type(plain))
    self.assertNotEmpty(
      [m for _, m in nnx.iter_graph(model) if isinstance(m, Cubed)]
    )
    for view in (model, nnx_ext.materialize(model), nnx_ext.bake(model)):
      chex.assert_trees_all_close(run(view), run(make()), rtol=1e-4, atol=1e-5)
    self.assertEqual(nnx.graphdef(nnx_ext.bake(model)), nnx.graphdef(plain))

  @parameterized.product(
    [{'name': name, 'mode': 'default'} for name in LAYERS]
    + [
      {'name': name, 'mode': mode}
      for name in ('linear', 'batch_norm', 'own')
      for mode in ('no_updates', 'tree')
    ]
  )
  def test_gradients_are_those_of_the_formula(self, name, mode):
    make, run = LAYERS[name]

    def loss(model):
      return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(run(model)))

    model = nnx_ext.parametrize(make(), ALL)
    _, grads = nnx_ext.value_and_grad_multi(
      lambda m: {'loss': loss(m)},
      argnums=nnx.DiffState(0, nnx.Param),
      **models.MODES[mode],
    )(model)
    weight_grads = nnx.grad(loss)(make())
    flat = dict(nnx.to_flat_state(weight_grads))
    for path, root in nnx.to_flat_state(nnx.state(model, nnx.Param)):
      own = grads['loss']
      for key in path:
        own = own[key]
      expected = flat[path[:-1]][...] * 3.0 * root[...] ** 2
      chex.assert_trees_all_close(own[...], expected, rtol=2e-3, atol=1e-4)

  def test_bfloat16(self):
    layer = nnx.Linear(
      4, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=_rngs()
    )
    model = nnx_ext.parametrize(layer, _matrices())
    self.assertEqual(model.kernel.dtype, jnp.bfloat16)
    self.assertEqual(model(X.astype(jnp.bfloat16)).dtype, jnp.bfloat16)
    self.assertEqual(model.kernel.root.dtype, jnp.float32)


class SurgeryTest(parameterized.TestCase):
  def test_the_model_is_not_changed(self):
    model = models.MLP(4, 1, rngs=_rngs())
    before = nnx.graphdef(model)
    kernel, value = model.l1.kernel, model.l1.kernel[...]
    nnx_ext.parametrize(model, _matrices())
    self.assertEqual(nnx.graphdef(model), before)
    self.assertIs(model.l1.kernel, kernel)
    self.assertIs(model.l1.kernel[...], value)

  def test_the_copy_has_variables_of_its_own(self):
    model = models.MLP(4, 1, batch_norm=True, rngs=_rngs())
    copy = nnx_ext.parametrize(model, _matrices())
    copy(models.batch())
    self.assertNotEqual(float(copy.norm.mean[0]), 0.0)
    self.assertEqual(float(model.norm.mean[0]), 0.0)

  def test_the_weight_itself_is_gone(self):
    model = nnx_ext.parametrize(models.MLP(4, 1, rngs=_rngs()), _matrices())
    paths = {
      '/'.join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.state(model))
    }
    self.assertEqual(
      paths, {'l1/kernel/root', 'l1/bias', 'l2/kernel/root', 'l2/bias'}
    )

  def test_only_params_and_the_first_rule(self):
    seen = []

    def matches(path, variable):
      seen.append(variable)
      return path[-1] == 'kernel'

    model = nnx_ext.parametrize(
      models.MLP(4, 1, batch_norm=True, dropout=0.1, rngs=_rngs()),
      [(matches, Cubed), (nnx.PathContains('l1'), Counted)],
    )
    self.assertTrue(all(isinstance(v, nnx.Param) for v in seen))
    self.assertIs(type(model.l1.kernel), Cubed)
    self.assertIs(type(model.l1.bias), Counted)
    self.assertIsInstance(model.l2.bias, nnx.Param)

  def test_chains_by_path(self):
    plain = models.MLP(4, 1, rngs=_rngs())
    once = nnx_ext.parametrize(plain, _matrices())
    twice = nnx_ext.parametrize(
      once, {lambda path, _: path == ('l1', 'kernel', 'root'): Cubed}
    )
    self.assertEqual(sorted(nnx.state(twice.l1.kernel)['root']), ['root'])
    x = models.batch()
    chex.assert_trees_all_close(twice(x), plain(x), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
      nnx_ext.bake(twice)(x), plain(x), rtol=1e-4, atol=1e-5
    )

  def test_tied_weights_share_one(self):
    class Tied(nnx.Module):
      def __init__(self):
        self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
        self.b.kernel = self.a.kernel

    model = nnx_ext.parametrize(Tied(), _matrices())
    self.assertIs(model.a.kernel, model.b.kernel)
    chex.assert_trees_all_close(
      nnx_ext.kl(model), jnp.sum(model.a.kernel.root[...] ** 2)
    )
    baked = nnx_ext.bake(model)
    self.assertIs(baked.a.kernel, baked.b.kernel)
    moved = nnx_ext.assign(model, 'b/kernel', jnp.eye(3) + 1.0)
    self.assertIs(moved.a.kernel, moved.b.kernel)

  def test_assign(self):
    model = nnx_ext.parametrize(models.MLP(4, 1, rngs=_rngs()), _matrices())
    weight = jnp.linspace(0.5, 1.0, 24).reshape(4, 6)
    for path in ('l1/kernel', ('l1', 'kernel')):
      moved = nnx_ext.assign(model, path, weight)
      chex.assert_trees_all_close(moved.l1.kernel[...], weight, rtol=1e-5)
      chex.assert_trees_all_close(moved.l2.kernel[...], model.l2.kernel[...])
      self.assertEqual(nnx.graphdef(moved), nnx.graphdef(model))
    self.assertGreater(
      float(jnp.max(jnp.abs(model.l1.kernel[...] - weight))), 0.1
    )

  def test_assign_keeps_arguments(self):
    rngs = nnx.Rngs(noise=3)
    model = nnx_ext.parametrize(
      nnx.Linear(2, 2, rngs=_rngs()),
      _matrices(lambda w: Noisy(w, rngs=rngs)),
    )
    model.eval()  # which assign keeps, too
    moved = nnx_ext.assign(model, 'kernel', jnp.ones((2, 2)))
    chex.assert_trees_all_close(moved.kernel[...], jnp.ones((2, 2)))

  def test_modes_and_bake(self):
    rngs = nnx.Rngs(noise=3)
    plain = nnx.Linear(2, 2, rngs=_rngs())
    model = nnx_ext.parametrize(plain, _matrices(lambda w: Noisy(w, rngs=rngs)))
    x = jnp.ones((1, 2))
    self.assertGreater(float(jnp.max(jnp.abs(model(x) - model(x)))), 1e-3)
    chex.assert_trees_all_close(nnx_ext.bake(model)(x), plain(x))
    model.eval()
    chex.assert_trees_all_close(model(x), plain(x))
    model.train()
    view = nnx_ext.materialize(model)
    chex.assert_trees_all_close(view(x), view(x))
    self.assertIs(view.bias, model.bias)

  def test_materialize_evaluates_once(self):
    model = nnx_ext.parametrize(
      nnx.RNN(nnx.SimpleCell(4, 3, rngs=_rngs())), _matrices(Counted)
    )

    graphdef, state = nnx.split(model)

    def forward(state, x):
      return nnx_ext.materialize(nnx.merge(graphdef, state))(x)

    Counted.calls = 0
    jaxpr = str(jax.make_jaxpr(forward)(state, jnp.ones((1, 100, 4))))
    self.assertEqual(Counted.calls, 2)
    self.assertEqual(jaxpr.count('integer_pow'), 2)

  def test_stacked_layers(self):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
      layer = nnx.Linear(4, 4, rngs=rngs)
      return nnx_ext.parametrize(layer, {nnx.PathContains('kernel'): Cubed})

    layers = stack(nnx.Rngs(0))
    self.assertEqual(layers.kernel.root.shape, (3, 4, 4))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return jnp.tanh(nnx_ext.materialize(layer)(x))

    y = models.batch()
    for i in range(3):
      kernel = layers.kernel.root[i] ** 3
      y = jnp.tanh(y @ kernel + jnp.reshape(layers.bias[i], (1, 4)))
    chex.assert_trees_all_close(
      forward(models.batch(), layers), y, rtol=1e-5, atol=1e-6
    )
    with self.assertRaisesRegex(
      ValueError, r"'kernel'.*\(3, 4, 4\).*\(4, 4\).*inside the vmap"
    ):
      nnx_ext.materialize(layers)

  def test_equal_layers_can_be_stacked_later(self):
    class Blocks(nnx.Module):
      def __init__(self):
        self.layers = nnx.List(
          [nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)]
        )

    first, second = nnx_ext.parametrize(Blocks(), _matrices()).layers
    self.assertEqual(jax.tree.structure(first), jax.tree.structure(second))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), first, second)
    x = models.batch(3)
    chex.assert_trees_all_close(
      jax.vmap(lambda layer: layer(x))(stacked),
      jnp.stack([first(x), second(x)]),
      rtol=1e-5,
      atol=1e-6,
    )

  def test_a_model_without_any(self):
    model = models.MLP(4, 1, rngs=_rngs())
    self.assertIs(nnx_ext.materialize(model).l1.kernel, model.l1.kernel)
    self.assertEqual(float(nnx_ext.kl(model)), 0.0)


class LifeTest(parameterized.TestCase):
  """What else people do to a model."""

  def _model(self):
    return nnx_ext.parametrize(models.MLP(4, 1, rngs=_rngs()), _matrices())

  @every_mode
  def test_split_merge_state_clone(self, mode):
    model, x = self._model(), models.batch()
    graph = models.MODES[mode]['graph']
    merged = nnx.merge(*nnx.split(model, graph=graph))
    chex.assert_trees_all_close(merged(x), model(x))
    chex.assert_trees_all_close(nnx.clone(model, graph=graph)(x), model(x))
    weight = model.l1.kernel[...]
    doubled = jax.tree.map(lambda a: 2.0 * a, nnx.state(model, graph=graph))
    nnx.update(model, doubled)
    chex.assert_trees_all_close(model.l1.kernel[...], 8.0 * weight, rtol=1e-5)

  def test_pickle(self):
    model, x = self._model(), models.batch()
    again = pickle.loads(pickle.dumps(model))
    chex.assert_trees_all_close(again(x), model(x))

  def test_orbax_with_plain_paths(self):
    model, x = self._model(), models.batch()
    pure = nnx.to_pure_dict(nnx.state(model))
    for path, _ in jax.tree.leaves_with_path(pure):
      for key in path:
        self.assertIsInstance(key.key, (str, int))
    with tempfile.TemporaryDirectory() as folder:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f'{folder}/model', pure)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(f'{folder}/model', pure)
    other = nnx_ext.parametrize(models.MLP(4, 1, rngs=nnx.Rngs(9)), _matrices())
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(other, state)
    chex.assert_trees_all_close(other(x), model(x))

  def test_abstract(self):
    shape = nnx.eval_shape(self._model)
    self.assertEqual(shape.l1.kernel.root.shape, (4, 6))
    self.assertEqual(shape.l1.kernel.shape, (4, 6))

  def test_tabulate(self):
    self.assertIn('Cubed', nnx.tabulate(self._model(), models.batch()))

  @parameterized.product(mode=list(models.MODES), tx=['sgd', 'adam', 'adamw'])
  def test_trains_like_the_formula(self, mode, tx):
    tx = {
      'sgd': optax.sgd(0.05, momentum=0.9),
      'adam': optax.adam(1e-2),
      'adamw': optax.adamw(1e-2, weight_decay=0.1),
    }[tx]
    options, x = models.MODES[mode], models.batch()
    model = nnx_ext.parametrize(
      nnx.Linear(4, 1, rngs=_rngs()), {nnx.PathContains('kernel'): Cubed}
    )
    theta = {'root': model.kernel.root[...], 'bias': model.bias[...]}

    def pure(theta):
      y = x @ theta['root'] ** 3 + jnp.reshape(theta['bias'], (1, 1))
      return jnp.mean((y - 1.0) ** 2)

    @nnx.jit(**options)
    def step(model, optimizer):
      _, grads = nnx_ext.value_and_grad_multi(
        lambda m: {'loss': jnp.mean((m(x) - 1.0) ** 2)},
        argnums=nnx.DiffState(0, nnx.Param),
        **options,
      )(model)
      optimizer.update(model, grads['loss'])

    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = tx.init(theta)
    for _ in range(10):
      step(model, optimizer)
      updates, state = tx.update(jax.grad(pure)(theta), state, theta)
      theta = optax.apply_updates(theta, updates)
    chex.assert_trees_all_close(
      {'root': model.kernel.root[...], 'bias': model.bias[...]},
      theta,
      rtol=1e-4,
      atol=1e-5,
    )

  def test_reads_answer_as_arrays(self):
    layer = nnx_ext.parametrize(nnx.Linear(4, 3, rngs=_rngs()), _matrices())
    w, value = layer.kernel, layer.kernel[...]
    np.testing.assert_array_equal(np.asarray(w), value)
    self.assertEqual((w.shape, w.ndim, w.size), ((4, 3), 2, 12))
    self.assertEqual(w.astype(jnp.bfloat16).dtype, jnp.bfloat16)
    chex.assert_trees_all_close(w - 1.0, value - 1.0)
    chex.assert_trees_all_close(1.0 - w, 1.0 - value)
    chex.assert_trees_all_close(w @ w.T, value @ value.T)
    chex.assert_trees_all_equal(w > 0.0, value > 0.0)
    chex.assert_trees_all_close(w * layer.kernel, value**2)
    self.assertEqual(w[0].shape, (3,))
    self.assertTrue(bool(w))
    with self.assertRaisesRegex(AttributeError, "no attribute 'missing'"):
      _ = w.missing


class ErrorsTest(ErrorsTestCase):
  def _model(self):
    return models.MLP(4, 1, rngs=_rngs())

  def test_a_filter_that_matches_nothing(self):
    with self.assertRaisesRegex(
      ValueError,
      "parametrize: .*PathContains.*'kernle'.*'l1/bias'.*Did you mean 'kernel'",
    ):
      nnx_ext.parametrize(self._model(), {nnx.PathContains('kernle'): Cubed})

  @parameterized.parameters(5, [nnx.Param], nnx.Param)
  def test_wrong_rules(self, rules):
    with self.assertRaisesRegex(TypeError, 'parametrize: the rules'):
      nnx_ext.parametrize(self._model(), rules)

  def test_wrong_factory(self):
    with self.assertRaisesRegex(TypeError, 'factory.*Param.*got str'):
      nnx_ext.parametrize(self._model(), {nnx.Param: 'WeightNorm'})
    with self.assertRaisesRegex(
      TypeError, "'l1/bias'.*must return a Parametrization"
    ):
      nnx_ext.parametrize(self._model(), {nnx.Param: lambda w: w})

  def test_wrong_shape_or_dtype(self):
    class Flat(Cubed):
      def __call__(self):
        return super().__call__().reshape(-1)

    class Half(Cubed):
      def __call__(self):
        return super().__call__().astype(jnp.bfloat16)

    with self.assertRaisesRegex(
      ValueError,
      r"Flat at 'l1/kernel' returned float32 of shape \(24,\).*\(4, 6\)",
    ):
      nnx_ext.parametrize(self._model(), _matrices(Flat))
    with self.assertRaisesRegex(
      ValueError, r"Half at 'l1/kernel' returned bfloat16.*float32"
    ):
      nnx_ext.parametrize(self._model(), _matrices(Half))

  def test_assign(self):
    model = nnx_ext.parametrize(self._model(), _matrices())
    with self.assertRaisesRegex(
      ValueError, "'l1/kernal'.*Did you mean 'l1/kernel'"
    ):
      nnx_ext.assign(model, 'l1/kernal', jnp.ones((4, 6)))
    with self.assertRaisesRegex(ValueError, r'shape \(4, 6\), got \(6, 4\)'):
      nnx_ext.assign(model, 'l1/kernel', jnp.ones((6, 4)))

  def test_assign_without_a_kept_argument(self):
    class Forgets(Cubed):
      def __init__(self, weight, *, power):
        super().__init__(weight)

    model = nnx_ext.parametrize(
      self._model(), _matrices(lambda w: Forgets(w, power=3))
    )
    with self.assertRaisesRegex(ValueError, r'`power`.*self.power = power'):
      nnx_ext.assign(model, 'l1/kernel', jnp.ones((4, 6)))

  def test_undefined_call(self):
    class Nothing(Parametrization):
      def __init__(self, weight):
        pass

    with self.assertRaisesRegex(TypeError, 'Nothing must define `__call__'):
      nnx_ext.parametrize(self._model(), _matrices(Nothing))
    with self.assertRaisesRegex(TypeError, 'Cubed has no `log_det`'):
      Cubed(jnp.ones(2)).log_det()
