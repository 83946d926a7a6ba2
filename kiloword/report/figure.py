"""Plots by matplotlib as SVG whose colours are those of the page, light and dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiloword.report.blocks import Plot, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
CSS = (HERE / "style.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6});", CSS[: CSS.index("@media")]))
VARIABLES = {colour: name for name, colour in reversed(LIGHT.items())}
DASHES: tuple[Any, ...] = (
    "-",
    (0, (4, 2.5)),
    (0, (1, 2)),
    (0, (5, 2, 1, 2)),
    (0, (2.5, 1.5)),
    (0, (8, 2)),
)  # lines differ in grey, too
NARROW = 0.25  # least height of lines' axis, as a share of its largest value, so that 3% do not look like a cliff
WIDTHS = {"wide": (8.4, 1.3), "narrow": (4.4, 1.0)}  # inches, and inches of height for each of Plot.height


def svg(plot: Plot) -> str:
    """Both sizes of a plot, of which the page shows the one that fits: the same bytes for the same plot."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    drawn = []
    for name, (wide, scale) in WIDTHS.items():
        with matplotlib.rc_context(fname=str(HERE / "plots.mplstyle")), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of letters that no font has here; the reader's may
            figure = Figure((wide, scale * plot.height), layout="constrained")
            axes = figure.add_subplot()
            plot.draw(axes)
            _finish(figure, axes)
            for text in figure.findobj(Text):
                text.set_text(plain(text.get_text()))
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        drawn.append(_inline(file.getvalue(), name, plot.about))
    return "".join(drawn)


def _finish(figure: Figure, axes: Axes) -> None:
    """The vertical axis' name stands above it, numbers are written out, labelled series get dashes and a legend."""
    from matplotlib.colors import to_hex
    from matplotlib.ticker import AutoLocator

    axes.set_title(axes.get_ylabel() or axes.get_title("left"), loc="left", pad=8)
    axes.set_ylabel("")
    for axis in (axes.xaxis, axes.yaxis):
        _write_out(axis)
        if isinstance(locator := axis.get_major_locator(), AutoLocator):
            locator.set_params(nbins=6)
    low, high = axes.get_ylim()
    lacking = NARROW * max(abs(low), abs(high)) - (high - low)
    if axes.lines and axes.get_autoscaley_on() and axes.get_yscale() == "linear" and lacking > 0:
        axes.set_ylim(low - lacking / 2, high + lacking / 2)
    names = axes.get_legend_handles_labels()[1]
    series = [LIGHT[f"s{n}"] for n in range(len(DASHES))]
    for line in axes.lines:
        if line.get_linestyle() == "-" and line.get_label() in names and (colour := to_hex(line.get_color())) in series:
            line.set_linestyle(DASHES[series.index(colour)])
    if names and axes.get_legend() is None:
        room = figure.get_figwidth() * 72 / (5.2 * max(map(len, names)) + 40)  # labels beside each other
        figure.legend(loc="outside upper left", ncols=min(len(names), max(int(room), 1)))


def _write_out(axis: Axis) -> None:
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    named = axis.get_major_formatter()
    if isinstance(named, ScalarFormatter | LogFormatter):
        axis.set_major_formatter(lambda value, _: number(value))
    else:
        axis.set_major_formatter(lambda value, place: plain(named(value, int(place))))
    if isinstance(axis.get_minor_formatter(), LogFormatter):
        low, high = sorted(axis.get_view_interval())
        mantissas = (2, 5) if high / low < 100 else ()
        axis.set_minor_formatter(
            lambda value, _: number(value) if round(value / 10 ** math.floor(math.log10(value))) in mantissas else ""
        )


def number(value: float) -> str:
    """A number on an axis: 0.05, 12,500, 200k, 3M."""
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k"), (0.0, 1.0, ""))
    unit, letter = next((unit, letter) for least, unit, letter in units if abs(value) >= least)
    return f"{value / unit:,.8g}{letter}".replace("-", "−")


def _inline(text: str, name: str, about: str) -> str:
    """A file of matplotlib as an element of a page: no own style, no ids but those that are referred to."""
    from markupsafe import escape

    box = re.search(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text)
    assert box is not None
    text = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text[box.end() :], flags=re.DOTALL
    )
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)
    text = re.sub(r'<!--.*?-->\s*|\n\s*| transform="rotate\(-0 [^"]*"', "", text, flags=re.DOTALL)
    text = re.sub(r' (d|x|y)="[^"]*"', lambda hit: re.sub(r"(\.\d\d)\d+", r"\1", hit[0]), text)
    text = re.sub('style="[^"]*"', lambda hit: re.sub("#[0-9a-f]{6}", _variable, hit[0]), text)
    return f'<svg class="{name}" role="img" aria-label="{escape(about)}" {box[1]}>{text}'


def _variable(hit: re.Match[str]) -> str:
    return f"var(--{VARIABLES[hit[0]]})" if hit[0] in VARIABLES else hit[0]
