"""bench/growth.py: where a series stops, and the page that shows the committed rows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import growth

PAGE = Path(__file__).parents[2] / "research" / "bench.md"


def test_a_series_stops_before_what_takes_too_long() -> None:
    row: growth.Row = {"series": "order", "peak_mb": 1.0}
    quadratic = [row | {"amount": n, "work": n, "cpu_s": 1e-4 * n**2} for n in (1, 10, 100, 1000)]
    assert growth.too_much(quadratic, 2000, seconds=500, gb=1) == ""
    assert growth.too_much(quadratic, 10_000, seconds=500, gb=1) == "about 10,000 s"
    assert growth.too_much(quadratic[:1], 10_000, seconds=1, gb=1) == ""  # one point has no slope


def test_the_page_shows_the_committed_rows() -> None:
    found = growth.read(growth.ROWS)
    page = PAGE.read_text(encoding="utf-8")
    summary = growth.tables(found)[: 2 + len(growth.measured(found))]
    assert len(summary) > 10
    assert [line for line in summary if line not in page] == []
    plot = (PAGE.parent / "results" / "growth.svg").read_text(encoding="utf-8")
    assert plot == growth.svg(found)
    ElementTree.fromstring(plot)
