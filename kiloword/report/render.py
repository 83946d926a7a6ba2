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
from kiloword.report.blocks import Beside, Block, Figures, Gallery, Matrix, Page, Table, Text, plain
from kiloword.report.figure import CSS, HERE, svg
from kiloword.report.pictures import SMALL, image_data
from kiloword.terminal import command, say

if TYPE_CHECKING:
    from jinja2 import Environment

# The browser refuses every request, so that a reference to another file shows at once.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
DASH = "–"


def write_page(path: str | Path, page: Page) -> None:
    """Write a page, as `write_atomic`."""
    write_atomic(Path(path), html(page).encode())


def html(page: Page) -> str:
    """A page as an HTML document. Errors: ValueError for blocks whose shapes do not fit."""
    sections = {heading: blocks for heading, blocks in page.sections.items() if any(map(filled, blocks))}
    return plain(environment().get_template("page.html").render(page=replace(page, sections=sections)))


def filled(block: Block) -> bool:
    """Whether anything of a block is to be seen: a section of empty tables has no heading."""
    match block:
        case Table(rows=some) | Gallery(tiles=some) | Figures(figures=some) | Text(text=some):
            return len(some) > 0
        case Beside(blocks=blocks):
            return any(map(filled, blocks))
        case _:
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
        "cells": table_cells,
        "colours": matrix_cells,
        "image": image_data,
        "svg": lambda plot: Markup(svg(plot)),
    }
    made.globals |= {"policy": Markup(POLICY), "style": Markup(CSS), "small": SMALL}
    return made


def table_cells(table: Table) -> tuple[list[list[tuple[str, bool]]], list[bool]]:
    """Rows of cells, each with whether it is bold; and whether a column holds numbers, also as text.

    Errors: ValueError when a row is longer or shorter than the header.
    """
    if wrong := [row for row in table.rows if len(row) != len(table.header)]:
        raise ValueError(f"a row of the table has {len(wrong[0])} cells, its header {len(table.header)}: {wrong[0]}")
    columns = list(zip(*table.rows, strict=True))
    bold = {
        c: max(cell for cell in columns[c] if isinstance(cell, int | float | np.number)) for c in table.best if columns
    }

    def written(cell: object) -> str:
        if isinstance(cell, float | np.floating):  # counts among rates have no digits
            return f"{cell:,.0f}" if float(cell).is_integer() and abs(float(cell)) > 1 else f"{cell:.{table.digits}f}"
        return DASH if cell is None else str(cell)

    numbers = [any(re.match(r"-?\d|–$", written(cell)) for cell in column) for column in columns]
    return [
        [(written(cell), c in bold and cell == bold[c]) for c, cell in enumerate(row)] for row in table.rows
    ], numbers


def matrix_cells(matrix: Matrix) -> list[list[tuple[str, float, bool]]]:
    """Rows of cells: what is written, the share of the row, and whether row and column have one name.

    Errors: ValueError for another shape, negative or non-finite numbers.
    """
    values, named = np.asarray(matrix.values), (len(matrix.rows), len(matrix.columns))
    if values.shape != named or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"a matrix of shape {values.shape} has {named} names: expected as many, and counts or shares.")
    shares = values / np.maximum(values.sum(axis=1, keepdims=True), np.finfo(float).tiny)  # [rows, columns]
    whole, square = np.issubdtype(values.dtype, np.integer), list(matrix.rows) == list(matrix.columns)
    texts = [[f"{value:.0f}" if whole or value == 0 else f"{value:.2f}" for value in row] for row in values.tolist()]
    return [
        [(text, round(float(shares[r, c]), 2), square and r == c) for c, text in enumerate(row)]
        for r, row in enumerate(texts)
    ]


def say_blocks(blocks: Sequence[Block]) -> None:
    """Print texts, figures and tables; what is drawn is left to the page."""
    from kiloword.terminal.screen import say_table

    for block in blocks:
        if isinstance(block, Text):
            say(*(block.text.split("\n") if block.kind == "code" else [block.text]))
        elif isinstance(block, Beside):
            say_blocks(block.blocks)
        elif isinstance(block, Figures):
            say_table(list(block.figures.items()), "", "")
        elif isinstance(block, Table) and block.rows:
            say(*([block.caption] if block.caption else []))
            say_table([[cell for cell, _ in row] for row in table_cells(block)[0]], *block.header)


def made_by(models: Sequence[str] = (), data: str = "") -> dict[str, Any]:
    """How a page that is made now was made, for `Page`: command, models by their files, data, version and date."""
    return {
        "Command": command(),
        "Model" if len(models) == 1 else "Models": ", ".join(map(_named, models)),
        "Data": data,
        "Version": f"kiloword {__version__}",
        "Date": utc(time.time()),
    }


def _named(model: str) -> str:
    """A model's folder with the time when its weights were written, and their size; other names as they are."""
    weights = Path(model) / "model.safetensors"
    if not weights.is_file():
        return model
    file = weights.stat()
    return f"{model} ({file.st_size / 1e6:,.1f} MB, written {utc(file.st_mtime)})"


def utc(seconds: float) -> str:
    """Seconds since 1970 as a date and time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def percent(share: float) -> str:
    """0.125 -> "12.5%", 0.999 -> "99.9%", so that nearly all is not shown as all."""
    return f"{round(100 * share, 1):g}%"


def duration(seconds: float) -> str:
    """95 -> "1 min 35 s", 0.4 -> "400 ms"."""
    minutes, rest = divmod(round(seconds), 60)
    if 0 < (thousandths := round(1000 * seconds)) < 1000:
        return f"{thousandths} ms"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
