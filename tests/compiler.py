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
"""How tests compile: in a hurry, but where the compiled program is tested.

Most of the time of these tests is XLA compiling tiny programs, so it is asked
to optimize little.
"""

import dataclasses
import importlib.metadata
import os

import jax

from benchmarks import steps

# Without these emitters jaxlib 0.10 takes half of the time. Other versions may
# not know the flag, and stop at it.
_EMITTERS = 'xla_cpu_use_fusion_emitters'
_HAS_EMITTERS = importlib.metadata.version('jaxlib').startswith('0.10.')


def hurry() -> None:
  """For all that is compiled from now on; called before anything is."""
  _optimize(False)
  if _HAS_EMITTERS:
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --{_EMITTERS}=false'.strip()


def figures(step: steps.Jitted) -> steps.Figures:
  """What is known of a step that is compiled as users' are."""
  options = {_EMITTERS: True} if _HAS_EMITTERS else None
  _optimize(True)
  try:
    step = dataclasses.replace(step, compiler_options=options)
    return step.prepare().figures()
  finally:
    _optimize(False)


def _optimize(on: bool) -> None:
  jax.config.update('jax_disable_most_optimizations', not on)
