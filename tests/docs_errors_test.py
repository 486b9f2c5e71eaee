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
"""The guide to errors has every message of the package, and no other.

A message is taken from the source as a template: its words, with an ellipsis
for each part that varies. The guide must have its longest run of words, and
what the guide quotes must be in a template.
"""

import ast
import operator
import pathlib
import re
import typing as tp

from absl.testing import absltest, parameterized

import nnx_ext

_ROOT = pathlib.Path(__file__).parents[1]
_GUIDES = _ROOT / 'docs' / 'guides'
_PAGES = [
  _GUIDES / 'troubleshooting.md',
  *sorted((_GUIDES / 'troubleshooting').glob('*.md')),
]
_VARIES = '…'
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
# What these print is no message of an error.
_NO_ERRORS = 'plan.py', 'lora/plan.py'
_ENOUGH_WORDS = 3


def squeezed(text: str) -> str:
  return ' '.join(text.split())


def pieces(text: str) -> list[str]:
  """The runs of words between the parts that vary."""
  return [squeezed(piece).strip(' .,:;') for piece in text.split(_VARIES)]


class Messages:
  """The templates of the messages in one file."""

  def __init__(self, source: str):
    self._tree = ast.parse(source)
    self._parents = {
      child: node
      for node in ast.walk(self._tree)
      for child in ast.iter_child_nodes(node)
    }
    self._functions = {
      node.name: node
      for node in ast.walk(self._tree)
      if isinstance(node, _FUNCTIONS)
    }

  def errors(self) -> dict[int, list[str]]:
    """By line, the messages that an error there may have."""
    found = {}
    for node in ast.walk(self._tree):
      is_raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
      if isinstance(node, ast.Raise) and node.exc is None:
        continue
      call = node.exc if is_raised else node
      if isinstance(call, ast.Call) and (is_raised or _is_error(call)):
        if not _is_error(call) and self._function(call):
          continue  # the function that it calls makes the error
        found[node.lineno] = self._templates(call.args[0])
      elif isinstance(node, ast.Raise):
        found[node.lineno] = []
    return found

  def reasons(self) -> dict[int, str]:
    """By line, what other text there is, which goes into messages."""
    found = {}
    for node in ast.walk(self._tree):
      if not isinstance(node, (ast.Constant, ast.JoinedStr)):
        continue
      above = list(self._above(node))
      if isinstance(above[0], (ast.Expr, ast.JoinedStr, ast.Attribute)):
        continue  # a docstring, a part of a text, or names in a row
      if any(isinstance(n, (ast.Raise, ast.Subscript)) for n in above):
        continue  # a message, or an annotation of shapes
      if any(isinstance(n, ast.Call) and _is_error(n) for n in above):
        continue
      (template,) = self._templates(node) or ['']
      if max(len(p.split()) for p in pieces(template)) >= _ENOUGH_WORDS:
        found[node.lineno] = template
    return found

  def _templates(self, node: ast.AST) -> list[str]:
    """What an expression may be, in words."""
    if isinstance(node, ast.Constant):
      return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
      parts = [
        part.value if isinstance(part, ast.Constant) else _VARIES
        for part in node.values
      ]
      return [''.join(parts)]
    if isinstance(node, ast.BinOp):
      left = self._templates(node.left) or [_VARIES]
      right = self._templates(node.right) or [_VARIES]
      return [a + b for a in left for b in right]
    if isinstance(node, ast.IfExp):
      return self._templates(node.body) + self._templates(node.orelse)
    if isinstance(node, ast.BoolOp):
      return [text for each in node.values for text in self._templates(each)]
    if isinstance(node, ast.Name):
      scope = next(n for n in self._above(node) if isinstance(n, _FUNCTIONS))
      return [
        text
        for assign in ast.walk(scope)
        if isinstance(assign, ast.Assign)
        and any(getattr(t, 'id', None) == node.id for t in assign.targets)
        for text in self._templates(assign.value)
      ]
    if isinstance(node, ast.Call) and (function := self._function(node)):
      return [
        text
        for returned in ast.walk(function)
        if isinstance(returned, ast.Return) and returned.value is not None
        for text in self._templates(returned.value)
      ]
    return []

  def _function(self, call: ast.Call) -> ast.AST | None:
    """The function of this file that is called, if it is one."""
    return self._functions.get(_name(call.func))

  def _above(self, node: ast.AST) -> tp.Iterator[ast.AST]:
    while node in self._parents:
      node = self._parents[node]
      yield node


