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
"""Errors of LoRA: the words a user needs, and spellings that then work.

Errors leave the model that was given as it was: the same Variables, with the
same arrays. Those of layers are in ``errors_layers_test``, those of files in
``files_errors_test``.
"""

import re
import tempfile
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.errors import cases
from tests.lora.errors import (
  APPLIES,
  LoRATestCase,
  Net,
  apply_lora,
  linear,
  plain,
  spelled,
)

# Options, the error, its words, and the option whose spelling then works.
WRONG_OPTIONS: dict[str, tuple[dict, type[Exception], tuple, str]] = {
  'rank_zero': ({'rank': 0}, ValueError, ('at least 1', 'got 0'), 'rank'),
  'rank_negative': ({'rank': -3}, ValueError, ('at least 1', '-3'), 'rank'),
  'rank_float': ({'rank': 2.0}, TypeError, ('an int', 'float (2.0)'), 'rank'),
  'rank_text': ({'rank': '8'}, TypeError, ('an int', "str ('8')"), 'rank'),
  'rank_bool': ({'rank': True}, TypeError, ('an int', 'bool (True)'), 'rank'),
  'rank_none': ({'rank': None}, TypeError, ('an int', 'NoneType'), 'rank'),
  'rank_array': ({'rank': np.ones(2)}, TypeError, ('int', '(2,)'), 'rank'),
  'alpha_zero': ({'alpha': 0}, ValueError, ('`alpha`', 'positive', '0'), ''),
  'alpha_negative': ({'alpha': -1.5}, ValueError, ('`alpha`', '-1.5'), ''),
  'alpha_nan': ({'alpha': np.nan}, ValueError, ('`alpha`', 'nan'), ''),
  'alpha_infinite': (
    {'alpha': np.inf},
    ValueError,
    ('`alpha`', 'finite', 'inf', 'defaults to the rank, 2'),
    '',
  ),
  'alpha_text': ({'alpha': '1'}, TypeError, ('`alpha`', "'1'"), 'alpha'),
  'alpha_bool': ({'alpha': True}, TypeError, ('`alpha`', 'True'), 'alpha'),
  'alpha_complex': ({'alpha': 1j}, TypeError, ('`alpha`', '1j'), 'alpha'),
  'alpha_array': (
    {'alpha': jnp.float32(2)},
    TypeError,
    ('`alpha`', 'float32', 'static'),
    'alpha',
  ),
  'dropout_one': (
    {'dropout': 1.0},
    ValueError,
    ('`dropout`', 'probability', 'less than 1', '1.0'),
    '',
  ),
  'dropout_negative': ({'dropout': -0.1}, ValueError, ('`dropout`',), ''),
  'dropout_nan': ({'dropout': np.nan}, ValueError, ('`dropout`', 'nan'), ''),
  'dropout_text': (
    {'dropout': 'no'},
    TypeError,
    ('`dropout`', "str ('no')"),
    'dropout',
  ),
  'dropout_none': ({'dropout': None}, TypeError, ('NoneType',), 'dropout'),
  'rslora': (
    {'rslora': 1},
    TypeError,
    ('`rslora`', 'True or False', 'int (1)'),
    '',
  ),
  'dora': ({'dora': 'yes'}, TypeError, ('`dora`', 'True', "str ('yes')"), ''),
  'init_misspelt': (
    {'init': 'Pissa'},
    ValueError,
    ('`init`', "'Pissa'", "Did you mean 'pissa'", 'olora', 'orthogonal'),
    '',
  ),
  'init_other': (
    {'init': nnx.initializers.zeros},
    ValueError,
    ('`init`', 'None', 'pissa'),
    '',
  ),
  'init_and_a': (
    {'init': 'pissa', 'a_initializer': nnx.initializers.zeros},
    ValueError,
    ('`init`', '`a_initializer`', "init='pissa'", 'one of them'),
    '',
  ),
  'init_and_b': (
    {'init': 'orthogonal', 'b_initializer': nnx.initializers.zeros},
    ValueError,
    ('`init`', '`b_initializer`', "init='orthogonal'"),
    '',
  ),
  'orthogonal_odd': (
    {'init': 'orthogonal', 'rank': 3},
    ValueError,
    ("init='orthogonal'", 'rank`', 'even', 'got 3'),
    '',
  ),
  'a_initializer': (
    {'a_initializer': 'zeros'},
    TypeError,
    ('`a_initializer`', 'nnx.initializers.he_uniform()', "'zeros'"),
    '',
  ),
  'b_initializer': (
    {'b_initializer': 0.0},
    TypeError,
    ('`b_initializer`', 'nnx.initializers', '0.0'),
    '',
  ),
  'param_dtype_int': (
    {'param_dtype': jnp.int32},
    TypeError,
    ('param_dtype`', 'jnp.float32', 'int32'),
    '',
  ),
  'param_dtype_text': (
    {'param_dtype': 'float99'},
    TypeError,
    ('param_dtype`', 'jnp.float32', "'float99'"),
    '',
  ),
  'param_dtype_number': (
    {'param_dtype': 32},
    TypeError,
    ('param_dtype`', 'jnp.float32', '32'),
    '',
  ),
}

