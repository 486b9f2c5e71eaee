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
"""What an adapter_config.json says of an adapter, read and written."""

import collections
import dataclasses
import json
import math
import pathlib
import re
import typing as tp
import warnings

FILE = 'adapter_config.json'

# What PEFT 0.21 takes for a key that is not there.
_DEFAULTS: dict[str, tp.Any] = {
  'r': 8,
  'lora_alpha': 8,
  'lora_dropout': 0.0,
  'use_rslora': False,
  'use_dora': False,
  'rank_pattern': {},
  'alpha_pattern': {},
  'modules_to_save': None,
}
# The rest of what PEFT writes.
_WRITTEN: dict[str, tp.Any] = {
  'alora_invocation_tokens': None,
  'arrow_config': None,
  'auto_mapping': None,
  'base_model_name_or_path': None,
  'bias': 'none',
  'corda_config': None,
  'ensure_weight_tying': False,
  'eva_config': None,
  'exclude_modules': None,
  'fan_in_fan_out': False,
  'inference_mode': True,
  'init_lora_weights': True,
  'layer_replication': None,
  'layers_pattern': None,
  'layers_to_transform': None,
  'loftq_config': {},
  'lora_bias': False,
  'megatron_config': None,
  'megatron_core': 'megatron.core',
  'peft_type': 'LORA',
  'qalora_group_size': 16,
  'revision': None,
  'target_parameters': None,
  'task_type': None,
  'trainable_token_indices': None,
  'use_qalora': False,
}
# What changes the numbers and has no counterpart here, and where it does not.
_HARMLESS: dict[str, tuple] = {
  'alora_invocation_tokens': (None,),
  'arrow_config': (None,),
  'bias': ('none',),
  'kasa_config': (None,),
  'layer_replication': (None,),
  'lora_bias': (False,),
  'megatron_config': (None,),
  'monteclora_config': (None,),
  'target_parameters': (None, []),
  'trainable_token_indices': (None,),
  'use_bdlora': (None, False),
  'use_qalora': (False,),
}
_CHANGED_BASE = ('pissa', 'olora', 'corda', 'loftq', 'lora_ga')


@dataclasses.dataclass(frozen=True)
class Config:
  """The part of a config that says how an adapter computes."""

  r: int
  lora_alpha: float
  lora_dropout: float
  use_rslora: bool
  use_dora: bool
  rank_pattern: dict[str, int]
  alpha_pattern: dict[str, float]
  modules_to_save: tuple[str, ...]

  def rank_of(self, name: str) -> int:
    """The rank of a module of this dotted name."""
    return _first(self.rank_pattern, name, self.r)

  def alpha_of(self, name: str) -> float:
    """The numerator of the scale of a module of this dotted name."""
    return _first(self.alpha_pattern, name, self.lora_alpha)


def _first(patterns: dict[str, tp.Any], name: str, default: tp.Any) -> tp.Any:
  for pattern, value in patterns.items():
    if re.match(rf'(.*\.)?({pattern})$', name):
      return value
  return default


def text(
  adapted: dict[str, tuple[int, float]],
  known: tp.Iterable[str],
  modules_to_save: tp.Sequence[str],
  **shared: tp.Any,
) -> str:
  """The config of modules by name, each with its rank and alpha.

  ``known`` are the names of all modules that could be adapted, of which only
  those in ``adapted`` are.
  """
  ranks = {name: rank for name, (rank, _) in adapted.items()}
  alphas = {name: _plain(alpha) for name, (_, alpha) in adapted.items()}
  rank, rank_pattern = _most_and_others(ranks)
  alpha, alpha_pattern = _most_and_others(alphas)
  config = {
    **_WRITTEN,
    **shared,
    'r': rank,
    'lora_alpha': alpha,
    'rank_pattern': rank_pattern,
    'alpha_pattern': alpha_pattern,
    'target_modules': _targets(sorted(adapted), known),
    'modules_to_save': list(modules_to_save) or None,
  }
  return json.dumps(config, indent=2, sort_keys=True)


def _most_and_others(values: dict[str, tp.Any]) -> tuple[tp.Any, dict]:
  """The value that most have, and a pattern for each that has another."""
  if not values:
    return 8, {}
  (most, _), *_ = collections.Counter(values.values()).most_common(1)
  others = {n: value for n, value in values.items() if value != most}
  return most, {f'^{re.escape(n)}': value for n, value in others.items()}


def _targets(names: list[str], known: tp.Iterable[str]) -> list[str] | str:
  """A list of names, or a regular expression where a list would match more.

  PEFT adapts each module whose name ends in a name of the list.
  """
  others = set(known) - set(names)
  if any(other.endswith(f'.{n}') for other in others for n in names):
    return '|'.join(map(re.escape, names))
  return names


