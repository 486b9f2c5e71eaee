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
"""One multi-loss step, from a call to gradients.

    call -> routes -> a pure function of leaves -> linearization, reach
         -> pullbacks -> gradients in the caller's shapes -> settle, last

State moves onto the caller's objects only when all else has succeeded.
"""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnx_ext import _words
from nnx_ext._call import Call, explain_captured
from nnx_ext._losses import Losses, read_output
from nnx_ext._mode import Crossing, Mode
from nnx_ext._per_loss import PerLoss, parse_weights
from nnx_ext._pullbacks import (
  Linearization,
  Pullback,
  Request,
  linearize,
  linearize_alone,
)
from nnx_ext._routes import Route, Router, Target, parse_argnums
from nnx_ext.plan import LossPlan, MultiPlan, PullbackPlan
from nnx_ext.typing import Argnums, Weight, Weights


@dataclasses.dataclass(frozen=True)
class Options:
  """Checked options of ``value_and_grad_multi`` and its relatives."""

  api: str
  argnums: PerLoss[tp.Any]
  has_aux: bool
  reduce: str | None
  weights: PerLoss[Weight | None]
  allow_unused: bool
  holomorphic: bool
  allow_int: bool
  mode: Mode

  @classmethod
  def check(
    cls,
    api: str,
    *,
    argnums: Argnums,
    has_aux: bool,
    reduce: str | None,
    weights: Weights | None,
    allow_unused: bool,
    holomorphic: bool,
    allow_int: bool,
    graph: bool | None,
    graph_updates: bool | None,
  ) -> 'Options':
    if reduce not in (None, 'sum'):
      wrong = ValueError if isinstance(reduce, str) else TypeError
      raise wrong(
        f"{api}: `reduce` must be None (one gradient a loss) or 'sum' (one "
        f'gradient an argument), got {reduce!r}.'
      )
    return cls(
      api=api,
      argnums=parse_argnums(api, argnums),
      has_aux=has_aux,
      reduce=reduce,
      weights=parse_weights(api, weights),
      allow_unused=allow_unused,
      holomorphic=holomorphic,
      allow_int=allow_int,
      mode=Mode.resolve(graph, graph_updates),
    )

  @property
  def alone(self) -> bool:
    """Whether there is to be one loss, and no check of what it reaches."""
    entries = self.argnums.entries
    return self.allow_unused and entries is not None and len(entries) == 1


class Result(tp.NamedTuple):
  """What a step computes."""

  losses: tp.Any
  gradients: tp.Any
  aux: tp.Any

  def value_and_grad(self, has_aux: bool) -> tp.Any:
    """As ``jax.value_and_grad`` returns it."""
    values = (self.losses, self.aux) if has_aux else self.losses
    return values, self.gradients

  def grad(self, has_aux: bool) -> tp.Any:
    """As ``jax.grad`` returns it."""
    return (self.gradients, self.aux) if has_aux else self.gradients


def differentiate(f: tp.Callable, options: Options, call: Call) -> Result:
  """Runs ``f`` once and pulls back as often as the plan says."""
  with options.mode.crossing(call) as crossing:
    how = linearize_alone if options.alone else linearize
    forward, luggage = _forward(f, options, call, crossing, how)
    gradients = forward.gradients()
    losses = forward.losses.pack(forward.linearization.losses)
    aux = crossing.settle(luggage)
  return Result(losses, gradients, aux)


def plan(f: tp.Callable, options: Options, call: Call) -> MultiPlan:
  """The plan of the step, from a trace that computes and moves nothing."""
  with options.mode.crossing(call) as crossing:
    return jax.eval_shape(
      lambda: _forward(f, options, call, crossing, linearize)[0].plan()
    )


