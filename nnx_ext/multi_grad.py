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
"""Several losses from one forward pass, each with its own gradient."""

import typing as tp

from flax.typing import MISSING, Missing

from nnx_ext._call import Call, transformed
from nnx_ext._step import Options, differentiate, plan
from nnx_ext.plan import MultiPlan
from nnx_ext.typing import Argnums, MultiOptions, Weights


@tp.overload
def value_and_grad_multi(
  f: tp.Callable[..., tp.Any], **options: tp.Unpack[MultiOptions]
) -> tp.Callable[..., tp.Any]: ...
@tp.overload
def value_and_grad_multi(
  **options: tp.Unpack[MultiOptions],
) -> tp.Callable[[tp.Callable[..., tp.Any]], tp.Callable[..., tp.Any]]: ...
def value_and_grad_multi(
  f: tp.Callable[..., tp.Any] | Missing = MISSING,
  *,
  argnums: Argnums = 0,
  has_aux: bool = False,
  reduce: tp.Literal['sum'] | None = None,
  weights: Weights | None = None,
  allow_unused: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  graph: bool | None = None,
  graph_updates: bool | None = None,
) -> tp.Any:
  """Object-aware values and gradients of several losses from one forward.

  ``nnx.value_and_grad`` differentiates one loss. When losses share a forward
  pass (an actor and a critic whose losses both need the advantage, a GAN,
  multi-task heads) one call for each loss runs that forward again each time,
  moves running statistics and rng counts again each time, and draws new
  dropout masks each time. ``value_and_grad_multi`` runs ``f`` once, returns
  each loss's own gradient by its own part of the arguments, and moves state
  once. Every gradient equals that of ``nnx.value_and_grad`` on that loss
  alone: what a loss leaks into another's parameters is kept out.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> actor = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    >>> critic = nnx.Linear(4, 1, rngs=nnx.Rngs(1))
    >>> obs, action = jnp.ones((8, 4)), jnp.zeros(8, jnp.int32)
    >>> returns = jnp.ones(8)
    ...
    >>> def losses(actor, critic, obs, action, returns):
    ...   value = critic(obs)[:, 0]
    ...   advantage = jax.lax.stop_gradient(returns - value)
    ...   log_prob = jax.nn.log_softmax(actor(obs))[jnp.arange(8), action]
    ...   return {
    ...     'policy': -jnp.mean(log_prob * advantage),
    ...     'value': jnp.mean((returns - value) ** 2),
    ...   }
    ...
    >>> step = nnx_ext.value_and_grad_multi(
    ...   losses, argnums={'policy': 0, 'value': 1}
    ... )
    >>> values, grads = step(actor, critic, obs, action, returns)
    >>> sorted(values), sorted(grads)
    (['policy', 'value'], ['policy', 'value'])
    >>> jax.tree.map(jnp.shape, grads['value'])
    State({
      'bias': Param(
        value=(1,)
      ),
      'kernel': Param(
        value=(4, 1)
      )
    })

  Each gradient goes straight into the optimizer of its module::

    >>> import optax
    >>> optimizer = nnx.Optimizer(critic, optax.adam(1e-3), wrt=nnx.Param)
    >>> _ = optimizer.update(critic, grads['value'])

  Losses that train one module together, each by its own part of it, want
  ``reduce='sum'``: one gradient, ready for one optimizer, and usually one
  backward pass. An entry of ``argnums`` may be an ``nnx.DiffState`` in every
  mode, and ``weights`` scale the losses' gradients::

    >>> class ActorCritic(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.trunk = nnx.Linear(4, 16, rngs=rngs)
    ...     self.actor = nnx.Linear(16, 2, rngs=rngs)
    ...     self.critic = nnx.Linear(16, 1, rngs=rngs)
    ...
    >>> def params_outside(part):
    ...   return nnx.All(nnx.Param, nnx.Not(nnx.PathContains(part)))
    ...
    >>> @nnx_ext.value_and_grad_multi(
    ...   argnums={
    ...     'policy': nnx.DiffState(0, params_outside('critic')),
    ...     'value': nnx.DiffState(0, params_outside('actor')),
    ...   },
    ...   reduce='sum',
    ...   weights={'policy': 1.0, 'value': 0.5},
    ...   has_aux=True,
    ... )
    ... def step(model, obs):
    ...   features = jnp.tanh(model.trunk(obs))
    ...   logits, value = model.actor(features), model.critic(features)
    ...   losses = {
    ...     'policy': -jnp.mean(jax.nn.log_softmax(logits)[:, 0]),
    ...     'value': jnp.mean((1.0 - value) ** 2),
    ...   }
    ...   return losses, value.shape
    ...
    >>> model = ActorCritic(nnx.Rngs(0))
    >>> (values, aux), grads = step(model, obs)
    >>> aux
    (8, 1)
    >>> sorted(grads)
    ['actor', 'critic', 'trunk']

  :func:`multi_plan` shows what each loss reaches and which backward passes
  run. See :doc:`the guide on several losses </guides/multi_loss>`.

  Args:
    f: function to differentiate. It returns its losses as a flat dict, tuple,
      list or NamedTuple of scalars (shape ``()``, a real floating dtype), or
      a pair ``(losses, aux)`` with ``has_aux=True``. Its arguments may be
      Modules, Variables, arrays, pytrees of these, and anything else that is
      not differentiated. It is called once.
    argnums: what each loss is differentiated by. An int or ``nnx.DiffState``
      serves every loss. Otherwise give one entry for each loss: a dict with
      the losses' keys, or for a tuple, list or NamedTuple of losses a tuple
      or list of the same length. Each entry is what ``nnx.value_and_grad``
      takes: an int, an ``nnx.DiffState``, or a sequence of these. A bare int
      means what it means in flax: an object's ``nnx.Param`` Variables in the
      default mode, every leaf in the other modes. One argument may have
      different filters for different losses.
    has_aux: whether ``f`` returns ``(losses, aux)``.
    reduce: None for one gradient a loss, or ``'sum'`` for one gradient an
      argument, in ascending order of argnums and without a tuple around a
      single one. Each leaf is then the sum over the losses routed to it.
    weights: a real scalar for all losses or one for each, in the forms of
      ``argnums``; may be traced. They scale the gradients (in the dtype of
      the loss), not the returned losses.
    allow_unused: return zeros, instead of raising, when a loss depends on no
      selected leaf of one of its arguments.
    holomorphic: whether ``f`` is promised to be holomorphic; its losses and
      the leaves to differentiate by must then be complex.
    allow_int: allow leaves of integer, boolean or key dtype; their gradients
      are zeros of dtype ``float0``.
    graph: as in ``nnx.value_and_grad``: if True, objects are graphs and may
      share references; if False (tree mode) they are plain pytrees. Defaults
      to flax's current setting.
    graph_updates: as in ``nnx.value_and_grad``: if True, changes of graph
      structure inside ``f`` reach the caller's objects. Defaults to flax's
      current setting.

  Returns:
    A function of ``f``'s arguments that returns ``(losses, gradients)``, or
    ``((losses, aux), gradients)`` with ``has_aux=True``. Without ``reduce``
    the gradients stand in a container like that of the losses (dicts in
    sorted key order, as in JAX). Each has the structure and type that
    ``nnx.value_and_grad`` gives in the same mode; an ``nnx.DiffState`` gives
    an ``nnx.State`` in every mode. In graph modes a Variable that two
    arguments share is part of both gradients.

  Raises:
    ValueError: if the losses, ``argnums`` or ``weights`` do not fit together;
      if a filter matches nothing; if a loss depends on none of the leaves it
      is to be differentiated by (unless ``allow_unused=True``), which is what
      happens when the forward pass is run outside ``f``; if with
      ``reduce='sum'`` two arguments share a Variable.
    TypeError: if a loss is no real scalar (or no complex one with
      ``holomorphic=True``), if ``f`` returns a lone scalar, or if a leaf to
      differentiate by is an integer, a key or a reference.

  No state moves when an error is raised, however late.
  """
  options = Options.check(
    'value_and_grad_multi',
    argnums=argnums,
    has_aux=has_aux,
    reduce=reduce,
    weights=weights,
    allow_unused=allow_unused,
    holomorphic=holomorphic,
    allow_int=allow_int,
    graph=graph,
    graph_updates=graph_updates,
  )

  def run(f, args, kwargs):
    call = Call.bind(options.api, f, args, kwargs)
    return differentiate(f, options, call).value_and_grad(has_aux)

  return transformed(options.api, f, run)


