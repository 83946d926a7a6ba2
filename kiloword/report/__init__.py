"""Self-contained HTML pages: each element is a pure function from numbers and images to `Html`."""

from kiloword.report.images import card, gallery, ladder, tiles
from kiloword.report.page import (
    Html,
    bullets,
    code,
    duration,
    grid,
    heading,
    headline,
    heat_map,
    metric_table,
    page,
    percent,
    section,
    stack,
    table,
    write,
)
from kiloword.report.plots import bins, box_plot, distribution, histogram, line_plot, scatter

__all__ = [
    "Html",
    "bins",
    "box_plot",
    "bullets",
    "card",
    "code",
    "distribution",
    "duration",
    "gallery",
    "grid",
    "heading",
    "headline",
    "heat_map",
    "histogram",
    "ladder",
    "line_plot",
    "metric_table",
    "page",
    "percent",
    "scatter",
    "section",
    "stack",
    "table",
    "tiles",
    "write",
]
