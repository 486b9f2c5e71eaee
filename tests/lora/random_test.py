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
"""The law of LoRA on equations and convolutions that nobody thought of."""

import typing as tp

from absl.testing import parameterized
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.lora import kinds, trees
from tests.lora.kinds import Weight
from tests.lora.law import results_of


@st.composite
def equations(draw):
  """An equation of Einsum, and the one of its factors."""
  size = lambda least, most: draw(st.integers(least, most))
  contracted, made = 'ijk'[: size(1, 2)], 'opq'[: size(1, 2)]
  batch, rows = 'bc'[: size(0, 1)], 'tu'[: size(0, 2)]
  order = lambda letters: ''.join(draw(st.permutations(list(letters))))
  weight = order(contracted + made + batch)
  x, y = order(contracted + batch + rows), order(made + batch + rows)
  if draw(st.booleans()):
    x, y = '...' + x, '...' + y
  first = min(map(weight.index, made))
  a = ''.join(
    'r' if i == first else c
    for i, c in enumerate(weight)
    if i == first or c not in made
  )
  keep = lambda letters: ''.join(c for c in weight if c in letters)
  b = keep(batch) + 'r' + keep(made)
  return f'{x},{weight}->{y}', f'{a},{b}->{weight}', draw(st.booleans())


FEW: dict[str, tp.Any] = {
  'max_examples': 6,
  'derandomize': True,
  'deadline': None,
  'database': None,
  'phases': [Phase.generate],  # shrinking would compile hundreds of programs
}

SIZES = dict(zip('ijkopqbctu', (2, 3, 4, 3, 4, 5, 2, 3, 3, 2)))


@st.composite
def convolutions(draw):
  """Arguments of Conv and the shape of an input."""
  window = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
  groups = draw(st.sampled_from([1, 2, 4]))
  each = lambda most: tuple(draw(st.integers(1, most)) for _ in window)
  options = {
    'strides': each(2),
    'kernel_dilation': each(2),
    'feature_group_count': groups,
    'use_bias': draw(st.booleans()),
    'padding': draw(
      st.sampled_from(
        ['SAME', 'VALID', 'CIRCULAR', 'REFLECT', 1, ((0, 2),) * len(window)]
      )
    ),
  }
  batch = draw(st.sampled_from([(), (2,), (2, 1)]))
  shape = (*batch, *(6 for _ in window), 4)
  return tuple(window), options, shape


class RandomTest(parameterized.TestCase):
  """Kinds that nobody thought of."""

  def _check(self, kind, dora=False):
    got = results_of(kind, {'dora': dora}, 1.0)
    trees.assert_close(got.start.actual, got.start.expected, 1e-4)
    trees.assert_close(got.moved.actual, got.moved.expected, 1e-4)
    trees.assert_close(got.moved.weights, got.moved.expected_weights, 1e-4)

  @settings(**FEW)
  @given(equations())
  def test_einsum(self, drawn):
    equation, factors, dora = drawn
    x, letters, _ = equation.replace('->', ',').split(',')
    shape = lambda letters: tuple(SIZES[c] for c in letters)
    ellipsis = (2,) if '...' in x else ()
    kind = kinds.Kind(
      lambda rngs: nnx.Einsum(equation, shape(letters), rngs=rngs),
      (*ellipsis, *shape(x.replace('...', ''))),
      {(): Weight(factors)},
    )
    self._check(kind, dora)

  @settings(**FEW)
  @given(convolutions())
  def test_conv(self, drawn):
    window, options, shape = drawn
    letters = 'hw'[: len(window)]
    weight = Weight(
      f'{letters}ir,ro->{letters}io', groups=options['feature_group_count']
    )
    kind = kinds.Kind(
      lambda rngs: nnx.Conv(4, 8, window, rngs=rngs, **options),
      shape,
      {(): weight},
    )
    self._check(kind)
