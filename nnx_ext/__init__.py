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
from nnx_ext.lora.files import load_lora as load_lora
from nnx_ext.lora.files import save_lora as save_lora
from nnx_ext.lora.layers import LoRAConv as LoRAConv
from nnx_ext.lora.layers import LoRAConvTranspose as LoRAConvTranspose
from nnx_ext.lora.layers import LoRAEinsum as LoRAEinsum
from nnx_ext.lora.layers import LoRAEmbed as LoRAEmbed
from nnx_ext.lora.layers import LoRALinear as LoRALinear
from nnx_ext.lora.layers import LoRALinearGeneral as LoRALinearGeneral
from nnx_ext.lora.plan import LoRALayerPlan as LoRALayerPlan
from nnx_ext.lora.plan import LoRAPlan as LoRAPlan
from nnx_ext.lora.plan import lora_plan as lora_plan
from nnx_ext.lora.surgery import apply_lora as apply_lora
from nnx_ext.lora.surgery import lora_disabled as lora_disabled
from nnx_ext.lora.surgery import merge_lora as merge_lora
from nnx_ext.lora.surgery import remove_lora as remove_lora
from nnx_ext.lora.surgery import to_plain_lora as to_plain_lora
from nnx_ext.lora.training import lora_fa_filter as lora_fa_filter
from nnx_ext.lora.training import lora_plus as lora_plus
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
  'LoRAConv',
  'LoRAConvTranspose',
  'LoRAEinsum',
  'LoRAEmbed',
  'LoRALayerPlan',
  'LoRALinear',
  'LoRALinearGeneral',
  'LoRAPlan',
  'LossPlan',
  'MultiPlan',
  'PullbackPlan',
  'apply_lora',
  'assign',
  'bake',
  'grad_multi',
  'kl',
  'load_lora',
  'lora_disabled',
  'lora_fa_filter',
  'lora_plan',
  'lora_plus',
  'materialize',
  'merge_lora',
  'multi_plan',
  'parametrizations',
  'parametrize',
  'remove_lora',
  'reparam_grad',
  'reparam_value_and_grad',
  'save_lora',
  'substitute',
  'to_plain_lora',
  'typing',
  'value_and_grad_multi',
]
