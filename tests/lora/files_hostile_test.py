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
"""Files that are damaged, or made to do harm; writing that fails."""

import contextlib
import functools
import json
import pathlib
import resource
import signal
import struct
import tempfile

import numpy as np
import safetensors
from absl.testing import parameterized
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_ext
from tests.errors import Snapshot, cases
from tests.lora.files import (
  CONFIG,
  MODEL,
  PREFIX,
  FilesTestCase,
  Net,
  adapt,
  make,
  pair,
  same,
  write,
)

FILES = {CONFIG, MODEL}
BOTH = {**pair('lin', (3, 4)), **pair('net.lin', (4, 5), seed=3)}


@functools.cache
def good() -> dict[str, bytes]:
  """The bytes of both files of an adapter that fits ``Net``."""
  with tempfile.TemporaryDirectory() as root:
    options = {'rank_pattern': {'^lin': 2}, 'modules_to_save': ['score']}
    directory = write(pathlib.Path(root), BOTH, **options)
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def with_header(header: bytes, size: int | None = None) -> bytes:
  size = len(header) if size is None else size
  return struct.pack('<Q', size) + header + bytes(64)


def of_dtype(dtype: str, bits: int) -> bytes:
  """A file whose first array has a dtype that its shape agrees with."""
  a, b = BOTH[f'{PREFIX}lin.lora_A.weight'], BOTH[f'{PREFIX}lin.lora_B.weight']
  size = -(-a.size * bits // 8)
  header = {
    f'{PREFIX}lin.lora_A.weight': {
      'dtype': dtype,
      'shape': a.shape,
      'data_offsets': [0, size],
    },
    f'{PREFIX}lin.lora_B.weight': {
      'dtype': 'F32',
      'shape': b.shape,
      'data_offsets': [size, size + b.nbytes],
    },
  }
  text = json.dumps(header).encode()
  return struct.pack('<Q', len(text)) + text + bytes(size) + b.tobytes()


_ONE = b'{"a":{"dtype":"F32","shape":%s,"data_offsets":%s}}'

# What may stand in the place of the arrays.
DAMAGED: dict[str, bytes] = {
  'empty': b'',
  'zeros': bytes(100),
  'noise': np.random.RandomState(0).bytes(1000),
  'text': b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n',
  'zip': b'PK\x03\x04' + bytes(100),
  'pickle': b'\x80\x02}q\x00.',
  'header_of_nothing': with_header(b''),
  'header_too_long': with_header(b'{}', 2**63),
  'header_longest': with_header(b'{}', 2**64 - 1),
  'header_past_the_end': with_header(b'{}', 100),
  'header_no_json': with_header(b'{"a"'),
  'header_list': with_header(b'[]'),
  'header_deep': with_header(b'[' * 100000),
  'header_no_utf8': with_header(b'{"\xff":1}'),
  'shape_huge': with_header(_ONE % (b'[9223372036854775807,9]', b'[0,64]')),
  'shape_negative': with_header(_ONE % (b'[-1]', b'[0,4]')),
  'offsets_past_the_end': with_header(_ONE % (b'[999]', b'[0,3996]')),
  'offsets_backwards': with_header(_ONE % (b'[1]', b'[4,0]')),
  'unknown_dtype': of_dtype('Q9', 32),
  'f8_e4m3': of_dtype('F8_E4M3', 8),
  'f8_e5m2': of_dtype('F8_E5M2', 8),
  'f8_e8m0': of_dtype('F8_E8M0', 8),
  'f4': of_dtype('F4', 4),
}

_START = '{"peft_type": "LORA", "r": 2, "x": '

# What may stand in the place of the config.
CONFIGS: dict[str, bytes] = {
  'empty': b'',
  'text': b'r: 2',
  'half': good()[CONFIG][:50],
  'no_utf8': b'{"peft_type": "LORA\xff"}',
  'utf16': '{"peft_type": "LORA"}'.encode('utf-16'),
  'null': b'null',
  'list': b'[]',
  'number': b'3',
  'string': b'"LORA"',
  'deep': (_START + '[' * 100000).encode(),
  'deep_objects': (_START + '{"a":' * 100000).encode(),
  'deep_and_closed': (_START + '[' * 50000 + ']' * 50000 + '}').encode(),
  'long_number': (_START + '9' * 10000 + '}').encode(),
  'long_rank': b'{"peft_type": "LORA", "r": ' + b'9' * 4000 + b'}',
  'repeated': b'{"peft_type": "LORA", "peft_type": "ADALORA"}',
}

# Patterns that are no regular expressions, or that take for ever.
PATTERNS: dict[str, str] = {
  'nested': '(a+)+$',
  'nested_any': '(.*)*#',
  'nested_braces': '(.{1,9}){1,9}#',
  'alternatives': '(.|.)*#',
  'many': '.*' * 30 + '#',
  'optional': '(.|.?)' * 30 + '#',
  'optional_groups': '((.?.?)?(.?.?)?)?' * 12 + '#',
  'alternative_groups': '(.|..|...)' * 30 + '#',
  'lookahead': '(?=(.*)*#)',
  'unbalanced': '(',
  'closing': 'lin)|(lin',
  'nothing_to_repeat': '*',
  'no_group': '\\2',
  'flags_within': '(?i)lin',
  'verbose_within': '(?x)lin',
  'set_in_a_set': '[[a]',
  'too_often': 'l{99999999999}',
  'too_long': 'x' * 100000,
  'too_deep': '(' * 5000 + ')' * 5000,
  'look_behind': '(?<=a+)b',
}


@contextlib.contextmanager
def within(seconds: float):
  """Raises in the midst of what takes longer; ``re`` looks for signals."""

  def stop(*_):
    raise TimeoutError(f'took longer than {seconds} seconds')

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Long(nnx.Module):
  """A name that is long enough for patterns to try much on."""

  def __init__(self, rngs):
    self.encoder_layer_attention_self_query = nnx.Linear(3, 4, rngs=rngs)


class DamagedTest(FilesTestCase):
  def setUp(self):
    super().setUp()
    self.directory.mkdir()
    for name, data in good().items():
      (self.directory / name).write_bytes(data)
    self.model = make(Net)

  def not_loaded(self, error: type[Exception], *words: str):
    before = Snapshot(self.model)
    with self.refused(error, 'load_lora', *words) as caught:
      nnx_ext.load_lora(self.model, self.directory)
    before.check(self)
    self.assertLess(len(str(caught.exception)), 2000)

  def test_not_damaged(self):
    nnx_ext.load_lora(self.model, self.directory)

  @cases(DAMAGED)
  def test_arrays(self, case):
    (self.directory / MODEL).write_bytes(DAMAGED[case])
    self.not_loaded(ValueError, MODEL)

  @cases(CONFIGS)
  def test_config(self, case):
    (self.directory / CONFIG).write_bytes(CONFIGS[case])
    self.not_loaded(ValueError, CONFIG)

  @parameterized.product(depth=[500, 900, 950, 960, 970, 980, 990, 2000, 5000])
  def test_config_as_deep_as_it_is_read(self, depth):
    # Whether it is too deep to be read or not: no other kind of error.
    deep = '[' * depth + ']' * depth
    for key in ('bias', 'r', 'rank_pattern', 'modules_to_save'):
      text = f'{{"peft_type": "LORA", "{key}": {deep}}}'
      (self.directory / CONFIG).write_text(text)
      self.not_loaded(ValueError, CONFIG)

  def test_truncated_arrays(self):
    data = good()[MODEL]
    for length in (*range(0, 40), *range(40, len(data), 37), len(data) - 1):
      (self.directory / MODEL).write_bytes(data[:length])
      self.not_loaded(ValueError, MODEL)

  def test_bytes_behind_the_arrays(self):
    (self.directory / MODEL).write_bytes(good()[MODEL] + b'\0')
    self.not_loaded(ValueError, MODEL, 'damaged')

  def test_truncated_config(self):
    data = good()[CONFIG]
    for length in range(0, len(data), 5):
      (self.directory / CONFIG).write_bytes(data[:length])
      self.not_loaded(ValueError, CONFIG)

  @cases(PATTERNS, key=['rank_pattern', 'alpha_pattern'])
  def test_pattern(self, case, key):
    self.model = make(Long)
    arrays = pair('encoder_layer_attention_self_query', (3, 4))
    write(self.directory, arrays, **{key: {PATTERNS[case]: 2}})
    with within(5.0):
      self.not_loaded(ValueError, CONFIG, key)

  @parameterized.product(
    pattern=[
      'q_proj',
      r'^encoder\.layer\.0\.query',
      r'encoder\.layer\.\d+\.(query|key|value)',
      r'.*attention.*(q|k|v)_proj',
      r'model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12)\.mlp\.(up|down)_proj',
      r'[a-z]+\.[0-9]+\.lin(ear)?',
      '',
    ]
  )
  def test_pattern_that_people_write(self, pattern):
    write(
      self.directory,
      BOTH,
      rank_pattern={pattern: 2},
      alpha_pattern={pattern: 3},
    )
    nnx_ext.load_lora(self.model, self.directory)

  @parameterized.product(name=[CONFIG, MODEL])
  def test_file_that_is_not_there(self, name):
    (self.directory / name).unlink()
    self.not_loaded(FileNotFoundError, name, str(self.directory), 'save')

  @parameterized.product(name=[CONFIG, MODEL])
  def test_directory_in_the_place_of_a_file(self, name):
    (self.directory / name).unlink()
    (self.directory / name).mkdir()
    before = Snapshot(self.model)
    with self.assertRaisesRegex((ValueError, OSError), f'^load_lora.*{name}'):
      nnx_ext.load_lora(self.model, self.directory)
    before.check(self)

  def test_pickled_arrays_only(self):
    (self.directory / MODEL).rename(self.directory / 'adapter_model.bin')
    words = MODEL, 'adapter_model.bin', 'safe_serialization=True'
    self.not_loaded(FileNotFoundError, *words)

  @parameterized.product(place=['nothing', 'a_file'])
  def test_no_directory(self, place):
    (self.root / 'a_file').write_text('')
    self.assertFalse((self.root / 'nothing').exists())
    with self.assertRaisesRegex((ValueError, OSError), '^load_lora'):
      nnx_ext.load_lora(self.model, f'{self.root}/{place}')

  @settings(derandomize=True, deadline=None, database=None, max_examples=150)
  @given(st.data())
  def test_flipped_bytes(self, data):
    files = {name: bytearray(content) for name, content in good().items()}
    name = data.draw(st.sampled_from([CONFIG, MODEL]))
    content = files[name]
    # Most of what can go wrong stands in the header.
    end = len(content) if name == CONFIG else len(content) - 200
    for _ in range(data.draw(st.integers(1, 4))):
      at = data.draw(st.integers(0, end - 1))
      content[at] = data.draw(st.integers(0, 255))
    for name, content in files.items():
      (self.directory / name).write_bytes(content)
    before = Snapshot(self.model)
    with contextlib.suppress(ValueError, FileNotFoundError):
      loaded = nnx_ext.load_lora(self.model, self.directory)
      self.assertIsNot(loaded, self.model)
    before.check(self)


@contextlib.contextmanager
def disk_full_after(size: int):
  """As if there were room for files of this many bytes only."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class WritingTest(FilesTestCase):
  def setUp(self):
    super().setUp()
    self.base = make(Net)
    self.model = adapt(self.base)

  def files(self):
    return {p.name: p.read_bytes() for p in self.directory.iterdir()}

  @parameterized.product(size=[0, 100, 600])
  def test_full_disk(self, size):
    # Room for no file, for a part of the arrays, and for them alone.
    self.saved(self.model)
    before = self.files()
    sizes = {name: len(data) for name, data in before.items()}
    self.assertLess(sizes[MODEL], 600)
    self.assertGreater(sizes[CONFIG], 600)
    other = adapt(self.base, rank=1)
    with self.assertRaises((OSError, safetensors.SafetensorError)):
      with disk_full_after(size):
        nnx_ext.save_lora(other, self.directory)
    self.assertEqual(self.files(), before)
    same(nnx_ext.load_lora(self.base, self.directory), self.model)

  @parameterized.product(name=[CONFIG, MODEL])
  def test_directory_in_the_place_of_a_file(self, name):
    (self.directory / name).mkdir(parents=True)
    with self.assertRaises(OSError):
      nnx_ext.save_lora(self.model, self.directory)
    self.assertLessEqual({p.name for p in self.directory.iterdir()}, FILES)

  def test_file_in_the_place_of_the_directory(self):
    self.directory.write_text('mine')
    with self.assertRaises(OSError):
      nnx_ext.save_lora(self.model, self.directory)
    self.assertEqual(self.directory.read_text(), 'mine')

  def test_other_files_are_left(self):
    self.directory.mkdir()
    (self.directory / 'README.md').write_text('mine')
    self.saved(self.model)
    self.assertEqual(self.files()['README.md'], b'mine')
    self.assertEqual(set(self.files()), FILES | {'README.md'})