TOO_HIGH = {
  init: (
    {'init': init, 'rank': 5},
    ValueError,
    (f"init='{init}'", 'has 3', 'rank 5', 'smaller rank'),
    '',
  )
  for init in ('pissa', 'olora')
}

CONSTRUCTORS: dict[str, tuple] = {
  'LoRALinear': (3, 4),
  'LoRALinearGeneral': (3, (2, 2)),
  'LoRAEinsum': ('bd,dk->bk', (3, 4)),
  'LoRAConv': (3, 4, 3),
  'LoRAConvTranspose': (3, 4, 3),
  'LoRAEmbed': (3, 4),
}


def construct(name: str, *args, **options):
  rename = {'rank': 'lora_rank', 'param_dtype': 'lora_param_dtype'}
  options = {rename.get(key, key): value for key, value in options.items()}
  args = args or CONSTRUCTORS[name]
  return getattr(nnx_ext, name)(
    *args, **{'lora_rank': 2, 'rngs': nnx.Rngs(0), **options}
  )


class OptionsTest(LoRATestCase):
  @cases(WRONG_OPTIONS | TOO_HIGH, api=list(APPLIES))
  def test_option(self, case, api):
    options, error, words, spelling = (WRONG_OPTIONS | TOO_HIGH)[case]
    model = plain()
    with self.kept(model, error, api, *words) as caught:
      APPLIES[api](model, **options)
    if spelling:
      APPLIES[api](model, **spelled(str(caught.exception), spelling))

  @cases(WRONG_OPTIONS | TOO_HIGH)
  def test_constructor(self, case):
    options, error, words, spelling = (WRONG_OPTIONS | TOO_HIGH)[case]
    with self.refused(error, 'LoRALinear', *words) as caught:
      construct('LoRALinear', **options)
    if spelling:
      name = 'lora_rank' if spelling == 'rank' else spelling
      construct('LoRALinear', **spelled(str(caught.exception), name))

  @cases(WRONG_OPTIONS)
  def test_in_patterns(self, case):
    options, error, words, spelling = WRONG_OPTIONS[case]
    filter, model = nnx.PathContains('out'), plain()
    words = ('`patterns`', "PathContains('out'", *words)
    with self.kept(model, error, 'apply_lora', *words) as caught:
      apply_lora(model, patterns={filter: options})
    if spelling:
      right = spelled(str(caught.exception), spelling)
      apply_lora(model, patterns={filter: right})

  @parameterized.product(name=list(CONSTRUCTORS))
  def test_every_constructor(self, name):
    with self.refused(ValueError, name, '`lora_rank`', '0', 'lora_rank=8'):
      construct(name, rank=0)
    with self.refused(ValueError, name, '`dropout`', 'less than 1', '1.0'):
      construct(name, dropout=1.0)
    construct(name, rank=1, dropout=0.5)

  @parameterized.product(name=list(CONSTRUCTORS))
  def test_no_rank(self, name):
    with self.assertRaisesRegex(TypeError, 'lora_rank'):
      getattr(nnx_ext, name)(*CONSTRUCTORS[name], rngs=nnx.Rngs(0))

  def test_einsum_constructor(self):
    with self.refused(ValueError, 'LoRAEinsum', "'bd,dd->bd'", 'diagonal'):
      construct('LoRAEinsum', 'bd,dd->bd', (3, 3))
    with self.refused(ValueError, 'LoRAEinsum', "'bd,dk->bdk'", 'sums over no'):
      construct('LoRAEinsum', 'bd,dk->bdk', (3, 4))

  @parameterized.product(
    rngs=[0, None, jax.random.key(0), {'params': 0}, nnx.RngStream]
  )
  def test_rngs(self, rngs):
    model = plain()
    words = '`rngs`', 'nnx.Rngs(0)'
    with self.kept(model, TypeError, 'apply_lora', *words):
      apply_lora(model, rngs=rngs)

  @parameterized.product(streams=[{}, {'dropout': 0}])
  def test_rngs_without_params(self, streams):
    model, rngs = plain(), nnx.Rngs(**streams)
    words = '`rngs`', "'params'", 'nnx.Rngs(0)'
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(model, rngs=rngs)

  def test_rank_too_high_of_a_pattern(self):
    patterns = {nnx.PathContains('out'): {'rank': 4, 'init': 'pissa'}}
    words = "'out'", "init='pissa'", '(4, 3)', 'rank 4'
    model = plain()
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(model, patterns=patterns)
    patterns[nnx.PathContains('out')]['rank'] = 3
    apply_lora(model, patterns=patterns)


