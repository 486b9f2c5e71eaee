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
"""What the tests of errors share: tiny models, calls, expected words.

Each test names the words, not the sentence: the call, the argument, the path
or filter, what was given, near names, and a spelling that works.
"""

import re
import typing as tp

import jax.numpy as jnp
import jaxtyping
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests import models

APIS: dict[str, tp.Callable] = {
  'value_and_grad_multi': nnx_ext.value_and_grad_multi,
  'grad_multi': nnx_ext.grad_multi,
  'multi_plan': nnx_ext.multi_plan,
}
API = 'value_and_grad_multi'

DIFF = nnx.DiffState
BOTH = {'policy': 0, 'value': 1}
PARAMS = {'policy': DIFF(0, nnx.Param), 'value': DIFF(1, nnx.Param)}
CONTAINER = ('dict', 'tuple', 'list', 'NamedTuple')
ACTOR, CRITIC = 'argument 0 (`actor`)', 'argument 1 (`critic`)'

# Every mode and every call, but not their product: they share all code.
WAYS = [{'api': API, 'mode': mode} for mode in models.MODES] + [
  {'api': 'grad_multi', 'mode': 'default'},
  {'api': 'multi_plan', 'mode': 'no_updates'},
]

every_mode = parameterized.product(mode=list(models.MODES))
every_api = parameterized.product(api=list(APIS))
every_way = parameterized.product(WAYS)


def cases(table: dict, *ways, **axes):
  return parameterized.product(*ways, case=list(table), **axes)


class Affine(nnx.Module):
  """The cheapest layer."""

  def __init__(self):
    self.kernel = nnx.Param(jnp.array(2.0))
    self.bias = nnx.Param(jnp.array(1.0))

  def __call__(self, x):
    return x * self.kernel + self.bias


class Moving(Affine):
  """A layer with statistics and an rng count."""

  def __init__(self):
    super().__init__()
    self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return super().__call__(self.dropout(self.norm(x)))


def nets(kind: type[Affine] = Affine) -> tuple:
  return kind(), kind(), jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


def losses(actor, critic, x):
  return {'policy': jnp.mean(actor(x)), 'value': jnp.mean(critic(x))}


def together(nets, x):
  return losses(nets['actor'], nets['critic'], x)


def returning(change: tp.Callable) -> tp.Callable:
  """``losses`` whose return value goes through ``change``."""
  return lambda actor, critic, x: change(losses(actor, critic, x))


def as_tuple(losses: dict) -> tuple:
  return losses['policy'], losses['value']


def call(api: str, mode: str, f: tp.Callable, *args, **options):
  """One call, on ``nets()`` unless other arguments are given."""
  options = {'argnums': BOTH, **models.MODES[mode], **options}
  return APIS[api](f, **options)(*(args or nets()))


class Snapshot:
  """The structure of objects, their Variables, and the very arrays in them.

  By identity, so that it works inside of ``jit``, too.
  """

  def __init__(self, *tree: tp.Any):
    self._tree, self._structure = tree, nnx.graphdef(tree)
    self._variables = self._read()

  def check(self, test: parameterized.TestCase) -> None:
    test.assertEqual(self._structure, nnx.graphdef(self._tree))
    now = self._read()
    test.assertEqual(list(now), list(self._variables))
    for path, (variable, value) in now.items():
      test.assertIs(variable, self._variables[path][0], path)
      test.assertIs(value, self._variables[path][1], path)

  def _read(self):
    return {
      path: (variable, variable.get_value())
      for path, variable in nnx.iter_graph(self._tree)
      if isinstance(variable, nnx.Variable)
    }


class ErrorsTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    # Users have no runtime type checker, which would speak first.
    was = jaxtyping.config.jaxtyping_disable
    self.addCleanup(jaxtyping.config.update, 'jaxtyping_disable', was)
    jaxtyping.config.update('jaxtyping_disable', True)

  def refused(
    self, error: type[Exception], api: str, *words: str, without: str = ''
  ):
    """Expects an error that begins with the call and holds all ``words``."""
    holds = ''.join(f'(?=.*{re.escape(word)})' for word in words)
    lacks = f'(?!.*{re.escape(without)})' if without else ''
    return self.assertRaisesRegex(
      error, f'(?s)^(?:{re.escape(api)}){holds}{lacks}'
    )
