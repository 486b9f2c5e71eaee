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
"""Errors of what ``f`` returns and of the options: the words a user needs."""

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

from tests import models
from tests.errors import (
  ACTOR,
  APIS,
  BOTH,
  CONTAINER,
  CRITIC,
  DIFF,
  WAYS,
  ErrorsTestCase,
  as_tuple,
  call,
  cases,
  every_way,
  losses,
  nets,
  returning,
)


class Named(tp.NamedTuple):
  policy: tp.Any
  value: tp.Any


SCALAR = ("loss 'policy'", 'scalar')
PAIR = ('has_aux=True', '(losses, aux)')

# What f returns, the error and its words.
OUTPUTS: dict[str, tuple[tp.Callable, type[Exception], tuple]] = {
  'non_scalar': (
    lambda out: {**out, 'policy': jnp.stack([out['policy']] * 7)},
    ValueError,
    (*SCALAR, 'float32', '(7,)', '.mean()'),
  ),
  'one_element': (
    lambda out: {**out, 'policy': out['policy'][None]},
    ValueError,
    (*SCALAR, '(1,)'),
  ),
  'non_scalar_by_position': (
    lambda out: (out['policy'], jnp.ones((2, 3))),
    ValueError,
    ('loss 1', 'scalar', '(2, 3)'),
  ),
  'non_scalar_by_field': (
    lambda out: Named(out['policy'], jnp.ones(3)),
    ValueError,
    ("loss 'value'", 'scalar', '(3,)', '.mean()'),
  ),
  'none': (lambda out: {**out, 'policy': None}, TypeError, (*SCALAR, 'None')),
  'string': (
    lambda out: {**out, 'policy': 'low'},
    TypeError,
    (*SCALAR, 'str', "'low'"),
  ),
  'nested_dict': (
    lambda out: {**out, 'policy': {'a': out['policy']}},
    TypeError,
    (*SCALAR, 'dict'),
  ),
  'nested_list': (
    lambda out: {**out, 'policy': [out['policy']]},
    TypeError,
    (*SCALAR, 'list'),
  ),
  'integer': (
    lambda out: {**out, 'policy': jnp.array(1)},
    TypeError,
    ("loss 'policy'", 'int32', 'float'),
  ),
  'boolean': (
    lambda out: {**out, 'policy': out['policy'] > 0},
    TypeError,
    ("loss 'policy'", 'bool', 'float'),
  ),
  'key': (
    lambda out: {**out, 'policy': jax.random.key(0)},
    TypeError,
    ("loss 'policy'", 'key<fry>'),
  ),
  'complex': (
    lambda out: {**out, 'policy': out['policy'] * 1j},
    TypeError,
    ("loss 'policy'", 'complex64', 'real', 'holomorphic=True'),
  ),
  'empty_dict': (lambda out: {}, ValueError, ('empty dict', 'scalar')),
  'empty_tuple': (lambda out: (), ValueError, ('empty tuple', 'scalar')),
  'empty_list': (lambda out: [], ValueError, ('empty list', 'scalar')),
  'nothing': (lambda out: None, TypeError, (*CONTAINER, 'NoneType')),
  'set': (lambda out: {1.0}, TypeError, (*CONTAINER, 'set')),
  'text': (lambda out: 'loss', TypeError, (*CONTAINER, 'str')),
  'array': (
    lambda out: jnp.stack(as_tuple(out)),
    TypeError,
    (*CONTAINER, 'float32', '(2,)'),
  ),
  'generator': (
    lambda out: iter(as_tuple(out)),
    TypeError,
    (*CONTAINER, 'iterator'),
  ),
  'module': (lambda out: nnx.Dict(out), TypeError, (*CONTAINER, 'Dict')),
  'unsortable_keys': (
    lambda out: {'policy': out['policy'], 1: out['value']},
    TypeError,
    ("'policy'", '1', 'str', 'int'),
  ),
  'aux_of_dict': (lambda out: (out, {'logits': jnp.ones(3)}), TypeError, PAIR),
  'aux_of_tuple': (lambda out: (as_tuple(out), None), TypeError, PAIR),
  'aux_of_namedtuple': (lambda out: (Named(**out), None), TypeError, PAIR),
}

