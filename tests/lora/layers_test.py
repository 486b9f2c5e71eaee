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
"""The law of LoRA on every kind of layer.

Outputs and gradients are those of the layer with its weight overwritten by
W + s A B, which ``kinds`` writes down a second time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.lora import kinds, trees
from tests.lora.kinds import KINDS
from tests.lora.law import Results, results_of
from tests.lora.trees import at, is_key, noise

# Options, the scale that they mean at rank 2, and whether the start is exact.
OPTIONS: dict[str, tuple[dict, float, bool]] = {
  'plain': ({}, 1.0, True),
  'alpha': ({'alpha': 3.0}, 1.5, True),
  'rslora': ({'alpha': 3.0, 'rslora': True}, 3.0 / 2**0.5, True),
  'dora': ({'dora': True}, 1.0, False),
  'dora_alpha': ({'dora': True, 'alpha': 4}, 2.0, False),
  'pissa': ({'init': 'pissa', 'alpha': 3.0}, 1.5, False),
  'olora': ({'init': 'olora', 'alpha': 3.0}, 1.5, False),
  'orthogonal': ({'init': 'orthogonal'}, 1.0, False),
}

# Beside plain, which is on every kind.
SOME = {
  'alpha': ['linear', 'embed', 'user_own_forward'],
  'rslora': ['general_batch', 'transpose'],
  'dora': [
    'linear',
    'linear_bf16',
    'general_batch_axes',
    'einsum_batch_last',
    'conv_groups',
    'transpose_kernel',
    'embed_one',
    'tied',
    'user_relu',
    'user_helper',
  ],
  'dora_alpha': ['linear_no_bias', 'attend', 'user_conv'],
  'pissa': ['linear', 'einsum_heads', 'conv'],
  'olora': ['linear', 'general_axes'],
  'orthogonal': ['linear', 'einsum_batched', 'attend'],
}


def each(names):
  return parameterized.named_parameters(
    [{'testcase_name': f'_{name}', 'name': name} for name in names]
  )


every_kind = each(KINDS)
every_case = parameterized.named_parameters(
  [
    {'testcase_name': f'_{option}_{name}', 'name': name, 'option': option}
    for option, names in {'plain': KINDS, **SOME}.items()
    for name in names
  ]
)


@functools.cache
def results(name: str, option: str) -> Results:
  options, scale, _ = OPTIONS[option]
  return results_of(KINDS[name], options, scale)


class LawTest(parameterized.TestCase):
  @every_case
  def test_starts_as_the_base(self, name, option):
    kind, got = KINDS[name], results(name, option)
    exact = OPTIONS[option][2]
    weights = {
      path: getattr(at(kind.model, path), weight.attribute)[...]
      for path, weight in kind.weights.items()
    }
    tolerance = 1e-2 if kind.half else 1e-5
    trees.assert_close(
      got.start.expected_weights, weights, 0.0 if exact else tolerance
    )
    # Where the weight is materialised the compiler may fuse it.
    exact = exact and kind.factored
    trees.assert_close(
      got.start.actual[0], got.start.expected[0], 0.0 if exact else tolerance
    )
    self.assertGreater(distance(got.start.actual[0], got.moved.actual[0]), 1e-2)

  @every_case
  def test_outputs(self, name, option):
    got = results(name, option).moved
    trees.assert_close(got.actual[0], got.expected[0], KINDS[name].tolerance)

  @every_case
  def test_gradients(self, name, option):
    got, tolerance = results(name, option), KINDS[name].tolerance
    trees.assert_close(got.start.actual[1], got.start.expected[1], tolerance)
    trees.assert_close(got.moved.actual[1], got.moved.expected[1], tolerance)
    for leaf in jax.tree.leaves(got.moved.expected[1]):
      self.assertGreater(distance(leaf, 0.0), 1e-3)

  @every_case
  def test_merged(self, name, option):
    kind, got = KINDS[name], results(name, option)
    self.assertEqual(got.merged_graphdef, nnx.graphdef(kind.model))
    state = nnx.as_pure(nnx.state(kind.model))
    self.assertEqual(
      jax.tree.structure(got.moved.merged), jax.tree.structure(state)
    )
    merged, base = flat(got.moved.merged), flat(state)
    tolerance = 1e-2 if kind.half else 2e-5
    for path, weight in kind.weights.items():
      base.pop((*path, weight.attribute))
      trees.assert_close(
        merged.pop((*path, weight.attribute)),
        got.moved.expected_weights[path],
        tolerance,
      )
    trees.assert_same(merged, base)
    trees.assert_close(got.moved.weights, got.moved.expected_weights, tolerance)

  @every_case
  def test_removed(self, name, option):
    kind, got = KINDS[name], results(name, option)
    model = nnx.merge(got.graphdef, got.moved.state)
    before = trees.leaves(model)
    removed = nnx_ext.remove_lora(model)
    self.assertEqual(nnx.graphdef(removed), nnx.graphdef(kind.model))
    trees.assert_same(trees.leaves(removed), trees.leaves(kind.model))
    self.assertEqual(nnx.graphdef(model), got.graphdef)
    trees.assert_same(trees.leaves(model), before)

  @each(name for name in KINDS if KINDS[name].factored)
  def test_no_gradient_of_the_weight(self, name):
    actual, _ = made_by_gradients(name)
    self.assertEmpty(actual)

  @each(['linear', 'general_batch', 'conv_groups', 'attend', 'lstm'])
  def test_the_gradient_of_the_weight_would_be_seen(self, name):
    _, expected = made_by_gradients(name)
    self.assertNotEmpty(expected)


def distance(x, y) -> float:
  return float(np.max(np.abs(np.asarray(x, np.float32) - np.float32(y))))


def flat(state) -> dict:
  return {
    path: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    for path, x in nnx.to_flat_state(state)
  }


def made_by_gradients(name):
  """What is made of the weight's shape, by the layer and by the oracle."""
  kind = KINDS[name]
  model = trees.fill(nnx.eval_shape(kind.apply))
  shapes = [
    getattr(at(kind.model, path), weight.attribute).shape
    for path, weight in kind.weights.items()
  ]
  call, factors = kind.of_factors(model)
  base = nnx.as_pure(nnx.state(kind.model))

  def made(f):
    loss = lambda *args: jnp.sum(jnp.sin(f(*args)))
    grad = jax.grad(loss, 0 if kind.of_ids else (0, 1))
    return shapes_made(jax.make_jaxpr(grad)(factors, kind.x), shapes)

  return made(call), made(kind.oracle(model, 1.0, base))


