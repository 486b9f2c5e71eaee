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
"""Plans, choosing, sharing; models that are adapted, merged and restored."""

import pickle
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.errors import Snapshot
from tests.lora import subclasses
from tests.lora.files import adapt, make
from tests.lora.kinds import KINDS
from tests.lora.trees import assert_close, assert_same, leaves, noise

RANK = 2


def modules(model: tp.Any) -> dict[tuple, tp.Any]:
  return {
    path: node
    for path, node in nnx.iter_graph(model, graph=True)
    if isinstance(node, nnx.Module)
  }


def adapters(model: tp.Any) -> dict[tuple, tp.Any]:
  found = modules(model)
  names = [path for path, node in found.items() if hasattr(node, 'lora')]
  return {path: found[path] for path in names}


def size(model: tp.Any, kind: type = nnx.LoRAParam) -> int:
  """How many numbers the Variables of a kind hold, each once."""
  return sum(
    int(np.prod(node.shape))
    for _, node in nnx.iter_graph(model, graph=True)
    if isinstance(node, kind)
  )


class Block(nnx.Module):
  def __init__(self, rngs):
    self.attention = nnx.Dict(
      query=nnx.Linear(4, 4, rngs=rngs), value=nnx.Linear(4, 4, rngs=rngs)
    )
    self.mlp = nnx.List(
      [nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 4, use_bias=False, rngs=rngs)]
    )
    self.norm = nnx.LayerNorm(4, rngs=rngs)
    self.embed = nnx.Embed(7, 4, rngs=rngs)


ALL = [
  ('attention', 'query'),
  ('attention', 'value'),
  ('embed',),
  ('mlp', 0),
  ('mlp', 1),
]


class TwoLinears(nnx.Module):
  """Two layers of one kernel, and one layer in two places."""

  def __init__(self, rngs):
    self.a = nnx.Linear(4, 4, rngs=rngs)
    self.b = nnx.Linear(4, 4, rngs=rngs)
    self.b.kernel = self.a.kernel
    self.c = self.b

  def __call__(self, x):
    return self.c(self.b(self.a(x)))


