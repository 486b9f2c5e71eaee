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
"""The Bayes by backprop example learns, and does what it says."""

import contextlib
import io
import os
import pathlib
import re
import tempfile

import chex
import jax
import numpy as np
import optax
from absl.testing import absltest
from flax import nnx
from sklearn import datasets

import nnx_ext
from tests import examples

bbb = examples.load('bayes_by_backprop')


def _softmax(logits):
  exp = np.exp(logits - logits.max(-1, keepdims=True))
  return exp / exp.sum(-1, keepdims=True)


class DataTest(absltest.TestCase):
  def test_splits_are_a_partition(self):
    splits = bbb.load_data()
    self.assertEqual([len(s.labels) for s in splits], [1078, 359, 360])
    rows = np.concatenate([np.c_[s.images * 16, s.labels] for s in splits])
    expected = np.c_[datasets.load_digits(return_X_y=True)]
    np.testing.assert_array_equal(
      rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)]
    )
    for split in splits:
      share = np.bincount(split.labels) / len(split.labels)
      np.testing.assert_allclose(share, 0.1, atol=0.01)

  def test_rotate(self):
    images = bbb.load_data()[2].images
    np.testing.assert_array_equal(bbb.rotate(images, 0), images)
    squares = images.reshape(-1, 8, 8)
    np.testing.assert_allclose(
      bbb.rotate(images, 90).reshape(-1, 8, 8),
      np.rot90(squares, axes=(1, 2)),
      atol=1e-5,
    )


class ScoreTest(absltest.TestCase):
  def test_calibration_error_by_hand(self):
    # Two in one bin, one right: |1 - 0.62 - 0.64|. One at 0.9, right: 0.1.
    # One certain and wrong: 1. Over four images.
    confidence = np.array([0.62, 0.64, 0.9, 1.0])
    probs = np.stack([confidence, 1 - confidence], axis=-1)
    error = bbb.calibration_error(probs, np.array([0, 1, 0, 1]))
    self.assertAlmostEqual(error, (0.26 + 0.1 + 1.0) / 4)

  def test_calibration_error_of_bins(self):
    rng = np.random.default_rng(0)
    probs = _softmax(3 * rng.normal(size=(500, 10)))
    labels = rng.integers(10, size=500)
    expected = 0.0
    for i in range(15):
      confidence = probs.max(-1)
      inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
      if inside.any():
        right = probs[inside].argmax(-1) == labels[inside]
        gap = abs(right.mean() - confidence[inside].mean())
        expected += inside.mean() * gap
    self.assertGreater(expected, 0.1)
    error = bbb.calibration_error(probs, labels)
    self.assertAlmostEqual(error, expected)

  def test_score(self):
    probs = np.array([[0.5, 0.5, 0.0], [0.25, 0.0, 0.75]])
    score = bbb.score(probs, np.array([0, 0]))
    self.assertEqual(score.accuracy, 0.5)
    self.assertAlmostEqual(score.nll, (np.log(2) + np.log(4)) / 2)
    second = 0.25 * np.log(4) + 0.75 * np.log(4 / 3)
    self.assertAlmostEqual(score.entropy, (np.log(2) + second) / 2)


class MeanFieldTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    rngs = nnx.Rngs(0)
    self.plain = bbb.MLP(rngs)
    self.model = bbb.mean_field(self.plain, rngs)
    self.test = bbb.load_data()[2]

  def test_loss_is_the_likelihood_and_the_weighted_divergence(self):
    self.model.eval()  # no noise
    images, labels = self.test
    params = jax.tree.leaves(nnx.state(self.plain, nnx.Param))
    params = [np.float64(p) for p in params]
    s, s0 = bbb.STDDEV, bbb.PRIOR_STDDEV
    kl = sum(
      np.sum(np.log(s0 / s) + (s**2 + p**2) / (2 * s0**2) - 0.5) for p in params
    )
    probs = _softmax(np.float64(self.plain(images)))
    nll = -np.log(probs[np.arange(len(labels)), labels]).mean()
    np.testing.assert_allclose(
      bbb.loss_fn(self.plain, self.test, 1000), nll, rtol=1e-5
    )
    np.testing.assert_allclose(
      bbb.loss_fn(self.model, self.test, 1000),
      nll + bbb.KL_WEIGHT * kl / 1000,
      rtol=1e-5,
    )

  def test_predict_is_a_mean_over_draws(self):
    # Of the shape that the program takes: it is compiled once for both.
    images = np.stack([self.test.images] * len(bbb.ANGLES))
    plain = _softmax(np.asarray(self.plain(images)))
    np.testing.assert_allclose(
      bbb.predict(self.plain, images), plain, rtol=1e-4
    )
    first, second = (bbb.predict(self.model, images) for _ in range(2))
    np.testing.assert_allclose(first.sum(-1), 1.0, rtol=1e-5)
    draws = np.stack(
      [
        _softmax(np.asarray(nnx_ext.materialize(self.model)(images)))
        for _ in range(bbb.DRAWS)
      ]
    )
    # Means over 32 draws vary by as much as is expected of them.
    spread = draws.std(0, ddof=1).mean() * (2 / bbb.DRAWS) ** 0.5
    for other in (second, draws.mean(0)):
      difference = np.sqrt(np.mean((first - other) ** 2, axis=0)).mean()
      self.assertBetween(difference, 0.5 * spread, 2 * spread)

  def test_a_seed_repeats_itself(self):
    tx = optax.adam(bbb.MEAN_FIELD_LEARNING_RATE)
    results = []
    for _ in range(2):
      rngs = nnx.Rngs(0)
      model = bbb.mean_field(bbb.MLP(rngs), rngs)
      optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      loss = bbb.train_epoch(model, optimizer, bbb.load_data()[0], rngs())
      results.append((loss, nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    chex.assert_trees_all_equal(*results)


class ProgramTest(absltest.TestCase):
  def test_program_learns(self):
    out, err = io.StringIO(), io.StringIO()
    with (
      tempfile.TemporaryDirectory() as directory,
      contextlib.chdir(directory),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
    ):
      bbb.main(['--seed', '3', '--epochs', '20'])
      self.assertEqual(os.listdir(), ['bayes_by_backprop.png'])
      picture = pathlib.Path('bayes_by_backprop.png').read_bytes()
    self.assertStartsWith(picture, b'\x89PNG')
    for name in ('plain', 'mean field'):
      pattern = rf'{name}: .*20/20 .*loss \d+\.\d+, validation \d+\.\d %'
      self.assertRegex(err.getvalue(), pattern)
    *scores, last = out.getvalue().splitlines()
    self._check_summary(last)
    self.assertLen(scores, 2)
    self.assertStartsWith(scores[0], 'plain: NLL ')
    self._check_mean_field(scores[1])

  def _check_summary(self, line):
    number = r'(\d+\.\d) % ECE (\d\.\d{3})'
    pattern = f'plain accuracy {number}, mean field accuracy {number}'
    match = re.fullmatch(rf'test: {pattern} \(seed 3\)', line)
    self.assertIsNotNone(match, line)
    accuracy, ece, mean_field_accuracy, mean_field_ece = map(
      float, match.groups()
    )
    self.assertGreater(accuracy, 90)
    self.assertGreater(mean_field_accuracy, 90)
    self.assertBetween(ece, 0, 0.2)
    self.assertBetween(mean_field_ece, 0, 0.2)

  def _check_mean_field(self, line):
    match = re.fullmatch(
      r'mean field: NLL (\d\.\d{3}), entropy (\d\.\d{3}) nats, '
      r'on turned digits (\d\.\d{3}) nats',
      line,
    )
    self.assertIsNotNone(match, line)
    nll, upright, turned = map(float, match.groups())
    self.assertLess(nll, 0.5)
    self.assertGreater(turned, 2 * upright)


if __name__ == '__main__':
  absltest.main()
