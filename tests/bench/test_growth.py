"""bench/growth.py: exponents of known costs, where a series stops, and the page that shows the committed rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import growth

PAGE = Path(__file__).parents[2] / "research" / "bench.md"


def rows(cost: Callable[[int], float]) -> list[growth.Row]:
    return [{"series": "order", "amount": n, "work": n, "cpu_s": cost(n), "peak_mb": 1.0} for n in (1, 10, 100, 1000)]


def test_an_exponent_is_the_slope_of_the_upper_half() -> None:
    assert growth.exponents(rows(lambda n: 0.5 * n**2))[0] == pytest.approx(2)
    assert growth.exponents(rows(lambda n: 0.5 * max(n, 100)))[0] == pytest.approx(1)
    assert growth.exponent([(1, 1.0), (2, 3.0), (1000, 3000.0)], least=0.1) == pytest.approx(np.log(1000) / np.log(500))
    assert growth.exponents(rows(lambda n: 1e-7 * n)) == (None, None)  # shorter and smaller than what is told apart
    assert growth.judged(1.3, 1) == "**1.30**"
    assert growth.judged(1.05, 1) == "1.05"


def test_a_series_stops_before_what_takes_too_long() -> None:
    quadratic = rows(lambda n: 1e-4 * n**2)
    assert growth.too_much(quadratic, 2000, seconds=500, gb=1) == ""
    assert growth.too_much(quadratic, 10_000, seconds=500, gb=1) == "about 10,000 s"
    assert growth.too_much(quadratic[:1], 10_000, seconds=1, gb=1) == ""  # one point has no slope


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_what_a_point_takes_beyond_the_least(tmp_path: Path) -> None:
    """In a process of its own: one that has trained keeps memory that it freed, and uses it again."""
    code = """
import json, sys, growth, growth_points, numpy as np
ready = lambda n, folder: growth_points.quiet(lambda: np.ones(n << 20, np.uint8))
growth.SERIES["order"] = growth_points.Series("", "", (1, 80), 1, 1, ready)
print(json.dumps(growth.point("order", 80, growth.Path(sys.argv[1]))))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    row = json.loads(said.splitlines()[-1])
    assert 80 < row["peak_mb"] < 100
    assert 0 < row["cpu_s"] < 5


def test_the_page_shows_the_committed_rows() -> None:
    found = growth.read(growth.ROWS)
    page = PAGE.read_text(encoding="utf-8")
    summary = growth.tables(found)[: 2 + len(growth.measured(found))]
    assert len(summary) > 10
    assert [line for line in summary if line not in page] == []
    plot = (PAGE.parent / "results" / "growth.svg").read_text(encoding="utf-8")
    assert plot == growth.svg(found)
    ElementTree.fromstring(plot)
