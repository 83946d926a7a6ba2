"""Figures of reports, piece by piece: what is drawn stands where its numbers are, and is said in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageFont

from kiloword import report
from kiloword.report import overlay as drawing
from kiloword.report.axes import linear_axis, log_axis, number, value_axis
from kiloword.report.overlay import (
    GAP,
    GLOW,
    HIGH,
    INK,
    MARGIN,
    PAPER,
    STRIPES,
    Row,
    TokenMap,
    covered,
    figure,
    overlay,
    wrap,
)
from kiloword.report.page import Html, duration
from kiloword.report.plots import Dots, bins


def label(html: str) -> str:
    """What a reader that hears the page is told of a plot."""
    (said,) = re.findall(r'role="img" aria-label="([^"]*)"', html)
    return str(said)


NAN = float("nan")
SPOKEN: list[tuple[str, str]] = [
    (
        report.line_plot({"a": [(0, NAN), (1, 2.0), (2, 3.5), (3, NAN)], "none": [(0, NAN)]}, "step", "loss"),
        "loss over step: a from 2 to 3.5",
    ),
    (
        report.histogram({"a": [1, 5, 2], "b": [3, 0, 1]}, [0, 1, 2, 4], "length", "%"),
        "% by length: a highest from 1 to 2; b highest from 0 to 1",
    ),
    (
        report.scatter({"a": Dots([(0, 1), (1, 2)], [(3, 3)]), "b": [(1, 1)]}, "up", "down"),
        "down against up: a 3 points; b 1 points",
    ),
    (report.box_plot({"low": [1, 2, 3, 4, 5], "high": [2, 3, 4.5, 6, 7]}, "group", "value"),
     "value by group: low median 3; high median 4.5"),
]  # fmt: skip


@pytest.mark.parametrize(("html", "said"), SPOKEN)
def test_plots_are_described_in_words(html: str, said: str) -> None:
    assert label(html) == said


@pytest.mark.parametrize(
    ("value", "low", "high"), [(4.0, 2.0, 6.0), (-4.0, -6.0, -2.0), (0.0, -0.5, 0.5), (0.2, 0.1, 0.3)]
)
def test_an_axis_of_one_value_has_it_in_the_middle(value: float, low: float, high: float) -> None:
    axis = linear_axis([value, value], widen=False)
    assert (axis.low, axis.high) == pytest.approx((low, high))
    assert axis.place(value) == pytest.approx(0.5)


AXES: list[tuple[Callable[[], object], tuple[float, ...]]] = [
    (lambda: linear_axis([0, 10]).ticks, (0, 2, 4, 6, 8, 10)),
    (lambda: linear_axis([1, 9]).ticks, (0, 2, 4, 6, 8, 10)),
    (lambda: linear_axis([1, 9], widen=False).ticks, (2, 4, 6, 8)),
    (lambda: linear_axis([0, 1]).ticks, (0, 0.2, 0.4, 0.6, 0.8, 1)),
    (lambda: linear_axis([0, 3], widen=False, whole=True).ticks, (0, 1, 2, 3)),
    (lambda: linear_axis([0, 25]).ticks, (0, 5, 10, 15, 20, 25)),
    (lambda: log_axis([1, 1000]).ticks, (1, 10, 100, 1000)),
    (lambda: log_axis([1.5, 60]).ticks, (2, 5, 10, 20, 50)),
    (lambda: log_axis([1, 1.5]).ticks, (1, 1.1, 1.2, 1.3, 1.4, 1.5)),
    (lambda: (log_axis([6, 6]).low, log_axis([6, 6]).high), (4, 9)),
    (lambda: bins([0, 9.5], most=10), tuple(range(11))),
    (lambda: bins([1.0, 1.0], most=2), (1, 1.1)),
    (lambda: bins([0.0, 0.0], most=4), (0, 0.1)),
    (lambda: bins([-3, 12], most=4), (-5, 0, 5, 10, 15)),
]


@pytest.mark.parametrize(("made", "values"), AXES)
def test_ticks_and_bins(made: Callable[[], tuple[float, ...]], values: tuple[float, ...]) -> None:
    assert list(made()) == pytest.approx(list(values))


def test_ticks_are_written_where_they_are() -> None:
    html = report.line_plot({"a": [(0, 0.0), (2000, 1.0)]}, "x", "y")
    across = re.findall(r'<text x="([\d.]+)%" y="100%" dy="1.6em" text-anchor="middle">([^<]+)</text>', html)
    assert across == [("0.0", "0"), ("25.0", "500"), ("50.0", "1,000"), ("75.0", "1,500"), ("100.0", "2,000")]
    rules = re.findall(r'<line class="rule" x1="0" x2="100%" y1="([\d.]+)%" y2="([\d.]+)%"/><text [^>]*y="([\d.]+)%"[^>]*>([^<]+)<', html)  # fmt: skip # noqa: E501
    assert [(at, said) for at, _, _, said in rules] == [
        ("100.0", "0"), ("80.0", "0.2"), ("60.0", "0.4"), ("40.0", "0.6"), ("20.0", "0.8"), ("0.0", "1"),
    ]  # fmt: skip
    assert all(at == below == beside for at, below, beside, _ in rules)
    assert [number(v) for v in (999.5, 1000, -1234.4, 1e-7)] == ["999.5", "1,000", "-1,234", "1e-07"]


def test_many_even_bins_have_few_numbers() -> None:
    """At most nine numbers, the first at the left end, at equal distances."""
    for count, shown in ((8, 9), (9, 5), (16, 9), (17, 6)):
        html = report.histogram({"a": [1.0] * count}, [float(2**n) for n in range(count + 1)], "x", "y", even=True)
        ends = re.findall(r'<text x="([\d.]+)%" y="100%" dy="1.6em" text-anchor="middle">([^<]+)</text>', html)
        step = -(-count // 8)
        assert len(ends) == shown
        assert [float(at) for at, _ in ends] == pytest.approx([100 * n * step / count for n in range(shown)], abs=0.01)
        assert [said for _, said in ends] == [number(2.0 ** (n * step)) for n in range(shown)]


def test_smooth_lines_skip_what_is_not_finite() -> None:
    html = report.line_plot({"a": [(0, 0.0), (1, NAN), (2, 6.0), (3, 6.0), (4, 0.0)]}, "x", "y", smooth=3)
    raw, mean = re.findall(r'<path class="(?:line raw|line)" style="[^"]*" d="([^"]*)"', html)
    assert raw == "M500.0 0.0L750.0 0.0L1000.0 1000.0"
    assert mean == "M500.0 0.0L750.0 333.3L1000.0 500.0"
    assert re.findall(r'class="([^"]*)" style="[^"]*" d="M0.0 1000.0h0"', html) == ["line raw dot", "line dot"]
    assert re.findall(r"stroke:var\(--s0\);stroke-dasharray:none", html) == ["stroke:var(--s0);stroke-dasharray:none"] * 2  # fmt: skip # noqa: E501


def test_dots_squares_rings_and_lines_of_a_scatter_plot() -> None:
    turns = [2 * math.pi * n / 48 for n in range(48)]
    ring = [(5 + 5 * math.cos(t), 5 + 5 * math.sin(t)) for t in turns]
    html = report.scatter({"a": Dots([(0, 0), (10, 10)], [(5, 0)], [ring]), "b": [(0, 10)]}, "x", "y", joined=True)
    assert 'class="line" style="stroke:var(--s0)" d="M0.0 1000.0L1000.0 0.0"' in html
    assert 'class="dot" style="stroke:var(--s0)" d="M0.0 1000.0h0M1000.0 0.0h0"' in html
    assert 'class="dot square" style="stroke:var(--s0)" d="M500.0 1000.0h0"' in html
    (outline,) = re.findall(r'class="ring" style="stroke:var\(--s0\);fill:var\(--s0\)" d="M([^Z]+)Z"', html)
    corners = np.array([[float(v) for v in point.split()] for point in outline.split("L")])
    assert len(corners) == 48
    assert np.hypot(*(corners - 500).T) == pytest.approx(500, abs=0.2)
    assert html.count("dot faint") == 0
    alone = report.scatter({"a": Dots([], [(5, 0)]), "b": [(0, 10)]}, "x", "y")
    assert re.findall(r'class="([^"]+)" d="M14 5h0"', alone) == ["dot square", "dot"], "the legend has the same shapes"
    assert report.scatter({"a": [(0, 0), (1, 1)]}, "x", "y", faint=True).count('class="dot faint"') == 1


def test_a_title_needs_no_table_of_contents_until_there_are_three_headings() -> None:
    two, three = (report.page("t", " one \n\n\n\ntwo", [report.section("h", "x")] * n) for n in (2, 3))
    assert ("<nav" in two, "<nav" in three) == (False, True)
    assert "</h1><p>one</p><p>two</p>" in two


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (0.4, "400 ms"), (0.9996, "1 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (95, "1 min 35 s")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("height", "width", "small"), [(95, 40, True), (96, 40, False), (40, 96, False), (40, 95, True)]
)
def test_small_images_keep_hard_edges(height: int, width: int, small: bool) -> None:
    """In galleries, tiles, cards and ladders; each says how large its image is."""
    image = np.zeros((height, width, 3), np.uint8)
    pieces = (
        report.gallery([("a", [(image, 0.5, None)])]),
        report.tiles([(image, "a")], columns=4),
        report.card([(image, "a")], []),
        report.ladder(image, "a", []),
    )
    for html in pieces:
        (attributes,) = re.findall("<img([^>]*)>", html)
        assert ('class="small"' in attributes) == small
        assert f'width="{width}" height="{height}"' in attributes
    assert 'style="--n:4"' in pieces[1]
    assert 'style="--n:6"' in report.tiles([(image, "a")])
    assert [f"--n:{n}" in report.gallery([("a", [(image, 0.5, None)] * n)]) for n in (1, 3)] == [True, True]


def test_ladders_tick_what_is_right() -> None:
    html = report.ladder(
        np.zeros((2, 2, 3), np.uint8), "n", [("one", [("a", True), ("b", False)]), ("two", [("c", None)])]
    )
    assert "<h3>one</h3><ol><li><b>✓</b> a</li><li>b</li></ol></div><div><h3>two</h3><ol><li>c</li></ol></div>" in html


def test_shares_of_a_heat_map_that_are_not_whole() -> None:
    html = report.heat_map(np.array([[0.5, 1.5], [0.0, 2.0]]), ["a", "b"], ["b", "a"])
    cells = re.findall(r'<td(?: class="([a-z ]+)")? style="--a:([\d.]+)">([\d.]+)</td>', html)
    assert cells == [("", "0.25", "0.50"), ("", "0.75", "1.50"), ("none", "0.00", "0"), ("", "1.00", "2.00")]


def test_glow_is_a_share_between_the_mean_and_the_largest_value() -> None:
    """Literally, for a map as large as the image, where nothing is resized."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for looks in (rng.random((8, 8)) ** 8, rng.random((8, 8)), rng.normal(size=(8, 8))):
        clipped = looks.astype(np.float32).clip(0)
        even, full = clipped.mean(), max(clipped.max(), 4 * clipped.mean())
        glow = ((clipped - even) / (full - even)).clip(0, 1)[..., None]
        grey = 0.55 * image.mean(-1, keepdims=True) + 70
        lit = 0.35 * image + 0.65 * GLOW
        expected = ((1 - glow) * grey + glow * lit).round().clip(0, 255)
        assert np.abs(np.asarray(overlay(image, looks, 8)).astype(float) - expected).max() <= 1