# Filters that match no layer, and the words of the error.
NO_MATCH: dict[str, tuple[tp.Any, tuple]] = {
  'misspelt': (
    nnx.PathContains('qurey'),
    ("PathContains('qurey'", "Did you mean 'query' for 'qurey'"),
  ),
  'misspelt_in_any': (
    nnx.Any(nnx.PathContains('qurey'), nnx.PathContains('oot')),
    ("'query' for 'qurey'", "'out' for 'oot'"),
  ),
  'class': (nnx.Conv, ('Conv',)),
  'variable': (nnx.LoRAParam, ('LoRAParam',)),
  'tag': ('query', ("'query'",)),
  'none': (None, ('None',)),
  'false': (False, ('False',)),
  'path': (nnx.filterlib.PathIn(('net', 'query')), ('PathIn',)),
  'predicate': (lambda path, module: 'head' in path, ('lambda',)),
}

WRONG_FILTERS: dict[str, tuple[tp.Any, str]] = {
  'number': (3.5, 'float (3.5)'),
  'int': (1, 'int (1)'),
  'dict': ({'query': 2}, 'a dict of 1'),
  'array': (jnp.ones(2), 'float32 of shape (2,)'),
}


class FiltersTest(LoRATestCase):
  @cases(NO_MATCH, api=list(APPLIES))
  def test_targets_match_nothing(self, case, api):
    filter, words = NO_MATCH[case]
    model = plain()
    words = ('`targets`', 'matches none', "'out', 'query'", *words)
    with self.kept(model, ValueError, api, *words) as caught:
      APPLIES[api](model, targets=filter)
    for near in re.findall(r"Did you mean '(\w+)'", str(caught.exception)):
      APPLIES[api](model, targets=nnx.PathContains(near))

  @cases(NO_MATCH)
  def test_pattern_matches_nothing(self, case):
    filter, words = NO_MATCH[case]
    model = plain()
    words = ('`patterns`', 'matches none', "'out', 'query'", *words)
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(model, patterns={filter: {'rank': 1}})

  @cases(WRONG_FILTERS, api=list(APPLIES))
  def test_no_filter(self, case, api):
    filter, got = WRONG_FILTERS[case]
    model = plain()
    words = '`targets`', 'filter', "nnx.PathContains('query')", got
    with self.kept(model, TypeError, api, *words):
      APPLIES[api](model, targets=filter)
    APPLIES[api](model, targets=nnx.PathContains('query'))

  def test_many_layers(self):
    layers = [linear() for _ in range(11)]
    with self.refused(ValueError, 'apply_lora', "'layers/7'", '3 more'):
      apply_lora(nnx.Sequential(*layers), targets=nnx.Conv)

  def test_pattern_outside_of_targets(self):
    model = plain()
    words = '`patterns`', "'out'", '`targets` chose', "'query'"
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(
        model,
        targets=nnx.PathContains('query'),
        patterns={nnx.PathContains('out'): {'rank': 1}},
      )

  def test_pattern_behind_one_that_matches_all(self):
    words = '`patterns`', "'out'", 'earlier patterns', 'none'
    model = plain()
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(
        model,
        patterns={
          nnx.Linear: {'rank': 1},
          nnx.PathContains('out'): {'rank': 3},
        },
      )

  @parameterized.product(
    given=[[(nnx.Linear, {'rank': 1})], nnx.Linear, 'out', 4, {nnx.Linear}]
  )
  def test_patterns_of_wrong_type(self, given):
    model = plain()
    words = '`patterns`', 'dict', "{nnx.PathContains('query'): dict(rank=4)}"
    with self.kept(model, TypeError, 'apply_lora', *words):
      apply_lora(model, patterns=given)
    apply_lora(model, patterns={nnx.PathContains('query'): dict(rank=4)})

  @parameterized.product(
    given=[4, None, [('rank', 4)], nnx.Linear], api=list(APPLIES)
  )
  def test_options_of_wrong_type(self, given, api):
    model = plain()
    words = '`patterns` Linear', 'dict(rank=4)'
    with self.kept(model, TypeError, api, *words):
      APPLIES[api](model, patterns={nnx.Linear: given})
    APPLIES[api](model, patterns={nnx.Linear: dict(rank=4)})

  def test_unknown_options(self):
    model = plain()
    words = '`patterns` Linear', "['rnk']", "Did you mean 'rank'", 'dropout'
    with self.kept(model, ValueError, 'apply_lora', *words):
      apply_lora(model, patterns={nnx.Linear: {'rnk': 4}})
    with self.kept(model, ValueError, 'apply_lora', "['targets', 'rngs']"):
      apply_lora(model, patterns={nnx.Linear: {'targets': ..., 'rngs': 1}})


