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
"""Paths in a model, and the other paths of what is shared."""

import typing as tp

from flax import nnx

Path = tuple[tp.Any, ...]


class Names:
  """Every path by which places in a model may be called.

  A place that is shared has several; one of them is canonical. Keys may be
  written as strings.
  """

  def __init__(self, model: tp.Any, places: tp.Iterable[Path]):
    self._canonical = {tuple(map(str, path)): path for path in places}
    self._groups = [
      [tuple(map(str, path)) for path in group]
      for group in nnx.find_duplicates(model)
    ]

  def resolve(self, path: Path) -> Path | None:
    """The canonical path of a place, or None."""
    return self._resolve(tuple(map(str, path)), len(self._groups))

  def _resolve(self, path: tuple[str, ...], depth: int) -> Path | None:
    if path in self._canonical or depth < 0:
      return self._canonical.get(path)
    for group in self._groups:
      for alias in group:
        if path[: len(alias)] != alias:
          continue
        for other in group:
          if other != alias:
            found = self._resolve(other + path[len(alias) :], depth - 1)
            if found is not None:
              return found
    return None
