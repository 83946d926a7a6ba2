"""Expected curves of a recipe from its finished runs: the file that `kiloword watch --expected NAME` reads, and a plot.

`python tools/curves.py NAME FOLDER`: FOLDER holds runs of the recipe that differ in their seed alone; writes
kiloword/runs/expectations/NAME.json and docs/results/expected-NAME.svg.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from kiloword.files import write_atomic
from kiloword.report.axes import linear_axis, number
from kiloword.runs.expected import FOLDER, Band, Expected, as_json, read

PLOTS = Path(__file__).parents[1] / "docs" / "results"
WIDTH, HEIGHT, LEFT, FOOT, TOP = 380, 240, 52, 40, 30  # of one plot
STYLE = "font:13px system-ui,sans-serif;background:#fff"


def svg(expected: Expected) -> str:
    """The bands of the metrics side by side, an SVG that stands alone."""
    plots = [_plot(n * WIDTH, metric, band) for n, (metric, band) in enumerate(expected.bands.items())]
    words = f"{expected.name}: bands of {', '.join(expected.bands)} over {expected.runs} runs"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(plots)} {HEIGHT}" role="img" '
        f'aria-label="{escape(words)}" style="{STYLE}">{"".join(plots)}</svg>\n'
    )


def _plot(left: int, metric: str, band: Band) -> str:
    across, up = linear_axis([0.0, *band.ends]), linear_axis([*band.low, *band.high])

    def x(step: float) -> float:
        return round(left + LEFT + (WIDTH - LEFT - 20) * across.place(step), 1)

    def y(value: float) -> float:
        return round(HEIGHT - FOOT - (HEIGHT - FOOT - TOP) * up.place(value), 1)

    def line(values: Sequence[float]) -> list[str]:
        return [f"{x(step)} {y(value)}" for step, value in zip(band.ends, values, strict=True)]

    area = " ".join([*line(band.low), *reversed(line(band.high))])
    middle = " ".join(line([(low + high) / 2 for low, high in zip(band.low, band.high, strict=True)]))
    rows = "".join(
        f'<path d="M{left + LEFT} {y(tick)}H{left + WIDTH - 20}" stroke="#8884"/>'
        f'<text x="{left + LEFT - 6}" y="{y(tick) + 4}" text-anchor="end" fill="#666">{number(tick)}</text>'
        for tick in up.ticks
    )
    columns = "".join(
        f'<text x="{x(tick)}" y="{HEIGHT - FOOT + 18}" text-anchor="middle" fill="#666">{number(tick)}</text>'
        for tick in across.ticks
    )
    return (
        f'<text x="{left + LEFT}" y="18" fill="#222">{escape(metric.removeprefix("val/"))}</text>{rows}{columns}'
        f'<text x="{left + (LEFT + WIDTH) // 2}" y="{HEIGHT - 4}" text-anchor="middle" fill="#666">step</text>'
        f'<polygon points="{area}" fill="#2a6fb055"/><polyline points="{middle}" fill="none" stroke="#2a6fb0" '
        'stroke-width="2"/>'
    )


def main(name: str, folder: str) -> None:
    """Write both files. Raises: ValueError where the runs are not those of one recipe."""
    expected = replace(read(folder), name=name)
    FOLDER.mkdir(exist_ok=True)
    write_atomic(FOLDER / f"{name}.json", as_json(expected).encode())
    write_atomic(PLOTS / f"expected-{name}.svg", svg(expected).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
