"""The toy figure of inclusion: its measures against printed formulas and numerical integration, and its page."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from research.prolip_toy import NAMED, main, measured


def printed_inc(mean_1: float, std_1: float, mean_2: float, std_2: float) -> float:
    """Eq. 3 as it is printed."""
    v1, v2 = std_1**2, std_2**2
    a, b, c = 1 / v1 + 1 / (2 * v2), 2 * mean_1 / v1 + mean_2 / v2, mean_1**2 / v1 + mean_2**2 / (2 * v2)
    return -2 * math.log(v1) - math.log(v2) - 0.5 * math.log(a) + b**2 / (4 * a) - c


@pytest.mark.parametrize("pair", [*NAMED.values(), (0.3, 0.7, -1.1, 2.0)])
def test_measures_are_those_of_the_paper(pair: tuple[float, float, float, float]) -> None:
    values = measured(*pair)
    assert values.inc == pytest.approx(printed_inc(*pair))
    assert values.h == pytest.approx(printed_inc(*pair) - printed_inc(*pair[2:], *pair[:2]), abs=1e-9)
    x = np.linspace(-30, 30, 60_001)
    p1, p2 = (np.exp(-0.5 * ((x - m) / s) ** 2) / (s * math.sqrt(2 * math.pi)) for m, s in (pair[:2], pair[2:]))
    constant = 0.5 * math.log(math.pi) - 1.5 * math.log(2 * math.pi)
    assert values.inc_exact + constant == pytest.approx(math.log(np.trapezoid(p1**2 * p2, x)))
    logs = [-0.5 * ((x - m) / s) ** 2 - math.log(s) for m, s in (pair[:2], pair[2:])]
    assert values.kl == pytest.approx(float(np.trapezoid(p1 * (logs[0] - logs[1]), x)))


def test_the_figure_shows_what_its_caption_says() -> None:
    within, reverse, apart = (measured(*pair) for pair in NAMED.values())
    assert within.h > 0 > reverse.h
    assert apart.h == 0
    assert apart.kl > max(within.kl, reverse.kl)
    assert apart.inc < min(within.inc, reverse.inc)


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path / "toy.html", ((0.0, 1.0, 1.0, 2.0),))
    html = (tmp_path / "toy.html").read_text()
    assert "pair 1" in html
    assert 'role="img"' in html
    with pytest.raises(SystemExit) as ended:
        main(tmp_path / "none.html", ((0.0, -1.0, 0.0, 1.0),))
    assert ended.value.code == 2
    assert "standard deviations above 0" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()
