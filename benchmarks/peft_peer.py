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
"""Feed-forward blocks trained by PEFT in PyTorch, in another interpreter.

JAX and PyTorch in one process would share its threads. So a child, an
interpreter with ``torch`` and ``peft``, holds the model, and takes one step for
each line that it reads; it ends when nothing more can come. Its weights,
factors and input are those of the step that it stands beside, and each of its
answers is the loss, so that equal losses show equal steps.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import typing as tp
import weakref

# The child imports this module too, and has no JAX.
import numpy as np

if tp.TYPE_CHECKING:
  from benchmarks import steps

PYTHON = 'NNX_EXT_TORCH_PYTHON'  # the interpreter, as pytest was given it
_X = 'x'
_ROOT = pathlib.Path(__file__).parents[1]


class Peft:
  """A training step of a child.

  Args:
    factors: A and B by the path of their weight.
    weights: arrays by their paths in the model.
    x: the input.
    exact: whether gelu is computed by erf and not by tanh.
    learning_rate: that of Adam.
  """

  def __init__(
    self,
    factors: dict[tuple, list],
    weights: dict[tuple, tp.Any],
    x: tp.Any,
    *,
    exact: bool,
    learning_rate: float,
  ):
    import pytest

    if not os.environ.get(PYTHON):
      pytest.skip('no interpreter with PyTorch was given')
    named = {(*path, '0'): a for path, (a, _) in factors.items()}
    named |= {(*path, '1'): b for path, (_, b) in factors.items()}
    named |= weights
    self._arrays = {'.'.join(map(str, path)): a for path, a in named.items()}
    self._arrays[_X] = x
    self._options = dict(
      exact=exact, learning_rate=learning_rate, dtype=str(x.dtype)
    )

  def prepare(self, repeat: int = 1) -> 'steps.Prepared':
    from benchmarks import steps

    return steps.Prepared(_Child(self._arrays, self._options))


class _Child:
  """The other interpreter; a call is one step of it."""

  def __init__(self, arrays: dict[str, tp.Any], options: dict[str, tp.Any]):
    self._process = subprocess.Popen(
      [os.environ[PYTHON], '-m', 'benchmarks.peft_peer'],
      cwd=_ROOT,
      # Idle threads that spin would slow down what runs in between.
      env={**os.environ, 'OMP_WAIT_POLICY': 'PASSIVE'},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    # Closes its input, and waits for it.
    weakref.finalize(self, self._process.communicate)
    with tempfile.TemporaryDirectory() as directory:
      file = str(pathlib.Path(directory, 'arrays.npz'))
      np.savez(file, **{k: np.float32(v) for k, v in arrays.items()})
      self._ask(json.dumps({'file': file, **options}))

  def __call__(self) -> float:
    return float(self._ask('step'))

  def _ask(self, line: str) -> str:
    self._process.stdin.write(line + '\n')
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      raise RuntimeError('PEFT ended; what it wrote last says why.')
    return answer


def _train(
  arrays: tp.Mapping[str, np.ndarray],
  exact: bool,
  learning_rate: float,
  dtype: str,
) -> tp.Callable[[], float]:
  """The model with these arrays; a call of the result is a step."""
  import peft
  import torch

  class Block(torch.nn.Module):
    def __init__(self, width, hidden):
      super().__init__()
      self.norm = torch.nn.LayerNorm(width, eps=1e-6)
      self.up = torch.nn.Linear(width, hidden)
      self.gelu = torch.nn.GELU('none' if exact else 'tanh')
      self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
      return x + self.down(self.gelu(self.up(self.norm(x))))

  torch.set_num_threads(os.cpu_count() or 1)
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  to = dict(device=device, dtype=getattr(torch, dtype))
  tensor = lambda name: torch.from_numpy(arrays[name]).to(**to)
  kernels = [name for name in arrays if name.endswith('.up.kernel')]
  width, hidden = arrays[kernels[0]].shape
  model = torch.nn.Sequential(*(Block(width, hidden) for _ in kernels))
  rank = arrays[f'{kernels[0]}.0'].shape[1]
  config = peft.LoraConfig(
    r=rank, lora_alpha=rank, target_modules=['up', 'down']
  )
  model = peft.get_peft_model(
    model.to(**to), config, autocast_adapter_dtype=False
  )
  with torch.no_grad():
    for index, block in enumerate(model.base_model.model):
      block.norm.weight.copy_(tensor(f'layers.{index}.norm.scale'))
      block.norm.bias.copy_(tensor(f'layers.{index}.norm.bias'))
      for part in ('up', 'down'):
        name, linear = f'layers.{index}.{part}', getattr(block, part)
        linear.base_layer.weight.copy_(tensor(f'{name}.kernel').T)
        linear.base_layer.bias.copy_(tensor(f'{name}.bias'))
        linear.lora_A.default.weight.copy_(tensor(f'{name}.kernel.0').T)
        linear.lora_B.default.weight.copy_(tensor(f'{name}.kernel.1').T)
  x = tensor(_X)
  trained = [p for p in model.parameters() if p.requires_grad]
  optimizer = torch.optim.Adam(trained, lr=learning_rate, fused=True)

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = (model(x).float() - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()  # waits for what a GPU still does

  return step


def main() -> None:
  options = json.loads(sys.stdin.readline())
  with np.load(options.pop('file')) as arrays:
    step = _train(dict(arrays), **options)
  print('ready', flush=True)
  for _ in sys.stdin:
    print(step(), flush=True)


if __name__ == '__main__':
  main()
