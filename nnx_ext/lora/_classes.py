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
"""Which class a layer has when it is adapted, and which when it is not."""

import copyreg
import functools
import inspect
import typing as tp

from flax import nnx

from nnx_ext.lora._layer import LoRALayer
from nnx_ext.lora.layers import (
  LoRAConv,
  LoRAConvTranspose,
  LoRAEinsum,
  LoRAEmbed,
  LoRALinear,
  LoRALinearGeneral,
)

_ADAPTED: dict[type[nnx.Module], type[LoRALayer]] = {
  cls._kind.plain: cls
  for cls in (
    LoRALinear,
    LoRALinearGeneral,
    LoRAEinsum,
    LoRAConv,
    LoRAConvTranspose,
    LoRAEmbed,
  )
}


def adapted_class(plain: type[nnx.Module]) -> type[LoRALayer]:
  """The class of an adapted layer, for flax's class or a subclass of it.

  A subclass keeps its methods. Where these go on to flax's own forward, they
  find the adapted one. Where they read the weight themselves, they run on a
  copy of the layer that has the effective weight.
  """
  return _ADAPTED[plain] if plain in _ADAPTED else _derived(plain)


def plain_class(adapted: type[LoRALayer]) -> type[nnx.Module] | None:
  """The class of a layer before it was adapted, if there is one."""
  if isinstance(adapted, _Derived):
    return tp.cast(tp.Any, adapted).derived_from
  return adapted._kind.plain if adapted in _ADAPTED.values() else None


class _Derived(type(nnx.Module)):  # type: ignore[misc]
  """The classes that are made here, for users' subclasses."""

  derived_from: tp.Any


# No module holds these classes by name. They are pickled as what makes them.
def _reduce(cls: _Derived):
  return _derived, (cls.derived_from,)


copyreg.pickle(_Derived, _reduce)


@functools.cache
def _derived(plain: type[nnx.Module]) -> type[LoRALayer]:
  base = next(cls for cls in plain.__mro__ if cls in _ADAPTED)
  adapted = _ADAPTED[base]
  members: dict[str, tp.Any] = {
    '__module__': plain.__module__,
    '__qualname__': f'LoRA{plain.__qualname__}',
    '__doc__': plain.__doc__,
    'derived_from': plain,
  }
  for cls in plain.__mro__:
    if cls is base:
      break
    for name, member in vars(cls).items():
      if name not in members and _wants_weight(name, member, adapted):
        members[name] = _on_plain(name, member)
  return _Derived(f'LoRA{plain.__name__}', (plain, adapted), members)


def _wants_weight(name: str, member: tp.Any, adapted: type[LoRALayer]) -> bool:
  """Whether a user's method may read the weight, other than through flax.

  It does if it names the weight. A forward that does not go on by ``super`` is
  taken to do so too, whatever it calls.
  """
  if isinstance(member, property):
    member = member.fget
  if isinstance(member, (staticmethod, classmethod)) or name in _CONSTRUCTION:
    return False
  function = inspect.unwrap(member) if callable(member) else member
  if not inspect.isfunction(function):
    return name in _FORWARDS
  names = _names(function.__code__)
  if adapted._kind.weight_name in names:
    return True
  return name in _FORWARDS and not names & {'super', '__class__'}


_FORWARDS = ('__call__', 'attend')
_CONSTRUCTION = ('__init__', '__post_init__', '__new__', '__init_subclass__')


def _names(code) -> set[str]:
  """What a function's code, and the functions in it, call by name."""
  inner = [const for const in code.co_consts if inspect.iscode(const)]
  own = {*code.co_names, *code.co_freevars, *code.co_cellvars}
  strings = {const for const in code.co_consts if isinstance(const, str)}
  return own.union(strings, *map(_names, inner))


def _on_plain(name: str, member: tp.Any) -> tp.Any:
  """A method, or a property, as of the layer with its effective weight."""
  if isinstance(member, property):
    read = lambda self: _run(self, lambda plain: getattr(plain, name))
    return property(read, member.fset, member.fdel, member.__doc__)

  @functools.wraps(member)
  def method(self, *args, **kwargs):
    return _run(self, lambda plain: getattr(plain, name)(*args, **kwargs))

  return method


def _run(layer: LoRALayer, call: tp.Callable[[nnx.Module], tp.Any]) -> tp.Any:
  """A call on a copy that is plain; what it sets comes back to the layer."""
  cls: tp.Any = type(layer)
  plain = object.__new__(cls.derived_from)
  seen = dict(vars(layer))
  if not layer.lora.disabled:
    weight = layer._kind.weight(layer)
    effective = layer.lora.weight(weight.get_value())
    seen[layer._kind.weight_name] = weight.replace(effective)
  vars(plain).update(seen)
  result = call(plain)
  for key, value in vars(plain).items():
    if value is not seen.get(key) and not key.startswith('_pytree__'):
      setattr(layer, key, value)
  return result
