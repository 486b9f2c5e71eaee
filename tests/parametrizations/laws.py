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
"""The laws that every parametrization keeps.

A family of parametrizations lists its cases and checks each by each law::

  class NormsLawTest(parameterized.TestCase):
    @laws.every_law(CASES)
    def test_law(self, law, case):
      laws.check(law, CASES[case])

All laws hold in eval mode; what train mode adds is each family's own test.
"""

import dataclasses
import pickle
import typing as tp

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx
from jax.flatten_util import ravel_pytree

import nnx_ext
from nnx_ext.parametrizations._base import Parametrization

Weight = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
  """A factory, a weight on its domain, and what is known of the two.

  Attributes:
    factory: makes the parametrization from the weight.
    weight: a small weight on the domain, in float64.
    start: the weight that the first call gives, from the one put in.
    formula: the weight from a dict of the Params' values, in plain JAX.
    free: the independent entries of the only Param, and of the weight, as a
      vector; None where the map is no bijection and ``log_det`` must raise.
    hard: further weights (zero, huge, on the boundary) where the value and
      the gradients must be finite.
    smooth: whether gradients are those of finite differences.
    atol: how far from ``start`` float32 may be, for weights of about 1.
  """

  factory: tp.Callable[[jax.Array], Parametrization]
  weight: np.ndarray
  start: tp.Callable[[Weight], Weight] = lambda weight: weight
  formula: tp.Callable[[dict], jax.Array] | None = None
  free: tp.Callable[[jax.Array], jax.Array] | None = None
  hard: tp.Sequence[Weight] = ()
  smooth: bool = True
  atol: float = 1e-6

  def build(self, dtype=jnp.float32, weight: Weight | None = None):
    weight = self.weight if weight is None else weight
    built = self.factory(jnp.asarray(weight, dtype))
    built.eval()
    return built

  def expected(self, weight: Weight | None = None) -> Weight:
    return self.start(self.weight if weight is None else weight)


def noise(shape: tp.Sequence[int], seed: int = 0) -> np.ndarray:
  """Numbers to make weights of."""
  return np.random.RandomState(seed).normal(size=shape)


def pure(module: nnx.Module) -> tuple[tp.Callable, dict]:
  """A module's call as a pure function of its Params, and their values."""
  graphdef, params, rest = nnx.split(module, nnx.Param, ...)
  theta = nnx.to_pure_dict(params)
  call = lambda theta, *args: nnx.merge(graphdef, theta, rest)(*args)
  return call, theta


def moved(theta, scale: float = 0.1):
  """Params somewhere near, as after a few steps of training."""
  leaves, treedef = jax.tree.flatten(theta)
  return treedef.unflatten(
    [
      leaf + jnp.asarray(scale * noise(leaf.shape, i + 1), leaf.dtype)
      for i, leaf in enumerate(leaves)
    ]
  )


def move(built: Parametrization) -> Parametrization:
  """The same parametrization with its Params moved."""
  nnx.update(built, moved(pure(built)[1]))
  return built


class Holder(nnx.Module):
  """The layer around weights that are no kernel."""

  def __init__(self, weight):
    self.kernel = nnx.Param(weight)

  def __call__(self, x):
    return jnp.sum(x) * self.kernel[...]


def layer(weight: jax.Array) -> tuple[nnx.Module, jax.Array]:
  """A layer with this kernel, and an input to it."""
  *window, din, dout = weight.shape if weight.ndim > 1 else (0, 0)
  if weight.ndim == 1:
    return Holder(weight), jnp.ones(())
  rngs = nnx.Rngs(0)
  if window:
    model = nnx.Conv(din, dout, window, rngs=rngs)
  else:
    model = nnx.Linear(din, dout, rngs=rngs)
  model.kernel[...] = weight
  return model, jnp.asarray(noise((2, *(5 for _ in window), din)), weight.dtype)


def parametrized(case: Case) -> tuple[nnx.Module, jax.Array]:
  model, x = layer(jnp.asarray(case.weight, jnp.float32))
  model = nnx_ext.parametrize(model, {nnx.PathContains('kernel'): case.factory})
  model.eval()
  return model, x


def start(case: Case) -> None:
  """The first call gives the weight that was put in."""
  built = case.build()
  assert built.shape == case.weight.shape and built.dtype == jnp.float32
  chex.assert_trees_all_close(built(), case.expected(), atol=case.atol)


def half(case: Case) -> None:
  """A bfloat16 weight stays one, and no Param of it is wider."""
  built = case.build(jnp.bfloat16)
  for weight in (built(), move(built)()):
    assert weight.dtype == jnp.bfloat16 and weight.shape == case.weight.shape
    chex.assert_tree_all_finite(weight)
  for param in jax.tree.leaves(pure(built)[1]):
    assert param.dtype == jnp.bfloat16
  weight = jnp.asarray(case.build(jnp.bfloat16)(), jnp.float32)
  expected = jnp.asarray(case.expected(), jnp.float32)
  chex.assert_trees_all_close(weight, expected, atol=0.05, rtol=0.05)


