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
"""What each process of ``distributed_test`` runs, as a program of its own.

``python -m tests.distributed_worker ADDRESS COUNT INDEX OUT`` joins COUNT
processes, takes one step of each kind with them and writes what came out of it
to the file OUT. A single process may call the steps as well.
"""

import faulthandler
import json
import os
import sys
import traceback
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import nnx_ext
from tests import compiler, models

P = jax.sharding.PartitionSpec

DEVICES = 2
"""Devices of each process."""

SECONDS = 100
"""After which a process that hangs says where, and ends."""

PyTree = tp.Any

RATE, SCALE = 0.1, 3.0
TX = optax.sgd(RATE, momentum=0.9)
ROUTES = {'policy': 0, 'value': 1}


def networks() -> tuple[nnx.Module, nnx.Module]:
  """An actor with dropout and a critic with statistics of the whole batch."""
  rngs = nnx.Rngs(params=0, dropout=1)
  return (
    models.MLP(4, 3, dropout=0.4, rngs=rngs),
    models.MLP(4, 1, batch_norm=True, rngs=rngs),
  )


def batch() -> np.ndarray:
  return np.random.default_rng(0).normal(size=(8, 4)).astype('float32')


class Net(nnx.Module):
  """Two layers whose kernels are sharded over a mesh axis, if one is named."""

  def __init__(self, axis: str | None, *, rngs: nnx.Rngs):
    def sharded(*names):
      return {'out_sharding': names} if axis else {}

    self.up = nnx.Linear(
      *(4, 6), kernel_metadata=sharded(None, axis), rngs=rngs
    )
    self.down = nnx.Linear(
      *(6, 3), kernel_metadata=sharded(axis, None), rngs=rngs
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(jnp.tanh(self.up(x)))


def adapted(axis: str | None) -> nnx.Module:
  """A ``Net`` with factors that are not those of a start."""
  net = Net(axis, rngs=nnx.Rngs(0))
  model = nnx_ext.apply_lora(net, rank=2, alpha=2 * SCALE, rngs=nnx.Rngs(1))
  factors = nnx.state(model, nnx.LoRAParam)
  nnx.update(model, jax.tree.map(lambda factor: factor + 0.1, factors))
  return model


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
  return jnp.mean((model(x) - 1.0) ** 2)


@nnx.jit
def multi_step(modules, optimizers, x):
  """One step of an actor and a critic."""
  losses, grads = nnx_ext.value_and_grad_multi(
    models.leaking_losses, argnums=ROUTES
  )(*modules, x)
  for module, optimizer, grad in zip(modules, optimizers, grads.values()):
    optimizer.update(module, grad)
  return losses, grads


@nnx.jit
def lora_step(model, optimizer, x):
  """One step of the factors."""
  wrt = nnx.DiffState(0, nnx.LoRAParam)
  value, grads = nnx.value_and_grad(loss, argnums=wrt)(model, x)
  optimizer.update(model, grads)
  return value, grads


def multi(x: jax.Array) -> PyTree:
  """Losses, gradients and the state after a step."""
  modules = networks()
  optimizers = [nnx.Optimizer(m, TX, wrt=nnx.Param) for m in modules]
  losses, grads = multi_step(modules, optimizers, x)
  return {'losses': losses, 'grads': grads, 'state': nnx.state(modules)}


def lora(x: jax.Array, axis: str | None) -> tuple[PyTree, nnx.Module]:
  """The loss, gradients and the state after a step, and the model."""
  model = adapted(axis)
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.LoRAParam)
  value, grads = lora_step(model, optimizer, x)
  return {'losses': value, 'grads': grads, 'state': nnx.state(model)}, model


def arrays(tree: PyTree) -> dict[str, np.ndarray]:
  """The whole arrays of a tree by their paths, in every process."""
  tree = jax.tree.map(
    lambda x: (
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )
  tree = multihost_utils.process_allgather(tree, tiled=True)
  leaves = jax.tree.leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path).removesuffix('.value'): np.asarray(x)
    for path, x in leaves
  }


def facts(model: nnx.Module) -> dict[str, tp.Any]:
  """How many there are, and what one device holds of each parameter."""
  parameters = nnx.state(model, nnx.Any(nnx.Param, nnx.LoRAParam))
  return {
    'devices': jax.device_count(),
    'local_devices': jax.local_device_count(),
    'processes': jax.process_count(),
    'shapes': {
      '/'.join(map(str, path)): variable.addressable_shards[0].data.shape
      for path, variable in nnx.to_flat_state(parameters)
    },
  }


def _auto_mesh(
  shape: tuple[int, ...], names: tuple[str, ...]
) -> jax.sharding.Mesh:
  auto = (jax.sharding.AxisType.Auto,) * len(names)
  return jax.make_mesh(shape, names, axis_types=auto)


def _results(count: int, index: int) -> dict[str, np.ndarray]:
  whole, rows = batch(), len(batch()) // count
  mesh = _auto_mesh((count * DEVICES,), ('data',))
  # Each process brings its own rows.
  x = jax.make_array_from_process_local_data(
    jax.sharding.NamedSharding(mesh, P('data')),
    whole[rows * index : rows * (index + 1)],
  )
  tree = {'multi': multi(x)}

  # The model's axis goes over processes, the data's over a process's devices.
  mesh = _auto_mesh((count, DEVICES), ('model', 'data'))
  x = jax.make_array_from_process_local_data(
    jax.sharding.NamedSharding(mesh, P('data')), whole
  )
  with jax.set_mesh(mesh):
    tree['lora'], model = lora(x, 'model')
  return arrays(tree) | {'facts': np.asarray(json.dumps(facts(model)))}


def main(address: str, count: int, index: int, out: str) -> None:
  compiler.hurry()
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', DEVICES)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    address,
    num_processes=count,
    process_id=index,
    cluster_detection_method='deactivate',
    initialization_timeout=60,
  )
  np.savez(out, **_results(count, index))
  jax.distributed.shutdown()


if __name__ == '__main__':
  faulthandler.dump_traceback_later(SECONDS, exit=True)
  try:
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
  except BaseException:
    # An ordinary exit would wait for the other processes.
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
