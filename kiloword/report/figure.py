"""Plots by matplotlib as SVG whose colours are those of the page, light and dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

from kiloword.report.blocks import Plot, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = {  # on light and on dark backgrounds; matplotlib draws with the light ones, which become var(--NAME)
    "paper": ("#fbfaf7", "#141619"),
    "ink": ("#1c1e20", "#e8e6e1"),
    "muted": ("#5b6066", "#a2a7ad"),
    "rule": ("#dedad1", "#31353a"),
    "match": ("#17663a", "#6fca95"),
    "heat": ("#5d9cce", "#2c6ba3"),
    "s0": ("#1a5583", "#82b8e2"),
    "s1": ("#b4501c", "#ee9a68"),
    "s2": ("#17663a", "#6fca95"),
    "s3": ("#7a3b83", "#cf9ad8"),
    "s4": ("#8a6a00", "#d9b84a"),
    "s5": ("#5b6066", "#a2a7ad"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
VARIABLES = {light: name for name, light in reversed(LIGHT.items())}
DASHES = ("-", (0, (4, 2.5)), (0, (1, 2)), (0, (5, 2, 1, 2)), (0, (2.5, 1.5)), (0, (8, 2)))  # lines differ in grey, too
WIDTHS = {"wide": (8.4, 1.3), "narrow": (4.4, 1.0)}  # inches, and inches of height for each of Plot.height


def style() -> dict[Any, Any]:
    """Settings of matplotlib for every figure of ours."""
    from cycler import cycler

    cycle = cycler(color=[LIGHT[f"s{n}"] for n in range(6)]) + cycler(linestyle=DASHES)
    ink, muted, rule = (LIGHT[name] for name in ("ink", "muted", "rule"))
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "kiloword",
        "text.parse_math": False,
        "text.color": ink,
        "font.family": "DejaVu Sans",  # for measuring; the page's own font is narrower
        "font.size": 9.5,
        "axes.prop_cycle": cycle,
        "axes.facecolor": "none",
        "axes.edgecolor": LIGHT["muted"],
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.labelcolor": ink,
        "axes.labelsize": 9.5,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "xaxis.labellocation": "right",
        "axes.xmargin": 0.02,
        "grid.color": rule,
        "grid.linewidth": 0.7,
        "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"],
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "xtick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "lines.solid_capstyle": "round",
        "patch.linewidth": 1.2,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "legend.handlelength": 2.2,
    }


def svg(plot: Plot) -> str:
    """Both sizes of a plot, of which the page shows the one that fits: the same bytes for the same plot."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    drawn = []
    for name, (wide, scale) in WIDTHS.items():
        with matplotlib.rc_context(style()), warnings.catch_warnings():  # such as of letters that no font has here
            warnings.simplefilter("ignore")
            figure = Figure((wide, scale * plot.height), layout="constrained")
            axes = figure.add_subplot()
            plot.draw(axes)
            finish(figure, axes)
            for text in figure.findobj(Text):
                text.set_text(plain(text.get_text()))
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        drawn.append(_inline(file.getvalue(), name, plot.about))
    return "".join(drawn)


def finish(figure: Figure, axes: Axes) -> None:
    """The vertical axis' name stands above it, numbers are written out, and labelled series get a legend."""
    axes.set_title(axes.get_ylabel() or axes.get_title("left"), loc="left", pad=8)
    axes.set_ylabel("")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_labels(axis)
    names = axes.get_legend_handles_labels()[1]
    if names and axes.get_legend() is None:
        room = figure.get_figwidth() * 72 / (5.2 * max(map(len, names)) + 40)  # labels beside each other
        figure.legend(loc="outside upper left", ncols=min(len(names), max(int(room), 1)))


def _plain_labels(axis: Axis) -> None:
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
    """A number on an axis: 12,500, 0.05, 2e+08."""
    return f"{value:{',.8g' if abs(value) < 1e7 else '.3g'}}".replace("-", "−")


def _inline(text: str, name: str, about: str) -> str:
    """A file of matplotlib as an element of a page: no own style, no ids but those that are referred to."""
    from markupsafe import escape

    text = re.sub(r" <metadata>.*?</metadata>| <defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = text[text.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    opening = f'<svg class="{name}" role="img" aria-label="{escape(about)}" {box[0]}>'
    text = opening + text[text.index(">") + 1 :]
    text = re.sub(r'<g id="[^"]*"|<!--.*?-->\s*|\n\s*| transform="rotate\(-0 [^"]*"', _kept, text, flags=re.DOTALL)
    text = re.sub(r' (d|x|y)="[^"]*"', lambda hit: re.sub(r"(\.\d\d)\d+", r"\1", hit[0]), text)
    return re.sub('style="[^"]*"', lambda hit: re.sub("#[0-9a-f]{6}", _variable, hit[0]), text)


def _kept(hit: re.Match[str]) -> str:
    return "<g" if hit[0].startswith("<g") else ""


def _variable(hit: re.Match[str]) -> str:
    return f"var(--{VARIABLES[hit[0]]})" if hit[0] in VARIABLES else hit[0]