# The same with has_aux=True.
WITH_AUX: dict[str, tuple[tp.Callable, type[Exception], tuple]] = {
  'no_aux': (lambda out: out, ValueError, (*PAIR, 'dict')),
  'three': (lambda out: (out, 1, 2), ValueError, (*PAIR, 'tuple of 3')),
  'list': (lambda out: [out, 1], ValueError, (*PAIR, 'list')),
  'two_losses': (as_tuple, TypeError, PAIR),
  'lone_scalar': (
    lambda out: (out['policy'], 1),
    TypeError,
    (*CONTAINER, 'scalar', *PAIR),
  ),
  'aux_first': (
    lambda out: ({'logits': jnp.ones(3)}, out),
    ValueError,
    ("loss 'logits'", '(3,)'),
  ),
}

# A Python float, a NumPy scalar or an int is a lone loss just as well.
LONE: dict[str, tp.Callable] = {
  'array': lambda out: out['policy'],
  'float': lambda out: 1.0,
  'int': lambda out: 1,
  'numpy': lambda out: np.float32(1.0),
}


class OutputTest(ErrorsTestCase):
  """What ``f`` returns."""

  @cases(OUTPUTS, WAYS)
  def test_output(self, case, api, mode):
    change, error, words = OUTPUTS[case]
    with self.refused(error, api, *words):
      call(api, mode, returning(change))

  @cases(WITH_AUX, WAYS)
  def test_output_with_aux(self, case, api, mode):
    change, error, words = WITH_AUX[case]
    with self.refused(error, api, *words):
      call(api, mode, returning(change), has_aux=True)

  @cases(LONE, api=list(APIS))
  def test_lone_scalar(self, case, api):
    upstream = 'nnx.grad' if api == 'grad_multi' else 'nnx.value_and_grad'
    for mode in models.MODES:
      with self.refused(TypeError, api, *CONTAINER, 'scalar', upstream):
        call(api, mode, returning(LONE[case]), argnums=0)

  @every_way
  def test_real_loss_with_holomorphic(self, api, mode):
    with self.refused(
      TypeError, api, "loss 'z'", 'complex', 'holomorphic=True', 'float32'
    ):
      call(
        api,
        mode,
        lambda z: {'z': jnp.abs(z)},
        jnp.array(1 + 1j),
        argnums=0,
        holomorphic=True,
      )

  @every_way
  def test_real_leaf_with_holomorphic(self, api, mode):
    with self.refused(
      TypeError,
      api,
      f"'kernel' of {ACTOR} (float32)",
      'complex',
      'holomorphic=True',
    ):
      call(api, mode, losses, holomorphic=True)


# f's change of its losses, argnums, and the words of the error.
NOT_MATCHING: dict[str, tuple[tp.Callable, tp.Any, tuple]] = {
  'too_few': (as_tuple, (0,), ('1 entr', '2 losses')),
  'too_many': (as_tuple, [0, 1, 1], ('3 entries', '2 losses')),
  'none_at_all': (as_tuple, (), ('0 entries', '2 losses')),
  'too_few_for_fields': (
    lambda out: Named(**out),
    (0,),
    ('1 entr', "'policy'", "'value'"),
  ),
  'missing': (
    dict,
    {'policy': 0},
    ("no entry for the losses ['value']", "['policy', 'value']"),
  ),
  'empty': (dict, {}, ("no entry for the losses ['policy', 'value']",)),
  'misspelt': (
    dict,
    {'policy': 0, 'valeu': 1},
    ("'valeu'", "Did you mean 'value'"),
  ),
  'unknown': (
    dict,
    {'policy': 0, 'value': 1, 'entropy': 0},
    ("'entropy'", 'did not return', "['policy', 'value']"),
  ),
  'key_as_text': (
    lambda out: {1: out['policy'], 12: out['value']},
    {1: 0, '12': 1},
    ('[12]', "['12']", 'Did you mean 12'),
  ),
  'tuple_for_dict': (
    dict,
    (0, 1),
    ('sequence', 'dict', "={'policy': ..., 'value': ...}"),
  ),
  'list_for_dict': (
    dict,
    [0, 1],
    ('sequence', 'dict', "={'policy': ..., 'value': ...}"),
  ),
  'dict_for_tuple': (as_tuple, {0: 0, 1: 1}, ('dict', 'a tuple of 2')),
  'dict_for_list': (
    lambda out: list(as_tuple(out)),
    {'policy': 0, 'value': 1},
    ('dict', 'list', '2 entries'),
  ),
  'dict_for_fields': (
    lambda out: Named(**out),
    {'policy': 0, 'value': 1},
    ('dict', 'Named', 'a tuple of 2'),
  ),
}

