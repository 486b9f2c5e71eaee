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
"""Ways to train adapters, as optax transformations and nnx filters."""

import typing as tp

import jax
import optax
from flax import nnx

from nnx_ext import _words


def lora_plus(
  tx: optax.GradientTransformation, ratio: float
) -> optax.GradientTransformationExtraArgs:
  """An optimizer whose learning rate is ``ratio`` times as high for B as for A.

  The factor B starts at zero and A does not, so in wide layers one learning
  rate is too low for B or too high for A. The paper recommends a ratio of
  about 16. What ``tx`` makes of the gradient is multiplied, so its weight decay
  is too.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext, optax
    ...
    >>> model = nnx_ext.apply_lora(
    ...   nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rank=1, rngs=nnx.Rngs(1)
    ... )
    >>> tx = nnx_ext.lora_plus(optax.adamw(1e-4), ratio=16.0)
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    >>> grads = nnx.grad(
    ...   lambda model: model(jnp.ones((1, 2))).sum(),
    ...   argnums=nnx.DiffState(0, nnx.LoRAParam),
    ... )(model)
    >>> _ = optimizer.update(model, grads)
    >>> model.lora.lora_b[...].round(4)  # 16 times 1e-4
    Array([[0.0016, 0.0016, 0.0016]], dtype=float32)

  What is trained beside the factors keeps the learning rate of ``tx``, which
  may be a schedule. Here it is a bias, and both start at zero::

    >>> model.lora.lora_b[...] = jnp.zeros((1, 3))
    >>> trained = nnx.Any(nnx.LoRAParam, nnx.PathContains('bias'))
    >>> schedule = optax.constant_schedule(1e-4)
    >>> tx = nnx_ext.lora_plus(optax.adamw(schedule), ratio=16.0)
    >>> optimizer = nnx.Optimizer(model, tx, wrt=trained)
    >>> grads = nnx.grad(
    ...   lambda model: model(jnp.ones((1, 2))).sum(),
    ...   argnums=nnx.DiffState(0, trained),
    ... )(model)
    >>> _ = optimizer.update(model, grads)
    >>> model.lora.lora_b[...].round(4)
    Array([[0.0016, 0.0016, 0.0016]], dtype=float32)
    >>> model.bias[...].round(4)
    Array([-0.0001, -0.0001, -0.0001], dtype=float32)

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    tx: any optax transformation, such as ``optax.adamw(1e-4)``.
    ratio: the learning rate of B over that of all else, at least 0.

  Returns:
    A transformation with the state of ``tx``.

  Raises:
    TypeError: if ``tx`` is no optax transformation, or ``ratio`` no number.
    ValueError: if ``ratio`` is negative, or the parameters hold no ``lora_b``.

  References:
    Hayou et al., `LoRA+: Efficient Low Rank Adaptation of Large Models
    <https://arxiv.org/abs/2402.12354>`_, 2024.
  """
  if not isinstance(tx, optax.GradientTransformation):
    raise TypeError(
      'lora_plus: `tx` must be an optax transformation, like '
      f'optax.adamw(1e-4), got {_words.value(tx)}.'
    )
  if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
    raise TypeError(
      'lora_plus: `ratio` must be a number, like ratio=16.0, got '
      f'{_words.value(ratio)}.'
    )
  if not ratio >= 0:
    raise ValueError(f'lora_plus: `ratio` must be at least 0, got {ratio}.')
  inner = optax.with_extra_args_support(tx)

  def init(params):
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    if not any(map(_is_b, paths)):
      names = [jax.tree_util.keystr(path) for path in paths[:8]]
      raise ValueError(
        'lora_plus: none of the parameters is a `lora_b`; they are '
        f'{names}. Give the optimizer wrt=nnx.LoRAParam, and a model from '
        'nnx_ext.apply_lora.'
      )
    return inner.init(params)

  def update(updates, state, params=None, **extra):
    updates, state = inner.update(updates, state, params, **extra)
    return jax.tree.map_with_path(scale, updates), state

  def scale(path, value):
    return value * ratio if _is_b(path) else value

  return optax.GradientTransformationExtraArgs(init, update)


def _is_b(path: tuple[tp.Any, ...]) -> bool:
  return any(getattr(part, 'key', None) == 'lora_b' for part in path)


def lora_fa_filter(path: tuple[tp.Any, ...], variable: tp.Any) -> bool:
  """The nnx filter of the factors B alone: LoRA with A frozen.

  A backward pass that has no gradient of A needs the hidden activations, of
  the rank's width, but not the layer's input, so it need not be kept. An
  Embed's A starts at zero and its B does not: for one to learn with this
  filter, start it the other way round, with ``patterns={nnx.Embed: dict(
  a_initializer=nnx.initializers.normal(1.0),
  b_initializer=nnx.initializers.zeros)}``.

  Example::

    >>> from flax import nnx
    >>> import jax
    >>> import nnx_ext
    ...
    >>> model = nnx_ext.apply_lora(
    ...   nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rank=1, rngs=nnx.Rngs(1)
    ... )
    >>> trained = nnx.state(model, nnx_ext.lora_fa_filter)
    >>> jax.tree.map(jax.numpy.shape, nnx.to_pure_dict(trained))
    {'lora': {'lora_b': (1, 3)}}

  It stands where ``nnx.LoRAParam`` would, in the gradient and in the
  optimizer::

    >>> import jax.numpy as jnp
    >>> import optax
    ...
    >>> a = model.lora.lora_a[...]
    >>> optimizer = nnx.Optimizer(
    ...   model, optax.sgd(0.1), wrt=nnx_ext.lora_fa_filter
    ... )
    >>> grads = nnx.grad(
    ...   lambda model: model(jnp.ones((1, 2))).sum(),
    ...   argnums=nnx.DiffState(0, nnx_ext.lora_fa_filter),
    ... )(model)
    >>> _ = optimizer.update(model, grads)
    >>> bool(jnp.all(model.lora.lora_a[...] == a))
    True
    >>> bool(jnp.all(model.lora.lora_b[...] == 0))
    False

  See :doc:`the guide on LoRA </guides/lora>`.

  Args:
    path: where the Variable stands.
    variable: the Variable.

  Returns:
    Whether it is the factor B of an adapter.

  References:
    Zhang et al., `LoRA-FA: Memory-efficient Low-rank Adaptation for Large
    Language Models Fine-tuning <https://arxiv.org/abs/2308.03303>`_, 2023.
  """
  return _IS_B(path, variable)


_IS_B = nnx.All(nnx.LoRAParam, nnx.PathContains('lora_b'))
