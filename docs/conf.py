"""Sphinx's settings: the pages of this folder and the notebooks as one site.

``sphinx-build -W -c docs . build/site`` builds it from the root of the repository, so that links between pages and
notebooks work on a code host as well.
"""

from __future__ import annotations

import splitkit

project = "splitkit"
author = "the splitkit authors"
copyright = "the splitkit authors"
release = version = splitkit.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "docs/**.rst", "notebooks/*.ipynb", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["build", "docs/_templates"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"splitkit {release}"
html_extra_path = ["site"]  # index.html, which leads to docs/index.html
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored executed; the tests rerun them

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
