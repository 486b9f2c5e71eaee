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
"""The runtime checker checks: without this test it could be off unseen."""

import jax.numpy as jnp
from absl.testing import parameterized

from nnx_ext import _pullbacks
from tests import typecheck


class TypecheckTest(parameterized.TestCase):
  def test_hook_is_on(self):
    with self.assertRaisesRegex(
      TypeError, "(?s)parameters of nnx_ext._pullbacks._cotangent.*'loss'"
    ):
      _pullbacks._cotangent(jnp.ones(3), None)

  def test_wrong_result(self):
    @typecheck.typechecked
    def f(x: int) -> str:
      return x

    with self.assertRaisesRegex(TypeError, 'the return value is not'):
      f(1)

  @parameterized.parameters(((1, 'a'), {}), ((1,), {'k': 'a'}))
  def test_each_variadic(self, args, kwargs):
    @typecheck.typechecked
    def f(*args: int, **kwargs: int):
      return args, kwargs

    with self.assertRaisesRegex(TypeError, 'args is not'):
      f(*args, **kwargs)
