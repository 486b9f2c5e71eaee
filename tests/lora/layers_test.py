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
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import nnx_ext
from tests.lora import kinds
from tests.lora.kinds import KINDS, Weight, at, is_key, noise

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

CLASSES = {
  nnx.Linear: nnx_ext.LoRALinear,
  nnx.LinearGeneral: nnx_ext.LoRALinearGeneral,
  nnx.Einsum: nnx_ext.LoRAEinsum,
  nnx.Conv: nnx_ext.LoRAConv,
  nnx.ConvTranspose: nnx_ext.LoRAConvTranspose,
  nnx.Embed: nnx_ext.LoRAEmbed,
}


class Run(tp.NamedTuple):
  """What one run of a case gives.

  ``actual`` and ``expected`` are outputs and gradients by the factors and, if
  it is not ids, by the input. Weights are by the layer's path.
  """

  actual: tuple
  expected: tuple
  weights: dict
  expected_weights: dict
  merged: nnx.State
  state: nnx.State


class Results(tp.NamedTuple):
  """A case at its start and somewhere else, from one compiled program."""

  start: Run
  moved: Run
  graphdef: nnx.GraphDef
  merged_graphdef: nnx.GraphDef


def results_of(kind: kinds.Kind, options: dict, scale: float) -> Results:
  plain, base = nnx.split(kind.model)
  base, x, static = nnx.as_pure(base), kind.x, []
  outputs = jax.eval_shape(lambda: kind.call(nnx.merge(plain, base), x))
  cotangent = noise(outputs.shape, 2).astype(outputs.dtype)

  def of(f, factors, x):
    of_x = () if kind.of_ids else (x,)
    y, pullback = jax.vjp(
      lambda factors, *of_x: f(factors, *(of_x or (x,))), factors, *of_x
    )
    return y, pullback(cotangent)

  def run(base, steps, x):
    model = kind.apply(nnx.merge(plain, base), **options)
    call, start = kind.of_factors(model)
    values = jax.tree.map(jnp.add, start, steps)
    oracle = kind.oracle(model, scale, base)
    adapted = nnx.merge(*kinds.replaced(model, values))
    merged = nnx_ext.merge_lora(adapted)
    static[:] = nnx.graphdef(adapted), nnx.graphdef(merged)
    weights, expected = {}, {}
    for path, weight in kind.weights.items():
      layer = at(adapted, path)
      variable = getattr(layer, weight.attribute)[...]
      weights[path] = layer.lora.weight(variable)
      expected[path] = weight.effective(
        variable,
        at(values, (*path, 'lora')),
        scale,
        kinds.start(layer.lora),
      )
    return Run(
      of(call, values, x),
      of(oracle, values, x),
      weights,
      expected,
      nnx.as_pure(nnx.state(merged)),
      nnx.as_pure(nnx.state(adapted)),
    )

  steps = kinds.values(nnx.eval_shape(lambda: kind.apply(**options)))
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), steps)
  run = jax.jit(run)
  return Results(run(base, zeros, x), run(base, steps, x), *static)


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
    kinds.assert_close(
      got.start.expected_weights, weights, 0.0 if exact else tolerance
    )
    # Where the weight is materialised the compiler may fuse it.
    exact = exact and kind.factored
    kinds.assert_close(
      got.start.actual[0], got.start.expected[0], 0.0 if exact else tolerance
    )
    self.assertGreater(distance(got.start.actual[0], got.moved.actual[0]), 1e-2)

  @every_case
  def test_outputs(self, name, option):
    got = results(name, option).moved
    kinds.assert_close(got.actual[0], got.expected[0], KINDS[name].tolerance)

  @every_case
  def test_gradients(self, name, option):
    got, tolerance = results(name, option), KINDS[name].tolerance
    kinds.assert_close(got.start.actual[1], got.start.expected[1], tolerance)
    kinds.assert_close(got.moved.actual[1], got.moved.expected[1], tolerance)
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
      kinds.assert_close(
        merged.pop((*path, weight.attribute)),
        got.moved.expected_weights[path],
        tolerance,
      )
    kinds.assert_same(merged, base)
    kinds.assert_close(got.moved.weights, got.moved.expected_weights, tolerance)

  @every_case
  def test_removed(self, name, option):
    kind, got = KINDS[name], results(name, option)
    model = nnx.merge(got.graphdef, got.moved.state)
    before = kinds.leaves(model)
    removed = nnx_ext.remove_lora(model)
    self.assertEqual(nnx.graphdef(removed), nnx.graphdef(kind.model))
    kinds.assert_same(kinds.leaves(removed), kinds.leaves(kind.model))
    self.assertEqual(nnx.graphdef(model), got.graphdef)
    kinds.assert_same(kinds.leaves(model), before)

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
  model = kinds.fill(nnx.eval_shape(kind.apply))
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
    graphdef, before = nnx.graphdef(kind.model), kinds.leaves(kind.model)
    model = kind.apply()
    self.assertEqual(nnx.graphdef(kind.model), graphdef)
    kinds.assert_same(kinds.leaves(kind.model), before)

    after = kinds.leaves(model)
    kept = {path: after.pop(path) for path in before}
    kinds.assert_same(kept, before)
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
      if type(plain) in CLASSES:
        self.assertIs(type(layer), CLASSES[type(plain)])
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
    model = kinds.move(kind.apply(alpha=3.0))
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
    kinds.assert_close(*jax.jit(both)(factors, cotangent))

  @each(['linear', 'embed', 'user_relu', 'user_both'])
  def test_merge(self, name):
    # Not traced: the model and what shares its buffers stay as they are.
    kind = KINDS[name]
    model = kinds.move(kind.apply())
    outputs = kind.call(model, kind.x)
    graphdef, before = nnx.graphdef(model), kinds.leaves(model)
    merged = nnx_ext.merge_lora(model)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(kind.model))
    kinds.assert_close(kind.call(merged, kind.x), outputs, kind.tolerance)
    self.assertEqual(nnx.graphdef(model), graphdef)
    kinds.assert_same(kinds.leaves(model), before)
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
    lora = kinds.move(kind.apply(alpha=3.0)).lora
    product = weight.product(lora.lora_a[...], lora.lora_b[...])
    delta = jnp.asarray(lora.delta(), jnp.float32)
    kinds.assert_close(delta, 1.5 * product, kind.tolerance)

  def test_remove_after_training_of_the_base_gives_what_it_is_now(self):
    model = KINDS['linear'].apply()
    model.bias[...] += 1.0
    removed = nnx_ext.remove_lora(model)
    np.testing.assert_array_equal(removed.bias[...], model.bias[...])


