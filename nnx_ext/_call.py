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
"""The user's function and one call of it, with words for its arguments."""

import dataclasses
import functools
import inspect
import typing as tp

from flax import errors, nnx
from flax.typing import Missing

from nnx_ext import _words


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of ``f``, its arguments resolved to positions as in flax."""

  api: str
  """The public name that the user called, for messages."""
  args: tuple
  kwargs: dict[str, tp.Any]
  names: tuple[str | None, ...]
  """Parameter names of ``args``, where they have one."""

  @classmethod
  def bind(cls, api: str, f: tp.Callable, args: tuple, kwargs: dict) -> 'Call':
    """Moves keyword arguments to their positions and fills in defaults.

    Keyword-only arguments stay in ``kwargs``. The arguments of a
    ``functools.partial`` stay where the caller put them.
    """
    try:
      signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin tells no signature
      return cls(api, args, kwargs, (None,) * len(args))
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as error:
      name = getattr(f, '__name__', 'f')
      raise TypeError(
        f'{api}: `{name}{signature}` cannot be called so: {error}.'
      ) from None
    if not isinstance(f, functools.partial):
      bound.apply_defaults()
    names: list[str | None] = [
      parameter.name
      for parameter in signature.parameters.values()
      if parameter.kind in _POSITIONAL
    ]
    names += [None] * len(bound.args)
    return cls(api, bound.args, bound.kwargs, tuple(names[: len(bound.args)]))

  def argument(self, argnum: int) -> str:
    """How messages speak of an argument: ``argument 0 (`actor`)``."""
    name = self.names[argnum]
    return f'argument {argnum}' + (f' (`{name}`)' if name else '')

  @property
  def tree(self) -> tuple[tuple, dict[str, tp.Any]]:
    """All arguments; a path in it begins with 0 or 1, then argnum or name."""
    return self.args, self.kwargs

  def where(self, path: tp.Sequence[tp.Any]) -> str:
    """How messages speak of a place in ``tree``."""
    kind, position, *rest = path
    argument = (
      f'keyword argument `{position}`' if kind else self.argument(position)
    )
    return f'{_words.path(rest)} of {argument}' if rest else argument

  def position(self, argnum: int) -> int:
    """``argnum`` counted from the front, checked against the call."""
    count = len(self.args)
    if not -count <= argnum < count:
      listing = ', '.join(self.argument(i) for i in range(count)) or 'none'
      keyword_only = (
        f' Keyword-only arguments ({", ".join(self.kwargs)}) have no '
        'position: pass what is differentiated by position.'
        if self.kwargs
        else ''
      )
      raise ValueError(
        f'{self.api}: argnum {argnum} is out of range: `f` was called with '
        f'{count} positional arguments ({listing}).{keyword_only}'
      )
    return argnum % count


_POSITIONAL = (
  inspect.Parameter.POSITIONAL_ONLY,
  inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def check_function(api: str, f: tp.Any) -> None:
  """Refuses what is no function, and bound methods, which hide their Module
  from the transform.
  """
  if not callable(f) or isinstance(f, nnx.Variable):
    raise TypeError(
      f'{api}: `f` must be a function, got {type(f).__name__}. Options are '
      f'keyword-only: {api}(f, argnums=...).'
    )
  while isinstance(f, functools.partial):
    f = f.func
  owner = getattr(f, '__self__', None)
  if inspect.ismethod(f) and isinstance(owner, nnx.Module):
    cls, method = type(owner).__name__, f.__name__
    raise ValueError(
      f'{api} does not support bound methods: the {cls} behind '
      f'`{method}` would be captured instead of differentiated. Pass it as '
      f'an argument: {api}({cls}.{method}, ...)(module, ...).'
    )


def explain_captured(api: str, f: tp.Callable) -> tp.Callable:
  """``f``, with words for the case that it changes a captured Module."""

  @functools.wraps(f)
  def wrapper(*args, **kwargs):
    try:
      return f(*args, **kwargs)
    except errors.TraceContextError as error:
      name = getattr(f, '__name__', 'f')
      raise errors.TraceContextError(
        f'{api}: `{name}` changed a Module or Variable that it captured '
        'from outside instead of receiving it as an argument (statistics '
        'and rng counts change in a forward pass, too). Pass it as an '
        f'argument: {api}({name}, ...)(module, ...). Flax says: {error}'
      ) from error

  return wrapper


def transformed(
  api: str, f: tp.Any, run: tp.Callable[[tp.Callable, tuple, dict], tp.Any]
) -> tp.Callable[..., tp.Any]:
  """``f``, its calls made by ``run``; a decorator where ``f`` is missing."""
  if isinstance(f, Missing):

    def decorator(*args, **kwargs):
      if len(args) != 1 or kwargs:
        got = [type(arg).__name__ for arg in args] + [*map(repr, kwargs)]
        raise TypeError(
          f'{api}: with options alone it is a decorator, which takes only '
          f'the function `f`, got ({", ".join(got)}).'
        )
      return transformed(api, args[0], run)

    return decorator
  check_function(api, f)

  @functools.wraps(f)
  def wrapper(*args, **kwargs):
    return run(f, args, kwargs)

  return wrapper
