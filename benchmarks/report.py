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
"""Writes what was measured: one trimmed JSON, tables, and a plot a pillar.

``python -m benchmarks.report RAW...`` reads what pytest-benchmark wrote
(``--benchmark-json``), and writes ``NAME.json``, ``NAME.md`` and
``NAME_PILLAR.svg`` into ``benchmarks/results/``, where NAME is ``cpu`` or
``gpu``, or another that is given. ``benchmarks/README.md`` shows the tables
where it has a mark of that name.
"""

import argparse
import json
import pathlib
import typing as tp

from benchmarks import tables

RESULTS = pathlib.Path(__file__).parent / 'results'
README = pathlib.Path(__file__).parent / 'README.md'

# What is kept of a step, in this order.
NOTED = (
  'pillar',
  'case',
  'step',
  'baseline',
  'series',
  'ratio',
  'ratio_quartiles',
  'flops',
  'limit',
  'whole_limit',
  'temporary_bytes',
  'moved_bytes',
  'accessed_bytes',
  'loops',
  'traces',
  'trace_seconds',
  'compile_seconds',
)


def trimmed(raws: tp.Iterable[dict]) -> dict[str, tp.Any]:
  """One result of what one or several runs of pytest-benchmark wrote."""
  raws = list(raws)
  first = raws[0]
  result = {
    **first['environment'],
    'date': first['datetime'][:10],
    'sizes': first['sizes'],
    'load': [first['load'][0], raws[-1]['load'][1]],
    'ceilings': first.get('ceilings'),
    'steps': [_step(one) for raw in raws for one in raw['benchmarks']],
  }
  return tp.cast(dict, _rounded(result))


def _step(raw: dict) -> dict[str, tp.Any]:
  info, stats = raw['extra_info'], raw['stats']
  return {
    **{key: info[key] for key in NOTED if info.get(key) is not None},
    'seconds': stats['median'],
    'rounds': stats['rounds'],
  }


def _rounded(value: tp.Any) -> tp.Any:
  """Four digits of what was measured; whole numbers as they are."""
  if isinstance(value, dict):
    return {key: _rounded(one) for key, one in value.items()}
  if isinstance(value, list):
    return [_rounded(one) for one in value]
  if isinstance(value, float):
    return int(value) if value.is_integer() else float(f'{value:.4g}')
  return value


def dumped(result: dict[str, tp.Any]) -> str:
  """JSON with a line for each step, so that changes are read by lines."""
  head = {key: value for key, value in result.items() if key != 'steps'}
  lines = json.dumps(head, indent=1)[:-2]
  steps = ',\n'.join(f'  {json.dumps(step)}' for step in result['steps'])
  return f'{lines},\n "steps": [\n{steps}\n ]\n}}\n'


def refreshed(readme: str, text: str, name: str) -> str:
  """The page with what stands between the marks of a name replaced."""
  begin, end = f'<!-- {name}: begin -->', f'<!-- {name}: end -->'
  if begin not in readme:
    return readme
  before, rest = readme.split(begin)
  return f'{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}'


def main(argv: tp.Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('raw', nargs='+', type=pathlib.Path)
  parser.add_argument('--name', help='of the result; its sizes unless given')
  parser.add_argument('--to', type=pathlib.Path, default=RESULTS)
  parser.add_argument('--no-plots', action='store_true')
  args = parser.parse_args(argv)

  result = trimmed(json.loads(path.read_text()) for path in args.raw)
  name = args.name or result['sizes']
  args.to.mkdir(parents=True, exist_ok=True)
  (args.to / f'{name}.json').write_text(dumped(result))
  page = tables.page(result)
  (args.to / f'{name}.md').write_text(page)
  if args.to == RESULTS:
    README.write_text(refreshed(README.read_text(), page, name))
  if not args.no_plots:
    from benchmarks import plots  # Not needed where matplotlib is missing.

    for pillar in tables.pillars(result):
      plots.draw(result, pillar, args.to / f'{name}_{pillar}.svg')
  print(page)


if __name__ == '__main__':
  main()
