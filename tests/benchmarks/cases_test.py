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
"""The cases are made as they say."""

import inspect

from absl.testing import absltest, parameterized

from benchmarks import bench_lora, bench_multi_grad, bench_reparam

BENCHES = bench_lora, bench_multi_grad, bench_reparam
CASES = {
  f'{bench.PILLAR}, {name}': sized
  for bench in BENCHES
  for name, sized in bench.CASES.items()
}
# It takes seconds to make their models.
SLOW = {
  *(f'lora, {name}' for name in ('transformer layer', 'conv', 'recurrent')),
  *(f'lora, {name}' for name in ('embed', 'eager call')),
  *(f'reparam, {name}' for name in ('weight norm, scanned', 'hypernetwork')),
  'reparam, orthogonal recurrent',
}


class CasesTest(parameterized.TestCase):
  def test_sizes_are_those_of_the_program(self):
    for name, sized in CASES.items():
      with self.subTest(name):
        self.assertLen(set(sized.steps), len(sized.steps))
        for sizes in (sized.cpu, sized.small, sized.gpu):
          if sizes is not None:
            inspect.signature(sized.make).bind(**sizes)

  def test_a_series_has_each_size_once(self):
    for bench in BENCHES:
      series = [one.series for one in bench.CASES.values() if one.series]
      self.assertLen(set(series), len(series))

  @parameterized.parameters(sorted(CASES.keys() - SLOW))
  def test_steps_and_limit(self, name):
    sized = CASES[name]
    case = sized.case('small')
    self.assertEqual(set(case.steps), set(sized.steps))
    self.assertIn(case.baseline, case.steps)
    if case.limit is not None:
      self.assertGreater(case.limit, 0)
      self.assertGreaterEqual(case.whole_limit or case.limit, case.limit)


if __name__ == '__main__':
  absltest.main()
