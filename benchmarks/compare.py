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
"""Compares two results by what repeats: flops, bytes, loops and traces.

``python -m benchmarks.compare OLD.json NEW.json`` prints what changed, and
fails if anything grew or is no longer measured. Times are not compared: they
differ from run to run and from machine to machine.
"""

import argparse
import json
import pathlib
import sys
import typing as tp

# By how much a figure may grow: relative, and absolute.
ALLOWED = {
  'flops': (0.01, 0),
  'temporary_bytes': (0.02, 1024),
  'loops': (0.0, 0),
  'traces': (0.0, 0),
}
# What has to agree for figures to be comparable.
SAME = ('sizes', 'jax', 'flax')


class Change(tp.NamedTuple):
  step: str
  figure: str
  old: float | None
  new: float | None

  @property
  def is_regression(self) -> bool:
    if self.old is None:
      return False
    return self.new is None or self.new > self.old

  def __str__(self) -> str:
    if self.old is None or self.new is None:
      return (
        f'{self.step}: {"no longer" if self.new is None else "newly"} there'
      )
    kind = 'grew' if self.is_regression else 'fell'
    return f'{self.step}: {self.figure} {kind} from {self.old} to {self.new}'


def changes(old: dict, new: dict) -> list[Change]:
  """What differs by more than is allowed, in the order of the old result."""
  before, after = _by_name(old), _by_name(new)
  found = []
  for name in [*before, *(one for one in after if one not in before)]:
    if name not in before or name not in after:
      there = [1 if name in steps else None for steps in (before, after)]
      found.append(Change(name, 'step', *there))
      continue
    for figure, (relative, absolute) in ALLOWED.items():
      values = before[name].get(figure), after[name].get(figure)
      if None in values:
        continue
      if abs(values[1] - values[0]) > relative * values[0] + absolute:
        found.append(Change(name, figure, *values))
  return found


def _by_name(result: dict) -> dict[str, dict]:
  return {
    f'{one["pillar"]} | {one["case"]} | {one["step"]}': one
    for one in result['steps']
  }


def main(argv: tp.Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('old', type=pathlib.Path)
  parser.add_argument('new', type=pathlib.Path)
  args = parser.parse_args(argv)
  old, new = (json.loads(path.read_text()) for path in (args.old, args.new))
  for key in SAME:
    if old[key] != new[key]:
      print(f'note: {key} {old[key]} and {new[key]} are compared')
  found = changes(old, new)
  for change in found:
    print(change)
  worse = sum(change.is_regression for change in found)
  print(f'{worse} regressions, {len(found) - worse} other changes')
  return 1 if worse else 0


if __name__ == '__main__':
  sys.exit(main())