@tp.overload
def grad_multi(
  f: tp.Callable[..., tp.Any], **options: tp.Unpack[MultiOptions]
) -> tp.Callable[..., tp.Any]: ...
@tp.overload
def grad_multi(
  **options: tp.Unpack[MultiOptions],
) -> tp.Callable[[tp.Callable[..., tp.Any]], tp.Callable[..., tp.Any]]: ...
def grad_multi(
  f: tp.Callable[..., tp.Any] | Missing = MISSING,
  *,
  argnums: Argnums = 0,
  has_aux: bool = False,
  reduce: tp.Literal['sum'] | None = None,
  weights: Weights | None = None,
  allow_unused: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  graph: bool | None = None,
  graph_updates: bool | None = None,
) -> tp.Any:
  """Object-aware gradients of several losses from one forward.

  Like :func:`value_and_grad_multi`, without the values: for steps that need
  only the gradients. ``nnx.grad`` of each loss would run again, for each, the
  forward pass that they share.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> generator = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> critic = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    >>> noise, real = jnp.ones((4, 2)), jnp.ones((4, 3))
    ...
    >>> def wgan(generator, critic, noise, real):
    ...   fake_score = jnp.mean(critic(generator(noise)))
    ...   real_score = jnp.mean(critic(real))
    ...   return {'generator': -fake_score, 'critic': fake_score - real_score}
    ...
    >>> grads = nnx_ext.grad_multi(
    ...   wgan, argnums={'generator': 0, 'critic': 1}
    ... )(generator, critic, noise, real)
    >>> jax.tree.map(jnp.shape, grads['generator']['kernel'])
    Param(
      value=(2, 3)
    )

  With ``has_aux=True`` the aux comes after the gradients, as in ``nnx.grad``::

    >>> grads, score = nnx_ext.grad_multi(
    ...   lambda *args: (losses := wgan(*args), losses['generator']),
    ...   argnums={'generator': 0, 'critic': 1},
    ...   has_aux=True,
    ... )(generator, critic, noise, real)
    >>> score.shape
    ()

  See :doc:`the guide on several losses </guides/multi_loss>`.

  Args:
    f: as in :func:`value_and_grad_multi`.
    argnums: as in :func:`value_and_grad_multi`.
    has_aux: as in :func:`value_and_grad_multi`.
    reduce: as in :func:`value_and_grad_multi`.
    weights: as in :func:`value_and_grad_multi`.
    allow_unused: as in :func:`value_and_grad_multi`.
    holomorphic: as in :func:`value_and_grad_multi`.
    allow_int: as in :func:`value_and_grad_multi`.
    graph: as in :func:`value_and_grad_multi`.
    graph_updates: as in :func:`value_and_grad_multi`.

  Returns:
    A function of ``f``'s arguments that returns the gradients, or
    ``(gradients, aux)`` with ``has_aux=True``.

  Raises:
    ValueError: as :func:`value_and_grad_multi` does.
    TypeError: as :func:`value_and_grad_multi` does.
  """
  options = Options.check(
    'grad_multi',
    argnums=argnums,
    has_aux=has_aux,
    reduce=reduce,
    weights=weights,
    allow_unused=allow_unused,
    holomorphic=holomorphic,
    allow_int=allow_int,
    graph=graph,
    graph_updates=graph_updates,
  )

  def run(f, args, kwargs):
    call = Call.bind(options.api, f, args, kwargs)
    return differentiate(f, options, call).grad(has_aux)

  return transformed(options.api, f, run)