# An entry of argnums that is of no use, whatever the losses, and its words.
WRONG_ENTRIES: dict[str, tuple[tp.Any, tuple]] = {
  'string': ('actor', ('int', 'nnx.DiffState', "'actor'")),
  'number_as_text': ('0', ('int', "'0'")),
  'bool': (True, ('int', 'True')),
  'none': (None, ('int', 'None')),
  'float': (1.0, ('int', '1.0')),
  'empty': ((), ('non-empty', '()')),
  'empty_list': ([], ('non-empty', '[]')),
  'dict': ({'actor': 0}, ('int', "{'actor': 0}")),
  'filter': (nnx.Param, ('int', 'nnx.DiffState', 'Param')),
  'traced': (jnp.array(0), ('int', 'Array')),
  'string_within': ((0, '1'), ('int', "'1'")),
  'bool_within': ((0, True), ('int', 'True')),
  'none_within': ([0, None], ('int', 'None')),
  'nested': (((0, 1),), ('int', '(0, 1)')),
  'diff_state_of_text': (DIFF('0', nnx.Param), ('int', "'0'")),
  'diff_state_of_bool': (DIFF(True, nnx.Param), ('int', 'True')),
  'no_filter': (DIFF(0, 3.5), ('filter', '3.5')),
  'no_filter_within': ((DIFF(0, 3.5), 1), ('filter', '3.5')),
}

OUT_OF_RANGE: dict[str, tuple[tp.Any, str]] = {
  'positive': (3, '3'),
  'negative': (-4, '-4'),
  'diff_state': (DIFF(7, nnx.Param), '7'),
  'negative_diff_state': (DIFF(-4, nnx.Param), '-4'),
  'within': ((0, 9), '9'),
}

REPEATED: dict[str, tuple] = {
  'ints': (0, 0),
  'negative': (0, -3),
  'diff_state': (DIFF(0, nnx.Param), 0),
  'two_filters': (
    DIFF(0, nnx.PathContains('kernel')),
    DIFF(0, nnx.PathContains('bias')),
  ),
}


