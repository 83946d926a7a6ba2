"""Self-contained HTML reports: every element is a pure function from numbers and images to a string."""

from kiloword.report.distributions import box_plot, histogram
from kiloword.report.gallery import card, gallery, ladder, tiles
from kiloword.report.page import page, write
from kiloword.report.parts import code, grid, headline, heat_map, paragraph, table
from kiloword.report.plot import line_plot
from kiloword.report.scatter import scatter

__all__ = [
    "box_plot",
    "card",
    "code",
    "gallery",
    "grid",
    "headline",
    "heat_map",
    "histogram",
    "ladder",
    "line_plot",
    "page",
    "paragraph",
    "scatter",
    "table",
    "tiles",
    "write",
]
