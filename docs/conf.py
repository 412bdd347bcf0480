"""The site: Sphinx reads these pages as they stand, so that their links work here, on the site and in an editor.

`make docs` builds it. Every warning is an error; among them a page that nothing leads to, a link to a page or heading
that does not exist, and a name in the reference that the code does not have.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "Mainstem"
release = re.findall(r'^__version__ = "(.+)"', (ROOT / "src/mainstem/__init__.py").read_text(), re.MULTILINE)[0]
project_copyright = "the authors of Mainstem"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
smartquotes = False  # they make a dash of the two of an option
html_theme = "furo"
html_title = f"Mainstem {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path: list[str] = []
default_role = "code"
suppress_warnings = ["misc.highlighting_failure"]  # blocks of signatures and shortened JSON are no whole programs

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

REPOSITORY = PROJECT.get("urls", {}).get("Repository", "")
"""Where sources are linked to. Without one, the site has a copy of each file that it links to."""
SHOWN = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md", "benchmarks": "bench/README.md"}
"""Pages of the site whose text stands elsewhere in the repository."""
LINK = re.compile(r"(?<!!)(\[[^\]\n]*(?:\n[^\]\n]*)?\])\(([^)#:\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)


def relinked(text: str, folder: Path, docname: str, repository: str = REPOSITORY) -> str:
    """Returns a page whose links lead to pages of the site, or to sources.

    Args:
        text: the page, in Markdown.
        folder: where the text stands; its links are relative to it.
        docname: the page's name on the site, such as `start/serve`.
        repository: the address of the repository's files, if there is one.
    """
    up = "../" * docname.count("/")
    pages = {path: name for name, path in SHOWN.items()}

    def changed(found: re.Match[str]) -> str:
        label, target, heading = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return found[0]  # the build reports it
        place = path.relative_to(ROOT).as_posix()
        if place in pages:
            return f"{label}({up}{pages[place]}.md{heading})"
        if place == "README.md":
            return f"{label}({up}index.md)"
        if path.is_relative_to(DOCS) and path.suffix == ".md":
            return f"{label}({up}{path.relative_to(DOCS).as_posix()}{heading})"
        if repository:
            return f"{label}({repository}/{place})"
        return label[1:-1] if path.is_dir() else f"{label}({up}../{place})"

    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(changed, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(changed, text[at:])])


def commands() -> str:
    """Returns the page of all commands with their options, from the parser."""
    from mainstem.cli import app as command

    text = command.generate_docs(output_format="markdown", recursive=True)
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*Commands\*\*)", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"^(mainstem(?: [a-z]+)*) -m \S+ ", r"\1 ", text, flags=re.MULTILINE)  # how this process was started
    return text.replace("# mainstem\n", "# Commands\n", 1)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Called by Sphinx with each page before it is parsed."""
    path = DOCS / f"{docname}.md"
    if docname == "reference/cli":
        source[0] = commands()
    if docname in SHOWN:
        path = ROOT / SHOWN[docname]
        source[0] = path.read_text()
        app.env.note_dependency(str(path), docname=docname)
    source[0] = relinked(source[0], path.parent, docname)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
