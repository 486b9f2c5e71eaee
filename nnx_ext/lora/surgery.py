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
"""Adapters put on the layers of a model, merged into them, and taken off."""

import contextlib
import typing as tp

import jax.numpy as jnp
from flax import nnx

from nnx_ext import _words
from nnx_ext.lora import _classes
from nnx_ext.lora._factors import LoRAFactors
from nnx_ext.lora._layer import LoRALayer
from nnx_ext.lora._options import Init, Initializer, LoRAOptions
from nnx_ext.lora._targets import (
  Filter,
  Patterns,
  adapted_layers,
  find_targets,
)

M = tp.TypeVar('M')


def apply_lora(
  model: M,
  *,
  rank: int,
  alpha: float | None = None,
  targets: Filter = ...,
  patterns: Patterns | None = None,
  dropout: float = 0.0,
  rslora: bool = False,
  dora: bool = False,
  init: Init | None = None,
  a_initializer: Initializer | None = None,
  b_initializer: Initializer | None = None,
  param_dtype: tp.Any = jnp.float32,
  rngs: nnx.Rngs,
) -> M:
  """A copy of a model whose layers compute with ``W + s A B``.

  Each chosen layer computes its own forward with the adapted weight, whatever
  kind of layer it is, and without ever making that weight: its forward runs
  with A in the place of W, and B makes of the result what is added. So a
  training step costs no gradient of W. The base keeps its paths and its
  values; what is trained is ``nnx.LoRAParam``.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext, optax
    ...
    >>> base = nnx.MultiHeadAttention(
    ...   num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0)
    ... )
    >>> model = nnx_ext.apply_lora(base, rank=2, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((1, 3, 8))
    >>> bool(jnp.array_equal(model(x), base(x)))
    True
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    >>> def loss(model, x):
    ...   return jnp.mean(model(x) ** 2)
    >>> wrt = nnx.DiffState(0, nnx.LoRAParam)
    >>> grads = nnx.grad(loss, argnums=wrt)(model, x)
    >>> _ = optimizer.update(model, grads)
    >>> bool(jnp.array_equal(model.query.kernel[...], base.query.kernel[...]))
    True

  Filters choose layers, and some may have options of their own::

    >>> model = nnx_ext.apply_lora(
    ...   base,
    ...   rank=8,
    ...   alpha=16,
    ...   targets=nnx.Any(nnx.PathContains('query'), nnx.PathContains('value')),
    ...   patterns={nnx.PathContains('value'): dict(rank=4, alpha=4)},
    ...   rngs=nnx.Rngs(1),
    ... )
    >>> model.query.lora.scale, model.value.lora.scale
    (2.0, 1.0)

  An adapter belongs to a weight: a layer, or a weight, that stands in two
  places is adapted once. Layers that ``nnx.vmap`` has stacked get stacked
  factors. Code that reads ``layer.kernel`` itself sees the base, except in
  methods of a subclass of the layer.

  ``init='pissa'`` and ``'olora'`` start from the leading directions of the
  weight. Unlike in PEFT the base stays as it is: the layer computes with
  ``W + s (A B - A0 B0)``, at the cost of twice the rank; see
  :func:`to_plain_lora`. ``'orthogonal'`` starts with factors that are not zero,
  whose product is. With ``dora`` the effective weight is scaled to have, for
  each output, a norm that is trained; the gradient of its norm is held
  constant, and each call computes that norm, which is work of the weight's
  size. With dropout no adapted weight stands for the layer in train mode.

  :func:`lora_plan` says beforehand what would be adapted. See
  :doc:`the guide on LoRA </guides/lora>`.

  Args:
    model: a Module, or a pytree of Modules. It is not changed.
    rank: the rank r of the product of the factors.
    alpha: the numerator of the scale s, static; the rank by default.
    targets: an nnx filter over (path, module), like
      ``nnx.PathContains('query')``, ``nnx.Linear``, ``nnx.Any(...)`` or a
      function; by default every layer that can be adapted.
    patterns: filters of some of these layers, with the options that these have
      instead, ``{nnx.PathContains('out'): dict(rank=4)}``; the first that
      matches counts.
    dropout: the probability to drop an element of the input of A, in train
      mode; ids are never dropped.
    rslora: whether s is ``alpha / sqrt(rank)`` and not ``alpha / rank``.
    dora: whether the weight's magnitude is trained apart, as in DoRA.
    init: how the factors start: None, ``'pissa'``, ``'olora'`` or
      ``'orthogonal'``.
    a_initializer: of A, for its shape as a matrix (in, r).
    b_initializer: of B, for its shape as a matrix (r, out).
    param_dtype: the dtype of the factors; they are cast to the layer's.
    rngs: rng keys; the stream ``params``, and ``dropout`` if there is any.

  Returns:
    A model of the same class that shares the base's buffers. Its layers are of
    LoRA classes, such as :class:`LoRALinear`, and have the factors at ``lora``.

  Raises:
    ValueError: if an option is out of range, a filter matches no layer, a layer
      that it chooses cannot be adapted, has an adapter already or is stacked on
      another axis than the first, or its weight is held elsewhere too.
    TypeError: if an argument is of the wrong type.

  References:
    Hu et al., `LoRA <https://arxiv.org/abs/2106.09685>`_, 2021; Kalajdzievski,
    `rsLoRA <https://arxiv.org/abs/2312.03732>`_, 2023; Liu et al., `DoRA
    <https://arxiv.org/abs/2402.09353>`_, 2024; Meng et al., `PiSSA
    <https://arxiv.org/abs/2404.02948>`_, 2024; Büyükakyüz, `OLoRA
    <https://arxiv.org/abs/2406.01775>`_, 2024.
  """
  options = LoRAOptions(
    rank=rank,
    alpha=alpha,
    dropout=dropout,
    rslora=rslora,
    dora=dora,
    init=init,
    a_initializer=a_initializer,
    b_initializer=b_initializer,
    param_dtype=param_dtype,
  )
  model = nnx.clone(model)
  found = find_targets('apply_lora', model, options, targets, patterns)
  check_rngs('apply_lora', rngs, 'params')
  adapters: dict[tp.Any, LoRAFactors] = {}
  for target in found:
    if target.shares is None:
      adapters[target.path] = target.factors(rngs)
  for target in found:
    path = target.path if target.shares is None else target.shares
    attach(target.layer, adapters[path])
  return model


