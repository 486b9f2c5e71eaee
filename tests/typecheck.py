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
"""A runtime type checker for jaxtyping's import hook.

``pytest --jaxtyping-packages=nnx_ext,tests.typecheck.typechecked`` puts
``typechecked`` on every function of the package. typeguard 4's own decorator
rewrites source and checks nothing under that hook; ``typeguard.check_type``
does check, and jaxtyping keeps one binding of axis names for each call.
"""

import functools
import inspect
import typing as tp

import typeguard

_CHECK = functools.partial(
  typeguard.check_type,
  collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
  forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
)


def typechecked(function: tp.Any) -> tp.Any:
  """Checks annotated arguments and the result of ``function``."""
  if inspect.isclass(function) or not inspect.isfunction(function):
    return function
  signature = inspect.signature(function)

  @functools.wraps(function)
  def checked(*args, **kwargs):
    bound = signature.bind(*args, **kwargs)
    for name, value in bound.arguments.items():
      parameter = signature.parameters[name]
      hint = parameter.annotation
      if hint is parameter.empty:
        continue
      values = [value]
      if parameter.kind is parameter.VAR_POSITIONAL:
        values = list(value)
      elif parameter.kind is parameter.VAR_KEYWORD:
        values = list(value.values())
        if tp.get_origin(hint) is tp.Unpack:
          continue
      for each in values:
        _check(function, name, each, hint)
    result = function(*args, **kwargs)
    if signature.return_annotation is not signature.empty:
      _check(function, 'the return value', result, signature.return_annotation)
    return result

  return checked


def _check(function, name, value, hint):
  if inspect.isgenerator(value) or isinstance(hint, str):
    return
  try:
    _CHECK(value, hint)
  except typeguard.TypeCheckError as error:
    raise TypeError(
      f'{function.__qualname__}: {name} is not {hint}: {error}'
    ) from error
