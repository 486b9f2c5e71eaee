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
"""What is written of a measurement, and how two are compared."""

import copy
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from benchmarks import compare, plots, report, tables


def _benchmark(size: int, step: str, ratio: float) -> dict:
  """As pytest-benchmark writes it."""
  return {
    'extra_info': {
      'pillar': 'multi',
      'case': f'{size} heads',
      'step': step,
      'baseline': 'naive',
      'limit': 1000.0 * size,
      'whole_limit': 2e6 * size,
      'series': ['losses', size],
      'ratio': ratio,
      'ratio_quartiles': [ratio - 0.0625, ratio + 0.0625],
      'flops': 4000.0 * size**2 * ratio,
      'temporary_bytes': 8192,
      'moved_bytes': 1_234_567,
      'accessed_bytes': 2_469_134.0,
      'loops': 1,
      'traces': 1,
      'trace_seconds': 0.25 * size,
      'compile_seconds': 0.75 * size,
    },
    'stats': {'median': 0.00123456 * size * ratio, 'rounds': 10, 'mean': 1.0},
  }


def _raw(*benchmarks: dict) -> dict:
  return {
    'environment': {
      'python': '3.11',
      'flax': '0.12.8',
      'jax': '0.10.2',
      'qwix': None,
      'device': 'a processor',
      'cores': 2,
      'revision': 'abc',
    },
    'datetime': '2026-07-30T12:00:00+00:00',
    'sizes': 'cpu',
    'load': [0.5, 1.5],
    'ceilings': {'flops': 1e12, 'bytes': 2e10},
    'benchmarks': list(benchmarks),
    'machine_info': {'node': 'secret'},
  }


EAGER = {
  'extra_info': {
    'pillar': 'lora',
    'case': 'eager call',
    'step': 'nnx_ext',
    'baseline': 'nnx_ext',
    'series': None,
    'ratio': 1.0,
  },
  'stats': {'median': 2.5e-5, 'rounds': 100},
}


def _result() -> dict:
  several = [
    _benchmark(size, step, ratio)
    for size in (2, 4, 8)
    for step, ratio in (('nnx_ext', 0.5), ('naive', 1.0))
  ]
  return report.trimmed([_raw(*several), _raw(EAGER) | {'load': [2.0, 3.25]}])


def _folder(test: absltest.TestCase) -> pathlib.Path:
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


class ReportTest(absltest.TestCase):
  def test_trimmed(self):
    result = _result()
    self.assertEqual(result['date'], '2026-07-30')
    self.assertEqual(result['load'], [0.5, 3.25])
    self.assertLen(result['steps'], 7)
    self.assertNotIn('machine_info', result)
    step = result['steps'][0]
    self.assertEqual(step['seconds'], 0.001235)
    self.assertEqual(step['flops'], 8000)
    self.assertIsInstance(step['flops'], int)
    self.assertEqual(step['moved_bytes'], 1_234_567)
    self.assertNotIn('mean', step)
    self.assertNotIn('series', result['steps'][-1])

  def test_dumped(self):
    result = _result()
    text = report.dumped(result)
    self.assertEqual(json.loads(text), result)
    for step in result['steps']:
      self.assertIn(json.dumps(step), [x.strip(' ,') for x in text.split('\n')])

  def test_refreshed(self):
    page = '# Cost\n<!-- cpu: begin -->\nold\n<!-- cpu: end -->\nmore\n'
    once = report.refreshed(page, '| new |\n', 'cpu')
    self.assertEqual(report.refreshed(once, '| new |\n', 'cpu'), once)
    self.assertNotIn('old', once)
    self.assertIn('\n\n| new |\n', once)
    self.assertStartsWith(once, '# Cost\n<!-- cpu: begin -->')
    self.assertEndsWith(once, '<!-- cpu: end -->\nmore\n')
    self.assertEqual(report.refreshed(page, '| new |\n', 'gpu'), page)

  def test_main_writes_files(self):
    to = _folder(self)
    raw = to / 'raw.json'
    raw.write_text(json.dumps(_raw(EAGER)))
    report.main([str(raw), '--name', 'x', '--to', str(to), '--no-plots'])
    result = json.loads((to / 'x.json').read_text())
    self.assertEqual((to / 'x.md').read_text(), tables.page(result))


def _rows(table: str) -> list[list[str]]:
  return [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in table.split('\n')
  ]