def _plain(number: float) -> float | int:
  return int(number) if number == int(number) else number


def read(api: str, directory: pathlib.Path) -> Config:
  """The config in a directory, each value checked."""
  path = directory / FILE
  try:
    text = path.read_text(encoding='utf-8')
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f'{api}: there is no {FILE} in {str(directory)!r}; it and '
      'adapter_model.safetensors are what save_lora and PEFT write.'
    ) from error
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{api}: {path} cannot be read: {error}.') from error
  try:
    found = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{api}: {path} is not JSON: {error}.') from error
  if not isinstance(found, dict):
    raise ValueError(
      f'{api}: {path} must hold a JSON object, got a {type(found).__name__}.'
    )
  fail = _Failure(api, path)
  _refuse(fail, found)
  values = {key: found.get(key, default) for key, default in _DEFAULTS.items()}
  rank, alpha = values['r'], values['lora_alpha']
  fail.unless('r', rank, _is_rank(rank), 'an int of at least 1')
  fail.unless('lora_alpha', alpha, _is_alpha(alpha), 'a positive number')
  dropout = values['lora_dropout']
  is_rate = _is_number(dropout) and 0 <= dropout < 1
  fail.unless('lora_dropout', dropout, is_rate, 'a number in [0, 1)')
  for key in ('use_rslora', 'use_dora'):
    is_flag = isinstance(values[key], bool)
    fail.unless(key, values[key], is_flag, 'true or false')
  checks = {'rank_pattern': _is_rank, 'alpha_pattern': _is_alpha}
  for key, is_value in checks.items():
    patterns = values[key] = values[key] or {}
    fail.unless(key, patterns, isinstance(patterns, dict), 'an object')
    for pattern, value in patterns.items():
      name = f'{key}[{pattern[:80]!r}]'
      fail.unless(name, value, is_value(value), 'a number')
      _check_pattern(fail, key, pattern)
  saved = values['modules_to_save'] or []
  is_names = isinstance(saved, list) and all(isinstance(s, str) for s in saved)
  fail.unless('modules_to_save', saved, is_names, 'a list of names')
  return Config(**{**values, 'modules_to_save': tuple(saved)})


@dataclasses.dataclass(frozen=True)
class _Failure:
  api: str
  path: pathlib.Path

  def unless(self, key: str, value: tp.Any, right: bool, wanted: str):
    if not right:
      raise ValueError(
        f'{self.api}: {key} in {self.path} must be {wanted}, got '
        f'{repr(value)[:80]}.'
      )


def _refuse(fail: _Failure, found: dict[str, tp.Any]):
  """Raises for what this package cannot compute as PEFT does."""
  kind = found.get('peft_type')
  fail.unless('peft_type', kind, kind == 'LORA', "'LORA'")
  for key, values in _HARMLESS.items():
    value = found.get(key, values[0])
    if value not in values:
      raise ValueError(
        f'{fail.api}: {fail.path} has {key}={repr(value)[:80]}, which changes '
        'what an adapter computes and cannot be loaded here; train it with '
        f'{key}={values[0]!r}.'
      )
  start = found.get('init_lora_weights', True)
  if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
    raise ValueError(
      f'{fail.api}: {fail.path} has init_lora_weights={start[:40]!r}, for '
      'which PEFT has changed the base weights. Save it as a plain adapter, '
      'with path_initial_model_for_weight_conversion in save_pretrained.'
    )


def _check_pattern(fail: _Failure, key: str, pattern: str):
  """Raises for what is no regular expression, or might never end."""
  # How often it might be tried on a name, about.
  choices = math.prod(p.count('|') + 1 for p in re.split(r'[()]', pattern))
  repeats = len(re.findall(r'[*+{]', pattern))
  tries = choices * 2 ** pattern.count('?') * 10**repeats
  if re.search(r'\)[*+{]', pattern) or tries > 1e5 or len(pattern) > 1000:
    raise ValueError(
      f'{fail.api}: {key} in {fail.path} has the key {pattern[:80]!r}, which '
      'repeats too much to be tried safely; give names of modules.'
    )
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      re.compile(pattern)
      re.compile(rf'(.*\.)?({pattern})$')  # as it will be used
  except (re.error, RecursionError, OverflowError, Warning) as error:
    raise ValueError(
      f'{fail.api}: {key} in {fail.path} has the key {pattern[:80]!r}, which '
      f'is not a regular expression: {error}.'
    ) from error


def _is_number(x: tp.Any) -> bool:
  is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
  return is_number and -1e300 < x < 1e300


def _is_rank(x: tp.Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool) and 0 < x < 2**31


def _is_alpha(x: tp.Any) -> bool:
  return _is_number(x) and x > 0
