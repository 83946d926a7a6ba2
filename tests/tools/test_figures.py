"""Figures of README.md and of the site's start page: there, small, described; and the script that draws them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from commands import module_at

ROOT = Path(__file__).resolve().parents[2]
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