def gradients(case: Case) -> None:
  """Values are the formula's, gradients those of finite differences."""
  with jax.enable_x64(True):
    call, theta = pure(case.build(jnp.float64))
    x, unravel = ravel_pytree(moved(theta))
    assert call(unravel(x)).dtype == jnp.float64
    cotangent = jnp.asarray(noise(case.weight.shape))
    direction = jnp.asarray(noise(x.shape, 1))

    def first_and_second(weight):
      loss = lambda x: jnp.sum(cotangent * weight(unravel(x)))
      grad = jax.grad(loss)
      second = jax.jvp(grad, (x,), (direction,))[1]
      return weight(unravel(x)), loss, grad, grad(x), second

    @jax.jit
    def compare():
      weight, loss, grad, *derivatives = first_and_second(call)
      others = []
      if case.smooth:
        others.append(
          (
            weight,
            jax.vmap(lambda d: _difference(loss, x, d))(jnp.eye(x.size)),
            _difference(grad, x, direction),
          )
        )
      if case.formula is not None:
        expected, _, _, *expected_derivatives = first_and_second(case.formula)
        others.append((expected, *expected_derivatives))
      return (weight, *derivatives), others

    actual, others = compare()
    for expected in others:
      chex.assert_trees_all_close(actual, expected, atol=1e-7, rtol=1e-7)


def _difference(f: tp.Callable, x: jax.Array, direction: jax.Array):
  """The derivative of a function in a direction, by a central difference."""
  step = 1e-5 * direction
  return (f(x + step) - f(x - step)) / 2e-5


def finite(case: Case) -> None:
  """Values and gradients are finite, at the edges of the domain, too."""
  for weight in (case.weight, *case.hard):
    call, theta = pure(case.build(weight=weight))
    actual, pullback = jax.vjp(call, theta)
    cotangent = jnp.asarray(noise(case.weight.shape), jnp.float32)
    chex.assert_tree_all_finite((actual, pullback(cotangent)))
    expected = jnp.asarray(case.expected(weight), jnp.float32)
    chex.assert_trees_all_close(actual, expected, atol=case.atol, rtol=1e-5)


def reads_only(case: Case) -> None:
  """No call writes a Param; in eval mode, a call writes nothing."""
  built = case.build()
  variables = lambda *filters: [
    (v, v.get_value())
    for _, v in nnx.iter_graph(built)
    if isinstance(v, filters)
  ]
  for prepare, filter in ((built.eval, nnx.Variable), (built.train, nnx.Param)):
    prepare()
    before = variables(filter)
    built(), built[...], built + 1, jnp.sum(built)
    for (v, old), (w, new) in zip(before, variables(filter), strict=True):
      assert v is w and old is new


def log_det(case: Case) -> None:
  """The log determinant is that of the Jacobian."""
  with jax.enable_x64(True):
    built = move(case.build(jnp.float64))
    if case.free is None:
      try:
        built.log_det()
      except TypeError as error:
        assert type(built).__name__ in str(error)
      else:
        raise AssertionError('A map that is no bijection has a log_det.')
      return
    call, theta = pure(built)
    ((name, value),) = theta.items()
    entries, back = jax.vjp(case.free, value)
    scatter = lambda x: value + back(x - entries)[0]
    jacobian = jax.jacfwd(lambda x: case.free(call({name: scatter(x)})))
    _, expected = jnp.linalg.slogdet(jacobian(entries))
    actual = built.log_det()
    assert actual.shape == () and jnp.issubdtype(actual.dtype, jnp.floating)
    chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-9)


def in_layer(case: Case) -> None:
  """A parametrized layer computes what the plain one does; so does its bake."""
  model, x = parametrized(case)
  plain, _ = layer(jnp.asarray(case.expected(), jnp.float32))
  baked = nnx_ext.bake(model)
  assert nnx.graphdef(baked) == nnx.graphdef(plain)
  chex.assert_trees_all_close(model(x), plain(x), atol=20 * case.atol)
  chex.assert_trees_all_close(baked(x), model(x), rtol=1e-6)
  chex.assert_trees_all_close(nnx_ext.materialize(model)(x), baked(x))


def assigned(case: Case) -> None:
  """A weight that was read can be put into another, and is read there."""
  model, _ = parametrized(case)
  weight = jnp.copy(move(model.kernel)())
  target = nnx_ext.assign(parametrized(case)[0], 'kernel', weight)
  target.eval()
  assert nnx.graphdef(target) == nnx.graphdef(model)
  chex.assert_trees_all_close(
    target.kernel(), jnp.asarray(case.expected(weight)), atol=5 * case.atol
  )


