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
"""What a multi-loss step computes and why, for people to read."""

import dataclasses
import typing as tp

import jax


@dataclasses.dataclass(frozen=True)
class LossPlan:
  """One loss of a :class:`MultiPlan`.

  Attributes:
    name: the loss's key, index or field.
    differentiated_by: for each argument of its route, ``(argument, reached,
      selected)``: how many of the selected leaves the loss depends on.
    kept_out: for each argument, ``(argument, leaves)``: leaves that the loss
      depends on and that only other losses are differentiated by. Their
      cross gradients are never computed into a result.
  """

  name: tp.Any
  differentiated_by: tuple[tuple[str, int, int], ...]
  kept_out: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class PullbackPlan:
  """One backward pass of a :class:`MultiPlan`.

  Attributes:
    losses: names of the losses whose cotangents are pulled back together.
    leaves: how many gradient leaves it serves.
  """

  losses: tuple[tp.Any, ...]
  leaves: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class MultiPlan:
  """The plan of one multi-loss call, as :func:`nnx_ext.multi_plan` returns.

  Attributes:
    losses: a :class:`LossPlan` for each loss, in the order of the gradients.
    pullbacks: a :class:`PullbackPlan` for each backward pass that will run.
  """

  losses: tuple[LossPlan, ...]
  pullbacks: tuple[PullbackPlan, ...]

  def __str__(self) -> str:
    lines = []
    width = max(len(str(loss.name)) for loss in self.losses)
    for loss in self.losses:
      name = str(loss.name).ljust(width)
      by = ', '.join(
        f'{argument}: reaches {reached} of {_leaves(selected)}'
        for argument, reached, selected in loss.differentiated_by
      )
      lines.append(f'loss {name}  by {by}')
      lines += [
        f'     {"":{width}}  kept out: {_leaves(leaves)} of {argument}'
        for argument, leaves in loss.kept_out
      ]
    for i, pullback in enumerate(self.pullbacks, 1):
      names = ' + '.join(map(str, pullback.losses))
      lines.append(
        f'pullback {i} of {len(self.pullbacks)}: {names} -> '
        f'{_leaves(pullback.leaves)}'
      )
    if not self.pullbacks:
      lines.append('no pullback: every gradient is zero')
    return '\n'.join(lines)

  __repr__ = __str__


def _leaves(count: int) -> str:
  return f'{count} leaf' if count == 1 else f'{count} leaves'
