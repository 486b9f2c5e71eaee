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

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = _ROOT / 'docs'
_REFERENCE = _DOCS / 'api_reference'
_READ_ON_GITHUB = [
  'README.md',
  'CONTRIBUTING.md',
  'CHANGELOG.md',
  'benchmarks/README.md',
]
_LINKS_TO_PAGES = sorted(
  str(path.relative_to(_ROOT))
  for pattern in ['docs/**/*.md', 'docs/**/*.rst', 'nnx_ext/**/*.py']
  for path in _ROOT.glob(pattern)
)
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
_MODULE_CLASSES = [k for k in _CLASSES if issubclass(_PUBLIC[k], nnx.Module)]


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


def examples(doc: str) -> list[str]:
  """Blocks of a docstring that follow a ``::`` and have a prompt."""
  blocks = re.findall(r'::\n\n((?:(?:  .*)?\n)+)', doc + '\n')
  return [block for block in blocks if '>>> ' in block]


def pages_linked(text: str) -> list[str]:
  """Targets of ``:doc:`` and ``{doc}``, with a title or without."""
  roles = re.findall(r'(?::doc:|\{doc\})`([^`]+)`', text)
  return [re.sub(r'^.*<(.+)>$', r'\1', ' '.join(r.split())) for r in roles]


def files_linked(text: str) -> list[str]:
  """Targets of a Markdown text's links and images that are files."""
  text = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
  links = re.findall(r'\]\(\s*<?([^\s)>]+)', text)
  links += re.findall(r'^\s*\[[^\]]+\]:\s+(\S+)', text, re.M)
  links += re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text)
  return [
    link.partition('#')[0] for link in links if not re.match(r'#|[a-z]+:', link)
  ]


class ParsersTest(absltest.TestCase):
  def test_examples_are_blocks_with_a_prompt(self):
    doc = (
      'A.\n\nExample::\n\n  >>> 1\n  1\n\nText::\n\n  $ run\n\nB::\n\n  >>> 2'
    )
    self.assertLen(examples(doc), 2)

  def test_pages_have_titles_or_none(self):
    text = ':doc:`the\n  guide </guides/a>`, {doc}`b`, {func}`~c`'
    self.assertEqual(pages_linked(text), ['/guides/a', 'b'])

  def test_links_are_those_to_files_outside_of_code(self):
    text = (
      '[a](b.md#c) ![d](e.svg) [f](https://g) [h](#i)\n'
      '```python\nj[0](k)\n```\n<img src="l.png">\n[m]: n.md\n'
    )
    self.assertEqual(files_linked(text), ['b.md', 'e.svg', 'n.md', 'l.png'])


def _entries(page: str, directive: str) -> list[str]:
  """What the directives of a page list, a line each."""
  blocks = page.split(f'.. {directive}::')[1:]
  return [
    entry
    for block in blocks
    for entry in re.findall(
      r'^  ([\w/]+)$', re.split(r'^(?=[^ \n])', block, flags=re.M)[0], re.M
    )
  ]


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
    pages = [page.stem for page in _REFERENCE.glob('*.rst')]
    self.assertCountEqual(['index', *_entries(index, 'toctree')], pages)

  def test_every_function_is_in_the_summary(self):
    index = (_REFERENCE / 'index.rst').read_text()
    functions = [name for name in _FUNCTIONS if '.' not in name]
    self.assertCountEqual(_entries(index, 'autosummary'), functions)


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

  @parameterized.parameters(*_FUNCTIONS)
  def test_has_a_second_example(self, name):
    doc = inspect.getdoc(_PUBLIC[name])
    self.assertGreaterEqual(len(examples(doc)), 2)

  @parameterized.parameters(*_FUNCTIONS)
  def test_says_why_before_the_first_example(self, name):
    summary, *why = re.split(
      r'\n\n', inspect.getdoc(_PUBLIC[name]).partition('Example::')[0].strip()
    )
    self.assertNotIn('\n', summary)
    self.assertNotEmpty(why)

  @parameterized.parameters(*_FUNCTIONS)
  def test_parts_are_in_order(self, name):
    doc = inspect.getdoc(_PUBLIC[name])
    parts = ['\nExample::\n', '</guides/', '\nArgs:\n', '\nReturns:\n']
    places = [doc.index(part) for part in parts]
    places += [
      doc.index(part)
      for part in ['\nRaises:\n', '\nReferences:\n']
      if part in doc
    ]
    self.assertEqual(places, sorted(places))

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

  @parameterized.parameters(*_MODULE_CLASSES)
  def test_modules_have_examples_and_arguments(self, name):
    cls = _PUBLIC[name]
    doc = sections(inspect.getdoc(cls))
    self.assertIn('>>> ', doc.get('Example', ''))
    _, *signature = inspect.signature(cls.__init__).parameters.values()
    parameters = [p.name for p in signature if p.kind not in _VARIADIC]
    if cls is not nnx_ext.parametrizations.Parametrization:
      self.assertEqual(list(items(doc.get('Args', ''))), parameters)
      self.assertNotEmpty(items(doc.get('Attributes', '')))


class LinksTest(parameterized.TestCase):
  @parameterized.parameters(*_FUNCTIONS, *_MODULE_CLASSES)
  def test_public_name_links_to_a_guide(self, name):
    pages = pages_linked(inspect.getdoc(_PUBLIC[name]))
    self.assertTrue(any(page.startswith('/guides/') for page in pages), pages)

  @parameterized.parameters(*_LINKS_TO_PAGES)
  def test_pages_that_are_linked_exist(self, path):
    path = _ROOT / path
    for page in pages_linked(path.read_text()):
      base = _DOCS if page.startswith('/') else path.parent
      target = base / page.lstrip('/')
      found = [target.with_name(target.name + end) for end in ('.md', '.rst')]
      self.assertTrue(any(file.is_file() for file in found), page)

  @parameterized.parameters(*_READ_ON_GITHUB)
  def test_files_that_are_linked_exist(self, path):
    path = _ROOT / path
    for link in files_linked(path.read_text()):
      self.assertTrue((path.parent / link).exists(), link)


if __name__ == '__main__':
  absltest.main()