class StartTest(parameterized.TestCase):
  def test_pissa_takes_the_largest_singular_values(self):
    kind = KINDS['linear']
    lora = kinds.built(lambda: kind.apply(init='pissa', alpha=3.0)).lora
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
    lora = kinds.built(lambda: KINDS[name].apply(init='olora')).lora
    a, b = (x.reshape(-1, x.shape[-1]) for x in (lora.lora_a, lora.lora_b))
    grams = a.T @ a, b @ b.T
    distance = min(float(jnp.max(jnp.abs(g - jnp.eye(2)))) for g in grams)
    self.assertLess(distance, 1e-5)

  @each(['linear', 'conv', 'einsum_two_axes'])
  def test_orthogonal_factors_are_not_zero(self, name):
    kind = KINDS[name]
    lora = kinds.built(lambda: kind.apply(init='orthogonal')).lora
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
    lora = kinds.built(lambda: kind.apply(dora=True)).lora
    expected = weight.norm(getattr(kind.model, weight.attribute)[...])
    self.assertIsInstance(lora.magnitude, nnx.LoRAParam)
    kinds.assert_close(lora.magnitude[...], expected)

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
    for param in kinds.factors(model).values():
      self.assertEqual(param.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(param[...], 1.0)

  def test_layers_get_different_factors(self):
    model = KINDS['attention'].model
    model = nnx_ext.apply_lora(model, rank=2, rngs=nnx.Rngs(1)).attention
    a, b = model.query.lora.lora_a[...], model.key.lora.lora_a[...]
    self.assertGreater(float(jnp.max(jnp.abs(a - b))), 1e-3)


# Layers by their own constructors: class, arguments, options, input.
CONSTRUCTED = {
  'linear': (nnx.Linear, (5, 7), {'use_bias': False}, (3, 5)),
  'general': (nnx.LinearGeneral, ((3, 4), 5), {'axis': (1, -1)}, (2, 3, 6, 4)),
  'einsum': (
    nnx.Einsum,
    ('btd,dnh->btnh', (5, 3, 4), (3, 4)),
    {},
    (2, 6, 5),
  ),
  'conv': (nnx.Conv, (4, 6, 3), {'feature_group_count': 2}, (2, 8, 4)),
  'transpose': (nnx.ConvTranspose, (4, 6, 3), {'strides': 2}, (2, 5, 4)),
  'embed': (nnx.Embed, (7, 5), {}, kinds.IDS),
}


class ConstructorTest(parameterized.TestCase):
  @each(CONSTRUCTED)
  def test_is_the_plain_layer_with_an_adapter(self, name):
    cls, args, options, shape = CONSTRUCTED[name]
    plain = cls(*args, **options, rngs=nnx.Rngs(0))
    layer = CLASSES[cls](
      *args, **options, lora_rank=2, alpha=3.0, rngs=nnx.Rngs(0)
    )
    x = kinds.Kind(lambda _: plain, shape).x
    before, after = kinds.leaves(plain), kinds.leaves(layer)
    kinds.assert_same({path: after[path] for path in before}, before)
    np.testing.assert_array_equal(layer(x), plain(x))
    self.assertEqual(layer.lora.scale, 1.5)
    adapted = nnx_ext.apply_lora(plain, rank=2, alpha=3.0, rngs=nnx.Rngs(1))
    self.assertEqual(nnx.graphdef(layer), nnx.graphdef(adapted))
    removed = nnx_ext.remove_lora(layer)
    self.assertEqual(nnx.graphdef(removed), nnx.graphdef(plain))
    kinds.move(layer)
    merged = nnx_ext.merge_lora(layer)
    kinds.assert_close(merged(x), layer(x))
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(plain))

  @parameterized.parameters(
    {},
    {'use_bias': False},
    {'param_dtype': jnp.bfloat16, 'lora_param_dtype': jnp.bfloat16},
    {'dtype': jnp.bfloat16, 'lora_dtype': jnp.bfloat16},
    {'a_initializer': nnx.initializers.normal(2.0)},
    {'b_initializer': nnx.initializers.normal(2.0)},
    {'lora_param_type': nnx.Param},
    {'a_metadata': {'color': 'red'}, 'b_metadata': {'color': 'blue'}},
  )
  def test_linear_is_compatible_with_flax(self, **options):
    make = lambda cls: cls(5, 7, lora_rank=2, rngs=nnx.Rngs(3), **options)
    theirs, ours = make(nnx.LoRALinear), make(nnx_ext.LoRALinear)
    kinds.assert_same(kinds.leaves(ours), kinds.leaves(theirs))
    describe = lambda layer: {
      path: (type(v), v.get_metadata())
      for path, v in nnx.iter_graph(layer)
      if isinstance(v, nnx.Variable)
    }
    self.assertEqual(describe(ours), describe(theirs))

    state = nnx.state(theirs)
    state = jax.tree.map(
      lambda v: noise(v.shape, v.size).astype(v.dtype), state
    )
    nnx.update(theirs, state)
    nnx.update(ours, state)
    x = noise((3, 5))
    half = jnp.bfloat16 in options.values()
    kinds.assert_close(ours(x), theirs(x), 2e-2 if half else 1e-6)

  def test_options(self):
    layer = nnx_ext.LoRALinear(
      *(5, 7), lora_rank=2, dora=True, rslora=True, dropout=0.5,
      rngs=nnx.Rngs(0),
    )  # fmt: skip
    self.assertEqual(layer.lora.magnitude.shape, (7,))
    self.assertAlmostEqual(layer.lora.scale, 2**0.5)
    self.assertIsInstance(layer.lora.dropout, nnx.Dropout)
    layer = nnx_ext.LoRALinear(
      5, 7, lora_rank=2, init='pissa', rngs=nnx.Rngs(0)
    )
    plain, x = nnx.Linear(5, 7, rngs=nnx.Rngs(0)), noise((3, 5))
    kinds.assert_close(layer(x), plain(x))

  def test_a_subclass_of_ours(self):
    class Doubled(nnx_ext.LoRALinear):
      def __call__(self, x):
        return 2.0 * super().__call__(x)

    layer = kinds.move(Doubled(5, 7, lora_rank=2, rngs=nnx.Rngs(0)))
    x = noise((3, 5))
    weight = layer.kernel[...] + layer.lora.lora_a @ layer.lora.lora_b
    kinds.assert_close(layer(x), 2.0 * (x @ weight))


