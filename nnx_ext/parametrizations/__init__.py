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
"""Parametrizations of weights, for :func:`nnx_ext.parametrize`."""

from nnx_ext.parametrizations._base import Parametrization as Parametrization
from nnx_ext.parametrizations.constraints import Interval as Interval
from nnx_ext.parametrizations.constraints import Positive as Positive
from nnx_ext.parametrizations.constraints import Simplex as Simplex
from nnx_ext.parametrizations.fixed import EMA as EMA
from nnx_ext.parametrizations.fixed import Masked as Masked
from nnx_ext.parametrizations.fixed import Scaled as Scaled
from nnx_ext.parametrizations.gaussian import (
  GaussianMeanField as GaussianMeanField,
)
from nnx_ext.parametrizations.gaussian import flipout as flipout
from nnx_ext.parametrizations.gaussian import (
  local_reparametrization as local_reparametrization,
)
from nnx_ext.parametrizations.low_rank import LowRank as LowRank
from nnx_ext.parametrizations.low_rank import LowRankUpdate as LowRankUpdate
from nnx_ext.parametrizations.norms import SpectralNorm as SpectralNorm
from nnx_ext.parametrizations.norms import UnitNorm as UnitNorm
from nnx_ext.parametrizations.norms import WeightNorm as WeightNorm
from nnx_ext.parametrizations.orthogonal import Orthogonal as Orthogonal
from nnx_ext.parametrizations.quantize import FakeQuant as FakeQuant
from nnx_ext.parametrizations.structured import Circulant as Circulant
from nnx_ext.parametrizations.structured import Kronecker as Kronecker
from nnx_ext.parametrizations.structured import Monarch as Monarch
from nnx_ext.parametrizations.symmetric import (
  PositiveDefinite as PositiveDefinite,
)
from nnx_ext.parametrizations.symmetric import Skew as Skew
from nnx_ext.parametrizations.symmetric import Symmetric as Symmetric

__all__ = [
  'Circulant',
  'EMA',
  'FakeQuant',
  'GaussianMeanField',
  'Interval',
  'Kronecker',
  'LowRank',
  'LowRankUpdate',
  'Masked',
  'Monarch',
  'Orthogonal',
  'Parametrization',
  'Positive',
  'PositiveDefinite',
  'Scaled',
  'Simplex',
  'Skew',
  'SpectralNorm',
  'Symmetric',
  'UnitNorm',
  'WeightNorm',
  'flipout',
  'local_reparametrization',
]
