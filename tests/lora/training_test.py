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
"""Training of adapters, and keeping them."""

import copy
import functools
import pathlib
import pickle
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.lora import kinds, subclasses, trees
from tests.lora.kinds import Kind, Weight
from tests.lora.trees import noise

MLP = Kind(
  lambda rngs: models.MLP(4, 3, rngs=rngs),
  (8, 4),
  {('l1',): Weight(), ('l2',): Weight()},
)
X, Y = MLP.x, noise((8, 3), 7)

OPTIONS = {
  'plain': {},
  'alpha': {'alpha': 4.0},
  'dora': {'dora': True},
  'pissa': {'init': 'pissa'},
}

LORA = nnx.DiffState(0, nnx.LoRAParam)


def _tx():
  return optax.adamw(0.02, weight_decay=0.1)


def _loss(model, x=X):
  return jnp.mean((model(x) - Y) ** 2)


@functools.cache
def _started(option):
  return trees.built(lambda: MLP.apply(**OPTIONS[option]))


def _model(option='plain'):
  return nnx.clone(_started(option))


@nnx.jit
def _step(model, optimizer):
  loss, grads = nnx.value_and_grad(_loss, argnums=LORA)(model)
  optimizer.update(model, grads)
  return loss


def _optimizer(model, tx=None):
  return nnx.Optimizer(model, tx or _tx(), wrt=nnx.LoRAParam)


def _train(model, optimizer, steps):
  return [float(_step(model, optimizer)) for _ in range(steps)]


def _split_leaves(model):
  """A model's values: those of the adapters' Params, and all others."""
  leaves = trees.leaves(model)
  trained = {path: leaves.pop(path) for path in trees.factors(model)}
  return trained, leaves


class TrainingTest(parameterized.TestCase):
  @parameterized.parameters(*OPTIONS)
  def test_as_the_formula(self, option):
    model = _model(option)
    started, frozen = _split_leaves(model)
    base = nnx.as_pure(nnx.state(MLP.model))
    call = MLP.oracle(model, 2.0 if option == 'alpha' else 1.0, base)
    theta = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    tx = _tx()

    @jax.jit
    def train(theta):
      def body(carry, _):
        theta, state = carry
        loss = lambda theta: jnp.mean((call(theta, X) - Y) ** 2)
        loss, grads = jax.value_and_grad(loss)(theta)
        updates, state = tx.update(grads, state, theta)
        return (optax.apply_updates(theta, updates), state), loss

      (theta, _), losses = jax.lax.scan(
        body, (theta, tx.init(theta)), length=30
      )
      return theta, losses

    expected, expected_losses = train(theta)
    losses = _train(model, _optimizer(model), 30)
    self.assertLess(losses[-1], 0.9 * losses[0])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    actual = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    trees.assert_close(actual, expected, 2e-3)

    trained, rest = _split_leaves(model)
    trees.assert_same(rest, frozen)
    for path in trained:
      self.assertGreater(
        float(np.max(np.abs(trained[path] - started[path]))), 0
      )
    trees.assert_same(
      trees.leaves(nnx_ext.remove_lora(model)), trees.leaves(MLP.model)
    )
    trees.assert_close(nnx_ext.merge_lora(model)(X), model(X))

  def test_the_optimizer_holds_adapters_only(self):
    model = _model()
    moments = nnx.state(_optimizer(model), nnx.optimizer.OptState)
    shapes = [x.shape for x in jax.tree.leaves(moments) if x.ndim]
    expected = [v.shape for v in trees.factors(model).values()]
    self.assertCountEqual(shapes, 2 * expected)

  def test_a_bf16_base(self):
    kind = kinds.KINDS['linear_bf16_params']
    model = trees.move(kind.apply())
    frozen = _split_leaves(model)[1]
    optimizer = _optimizer(model)
    loss = lambda model: jnp.mean(model(kind.x).astype(jnp.float32) ** 2)
    first = loss(model)
    for _ in range(3):
      optimizer.update(model, nnx.grad(loss, argnums=LORA)(model))
    self.assertLess(float(loss(model)), float(first))
    trees.assert_same(_split_leaves(model)[1], frozen)
    for param in trees.factors(model).values():
      self.assertEqual(param.dtype, jnp.float32)

  def test_with_dropout(self):
    model = trees.built(lambda: MLP.apply(dropout=0.3))
    losses = _train(model, _optimizer(model), 30)
    model.eval()
    self.assertLess(float(_loss(model)), losses[0])
    base = trees.leaves(MLP.model)
    trees.assert_same(trees.leaves(nnx_ext.remove_lora(model)), base)

  def test_a_tied_embedding(self):
    kind = kinds.KINDS['tied']
    model = kind.apply()
    optimizer = _optimizer(model)
    frozen = _split_leaves(model)[1]

    def loss(model):
      logits = jax.nn.log_softmax(model(kind.x))
      return -jnp.mean(logits[..., 0])

    @nnx.jit
    def step(model, optimizer):
      value, grads = nnx.value_and_grad(loss, argnums=LORA)(model)
      optimizer.update(model, grads)
      return value

    losses = [float(step(model, optimizer)) for _ in range(10)]
    self.assertLess(losses[-1], losses[0])
    trees.assert_same(_split_leaves(model)[1], frozen)

  @parameterized.parameters(*models.MODES)
  def test_several_losses(self, mode):
    # An actor and a critic of one base, each with its own adapter.
    actor, critic = trees.move(_model()), trees.move(_model('alpha'))

    def losses(actor, critic, x):
      y, value = actor(x), jnp.mean(critic(x), axis=1, keepdims=True)
      advantage = jax.lax.stop_gradient(1.0 - value)
      return {
        'policy': jnp.mean(jnp.sin(y) * advantage),
        'value': jnp.mean((1.0 - value) ** 2) * jnp.mean(jnp.cos(y)),
      }

    routes = {'policy': LORA, 'value': nnx.DiffState(1, nnx.LoRAParam)}

    def step(actor, critic):
      return nnx_ext.value_and_grad_multi(
        losses, argnums=routes, **models.MODES[mode]
      )(actor, critic, X)

    def alone(actor, critic, key):
      loss = lambda *args: losses(*args)[key]
      return nnx.grad(loss, argnums=routes[key])(actor, critic, X)

    _, grads = nnx.jit(step, **models.MODES[mode])(actor, critic)
    trees.assert_close(
      {key: nnx.to_pure_dict(grads[key]) for key in grads},
      {
        key: nnx.to_pure_dict(
          nnx.jit(alone, static_argnames='key')(actor, critic, key=key)
        )
        for key in routes
      },
    )
    frozen = [_split_leaves(module)[1] for module in (actor, critic)]
    for module, key in ((actor, 'policy'), (critic, 'value')):
      _optimizer(module).update(module, grads[key])
    for module, before in zip((actor, critic), frozen):
      trees.assert_same(_split_leaves(module)[1], before)