class EmbedAndHead(nnx.Module):
  """A table of tokens that is the head's weight too, turned round."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 5, rngs=rngs)
    self.head = nnx.Einsum('btd,vd->btv', (7, 5), rngs=rngs)
    self.head.kernel = self.embed.embedding

  def __call__(self, ids):
    return self.head(jnp.tanh(self.embed(ids)))


class HeadFirst(nnx.Module):
  """The same, but the head is the first of the two."""

  def __init__(self, rngs):
    self.table = nnx.Embed(7, 5, rngs=rngs)
    self.head = nnx.Einsum('btd,vd->btv', (7, 5), rngs=rngs)
    self.head.kernel = self.table.embedding

  def __call__(self, ids):
    return self.head(jnp.tanh(self.table(ids)))


class PlanTest(parameterized.TestCase):
  @parameterized.product(
    name=[
      'linear_no_bias',
      'general_batch_axes',
      'einsum_out_around',
      'einsum_batch_last',
      'conv_groups',
      'transpose_kernel',
      'tied',
      'attention',
      'lstm',
      'user_relu',
    ],
    options=[{}, {'dora': True, 'alpha': 3.0, 'rslora': True}],
  )
  def test_is_what_is_done(self, name, options):
    self.check(KINDS[name].model, options, KINDS[name].apply(**options))

  @parameterized.product(build=[Block, TwoLinears, EmbedAndHead, HeadFirst])
  def test_of_models(self, build):
    base, options = make(build), {'dora': True}
    self.check(base, options, adapt(base, **options))

  def test_of_stacked_layers(self):
    build = nnx.vmap(nnx.vmap(Block))
    base = make(lambda rngs: build(rngs.split((2, 3))))
    model = nnx.eval_shape(lambda: adapt(base))
    self.check(base, {}, model)
    self.assertEqual(model.embed.lora.lora_a.shape, (2, 3, 7, RANK))

  def check(self, base, options, model):
    plan = nnx_ext.lora_plan(base, rank=RANK, **options)
    found, plain = adapters(model), modules(base)
    self.assertEqual([layer.path for layer in plan.layers], list(found))
    seen: dict[int, tuple] = {}
    for layer in plan.layers:
      lora = found[layer.path].lora
      self.assertEqual(layer.kind, type(plain[layer.path]).__name__)
      self.assertEqual(layer.shares, seen.get(id(lora)))
      seen.setdefault(id(lora), layer.path)
      if layer.shares is not None:
        self.assertEqual(layer.num_params, 0)
        continue
      weight = getattr(plain[layer.path], 'kernel', None)
      weight = plain[layer.path].embedding if weight is None else weight
      self.assertEqual(layer.weight_shape, weight.shape)
      self.assertEqual(layer.a_shape, lora.lora_a.shape)
      self.assertEqual(layer.b_shape, lora.lora_b.shape)
      self.assertEqual((layer.rank, layer.alpha), (lora.rank, lora.alpha))
      self.assertEqual(layer.scale, lora.scale)
      self.assertEqual(layer.num_params, size(lora))
    self.assertEqual(plan.trainable, size(model))
    self.assertEqual(plan.total, size(model, nnx.Param))

  def test_abstract(self):
    abstract = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    options = {'rank': RANK, 'patterns': {nnx.Embed: {'rank': 3}}}
    plan = nnx_ext.lora_plan(abstract, **options)
    self.assertEqual(plan, nnx_ext.lora_plan(make(Block), **options))
    model = nnx_ext.apply_lora(abstract, rngs=nnx.Rngs(0), **options)
    self.assertIsInstance(
      model.embed.lora.lora_a.get_value(), jax.ShapeDtypeStruct
    )
    self.assertEqual(size(model), plan.trainable)

  def test_leaves_the_model(self):
    base = make(Block)
    before = Snapshot(base)
    nnx_ext.lora_plan(base, rank=RANK)
    before.check(self)

  def test_printed(self):
    base = make(lambda rngs: nnx.List([EmbedAndHead(rngs), Block(rngs).mlp[0]]))
    plan = nnx_ext.lora_plan(
      base, rank=2, alpha=3, patterns={nnx.Linear: {'rank': 3, 'dora': True}}
    )
    self.assertEqual(
      str(plan).splitlines(),
      [
        "'0/embed': Embed (7, 5), A (7, 2), B (2, 5), scale 1.5, 24 trained",
        "'0/head': Einsum, shares that of '0/embed'",
        "'1': Linear (4, 6), A (4, 3), B (3, 6), scale 1, 36 trained",
        '3 layers, 60 of 125 parameters trained (48.00 %)',
      ],
    )


# Filters, and what they choose of a Block.
TARGETS: list[tuple[tp.Any, list]] = [
  (..., ALL),
  (True, ALL),
  (nnx.Module, ALL),
  (nnx.PathContains('query'), [('attention', 'query')]),
  (nnx.PathContains('attention'), ALL[:2]),
  (nnx.PathContains(0), [('mlp', 0)]),
  (nnx.Linear, ALL[:2] + ALL[3:]),
  (nnx.Any(nnx.Embed, nnx.PathContains('value')), ALL[1:3]),
  (nnx.All(nnx.Linear, nnx.PathContains('mlp')), ALL[3:]),
  (nnx.Not(nnx.PathContains('attention')), ALL[2:]),
  ([nnx.Embed, nnx.PathContains('mlp')], ALL[2:]),
  (lambda path, module: path[-1:] == (1,), [('mlp', 1)]),
  (lambda path, module: getattr(module, 'bias', 0) is None, [('mlp', 1)]),
  (nnx.filterlib.PathIn(('mlp', 1), ('embed',)), [('embed',), ('mlp', 1)]),
]


class ChoosingTest(parameterized.TestCase):
  @parameterized.parameters(*TARGETS)
  def test_targets(self, targets, expected):
    plan = nnx_ext.lora_plan(make(Block), rank=1, targets=targets)
    self.assertEqual([layer.path for layer in plan.layers], expected)

  def test_predicate_sees_paths_and_modules(self):
    seen = {}

    def targets(path, module):
      seen[path] = type(module)
      return True

    base = make(Block)
    nnx_ext.lora_plan(base, rank=1, targets=targets)
    self.assertEqual(
      seen, {path: type(node) for path, node in modules(base).items()}
    )

  def test_others_stay_plain(self):
    base = make(Block)
    model = adapt(base, targets=nnx.PathContains('query'))
    self.assertEqual(list(adapters(model)), [('attention', 'query')])
    self.assertIs(type(model.attention.value), nnx.Linear)

  def test_first_pattern_wins(self):
    model = adapt(
      make(Block),
      alpha=8,
      patterns={
        nnx.PathContains('query'): {'rank': 1},
        nnx.PathContains('attention'): {'rank': 3, 'alpha': 6, 'dora': True},
        lambda path, module: isinstance(module, nnx.Linear): {'rslora': True},
      },
    )
    found = {
      path: (lora.rank, lora.alpha, lora.rslora, lora.magnitude is not None)
      for path, layer in adapters(model).items()
      for lora in [layer.lora]
    }
    self.assertEqual(
      found,
      {
        ('attention', 'query'): (1, 8, False, False),
        ('attention', 'value'): (3, 6, False, True),
        ('embed',): (2, 8, False, False),
        ('mlp', 0): (2, 8, True, False),
        ('mlp', 1): (2, 8, True, False),
      },
    )

  def test_alpha_follows_the_rank_of_a_pattern(self):
    patterns = {nnx.Embed: {'rank': 3}}
    model = adapt(make(Block), patterns=patterns)
    self.assertEqual((model.embed.lora.alpha, model.embed.lora.scale), (3, 1.0))

  @parameterized.product(
    kind=[dict, list, tuple], targets=[..., nnx.Not(nnx.PathContains('x'))]
  )
  def test_pytrees_of_modules(self, kind, targets):
    # The same default: every layer that can be adapted, and no complaint.
    parts = {
      'lin': nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
      'norm': nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
    }
    base = parts if kind is dict else kind(parts.values())
    model = adapt(base, targets=targets)
    self.assertIs(type(model), kind)
    lin = model['lin'] if kind is dict else model[0]
    self.assertIs(type(lin), nnx_ext.LoRALinear)
    plain = nnx_ext.remove_lora(model)
    self.assertEqual(nnx.graphdef(plain), nnx.graphdef(base))
    with nnx_ext.lora_disabled(model):
      self.assertTrue(lin.lora.disabled)

  def test_a_dict_with_names_of_methods(self):
    two = make(TwoLinears)
    model = adapt({'keys': two.a, 'values': two.b})
    self.assertIs(model['keys'].lora, model['values'].lora)

  def test_a_layer_alone(self):
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    model = adapt(base)
    self.assertIs(type(model), nnx_ext.LoRALinear)
    self.assertIs(type(base), nnx.Linear)
    self.assertFalse(hasattr(base, 'lora'))
    self.assertEqual(nnx_ext.lora_plan(base, rank=1).layers[0].path, ())


class SharingTest(parameterized.TestCase):
  @parameterized.product(
    build=[TwoLinears, EmbedAndHead, HeadFirst],
    options=[{}, {'dora': True, 'alpha': 3.0}],
  )
  def test_outputs_are_those_of_the_merged_weight(self, build, options):
    base = make(build)
    model = adapt(base, **options)
    of_ids = build is not TwoLinears
    x = jnp.array([[1, 6, 1]]) if of_ids else noise((2, 4))
    merged = nnx_ext.merge_lora(model)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(base))
    assert_close(model(x), merged(x))
    self.assertFalse(np.allclose(model(x), base(x), atol=1e-2))
    assert_same(leaves(nnx_ext.remove_lora(model)), leaves(base))

  def test_one_adapter(self):
    model = adapt(make(TwoLinears))
    self.assertIs(model.a.lora, model.b.lora)
    self.assertIs(model.b, model.c)
    self.assertIs(model.a.kernel, model.b.kernel)
    self.assertLen(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)), 2)

  @parameterized.product(chosen=['a', 'b'])
  def test_one_of_two_that_share_brings_the_other(self, chosen):
    model = adapt(make(TwoLinears), targets=nnx.PathContains(chosen))
    self.assertIs(model.a.lora, model.b.lora)

  @parameterized.product(chosen=['embed', 'head'])
  def test_pattern_of_either(self, chosen):
    patterns = {nnx.PathContains(chosen): {'rank': 3, 'alpha': 5}}
    base = make(EmbedAndHead)
    model = adapt(base, patterns=patterns)
    self.assertEqual((model.embed.lora.rank, model.embed.lora.alpha), (3, 5))
    plan = nnx_ext.lora_plan(base, rank=RANK, patterns=patterns)
    self.assertEqual([layer.rank for layer in plan.layers], [3, 3])

  @parameterized.product(build=[EmbedAndHead, HeadFirst])
  def test_gradients_go_to_one_pair(self, build):
    model = adapt(make(build))
    ids = jnp.array([[1, 6]])
    of_model = lambda model: jnp.sum(jnp.sin(model(ids)))
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(of_model, argnums=wrt)(model)
    of_merged = lambda model: of_model(nnx_ext.merge_lora(model))
    expected = nnx.grad(of_merged, argnums=wrt)(model)
    assert_close(nnx.to_pure_dict(grads), nnx.to_pure_dict(expected))


# A user's subclasses; those of the ``kinds`` are at the top of a module too.
class Named(nnx.Linear):
  """A user's documentation."""

  bonus = 3

  def extra(self):
    return self.bonus

  class Inner(nnx.Embed):
    pass


