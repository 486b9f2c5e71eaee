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
"""PEFT's training step, which benchmarks run beside ours, is the same step."""

import os
import sys
from unittest import mock

import numpy as np
from absl.testing import absltest

from benchmarks import lora_programs as programs
from benchmarks import peft_peer
from benchmarks.lora_ways import OURS, PEFT


class PeftPeerTest(absltest.TestCase):
  def test_losses_go_the_same_way(self):
    case = programs.blocks(
      width=16, hidden=32, tokens=8, rank=2, depth=1, peft=True
    )
    with mock.patch.dict(os.environ, {peft_peer.PYTHON: sys.executable}):
      ours, peft = (case.steps[name]().prepare() for name in (OURS, PEFT))
    losses = [(float(ours.run()[0]), peft.run()) for _ in range(3)]
    np.testing.assert_allclose(*zip(*losses), rtol=1e-5)
    self.assertLess(losses[2][0], losses[0][0])
