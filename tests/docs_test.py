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
"""Every public name is documented, and its docstring is complete."""

import inspect
import pathlib
import re

from absl.testing import absltest, parameterized
from flax import nnx

import nnx_ext

_REFERENCE = pathlib.Path(__file__).parents[1] / 'docs' / 'api_reference'
_DIRECTIVE = re.compile(
  r'^\.\. (currentmodule|automodule|autofunction|autoclass):: +(\S+) *$', re.M
)
_PUBLIC = {name: getattr(nnx_ext, name) for name in nnx_ext.__all__} | {
  f'parametrizations.{name}': getattr(nnx_ext.parametrizations, name)
  for name in nnx_ext.parametrizations.__all__
}
_NEVER_RAISE = ['kl', 'lora_fa_filter']
_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_FUNCTIONS = [k for k, v in _PUBLIC.items() if inspect.isfunction(v)]
_CLASSES = [k for k, v in _PUBLIC.items() if inspect.isclass(v)]
_MODULES = [k for k, v in _PUBLIC.items() if inspect.ismodule(v)]


def documented_names(text: str) -> dict[str, str]:
  """Full names documented by an ``.rst`` page, with their directives."""
  found, module = {}, ''
  for directive, name in _DIRECTIVE.findall(text):
    if directive == 'currentmodule':
      module = name
    elif directive == 'automodule':
      found[name] = directive
    else:
      found[f'{module}.{name}'] = directive
  return found


def sections(doc: str) -> dict[str, str]:
  """Sections of a Google docstring that has been through ``inspect.getdoc``.

  A section is a line ``Name:`` or ``Name::`` and the indented lines below.
  """
  found, name = {}, ''
  for line in doc.splitlines():
    heading = re.fullmatch(r'([A-Z]\w*)::?', line)
    if heading:
      name = heading[1]
      found[name] = ''
    elif line and not line.startswith(' '):
      name = ''
    elif name:
      found[name] += line + '\n'
  return found


def items(section: str) -> dict[str, str]:
  """``name: text`` entries of a section, in order."""
  return {
    name: ' '.join(text.split())
    for name, text in re.findall(
      r'^  (\w+):((?:.*\n?)(?:^(?:    .*)?\n)*)', section, re.M
    )
  }


class ReferenceTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.documented = {}
    for page in sorted(_REFERENCE.glob('**/*.rst')):
      cls.documented.update(documented_names(page.read_text()))

  @parameterized.parameters(
    *[(name, 'autofunction') for name in _FUNCTIONS],
    *[(name, 'autoclass') for name in _CLASSES],
    *[(name, 'automodule') for name in _MODULES],
  )
  def test_public_name_is_on_a_page(self, name, directive):
    self.assertEqual(
      self.documented.get(f'nnx_ext.{name}'),
      directive,
      f'no `.. {directive}:: {name}` in docs/api_reference',
    )

  def test_every_public_name_has_a_kind(self):
    self.assertCountEqual(_FUNCTIONS + _CLASSES + _MODULES, _PUBLIC)

  def test_pages_name_public_names_only(self):
    modules = {f'nnx_ext.{name}' for name in _MODULES} | {'nnx_ext'}
    public = {f'nnx_ext.{name}' for name in _PUBLIC} | modules
    self.assertContainsSubset(self.documented.keys(), public)

  def test_every_page_is_in_the_index(self):
    index = (_REFERENCE / 'index.rst').read_text()
    listed = re.findall(r'^  ([\w/]+)$', index, re.M)
    pages = [page.stem for page in _REFERENCE.glob('*.rst')]
    self.assertCountEqual(['index', *listed], pages)


class FunctionDocstringTest(parameterized.TestCase):
  @parameterized.parameters(*_FUNCTIONS)
  def test_has_an_example(self, name):
    self.assertIn('>>> ', self._sections(name).get('Example', ''))

  @parameterized.parameters(*_FUNCTIONS)
  def test_args_are_those_of_the_signature(self, name):
    args = items(self._sections(name).get('Args', ''))
    signature = inspect.signature(_PUBLIC[name])
    self.assertEqual(list(args), list(signature.parameters))
    self.assertNotIn('', args.values())

  @parameterized.parameters(*_FUNCTIONS)
  def test_says_what_it_returns(self, name):
    self.assertNotEmpty(self._sections(name).get('Returns', '').strip())

  @parameterized.parameters(*_FUNCTIONS)
  def test_says_what_it_raises(self, name):
    raises = items(self._sections(name).get('Raises', ''))
    if name not in _NEVER_RAISE:
      self.assertNotEmpty({'ValueError', 'TypeError'} & set(raises))
    self.assertNotIn('', raises.values())

  def _sections(self, name):
    return sections(inspect.getdoc(_PUBLIC[name]))


class ClassDocstringTest(parameterized.TestCase):
  @parameterized.parameters(*_CLASSES)
  def test_fields_are_documented(self, name):
    cls = _PUBLIC[name]
    if issubclass(cls, nnx.Module):
      return  # its attributes are parameters, not annotated fields
    attributes = items(sections(inspect.getdoc(cls)).get('Attributes', ''))
    self.assertEqual(list(attributes), list(inspect.get_annotations(cls)))
    self.assertNotIn('', attributes.values())

  @parameterized.parameters(
    *[name for name in _CLASSES if issubclass(_PUBLIC[name], nnx.Module)]
  )
  def test_modules_have_examples_and_arguments(self, name):
    cls = _PUBLIC[name]
    doc = sections(inspect.getdoc(cls))
    self.assertIn('>>> ', doc.get('Example', ''))
    _, *signature = inspect.signature(cls.__init__).parameters.values()
    parameters = [p.name for p in signature if p.kind not in _VARIADIC]
    if cls is not nnx_ext.parametrizations.Parametrization:
      self.assertEqual(list(items(doc.get('Args', ''))), parameters)
      self.assertNotEmpty(items(doc.get('Attributes', '')))


if __name__ == '__main__':
  absltest.main()
