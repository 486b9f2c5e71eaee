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
"""Extensions for Flax NNX, imported beside it.

``from flax import nnx; import nnx_ext``
"""

from nnx_ext import parametrizations as parametrizations
from nnx_ext import typing as typing
from nnx_ext.multi_grad import grad_multi as grad_multi
from nnx_ext.multi_grad import multi_plan as multi_plan
from nnx_ext.multi_grad import value_and_grad_multi as value_and_grad_multi
from nnx_ext.parametrize import assign as assign
from nnx_ext.parametrize import bake as bake
from nnx_ext.parametrize import kl as kl
from nnx_ext.parametrize import materialize as materialize
from nnx_ext.parametrize import parametrize as parametrize
from nnx_ext.plan import LossPlan as LossPlan
from nnx_ext.plan import MultiPlan as MultiPlan
from nnx_ext.plan import PullbackPlan as PullbackPlan
from nnx_ext.reparam import reparam_grad as reparam_grad
from nnx_ext.reparam import reparam_value_and_grad as reparam_value_and_grad
from nnx_ext.substitute import substitute as substitute

__version__ = '0.1.0'

__all__ = [
  'LossPlan',
  'MultiPlan',
  'PullbackPlan',
  'assign',
  'bake',
  'grad_multi',
  'kl',
  'materialize',
  'multi_plan',
  'parametrizations',
  'parametrize',
  'reparam_grad',
  'reparam_value_and_grad',
  'substitute',
  'typing',
  'value_and_grad_multi',
]