@dataclasses.dataclass(frozen=True)
class _Forward:
  """A forward pass that has run, and all that its gradients need."""

  call: Call
  options: Options
  router: Router
  losses: Losses
  routes: list[Route]
  weights: list[Weight | None]
  leaves: list[tp.Any]
  point: dict[int, int]
  """Leaf number -> its place among the linearized leaves."""
  linearization: Linearization

  def gradients(self) -> tp.Any:
    found = self.linearization.gradients(self.pullbacks(), self.weights)
    gradients = []
    for route, asked in self._outputs():

      def value(leaf, asked=asked):
        if leaf not in self.point:
          return np.zeros(np.shape(self.leaves[leaf]), jax.dtypes.float0)
        request = Request(self.point[leaf], asked(leaf))
        if request in found:
          return found[request]
        return jnp.zeros_like(self.leaves[leaf])

      gradients.append(route.gradient(value))
    if self.options.reduce == 'sum':
      return gradients[0]
    return self.losses.pack(gradients)

  def pullbacks(self) -> tuple[Pullback, ...]:
    return self.linearization.plan(
      Request(self.point[leaf], asked(leaf))
      for route, asked in self._outputs()
      for leaf in sorted(route.leaves)
      if leaf in self.point
    )

  def check_reach(self) -> None:
    """Each loss must reach something in each of its arguments."""
    if self.options.allow_unused:
      return
    for key, route, reach in self._each_loss():
      for target in route.targets:
        wanted = self._linearized(target)
        if wanted and not wanted & reach:
          raise ValueError(self._unreached(key, target))

  def plan(self) -> MultiPlan:
    return MultiPlan(
      losses=tuple(self._loss_plan(*each) for each in self._each_loss()),
      pullbacks=tuple(
        PullbackPlan(
          tuple(self.losses.keys[i] for i in sorted(pullback.losses)),
          len(pullback.requests),
        )
        for pullback in self.pullbacks()
      ),
    )

  def _outputs(self):
    """Each gradient to return: its route, and the losses a leaf sums over."""
    if self.options.reduce == 'sum':
      leaves = [route.leaves for route in self.routes]

      def routed(leaf):
        return frozenset(k for k, own in enumerate(leaves) if leaf in own)

      return [(self.router.union(self.routes), routed)]
    return [
      (route, lambda leaf, k=k: frozenset({k}))
      for k, route in enumerate(self.routes)
    ]

  def _each_loss(self):
    return zip(self.losses.keys, self.routes, self.linearization.reach)

  def _linearized(self, target: Target) -> set[int]:
    return {self.point[leaf] for leaf in target.leaves if leaf in self.point}

  def _loss_plan(self, key, route: Route, reach: frozenset[int]) -> LossPlan:
    own = {self.point[leaf] for leaf in route.leaves if leaf in self.point}
    arguments = self.router.owners(self.point)
    kept_out: dict[str, int] = {}
    for leaf in sorted(reach - own):
      kept_out[arguments[leaf]] = kept_out.get(arguments[leaf], 0) + 1
    return LossPlan(
      key,
      tuple(
        (
          self.call.argument(target.argnum),
          len(self._linearized(target) & reach),
          len(self._linearized(target)),
        )
        for target in route.targets
      ),
      tuple(kept_out.items()),
    )

  def _unreached(self, key, target: Target) -> str:
    argument = self.call.argument(target.argnum)
    filter = f'{_words.filter_(target.filter)} ' if target.filter else ''
    return (
      f'{self.call.api}: loss {key!r} does not depend on any of the '
      f'{len(target.leaves)} {filter}leaves of {argument} that it is to be '
      'differentiated by. Was the forward pass run outside the function, so '
      'that its results are constants here? Run it inside, from the Modules '
      'that the function receives. If a zero gradient is meant, pass '
      'allow_unused=True.'
    )


def _forward(
  f: tp.Callable,
  options: Options,
  call: Call,
  crossing: Crossing,
  linearize: tp.Callable[..., tuple[Linearization, tp.Any]],
) -> tuple[_Forward, tp.Any]:
  """Runs ``f`` once, linearized by every leaf that any loss wants."""
  router = Router(options.mode, call, crossing.leaves)
  routes = options.argnums.map(router.route)
  wanted = router.inexact(
    {leaf for route in routes.values() for leaf in route.leaves},
    options.allow_int,
    options.holomorphic,
  )

  def losses_and_aux(*args, **kwargs):
    out = explain_captured(call.api, f)(*args, **kwargs)
    losses, values, aux = read_output(
      call.api, out, options.has_aux, options.holomorphic
    )
    return (losses, values), aux

  def pure(*point):
    leaves = list(crossing.leaves)
    for leaf, value in zip(wanted, point):
      leaves[leaf] = value
    (losses, values), luggage = crossing.call(losses_and_aux, leaves)
    return values, (losses, luggage)

  point = [crossing.leaves[leaf] for leaf in wanted]
  linearization, (losses, luggage) = linearize(pure, point)
  forward = _Forward(
    call=call,
    options=options,
    router=router,
    losses=losses,
    routes=routes.match(losses),
    weights=options.weights.match(losses),
    leaves=crossing.leaves,
    point={leaf: i for i, leaf in enumerate(wanted)},
    linearization=linearization,
  )
  forward.check_reach()
  return forward, luggage
