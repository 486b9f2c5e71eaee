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
"""Weights beside something fixed: a mask, a scale, a running average."""

import math
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from nnx_ext.parametrizations._base import Parametrization

Weight = Float[jax.Array, '...']


class Masked(Parametrization):
  r"""Weights of which some are zero and stay so: pruned, or sparse by design.

  .. math::

    w = m \circ v, \qquad m_i \in \{0, 1\}

  A masked entry of :math:`v` gets a gradient of exactly zero, and no momentum
  or weight decay can revive it. Masked entries of the first weight are lost
  to the function, and the others kept bit for bit.

  Source: Han et al., 2015, "Learning both weights and connections for
  efficient neural networks",
  `arXiv:1506.02626 <https://arxiv.org/abs/1506.02626>`__, section 3.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import Masked
    ...
    >>> layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    >>> lower = nnx_ext.parametrize(layer, {
    ...   nnx.PathContains('kernel'):
    ...     lambda w: Masked(w, mask=jnp.tril(jnp.ones(w.shape))),
    ... })
    >>> bool(jnp.all(lower.kernel[...] == jnp.tril(layer.kernel[...])))
    True

  The largest weights are kept by
  ``lambda w: Masked(w, mask=jnp.abs(w) > threshold)``.

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    v: the Param, of the weight's shape and dtype.
    mask: an ``nnx.Variable`` of zeros and ones, in the weight's dtype as some
      modes of NNX differentiate by all Variables.

  Args:
    weight: the current weight.
    mask: an array of the weight's shape, zero or False where the weight is to
      be zero.

  Raises:
    ValueError: if the mask has another shape.
  """

  def __init__(self, weight: Weight, *, mask: tp.Any):
    mask = mask[...] if isinstance(mask, nnx.Variable) else jnp.asarray(mask)
    if mask.shape != weight.shape:
      raise ValueError(
        "Masked: the mask must have the weight's shape "
        f'{weight.shape}, got {mask.shape}; write '
        '`jnp.broadcast_to(mask, weight.shape)` to repeat it.'
      )
    self.v = nnx.Param(weight)
    self.mask = nnx.Variable((mask != 0).astype(weight.dtype))

  def __call__(self) -> Weight:
    v = self.v[...]
    return jnp.where(self.mask[...] != 0, v, jnp.zeros_like(v))


class Scaled(Parametrization):
  r"""Weights with a fixed factor: the equalized learning rate.

  .. math::

    w = c\, v, \qquad c = \sqrt{2 / n}

  where :math:`n` is the fan-in, the product of all axes but the last. Where
  weights are as He's initializer makes them, all layers' :math:`v` are of
  size one, and so an optimizer with normalized steps, such as Adam, changes
  all layers by the same relative amount.

  Source: Karras et al., 2018, "Progressive growing of GANs for improved
  quality, stability, and variation",
  `arXiv:1710.10196 <https://arxiv.org/abs/1710.10196>`__, section 4.1.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import Scaled
    ...
    >>> layer = nnx_ext.parametrize(
    ...   nnx.Linear(
    ...     200, 100, kernel_init=nnx.initializers.he_normal(), rngs=nnx.Rngs(0)
    ...   ),
    ...   {nnx.PathContains('kernel'): Scaled},
    ... )
    >>> layer.kernel.scale
    0.1
    >>> round(float(jnp.std(layer.kernel.v[...])), 1)
    1.0

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    v: the Param, of the weight's shape and dtype.
    scale: the factor :math:`c`.

  Args:
    weight: the current weight.
    scale: the factor; He's constant unless given.

  Raises:
    ValueError: if the factor is zero or not finite.
  """

  def __init__(self, weight: Weight, *, scale: float | None = None):
    if scale is None:
      scale = math.sqrt(2 / max(1, math.prod(weight.shape[:-1])))
    if scale == 0 or not math.isfinite(scale):
      raise ValueError(
        f'Scaled: `scale` must be finite and not zero, got {scale}.'
      )
    self.v = nnx.Param(weight / scale)
    self.scale = scale

  def __call__(self) -> Weight:
    return self.scale * jnp.asarray(self.v[...])

  def log_det(self) -> Float[jax.Array, '']:
    return jnp.full((), self.v.size * math.log(abs(self.scale)))


class EMA(Parametrization):
  r"""Weights that are trained as they are, and averaged for evaluation.

  .. math::

    w = \begin{cases} v & \text{in train mode,}\\
    \bar v & \text{in eval mode,} \end{cases}
    \qquad
    \bar v \leftarrow \bar v + (1 - d)\,(v - \bar v)

  In train mode the weight is the Param itself. After ``model.eval()``, and in
  what :func:`nnx_ext.bake` returns, it is the running average. No forward
  moves the average: :meth:`update` does, after a step of the optimizer.

  Source: Polyak and Juditsky, 1992, "Acceleration of stochastic approximation
  by averaging"; exponential weights as in Kingma and Ba, 2015, "Adam",
  `arXiv:1412.6980 <https://arxiv.org/abs/1412.6980>`__, section 7.2. As the
  average starts at the weight it needs no correction of a bias.

  Example::

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import nnx_ext
    >>> from nnx_ext.parametrizations import EMA
    ...
    >>> model = nnx_ext.parametrize(
    ...   nnx.LayerNorm(2, rngs=nnx.Rngs(0)),
    ...   {nnx.Param: lambda w: EMA(w, decay=0.9)},
    ... )
    >>> model.scale.v[...] += 1.0  # A step of the optimizer.
    >>> for _, module in nnx.iter_modules(model):
    ...   if isinstance(module, EMA):
    ...     module.update()
    ...
    >>> model.scale[...]
    Array([2., 2.], dtype=float32)
    >>> model.eval()
    >>> model.scale[...]
    Array([1.1, 1.1], dtype=float32)

  See :doc:`the guide on parameters </guides/parameters>`.

  Attributes:
    v: the Param, of the weight's shape and dtype.
    average: the ``nnx.BatchStat`` of the average, in float32 at least.
    decay: :math:`d`.
    use_running_average: which of the two is read; set by ``Module.train()``
      and ``Module.eval()``.

  Args:
    weight: the current weight, where both start.
    decay: how much of the average an update keeps.
    use_running_average: whether to start in eval mode.

  Raises:
    ValueError: if ``decay`` is not in [0, 1).
  """

  def __init__(
    self,
    weight: Weight,
    *,
    decay: float = 0.999,
    use_running_average: bool = False,
  ):
    if not 0 <= decay < 1:
      raise ValueError(
        f'EMA: `decay` must be at least 0 and less than 1, got {decay}.'
      )
    # In bfloat16 a step of (1 - decay) would be rounded away.
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    self.v = nnx.Param(weight)
    self.average = nnx.BatchStat(jnp.array(weight, wide))
    self.decay = decay
    self.use_running_average = use_running_average

  def __call__(self) -> Weight:
    v = self.v[...]
    return self.average[...].astype(v.dtype) if self.use_running_average else v

  def update(self) -> None:
    """Moves the average towards the current ``v``."""
    average = self.average[...]
    step = self.v[...].astype(average.dtype) - average
    self.average[...] = average + (1 - self.decay) * step