def shapes_made(closed, shapes) -> list[str]:
  """Equations that make something of one of the shapes, in any order of axes.

  Only what depends on the arguments counts: a weight cast, flipped or
  transposed is still the weight.
  """
  wanted = {tuple(sorted(shape)) for shape in shapes}
  found = []

  def visit(jaxpr, live):
    """``live`` are flags of the inputs; returns those of the outputs."""
    alive = {v for v, flag in zip(jaxpr.invars, live) if flag}
    of = lambda v: not hasattr(v, 'val') and v in alive
    for eqn in jaxpr.eqns:
      flags = [of(v) for v in eqn.invars]
      if not any(flags):
        continue
      for v in eqn.outvars:
        if tuple(sorted(v.aval.shape)) in wanted:
          found.append(str(eqn)[:300])
      outs = [True] * len(eqn.outvars)
      for inner in inner_jaxprs(eqn):
        inputs = flags[len(flags) - len(inner.invars) :]
        if eqn.primitive.name == 'scan':
          outs = visit_scan(inner, inputs, eqn)
        else:
          outs = visit(inner, inputs)
      alive.update(v for v, flag in zip(eqn.outvars, outs) if flag)
    return [of(v) for v in jaxpr.outvars]

  def visit_scan(inner, live, eqn):
    # What is stacked, of the inputs and of the outputs, has one axis more.
    kept = lambda outer, inner: sum(
      v.aval.ndim == w.aval.ndim for v, w in zip(outer, inner)
    )
    m = kept(eqn.outvars, inner.outvars)
    n = kept(eqn.invars, inner.invars) - m
    while True:
      outs = visit(inner, live)
      carry = [a or b for a, b in zip(live[n : n + m], outs)]
      if carry == live[n : n + m]:
        return outs
      live = live[:n] + carry + live[n + m :]

  visit(closed.jaxpr, [True] * len(closed.jaxpr.invars))
  return found


def inner_jaxprs(eqn):
  for param in eqn.params.values():
    for value in param if isinstance(param, tuple | list) else [param]:
      value = getattr(value, 'jaxpr', value)
      if hasattr(value, 'eqns'):
        yield value