class RecipeTest(parameterized.TestCase):
  @parameterized.parameters(optax.adamw, optax.sgd)
  def test_lora_plus(self, make):
    theta = nnx.to_pure_dict(
      nnx.state(trees.move(_model('dora')), nnx.LoRAParam)
    )
    grads = jax.tree.map(lambda x: noise(x.shape, x.size), theta)
    tx, ours = make(0.1), nnx_ext.lora_plus(make(0.1), 4.0)
    expected, _ = tx.update(grads, tx.init(theta), theta)
    actual, _ = ours.update(grads, ours.init(theta), theta)
    for layer in ('l1', 'l2'):
      expected[layer]['lora']['lora_b'] *= 4.0
    trees.assert_close(actual, expected, 1e-6)

  def test_lora_plus_in_an_optimizer(self):
    models_, ratio = [], 4.0
    for tx in (_tx(), nnx_ext.lora_plus(_tx(), ratio)):
      model = trees.move(_model())
      before = _split_leaves(model)[0]
      _train(model, _optimizer(model, tx), 1)
      after = _split_leaves(model)[0]
      models_.append({path: after[path] - before[path] for path in after})
    plain, ours = models_
    for path in plain:
      factor = ratio if path[-1] == 'lora_b' else 1.0
      np.testing.assert_allclose(
        ours[path], factor * plain[path], rtol=1e-3, atol=1e-6
      )

  @parameterized.parameters('plain', 'dora')
  def test_lora_fa(self, option):
    model = trees.move(_model(option))
    before = trees.leaves(model)
    only = nnx_ext.lora_fa_filter
    optimizer = nnx.Optimizer(model, _tx(), wrt=only)

    @nnx.jit
    def step(model, optimizer):
      grads = nnx.grad(_loss, argnums=nnx.DiffState(0, only))(model)
      optimizer.update(model, grads)

    for _ in range(2):
      step(model, optimizer)
    after = trees.leaves(model)
    moved = {p[-1] for p in after if not np.array_equal(after[p], before[p])}
    self.assertEqual(moved, {'lora_b'})
    # Of an embedding, too.
    embed = kinds.KINDS['tied'].apply()
    names = [path[-1] for path, _ in nnx.to_flat_state(nnx.state(embed, only))]
    self.assertEqual(names, ['lora_b'])


KEPT = [
  'linear',
  'general_batch',
  'einsum_batch_last',
  'conv_groups',
  'tied',
  'attention',
  'user_relu',
  'user_own_forward',
  'user_derived',
  'user_conv',
]