def merge_lora(model: M) -> M:
  """The plain model whose weights are ``W + s A B``.

  A merged layer costs what its base does, and is saved, exported and served as
  one: of adapters nothing is left. Merging can be traced, and differentiated by
  A and B.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model = nnx_ext.apply_lora(base, rank=1, rngs=nnx.Rngs(1))
    >>> model.lora.lora_b[...] = jnp.ones((1, 3))
    >>> merged = nnx_ext.merge_lora(model)
    >>> x = jnp.ones((1, 2))
    >>> bool(jnp.allclose(merged(x), model(x), atol=1e-6))
    True
    >>> nnx.graphdef(merged) == nnx.graphdef(base)
    True

  Inside a loss it serves code that reads the adapted weights themselves, such
  as a penalty on them::

    >>> def penalty(model):
    ...   return jnp.sum(nnx_ext.merge_lora(model).kernel[...] ** 2)
    ...
    >>> wrt = nnx.DiffState(0, nnx.LoRAParam)
    >>> grads = nnx.grad(penalty, argnums=wrt)(model)
    >>> sorted(grads['lora'])
    ['lora_a', 'lora_b']

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    model: a model that has adapted layers. It is not changed.

  Returns:
    A model of the classes and structure that the base had, its weights in
    their own dtype.

  Raises:
    ValueError: if the model has no adapted layer, or one whose weight is
      parametrized.
  """
  model = nnx.clone(model)
  seen = set()
  for path, layer in adapted_layers('merge_lora', model).items():
    weight = layer._kind.weight(layer)
    if not isinstance(weight, nnx.Variable):
      raise ValueError(
        f'merge_lora: {_words.path(path)} has a {type(weight).__name__} in the '
        f'place of its {layer._kind.weight_name}, which no adapter can be '
        'merged into. Make plain weights first: '
        'nnx_ext.merge_lora(nnx_ext.bake(model)).'
      )
    if id(weight) not in seen:
      weight.set_value(layer.lora.weight(weight.get_value()))
      seen.add(id(weight))
    _detach('merge_lora', layer)
  return model


def remove_lora(model: M) -> M:
  """The plain model with the weights it had.

  Adapters stand beside the base's weights and change none of them, so taking
  them off gives the base back, bit for bit.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model = nnx_ext.apply_lora(base, rank=1, rngs=nnx.Rngs(1))
    >>> plain = nnx_ext.remove_lora(model)
    >>> type(plain).__name__, type(model).__name__
    ('Linear', 'LoRALinear')

  A weight has one adapter at most. For another, such as one of a higher rank,
  remove the first::

    >>> again = nnx_ext.apply_lora(
    ...   nnx_ext.remove_lora(model), rank=2, rngs=nnx.Rngs(2)
    ... )
    >>> again.lora.rank, model.lora.rank
    (2, 1)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    model: a model that has adapted layers. It is not changed.

  Returns:
    A model of the classes and structure that the base had.

  Raises:
    ValueError: if the model has no adapted layer.
  """
  model = nnx.clone(model)
  for layer in adapted_layers('remove_lora', model).values():
    _detach('remove_lora', layer)
  return model


