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
"""A result as Markdown: a table a pillar, and how its costs grow."""

import itertools
import math
import typing as tp

Step = dict[str, tp.Any]

TITLES = {
  'multi': 'Several losses from one forward',
  'reparam': 'Parameters as functions',
  'lora': 'Weight-level LoRA',
}
# Where flops and bytes are counted, and where the time of bytes matters.
ON_GPU = 'gpu'


def pillars(result: dict) -> list[str]:
  return list(dict.fromkeys(step['pillar'] for step in result['steps']))


def page(result: dict) -> str:
  sections = [_where(result)]
  for pillar in pillars(result):
    of_pillar = [one for one in result['steps'] if one['pillar'] == pillar]
    sections.append(f'### {TITLES[pillar]}\n\n{table(result, of_pillar)}')
    grown = growth(of_pillar)
    if grown:
      sections.append(grown)
  return '\n\n'.join(sections) + '\n'


def short(
  result: dict, pillar: str, steps: tp.Sequence[str], cases: tp.Sequence[str]
) -> str:
  """A row a case: the times of some steps, to its baseline."""
  ratios: dict[tuple[str, str], float] = {
    (one['case'], one['step']): one['ratio']
    for one in result['steps']
    if one['pillar'] == pillar
  }
  lines = [['case', *steps], ['---', *['---:'] * len(steps)]]
  for case in cases:
    times = [ratios.get((case, step)) for step in steps]
    lines.append([case, *('' if t is None else f'{t:.2f}' for t in times)])
  rows = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  return f'{rows}\n\n{_where(result)}'


def _where(result: dict) -> str:
  versions = ', '.join(
    f'{name} {result[name]}'
    for name in ('flax', 'jax', 'qwix', 'paramax')
    if result.get(name)
  )
  text = (
    f'{result["date"]}, revision {result["revision"]}: {result["device"]}, '
    f'{result["cores"]} cores, load {result["load"][0]:.1f} to '
    f'{result["load"][1]:.1f}; Python {result["python"]}, {versions}.'
  )
  ceilings = result.get('ceilings')
  if ceilings:
    text += (
      f' Ceilings: {ceilings["flops"] / 1e12:.3g} Tflop/s in a matrix product, '
      f'{ceilings["bytes"] / 1e9:.3g} GB/s in a copy.'
    )
  return text


def table(result: dict, steps: list[Step]) -> str:
  """Ratios to the baseline of each case, but for counts."""
  heads = [
    'case',
    'step',
    'time',
    'quartiles',
    'flops',
    'to limit',
    'temp. bytes',
    'loops',
    'traces',
    'trace',
    'compile',
  ]
  if result['sizes'] == ON_GPU:
    heads += ['bytes to limit', 'of ceiling']
  lines = [heads, ['---', '---', *['---:'] * (len(heads) - 2)]]
  for case, group in itertools.groupby(steps, lambda one: one['case']):
    rows = list(group)
    base = baseline(rows)
    for i, step in enumerate(rows):
      lines.append([case if i == 0 else '', *_cells(result, step, base)])
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def baseline(steps: list[Step]) -> Step | None:
  return next((one for one in steps if one['step'] == one['baseline']), None)


def _cells(result: dict, step: Step, base: Step | None) -> list[str]:
  ratio, quartiles = step.get('ratio'), step.get('ratio_quartiles')
  time = '' if ratio is None else f'{ratio:.2f}'
  if step is base:
    time += f' ({seconds(step["seconds"])})'
  cells = [
    step['step'],
    time,
    '' if quartiles is None else f'{quartiles[0]:.2f}, {quartiles[1]:.2f}',
    _ratio(step, base, 'flops', '.3f'),
    _of(step.get('flops'), step.get('limit'), '.2f'),
    _ratio(step, base, 'temporary_bytes', '.2f'),
    str(step.get('loops', '')),
    str(step.get('traces', '')),
    _ratio(step, base, 'trace_seconds', '.2f'),
    _ratio(step, base, 'compile_seconds', '.2f'),
  ]
  if result['sizes'] == ON_GPU:
    cells += [
      _of(step.get('accessed_bytes'), step.get('moved_bytes'), '.2f'),
      _of(fewest_seconds(result, step), step['seconds'], '.2f'),
    ]
  return cells


def fewest_seconds(result: dict, step: Step) -> float | None:
  """The time that the work takes where one of the ceilings is reached."""
  ceilings, limit = result.get('ceilings'), step.get('whole_limit')
  if not ceilings or limit is None:
    return None
  moved = step.get('moved_bytes', 0)
  return max(limit / ceilings['flops'], moved / ceilings['bytes'])


def seconds(value: float) -> str:
  if value >= 1.0:
    return f'{value:.3g} s'
  return f'{1e3 * value:.3g} ms' if value >= 1e-3 else f'{1e6 * value:.3g} µs'


def _ratio(step: Step, base: Step | None, key: str, form: str) -> str:
  return _of(step.get(key), (base or {}).get(key), form)


def _of(value: float | None, whole: float | None, form: str) -> str:
  if value is None or not whole:
    return ''
  return f'{value / whole:{form}}'


def series(steps: list[Step]) -> dict[str, dict[str, list[Step]]]:
  """The steps of each series, by its name and theirs, as it grows."""
  found: dict[str, dict[str, list[Step]]] = {}
  for step in steps:
    if 'series' in step:
      found.setdefault(step['series'][0], {}).setdefault(
        step['step'], []
      ).append(step)
  for of_series in found.values():
    for grown in of_series.values():
      grown.sort(key=lambda one: one['series'][1])
  return found


def growth(steps: list[Step]) -> str:
  """The exponents of the costs as powers of the size, by least squares."""
  lines = [
    '| as these grow | step | flops | time | trace and compile |',
    '| --- | --- | ---: | ---: | ---: |',
  ]
  for name, of_series in series(steps).items():
    sizes = [one['series'][1] for one in next(iter(of_series.values()))]
    title = f'{name}: {", ".join(map(str, sizes))}'
    for i, (step, grown) in enumerate(of_series.items()):
      costs = (
        [one.get('flops') for one in grown],
        [one['seconds'] for one in grown],
        [
          one['trace_seconds'] + one['compile_seconds']
          for one in grown
          if 'trace_seconds' in one
        ],
      )
      exponents = [exponent(sizes, each) for each in costs]
      if not any(exponents):
        continue
      cells = ['' if one is None else f'{one:.2f}' for one in exponents]
      lines.append(
        f'| {title if i == 0 else ""} | {step} | {" | ".join(cells)} |'
      )
  return '\n'.join(lines) if len(lines) > 2 else ''


def exponent(sizes: tp.Sequence[int], costs: tp.Sequence) -> float | None:
  """The slope of the logarithms of the costs over those of the sizes."""
  if len(costs) != len(sizes) or len(sizes) < 2 or not all(costs):
    return None
  x, y = ([math.log(one) for one in values] for values in (sizes, costs))
  mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
  above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
  return above / sum((a - mean_x) ** 2 for a in x)
