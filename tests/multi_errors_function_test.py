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
"""Errors of ``f`` itself, bound, captured or no function: the words needed."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import errors, nnx

from tests import models
from tests.errors import (
  ACTOR,
  API,
  APIS,
  BOTH,
  CONTAINER,
  CRITIC,
  PARAMS,
  WAYS,
  Affine,
  ErrorsTestCase,
  Snapshot,
  call,
  cases,
  every_api,
  every_mode,
  every_way,
  losses,
  nets,
)


class Net(Affine):
  def losses(self, x):
    return {'a': jnp.mean(self(x))}


class FunctionTest(ErrorsTestCase):
  """``f`` itself, and how options are passed."""

  @parameterized.product(
    api=list(APIS), form=['direct', 'decorator', 'partial']
  )
  def test_bound_method(self, api, form):
    f = Net().losses
    with self.refused(
      ValueError, api, 'bound method', f'{api}(Net.losses, ...)(module, ...)'
    ):
      if form == 'decorator':
        APIS[api](argnums=0)(f)
      else:
        APIS[api](functools.partial(f) if form == 'partial' else f)

  @parameterized.product(
    api=list(APIS),
    f=[None, 0, 'losses', {'a': 1.0}, nnx.Param],
    decorator=[False, True],
  )
  def test_not_a_function(self, api, f, decorator):
    # A Variable has a __call__, that of its value.
    f = nnx.Param(jnp.ones(())) if f is nnx.Param else f
    with self.refused(
      TypeError, api, '`f`', 'function', f'got {type(f).__name__}', 'argnums='
    ):
      APIS[api](argnums=0)(f) if decorator else APIS[api](f)

  @every_api
  def test_positional_options(self, api):
    with self.refused(TypeError, api, 'positional', '2 were given'):
      APIS[api](losses, 0)

  @every_api
  def test_unknown_option(self, api):
    for args in (losses,), ():
      with self.refused(TypeError, api, "'argnum'"):
        APIS[api](*args, argnum=0)

  @every_api
  def test_decorator_takes_only_the_function(self, api):
    decorator = APIS[api](argnums=0)
    with self.refused(TypeError, api, '`f`'):
      decorator()
    with self.refused(TypeError, api, "'argnums'"):
      decorator(losses, argnums=1)

  @every_way
  def test_decorator_form(self, api, mode):
    decorator = functools.partial(APIS[api], **models.MODES[mode])

    @decorator(argnums=BOTH)
    def lone(actor, critic, x):
      return jnp.mean(actor(x))

    @decorator(argnums={'policy': 0, 'valeu': 1})
    def misspelt(actor, critic, x):
      return losses(actor, critic, x)

    @decorator()
    def unreachable(actor, critic, x):
      return losses(actor, critic, x)

    with self.refused(TypeError, api, 'scalar', *CONTAINER):
      lone(*nets())
    with self.refused(ValueError, api, "'valeu'", "'value'"):
      misspelt(*nets())
    with self.refused(ValueError, api, "loss 'value'", ACTOR):
      unreachable(*nets())


CAPTURED: dict[str, tuple[tp.Callable, tp.Callable]] = {
  'batch_norm': (
    lambda: nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
    lambda norm, x: norm(x),
  ),
  'dropout': (
    lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    lambda dropout, x: dropout(x),
  ),
  'variable': (
    lambda: nnx.BatchStat(jnp.zeros(())),
    lambda variable, x: variable.set_value(jnp.mean(x)) or x,
  ),
  'attribute': (Affine, lambda layer, x: setattr(layer, 'seen', True) or x),
}


class CapturedTest(ErrorsTestCase):
  """Modules that ``f`` changes without receiving them."""

  @cases(CAPTURED, WAYS)
  def test_captured_and_changed(self, case, api, mode):
    make, use = CAPTURED[case]
    captured = make()
    before = Snapshot(captured)

    def my_losses(actor, critic, x):
      return losses(actor, critic, use(captured, x))

    with self.refused(
      errors.TraceContextError,
      api,
      '`my_losses`',
      'captured',
      'argument',
      f'{api}(my_losses, ...)',
    ):
      call(api, mode, my_losses)
    before.check(self)

  @every_mode
  def test_captured_and_read(self, mode):
    norm = nnx.BatchNorm(2, use_running_average=True, rngs=nnx.Rngs(0))
    call(API, mode, lambda a, c, x: losses(a, c, norm(x)))

  @parameterized.product(mode=list(models.MODES), jit=[jax.jit, nnx.jit])
  def test_argument_from_outside_of_jit(self, mode, jit):
    # A local Module stands first: its statistics must not move either.
    outside = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    @jit
    def step(x):
      local = nnx.BatchNorm(2, rngs=nnx.Rngs(1))
      before = Snapshot(local, outside)
      with self.refused(
        errors.TraceContextError, API, CRITIC, 'outside', 'nnx.jit'
      ):
        call(API, mode, losses, local, outside, x, argnums=PARAMS)
      before.check(self)

    step(jnp.ones((3, 2)))

  @every_mode
  def test_unchanged_argument_from_outside_of_jit(self, mode):
    # The default mode writes every Variable back, and raises as flax does.
    actor, critic, x = nets()
    step = jax.jit(lambda x: call(API, mode, losses, actor, critic, x)[0])
    if mode != 'default':
      step(x)
      return
    with self.refused(
      errors.TraceContextError, API, ACTOR, 'outside', 'nnx.jit'
    ):
      step(x)
