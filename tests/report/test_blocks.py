"""Every block renders, on the page and on the terminal; what comes from data is escaped; a page asks for nothing."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image, ImageColor

import pages
from kiloword import report
from kiloword.report.pictures import overlay
from kiloword.report.render import html

pytestmark = pytest.mark.plots
HOSTILE = "<script>alert(1)</script>&\"'\u202e\x1b[31m $x_1$"
SMALL, LARGE = np.zeros((8, 8, 3), np.uint8), np.full((200, 300, 3), 128, np.uint8)


def curves(axes: Axes) -> None:
    axes.plot([1, 2, 3], [0.1, 0.4, 0.3], label=f"first {HOSTILE}")
    axes.plot([1, 2, 3], [0.2, 0.3, 0.5], label="second")
    axes.set(xlabel=HOSTILE, ylabel="recall", xscale="log")


def names(axes: Axes) -> None:
    axes.barh([HOSTILE, "b"], [3, 4], color="C1")


def blocks(word: str = HOSTILE) -> list[report.Block]:
    return [
        report.Text(word),
        report.Text(word, "heading"),
        report.Text(word, "code"),
        report.Table(
            [[word, 0.123456, 12, None, word], ["b", 0.5, 7, 1, "x"]], [word, "acc_1", "n", "m", "w"], word, best=[1]
        ),
        report.Plot(curves, word),
        report.Beside([report.Plot(names, "bars"), report.Table([], ["nothing"])]),
        report.Matrix(np.array([[3, 1], [0, 4]]), [word, "b"], [word, "b"], word),
        report.Gallery(
            [report.Tile(SMALL, [word, "0.31"], True), report.Tile(LARGE, ["0.2"], False), report.Tile(LARGE)], word
        ),
    ]


def shown(word: str = HOSTILE) -> str:
    return html(
        report.Page(
            word,
            f"{word}\n\nsecond",
            {
                word: blocks(word),
                "empty": [report.Table([], ["a"]), report.Beside([])],
                "b": [report.Text("b"), report.Table([], ["a"])],
            },
            {word: word},
        )
    )


def test_every_block_is_on_the_page() -> None:
    page = shown("word")
    section = pages.sections(page)["word"]
    assert section.tables[0] == [
        ["word", "acc_1", "n", "m", "w"],
        ["word", "0.123", "12", "–", "word"],
        ["b", "0.500", "7", "1", "x"],
    ]
    assert '<td class="strong">0.500</td>' in page
    assert section.tables[1][1:] == [["word", "3", "1"], ["b", "0", "4"]]
    assert [page.count(f"<{tag}") for tag in ("h1", "h2", "h3", "pre", "img", "table")] == [1, 2, 1, 1, 3, 2]
    assert page.count('role="img"') == 4  # each of two plots for wide and narrow screens
    assert re.findall('<img( class="small")?', page) == [' class="small"', "", ""]
    assert re.findall('alt="([^"]*)"', page) == ["image 1, right", "image 2, wrong", "image 3"]


def test_text_is_escaped_and_the_page_asks_for_nothing() -> None:
    page = shown()
    assert "<script" not in page
    assert not set("\u202e\x1b") & set(page)
    assert "\\u202e\\x1b[31m $x_1$" in page
    assert not re.search(r"https?:|@import|<link (?!rel=\"icon\")| on\w+=", page)
    assert all(source.startswith("data:image/") for source in re.findall(r'src="([^"]*)', page))
    assert all(place.startswith(("#", "data:")) for place in re.findall(r'href="([^"]*)', page))
    assert "default-src 'none'" in page


def test_same_blocks_are_the_same_bytes_and_colours_follow_the_page(tmp_path: Path) -> None:
    report.write_page(tmp_path / "a.html", report.Page("title", "", {"a": blocks()}))
    report.write_page(tmp_path / "b.html", report.Page("title", "", {"a": blocks()}))
    page = (tmp_path / "a.html").read_bytes()
    assert page == (tmp_path / "b.html").read_bytes()
    plots = re.findall("<svg.*?</svg>", page.decode(), re.DOTALL)
    assert all(f"var(--{name})" in plots[0] for name in ("s0", "s1", "ink", "muted", "rule"))
    assert not re.search("fill: #|stroke: #", "".join(plots))
    assert "recall" in plots[0]
    ids = re.findall('id="([^"]*)"', plots[0])
    assert len(ids) == len(set(ids))


def test_pages_say_how_they_were_made() -> None:
    page = html(report.Page("a", "", {}, report.made_by(["m"], "shards")))
    assert "<dt>Model</dt><dd>m</dd>" in page
    assert "<dt>Data</dt><dd>shards</dd>" in page
    assert report.made_by(["m", "n"])["Models"] == "m, n"
    assert "<dt>Command</dt>" not in page  # called from Python


def test_the_terminal_shows_text_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    report.say_blocks(blocks())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    for words in (r"<script>alert(1)</script>", "0.123", "0.500", "–", "acc_1"):
        assert words in out
    assert "recall" not in out


def test_rows_that_do_not_fit_are_refused_and_counts_are_coloured_by_their_share() -> None:
    with pytest.raises(ValueError, match="zip"):
        html(report.Page("a", "", {"a": [report.Table([["a"]], ["a", "b"])]}))
    page = html(report.Page("a", "", {"a": [report.Matrix(np.array([[1, 3], [0, 0]]), ["a", "b"], ["b", "a"])]}))
    cells = re.findall(r'<td style="--a:([\d.]+)">([\d.]+)</td>', page)
    assert cells == [("0.25", "1"), ("0.75", "3"), ("0.0", "0"), ("0.0", "0")]


def contrast(one: tuple[float, ...], two: tuple[float, ...]) -> float:
    """WCAG 2 contrast of two colours in 0..255."""

    def light(colour: tuple[float, ...]) -> float:
        linear = [c / 3294.6 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([light(one), light(two)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_can_be_read(scheme: int) -> None:
    sheet = html(report.Page("a", "", {}))
    palettes = re.findall(r":root {(.*?)}", sheet, re.DOTALL)
    colours = {name: ImageColor.getrgb(c) for name, c in re.findall(r"--(\w+): (#\w{6})", palettes[scheme])}
    for name in ["ink", "muted", "match", *(f"s{i}" for i in range(6))]:
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for share in np.linspace(0, 1, 101):
        cell = tuple(share * np.array(colours["heat"]) + (1 - share) * np.array(colours["paper"]))
        assert contrast(colours["ink"], cell) >= 4.5, share


def test_glow_is_a_share_between_the_mean_and_the_largest_value() -> None:
    """Literally, for a map as large as the image, where nothing is resized."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for looks in (rng.random((8, 8)) ** 8, rng.random((8, 8)), rng.normal(size=(8, 8))):
        clipped = looks.astype(np.float32).clip(0)
        even, full = clipped.mean(), max(clipped.max(), 4 * clipped.mean())
        glow = ((clipped - even) / (full - even)).clip(0, 1)[..., None]
        grey = 0.55 * image.mean(-1, keepdims=True) + 70
        lit = 0.35 * image + 0.65 * np.array([255, 140, 10])
        expected = ((1 - glow) * grey + glow * lit).round().clip(0, 255)
        assert np.abs(overlay(image, looks, 8).astype(float) - expected).max() <= 1


def test_thumbnails_and_addresses_hold_the_image() -> None:
    assert report.thumbnail(LARGE, 100).shape == (67, 100, 3)
    assert report.thumbnail(SMALL, 100).shape == (8, 8, 3)
    assert report.thumbnail(Image.new("L", (4, 2), 7)).tolist() == np.full((2, 4, 3), 7).tolist()
    noise = np.random.default_rng(0).integers(0, 255, (120, 120, 3), np.uint8)
    for pixels, kind in ((SMALL, "png"), (noise, "jpeg")):
        address = report.image_data(pixels)
        assert address.startswith(f"data:image/{kind};base64,")
        back = np.asarray(Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))))
        assert back.shape == pixels.shape
        assert kind == "jpeg" or (back == pixels).all()