class SurgeryTest(parameterized.TestCase):
  """What apply, merge and remove make, and leave alone."""

  @every_kind
  def test_apply(self, name):
    kind = KINDS[name]
    graphdef, before = nnx.graphdef(kind.model), trees.leaves(kind.model)
    model = kind.apply()
    self.assertEqual(nnx.graphdef(kind.model), graphdef)
    trees.assert_same(trees.leaves(kind.model), before)

    after = trees.leaves(model)
    kept = {path: after.pop(path) for path in before}
    trees.assert_same(kept, before)
    expected = {}
    for path, weight in kind.weights.items():
      layer, plain = at(model, path), at(kind.model, path)
      shape = getattr(plain, weight.attribute).shape
      self.assertIsInstance(layer, type(plain))
      self.assertEqual(layer.lora.rank, kinds.RANK)
      self.assertEqual(layer.lora.scale, 1.0)
      for factor in ('lora_a', 'lora_b'):
        variable = getattr(layer.lora, factor)
        self.assertIsInstance(variable, nnx.LoRAParam)
        self.assertEqual(variable.dtype, jnp.float32)
        expected[(*path, 'lora', factor)] = variable.shape
      product = jax.eval_shape(
        weight.product, layer.lora.lora_a[...], layer.lora.lora_b[...]
      )
      self.assertEqual(product.shape, shape)
      if type(plain) in kinds.CLASSES:
        self.assertIs(type(layer), kinds.CLASSES[type(plain)])
    self.assertEqual({path: x.shape for path, x in after.items()}, expected)
    # The base is shared, not copied.
    for path in before:
      mine, given = at(model, path), at(kind.model, path)
      if isinstance(mine, nnx.Variable):
        self.assertIsNot(mine, given)
        self.assertIs(mine.get_value(), given.get_value())

  @each(
    ['linear', 'einsum_batched', 'conv_groups', 'embed', 'user_own_forward']
  )
  def test_merge_is_traced_and_differentiated(self, name):
    kind = KINDS[name]
    model = trees.move(kind.apply(alpha=3.0))
    graphdef, factors, rest = nnx.split(model, nnx.LoRAParam, ...)

    def through_merge(factors):
      merged = nnx_ext.merge_lora(nnx.merge(graphdef, factors, rest))
      return kind.call(merged, kind.x)

    base = nnx.as_pure(nnx.state(kind.model))
    oracle = kind.oracle(model, 1.5, base)

    def both(factors, cotangent):
      y, pullback = jax.vjp(through_merge, factors)
      expected, of = jax.vjp(lambda f: oracle(f, kind.x), factors)
      return (y, pullback(cotangent)), (expected, of(cotangent))

    outputs = jax.eval_shape(kind.call, kind.model, kind.x)
    factors, cotangent = nnx.to_pure_dict(factors), noise(outputs.shape, 2)
    trees.assert_close(*jax.jit(both)(factors, cotangent))

  @each(['linear', 'embed', 'user_relu', 'user_both'])
  def test_merge(self, name):
    # Not traced: the model and what shares its buffers stay as they are.
    kind = KINDS[name]
    model = trees.move(kind.apply())
    outputs = kind.call(model, kind.x)
    graphdef, before = nnx.graphdef(model), trees.leaves(model)
    merged = nnx_ext.merge_lora(model)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(kind.model))
    trees.assert_close(kind.call(merged, kind.x), outputs, kind.tolerance)
    self.assertEqual(nnx.graphdef(model), graphdef)
    trees.assert_same(trees.leaves(model), before)
    merged = nnx.jit(nnx_ext.merge_lora)(model)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(kind.model))

  @each(
    [
      'linear',
      'general_batch_axes',
      'einsum_batch_last',
      'conv_groups',
      'transpose_kernel',
      'embed',
      'user_relu',
    ]
  )
  def test_delta(self, name):
    kind, weight = KINDS[name], KINDS[name].weights[()]
    lora = trees.move(kind.apply(alpha=3.0)).lora
    product = weight.product(lora.lora_a[...], lora.lora_b[...])
    delta = jnp.asarray(lora.delta(), jnp.float32)
    trees.assert_close(delta, 1.5 * product, kind.tolerance)

  def test_remove_after_training_of_the_base_gives_what_it_is_now(self):
    model = KINDS['linear'].apply()
    model.bias[...] += 1.0
    removed = nnx_ext.remove_lora(model)
    np.testing.assert_array_equal(removed.bias[...], model.bias[...])


