"""The site: generated reference, navigation, a build without warnings, links that work offline, figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from PIL import Image

from commands import module_at
from kiloword.cli.main import VERBS
from kiloword.evaluation import TASKS
from kiloword.methods.registry import PRESETS, components

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = Path(sys.prefix) / "docs"  # where `make docs` installs it
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}  # what a page fetches by itself
needs_mkdocs = pytest.mark.skipif(not MKDOCS.is_dir(), reason="mkdocs is not installed: make docs installs it")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    pages: dict[str, str] = module_at(ROOT / "tools" / "reference.py", "reference").pages()
    return pages


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder as `make docs` does."""
    env = os.environ | {"PYTHONPATH": f"{MKDOCS}{os.pathsep}{ROOT}", "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(words, cwd=root, env=env, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert not done.returncode, done.stderr[-3000:]
    return out


def row(page: str, flag: str) -> list[str]:
    """Cells of the first row of a flag."""
    line = next(line for line in page.splitlines() if line.startswith(f"| `{flag}` |"))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_every_verb_task_method_and_component_has_a_section(made: dict[str, str]) -> None:
    verbs, tasks, methods = (made[f"reference/{name}.md"] for name in ("verbs", "eval", "methods"))
    listed = {verb for group in VERBS.values() for verb in group} - {"train", "eval"}
    assert all(f"[`kiloword {verb}`](#kiloword-{verb})" in verbs for verb in listed)
    assert re.findall("^## kiloword (.*)", verbs, re.MULTILINE) == sorted(listed)
    for task in (*TASKS, "suite"):
        assert f"\n## kiloword eval {task}\n" in tasks
    for method in (*PRESETS, *(f"+{name}" for name in components())):
        assert f"\n## {method}\n" in methods


def test_flags_have_type_default_range_and_help(made: dict[str, str]) -> None:
    train, verbs = made["reference/train.md"], made["reference/verbs.md"]
    assert row(train, "--optim.beta1") == [
        "`--optim.beta1`", "float", "`0.9`", "≥ 0, < 1", "AdamW: decay of the mean gradient"
    ]  # fmt: skip
    assert row(train, "--lora.alpha")[2:4] == ["`16`", "> 0, ≤ 1e+06"]
    assert row(train, "--out")[1:3] == ["path", "required"]
    assert row(train, "--precision")[1] == "auto, fp64, fp32, bf16"
    assert row(train, "--data")[1:3] == ["str ...", "`scenes`"]
    assert row(verbs, "MODELS")[1:3] == ["str ...", "required"]
    assert row(verbs, "SOURCE")[1:3] == ["str", ""]
    assert row(verbs, "--workers")[1:3] == ["int, auto", "`auto`"]
    assert row(verbs, "--nearest")[1] == "cosine, csd"
    assert '\n\n```bash\nkiloword score runs/first/model --images a.jpg b.jpg --texts "a dog" "a cat"\n' in verbs


def pages_of(nav: Any) -> Iterator[str]:
    for entry in nav:
        places = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [places] if isinstance(places, str) else pages_of(places)


def test_the_navigation_has_every_page(made: dict[str, str]) -> None:
    listed = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages | set(made) <= set(listed)


class Links(HTMLParser):
    """What a page fetches, where its links lead, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if (place := values.get(LOADED.get(tag, ""))) and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(place)
        elif tag == "a" and values.get("href"):
            self.links.append(values["href"])


@needs_mkdocs
def test_links_work_offline(site: Path) -> None:
    """Every link of every page leads to a file and an anchor of the site, and nothing is fetched from elsewhere."""
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 40
    for page, found in pages.items():
        assert not [place for place in found.fetched if urlsplit(place).netloc], page
        for place in (*found.fetched, *found.links):
            parts = urlsplit(place)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page.name}: {place}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, f"{page.name}: {place}"
    styles = [style.read_text() for style in site.rglob("*.css")]
    assert not any("url(http" in style or "@import" in style for style in styles)


@needs_mkdocs
def test_search_finds_flags_and_pages_hold_formulas_and_settings(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("--settings.rho" in entry["text"] and "papers/clip-c" in entry["location"] for entry in index)
    for page in ("llip", "clip-c", "sycoca", "prolip", "fff"):
        html = (site / "papers" / f"{page}.html").read_text()
        assert html.count("<math") >= 2
        assert "settings.scale" in html
        assert "lists them" not in html  # what stands there in the repository


@needs_mkdocs
@pytest.mark.parametrize(
    ("page", "shows"),
    [
        ("index", 'href="project/contributing.html"'),  # out of docs: to the place of the page
        ("results", "every section with its plot"),  # the record is no page of the site
        ("overview", 'href="comparison.html">Comparison</a>'),  # by its title
        ("architecture", 'href="glossary.html">Glossary</a>'),
        ("overview", "see CITATION.cff"),
        ("reference/python", "<li><code>dtype</code>: "),  # arguments in docstrings
        ("index", 'href="notebooks/your_method.html"'),
        ("notebooks/your_method", 'href="your_method.ipynb"'),
        ("notebooks/your_method", 'href="../own-method.html"'),
        ("notebooks/your_method", "writefile"),  # its code
    ],
)
def test_links_out_of_docs_and_notebooks(page: str, shows: str, site: Path) -> None:
    assert shows in (site / f"{page}.html").read_text()


@needs_mkdocs
@pytest.mark.slow
@pytest.mark.parametrize("line", ["[x](nowhere.md)", "[x](data.md#nothing)"])
def test_a_broken_link_fails_the_build(line: str, tmp_path: Path) -> None:
    for name in ("tools", "kiloword", *(path.name for path in ROOT.glob("*.md")), "research"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "install.md").open("a") as file:
        file.write(f"\n{line}\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode
    assert "install.md" in done.stderr


FIGURES = ROOT / "docs" / "assets" / "figures"
LARGEST, ALL = 150_000, 400_000  # bytes: of one figure, of all
LEAST = 30  # letters that describe a figure


def images(page: Path) -> dict[Path, str]:
    """The images of a page with their descriptions, of Markdown and of HTML."""
    text = page.read_text(encoding="utf-8")
    found = [(path, alt) for alt, path in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text)]
    for tag in re.findall(r"<img\s[^>]*>", text):
        named = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        found.append((named["src"], named.get("alt", "")))
    return {(page.parent / path).resolve(): alt for path, alt in found}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_images_are_there_small_and_described(page: str) -> None:
    shown = images(ROOT / page)
    assert set(shown) <= set(FIGURES.iterdir())
    assert len(shown) == (1 if page == "README.md" else len(list(FIGURES.iterdir())))
    for path, alt in shown.items():
        assert path.stat().st_size <= LARGEST, path
        assert len(alt) >= LEAST, path
    assert len(set(shown.values())) == len(shown)
    assert sum(path.stat().st_size for path in shown) <= ALL


@pytest.mark.slow
def test_the_script_draws_every_figure(tmp_path: Path) -> None:
    """From models of one step."""
    module_at(ROOT / "tools" / "browser.py", "browser")
    script = module_at(ROOT / "tools" / "figures.py", "figures")
    words = ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models"), "--steps", "1"]
    assert script.main(words) == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    names = {path.name for path in FIGURES.iterdir()}
    assert drawn.keys() == names - ({"search.png"} if script.program() is None else set())
    for name in drawn:
        with Image.open(tmp_path / "out" / name) as figure:
            assert figure.size == (script.WIDTH, script.HEIGHT)
            assert len(figure.getcolors() or ()) > 8, f"{name} is nearly empty"
