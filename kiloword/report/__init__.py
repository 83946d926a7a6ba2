"""Blocks (text, tables, plots, images) as a self-contained page, or as lines on a terminal."""

from kiloword.report.blocks import (
    Beside as Beside,
    Block as Block,
    Gallery as Gallery,
    Matrix as Matrix,
    Page as Page,
    Pixels as Pixels,
    Plot as Plot,
    Table as Table,
    Text as Text,
    Tile as Tile,
    distributions as distributions,
    plain as plain,
)
from kiloword.report.pictures import image_data as image_data, thumbnail as thumbnail
from kiloword.report.render import made_by as made_by, say_blocks as say_blocks, utc as utc, write_page as write_page
