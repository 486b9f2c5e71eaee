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
"""An adapter trained by nnx_ext and saved by ``save_lora``, loaded by PEFT."""

import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx

import nnx_ext
from tests.interop import cases, files, small, twins


def _train(case, model):
  """A few steps, after which neither A nor B is zero."""
  pair = case.pair
  wrt = nnx.LoRAParam
  if case.saved:
    saved = lambda path, value: path[0] in case.saved
    wrt = nnx.Any(wrt, nnx.All(nnx.Param, saved))
  optimizer = nnx.Optimizer(model, optax.adamw(files.LEARNING_RATE), wrt=wrt)
  model.train()

  def loss(model):
    outputs = pair.run_nnx(model)
    return jnp.mean((outputs - files.goal(outputs.shape)) ** 2)

  @nnx.jit
  def step(model, optimizer):
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model)
    optimizer.update(model, grads)

  for _ in range(files.STEPS):
    step(model, optimizer)


class ToPeftTest(parameterized.TestCase):
  def _check(self, case, model, directory):
    """PEFT makes of the file what the model makes."""
    pair = case.pair
    found = twins.logits(pair, files.load(pair, directory, case.allowed))
    base = twins.logits(pair, pair.make_torch())
    self.assertGreater(np.max(np.abs(found - base)), 0.02)
    expected = twins.logits(pair, model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

  @parameterized.named_parameters(*cases.named())
  def test_outputs(self, name):
    case = cases.CASES[name]
    pair, directory = case.pair, files.directory(self)
    model = nnx_ext.apply_lora(pair.load_nnx(), **case.nnx, rngs=nnx.Rngs(1))
    _train(case, model)
    nnx_ext.save_lora(
      model, directory, rename=pair.rename, modules_to_save=case.saved
    )
    self._check(case, model, directory)

  @parameterized.parameters(
    ('bert', 'pissa', True),
    ('words', 'pissa', False),
    ('conv2d', 'olora', True),
  )
  def test_a_start_made_plain(self, name, init, rslora):
    case = cases.CASES[name]
    pair, directory = case.pair, files.directory(self)
    options = {**case.nnx, 'rank': 2, 'init': init, 'rslora': rslora}
    model = nnx_ext.apply_lora(pair.load_nnx(), **options, rngs=nnx.Rngs(1))
    _train(case, model)
    plain = nnx_ext.to_plain_lora(model)
    nnx_ext.save_lora(plain, directory, rename=pair.rename)
    self._check(case, model, directory)

  def test_orthogonal_start(self):
    case = cases.CASES['words']
    pair, directory = case.pair, files.directory(self)
    options = {**case.nnx, 'init': 'orthogonal'}
    model = nnx_ext.apply_lora(pair.load_nnx(), **options, rngs=nnx.Rngs(1))
    _train(case, model)
    nnx_ext.save_lora(model, directory, rename=pair.rename)
    self._check(case, model, directory)

  @parameterized.named_parameters(
    ('a_tied_weight', small.TiedTwins(), ...),
    # PEFT must not take the block of the same name for the layer.
    (
      'a_block_of_its_name',
      small.BlocksTwins(),
      lambda path, _: path == ('head',),
    ),
  )
  def test_every_place_and_no_other(self, pair, targets):
    case = cases.Case(pair, {}, {'rank': 2, 'alpha': 6, 'targets': targets})
    directory = files.directory(self)
    model = nnx_ext.apply_lora(pair.load_nnx(), **case.nnx, rngs=nnx.Rngs(1))
    _train(case, model)
    nnx_ext.save_lora(model, directory)
    self._check(case, model, directory)

  def test_refuses_to_save_what_peft_takes_for_more(self):
    pair, directory = small.BlocksTwins(), files.directory(self)
    inner = lambda path, _: path == ('block', 'head', 'dense')
    model = nnx_ext.apply_lora(
      pair.load_nnx(), rank=2, targets=inner, rngs=nnx.Rngs(1)
    )
    with self.assertRaisesRegex(ValueError, "modules_to_save.*'head'"):
      nnx_ext.save_lora(model, directory, modules_to_save=['head'])
