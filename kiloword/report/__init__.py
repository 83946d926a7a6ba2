"""Blocks (text, tables, plots, images) as a self-contained page, or as lines on a terminal."""

from kiloword.report.blocks import (
    Beside,
    Block,
    Figures,
    Gallery,
    Matrix,
    Page,
    Pixels,
    Plot,
    Table,
    Text,
    Tile,
    distributions,
    plain,
)
from kiloword.report.pictures import image_data, thumbnail
from kiloword.report.render import html, made_by, percent, say_blocks, utc, write_page

__all__ = [
    "Beside",
    "Block",
    "Figures",
    "Gallery",
    "Matrix",
    "Page",
    "Pixels",
    "Plot",
    "Table",
    "Text",
    "Tile",
    "distributions",
    "html",
    "image_data",
    "made_by",
    "percent",
    "plain",
    "say_blocks",
    "thumbnail",
    "utc",
    "write_page",
]