class KeptTest(parameterized.TestCase):
  @parameterized.parameters(*KEPT)
  def test_copies(self, name):
    kind = kinds.KINDS[name]
    model = trees.move(trees.built(lambda: kind.apply(alpha=3.0)))
    outputs, before = kind.call(model, kind.x), trees.leaves(model)
    copies = {
      'pickle': pickle.loads(pickle.dumps(model)),
      'deepcopy': copy.deepcopy(model),
      'clone': nnx.clone(model),
      'merge': nnx.merge(*nnx.split(model)),
    }
    graphdef, state = nnx.split(model)
    graphdef = pickle.loads(pickle.dumps(graphdef))
    self.assertEqual(graphdef, nnx.graphdef(model))
    copies['graphdef'] = nnx.merge(graphdef, state)
    for way, other in copies.items():
      self.assertEqual(nnx.graphdef(other), nnx.graphdef(model), way)
      trees.assert_same(trees.leaves(other), before)
      for path in kind.weights:
        mine, theirs = trees.at(model, path), trees.at(other, path)
        self.assertIs(type(theirs), type(mine), way)
      trees.assert_close(kind.call(other, kind.x), outputs, 0.0)
      removed = nnx_ext.remove_lora(other)
      self.assertEqual(nnx.graphdef(removed), nnx.graphdef(kind.model), way)
    # A copy is a copy.
    trees.move(copies['deepcopy'])
    for path in kind.weights:
      lora = trees.at(copies['deepcopy'], path).lora
      lora.lora_a.set_value(0 * lora.lora_a[...])
    trees.assert_same(trees.leaves(model), before)

  def test_dropout_and_disabled_are_kept(self):
    model = trees.move(kinds.KINDS['linear'].apply(dropout=0.5))
    x = kinds.KINDS['linear'].x
    other = pickle.loads(pickle.dumps(model))
    trees.assert_close(other(x), model(x), 0.0)
    with nnx_ext.lora_disabled(model):
      other = copy.deepcopy(model)
    trees.assert_close(other(x), kinds.KINDS['linear'].model(x), 0.0)

  def test_class_is_one_for_each_class(self):
    make = lambda name: type(kinds.KINDS[name].apply())
    self.assertIs(make('user_relu'), make('user_relu'))
    self.assertIsNot(make('user_relu'), make('user_gated'))
    self.assertIsNot(make('user_relu'), nnx_ext.LoRALinear)
    self.assertIsInstance(kinds.KINDS['user_relu'].apply(), subclasses.Relu)
    self.assertIsInstance(kinds.KINDS['user_relu'].apply(), nnx_ext.LoRALinear)


class CheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name).resolve()

  def _through(self, state, name='state'):
    """What orbax restores of a state that it saved."""
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(self.folder / name, state)
      checkpointer.wait_until_finished()
      abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
      return checkpointer.restore(self.folder / name, abstract)

  @parameterized.parameters('linear', 'tied', 'user_relu', 'conv_groups')
  def test_adapter_alone(self, name):
    kind = kinds.KINDS[name]
    model = trees.move(kind.apply(dora=name == 'linear'))
    restored = self._through(nnx.state(model, nnx.LoRAParam))
    other = kind.apply(dora=name == 'linear')
    nnx.update(other, restored)
    trees.assert_same(trees.leaves(other), trees.leaves(model))

  def test_a_checkpoint_of_the_base_loads(self):
    model = trees.move(_model())
    trained = _split_leaves(model)[0]
    base = jax.tree.map(lambda x: x + 1.0, nnx.state(MLP.model))
    nnx.update(model, self._through(base))
    after, rest = _split_leaves(model)
    trees.assert_same(after, trained)
    for path, value in trees.leaves(MLP.model).items():
      np.testing.assert_array_equal(rest[path], value + 1.0)

  @parameterized.parameters('plain', 'pissa')
  def test_training_goes_on_where_it_was(self, option):
    model = _model(option)
    optimizer = _optimizer(model)
    _train(model, optimizer, 3)
    # With a start that is not zero, that belongs to the adapter.
    adapter = nnx.Any(nnx.LoRAParam, nnx.PathContains('lora'))
    saved = {
      'adapter': nnx.state(model, adapter),
      'optimizer': nnx.state(optimizer),
    }
    saved = jax.tree.map(jnp.copy, saved)
    expected = _train(model, optimizer, 3)

    other = _model(option)
    resumed = _optimizer(other)
    restored = self._through(saved)
    nnx.update(other, restored['adapter'])
    nnx.update(resumed, restored['optimizer'])
    self.assertEqual(_train(other, resumed, 3), expected)
    trees.assert_same(trees.leaves(other), trees.leaves(model))
    trees.assert_same(trees.leaves(resumed), trees.leaves(optimizer))
