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
"""One linearization, what each loss reaches, and the fewest pullbacks.

Pure JAX: losses and leaves are numbered from 0, and nothing here knows NNX.

``jax.linearize`` runs the forward once and gives the losses' differential as
a linear program. Dead-code elimination of that program, one loss at a time,
tells which leaves a loss reaches. Gradients are then transposes of the linear
program, and because ``jax.linear_transpose`` keeps zero cotangents symbolic,
a transpose costs only what its losses reach.
"""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.typing import ArrayLike

from nnx_ext.typing import Leaf, Loss, Weight

# The one undocumented JAX name in the package: public analyses see a whole
# jaxpr, not which inputs one of its outputs needs. Without it every leaf
# counts as reached, which is right but may cost pullbacks.
_dce_jaxpr = getattr(partial_eval, 'dce_jaxpr', None)


@dataclasses.dataclass(frozen=True)
class Request:
  """A wish for the gradient of the sum of some losses by one leaf."""

  leaf: int
  losses: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Pullback:
  """One transpose of the linear program, with the cotangents of ``losses``;
  its results serve ``requests`` and nothing else.
  """

  losses: frozenset[int]
  requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Linearization:
  """Losses at a point and their differential there."""

  losses: tuple[Loss, ...]
  pull: tp.Callable[[list[int], list[Loss]], tuple[Leaf, ...]]
  """From losses and their cotangents, the gradient by every leaf."""
  reach: tuple[frozenset[int], ...]
  """For each loss, the leaves that it depends on. Structural: a dead relu
  is reached, a ``stop_gradient`` is not."""

  def plan(self, requests: tp.Iterable[Request]) -> tuple[Pullback, ...]:
    """Groups requests into few pullbacks, each right for all it serves.

    A pullback of the losses T is right for a request iff T, restricted to
    the losses that reach the leaf, is what the request asks for (restricted
    in the same way). So a request forbids the losses that reach its leaf
    unasked, and two groups merge unless one holds what the other forbids.
    Requests that no loss reaches need no pullback: they are zero.
    """
    alike: dict[tuple[frozenset[int], frozenset[int]], list[Request]] = {}
    for request in requests:
      reaching = self._reaching(request.leaf)
      needed = request.losses & reaching
      if needed:
        alike.setdefault((needed, reaching - needed), []).append(request)
    groups: list[tuple[set[int], set[int], list[Request]]] = []
    # The largest first: a small group then joins one that runs anyway.
    for (needed, forbidden), members in sorted(
      alike.items(), key=lambda item: -len(item[0][0])
    ):
      for group_needed, group_forbidden, group_members in groups:
        if not (needed & group_forbidden or forbidden & group_needed):
          group_needed |= needed
          group_forbidden |= forbidden
          group_members += members
          break
      else:
        groups.append((set(needed), set(forbidden), list(members)))
    return tuple(
      Pullback(frozenset(needed), tuple(members))
      for needed, _, members in groups
    )

  def gradients(
    self,
    pullbacks: tp.Iterable[Pullback],
    weights: tp.Sequence[Weight | None],
  ) -> dict[Request, Leaf]:
    """Runs the pullbacks; ``weights`` scale the cotangents of the losses."""
    results: dict[Request, Leaf] = {}
    for pullback in pullbacks:
      chosen = sorted(pullback.losses)
      cotangents = [_cotangent(self.losses[i], weights[i]) for i in chosen]
      transposed = self.pull(chosen, cotangents)
      # Only what was asked for leaves this function: XLA drops the rest.
      for request in pullback.requests:
        results[request] = transposed[request.leaf]
    return results

  def _reaching(self, leaf: int) -> frozenset[int]:
    return frozenset(i for i, leaves in enumerate(self.reach) if leaf in leaves)


def linearize(
  f: tp.Callable[..., tuple[tp.Sequence[Loss], tp.Any]],
  point: tp.Sequence[ArrayLike],
) -> tuple[Linearization, tp.Any]:
  """Runs ``f(*point) -> (losses, aux)`` once; returns its linearization, aux.

  ``point`` holds the inexact leaves to differentiate by.
  """
  losses, differential, aux = jax.linearize(f, *point, has_aux=True)

  def pull(chosen, cotangents):
    def of_chosen(*tangents):
      # Called once for all chosen losses: once for each would run the
      # backward of what they share once for each.
      outputs = differential(*tangents)
      return [outputs[i] for i in chosen]

    return jax.linear_transpose(of_chosen, *point)(cotangents)

  return Linearization(tuple(losses), pull, _reach(differential, point)), aux


def linearize_alone(
  f: tp.Callable[..., tuple[tp.Sequence[Loss], tp.Any]],
  point: tp.Sequence[ArrayLike],
) -> tuple[Linearization, tp.Any]:
  """The same for one loss, taken to reach every leaf.

  What follows from reach, fewer pullbacks and what they leave out, is nothing
  with one loss, and ``jax.vjp`` gives its pullback with less to trace.
  """
  losses, pullback, aux = jax.vjp(f, *point, has_aux=True)
  structure = jax.tree.structure(losses)
  every_leaf = frozenset(range(len(point)))
  return (
    Linearization(
      tuple(losses),
      lambda _, cotangents: pullback(jax.tree.unflatten(structure, cotangents)),
      (every_leaf,) * len(losses),
    ),
    aux,
  )


def _reach(
  differential: tp.Callable, point: tp.Sequence[ArrayLike]
) -> tuple[frozenset[int], ...]:
  jaxpr = jax.make_jaxpr(differential)(*point).jaxpr
  count = len(jaxpr.outvars)
  if _dce_jaxpr is None:
    return (frozenset(range(len(point))),) * count
  reach = []
  for i in range(count):
    _, used = _dce_jaxpr(jaxpr, [j == i for j in range(count)])
    reach.append(frozenset(j for j, is_used in enumerate(used) if is_used))
  return tuple(reach)


def _cotangent(loss: Loss, weight: Weight | None) -> Loss:
  # ones_like keeps dtype and, under shard_map, the axes a loss varies over.
  one = jnp.ones_like(loss)
  return one if weight is None else one * jnp.asarray(weight, loss.dtype)