@st.composite
def equations(draw):
  """An equation of Einsum, and the one of its factors."""
  size = lambda least, most: draw(st.integers(least, most))
  contracted, made = 'ijk'[: size(1, 2)], 'opq'[: size(1, 2)]
  batch, rows = 'bc'[: size(0, 1)], 'tu'[: size(0, 2)]
  order = lambda letters: ''.join(draw(st.permutations(list(letters))))
  weight = order(contracted + made + batch)
  x, y = order(contracted + batch + rows), order(made + batch + rows)
  if draw(st.booleans()):
    x, y = '...' + x, '...' + y
  first = min(map(weight.index, made))
  a = ''.join(
    'r' if i == first else c
    for i, c in enumerate(weight)
    if i == first or c not in made
  )
  keep = lambda letters: ''.join(c for c in weight if c in letters)
  b = keep(batch) + 'r' + keep(made)
  return f'{x},{weight}->{y}', f'{a},{b}->{weight}', draw(st.booleans())


FEW: dict[str, tp.Any] = {
  'max_examples': 6,
  'derandomize': True,
  'deadline': None,
  'database': None,
  'phases': [Phase.generate],  # shrinking would compile hundreds of programs
}

SIZES = dict(zip('ijkopqbctu', (2, 3, 4, 3, 4, 5, 2, 3, 3, 2)))


