"""The report: right places, escaped text, readable colours, nothing from outside, whole files."""

from __future__ import annotations

import base64
import io
import itertools
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor, ImageDraw

import kiloword
from kiloword import report
from kiloword.report.axes import linear_axis, log_axis
from kiloword.report.figure import CSS, LIGHT
from kiloword.report.images import image_data
from kiloword.report.page import POLICY, SERIES
from kiloword.report.plots import bins, doubling

DARK = dict(re.findall(r"--(\w+): (#\w{6});", CSS[CSS.index("@media") : CSS.index("}\n}")]))
VOID = {"meta", "link", "img", "br", "line", "rect", "path", "wbr"}
NASTY = "<script>alert(\"x\")</script> & 'q'"
finite = st.floats(-1e6, 1e6).map(lambda v: round(v, 3))


class Reader(HTMLParser):
    """Collects tags, attributes and text, and insists that every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def drawn(kind: int, size: int = 64) -> np.ndarray:
    """An invented image: one of three shapes in a colour of its own."""
    colour = [(196, 62, 48), (44, 106, 168), (232, 178, 44), (58, 140, 92)][kind % 4]
    image = Image.new("RGB", (size, size), [(238, 236, 230), (40, 44, 52)][kind % 2])
    box = (size // 5, size // 5, size * 4 // 5, size * 4 // 5)
    [ImageDraw.Draw(image).ellipse, ImageDraw.Draw(image).rectangle][kind // 4 % 2](box, fill=colour)
    return np.asarray(image)


def demo() -> str:
    """Every piece on one page, with invented figures."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.12, 300)
    loss = [(10 * i, 0.3 + 5.2 * math.exp(-i / 60) + noise[i] * (0.3 + 2 * math.exp(-i / 80))) for i in range(300)]
    recall = {"text retrieval": [(i, 0.77 * (1 - math.exp(-i / 700))) for i in range(0, 3001, 300)]}
    recall["image retrieval"] = [(x, y - 0.04 * (x > 0)) for x, y in recall["text retrieval"]]
    names = ["circle", "square", "triangle", "star", "cross", "ring", "heart", "hexagon"]
    shapes = rng.integers(0, 9, (8, 8)) + np.diag(rng.integers(10, 90, 8))
    colours = np.round(np.eye(4) * 0.9 + 0.025, 2)
    rows: list[list[str | float | None]] = [
        ["text_retrieval_recall@1", 0.771, 0.70, 0.118, "met"],
        ["image_retrieval_recall@1", 0.742, 0.70, 0.104, "met"],
        ["text_retrieval_recall@5", 0.981, 0.97, 0.334, "met"],
        ["mean_average_precision", 0.645, None, 0.201, "no goal"],
    ]
    hits = [[(drawn(k + q), 0.93 - 0.09 * k - 0.02 * q, (k + q) % 3 != 2) for k in range(5)] for q in range(3)]
    texts = ["a red circle", "a small blue square to the left of a large striped star", "two yellow things"]
    found = list(zip(texts, hits, strict=True))
    key = [("0.77", "text retrieval, recall at 1"), ("0.74", "image retrieval, recall at 1"), ("0.99", "colour")]
    sections = [
        report.section("In short", report.headline([*key, ("2 min 41 s", "training on 2 cores")])),
        report.section(
            "Training",
            report.line_plot({"loss": loss}, "step", "loss", smooth=15),
            report.line_plot(recall, "step", "R@1"),
            report.histogram({"annotated": [1, 4, 9, 3], "random": [7, 3, 1, 0]}, [0, 0.1, 0.2, 0.3, 0.4], "S", "%"),
        ),
        report.section(
            "Retrieval", report.table(rows, ["metric", "kiloword", "goal", "colour histogram", "verdict"], strong=1)
        ),
        report.section("Queries", report.gallery(found)),
        report.section(
            "Confusions",
            "Each row is a true class; a framed cell is the right answer.",
            report.grid(
                [
                    report.heat_map(shapes, names, names, caption="Shape, images"),
                    report.heat_map(colours, ["red", "blue", "green", "ochre"], ["red", "blue", "green", "ochre"]),
                ]
            ),
        ),
    ]
    intro = (
        "A tiny image-text model, trained from nothing on drawn scenes, and what it can do on scenes it never saw."
        "\n\nSeed 0, scenes-v1, 64 pixels a side."
    )
    return report.page("Kiloword quickstart", intro, sections)