def _disabled(model):
  with nnx_ext.lora_disabled(model):
    raise AssertionError('not reached')


ON_ADAPTED: dict[str, tp.Callable] = {
  'merge_lora': nnx_ext.merge_lora,
  'remove_lora': nnx_ext.remove_lora,
  'lora_disabled': _disabled,
  'to_plain_lora': nnx_ext.to_plain_lora,
  'save_lora': lambda model: nnx_ext.save_lora(model, tempfile.mkdtemp()),
}


class SubclassOfAdapted(nnx_ext.LoRALinear):
  pass


class OtherCallsTest(LoRATestCase):
  @cases(ON_ADAPTED)
  def test_plain_model(self, case):
    model = plain()
    words = 'no adapted layer', 'nnx_ext.apply_lora(model, rank=8'
    with self.kept(model, ValueError, case, *words):
      ON_ADAPTED[case](model)

  @parameterized.product(api=['merge_lora', 'remove_lora'])
  def test_subclass_of_an_adapted_layer(self, api):
    model = Net(SubclassOfAdapted(3, 4, lora_rank=2, rngs=nnx.Rngs(0)))
    words = 'SubclassOfAdapted', 'subclass the flax layer', 'apply_lora'
    with self.kept(model, ValueError, api, *words):
      ON_ADAPTED[api](model)

  def test_merge_of_a_parametrized_weight(self):
    model = nnx_ext.parametrize(
      nnx_ext.apply_lora(plain(), rank=2, rngs=nnx.Rngs(1)),
      {nnx.PathContains('kernel'): nnx_ext.parametrizations.WeightNorm},
    )
    words = 'a WeightNorm in the place of its kernel', 'nnx_ext.bake(model)'
    with self.kept(model, ValueError, 'merge_lora', *words):
      nnx_ext.merge_lora(model)
    nnx_ext.merge_lora(nnx_ext.bake(model))

  @parameterized.product(given=[None, 1e-3, 'adam', optax.adam, nnx.Optimizer])
  def test_lora_plus_tx(self, given):
    with self.refused(TypeError, 'lora_plus', '`tx`', 'optax.adamw(1e-4)'):
      nnx_ext.lora_plus(given, 16.0)

  @parameterized.product(given=['16', None, True, jnp.ones(2)])
  def test_lora_plus_ratio_type(self, given):
    with self.refused(TypeError, 'lora_plus', '`ratio`', 'ratio=16.0'):
      nnx_ext.lora_plus(optax.sgd(1.0), given)

  @parameterized.product(given=[-1, float('nan')])
  def test_lora_plus_ratio(self, given):
    with self.refused(ValueError, 'lora_plus', '`ratio`', f'got {given}'):
      nnx_ext.lora_plus(optax.sgd(1.0), given)

  def test_lora_plus_without_adapters(self):
    tx, model = nnx_ext.lora_plus(optax.sgd(1.0), 16.0), plain()
    words = '`lora_b`', 'wrt=nnx.LoRAParam', 'apply_lora', 'query', 'kernel'
    with self.kept(model, ValueError, 'lora_plus', *words):
      nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.Optimizer(apply_lora(model), tx, wrt=nnx.LoRAParam)
