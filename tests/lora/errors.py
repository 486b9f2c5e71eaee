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
"""What the tests of errors share: a model, calls, spellings that work."""

import contextlib
import functools
import typing as tp

import jax.numpy as jnp
from flax import nnx

import nnx_ext
from tests.errors import ErrorsTestCase, Snapshot

ONES = nnx.initializers.ones
APPLIES: dict[str, tp.Callable] = {
  'apply_lora': lambda model, **options: nnx_ext.apply_lora(
    model, **{'rank': 2, 'rngs': nnx.Rngs(1), **options}
  ),
  'lora_plan': lambda model, **options: nnx_ext.lora_plan(
    model, **{'rank': 2, **options}
  ),
}
apply_lora = APPLIES['apply_lora']


class Net(nnx.Module):
  """A layer that is asked for, beside two that make no trouble."""

  def __init__(self, target: tp.Any = None):
    rngs = nnx.Rngs(0)
    self.query = nnx.Linear(3, 4, kernel_init=ONES, rngs=rngs)
    self.out = nnx.Linear(4, 3, kernel_init=ONES, rngs=rngs)
    if target is not None:
      self.target = target


def linear(cls: type = nnx.Linear, **options):
  return cls(3, 4, kernel_init=ONES, rngs=nnx.Rngs(0), **options)


def adapted(model: tp.Any) -> list[str]:
  """Where a model has adapters."""
  return [
    '/'.join(map(str, path))
    for path, node in nnx.iter_graph(model, graph=True)
    if hasattr(node, 'lora') and hasattr(node.lora, 'scale')
  ]


def spelled(message: str, name: str) -> dict[str, tp.Any]:
  """The argument as a message spells it, up to its bracket or space."""
  start = message.index(f'{name}=')
  end = start + len(name) + 1
  depth = 0
  while end < len(message):
    depth += (message[end] in '([{') - (message[end] in ')]}')
    if depth < 0 or (depth == 0 and message[end] in ' ,;'):
      break
    end += 1
  text = message[start:end].rstrip('.')
  return eval(f'dict({text})', {'nnx': nnx, 'jnp': jnp})


@functools.cache
def plain() -> Net:
  """One for many tests: none may change it."""
  return Net()


class LoRATestCase(ErrorsTestCase):
  @contextlib.contextmanager
  def kept(self, model: tp.Any, error: type[Exception], api: str, *words: str):
    """Expects an error with these words that leaves the model as it was."""
    before = Snapshot(model)
    with self.refused(error, api, *words) as caught:
      yield caught
    before.check(self)
