"""Self-contained HTML reports: every piece is a pure function from numbers and pictures to a string."""

from kiloword.report.gallery import card, gallery
from kiloword.report.histogram import histogram
from kiloword.report.ladder import ladder
from kiloword.report.page import page, write
from kiloword.report.parts import code, grid, headline, heat_map, paragraph, table
from kiloword.report.plot import line_plot

__all__ = [
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
    "table",
    "write",
]