def traced(case: Case) -> None:
  """Under jit it is built and called as outside, and traced once."""
  weight = jnp.asarray(case.weight, jnp.float32)
  abstract = nnx.eval_shape(lambda: case.factory(weight))
  assert nnx.graphdef(abstract) == nnx.graphdef(case.factory(weight))
  built, traces = nnx.jit(case.factory)(weight), []

  @nnx.jit
  def call(built):
    traces.append(built)
    return built()

  for mode in (built.train, built.eval):
    mode()
    traces.clear()
    weights = [call(built) for _ in range(3)]
    assert len(traces) <= 1
  chex.assert_trees_all_close(weights[-1], case.build()(), atol=10 * case.atol)


def stacked(case: Case) -> None:
  """Layers built under vmap are those built one by one."""
  weights = jnp.stack([case.build()(), move(case.build())()])
  built = nnx.vmap(case.factory)(weights)
  built.eval()
  chex.assert_trees_all_close(
    nnx.vmap(lambda built: built())(built),
    jnp.stack([case.build(weight=weight)() for weight in weights]),
    atol=10 * case.atol,
  )


def rebuilt(case: Case) -> None:
  """Split and merged, cloned or pickled, it is the same."""
  model, x = parametrized(case)
  for other in (
    nnx.merge(*nnx.split(model)),
    nnx.clone(model),
    pickle.loads(pickle.dumps(model)),
  ):
    assert nnx.graphdef(other) == nnx.graphdef(model)
    chex.assert_trees_all_equal(other(x), model(x))
    assert other.kernel.shape == model.kernel.shape


def every_mode(case: Case) -> None:
  """Gradients are those of the pure function, in the modes of NNX."""
  model, x = parametrized(case)
  call, theta = pure(model)
  expected = jax.grad(lambda theta: jnp.sum(call(theta, x) ** 2))(theta)
  loss = lambda model: jnp.sum(model(x) ** 2)
  for options in ({}, {'graph': True, 'graph_updates': False}):
    grads = nnx.grad(loss, **options)(model)
    chex.assert_trees_all_close(
      nnx.to_pure_dict(nnx.state(grads, nnx.Param)), expected, rtol=1e-5
    )
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  grads = nnx.grad(
    lambda params: loss(nnx.merge(graphdef, params, rest)), graph=False
  )(params)
  chex.assert_trees_all_close(nnx.to_pure_dict(grads), expected, rtol=1e-5)


LAWS: dict[str, tp.Callable[[Case], None]] = {
  law.__name__: law
  for law in (
    start,
    half,
    gradients,
    finite,
    reads_only,
    log_det,
    in_layer,
    assigned,
    traced,
    stacked,
    rebuilt,
    every_mode,
  )
}


def every_law(cases: tp.Mapping[str, Case], skip: tp.Collection[str] = ()):
  """The product of cases and laws, as a decorator."""
  return parameterized.named_parameters(
    [
      {'testcase_name': f'_{law}_{case}', 'law': law, 'case': case}
      for case in cases
      for law in LAWS
      if law not in skip
    ]
  )


def check(law: str, case: Case) -> None:
  LAWS[law](case)


OPTIMIZERS = {
  'sgd': lambda: optax.sgd(0.1),
  'momentum': lambda: optax.sgd(0.05, momentum=0.9),
  'adam': lambda: optax.adam(0.1),
  'adamw': lambda: optax.adamw(0.1, weight_decay=0.1),
}


def trains(case: Case, optimizer: str) -> None:
  """Ten steps on theta equal optax on the formula in plain JAX."""
  assert case.formula is not None
  tx, built = OPTIMIZERS[optimizer](), case.build()
  target = jnp.asarray(noise(case.weight.shape, 9), jnp.float32)
  loss = lambda weight: jnp.sum((weight - target) ** 2)
  formula, theta = case.formula, pure(built)[1]
  state = tx.init(theta)
  train = nnx.Optimizer(built, tx, wrt=nnx.Param)

  @jax.jit
  def expected_step(theta, state):
    grads = jax.grad(lambda theta: loss(formula(theta)))(theta)
    updates, state = tx.update(grads, state, theta)
    return optax.apply_updates(theta, updates), state

  @nnx.jit
  def step(built, train):
    train.update(built, nnx.grad(lambda built: loss(built()))(built))

  for _ in range(10):
    theta, state = expected_step(theta, state)
    step(built, train)
  chex.assert_trees_all_close(pure(built)[1], theta, rtol=1e-4, atol=1e-5)
