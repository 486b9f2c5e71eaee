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
"""Type aliases of the public signatures."""

import typing as tp

import jax
from flax import nnx
from jaxtyping import Inexact, Num, Shaped

Leaf = Shaped[jax.Array, '...']
"""One leaf of the arguments, an array of any shape and dtype."""

Loss = Inexact[jax.Array, '']
"""A scalar loss, real or complex."""

Weight = float | int | Num[jax.Array, '']
"""A factor on one loss's gradients; may be traced."""

Argnum = int | nnx.DiffState
"""One argument to differentiate by, whole or through a filter."""

LossArgnums = Argnum | tp.Sequence[Argnum]
"""What one loss is differentiated by, in the forms of ``nnx.grad``."""

Argnums = Argnum | tp.Mapping[tp.Any, LossArgnums] | tp.Sequence[LossArgnums]
"""For all losses together, or one entry for each loss."""

Weights = Weight | tp.Mapping[tp.Any, Weight] | tp.Sequence[Weight]
"""For all losses together, or one entry for each loss."""

Values = nnx.State | tp.Mapping[tp.Any, tp.Any]
"""Arrays, or Variables that hold them, by path."""


class MultiOptions(tp.TypedDict, total=False):
  """The options of :func:`nnx_ext.value_and_grad_multi`."""

  argnums: Argnums
  has_aux: bool
  reduce: tp.Literal['sum'] | None
  weights: Weights | None
  allow_unused: bool
  holomorphic: bool
  allow_int: bool
  graph: bool | None
  graph_updates: bool | None
