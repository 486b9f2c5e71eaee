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
"""Whether a device computes what it should, in float32 and in bfloat16.

``python -m benchmarks.device_checks [NAME...]`` runs steps of the package on
the default device, and exits with 1 if any result is wrong. Beside each it
runs, in float64 on the processor, what is written by hand for the same values
and gradients, from the same weights and inputs, which are rounded to the lower
precision first. Nothing here draws random numbers inside of a step, as these
change with the default precision, and ``nnx.relu`` is replaced by a function
without a kink, where rounding a number near zero would change the derivative.
"""

import contextlib
import dataclasses
import functools
import sys
import traceback
import typing as tp
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import (
  lora_programs,
  models,
  multi_programs,
  reparam_programs,
  steps,
)
from benchmarks.lora_ways import NAIVE, OURS, Training

WRONG = 'WRONG'


class Bounds(tp.NamedTuple):
  """What an error is to be between.

  Below the least nothing was rounded as it should have been.
  """

  least: float
  most: float


def _bounds(dtype: tp.Any, most: float) -> Bounds:
  unit = float(jnp.finfo(dtype).eps) / 2
  return Bounds(unit / 100, most * unit)


# In units of rounding. Some 30 operations in a row each round by a unit at
# most, up or down, which makes about sqrt(30) units in bfloat16, where products
# are summed in float32; in float32 the sums round too, over up to 1000 numbers,
# which makes sqrt(30 * 1000). Products in TF32 would be thousands off.
BOUNDS = {
  jnp.float32: _bounds(jnp.float32, 150.0),
  jnp.bfloat16: _bounds(jnp.bfloat16, 12.0),
}


@dataclasses.dataclass(frozen=True)
class Check:
  """A step, and what it is compared with.

  Attributes:
    make: a step of the package and one by hand, given a dtype. Both return the
      same leaves in the same order.
    read: the values and gradients of what a step returns.
    dtypes: to compute it in.
  """

  make: tp.Callable[[tp.Any], tuple[steps.Jitted, steps.Jitted]]
  read: tp.Callable[[tuple], tp.Any] = lambda out: out[0]
  dtypes: tuple[tp.Any, ...] = tuple(BOUNDS)


def _multi(name: str, hand: str, program: tp.Callable, **sizes) -> Check:
  def make(dtype):
    made = program(**sizes, dtype=dtype).case(name, hand).steps
    return made[name](), made[hand]()

  return Check(make)


def _reparam(name: str, program: tp.Callable, **sizes) -> Check:
  def make(dtype):
    made = program(**sizes, dtype=dtype).steps
    return made[name](), made['by hand']()

  return Check(make)


def _lora(program: tp.Callable, **sizes) -> Check:
  def make(dtype):
    made = program(**sizes, dtype=dtype).steps
    return made[OURS](), made[NAIVE]()

  return Check(make, lambda out: out)


def _adapted(base: tp.Callable, shape: tuple[int, ...], **options) -> Check:
  """Gradients alone, as an update by Adam is hardly more than their signs."""

  def make(dtype):
    x = jax.random.normal(jax.random.key(1), shape, dtype)
    model = base(dtype=dtype, rngs=nnx.Rngs(0))
    training = Training(model, x, rank=8, train=False, **options)
    return training.nnx_ext(), training.naive()

  return Check(make, lambda out: out)


def _in_float32(check: Check) -> Check:
  """Recurrent weights start as those of a QR, of which there's no bfloat16."""
  return dataclasses.replace(check, dtypes=(jnp.float32,))


_WIDE = dict(width=256, size=256)
_TOKENS = dict(depth=2, width=128, size=2, length=64)
_BLOCK = functools.partial(models.Block, 256, 1024)
_LAYER = functools.partial(models.Layer, 128, 512, 4)

CHECKS = {
  'multi: shared trunk': _multi(
    'nnx_ext', 'naive', multi_programs.heads, **_WIDE
  ),
  'multi: leak, summed': _multi(
    'nnx_ext, sum', 'naive, sum', multi_programs.heads, leak=True, **_WIDE
  ),
  'multi: actor and critic, scanned': _multi(
    'nnx_ext', 'naive', multi_programs.scanned, depth=3, **_WIDE
  ),
  'multi: transformer, remat': _multi(
    'nnx_ext', 'naive', multi_programs.transformer, remat=True, **_TOKENS
  ),
  'reparam: weight norm': _reparam(
    'parametrize', reparam_programs.weight_norm, depth=3, peers=False, **_WIDE
  ),
  'reparam: weight norm, scanned': _reparam(
    'reparam_grad', reparam_programs.weight_norm_scanned, depth=3, **_WIDE
  ),
  'reparam: orthogonal recurrent': _in_float32(
    _reparam(
      'materialize',
      reparam_programs.orthogonal_recurrent,
      width=128,
      time=8,
      size=64,
    )
  ),
  'reparam: hypernetwork': _reparam(
    'reparam_grad',
    reparam_programs.hypernetwork,
    depth=2,
    width=64,
    size=512,
    embedding=32,
    hidden=64,
  ),
  'lora: block': _adapted(_BLOCK, (512, 256)),
  'lora: block, DoRA': _adapted(_BLOCK, (512, 256), dora=True),
  'lora: transformer layer': _adapted(_LAYER, (2, 64, 128)),
  'lora: conv': _lora(lora_programs.conv, channels=64, size=16, batch=4),
  'lora: recurrent': _in_float32(
    _lora(lora_programs.recurrent, width=128, batch=16, length=8)
  ),
  'lora: attend': _lora(
    lora_programs.attend, vocabulary=2000, width=128, tokens=256
  ),
}


