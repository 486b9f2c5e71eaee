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
"""Gradients by theta where a model's parameters are functions of theta."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import MISSING, Missing

from nnx_ext import _words
from nnx_ext._call import Call, transformed
from nnx_ext._step import Options, Result, differentiate
from nnx_ext.substitute import find_slots
from nnx_ext.typing import Values

Filter = nnx.filterlib.Filter
Path = tuple[tp.Any, ...]
Transform = tp.Callable[[tp.Any, nnx.State], Values]


def reparam_value_and_grad(
  f: tp.Callable[..., tp.Any] | Missing = MISSING,
  transform: Transform | None = None,
  *,
  wrt: Filter = nnx.Param,
  argnums: int | tp.Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  graph: bool | None = None,
  graph_updates: bool | None = None,
) -> tp.Callable[..., tp.Any]:
  """Value and gradient by theta where a model's parameters are f(theta).

  Often what is trained is not the weights but something they are computed
  from: mean and standard deviation of sampled Bayesian weights, direction and
  length of a weight-normalized one, two low-rank factors, a hypernetwork.
  ``nnx.value_and_grad`` of a model whose weights were overwritten gives the
  gradient by the *weights*; this gives the gradient by *theta*, and never
  writes a parameter of the model.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    ...
    >>> def transform(theta, params):  # the weight is a product
    ...   return {'kernel': theta['a'] * theta['b']}
    ...
    >>> def loss(model, x):
    ...   return jnp.sum(model(x))
    ...
    >>> step = nnx_ext.reparam_value_and_grad(loss, transform)
    >>> theta = {'a': jnp.full((1, 1), 4.0), 'b': jnp.full((1, 1), 1.0)}
    >>> value, grads = step(theta, model, jnp.full((1, 1), 2.0))
    >>> float(value), float(grads['a'][0, 0]), float(grads['b'][0, 0])
    (8.0, 2.0, 8.0)

  Theta may be a Module, with rngs and statistics of its own. It is then called
  with the model's parameters, and its gradient is a ``State`` for its
  optimizer. Here it draws one sample of the weights at each call::

    >>> class Gaussian(nnx.Module):
    ...   def __init__(self, params, rngs):
    ...     self.mean = nnx.data(jax.tree.map(nnx.Param, params))
    ...     self.rho = nnx.Param(jnp.array(-3.0))
    ...     self.rngs = rngs
    ...
    ...   def __call__(self, params):
    ...     std = jax.nn.softplus(self.rho[...])
    ...     noise = lambda m: jax.random.normal(self.rngs.noise(), m.shape)
    ...     return jax.tree.map(lambda m: m + std * noise(m), self.means())
    ...
    ...   def means(self):
    ...     return nnx.as_pure(self.mean)
    ...
    >>> theta = Gaussian(
    ...   {'kernel': jnp.ones((1, 1))}, nnx.Rngs(noise=0)
    ... )
    >>> value, grads = nnx_ext.reparam_value_and_grad(loss)(
    ...   theta, model, jnp.full((1, 1), 2.0)
    ... )
    >>> sorted(grads), int(theta.rngs.noise.count[...])
    (['mean', 'rho'], 1)

  ``wrt`` says what the transform is given and may replace, and ``argnums`` can
  add the model's own parameters: those that ``wrt`` selects and the transform
  leaves. Here the bias is trained beside theta::

    >>> @nnx_ext.reparam_value_and_grad(
    ...   transform=transform,
    ...   wrt=nnx.Any(nnx.PathContains('kernel'), nnx.PathContains('bias')),
    ...   argnums=(0, 1),
    ...   has_aux=True,
    ... )
    ... def step(model, x):
    ...   y = model(x)
    ...   return jnp.sum(y), y.shape
    ...
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> theta = {'a': jnp.full((1, 1), 4.0), 'b': jnp.full((1, 1), 1.0)}
    >>> (value, aux), grads = step(theta, model, jnp.full((1, 1), 2.0))
    >>> aux, sorted(grads[0]), sorted(grads[1])
    ((1, 1), ['a', 'b'], ['bias'])

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    f: an ordinary loss, ``f(model, *args, **kwargs)``, that returns a real
      scalar, or ``(loss, aux)`` with ``has_aux=True``.
    transform: ``transform(theta, params) -> values``. ``params`` is the pure
      ``State`` (of arrays) of what ``wrt`` selects from the model; no gradient
      flows through it. ``values`` are all or some of its entries, as a
      ``State`` or a nested dict, of the same shapes; they are cast to the
      dtypes of what they replace. With None, theta is a Module and
      ``theta(params)`` gives the values.
    wrt: the filter of the model's Variables that may be replaced.
    argnums: which arguments of the call to differentiate by: 0 for theta, 1
      for what ``wrt`` selects from the model and the transform did not return,
      2 and up for the rest; an int or a sequence of ints.
    has_aux: whether ``f`` returns ``(loss, aux)``.
    holomorphic: as in ``nnx.value_and_grad``.
    allow_int: as in ``nnx.value_and_grad``.
    graph: as in ``nnx.value_and_grad``.
    graph_updates: as in ``nnx.value_and_grad``.

  Returns:
    A function that is called as ``(theta, model, *args, **kwargs)`` and returns
    ``(value, gradient)``, or ``((value, aux), gradient)`` with
    ``has_aux=True``. The gradient by theta is of theta's own type, but for a
    Module it is the ``State`` of its Params, in every mode; by the model it is
    a ``State``. The model's parameters are as before; its other Variables and
    theta's move as by one call.

  Raises:
    ValueError: if the transform returns an unknown path, another shape or kind
      of dtype, or two values for a tied Variable; if ``wrt`` matches nothing.
    TypeError: if the transform returns no State or dict, if theta is not
      callable and there is no transform, or if the loss is no real scalar.
  """
  reparam = _Reparam.check(
    'reparam_value_and_grad',
    transform=transform,
    wrt=wrt,
    argnums=argnums,
    has_aux=has_aux,
    holomorphic=holomorphic,
    allow_int=allow_int,
    graph=graph,
    graph_updates=graph_updates,
  )

  def run(f, args, kwargs):
    return reparam.run(f, args, kwargs).value_and_grad(has_aux)

  return transformed(reparam.api, f, run)


def reparam_grad(
  f: tp.Callable[..., tp.Any] | Missing = MISSING,
  transform: Transform | None = None,
  *,
  wrt: Filter = nnx.Param,
  argnums: int | tp.Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  graph: bool | None = None,
  graph_updates: bool | None = None,
) -> tp.Callable[..., tp.Any]:
  """Gradient by theta where a model's parameters are f(theta).

  Like :func:`reparam_value_and_grad`, without the value: for what needs only
  the gradient.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    >>> grads = nnx_ext.reparam_grad(
    ...   lambda model, x: jnp.sum(model(x)),
    ...   lambda theta, params: {'kernel': theta[0] * theta[1]},
    ... )((jnp.full((1, 1), 2.0),) * 2, model, jnp.full((1, 1), 2.0))
    >>> [float(g[0, 0]) for g in grads]
    [4.0, 4.0]

  With ``has_aux=True`` the aux comes after the gradient, as in ``nnx.grad``::

    >>> def loss(model, x):
    ...   y = model(x)
    ...   return jnp.sum(y), y
    ...
    >>> grads, y = nnx_ext.reparam_grad(
    ...   loss,
    ...   lambda theta, params: jax.tree.map(lambda p: theta * p, params),
    ...   wrt=nnx.PathContains('kernel'),
    ...   has_aux=True,
    ... )(jnp.array(0.0), model, jnp.ones((1, 1)))
    >>> grads.shape, float(y[0, 0])
    ((), 0.0)

  See :doc:`the guide on parameters </guides/parameters>`.

  Args:
    f: as in :func:`reparam_value_and_grad`.
    transform: as in :func:`reparam_value_and_grad`.
    wrt: as in :func:`reparam_value_and_grad`.
    argnums: as in :func:`reparam_value_and_grad`.
    has_aux: as in :func:`reparam_value_and_grad`.
    holomorphic: as in :func:`reparam_value_and_grad`.
    allow_int: as in :func:`reparam_value_and_grad`.
    graph: as in :func:`reparam_value_and_grad`.
    graph_updates: as in :func:`reparam_value_and_grad`.

  Returns:
    A function that is called as ``(theta, model, *args, **kwargs)`` and returns
    the gradient, or ``(gradient, aux)`` with ``has_aux=True``.

  Raises:
    ValueError: as :func:`reparam_value_and_grad` does.
    TypeError: as :func:`reparam_value_and_grad` does.
  """
  reparam = _Reparam.check(
    'reparam_grad',
    transform=transform,
    wrt=wrt,
    argnums=argnums,
    has_aux=has_aux,
    holomorphic=holomorphic,
    allow_int=allow_int,
    graph=graph,
    graph_updates=graph_updates,
  )

  def run(f, args, kwargs):
    return reparam.run(f, args, kwargs).grad(has_aux)

  return transformed(reparam.api, f, run)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Replaced:
  """Paths of the Variables that the transform returned: static in JAX."""

  paths: frozenset[Path]


@dataclasses.dataclass(frozen=True)
class _Reparam:
  """Checked options, and one loss as a function of theta and the model."""

  api: str
  transform: Transform | None
  wrt: Filter
  has_aux: bool
  options: Options

  @classmethod
  def check(
    cls,
    api: str,
    *,
    transform: Transform | None,
    wrt: Filter,
    argnums: int | tp.Sequence[int],
    has_aux: bool,
    **rest: tp.Any,
  ) -> '_Reparam':
    if transform is not None and not callable(transform):
      raise TypeError(
        f'{api}: `transform` must be a function of (theta, params), got '
        f'{_words.value(transform)}. Options are keyword-only.'
      )

    def entry(argnum):
      # In every mode: theta by its Params, the model by what `wrt` selects.
      if isinstance(argnum, bool) or not isinstance(argnum, (int, np.integer)):
        return argnum
      if argnum < 0:
        raise ValueError(
          f'{api}: argnums count from 0, which is theta, and 1, which is the '
          f'model, got {argnum}.'
        )
      if argnum > 1:
        return argnum
      return nnx.DiffState(int(argnum), wrt if argnum else nnx.Param)

    entries = (
      tuple(map(entry, argnums))
      if isinstance(argnums, (tuple, list))
      else entry(argnums)
    )
    options = Options.check(
      api,
      argnums={'loss': entries},
      has_aux=True,
      reduce=None,
      weights=None,
      allow_unused=True,
      **rest,
    )
    return cls(api, transform, wrt, has_aux, options)

  def run(self, f: tp.Callable, args: tuple, kwargs: dict) -> Result:
    """Value, gradients and aux of one call."""
    if len(args) < 2:
      raise TypeError(
        f'{self.api}: the function is called as (theta, model, *args, '
        f'**kwargs), got {len(args)} positional arguments.'
      )
    theta, *rest = args
    bound = Call.bind(self.api, f, tuple(rest), kwargs)
    call = dataclasses.replace(
      bound,
      args=(_unaliased(theta, bound.args[0]), *bound.args),
      names=('theta', *bound.names),
    )
    result = differentiate(functools.partial(self._loss, f), self.options, call)
    aux, replaced = result.aux
    gradients = self._without(replaced.paths, result.gradients['loss'])
    return Result(result.losses['loss'], gradients, aux)

  def _loss(self, f, theta, model, *args, **kwargs):
    """Runs ``f`` with the effective weights in the model's own Variables.

    These are Variables of this trace only; they hold their old values again
    before anything leaves it.
    """
    selected = nnx.state(model, self.wrt, graph=True)
    params = jax.tree.map(_constant, nnx.as_pure(selected))
    variables = dict(nnx.to_flat_state(selected))
    slots = find_slots(
      self.api, model, variables, self._values(theta, params), self.wrt
    )
    before = {path: v.get_raw_value() for path, v in variables.items()}
    for variable, value in slots.values():
      variable.set_raw_value(value)
    out = f(model, *args, **kwargs)
    for path, variable in variables.items():
      variable.set_raw_value(before[path])
    loss, aux = self._read(out)
    return {'loss': loss}, (aux, _Replaced(frozenset(slots)))

  def _values(self, theta, params) -> Values:
    if self.transform is not None:
      return self.transform(theta, params)
    if not callable(theta) or isinstance(theta, nnx.Variable):
      raise TypeError(
        f'{self.api}: without a `transform`, theta must be a Module that is '
        f'called with the params, got {_words.value(theta)}.'
      )
    return theta(params)

  def _read(self, out):
    if not self.has_aux:
      return out, None
    if type(out) is not tuple or len(out) != 2:
      raise ValueError(
        f'{self.api}: with has_aux=True `f` must return a pair (loss, aux), '
        f'got {_words.value(out)}.'
      )
    return out

  def _without(self, paths, gradients):
    """Drops what the transform returned from the gradient by the model."""
    entries = self.options.argnums.values()[0]
    bare = isinstance(entries, (int, nnx.DiffState))
    entries = (entries,) if bare else entries
    kept = [
      self._drop(paths, gradient) if _argnum(entry) == 1 else gradient
      for entry, gradient in zip(entries, (gradients,) if bare else gradients)
    ]
    return kept[0] if bare else tuple(kept)

  def _drop(self, paths, gradient: nnx.State) -> nnx.State:
    return nnx.from_flat_state(
      {p: v for p, v in nnx.to_flat_state(gradient) if p not in paths}
    )


def _argnum(entry: int | nnx.DiffState) -> int:
  return entry.argnum if isinstance(entry, nnx.DiffState) else entry


def _constant(x):
  inexact = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
  return jax.lax.stop_gradient(x) if inexact else x


def _unaliased(theta: tp.Any, model: tp.Any) -> tp.Any:
  """Theta with copies of the Variables that the model holds as well: its
  gradient is that of an independent theta.
  """
  is_variable = lambda x: isinstance(x, nnx.Variable)
  shared = {
    id(node)
    for _, node in nnx.iter_graph(model, graph=True)
    if is_variable(node)
  }
  if not any(
    id(node) in shared
    for _, node in nnx.iter_graph(theta, graph=True)
    if is_variable(node)
  ):
    return theta
  copies: dict[int, nnx.Variable] = {}

  def copy(x):
    if not is_variable(x) or id(x) not in shared:
      return x
    return copies.setdefault(id(x), x.copy())

  return jax.tree.map(copy, theta, is_leaf=is_variable)
