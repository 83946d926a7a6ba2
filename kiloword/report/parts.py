"""The plain elements of a report: numbers in words, paragraphs, key figures, tables, heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

Cell = str | float | int | None
"""Text stays text, floats get a fixed number of digits, None becomes a dash."""


def paragraph(text: str) -> str:
    """One paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def code(text: str) -> str:
    """A command or some lines of a program, as they are typed."""
    return f'<pre class="code">{escape(text)}</pre>'


def grid(parts: Sequence[str], narrow: bool = False) -> str:
    """Elements side by side where there is room, else one below the other; narrow ones three in a row."""
    return f'<div class="grid{" narrow" if narrow else ""}">{"".join(parts)}</div>'


def headline(figures: Sequence[tuple[str, str]]) -> str:
    """A few key figures in large type, each as (value, what it is)."""
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for value, name in figures)
    return f'<dl class="headline">{"".join(items)}</dl>'


def table(
    rows: Sequence[Sequence[Cell]],
    header: Sequence[str],
    *,
    caption: str = "",
    digits: int = 2,
    strong: int | None = None,
) -> str:
    """A table whose first column names the rows; columns of text stand left, of numbers (written out or not) right.

    Args: rows, each as long as header; caption stands above; digits after the point of floats;
    strong is the column in bold type.
    Errors: ValueError when a row is longer or shorter than the header.
    """
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"row {number} of the table has {len(row)} cells, its header {len(header)}: make them equal"
            )
    words = [all(_is_word(row[c]) for row in rows) for c in range(len(header))]
    classes = [_classes(word=words[c] and c > 0, strong=c == strong) for c in range(len(header))]
    head = "".join(f'<th scope="col"{k}>{_breakable(escape(h))}</th>' for h, k in zip(header, classes, strict=True))
    body = "".join(f"<tr>{_row(row, classes, digits)}</tr>" for row in rows)
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = escape(caption or "table")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table class="data">{above}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def heat_map(
    matrix: npt.ArrayLike,
    row_names: Sequence[str],
    column_names: Sequence[str],
    *,
    caption: str = "",
    row_label: str = "true",
    column_label: str = "predicted",
) -> str:
    """A confusion matrix: every number is written, its colour is its share of the row.

    Args: matrix [rows, columns], at least 0; whole numbers are counts, others get two digits.
    Errors: ValueError for another shape, negative or non-finite numbers.
    """
    values = np.asarray(matrix)
    _check_matrix(values, len(row_names), len(column_names))
    totals = values.sum(axis=1, keepdims=True)
    shares = np.divide(values, totals, out=np.zeros(values.shape), where=totals > 0)  # [rows, columns]
    whole = bool(np.issubdtype(values.dtype, np.integer))
    square = list(row_names) == list(column_names)
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in column_names)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(_heat_cell(values[r, c], shares[r, c], whole, square and r == c) for c in range(len(column_names)))
        + "</tr>"
        for r, name in enumerate(row_names)
    )
    above = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    corner = f'<td class="axis" style="--a:0">{escape(row_label)} ↓<br>{escape(column_label)} →</td>'
    label = escape(caption or f"{row_label} against {column_label}")
    return (
        f'<figure class="heat">{above}<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table>'
        f"<thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _check_matrix(values: npt.NDArray[Any], rows: int, columns: int) -> None:
    if values.shape != (rows, columns):
        raise ValueError(f"the heat map's matrix has shape {values.shape}, its names say {(rows, columns)}")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("the heat map's matrix holds negative or non-finite numbers: give counts or shares")


def _heat_cell(value: float, share: float, whole: bool, same: bool) -> str:
    names = [n for n, on in (("none", value == 0), ("same", same)) if on]
    kind = f' class="{" ".join(names)}"' if names else ""
    shown = f"{value:.0f}" if whole or value == 0 else f"{value:.2f}"
    return f'<td{kind} style="--a:{share:.2f}">{shown}</td>'


def _is_word(cell: Cell) -> bool:
    return isinstance(cell, str) and not cell[:1].isdecimal()


def _classes(*, word: bool, strong: bool) -> str:
    names = [n for n, on in (("word", word), ("strong", strong)) if on]
    return f' class="{" ".join(names)}"' if names else ""


def _row(row: Sequence[Cell], classes: Sequence[str], digits: int) -> str:
    first = f'<th scope="row"{classes[0]}>{_breakable(_shown(row[0], digits))}</th>'
    rest = (f"<td{k}>{_shown(v, digits)}</td>" for v, k in zip(row[1:], classes[1:], strict=True))
    return first + "".join(rest)


def _breakable(html: str) -> str:
    """A long metric name may break after its last underscore, so that a phone shows more columns."""
    return "_<wbr>".join(html.rsplit("_", 1))


def _shown(cell: Cell, digits: int) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float | np.floating):
        return f"{cell:.{digits}f}"
    return escape(str(cell))


def percent(share: float) -> str:
    """0.125 -> "12.5%", 0.999 -> "99.9%": what nearly all of a thousand are does not read as all."""
    return f"{round(100 * share, 1):g}%"


def duration(seconds: float) -> str:
    """95 -> "1 min 35 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