class SubclassTest(parameterized.TestCase):
  @parameterized.parameters(
    (subclasses.Relu, nnx_ext.LoRALinear),
    (subclasses.OwnForward, nnx_ext.LoRALinear),
    (subclasses.Mixed, nnx_ext.LoRALinear),
    (subclasses.Derived, nnx_ext.LoRALinear),
    (subclasses.ScaledEmbed, nnx_ext.LoRAEmbed),
    (subclasses.PooledConv, nnx_ext.LoRAConv),
    (Named, nnx_ext.LoRALinear),
    (Named.Inner, nnx_ext.LoRAEmbed),
  )
  def test_class(self, plain, kind):
    args = (3, 4, 3) if kind is nnx_ext.LoRAConv else (3, 4)
    base = plain(*args, rngs=nnx.Rngs(0))
    model = adapt(base)
    cls = type(model)
    self.assertEqual(cls.__name__, f'LoRA{plain.__name__}')
    self.assertEqual(cls.__qualname__, f'LoRA{plain.__qualname__}')
    self.assertEqual(cls.__module__, plain.__module__)
    self.assertEqual(cls.__doc__, plain.__doc__)
    self.assertIsInstance(model, plain)
    self.assertIsInstance(model, kind)
    self.assertIs(type(base), plain)
    self.assertIs(type(adapt(base)), cls)
    self.assertIs(pickle.loads(pickle.dumps(cls)), cls)
    self.assertIs(type(nnx_ext.remove_lora(model)), plain)
    self.assertIs(type(nnx_ext.merge_lora(model)), plain)
    self.assertEqual(
      nnx.graphdef(nnx_ext.remove_lora(model)), nnx.graphdef(base)
    )

  def test_what_the_user_added(self):
    model = adapt(Named(3, 4, rngs=nnx.Rngs(0)))
    self.assertEqual((model.bonus, model.extra()), (3, 3))

  @parameterized.parameters(
    nnx.Linear,
    nnx.LinearGeneral,
    nnx.Einsum,
    nnx.Conv,
    nnx.ConvTranspose,
    nnx.Embed,
  )
  def test_flax_class(self, kind):
    cls = getattr(nnx_ext, f'LoRA{kind.__name__}')
    self.assertTrue(issubclass(cls, kind))
    self.assertIs(pickle.loads(pickle.dumps(cls)), cls)


