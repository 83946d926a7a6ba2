"""Hooks of mkdocs for the documentation site: generated pages, pages from outside docs/, links, formulas."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import reference  # noqa: E402

PLACED = {  # pages of the repository outside docs/ -> their place in the site
    "README.md": "overview.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
SOURCES = {place: source for source, place in PLACED.items()}
SETTINGS = re.compile(r"^`kiloword train (\S+) --help-all` lists them\.$", re.MULTILINE)  # where the site shows them
ARGUMENTS = re.compile(r"<p>Args: (.*?)</p>", re.DOTALL)
SOURCE = re.compile(r'(?<=<img src=")(?!\w+:)[^"]+')
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<path>(?!\w+:)[^)#\s]+)(?P<heading>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as code hosts make them, and blocks of formulas (```math) as MathML."""
    config.mdx_configs["toc"]["slugify"] = anchor
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [{"name": "math", "class": "math", "format": formula}]
    }
    return config


def anchor(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", separator).lower()


def formula(source: str, *rest: Any, **more: Any) -> str:
    """The MathML of a block of LaTeX."""
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and the pages of the repository outside docs/."""
    for place, text in reference.pages().items():
        files.append(File.generated(config, place, content=text))
    for source, place in PLACED.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page_of(notebook)))
    return files


def page_of(notebook: Path) -> str:
    """The cells of a notebook as Markdown, and a link to the file itself below its title."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    parts = [f"```python\n{text}\n```" if code else text for text, code in texts]
    title, _, rest = parts[0].partition("\n")
    file = f'<a href="{notebook.name}" download>{notebook.name}</a>, a notebook. Its outputs appear when it is run.'
    return "\n\n".join([title, file, rest, *parts[1:]])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to places in the site, and fill in the settings of methods."""
    return relinked(SETTINGS.sub(lambda found: reference.settings_of(found[1]), markdown), page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """List the arguments in docstrings, which stand in a paragraph there."""
    return ARGUMENTS.sub(lambda found: listed(found[1]), html)


def listed(arguments: str) -> str:
    """A paragraph "a: its meaning; b: its meaning. Raises: ..." as a list, and what follows as paragraphs."""
    first, *rest = re.split(r"\s(?=(?:Raises|Returns|Source|Errors): )", arguments)
    items = [
        re.sub(r"^([\w, ]+):\s", r"<code>\1</code>: ", item) for item in re.split(r";\s(?=\w+(?:, \w+)*:\s)", first)
    ]
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>" + "".join(f"<p>{part}</p>" for part in rest)


def relinked(text: str, place: str) -> str:
    """The Markdown of a page with links to files of the repository led into the site.

    What has no place in the site becomes plain text. Args: place: of the page, below docs/ or in the site.
    """
    folder = PurePosixPath(SOURCES.get(place, f"docs/{place}")).parent

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(folder / found["path"])
        to = PLACED.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not to or (ROOT / target).is_dir():
            return found["text"]
        to = re.sub(r"\.ipynb$", ".md", to)  # the page of a notebook
        path = os.path.relpath(to, PurePosixPath(place).parent)
        text = title(ROOT / target) if found["text"].endswith(".md") else found["text"]
        return f"{found['image']}[{text}]({path}{found['heading'] or ''})"

    text = SOURCE.sub(lambda found: os.path.relpath(folder / found[0], PurePosixPath("docs", place).parent), text)
    return LINK.sub(link, text)


def title(page: Path) -> str:
    """The first heading of a page, up to a colon."""
    return page.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0].partition(":")[0]