@st.composite
def convolutions(draw):
  """Arguments of Conv and the shape of an input."""
  window = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
  groups = draw(st.sampled_from([1, 2, 4]))
  each = lambda most: tuple(draw(st.integers(1, most)) for _ in window)
  options = {
    'strides': each(2),
    'kernel_dilation': each(2),
    'feature_group_count': groups,
    'use_bias': draw(st.booleans()),
    'padding': draw(
      st.sampled_from(
        ['SAME', 'VALID', 'CIRCULAR', 'REFLECT', 1, ((0, 2),) * len(window)]
      )
    ),
  }
  batch = draw(st.sampled_from([(), (2,), (2, 1)]))
  shape = (*batch, *(6 for _ in window), 4)
  return tuple(window), options, shape


class RandomTest(parameterized.TestCase):
  """Kinds that nobody thought of."""

  def _check(self, kind, dora=False):
    got = results_of(kind, {'dora': dora}, 1.0)
    kinds.assert_close(got.start.actual, got.start.expected, 1e-4)
    kinds.assert_close(got.moved.actual, got.moved.expected, 1e-4)
    kinds.assert_close(got.moved.weights, got.moved.expected_weights, 1e-4)

  @settings(**FEW)
  @given(equations())
  def test_einsum(self, drawn):
    equation, factors, dora = drawn
    x, letters, _ = equation.replace('->', ',').split(',')
    shape = lambda letters: tuple(SIZES[c] for c in letters)
    ellipsis = (2,) if '...' in x else ()
    kind = kinds.Kind(
      lambda rngs: nnx.Einsum(equation, shape(letters), rngs=rngs),
      (*ellipsis, *shape(x.replace('...', ''))),
      {(): Weight(factors)},
    )
    self._check(kind, dora)

  @settings(**FEW)
  @given(convolutions())
  def test_conv(self, drawn):
    window, options, shape = drawn
    letters = 'hw'[: len(window)]
    weight = Weight(
      f'{letters}ir,ro->{letters}io', groups=options['feature_group_count']
    )
    kind = kinds.Kind(
      lambda rngs: nnx.Conv(4, 8, window, rngs=rngs, **options),
      shape,
      {(): weight},
    )
    self._check(kind)