class StartTest(parameterized.TestCase):
  def test_pissa_takes_the_largest_singular_values(self):
    kind = KINDS['linear']
    lora = trees.built(lambda: kind.apply(init='pissa', alpha=3.0)).lora
    u, s, v = np.linalg.svd(np.asarray(kind.model.kernel[...]))
    expected = (u[:, :2] * s[:2]) @ v[:2]
    product = lora.lora_a[...] @ lora.lora_b[...]
    np.testing.assert_allclose(1.5 * product, expected, atol=1e-5)
    np.testing.assert_array_equal(lora.lora_a[...], lora.start_a[...])
    np.testing.assert_array_equal(lora.lora_b[...], lora.start_b[...])
    for start in (lora.start_a, lora.start_b):
      self.assertIs(type(start), nnx.Variable)

  @each(['linear', 'general_axes', 'conv'])
  def test_olora_has_an_orthonormal_factor(self, name):
    lora = trees.built(lambda: KINDS[name].apply(init='olora')).lora
    a, b = (x.reshape(-1, x.shape[-1]) for x in (lora.lora_a, lora.lora_b))
    grams = a.T @ a, b @ b.T
    distance = min(float(jnp.max(jnp.abs(g - jnp.eye(2)))) for g in grams)
    self.assertLess(distance, 1e-5)

  @each(['linear', 'conv', 'einsum_two_axes'])
  def test_orthogonal_factors_are_not_zero(self, name):
    kind = KINDS[name]
    lora = trees.built(lambda: kind.apply(init='orthogonal')).lora
    product = kind.weights[()].product(lora.lora_a[...], lora.lora_b[...])
    np.testing.assert_allclose(product, 0.0, atol=1e-6)
    for factor in (lora.lora_a, lora.lora_b):
      self.assertGreater(float(jnp.max(jnp.abs(factor[...]))), 1e-2)

  @each(
    [
      'linear',
      'general_batch_axes',
      'einsum_batch_last',
      'conv_groups',
      'embed',
    ]
  )
  def test_dora_starts_with_the_norm_of_the_weight(self, name):
    kind, weight = KINDS[name], KINDS[name].weights[()]
    lora = trees.built(lambda: kind.apply(dora=True)).lora
    expected = weight.norm(getattr(kind.model, weight.attribute)[...])
    self.assertIsInstance(lora.magnitude, nnx.LoRAParam)
    trees.assert_close(lora.magnitude[...], expected)

  def test_dora_on_a_weight_of_zeros(self):
    zeros = nnx.initializers.zeros
    layer = nnx.Linear(5, 7, kernel_init=zeros, rngs=nnx.Rngs(0))
    model = nnx_ext.apply_lora(layer, rank=2, dora=True, rngs=nnx.Rngs(1))
    call, factors = kinds.Kind(lambda _: layer, (3, 5)).of_factors(model)
    loss = lambda factors: jnp.sum(call(factors, noise((3, 5))) ** 2)
    for value in jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(factors)):
      self.assertTrue(np.all(np.isfinite(value)))

  @each(['linear', 'conv', 'embed'])
  def test_initializers(self, name):
    seen = []

    def init(key, shape, dtype):
      seen.append((shape, dtype))
      return jnp.ones(shape, dtype)

    kind = KINDS[name]
    model = kind.apply(
      a_initializer=init, b_initializer=init, param_dtype=jnp.bfloat16
    )
    fan_in = np.prod(kind.model.kernel.shape[:-1]) if name != 'embed' else 7
    out = 5 if name == 'embed' else kind.model.kernel.shape[-1]
    self.assertEqual(
      seen, [((fan_in, 2), jnp.bfloat16), ((2, out), jnp.bfloat16)]
    )
    for param in trees.factors(model).values():
      self.assertEqual(param.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(param[...], 1.0)

  def test_layers_get_different_factors(self):
    model = KINDS['attention'].model
    model = nnx_ext.apply_lora(model, rank=2, rngs=nnx.Rngs(1)).attention
    a, b = model.query.lora.lora_a[...], model.key.lora.lora_a[...]
    self.assertGreater(float(jnp.max(jnp.abs(a - b))), 1e-3)
