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
"""Weights of a set norm: weight norm."""

import jax.numpy as jnp
from flax import nnx

from nnx_ext.parametrizations._base import Parametrization


class WeightNorm(Parametrization):
  def __init__(self, weight):
    axes = tuple(range(weight.ndim - 1))
    self.v = nnx.Param(weight)
    self.g = nnx.Param(jnp.sqrt(jnp.sum(weight**2, axis=axes)))

  def __call__(self):
    v = self.v[...]
    axes = tuple(range(v.ndim - 1))
    return v * (self.g[...] / jnp.sqrt(jnp.sum(v**2, axis=axes)))
