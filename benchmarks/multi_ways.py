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
"""The ways to take gradients of several losses, ours and those by hand.

A :class:`Program` is a function of several losses with its arguments and
routes. Its steps return values and gradients:

* ``nnx_ext``: ``nnx_ext.value_and_grad_multi``, one gradient a loss;
* ``nnx_ext, sum``: the same with ``reduce='sum'``;
* ``naive``: one ``nnx.value_and_grad`` a loss;
* ``naive, sum``: the same, with the gradients of an argument added;
* ``sum of losses``: one ``nnx.value_and_grad`` of the sum of the losses, which
  is right only where no loss leaks into what only another trains;
* ``vjp``: one ``jax.vjp`` of all losses, and a pullback for each;
* ``vjp, vmap``: the same, with the pullbacks batched;
* ``jacrev``: ``jax.jacrev`` of all losses.
"""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_ext
from benchmarks import steps

Function = tp.Callable[..., tp.Any]


@dataclasses.dataclass(frozen=True)
class Program:
  """Losses, the arguments to call them with, and what each is to train.

  Attributes:
    losses: returns a dict of scalars.
    arguments: makes modules and, last, a batch.
    argnums: for each loss, as ``value_and_grad_multi`` takes it.
    limit: the fewest flops of one gradient a loss.
    sum_limit: the fewest flops of the gradient of their sum.
    rounds: of each loop, of which the limits count one.
    outside: how much of the limits is in no loop.
  """

  losses: Function
  arguments: tp.Callable[[], tuple]
  argnums: dict[str, tp.Any]
  limit: float
  sum_limit: float
  rounds: int = 1
  outside: float = 0

  def function(self, name: str) -> Function:
    """One of the ways, as a function of the arguments."""
    return {
      'nnx_ext': self._multi,
      'nnx_ext, sum': functools.partial(self._multi, reduce='sum'),
      'naive': self._naive,
      'naive, sum': self._naive_sum,
      'sum of losses': self._sum,
      'vjp': functools.partial(self._by_hand, _vjp),
      'vjp, vmap': functools.partial(self._by_hand, _vjp_vmap),
      'jacrev': functools.partial(self._by_hand, _jacrev),
    }[name]()

  def case(self, *names: str, jit: bool = True) -> steps.Case:
    """Some of the ways, all of one gradient a loss or all of the sum.

    The baseline is the naive way of these.
    """
    summed = 'naive' not in names
    limit = self.sum_limit if summed else self.limit
    make = steps.jitted if jit else steps.Eager
    return steps.Case(
      steps={name: functools.partial(self._step, make, name) for name in names},
      baseline='naive, sum' if summed else 'naive',
      limit=limit,
      whole_limit=self.rounds * (limit - self.outside) + self.outside,
    )

  def _step(self, make: tp.Callable, name: str) -> steps.Step:
    return make(self.function(name), self.arguments())

  def _multi(self, **options) -> Function:
    return nnx_ext.value_and_grad_multi(
      self.losses, argnums=self.argnums, **options
    )

  def _naive(self) -> Function:
    def alone(key):
      return lambda *args: self.losses(*args)[key]

    each = {
      key: nnx.value_and_grad(alone(key), argnums=argnums)
      for key, argnums in self.argnums.items()
    }

    def step(*args):
      both = {key: one(*args) for key, one in each.items()}
      values = {key: value for key, (value, _) in both.items()}
      return values, {key: grads for key, (_, grads) in both.items()}

    return step

  def _naive_sum(self) -> Function:
    naive = self._naive()

    def step(*args):
      values, grads = naive(*args)
      return values, self._added(grads)

    return step

  def _added(self, grads: dict[str, nnx.State]) -> tp.Any:
    """The gradients of each argument, the leaves that several have added."""
    added: dict[int, dict] = {}
    for key, argnums in self.argnums.items():
      of_argument = added.setdefault(_argnum(argnums), {})
      for path, grad in nnx.to_flat_state(grads[key]):
        if path in of_argument:
          grad = jax.tree.map(jnp.add, of_argument[path], grad)
        of_argument[path] = grad
    states = [
      nnx.from_flat_state(list(added[argnum].items()))
      for argnum in sorted(added)
    ]
    return states[0] if len(states) == 1 else tuple(states)

  def _sum(self) -> Function:
    argnums = tuple(sorted({_argnum(one) for one in self.argnums.values()}))

    def losses(*args):
      values = self.losses(*args)
      return sum(values.values()), values

    total = nnx.value_and_grad(
      losses, argnums=argnums[0] if len(argnums) == 1 else argnums, has_aux=True
    )

    def step(*args):
      (_, values), grads = total(*args)
      return values, grads

    return step

  def _by_hand(self, differentiate: Function) -> Function:
    def step(*args):
      *modules, batch = args
      graphdef, params, rest = nnx.split(tuple(modules), nnx.Param, ...)

      def losses(params):
        # Variables of this trace: those of `rest` may not be written here.
        inside = jax.tree.map(lambda x: x, rest)
        modules = nnx.merge(graphdef, params, inside)
        values = self.losses(*modules, batch)
        *_, rest_after = nnx.split(modules, nnx.Param, ...)
        return jnp.stack(list(values.values())), (values, rest_after)

      grads, (values, rest_after) = differentiate(losses, params)
      nnx.update(tuple(modules), rest_after)
      return values, {
        key: self._routed(key, grads(i)) for i, key in enumerate(values)
      }

    return step

  def _routed(self, key: str, grads: nnx.State) -> nnx.State:
    """What a loss trains, of the gradients by everything."""
    entry = self.argnums[key]
    of_argument = grads[_argnum(entry)]
    if isinstance(entry, nnx.DiffState):
      return nnx.filter_state(of_argument, entry.filter)
    return of_argument


def _argnum(entry: int | nnx.DiffState) -> int:
  return entry.argnum if isinstance(entry, nnx.DiffState) else entry


def _vjp(losses: Function, params: nnx.State):
  values, pullback, aux = jax.vjp(losses, params, has_aux=True)
  units = jnp.eye(len(values), dtype=values.dtype)
  return (lambda i: pullback(units[i])[0]), aux


def _vjp_vmap(losses: Function, params: nnx.State):
  values, pullback, aux = jax.vjp(losses, params, has_aux=True)
  (grads,) = jax.vmap(pullback)(jnp.eye(len(values), dtype=values.dtype))
  return (lambda i: jax.tree.map(lambda x: x[i], grads)), aux


def _jacrev(losses: Function, params: nnx.State):
  grads, aux = jax.jacrev(losses, has_aux=True)(params)
  return (lambda i: jax.tree.map(lambda x: x[i], grads)), aux
