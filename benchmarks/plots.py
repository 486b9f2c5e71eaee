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
"""A plot a pillar: ratios to the baselines, and costs as they grow."""

import math
import pathlib
import typing as tp

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import tables

# The same bytes for the same numbers.
matplotlib.rcParams['svg.hashsalt'] = 'nnx_ext'
MARKERS = 'os^DvPX*<>'
RATIOS = 0.1, 0.25, 0.5, 1, 2, 4, 16, 64, 256, 1024


def draw(result: dict, pillar: str, path: pathlib.Path) -> None:
  steps = [one for one in result['steps'] if one['pillar'] == pillar]
  names = list(dict.fromkeys(one['step'] for one in steps))
  # Colours and marks go to steps in the order of the table; ours come first.
  styles = {
    name: dict(color=f'C{i % 10}', marker=MARKERS[i % len(MARKERS)])
    for i, name in enumerate(names)
  }
  cases = list(dict.fromkeys(one['case'] for one in steps))
  grown = tables.series(steps)
  rows = math.ceil(len(grown) / 2)
  heights = [0.24 * len(cases) + 0.6, *[2.8] * rows]
  figure = Figure(figsize=(9, sum(heights) + 1.0), layout='constrained')
  upper, *lower = (
    figure.subfigures(1 + rows, 1, height_ratios=heights)[:]
    if rows
    else (figure.subfigures(1, 1),)
  )
  time, flops = upper.subplots(1, 2, sharey=True)
  _ratios(time, steps, cases, styles, lambda step, base: step.get('ratio'))
  _ratios(flops, steps, cases, styles, _flops)
  time.set_xlabel('time, to the baseline of the case')
  flops.set_xlabel('flops, to the baseline of the case')
  time.set_yticks(range(len(cases)), cases)
  time.set_ylim(len(cases) - 0.5, -0.5)
  for row, part in enumerate(lower):
    pair = list(grown.items())[2 * row : 2 * row + 2]
    for axes, (name, of_series) in zip(part.subplots(1, 2), pair):
      _growth(axes, name, of_series, styles)
    for axes in part.axes[len(pair) :]:
      axes.set_visible(False)
  handles = [
    time.plot([], [], linestyle='', label=name, **style)[0]
    for name, style in styles.items()
  ]
  figure.legend(
    handles=handles, loc='outside upper center', ncols=5, frameon=False
  )
  figure.savefig(path, metadata={'Date': None})


def _flops(step: dict, base: dict | None) -> float | None:
  if base is None or not base.get('flops') or 'flops' not in step:
    return None
  return step['flops'] / base['flops']


def _ratios(
  axes: Axes,
  steps: list[dict],
  cases: list[str],
  styles: dict[str, dict],
  ratio: tp.Callable[[dict, dict | None], float | None],
) -> None:
  """A row a case, a mark a step."""
  for row, case in enumerate(cases):
    of_case = [one for one in steps if one['case'] == case]
    base = tables.baseline(of_case)
    for step in reversed(of_case):
      value = ratio(step, base)
      if value is not None:
        axes.plot(value, row, markersize=5, alpha=0.85, **styles[step['step']])
  low, high = axes.get_xlim()
  low, high = min(low, 0.4), max(high, 2.5)  # ratios near 1 look near 1
  axes.set_xlim(low, high)
  axes.axvline(1.0, color='0.6', linewidth=0.8, zorder=0)
  axes.set_xscale('log')
  _plain_numbers(axes.xaxis)
  axes.set_xticks([x for x in RATIOS if low <= x <= high])
  axes.grid(axis='x', alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)


def _growth(
  axes: Axes, name: str, of_series: dict[str, list[dict]], styles: dict
) -> None:
  sizes = set()
  for step, grown in of_series.items():
    sizes |= {one['series'][1] for one in grown}
    axes.plot(
      [one['series'][1] for one in grown],
      [1e3 * one['seconds'] for one in grown],
      markersize=5,
      linewidth=1,
      **styles[step],
    )
  axes.set_xscale('log', base=2)
  axes.set_yscale('log')
  axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  for axis in (axes.xaxis, axes.yaxis):
    _plain_numbers(axis)
  axes.set_xticks(sorted(sizes))
  axes.set_xlabel(name)
  axes.set_ylabel('ms')
  axes.grid(alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)


def _plain_numbers(axis: tp.Any) -> None:
  axis.set_major_formatter(FuncFormatter(lambda x, _: f'{x:g}'))
  axis.set_minor_locator(NullLocator())