@contextlib.contextmanager
def lora_disabled(model: M) -> tp.Iterator[M]:
  """The base alone, for as long as the context lasts.

  Where a tuned model is compared with its base (a KL penalty, a preference
  loss) one model in memory is both. Contexts nest, and an exception leaves none
  behind. The flag is static: what
  is jitted is traced once with adapters and once without.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model = nnx_ext.apply_lora(base, rank=1, rngs=nnx.Rngs(1))
    >>> model.lora.lora_b[...] = jnp.ones((1, 3))
    >>> x = jnp.ones((1, 2))
    >>> with nnx_ext.lora_disabled(model):
    ...   bool(jnp.array_equal(model(x), base(x)))
    True
    >>> bool(jnp.array_equal(model(x), base(x)))
    False

  Inside a loss, here a penalty on the distance from the base::

    >>> @nnx.jit
    ... def step(model, x):
    ...   def loss(model, x):
    ...     with nnx_ext.lora_disabled(model):
    ...       reference = model(x)
    ...     return jnp.mean((model(x) - reference) ** 2)
    ...
    ...   wrt = nnx.DiffState(0, nnx.LoRAParam)
    ...   return nnx.value_and_grad(loss, argnums=wrt)(model, x)
    ...
    >>> distance, grads = step(model, x)
    >>> float(distance) > 0, sorted(grads['lora'])
    (True, ['lora_a', 'lora_b'])

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    model: a model that has adapted layers.

  Returns:
    A context manager of the model.

  Raises:
    ValueError: if the model has no adapted layer.
  """
  adapters = {
    id(layer.lora): layer.lora
    for layer in adapted_layers('lora_disabled', model).values()
  }
  before = [(lora, lora.disabled) for lora in adapters.values()]
  for lora in adapters.values():
    lora.disabled = True
  try:
    yield model
  finally:
    for lora, disabled in before:
      lora.disabled = disabled


def to_plain_lora(model: M) -> M:
  """The same function with a PiSSA or OLoRA start taken into the factors.

  Where an adapter is ``s (A B - A0 B0)``, with a start A0 B0 that is kept, it
  becomes a plain one of twice the rank, ``s [A, A0] [B, -B0]``. Files have only
  such: :func:`save_lora` does this by itself.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> model = nnx_ext.apply_lora(
    ...   nnx.Linear(4, 6, rngs=nnx.Rngs(0)),
    ...   rank=2,
    ...   init='pissa',
    ...   rngs=nnx.Rngs(1),
    ... )
    >>> plain = nnx_ext.to_plain_lora(model)
    >>> plain.lora.rank, plain.lora.scale
    (4, 1.0)
    >>> x = jnp.ones((1, 4))
    >>> bool(jnp.allclose(plain(x), model(x), atol=1e-6))
    True

  Adapters without a start stay as they are::

    >>> model = nnx_ext.apply_lora(
    ...   nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in (0, 1))),
    ...   rank=2,
    ...   patterns={nnx.PathContains(1): dict(init='olora')},
    ...   rngs=nnx.Rngs(1),
    ... )
    >>> [layer.lora.rank for layer in nnx_ext.to_plain_lora(model).layers]
    [2, 4]

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    model: a model that has adapted layers. It is not changed.

  Returns:
    A model of the same classes. Adapters without a start are as they were.

  Raises:
    ValueError: if the model has no adapted layer.

  References:
    Meng et al., `PiSSA <https://arxiv.org/abs/2404.02948>`__, 2024;
    Büyükakyüz, `OLoRA <https://arxiv.org/abs/2406.01775>`__, 2024.
  """
  model = nnx.clone(model)
  for layer in adapted_layers('to_plain_lora', model).values():
    layer.lora.make_plain()
  return model


def check_rngs(api: str, rngs: tp.Any, stream: str):
  """Raises for what has no such stream of keys."""
  if not isinstance(rngs, nnx.Rngs):
    raise TypeError(
      f'{api}: `rngs` must be an nnx.Rngs, like nnx.Rngs(0), got '
      f'{_words.value(rngs)}.'
    )
  if stream not in rngs and 'default' not in rngs:
    raise ValueError(
      f'{api}: `rngs` must have a stream {stream!r} or a default one, like '
      f'nnx.Rngs(0), got the streams {list(rngs)}.'
    )


def attach(layer: tp.Any, lora: LoRAFactors):
  """Makes a plain layer, in place, an adapted one."""
  object.__setattr__(layer, '__class__', _classes.adapted_class(type(layer)))
  layer.lora = lora


def _detach(api: str, layer: LoRALayer):
  plain = _classes.plain_class(type(layer))
  if plain is None:
    raise ValueError(
      f'{api}: {type(layer).__name__} is a subclass of an adapted layer, so '
      'there is no class that it had before; subclass the flax layer instead, '
      'and adapt it with apply_lora.'
    )
  del layer.lora
  object.__setattr__(layer, '__class__', plain)