@tp.overload
def multi_plan(
  f: tp.Callable[..., tp.Any], **options: tp.Unpack[MultiOptions]
) -> tp.Callable[..., MultiPlan]: ...
@tp.overload
def multi_plan(
  **options: tp.Unpack[MultiOptions],
) -> tp.Callable[[tp.Callable[..., tp.Any]], tp.Callable[..., MultiPlan]]: ...
def multi_plan(
  f: tp.Callable[..., tp.Any] | Missing = MISSING,
  *,
  argnums: Argnums = 0,
  has_aux: bool = False,
  reduce: tp.Literal['sum'] | None = None,
  weights: Weights | None = None,
  allow_unused: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  graph: bool | None = None,
  graph_updates: bool | None = None,
) -> tp.Any:
  """The plan of a multi-loss step: what it computes, and why it costs that.

  Takes what :func:`value_and_grad_multi` takes. The function it returns
  traces ``f`` without computing anything or moving any state, and tells for
  each loss what it reaches, what it is differentiated by and which cross
  gradients are kept out, and for the whole step which backward passes
  (*pullbacks*) run.

  One pullback serves several losses when none of them reaches a leaf that
  only another is differentiated by. A loss that leaks into such a leaf costs
  a pullback of its own there. Between separate networks a
  ``jax.lax.stop_gradient`` on the value that leaks only saves that pullback;
  in parameters that the losses share it changes the gradient.

  Example::

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> import nnx_ext
    ...
    >>> actor = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    >>> critic = nnx.Linear(4, 1, rngs=nnx.Rngs(1))
    ...
    >>> def losses(actor, critic, obs):
    ...   value = critic(obs)[:, 0]
    ...   advantage = 1.0 - value
    ...   log_prob = jax.nn.log_softmax(actor(obs))[:, 0]
    ...   return {
    ...     'policy': -jnp.mean(log_prob * advantage),
    ...     'value': jnp.mean(advantage**2),
    ...   }
    ...
    >>> nnx_ext.multi_plan(losses, argnums={'policy': 0, 'value': 1})(
    ...   actor, critic, jnp.ones((8, 4))
    ... )
    loss policy  by argument 0 (`actor`): reaches 2 of 2 leaves
                 kept out: 2 leaves of argument 1 (`critic`)
    loss value   by argument 1 (`critic`): reaches 2 of 2 leaves
    pullback 1 of 2: policy -> 2 leaves
    pullback 2 of 2: value -> 2 leaves

  The policy loss leaks into the critic through the advantage. With a
  ``stop_gradient`` there, one pullback serves both::

    >>> def stopped(actor, critic, obs):
    ...   value = critic(obs)[:, 0]
    ...   advantage = jax.lax.stop_gradient(1.0 - value)
    ...   log_prob = jax.nn.log_softmax(actor(obs))[:, 0]
    ...   return {
    ...     'policy': -jnp.mean(log_prob * advantage),
    ...     'value': jnp.mean((1.0 - value) ** 2),
    ...   }
    ...
    >>> plan = nnx_ext.multi_plan(stopped, argnums={'policy': 0, 'value': 1})(
    ...   actor, critic, jnp.ones((8, 4))
    ... )
    >>> plan.pullbacks
    (PullbackPlan(losses=('policy', 'value'), leaves=4),)

  See :doc:`the guide on several losses </guides/multi_loss>`.

  Args:
    f: as in :func:`value_and_grad_multi`.
    argnums: as in :func:`value_and_grad_multi`.
    has_aux: as in :func:`value_and_grad_multi`.
    reduce: as in :func:`value_and_grad_multi`.
    weights: as in :func:`value_and_grad_multi`; they change no plan.
    allow_unused: as in :func:`value_and_grad_multi`.
    holomorphic: as in :func:`value_and_grad_multi`.
    allow_int: as in :func:`value_and_grad_multi`.
    graph: as in :func:`value_and_grad_multi`.
    graph_updates: as in :func:`value_and_grad_multi`.

  Returns:
    A function of ``f``'s arguments that returns a :class:`MultiPlan`, which
    prints itself.

  Raises:
    ValueError: as :func:`value_and_grad_multi` does.
    TypeError: as :func:`value_and_grad_multi` does.
  """
  options = Options.check(
    'multi_plan',
    argnums=argnums,
    has_aux=has_aux,
    reduce=reduce,
    weights=weights,
    allow_unused=allow_unused,
    holomorphic=holomorphic,
    allow_int=allow_int,
    graph=graph,
    graph_updates=graph_updates,
  )

  def run(f, args, kwargs):
    return plan(f, options, Call.bind(options.api, f, args, kwargs))

  return transformed(options.api, f, run)
