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
"""Two processes with two devices each compute what one process computes.

The processes run ``distributed_worker`` on this machine's loopback and write
what they got; the oracles are ``nnx.value_and_grad`` and ``jax.grad`` on one
device, on the whole batch.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from absl.testing import absltest
from flax import nnx

from tests import distributed_worker as worker
from tests import transforms

_ROOT = pathlib.Path(__file__).parents[1]
_COUNT = 2
_SECONDS = 120
_SLEEP = [sys.executable, '-c', 'import time; time.sleep(600)']

Arrays = dict[str, np.ndarray]


def run_together(commands: list[list[str]], seconds: float) -> None:
  """Runs programs at once. All have ended on return, in whichever way.

  Raises:
    RuntimeError: with their outputs, if one fails or the time is over.
  """
  # A proxy is no way to this machine itself.
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.lower().endswith('_proxy')
  }
  with tempfile.TemporaryDirectory() as directory:
    outputs = [pathlib.Path(directory, str(i)) for i in range(len(commands))]
    processes: list[subprocess.Popen] = []
    try:
      for command, output in zip(commands, outputs):
        with output.open('wb') as file:
          processes.append(
            subprocess.Popen(
              command,
              cwd=_ROOT,
              env=environment,
              stdin=subprocess.DEVNULL,
              stdout=file,
              stderr=subprocess.STDOUT,
            )
          )
      problem = _problem(processes, seconds)
    finally:
      for process in processes:
        process.kill()
        process.wait()
    if problem:
      raise RuntimeError(
        '\n'.join(
          [problem]
          + [
            f'-- output of process {i}:\n{output.read_text(errors="replace")}'
            for i, output in enumerate(outputs)
          ]
        )
      )


def _problem(processes: list[subprocess.Popen], seconds: float) -> str:
  """Waits for all or for the first that fails; '' if none does."""
  end = time.monotonic() + seconds
  while True:
    codes = [process.poll() for process in processes]
    for i, code in enumerate(codes):
      if code:
        return f'process {i} ended with code {code}'
    if None not in codes:
      return ''
    if time.monotonic() > end:
      late = [i for i, code in enumerate(codes) if code is None]
      return f'after {seconds} s these processes still ran: {late}'
    time.sleep(0.05)


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def _run_workers() -> list[Arrays]:
  """What each process got."""
  address = f'127.0.0.1:{_free_port()}'
  with tempfile.TemporaryDirectory() as directory:
    files = [pathlib.Path(directory, f'{i}.npz') for i in range(_COUNT)]
    program = [sys.executable, '-m', worker.__name__, address, str(_COUNT)]
    run_together(
      [[*program, str(i), str(file)] for i, file in enumerate(files)], _SECONDS
    )
    results = []
    for file in files:
      with np.load(file) as found:
        results.append(dict(found))
    return results


def _named(name: str, tree: worker.PyTree) -> Arrays:
  return worker.arrays({name: tree})


class RunTogetherTest(absltest.TestCase):
  """A process that fails or hangs ends the others, and is heard."""

  def test_all_succeed(self):
    run_together([[sys.executable, '-c', 'pass']] * 2, 60.0)

  def test_one_fails(self):
    fails = [sys.executable, '-c', 'print("alas"); raise SystemExit(3)']
    start = time.monotonic()
    with self.assertRaisesRegex(RuntimeError, r'(?s)process 1 .*code 3.*alas'):
      run_together([_SLEEP, fails], 60.0)
    self.assertLess(time.monotonic() - start, 60.0)

  def test_one_hangs(self):
    with self.assertRaisesRegex(RuntimeError, r'still ran: \[0\]'):
      run_together([_SLEEP, [sys.executable, '-c', 'pass']], 2.0)


class DistributedTest(absltest.TestCase):
  results: list[Arrays]

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.results = _run_workers()

  def test_the_processes_are_one_program(self):
    for result in self.results:
      facts = json.loads(str(result['facts']))
      self.assertEqual(facts['processes'], 2)
      self.assertEqual(facts['devices'], 4)
      self.assertEqual(facts['local_devices'], 2)

  def test_factors_are_sharded_as_the_kernels(self):
    for result in self.results:
      shapes = json.loads(str(result['facts']))['shapes']
      self.assertEqual(shapes['up/kernel'], [4, 3])
      self.assertEqual(shapes['up/lora/lora_a'], [4, 2])
      self.assertEqual(shapes['up/lora/lora_b'], [2, 3])
      self.assertEqual(shapes['down/kernel'], [3, 3])
      self.assertEqual(shapes['down/lora/lora_a'], [3, 2])
      self.assertEqual(shapes['down/lora/lora_b'], [2, 3])

  def test_multi_step(self):
    modules = worker.networks()
    optimizers = [nnx.Optimizer(m, worker.TX, wrt=nnx.Param) for m in modules]
    one_at_a_time = nnx.jit(transforms.naive_multi(argnums=worker.ROUTES))
    losses, grads = one_at_a_time(*modules, worker.batch())
    for module, optimizer, grad in zip(modules, optimizers, grads.values()):
      optimizer.update(module, grad)
    tree = {'losses': losses, 'grads': grads, 'state': nnx.state(modules)}
    self._check(_named('multi', tree))

  def test_multi_step_of_one_process(self):
    self._check(_named('multi', worker.multi(worker.batch())))

  def test_lora_step(self):
    model, x = worker.adapted(None), worker.batch()
    factors = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))

    def loss(factors):
      plain = worker.Net(None, rngs=nnx.Rngs(0))
      for name in ('up', 'down'):
        a, b = factors[name]['lora']['lora_a'], factors[name]['lora']['lora_b']
        getattr(plain, name).kernel[...] += worker.SCALE * a @ b
      return worker.loss(plain, x)

    value, grads = jax.jit(jax.value_and_grad(loss))(factors)
    descend = lambda factor, grad: factor - worker.RATE * grad
    nnx.update(model, jax.tree.map(descend, factors, grads))
    tree = {'losses': value, 'grads': grads, 'state': nnx.state(model)}
    self._check(_named('lora', tree))

  def test_lora_step_of_one_process(self):
    tree, _ = worker.lora(worker.batch(), None)
    self._check(_named('lora', tree))

  def _check(self, expected: Arrays):
    (name, *_) = {path.split(']')[0] for path in expected}
    for index, result in enumerate(self.results):
      found = {k: v for k, v in result.items() if k.startswith(f'{name}]')}
      self.assertEqual(list(found), list(expected))
      for path, array in expected.items():
        np.testing.assert_allclose(
          *(found[path], array),
          rtol=1e-4,
          atol=1e-5,
          err_msg=f'{path} in process {index}',
        )
