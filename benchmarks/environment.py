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
"""Where the numbers come from: versions, the device, and what it can do."""

import functools
import importlib.metadata
import os
import pathlib
import platform
import statistics
import subprocess
import time
import typing as tp

import jax
import jax.numpy as jnp

PACKAGES = ('flax', 'jax', 'jaxlib', 'optax', 'paramax', 'qwix')


def describe() -> dict[str, tp.Any]:
  """Versions, the device and the revision, with nothing of whose they are."""
  return {
    'python': platform.python_version(),
    **{name: _version(name) for name in PACKAGES},
    'device': _device(),
    'cores': os.cpu_count(),
    'system': platform.system(),
    'revision': _revision(),
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _device() -> str:
  """What computes; the name of the processor where that is it."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return device.device_kind
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  names = [line.split(':')[1].strip() for line in lines if 'model name' in line]
  return names[0] if names else platform.machine()


def _revision() -> str | None:
  """Git's name of the checkout, marked where it has changes."""
  try:
    return subprocess.run(
      ['git', 'describe', '--always', '--dirty'],
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None


@functools.cache
def ceilings() -> dict[str, float]:
  """What the device does in a second where it does nothing else.

  Returns:
    ``flops`` of a matrix product, in the dtype of the cases there: bfloat16 on
    a GPU, float32 elsewhere; ``bytes`` read and written by a copy.
  """
  on_gpu = jax.default_backend() == 'gpu'
  size = 8192 if on_gpu else 2048
  x = jnp.ones((size, size), jnp.bfloat16 if on_gpu else jnp.float32)
  product = jax.jit(lambda x: x @ x)
  y = jnp.ones(2**30 // 4 if on_gpu else 2**28 // 4)
  copy = jax.jit(lambda y: y + 1)
  return {
    'flops': 2 * size**3 / _median_seconds(product, x),
    'bytes': 2 * y.nbytes / _median_seconds(copy, y),
  }


def _median_seconds(function: tp.Callable, x: jax.Array, runs: int = 11):
  jax.block_until_ready(function(x))
  seconds = []
  for _ in range(runs):
    start = time.perf_counter()
    jax.block_until_ready(function(x))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)