@contextlib.contextmanager
def _float64_on_cpu():
  """What the programs compute in float32, whatever they are given, too."""
  with (
    jax.enable_x64(True),
    jax.default_device(jax.devices('cpu')[0]),
    mock.patch.object(jnp, 'float32', jnp.float64),
  ):
    yield


def _leaves(check: Check, out: tp.Any) -> list[tuple[str, jax.Array]]:
  flat = jax.tree_util.tree_leaves_with_path(check.read(out))
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def _wide(leaf: jax.Array) -> tp.Any:
  """On the host; floating point in float64, and keys as they are."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.device_put(leaf, jax.devices('cpu')[0])
  leaf = np.asarray(leaf)
  floating = jnp.issubdtype(leaf.dtype, jnp.floating)
  return leaf.astype(np.float64) if floating else leaf


def errors(name: str, check: Check) -> tp.Iterator[tuple]:
  """For each dtype, its name, the largest error of a leaf, and its path."""
  with _float64_on_cpu():
    reference = check.make(jnp.float64)[1]
    exactly = jax.jit(reference.function)
  shaped, treedef = jax.tree.flatten(reference.arguments)

  for dtype in check.dtypes:
    ours, by_hand = check.make(dtype)
    precision = 'highest' if dtype == jnp.float32 else 'default'
    with jax.default_matmul_precision(precision):
      got = _leaves(check, jax.jit(ours.function)(*ours.arguments))

    arguments = list(map(_wide, jax.tree.leaves(by_hand.arguments)))
    _same_shapes(name, arguments, shaped)
    with _float64_on_cpu():
      out = exactly(*treedef.unflatten(arguments))
    expected = [np.asarray(leaf) for _, leaf in _leaves(check, out)]
    _same_shapes(name, [leaf for _, leaf in got], expected)
    if any(leaf.dtype != np.float64 for leaf in expected):
      raise TypeError(f'{name}: the reference is not all of float64.')

    # Some gradients are zero, as that of the bias of keys, and what is computed
    # of them is rounding: these are compared with a part of all.
    norms = [float(np.linalg.norm(exact)) for exact in expected]
    part = 0.01 * np.linalg.norm(norms)
    each = [
      (float(np.linalg.norm(_wide(leaf) - exact) / max(norm, part)), path)
      for (path, leaf), exact, norm in zip(got, expected, norms, strict=True)
    ]
    yield dtype, *max(each, key=lambda one: (np.isnan(one[0]), one[0]))


def _same_shapes(name: str, leaves: tp.Sequence, others: tp.Sequence) -> None:
  shapes, other = ([leaf.shape for leaf in one] for one in (leaves, others))
  if shapes != other:
    raise ValueError(f'{name}: {shapes} are not {other}.')


def _row(name: str, dtype: tp.Any, error: float, path: str) -> tuple:
  bounds = BOUNDS[dtype]
  ok = bounds.least < error < bounds.most  # not of nan
  numbers = (f'{x:.1e}' for x in (error, *bounds))
  return name, jnp.dtype(dtype).name, *numbers, 'ok' if ok else WRONG, path


def main(names: tp.Sequence[str] = ()) -> int:
  """Checks all, or those of these names; how many are wrong."""
  print(f'On {jax.devices()[0].device_kind}, beside float64 on the processor.')
  line = '{:34}{:10}{:>9}{:>9}{:>9}  {:7}{}'.format
  head = 'program', 'dtype', 'error', 'least', 'most', '', 'of'
  print(line(*head), flush=True)
  wrong = 0
  for name in names or CHECKS:
    try:
      with mock.patch.object(nnx, 'relu', jnp.tanh):
        rows = [_row(name, *one) for one in errors(name, CHECKS[name])]
    except Exception:  # The others are worth a look whatever it is.
      traceback.print_exc()
      rows = [(name, *4 * ('-',), WRONG, 'an exception')]
    for row in rows:
      wrong += WRONG in row
      print(line(*row), flush=True)
  print(f'{wrong} wrong.')
  return wrong


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]) > 0)
