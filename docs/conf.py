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
"""Sphinx configuration; build with ``python -m sphinx -W docs OUT``."""

import os
import pathlib
import sys
import tempfile

# The package, its docstrings and the guides' kernels all come from this
# checkout, installed or not.
_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
sys.path.insert(0, _ROOT)
os.environ['PYTHONPATH'] = os.pathsep.join(
  filter(None, [_ROOT, os.environ.get('PYTHONPATH')])
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import nnx_ext  # noqa: E402

project = 'nnx_ext'
author = 'The nnx_ext Authors'
copyright = f'2026, {author}'
release = nnx_ext.__version__
version = release

extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.autosummary',
  'sphinx.ext.doctest',
  'sphinx.ext.napoleon',
  'sphinx_copybutton',
  'sphinx_design',
]
exclude_patterns = ['_build', 'jupyter_execute']
nitpicky = True  # a reference that leads nowhere is a warning

# -- API reference -----------------------------------------------------------

autodoc_typehints = 'none'
autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
add_module_names = True
autosummary_generate = False
napoleon_use_rtype = False
napoleon_use_ivar = True

doctest_global_setup = """
import jax
import jax.numpy as jnp
from flax import nnx
import nnx_ext

import logging as slog
slog.getLogger('absl').setLevel('ERROR')
"""

# -- Guides ------------------------------------------------------------------

myst_heading_anchors = 3
nb_execution_mode = 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True  # else outputs split by timing

# Kernels send what is printed when a cell ends. By default a timer does so too,
# also between a text and its newline, and then an empty line comes out.
_IPYTHON = tempfile.TemporaryDirectory()
_STARTUP = pathlib.Path(_IPYTHON.name, 'profile_default', 'startup')
_STARTUP.mkdir(parents=True)
(_STARTUP / 'flush.py').write_text(
  'import sys; sys.stdout.flush_interval = 600'
)
os.environ['IPYTHONDIR'] = _IPYTHON.name
nb_output_stderr = 'remove-warn'
nb_render_markdown_format = 'myst'  # tables are shown as such

# -- HTML --------------------------------------------------------------------

html_theme = 'sphinx_book_theme'
html_title = 'nnx_ext'
html_static_path = ['_static']
html_css_files = ['nnx_ext.css']
html_theme_options = {
  'show_navbar_depth': 2,
  'show_toc_level': 2,
  'use_fullscreen_button': False,
  'navbar_persistent': [],  # the search button is in the sidebar
}
copybutton_prompt_text = r'>>> |\.\.\. '
copybutton_prompt_is_regexp = True