def _name(function: ast.AST) -> str:
  return getattr(function, 'id', getattr(function, 'attr', ''))


def _is_error(call: ast.Call) -> bool:
  return _name(call.func).endswith('Error')


def read_package() -> tuple[dict[str, list[str]], dict[str, str]]:
  """The messages, and what goes into them, by file and line."""
  errors, reasons = {}, {}
  package = pathlib.Path(nnx_ext.__file__).parent
  for file in sorted(package.rglob('*.py')):
    name = file.relative_to(package).as_posix()
    messages = Messages(file.read_text())
    for line, found in messages.errors().items():
      errors[f'{name}:{line}'] = found
    if name not in _NO_ERRORS:
      for line, template in messages.reasons().items():
        reasons[f'{name}:{line}'] = template
  return errors, reasons


_ERRORS, _REASONS = read_package()
_TEXTS = {page.name: page.read_text() for page in _PAGES}
_GUIDE = squeezed(
  ' '.join(re.sub(r'^> ?', '', text, flags=re.M) for text in _TEXTS.values())
)
_QUOTES = [
  (name, quote)
  for name, text in _TEXTS.items()
  for quote in re.findall(
    r'(?<!`)``\s(.+?)\s``(?!`)', re.sub(r'^> ?', '', text, flags=re.M), re.S
  )
]
_CODE = [
  (name, code)
  for name, text in _TEXTS.items()
  for code in re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)
]


class GuideToErrorsTest(parameterized.TestCase):
  @parameterized.parameters(*_ERRORS)
  def test_every_error_has_an_entry(self, place):
    self.assertNotEmpty(_ERRORS[place], 'no words found in the source')
    for template in _ERRORS[place]:
      self.assertIn(max(pieces(template), key=len), _GUIDE, place)

  @parameterized.parameters(*_REASONS)
  def test_every_part_of_a_message_has_an_entry(self, place):
    self.assertIn(max(pieces(_REASONS[place]), key=len), _GUIDE, place)

  @parameterized.parameters(*_QUOTES)
  def test_what_is_quoted_is_in_the_package(self, page, quote):
    del page
    everything = [text for found in _ERRORS.values() for text in found]
    everything += _REASONS.values()
    in_order = '.*'.join(map(re.escape, pieces(quote)))
    self.assertTrue(
      any(re.search(in_order, squeezed(text)) for text in everything), quote
    )

  @parameterized.parameters(*_CODE)
  def test_code_is_python_and_its_names_exist(self, page, code):
    del page
    ast.parse(code)
    for name in re.findall(r'\bnnx_ext\.([\w.]*\w)', code):
      operator.attrgetter(name)(nnx_ext)

  def test_the_source_is_understood(self):
    source = (
      'def f(x):\n'
      '  """A docstring of some words."""\n'
      '  hint = f"if {x} is so" if x else "or if not so"\n'
      '  raise ValueError(f"f: {x} is wrong. {hint}")\n'
      'def g(x):\n'
      '  raise h(x)\n'
      'def h(x):\n'
      '  return TypeError("h: " + words(x))\n'
      'def words(x):\n'
      '  return f"not {x!r}"\n'
    )
    messages = Messages(source)
    self.assertEqual(
      messages.errors(), {4: ['f: … is wrong. …'], 8: ['h: not …']}
    )
    self.assertEqual(messages.reasons(), {3: 'or if not so'})


if __name__ == '__main__':
  absltest.main()