class SurgeryTest(parameterized.TestCase):
  def test_base_is_left_and_its_arrays_are_shared(self):
    base = make(Block)
    before = Snapshot(base)
    model = adapt(base, dora=True)
    before.check(self)
    own = dict(nnx.to_flat_state(nnx.state(base)))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
      if path in own:
        self.assertIs(variable.get_value(), own.pop(path).get_value())
    self.assertEmpty(own)
    self.assertIsNot(model.embed.embedding, base.embed.embedding)
    self.assertIsNot(model, base)

  @parameterized.product(
    api=['merge_lora', 'remove_lora', 'to_plain_lora'],
    init=[None, 'pissa'],
  )
  def test_adapted_model_is_left(self, api, init):
    options = {'init': init} if init else {'dora': True, 'dropout': 0.5}
    model = adapt(make(Block), **options)
    before = Snapshot(model)
    result = getattr(nnx_ext, api)(model)
    before.check(self)
    self.assertIsNot(result, model)
    self.assertIs(type(model.embed), nnx_ext.LoRAEmbed)

  def test_removed_is_the_base(self):
    base = make(Block)
    plain = nnx_ext.remove_lora(adapt(base))
    self.assertEqual(nnx.graphdef(plain), nnx.graphdef(base))
    for (path, a), (_, b) in zip(
      nnx.to_flat_state(nnx.state(plain)), nnx.to_flat_state(nnx.state(base))
    ):
      self.assertIs(a.get_value(), b.get_value(), path)

  def test_merged_weights(self):
    base = make(Block)
    model = adapt(base, alpha=3.0)
    merged = nnx_ext.merge_lora(model)
    self.assertEqual(nnx.graphdef(merged), nnx.graphdef(base))
    for path, layer in adapters(model).items():
      name = 'embedding' if path == ('embed',) else 'kernel'
      a, b = layer.lora.lora_a[...], layer.lora.lora_b[...]
      expected = np.asarray(getattr(layer, name)[...]) + 1.5 * (a @ b)
      at = modules(merged)[path]
      assert_close(getattr(at, name)[...], expected)
    self.assertIs(merged.norm.scale.get_value(), base.norm.scale.get_value())

  def test_another_adapter_on_other_layers(self):
    base = make(Block)
    first = adapt(base, targets=nnx.PathContains('attention'))
    second = adapt(first, targets=nnx.PathContains('mlp'), rank=3, dora=True)
    self.assertEqual(list(adapters(second)), ALL[:2] + ALL[3:])
    self.assertEqual(list(adapters(first)), ALL[:2])
    query = second.attention.query.lora
    self.assertEqual((query.rank, query.magnitude), (2, None))
    self.assertEqual(second.mlp[0].lora.rank, 3)
    assert_same(leaves(nnx_ext.remove_lora(second)), leaves(base))

  @parameterized.product(dropout=[0.0, 0.5])
  def test_streams(self, dropout):
    # Two keys of `params` an adapter, one of `dropout`; none for the sharers.
    rngs = nnx.Rngs(params=0, dropout=1, other=2)
    adapt(make(Block), dropout=dropout, rngs=rngs)
    drawn = {n: int(getattr(rngs, n).count[...]) for n in rngs}
    count = len(ALL) if dropout else 0
    self.assertEqual(
      drawn, {'params': 2 * len(ALL), 'dropout': count, 'other': 0}
    )
    rngs = nnx.Rngs(0)
    adapt(make(TwoLinears), rngs=rngs)
    self.assertEqual(int(rngs.default.count[...]), 2)

  def test_starts_differ_from_layer_to_layer(self):
    options = {'rank': 2, 'targets': nnx.PathContains('attention')}
    base = make(Block)
    model = nnx_ext.apply_lora(base, rngs=nnx.Rngs(0), **options)
    again = nnx_ext.apply_lora(base, rngs=nnx.Rngs(0), **options)
    assert_same(leaves(model), leaves(again))
    a, b = (model.attention[n].lora.lora_a[...] for n in ('query', 'value'))
    self.assertFalse(np.allclose(a, b))

  def test_disabled(self):
    model = adapt(make(Block))
    loras = [layer.lora for layer in adapters(model).values()]
    before = Snapshot(model)
    with self.assertRaises(KeyError), nnx_ext.lora_disabled(model) as same:
      self.assertIs(same, model)
      with nnx_ext.lora_disabled(model):
        pass
      self.assertTrue(all(lora.disabled for lora in loras))
      raise KeyError
    self.assertFalse(any(lora.disabled for lora in loras))
    before.check(self)

  def test_disabled_where_one_was_by_hand(self):
    model = adapt(make(Block))
    model.embed.lora.disabled = True
    with nnx_ext.lora_disabled(model):
      pass
    self.assertTrue(model.embed.lora.disabled)
    self.assertFalse(model.mlp[0].lora.disabled)
