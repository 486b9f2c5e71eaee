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
"""The columns of the guide for newcomers run, and compute the same numbers."""

import contextlib
import pathlib
import re
import tempfile
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
from absl.testing import absltest
from flax import nnx

import nnx_ext
from tests.interop import files

_PAGE = pathlib.Path(__file__).parents[2] / 'docs/guides/coming_from.md'
_LINE = re.compile(
  r'#+ (?P<heading>.+)'
  r'|`+\{tab-item\} (?P<column>.+)'
  r'|(?P<end>`{4,})'
  r'|(?P<code>```python)'
)

Names = dict[str, tp.Any]


class Block(tp.NamedTuple):
  """Code of the page; in no column, it belongs to all of them."""

  heading: str
  column: str | None
  code: str


def blocks(text: str) -> tp.Iterator[Block]:
  heading, column = '', None
  lines = enumerate(text.splitlines(), 1)
  for number, line in lines:
    found = _LINE.fullmatch(line)
    if found is None:
      continue
    heading = found['heading'] or heading
    if found['column'] or found['end']:
      column = found['column']
    if found['code']:
      code = ['\n' * number]  # so that a traceback has the page's lines
      for _, line in lines:
        if line == '```':
          break
        code.append(line + '\n')
      yield Block(heading, column, ''.join(code))


def run(column: str) -> dict[str, Names]:
  """Runs a column from top to bottom: its names after each section."""
  names: Names = {'__name__': column}
  after: dict[str, Names] = {}
  for block in blocks(_PAGE.read_text()):
    if block.column in (None, column):
      exec(compile(block.code, str(_PAGE), 'exec'), names)
      after[block.heading] = dict(names)
  return after


class ComingFromTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.columns = {}
    for column in ('PyTorch', 'nnx_ext', 'Plain JAX'):
      place = cls.directory / column
      place.mkdir()
      torch.manual_seed(0)
      with contextlib.chdir(place), files.strict():
        cls.columns[column] = run(column)

  def _names(self, heading: str, *columns: str) -> list[Names]:
    return [self.columns[column][heading] for column in columns]

  def _pair(self, heading: str) -> list[Names]:
    return self._names(heading, 'PyTorch', 'nnx_ext')

  def test_every_column_is_run(self):
    found = {block.column for block in blocks(_PAGE.read_text())}
    self.assertEqual(found, {None, 'Haiku', *self.columns})

  def test_every_tab_beside_ours_has_ours(self):
    ours, others = set(), set()
    for block in blocks(_PAGE.read_text()):
      (ours if block.column == 'nnx_ext' else others).add(block.heading)
    self.assertEqual(ours, others)

  def test_two_losses(self):
    theirs, ours = self._pair('Two losses on one graph')
    for name in ('policy', 'value'):
      close(ours['values'][name], theirs[f'{name}_loss'])
      same_gradients(ours['grads'][name], theirs[f'{name}_grads'])

  def test_backward(self):
    theirs, ours = self._pair('`backward()` on a shared trunk')
    for name in ('trunk', 'actor', 'critic'):
      layer = theirs['model'][name]
      same_gradients(ours['grads'][name], [p.grad for p in layer.parameters()])
      close(ours['model'][name].kernel, layer.weight.T)
      close(ours['model'][name].bias, layer.bias)

  def test_detach(self):
    theirs, ours = self._pair('`detach()`')
    for name in ('generator', 'critic'):
      same_gradients(ours['gan_grads'][name], theirs[f'{name}_grads'])

  def test_weight_norm(self):
    theirs, ours = self._pair('Parametrizations')
    obs = theirs['obs']
    close(ours['normed'](ours['obs']), theirs['normed'](obs))
    g, v = torch.autograd.grad(
      theirs['normed'](obs).square().mean(),
      theirs['normed'].parametrizations.weight.parameters(),
    )
    grads = nnx.grad(mean_square)(ours['normed'], ours['obs'])
    close(grads['kernel']['g'], g[:, 0])
    close(grads['kernel']['v'], v.T)

  def test_spectral_norm(self):
    theirs, ours = self._pair('Parametrizations')
    for _ in range(100):  # each read is a step of power iteration
      weight = theirs['spectral'].weight
    close(ours['spectral'].kernel, weight.T)
    close(np.linalg.norm(ours['spectral'].kernel, 2), 1.0)

  def test_orthogonal(self):
    theirs, ours = self._pair('Parametrizations')
    weight = np.asarray(theirs['weights']['trunk']).T
    q, r = np.linalg.qr(weight)
    close(q * np.sign(np.diag(r)), theirs['rotation'].weight)
    u, _, v = np.linalg.svd(weight)
    close(ours['rotation'].kernel, (u @ v).T)
    # That one is kept by both.
    layer = theirs['linear']('trunk')
    with torch.no_grad():
      layer.weight.copy_(torch.from_numpy(q))
    close(q, theirs['parametrizations'].orthogonal(layer).weight)
    close(q, ours['Orthogonal'](jnp.asarray(q))())

  def test_own_parametrization(self):
    theirs, ours = self._pair('Parametrizations')
    scales = [1.0, 2.0, 3.0, 4.0]
    close(ours['scaled'].scale, scales)
    close(ours['plain'].scale, scales)
    close(theirs['scaled'].weight, scales)
    self.assertIsInstance(ours['plain'].scale, nnx.Param)
    close(ours['scaled'](ours['obs']), theirs['scaled'](theirs['obs']))

    # Its gradient, with the parametrization that the block has taken off.
    layer = torch.nn.LayerNorm(4)
    parametrize = theirs['parametrize']
    parametrize.register_parametrization(layer, 'weight', theirs['Exp']())
    layer.weight = torch.tensor(scales)
    layer(theirs['obs']).square().mean().backward()
    grads = nnx.grad(mean_square)(ours['scaled'], ours['obs'])
    close(grads['scale']['x'], layer.parametrizations.weight.original.grad)

  def test_functional_call(self):
    theirs, ours = self._pair('`functional_call`')
    for found, expected in zip(ours['factor_grads'], theirs['factor_grads']):
      close(found, expected)
    close(ours['layer'].kernel, ours['weights']['critic'])

  def test_peft_reads_our_adapter(self):
    theirs, ours = self._pair('PEFT')
    with files.strict():
      loaded = peft.PeftModel.from_pretrained(
        theirs['encoder'](), self.directory / 'nnx_ext' / 'adapter'
      )
    close(ours['adapted'](ours['obs']), loaded(theirs['obs']))

  def test_we_read_their_adapter(self):
    theirs, ours = self._pair('PEFT')
    loaded = nnx_ext.load_lora(
      ours['encoder'](),
      self.directory / 'PyTorch' / 'adapter',
      rename=ours['rename'],
    )
    close(loaded(ours['obs']), theirs['loaded'](theirs['obs']))
    # As trained, not as it started.
    base = theirs['encoder']()(theirs['obs'])
    with self.assertRaises(AssertionError):
      close(loaded(ours['obs']), base)

  def test_adapters_are_merged(self):
    theirs, ours = self._pair('PEFT')
    for names in (theirs, ours):
      close(names['merged'](names['obs']), names['loaded'](names['obs']))
    self.assertIs(type(ours['merged'].layers[0]), nnx.Linear)
    close(ours['adapted'](ours['obs']), ours['loaded'](ours['obs']))

  def test_drawn_weights_have_gradients(self):
    (ours,) = self._names('Weights drawn by a custom getter', 'nnx_ext')
    for name in ('kernel', 'bias'):
      for part in ('mean', 'rho'):
        grad = ours['grads'][name][part]
        self.assertGreater(float(jnp.max(jnp.abs(grad[...]))), 0.0)
    count = nnx.state(ours['net'], nnx.RngCount)
    self.assertEqual({int(n) for n in jax.tree.leaves(count)}, {1})

  def test_one_vjp(self):
    theirs, ours = self._names(
      'Two losses by one `jax.vjp`', 'Plain JAX', 'nnx_ext'
    )
    for name in ('policy', 'value'):
      close(ours['values'][name], theirs['values'][name])
      for part in ('kernel', 'bias'):
        close(ours['grads'][name][part], theirs[f'{name}_grads'][part])

  def test_theta(self):
    theirs, ours = self._names('`jax.grad` by theta', 'Plain JAX', 'nnx_ext')
    found, expected = ours['theta_grads'], theirs['theta_grads']
    self.assertEqual(jax.tree.structure(found), jax.tree.structure(expected))
    jax.tree.map(close, found, expected)
    close(ours['critic'].kernel, ours['weights']['critic'])


def close(found: tp.Any, expected: tp.Any):
  found, expected = map(as_array, (found, expected))
  assert found.shape == expected.shape, (found.shape, expected.shape)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def as_array(x: tp.Any) -> np.ndarray:
  return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)


def same_gradients(found: nnx.State, expected: tp.Sequence[torch.Tensor]):
  """A linear layer's; PyTorch has its weight first."""
  weight, bias = expected
  close(found['kernel'], weight.T)
  close(found['bias'], bias)


def mean_square(layer, x):
  return jnp.mean(layer(x) ** 2)


if __name__ == '__main__':
  absltest.main()
