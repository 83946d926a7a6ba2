"""Plots by matplotlib as SVG whose colours are those of the page, light and dark."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiloword.report.blocks import Plot, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
CSS = (HERE / "style.css").read_text("utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6});", CSS[: CSS.index("@media")]))
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
    """The vertical axis' name stands above it, ticks are few and written out, labelled series get a legend."""
    from matplotlib.ticker import AutoLocator, LogFormatter

    class Few(LogFormatter):
        def __call__(self, x: float, pos: Any = None) -> str:
            return f"{x:,.8g}" if super().__call__(x, pos) else ""

    axes.set_title(axes.get_ylabel() or axes.get_title("left"), loc="left", pad=8)
    axes.set_ylabel("")
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(locator := axis.get_major_locator(), AutoLocator):
            locator.set_params(nbins=6)
        if axis.get_scale() == "log":  # without superscripts, and between powers of ten where these are few
            axis.set_major_formatter(lambda value, _: f"{value:,.8g}")
            axis.set_minor_formatter(Few(minor_thresholds=(2, 0.5)))
    low, high = axes.get_ylim()
    lacking = NARROW * max(abs(low), abs(high)) - (high - low)
    if axes.lines and axes.get_autoscaley_on() and axes.get_yscale() == "linear" and lacking > 0:
        axes.set_ylim(low - lacking / 2, high + lacking / 2)
    names = axes.get_legend_handles_labels()[1]
    if names and axes.get_legend() is None:
        room = figure.get_figwidth() * 72 / (5.2 * max(map(len, names)) + 40)  # labels beside each other
        figure.legend(loc="outside upper left", ncols=min(len(names), max(int(room), 1)))


def _inline(text: str, name: str, about: str) -> str:
    """A file of matplotlib as an element of a page: no own style, no ids but those that are referred to."""
    from markupsafe import escape

    variables = {colour: f"var(--{variable})" for variable, colour in reversed(LIGHT.items())}
    _, box, body = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
    unused = r'<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|(?<=<g) id="[^"]*"|<!--.*?-->\s*|\n\s*'
    body = re.sub(unused, "", body, flags=re.DOTALL)
    body = re.sub(r' (d|x|y)="[^"]*"', lambda hit: re.sub(r"(\.\d\d)\d+", r"\1", hit[0]), body)
    colours = "|".join(variables)
    body = re.sub('style="[^"]*"', lambda style: re.sub(colours, lambda colour: variables[colour[0]], style[0]), body)
    return f'<svg class="{name}" role="img" aria-label="{escape(about)}" {box}>{body}'
