"""Configuration of the documents: Sphinx with MyST Markdown."""

from importlib.metadata import version as installed

project = "mosaic-opt"
author = "The mosaic-opt authors"
project_copyright = "2026, the mosaic-opt authors"
release = installed("mosaic-opt")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
# Pages are Markdown; the .rst entry is for what autosummary generates.
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"mosaic-opt {release}"
