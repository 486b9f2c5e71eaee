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
"""The NNX models of these tests are the torch models, before any adapter."""

import numpy as np
from absl.testing import parameterized

from tests.interop import bert, gpt2, small, twins


class BaseTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('bert', bert.BertTwins()),
    ('gpt2', gpt2.GPT2Twins()),
    ('conv1d', small.ConvTwins(1)),
    ('conv2d', small.ConvTwins(2)),
    ('conv3d', small.ConvTwins(3)),
    ('words', small.WordsTwins()),
    ('nested', small.NestedTwins()),
    ('tied', small.TiedTwins()),
    ('blocks', small.BlocksTwins()),
  )
  def test_outputs_are_equal(self, pair):
    expected = twins.logits(pair, pair.make_torch())
    self.assertGreater(np.std(expected), 0.05)
    found = twins.logits(pair, pair.load_nnx())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
