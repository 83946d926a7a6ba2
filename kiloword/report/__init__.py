"""Blocks (text, tables, plots, images) as a self-contained page, or as lines on a terminal."""

from kiloword.report.blocks import (
    Beside,
    Block,
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
from kiloword.report.render import made_by, say_blocks, utc, write_page