class ArgnumsTest(ErrorsTestCase):
  @cases(NOT_MATCHING, WAYS)
  def test_does_not_match_losses(self, case, api, mode):
    change, argnums, words = NOT_MATCHING[case]
    with self.refused(ValueError, api, '`argnums`', *words):
      call(api, mode, returning(change), argnums=argnums)

  @cases(WRONG_ENTRIES, api=list(APIS))
  def test_wrong_entry(self, case, api):
    # Known before there is a call, so raised before there is one.
    entry, words = WRONG_ENTRIES[case]
    with self.refused(TypeError, api, 'argnums', *words):
      APIS[api](losses, argnums={'policy': entry, 'value': 1})
    with self.refused(TypeError, api, 'argnums', *words):
      APIS[api](argnums=[1, entry])

  @parameterized.product(
    api=list(APIS), argnums=['0', True, None, 1.0, {1, 2}, range(2), nnx.Param]
  )
  def test_wrong_for_all(self, api, argnums):
    with self.refused(
      TypeError, api, 'argnums', 'int', 'nnx.DiffState', repr(argnums)
    ):
      APIS[api](losses, argnums=argnums)

  @cases(OUT_OF_RANGE, WAYS)
  def test_out_of_range(self, case, api, mode):
    entry, number = OUT_OF_RANGE[case]
    with self.refused(
      ValueError,
      api,
      f'argnum {number} ',
      'out of range',
      '3 positional',
      ACTOR,
      CRITIC,
      'argument 2 (`x`)',
    ):
      call(api, mode, losses, argnums={'policy': entry, 'value': 1})

  @every_way
  def test_keyword_only(self, api, mode):
    def f(actor, *, critic, x):
      return losses(actor, critic, x)

    actor, critic, x = nets()
    step = APIS[api](f, argnums=BOTH, **models.MODES[mode])
    with self.refused(
      ValueError,
      api,
      'argnum 1 ',
      ACTOR,
      'eyword-only',
      'critic',
      'by position',
    ):
      step(actor, critic=critic, x=x)

  @every_way
  def test_no_arguments(self, api, mode):
    step = APIS[api](lambda: {'a': jnp.ones(())}, **models.MODES[mode])
    with self.refused(ValueError, api, 'argnum 0 ', '0 positional'):
      step()

  @cases(REPEATED, WAYS)
  def test_repeated(self, case, api, mode):
    with self.refused(
      ValueError, api, ACTOR, 'repeated', 'nnx.DiffState(0, nnx.Any('
    ):
      call(api, mode, losses, argnums={'policy': REPEATED[case], 'value': 1})

  @parameterized.product(
    api=list(APIS),
    arguments=[
      ((0, 1), {}, "'x'"),
      ((0, 1, 2, 3), {}, 'too many'),
      ((0, 1, 2), {'x': 2}, "'x'"),
      ((0, 1), {'y': 2}, "'x'"),
    ],
  )
  def test_wrong_call(self, api, arguments):
    args, kwargs, words = arguments
    with self.refused(TypeError, api, words):
      APIS[api](losses, argnums=BOTH)(*args, **kwargs)


# Weights that are of no use, whatever the losses.
WRONG_WEIGHTS: dict[str, tuple[tp.Any, type[Exception], tuple]] = {
  'none_entry': ({'policy': None, 'value': 1.0}, TypeError, ('None',)),
  'text': ('1', TypeError, ("'1'",)),
  'text_entry': ({'policy': 'high', 'value': 1.0}, TypeError, ("'high'",)),
  'text_array': (np.array('high'), TypeError, ('high',)),
  'bool': (True, TypeError, ('True',)),
  'complex': (1j, TypeError, ('1j',)),
  'key': (jax.random.key(0), TypeError, ('key<fry>',)),
  'variable': (nnx.Param(1.0), TypeError, ('Param',)),
  'nested': ([(1.0, 2.0), 1.0], TypeError, ('(1.0, 2.0)',)),
  'vector': (np.ones(2), ValueError, ('scalar', '(2,)', 'dict, tuple')),
  'vector_entry': (
    {'policy': np.ones(3), 'value': 1.0},
    ValueError,
    ('scalar', '(3,)'),
  ),
}


class WeightsTest(ErrorsTestCase):
  @cases(NOT_MATCHING, WAYS)
  def test_do_not_match_losses(self, case, api, mode):
    change, weights, words = NOT_MATCHING[case]
    with self.refused(ValueError, api, '`weights`', *words):
      call(api, mode, returning(change), argnums=2, weights=weights)

  @cases(WRONG_WEIGHTS, api=list(APIS))
  def test_wrong_weights(self, case, api):
    weights, error, words = WRONG_WEIGHTS[case]
    with self.refused(error, api, 'weight', *words):
      APIS[api](losses, weights=weights)

  @every_way
  def test_traced(self, api, mode):
    @jax.jit
    def step(weight):
      call(api, mode, losses, weights={'policy': weight, 'value': 1.0})

    with self.refused(ValueError, api, 'weight', 'scalar', '(2,)'):
      step(jnp.ones(2))