def test_page_asks_for_nothing_outside() -> None:
    html = demo()
    reader = Reader(html)
    for _, attrs in reader.tags:
        for name in ("src", "href", "srcset", "data", "poster"):
            address = attrs.get(name)
            assert address is None or address.startswith(("data:", "#")), address
        assert not any(name.startswith("on") for name in attrs)
    assert not {"script", "iframe", "object"} & {tag for tag, _ in reader.tags}
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_page_can_be_read_aloud() -> None:
    reader = Reader(demo())
    assert reader.all("html") == [{"lang": "en"}]
    assert all(a.get("alt") for a in reader.all("img"))
    assert all(a.get("scope") in ("row", "col") for a in reader.all("th"))
    assert all(a.get("aria-label") for a in reader.all("svg") if a.get("role") == "img")
    anchors = [a["href"] for a in reader.all("a")]
    assert anchors == [f"#{a['id']}" for a in reader.all("h2")]


def test_text_is_escaped_everywhere() -> None:
    hit = (drawn(0), 0.5, True)
    html = report.page(
        NASTY,
        NASTY,
        [
            report.section(NASTY, NASTY, report.headline([(NASTY, NASTY)])),
            report.section(
                NASTY,
                report.table([[NASTY, NASTY]], [NASTY, NASTY], caption=NASTY),
                report.gallery([(NASTY, [hit])]),
            ),
            report.section(
                NASTY,
                report.heat_map([[1]], [NASTY], [NASTY], caption=NASTY, column_label=NASTY),
                report.line_plot({NASTY: [(0, 1)], "b": [(0, 2)]}, NASTY, NASTY),
            ),
        ],
    )
    assert "<script" not in html
    assert Reader(html).text.count(NASTY) >= 18


