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
"""The fewest flops that the training of adapters needs, by their sizes.

Matrix products and convolutions alone. Either the term ``x A B`` is computed
for itself, or its part in the outputs and in the gradient of the input comes
with the adapted weight ``W + A B``, whichever is less.
"""

import functools


def weight(
  tokens: int,
  k: int,
  n: int,
  rank: int,
  *,
  to_input: bool = True,
  whole: bool = False,
) -> float:
  """Those for A and B of a weight of k by n.

  Args:
    tokens: rows of the input.
    k: features of the input.
    n: features of the output.
    rank: that of A and B.
    to_input: whether the gradient of the input is needed too.
    whole: whether the adapted weight is needed, as by DoRA for its norm.
  """
  own = 2 * tokens * k * n * (1 + to_input)
  # x A and its gradient, and those of A and B.
  factors = 4 * tokens * rank * (k + n)
  term = 2 * tokens * rank * (n + k * to_input)
  product = 2 * rank * k * n
  return own + factors + (product if whole else min(term, product))


def blocks(
  tokens: int,
  width: int,
  hidden: int,
  rank: int,
  *,
  depth: int = 1,
  to_input: bool = False,
  whole: bool = False,
) -> float:
  """Those for feed-forward blocks; ``to_input`` is said of the first."""
  up = functools.partial(weight, tokens, width, hidden, rank, whole=whole)
  down = weight(tokens, hidden, width, rank, whole=whole)
  return up(to_input=to_input) + (depth - 1) * up() + depth * down


def attention(batch: int, tokens: int, width: int, rank: int) -> float:
  """Those for self-attention, without the gradient of its input."""
  project = functools.partial(weight, batch * tokens, width, width, rank)
  # Two products of each head's queries, keys and values; backward twice that.
  mixing = 12 * batch * tokens**2 * width
  return 3 * project(to_input=False) + project() + mixing


def conv(batch: int, size: int, channels: int, rank: int) -> float:
  """Those for a 3 by 3 convolution, without the gradient of its input."""
  places = batch * size**2
  taps = batch * (3 * size - 2) ** 2  # none on the padding
  wide = taps * channels * (channels + 2 * rank)
  thin = 2 * places * rank * channels
  term = min(places, 9 * channels) * rank * channels
  return 2 * (wide + thin + term)


def recurrent(tokens: int, width: int, rank: int) -> float:
  """Those for an LSTM's two weights; its input is not differentiated."""
  gates = functools.partial(weight, tokens, width, 4 * width, rank)
  return gates(to_input=False) + gates()