class TablesTest(parameterized.TestCase):
  def test_table(self):
    result = _result()
    heads, _, ours, naive, *_ = _rows(tables.table(result, result['steps']))
    ours, naive = (dict(zip(heads, row)) for row in (ours, naive))
    self.assertEqual(
      ours,
      {
        'case': '2 heads',
        'step': 'nnx_ext',
        'time': '0.50',
        'quartiles': '0.44, 0.56',
        'flops': '0.500',
        'to limit': '4.00',
        'temp. bytes': '1.00',
        'loops': '1',
        'traces': '1',
        'trace': '1.00',
        'compile': '1.00',
      },
    )
    self.assertEqual(naive['case'], '')
    self.assertEqual(naive['time'], '1.00 (2.47 ms)')

  def test_table_on_a_gpu(self):
    result = _result() | {'sizes': 'gpu'}
    heads, _, ours, naive, *_ = _rows(tables.table(result, result['steps']))
    self.assertEqual(heads[-2:], ['bytes to limit', 'of ceiling'])
    # The bytes take 62 µs and the flops 4 µs; it took 1.235 and 2.469 ms.
    self.assertEqual(ours[-2:], ['2.00', '0.05'])
    self.assertEqual(naive[-2:], ['2.00', '0.03'])
    self.assertEqual(len(naive), len(heads))
    result['ceilings'] = None
    *_, ours, _ = _rows(tables.table(result, result['steps'][:2]))
    self.assertEqual(ours[-1], '')

  def test_page(self):
    result = _result()
    text = tables.page(result)
    self.assertStartsWith(text, '2026-07-30, revision abc: a processor, 2')
    self.assertIn('Python 3.11, flax 0.12.8, jax 0.10.2. Ceilings: 1 T', text)
    titles = [line for line in text.split('\n') if line.startswith('### ')]
    self.assertEqual(
      titles, [f'### {tables.TITLES[pillar]}' for pillar in ('multi', 'lora')]
    )
    self.assertIn(tables.growth(result['steps']), text)

  def test_growth(self):
    result = _result()
    _, _, ours, naive = _rows(tables.growth(result['steps']))
    self.assertEqual(
      ours, ['losses: 2, 4, 8', 'nnx_ext', '2.00', '1.00', '1.00']
    )
    self.assertEqual(naive, ['', 'naive', '2.00', '1.00', '1.00'])
    self.assertEqual(tables.growth(result['steps'][-1:]), '')

  def test_exponent(self):
    sizes = 1, 2, 4, 16
    for power in (0, 0.5, 2):
      costs = [3 * x**power for x in sizes]
      self.assertAlmostEqual(tables.exponent(sizes, costs), power)
    self.assertIsNone(tables.exponent(sizes, [1, 2, 3]))
    self.assertIsNone(tables.exponent(sizes, [1, 2, None, 3]))
    self.assertIsNone(tables.exponent([1], [1]))

  @parameterized.parameters((2.5, '2.5 s'), (0.0123, '12.3 ms'), (2e-6, '2 µs'))
  def test_seconds(self, value, text):
    self.assertEqual(tables.seconds(value), text)


class CompareTest(parameterized.TestCase):
  def _changed(self, **figures) -> tuple[dict, dict]:
    old, new = _result(), _result()
    new['steps'][0] |= figures
    return old, new

  def _main(self, old: dict, new: dict) -> int:
    to = _folder(self)
    paths = [to / name for name in ('old.json', 'new.json')]
    for path, result in zip(paths, (old, new)):
      path.write_text(report.dumped(result))
    return compare.main([str(path) for path in paths])

  @parameterized.parameters(
    dict(flops=8100),
    dict(temporary_bytes=8192 + 1200),
    dict(loops=2),
    dict(traces=2),
  )
  def test_a_regression(self, **figures):
    old, new = self._changed(**figures)
    (change,) = compare.changes(old, new)
    (figure,) = figures
    before = old['steps'][0][figure]
    name = 'multi | 2 heads | nnx_ext'
    self.assertEqual(change, (name, figure, before, figures[figure]))
    self.assertTrue(change.is_regression)
    self.assertEqual(self._main(old, new), 1)

  @parameterized.parameters(
    dict(flops=7000), dict(temporary_bytes=10), dict(loops=0)
  )
  def test_less_is_no_regression(self, **figures):
    old, new = self._changed(**figures)
    (change,) = compare.changes(old, new)
    self.assertFalse(change.is_regression)
    self.assertIn('fell', str(change))
    self.assertEqual(self._main(old, new), 0)

  @parameterized.parameters(
    dict(flops=8079),
    dict(temporary_bytes=8192 + 1100),
    dict(seconds=10.0, ratio=5.0, ratio_quartiles=[5.0, 6.0]),
    dict(trace_seconds=10.0, compile_seconds=10.0),
  )
  def test_within_what_is_allowed(self, **figures):
    old, new = self._changed(**figures)
    self.assertEmpty(compare.changes(old, new))
    self.assertEqual(self._main(old, new), 0)

  def test_a_missing_step_is_a_regression_and_a_new_one_is_not(self):
    old, new = _result(), _result()
    del new['steps'][3]
    for results, worse in (((old, new), True), ((new, old), False)):
      (change,) = compare.changes(*results)
      self.assertEqual(change.step, 'multi | 4 heads | naive')
      self.assertEqual(change.is_regression, worse)
      self.assertIn('no longer' if worse else 'newly', str(change))
      self.assertEqual(self._main(*results), int(worse))


class PlotsTest(absltest.TestCase):
  def test_draws_the_same_bytes(self):
    to = _folder(self)
    result = _result()
    before = copy.deepcopy(result)
    for pillar in tables.pillars(result):
      paths = [to / f'{pillar}_{i}.svg' for i in '12']
      for path in paths:
        plots.draw(result, pillar, path)
      first, second = (path.read_bytes() for path in paths)
      self.assertEqual(first, second)
      self.assertIn(b'<svg', first)
    self.assertEqual(result, before)


if __name__ == '__main__':
  absltest.main()