def contrast(one: tuple[float, ...], two: tuple[float, ...]) -> float:
    """WCAG 2 contrast of two colours in 0..255."""

    def light(colour: tuple[float, ...]) -> float:
        linear = [c / 3294.6 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([light(one), light(two)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_colours_can_be_read(palette: dict[str, str]) -> None:
    paper = ImageColor.getrgb(palette["paper"])
    for name in ["ink", "muted", "match", *(f"s{i}" for i in range(SERIES))]:
        assert contrast(ImageColor.getrgb(palette[name]), paper) >= 4.5, name
    for hundredths in range(101):
        share = hundredths / 100
        cell = tuple(
            share * h + (1 - share) * p for h, p in zip(ImageColor.getrgb(palette["heat"]), paper, strict=True)
        )
        assert contrast(ImageColor.getrgb(palette["ink"]), cell) >= 4.5, share


@given(st.lists(finite, min_size=1, max_size=20), st.booleans())
def test_linear_axis_holds_its_values_and_has_round_ticks(values: list[float], widen: bool) -> None:
    axis = linear_axis(values, widen)
    slack = 1e-6 * (axis.high - axis.low)
    assert all(-1e-6 <= axis.place(v) <= 1 + 1e-6 for v in values)
    assert 2 <= len(axis.ticks) <= 10  # with widening, an interval more at either end
    assert all(axis.low - slack <= t <= axis.high + slack for t in axis.ticks)
    step = axis.ticks[1] - axis.ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_log_axis_holds_its_values(values: list[float]) -> None:
    axis = log_axis(values)
    assert all(-1e-9 <= axis.place(v) <= 1 + 1e-9 for v in values)
    assert len(axis.ticks) >= 1
    assert all(-1e-6 <= axis.place(t) <= 1 + 1e-6 for t in axis.ticks)


def paths(html: str) -> list[str]:
    """The drawn lines of a plot, without those of the legend."""
    figure = ElementTree.fromstring(html)
    return [p.attrib["d"] for p in figure.findall(".//div//path")]


def test_line_goes_through_its_points_and_breaks_at_nan() -> None:
    points = [(0, 0.0), (1, 5.0), (2, math.nan), (3, 10.0)]
    assert paths(report.line_plot({"a": points}, "x", "y")) == ["M0.0 1000.0L333.3 500.0", "M1000.0 0.0h0"]


def test_a_point_alone_is_a_dot_that_can_be_seen() -> None:
    html = report.line_plot({"a": [(0, 1.0)], "b": [(0, 2.0), (1, 3.0)]}, "x", "y")
    assert html.count('class="line dot"') == 1
    assert "stroke-width: 7" in report.page("t", "", [])


def test_log_plot_spaces_factors_evenly() -> None:
    points = [(0, 1.0), (1, 10.0), (2, 100.0)]
    assert paths(report.line_plot({"a": points}, "x", "y", log_y=True)) == ["M0.0 1000.0L500.0 500.0L1000.0 0.0"]


def test_smooth_line_is_the_mean_of_neighbours() -> None:
    points = [(float(i), float(y)) for i, y in enumerate([0, 6, 0, 6, 9])]
    raw, mean = paths(report.line_plot({"a": points}, "x", "y", smooth=3))
    heights = [10 * (1 - float(y) / 1000) for y in re.findall(r" (\d+\.\d)", mean)]
    assert raw != mean
    assert heights == pytest.approx([3, 2, 4, 5, 7.5], abs=0.01)


def test_log_x_spaces_factors_evenly() -> None:
    points = [(1, 0.0), (10, 5.0), (100, 10.0)]
    assert paths(report.line_plot({"a": points}, "x", "y", log_x=True)) == ["M0.0 1000.0L500.0 500.0L1000.0 0.0"]
    with pytest.raises(ValueError, match="series 'a' has values of 0 or less"):
        report.line_plot({"a": [(0, 1.0), (1, 1.0)]}, "x", "y", log_x=True)


def test_histogram_draws_every_bin_from_the_floor() -> None:
    (path,) = paths(report.histogram({"a": [10, 0, 5]}, [0, 1, 2, 4], "x", "y"))
    assert path == "M0.0 1000.0V0.0H250.0V1000.0H500.0V500.0H1000.0V1000.0"
    even = report.histogram({"a": [10, 0, 5]}, [0, 1, 2, 4], "x", "y", even=True)
    assert paths(even) == ["M0.0 1000.0V0.0H333.3V1000.0H666.7V500.0H1000.0V1000.0"]
    assert re.findall(r'dy="1.6em" text-anchor="middle">([^<]+)<', even) == ["0", "1", "2", "4"]


@pytest.mark.parametrize(
    ("series", "edges", "message"),
    [
        ({"a": [1.0]}, [0, 1, 2], "1 heights for 2 bins"),
        ({"a": [-1.0]}, [0, 1], "negative or not finite"),
        ({"a": [1.0, 1.0]}, [0, 1, 1], "must ascend"),
        ({str(i): [1.0] for i in range(SERIES + 1)}, [0, 1], "room for 6 series, got 7"),
    ],
)
def test_histogram_refuses(series: dict[str, list[float]], edges: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report.histogram(series, edges, "x", "y")


def test_as_many_series_as_there_are_colours() -> None:
    names = [str(n) for n in range(SERIES)]
    for drawn in (
        report.histogram({name: [1.0] for name in names}, [0, 1], "x", "y"),
        report.line_plot({name: [(0, 1.0)] for name in names}, "x", "y"),
    ):
        assert all(f">{name}<" in drawn for name in names)


@given(st.lists(finite, min_size=1, max_size=20))
def test_bins_hold_their_values(values: list[float]) -> None:
    edges = bins(values)
    assert 2 <= len(edges) <= 62
    slack = 1e-9 * max(abs(e) for e in edges)
    assert all(edges[0] - slack <= v <= edges[-1] + slack for v in values)
    assert all(a < b for a, b in itertools.pairwise(edges))


def test_doubling_bins() -> None:
    assert doubling(0) == [0, 1, 2]
    assert doubling(4) == [0, 1, 2, 4, 8]


def test_series_differ_without_colour() -> None:
    html = report.line_plot({f"line {i}": [(0, i), (1, i)] for i in range(SERIES)}, "x", "y")
    dashes = re.findall(r"stroke-dasharray:([\d a-z]+)", html)
    assert len(set(dashes)) == SERIES
    assert [html.count(f"line {i}</li>") for i in range(SERIES)] == [1] * SERIES


@pytest.mark.parametrize(
    ("series", "log_y", "message"),
    [
        ({}, False, "nothing to plot"),
        ({"a": [(0, math.nan)]}, False, "nothing to plot"),
        ({"a": [(0, 1.0), (1, 0.0)]}, True, "series 'a' has values of 0 or less"),
        ({str(i): [(0, 1.0)] for i in range(SERIES + 1)}, False, "room for 6 series, got 7"),
    ],
)
def test_plot_refuses(series: dict[str, list[tuple[float, float]]], log_y: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report.line_plot(series, "x", "y", log_y=log_y)


def test_heat_map_writes_numbers_and_colours_shares_of_rows() -> None:
    html = report.heat_map([[3, 1], [0, 0]], ["a", "b"], ["a", "b"])
    cells = re.findall(r'<td(?: class="([a-z ]+)")? style="--a:([\d.]+)">(\d+)</td>', html)
    assert cells == [("same", "0.75", "3"), ("", "0.25", "1"), ("none", "0.00", "0"), ("none same", "0.00", "0")]
    assert ">0.25<" in report.heat_map([[0.25, 0.75]], ["a"], ["x", "y"])


@pytest.mark.parametrize("matrix", [[[1, 2, 3]], [[1, -1], [0, 1]], [[1.0, math.nan], [0.0, 1.0]]])
def test_heat_map_refuses(matrix: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="heat map's matrix"):
        report.heat_map(matrix, ["a", "b"], ["a", "b"])


def test_table_cells() -> None:
    html = report.table(
        [["R@1", 0.7714, 3, None, "met"]], ["metric", "ours", "n", "goal", "verdict"], digits=3, strong=1
    )
    assert '<th scope="row">R@1</th><td class="strong">0.771</td><td>3</td><td>–</td><td class="word">met</td>' in html
    assert '<td>6.4%</td><td class="word">a</td>' in report.table([["a", "6.4%", "a"]], ["", "n", "w"])
    assert report.code("a < b") == '<pre class="code">a &lt; b</pre>'
    with pytest.raises(ValueError, match="row 1 of the table has 1 cells, its header 2"):
        report.table([["a", 1], ["b"]], ["", "n"])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_images_survive(height: int, width: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = base64.b64decode(image_data(image).removeprefix("data:image/png;base64,"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), image)


def test_gallery_says_match_in_words_and_keeps_the_order() -> None:
    html = report.gallery([("a cat", [(drawn(0), 0.9, True), (drawn(1, 128), 0.4, False)])])
    first, second = Reader(html).all("img")
    assert first["alt"] == "Image 1 for “a cat”, score 0.90, a match"
    assert second["alt"] == "Image 2 for “a cat”, score 0.40, no match"
    assert (html.count("✓ match"), html.count("<span>no match</span>")) == (1, 1)
    assert (first.get("class"), second.get("class")) == ("small", None)
    with pytest.raises(ValueError, match=r"float64 \(2, 2, 3\), expected uint8"):
        report.gallery([("a", [(np.zeros((2, 2, 3)), 0.0, False)])])


def test_gallery_is_silent_where_nobody_knows_and_cards_hold_their_words() -> None:
    html = report.gallery([("a cat", [(drawn(0), 0.9, None)])])
    assert Reader(html).all("img")[0]["alt"] == "Image 1 for “a cat”, score 0.90"
    assert "match" not in html
    html = report.card([(drawn(0), NASTY), (drawn(1, 128), "own")], [NASTY], strong=NASTY)
    reader = Reader(html)
    assert [(a["alt"], a.get("class")) for a in reader.all("img")] == [(NASTY, "small"), ("own", None)]
    assert reader.text == NASTY + "own" + NASTY + NASTY


def test_write_replaces_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "report.html"
    report.write(target, "old ü")
    assert target.read_text("utf-8") == "old ü"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"cannot write .*: No space left on device"):
        report.write(target, "half")
    assert target.read_text("utf-8") == "old ü"
    assert list(target.parent.iterdir()) == [target]


def test_bars_have_their_lengths_a_line_and_escaped_names() -> None:
    html = report.bars({NASTY: {"a": 0.25, NASTY: 1.0}, "second": {"a": 0.0}}, {NASTY: 0.5, "second": 1 / 3}, NASTY)
    reader = Reader(html)
    assert "<script" not in html
    styles = [tag["style"] or "" for _, tag in reader.tags if tag.get("class") in ("bar", "mark")]
    assert [re.split("[;]", style)[0] for style in styles] == [
        "width:25.0%",
        "width:100.0%",
        "left:50.0%",
        "width:0.0%",
        "left:33.3%",
    ]
    assert report.bars({}, {}, "chance") == ""


def test_write_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        report.write(tmp_path / "f" / "report.html", "x")


def test_one_place_makes_pages_and_one_serves_them() -> None:
    """All pages carry the policy that forbids scripts and requests; only searches talk to a browser."""
    sources = {path: path.read_text(encoding="utf-8") for path in Path(kiloword.__file__).parent.rglob("*.py")}
    pages = [path.name for path, text in sources.items() if re.search("<!doctype|<html|<head>|<script", text, re.I)]
    assert pages == ["page.py"]
    assert POLICY.startswith("default-src 'none'; ")
    assert "script-src" not in POLICY
    assert "base-uri 'none'; form-action 'none'" in POLICY
    servers = "http.server|socketserver|wsgiref|websockets|aiohttp.web|webbrowser|flask|uvicorn"
    talking = {path for path, text in sources.items() if re.search(f"import ({servers})|from ({servers})", text)}
    assert {f"{path.parent.name}/{path.name}" for path in talking} <= {"search/command.py", "search/serve.py"}
