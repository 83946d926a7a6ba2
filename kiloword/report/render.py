"""Blocks as a page without scripts and outside references, and as lines on a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kiloword.__version__ import __version__
from kiloword.files import write_atomic
from kiloword.report.blocks import Beside, Block, Gallery, Matrix, Page, Table, Text, plain
from kiloword.report.figure import CSS, HERE, svg
from kiloword.report.pictures import SMALL, image_data
from kiloword.terminal import command, say
from kiloword.terminal.screen import say_table

if TYPE_CHECKING:
    from jinja2 import Environment

# The browser refuses every request, so that a reference to another file shows at once.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def write_page(path: str | Path, page: Page) -> None:
    """Write a page, as `write_atomic`."""
    write_atomic(Path(path), html(page).encode())


def html(page: Page) -> str:
    """A page as an HTML document. Errors: ValueError for a table whose rows and header differ in length."""
    sections = {heading: blocks for heading, blocks in page.sections.items() if any(map(_filled, blocks))}
    return plain(environment().get_template("page.html").render(page=replace(page, sections=sections)))


def _filled(block: Block) -> bool:
    """Whether anything of a block is to be seen: a section of empty tables has no heading."""
    match block:
        case Table(rows=some) | Gallery(tiles=some) | Text(text=some):
            return len(some) > 0
        case Beside(blocks=blocks):
            return any(map(_filled, blocks))
    return True


@lru_cache
def environment(*folders: Path) -> Environment:
    """Templates of these folders and of pages ("page.html" to extend, "blocks.html" to import `show`); all is escaped.

    Characters that would turn or hide text are left as they are: use `plain` on what comes out.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FileSystemLoader([*folders, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "breakable": lambda text: Markup("_<wbr>").join(str(text).rsplit("_", 1)),  # a phone shows more columns
        "cells": _cells,
        "colours": _colours,
        "image": image_data,
        "svg": lambda plot: Markup(svg(plot)),
    }
    made.globals |= {"policy": Markup(POLICY), "style": Markup(CSS), "small": SMALL}
    return made


def _cells(table: Table) -> tuple[list[list[tuple[str, bool]]], list[bool]]:
    """Rows of cells, each with whether it is bold; and whether a column holds numbers, also as text."""
    columns = list(zip(table.header, *table.rows, strict=True))
    largest = {c: max(cell for cell in columns[c][1:] if isinstance(cell, int | float | np.number)) for c in table.best}

    def written(cell: object) -> str:
        if isinstance(cell, float | np.floating):  # counts among rates have no digits
            return f"{cell:,.0f}" if float(cell).is_integer() and abs(float(cell)) > 1 else f"{cell:.{table.digits}f}"
        return "–" if cell is None else str(cell)

    rows = [[(written(cell), c in largest and cell == largest[c]) for c, cell in enumerate(row)] for row in table.rows]
    return rows, [all(re.match(r"-?\d|–$", written(cell)) for cell in column[1:]) for column in columns]


def _colours(matrix: Matrix) -> list[list[tuple[int, float]]]:
    """Rows of cells: the count, and its share of the row."""
    shares = matrix.values / np.maximum(matrix.values.sum(1, keepdims=True), 1)
    rows = zip(matrix.values.tolist(), shares.round(2).tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def say_blocks(blocks: Sequence[Block]) -> None:
    """Print texts and tables; what is drawn is left to the page."""
    for block in blocks:
        if isinstance(block, Text):
            say(*(block.text.split("\n") if block.kind == "code" else [block.text]))
        elif isinstance(block, Table) and block.rows:
            say(*filter(None, [block.caption]))
            say_table([[cell for cell, _ in row] for row in _cells(block)[0]], *block.header)


def made_by(models: Sequence[str] = (), data: str = "") -> dict[str, Any]:
    """How a page that is made now was made, for `Page`: command, models, data, version and date."""
    return {
        "Command": command(),
        "Model" if len(models) == 1 else "Models": ", ".join(models),
        "Data": data,
        "Version": f"kiloword {__version__}",
        "Date": utc(time.time()),
    }


def utc(seconds: float) -> str:
    """Seconds since 1970 as a date and time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