def test_a_figure_has_its_parts_side_by_side() -> None:
    image = np.full((32, 32, 3), 90, np.uint8)
    looks, weights = np.eye(4), np.array([[0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.0, 0.25]])
    tokens = [TokenMap("class", 0.5, looks), TokenMap("3", 0.25, looks.T[::-1])]
    shown = figure(image, "title", "about", [Row("a", "n", looks, tokens, weights), Row("b", "n", looks)])
    step = drawing.SMALL + GAP
    assert shown.size == (2 * MARGIN + drawing.CAPTION + drawing.SIDE + 2 * GAP + 2 * step + drawing.WEIGHTS,
                          2 * MARGIN + drawing.HEAD + 2 * (drawing.SIDE + 2 * GAP))  # fmt: skip
    x, y = MARGIN + drawing.CAPTION + GAP, MARGIN + drawing.HEAD + GAP
    for at, part in (
        ((MARGIN, MARGIN), drawing.square(image, 130)),
        ((x, y), overlay(image, looks, drawing.SIDE)),
        ((x, y + drawing.SIDE + 2 * GAP), overlay(image, looks, drawing.SIDE)),
        *(((x + drawing.SIDE + GAP + n * step, y), overlay(image, t.map, drawing.SMALL)) for n, t in enumerate(tokens)),
    ):
        cut = shown.crop((*at, at[0] + part.width, at[1] + part.height))
        assert np.array_equal(np.asarray(cut), np.asarray(part)), at
    left, pixels = x + drawing.SIDE + GAP + 2 * step, np.asarray(shown)
    bottom, wide = y + 20 + HIGH, drawing.WEIGHTS // 4
    heights = [(pixels[y + 18 : bottom + 1, left + n * wide + 9] == drawing.BAR).all(-1).sum() for n in range(4)]
    assert [round(float(h) - 1) for h in heights] == [HIGH, HIGH // 2, HIGH // 4, HIGH // 4]
    for m, head in enumerate(weights):
        for n, weight in enumerate(head):
            shade = [round(p + (b - p) * weight) for p, b in zip(PAPER, drawing.BAR, strict=True)]
            assert pixels[bottom + 22 + 12 * m + 5, left + n * wide + 20].tolist() == shade, (m, n)
    assert figure(image, "t", "a", [Row("a", "n", looks)]).width == 640
    assert figure(image, "t", "a", []).height == 2 * MARGIN + drawing.HEAD


def test_lines_of_a_text_in_an_image() -> None:
    sheet, font = Image.new("RGB", (300, 200), PAPER), ImageFont.load_default(20)
    assert drawing.write_lines(sheet, (10, 40), "one two three", 70, 20, INK, 5) == 40 + 27 * len(wrap("one two three", font, 70, 5))  # fmt: skip # noqa: E501
    drawn = np.argwhere((np.asarray(sheet) != PAPER).any(-1))
    assert drawn[:, 0].min() >= 40
    assert 10 <= drawn[:, 1].min() <= drawn[:, 1].max() <= 80
    fits = font.getlength("one two")
    assert wrap("one two three", font, round(fits + 0.5), 9) == ["one two", "three"]
    assert wrap("one two three", font, int(fits - 1), 9) == ["one", "two", "three"]
    assert drawing._shortened("one...", font, int(font.getlength("on..."))) == "on..."
    assert wrap("a " * 400, font, 10**6, 1) == [("a " * 300).strip()]
    assert wrap("one two three", font, 45, 2)[-1].endswith("...")


def test_stripes_cover_hidden_patches_in_equal_widths() -> None:
    image = np.full((96, 64, 3), 7, np.uint8)
    out = covered(image, np.array([[True, False], [False, True], [False, False]]))
    hidden = np.kron(np.array([[1, 0], [0, 1], [0, 0]]), np.ones((32, 32))).astype(bool)
    assert (out[~hidden] == 7).all()
    expected = [[STRIPES[1 - (y + x) // 3 % 2] for x in range(64)] for y in range(96)]
    assert (out[..., 0][hidden] == np.array(expected)[hidden]).all()


def test_pieces_without_options_are_plain() -> None:
    """Wide grids, two digits, a line without smoothing or logarithms, ticks between whole numbers, sixty bins."""
    assert report.grid([Html("a"), "b", ""]) == '<div class="grid">a<p>b</p></div>'
    assert report.grid([Html("a")], narrow=True) == '<div class="grid narrow">a</div>'
    assert "<td>0.12</td><td>3</td>" in report.table([["a", 0.1234, 3]], ["", "b", "c"])
    assert "strong" not in report.table([["a", 0.1234]], ["", "b"])
    points = [(1.0, 1.0), (2.0, 3.0), (3.0, 1.0)]
    plain = report.line_plot({"a": points}, "x", "y")
    assert (
        plain
        == report.line_plot({"a": points}, "x", "y", log_y=False, log_x=False, whole_x=False, smooth=0)
        == report.line_plot({"a": points}, "x", "y", smooth=1)
    )
    assert plain.count('class="line"') == 1
    assert ">1.5</text>" in plain
    assert ">1.5</text>" not in report.line_plot({"a": points}, "x", "z", whole_x=True).partition('y="100%"')[2]
    dots = report.scatter({"a": points}, "x", "y")
    assert dots == report.scatter({"a": points}, "x", "y", log_x=False, faint=False, joined=False)
    assert 'class="line"' not in dots
    assert dots != report.scatter({"a": points}, "x", "y", log_x=True)
    assert (len(bins([0, 59.5])), len(bins([0, 60.5]))) == (61, 32)
    assert "true ↓<br>predicted →" in report.heat_map([[1]], ["a"], ["b"])


def test_text_is_a_paragraph_and_empty_sections_are_omitted() -> None:
    assert report.stack("a < b", None, "", report.code("c"), Html("<i>d</i>")) == (
        '<p>a &lt; b</p><pre class="code">c</pre><i>d</i>'
    )
    html = report.page("t", "", [report.section("one", "x"), report.section("two", None, ""), report.section("three")])
    assert (html.count("<section"), html.count("two"), html.count("three")) == (1, 0, 0)
    assert report.table([], ["a", "b"]) == report.grid([None, ""]) == ""


def test_bold_is_the_largest_not_ours() -> None:
    rows = [["R@1", 0.5, 0.7, 0.1], ["R@5", 0.9, 0.8, 0.2], ["R@10", 1.0, 1.0, None]]
    html = report.table(rows, ["", "ours", "theirs", "chance"], best_of_row=(1, 2, 3))
    assert re.findall(r'strong">([^<]*)', html) == ["0.70", "0.90", "1.00", "1.00"][:2]  # a tie of all is nobody's
    html = report.table(rows, ["", "ours", "theirs", "chance"], best_of_column=(1, 3))
    assert re.findall(r'strong">([^<]*)', html) == ["0.20", "1.00"]
    assert "strong" not in report.table(rows[:1], ["", "ours", "theirs", "chance"], best_of_column=(1, 2))


def test_small_groups_are_dots_and_boxes_tell_their_number() -> None:
    boxes = {"two": [1.0, 1.0, 1.5, 2.0, 2.0], "many": [1.0, 2.0, 3.0, 4.0, 5.0], "some": [1.0, 2.0, 3.0, 4.0, 5.0]}
    counts = {"two": 2, "many": 1600, "some": 400}
    html = report.box_plot(boxes, "group", "value", counts=counts, few={"two": [1.0, 2.0]})
    assert html.count('class="line step"') == 2
    assert len(re.findall(r"h0", html.split('class="dot"')[1].split("/>")[0])) == 2
    assert all(f">n {count}<" in html for count in ("2", "1,600", "400"))
    left, right = (
        [float(x) for x in re.findall(r'class="line step"[^>]*d="M([\d.]+) [\d.]+H([\d.]+)', html)[n]] for n in (0, 1)
    )
    assert left[1] - left[0] == pytest.approx(2 * (right[1] - right[0]), rel=1e-2)  # the root of four times as many


def test_small_differences_look_small() -> None:
    axis = value_axis([0.97, 1.0])
    assert axis.high <= 1.0
    assert axis.high - axis.low >= 0.25
    wide = value_axis([1.0, 10.0])
    assert (wide.low, wide.high) == (linear_axis([1.0, 10.0]).low, linear_axis([1.0, 10.0]).high)
    assert value_axis([0.0, 0.01]).high == pytest.approx(0.01)


def test_plots_that_share_ends_share_axes() -> None:
    ends = ((0.0, 100.0), (0.0, 10.0))
    a = report.line_plot({"a": [(0, 1), (50, 2)]}, "step", "loss", ends=ends)
    b = report.line_plot({"b": [(90, 9), (100, 10)]}, "step", "loss", ends=ends)
    assert (
        a.split("<svg viewBox")[0].split("overflow")[0].partition("aria-label")[2].partition(">")[2]
        == (b.split("<svg viewBox")[0].split("overflow")[0].partition("aria-label")[2].partition(">")[2])
    )


def test_a_signed_page_says_how_it_was_made() -> None:
    html = report.signed(report.page("t", "i", []), {"Command": "kiloword <b>\u202e", "Model": "", "Version": "1"})
    footer = html.split("<footer")[1]
    assert "<dt>Command</dt><dd>kiloword &lt;b&gt;\\u202e</dd><dt>Version</dt><dd>1</dd>" in footer
    assert "Model" not in footer
    assert report.signed("x", {"a": ""}) == "x"


def test_tables_of_metrics_omit_what_no_model_has() -> None:
    results = {"a": {"acc": 0.12345, "n": 7.0, "gap": -0.5}, "b": {"acc": 1.0}}
    names = {"acc": "accuracy", "other": "another", "gap": "difference", "n": "images"}
    html = report.metric_table(results, names, whole=["n"], first="metric")
    assert html == report.table(
        [["accuracy", "0.123", "1.000"], ["difference", "-0.500", None], ["images", "7", None]], ["metric", "a", "b"]
    )
    assert "word" not in html  # negative numbers stand right, as others
    assert report.metric_table(results, names, form=".1f", by_model=True, best=["acc"]) == report.table(
        [["a", "0.1", "-0.5", "7.0"], ["b", "1.0", None, None]],
        ["", "accuracy", "difference", "images"],
        best_of_column=[1],
    )
    assert report.metric_table(results, {"other": "another"}) == ""


def test_distributions_are_histograms_of_values() -> None:
    values = {"a": [0.5, 0.5, 1.5, 3.0], "none": np.zeros(0), "b": np.array([2.5])}
    edges = [0.0, 1.0, 2.0, 3.0]
    counts = {"a": [2, 1, 1], "b": [0, 0, 1]}
    shares = {"a": [50, 25, 25], "b": [0, 0, 100]}
    assert report.distribution(values, "x", "y", edges=edges) == report.histogram(counts, edges, "x", "y")
    assert report.distribution(values, "x", "y", edges=edges, total=100) == report.histogram(shares, edges, "x", "y")
    whole = report.histogram({"a": [2, 1, 0, 1], "b": [0, 0, 1, 0]}, [0, 1, 2, 3, 4], "x", "y")
    assert report.distribution(values, "x", "y", most=4) == whole
    assert report.distribution({"none": []}, "x", "y") == ""
