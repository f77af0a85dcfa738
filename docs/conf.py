"""How Sphinx builds the site: ``make site``. The pages are those that the forge shows, with a contents list added."""

from __future__ import annotations

from sphinx.application import Sphinx

project = "Diptych"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/notebooks/*.ipynb"]
html_theme = "furo"
html_title = "Diptych"
html_permalinks = False
html_show_copyright = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"  # what libraries say of themselves
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_ipywidgets_js: dict[str, str] = {}  # nothing is loaded from another host

CONTENTS = {
    "Start": ["quickstart", "install", "python", "upgrade"],
    "Notebooks": ["notebooks/first-search", "notebooks/train-and-compare", "notebooks/own-part"],
    "Data and training": ["data", "audit", "training", "training-speed", "recipes", "compose", "tables"],
    "Methods": ["methods", "methods-*"],
    "Numbers": ["evaluation", "comparing", "pictures", "results", "results-*"],
    "Search": ["search", "embedded", "serve", "exchange", "scale", "reliability"],
    "The code": ["api", "extending", "extending-targets", "architecture", "decisions", "citing"],
}


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """The contents list of the site, below the pages that list each other on the forge."""
    if name == root_doc:
        for title, pages in CONTENTS.items():
            lines = "\n".join(f"docs/{page}" for page in pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{lines}\n```\n"
        source[0] += (
            "\n\n```{toctree}\n:hidden:\n:caption: Project\n\ndocs/README\nCONTRIBUTING\nSECURITY\nCHANGELOG\n```\n"
        )


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("source-read", add_contents)
