"""Sphinx configuration of the documentation. `make docs` builds it into docs/_build/html."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import generate
from sphinx.application import Sphinx

project = "raylt"
author = "raylt contributors"
release = installed_version("raylt")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "narrow_tables"]
html_math_renderer = "mathml"
exclude_patterns = ["_build", "generated/methods/*"]
html_theme = "furo"
html_title = f"raylt {release}"
html_show_copyright = False
html_show_sourcelink = False
html_static_path = ["site.css", "fonts"]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": []}
html_extra_path = ["grafana.json"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
smartquotes_action = "qe"  # curly quotes and ellipses, but no dashes, which would change --options
highlight_language = "none"  # blocks without a language are shell commands and output
# pages link to files of the repository, which the site does not hold; tests/test_docs.py checks those links
suppress_warnings = ["myst.xref_missing"]
default_role = "literal"  # docstrings put code between single backticks
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True

generate.write_pages(Path(__file__).parent / "generated")


def keep_intervals_together(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Break no line before or after ±, so that an interval stays with its mean."""
    source[0] = source[0].replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def give_headings_a_level(app: Sphinx, error: Exception | None) -> None:
    """Add the level that HTML requires to the captions of tables of contents, which Sphinx marks as headings."""
    if error is None:
        for page in Path(app.outdir).rglob("*.html"):
            page.write_text(page.read_text().replace('role="heading">', 'role="heading" aria-level="2">'))


def setup(app: Sphinx) -> None:
    app.connect("source-read", keep_intervals_together)
    app.connect("build-finished", give_headings_a_level)
