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
"""Values by path in the place of Variables, and errors of theirs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models
from tests.errors import ErrorsTestCase


class Tied(nnx.Module):
  """One Variable at two paths, and one Module at two."""

  def __init__(self):
    self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    self.b = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    self.b.kernel = self.a.kernel
    self.again = self.b


class Listed(nnx.Module):
  def __init__(self):
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in (0, 1)])
    self.tree = nnx.Param({'x': jnp.ones(2), 'y': jnp.zeros(())})


def _mlp(**parts):
  return models.MLP(4, 1, rngs=nnx.Rngs(params=0, dropout=1), **parts)


KERNEL = jnp.linspace(-1.0, 1.0, 24).reshape(4, 6)


class SubstituteTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda m: {'l1': {'kernel': KERNEL}},),
    (lambda m: {'l1': {'kernel': nnx.Param(KERNEL)}},),
    (lambda m: nnx.State({'l1': {'kernel': KERNEL}}),),
    (lambda m: {'l1': {'kernel': np.asarray(KERNEL)}},),
  )
  def test_forms_of_values(self, values):
    model = _mlp()
    view = nnx_ext.substitute(model, values(model))
    expected = nnx.clone(model)
    expected.l1.kernel[...] = KERNEL
    x = models.batch()
    chex.assert_trees_all_close(view(x), expected(x))
    self.assertIs(type(view), models.MLP)

  def test_shares_all_else(self):
    model = _mlp(batch_norm=True, dropout=0.5)
    kernel = model.l1.kernel[...]
    view = nnx_ext.substitute(model, {'l1': {'kernel': KERNEL}})
    view(models.batch())
    self.assertIs(view.l2.kernel, model.l2.kernel)
    self.assertNotEqual(float(model.norm.mean[0]), 0.0)
    self.assertEqual(int(model.dropout.rngs.count[...]), 1)
    self.assertIs(model.l1.kernel[...], kernel)

  def test_keeps_type_and_metadata(self):
    class Special(nnx.Param):
      pass

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.kernel = Special(model.kernel[...], note='kept')
    view = nnx_ext.substitute(model, {'kernel': jnp.eye(2)})
    self.assertIs(type(view.kernel), Special)
    self.assertEqual(view.kernel.get_metadata()['note'], 'kept')
    self.assertEqual(nnx.graphdef(view), nnx.graphdef(model))

  @parameterized.parameters('a', 'b', 'again')
  def test_any_path_of_a_tied_weight(self, name):
    view = nnx_ext.substitute(Tied(), {name: {'kernel': jnp.eye(3)}})
    self.assertIs(view.a.kernel, view.b.kernel)
    chex.assert_trees_all_close(view.a.kernel[...], jnp.eye(3))

  def test_a_tied_weight_by_several_paths(self):
    weight = jnp.eye(3)
    values = {name: {'kernel': weight} for name in ('a', 'b', 'again')}
    view = nnx_ext.substitute(Tied(), values)
    chex.assert_trees_all_close(view.b.kernel[...], weight)

  @parameterized.parameters(0, '0')
  def test_an_index_as_int_or_text(self, index):
    values = {'layers': {index: {'bias': jnp.ones(2)}}}
    view = nnx_ext.substitute(Listed(), values)
    chex.assert_trees_all_close(view.layers[0].bias[...], jnp.ones(2))
    chex.assert_trees_all_close(view.layers[1].bias[...], jnp.zeros(2))

  def test_a_variable_that_holds_a_tree(self):
    tree = {'x': jnp.zeros(2), 'y': jnp.ones(())}
    view = nnx_ext.substitute(Listed(), {'tree': tree})
    chex.assert_trees_all_close(view.tree.get_value(), tree)

  def test_other_variables_by_filter(self):
    model = _mlp(batch_norm=True)
    view = nnx_ext.substitute(
      model, {'norm': {'mean': jnp.ones(6)}}, wrt=nnx.BatchStat
    )
    chex.assert_trees_all_close(view.norm.mean[...], jnp.ones(6))

  def test_casts_within_a_kind(self):
    model = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    view = nnx_ext.substitute(model, {'kernel': jnp.eye(2)})
    self.assertEqual(view.kernel.dtype, jnp.bfloat16)

  def test_second_derivatives_and_vmap(self):
    model, x = (
      nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0)),
      jnp.ones((1, 2)),
    )

    def loss(t):
      view = nnx_ext.substitute(model, {'kernel': jnp.full((2, 1), t)})
      return jnp.sum(view(x) ** 3)

    chex.assert_trees_all_close(jax.grad(jax.grad(loss))(1.0), 48.0)
    chex.assert_trees_all_close(
      jax.vmap(loss)(jnp.array([1.0, 2.0])), jnp.array([8.0, 64.0])
    )


# Values for the MLP, the error, and its words.
WRONG = {
  'misspelt': (
    {'l1': {'kernal': KERNEL}},
    ValueError,
    ("'l1/kernal'", 'Param', "Did you mean 'l1/kernel'"),
  ),
  'too_deep': (
    {'l1': {'kernel': {'v': KERNEL}}},
    ValueError,
    ("'l1/kernel'", 'structure'),
  ),
  'shape': (
    {'l1': {'kernel': KERNEL.T}},
    ValueError,
    ("'l1/kernel'", '(6, 4)', '(4, 6)'),
  ),
  'integers': (
    {'l1': {'kernel': jnp.ones((4, 6), jnp.int32)}},
    ValueError,
    ("'l1/kernel'", 'int32', 'float32', 'cast'),
  ),
  'complex': (
    {'l1': {'kernel': KERNEL + 1j}},
    ValueError,
    ("'l1/kernel'", 'complex64', 'float32'),
  ),
  'text': ({'l1': {'kernel': 'W'}}, TypeError, ("'l1/kernel'", 'array', "'W'")),
  'no_mapping': (KERNEL, TypeError, ('by path', "{'l1': {'bias': array}}")),
  'none': (None, TypeError, ('by path', 'NoneType')),
}


class ErrorsTest(ErrorsTestCase):
  @parameterized.product(case=list(WRONG))
  def test_substitute(self, case):
    values, error, words = WRONG[case]
    with self.refused(error, 'substitute', *words):
      nnx_ext.substitute(_mlp(), values)

  @parameterized.product(case=list(WRONG), mode=list(models.MODES))
  def test_reparam(self, case, mode):
    values, error, words = WRONG[case]
    with self.refused(error, 'reparam_grad', *words):
      nnx_ext.reparam_grad(
        lambda m: jnp.mean(m(models.batch())),
        lambda theta, params: values,
        **models.MODES[mode],
      )(jnp.ones(()), _mlp())

  def test_two_values_for_a_tied_weight(self):
    values = {'a': {'kernel': jnp.eye(3)}, 'b': {'kernel': jnp.eye(3)}}
    with self.refused(
      ValueError, 'substitute', "'b/kernel'", "'a/kernel'", 'tied', 'two'
    ):
      nnx_ext.substitute(Tied(), values)

  def test_wrt_matches_nothing(self):
    with self.refused(ValueError, 'substitute', '`wrt`', 'BatchStat'):
      nnx_ext.substitute(_mlp(), {}, wrt=nnx.BatchStat)

  @parameterized.parameters('reparam_grad', 'reparam_value_and_grad')
  def test_reparam_calls(self, api):
    transform = getattr(nnx_ext, api)
    loss = lambda m: jnp.mean(m(models.batch()))
    with self.refused(TypeError, api, '(theta, model, *args'):
      transform(loss, lambda t, p: {})(jnp.ones(()))
    with self.refused(TypeError, api, '`transform`', 'Module'):
      transform(loss)(jnp.ones(()), _mlp())
    with self.refused(TypeError, api, '`transform`', 'function', 'keyword'):
      transform(loss, 3)
    with self.refused(TypeError, api, '`f`', 'function'):
      transform(3)
    with self.refused(ValueError, api, 'has_aux=True', '(loss, aux)'):
      transform(loss, lambda t, p: {}, has_aux=True)(jnp.ones(()), _mlp())
    with self.refused(ValueError, api, 'scalar', '(7, 1)'):
      transform(lambda m: m(models.batch()), lambda t, p: {})(
        jnp.ones(()), _mlp()
      )
    with self.refused(ValueError, api, 'count from 0', 'theta', 'got -1'):
      transform(loss, lambda t, p: {}, argnums=(0, -1))
    with self.refused(ValueError, api, 'argnum 5 ', 'theta', '`m`'):
      transform(loss, lambda t, p: {}, argnums=5)(jnp.ones(()), _mlp())
