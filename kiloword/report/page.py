"""The renderer of all HTML pages. A page states its title and sections of text, tables and figures.

Every function from numbers or images to an element returns `Html`; any other string is plain text, which is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kiloword.files import write_atomic
from kiloword.report.blocks import plain
from kiloword.report.figure import CSS
from kiloword.report.render import POLICY, duration, made_by, percent

__all__ = ["POLICY", "duration", "made_by", "percent"]

SERIES = 6  # colours of lines; each has its own dash as well


class Html(str):
    """Finished HTML."""


def stack(*elements: str | None) -> Html:
    """Elements one below the other; plain text becomes a paragraph, None and "" nothing."""
    return Html("".join(one if isinstance(one, Html) else f"<p>{escape(one)}</p>" for one in elements if one))


Section = tuple[str, Html]
"""A heading in plain text, and what stands below it."""


def section(heading: str, *elements: str | None) -> Section:
    """A section of elements one below the other, as `stack` takes them."""
    return heading, stack(*elements)


def page(
    title: str, intro: str, sections: Iterable[Section], *, below: str = "", style: str = "", policy: str = POLICY
) -> str:
    """A whole HTML document without any outside reference.

    Args: title and intro are plain text, a blank line in intro starts a new paragraph; empty sections are omitted;
    below: an element after the intro; style: rules after those of all pages; policy: what the browser may load.
    Characters that would turn or hide text of the page are written as escapes such as \\u202e.
    """
    filled = [(heading, html) for heading, html in sections if html]
    placed = [(f"s{i}", escape(heading), html) for i, (heading, html) in enumerate(filled, start=1)]
    opening = stack(*(part.strip() for part in intro.split("\n\n")), below)
    links = "".join(f'<li><a href="#{place}">{heading}</a></li>' for place, heading, _ in placed)
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(placed) > 2 else ""
    body = "".join(
        f'<section aria-labelledby="{place}"><h2 id="{place}">{heading}</h2>{html}</section>'
        for place, heading, html in placed
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}{style}</style>\n</head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>{opening}{contents}</header>\n"
        f"{body}\n</main></body>\n</html>\n"
    )
    return plain(html)


def signed(html: str, facts: Mapping[str, str]) -> str:
    """A page with facts about how it was made below it, such as command, version and date; empty ones are omitted."""
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v)
    before, end, after = html.rpartition("\n</main>")
    footer = f'<footer aria-label="How this page was made"><dl>{plain(items)}</dl></footer>'
    return f"{before}\n{footer}{end}{after}" if items else html


def write(path: str | Path, html: str) -> None:
    """Write a page, as `write_atomic`."""
    write_atomic(Path(path), html.encode())


def heading(text: str) -> Html:
    """A heading within a section."""
    return Html(f'<h3 style="margin:2.5rem 0 .5rem;font-size:1.05rem">{escape(text)}</h3>')


def remark(text: str) -> Html:
    """A warning that no reader should miss."""
    return Html(f'<p class="remark" role="note"><b>Note</b> {escape(text)}</p>')


def bullets(sentences: Iterable[str]) -> Html:
    """A list of sentences."""
    items = "".join(f'<li style="margin:0 0 .6rem">{escape(sentence)}</li>' for sentence in sentences)
    return Html(f'<ul style="max-width:42rem;margin:0 0 1.5rem;padding-left:1.2rem">{items}</ul>')


def code(text: str) -> Html:
    """A command or some lines of a program, as they are typed."""
    return Html(f'<pre class="code">{escape(text)}</pre>')


def folded(summary: str, *parts: str) -> Html:
    """Parts that a click on the summary shows: what is too long for a page and too good to omit."""
    return Html(f"<details><summary>{escape(summary)}</summary>{stack(*parts)}</details>")


def grid(elements: Iterable[str], narrow: bool = False) -> Html:
    """Elements side by side where there is room, else one below the other; narrow ones three in a row."""
    html = stack(*elements)
    return Html(f'<div class="grid{" narrow" if narrow else ""}">{html}</div>') if html else html


def headline(figures: Iterable[tuple[str, str]]) -> Html:
    """A few key figures in large type, each as (value, what it is)."""
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for value, name in figures)
    return Html(f'<dl class="headline">{"".join(items)}</dl>')


def table(
    rows: Iterable[Sequence[object]],
    header: Sequence[str],
    *,
    caption: str = "",
    digits: int = 2,
    strong: int | None = None,
    best_of_column: Collection[int] = (),
    best_of_row: Collection[int] = (),
) -> Html:
    """A table whose first column names the rows; columns of text are aligned left, of numbers (also as text) right.

    Args: rows, each as long as header: text, numbers, and None for a dash; without rows there is no table;
    caption, above the table; digits after the point of floats; strong is the column in bold type;
    best_of_column: columns whose largest number is bold; best_of_row: columns of which each row's largest is.
    Errors: ValueError when a row is longer or shorter than the header.
    """
    cells = [[_shown(cell, digits) for cell in row] for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(header):
            raise ValueError(
                f"row {index} of the table has {len(row)} cells, its header {len(header)}: make them equal"
            )
    if not cells:
        return Html()
    numbers = [any(c == DASH or c.lstrip("-")[:1].isdecimal() for c in column) for column in zip(*cells, strict=True)]
    classes = [_classes(word=c > 0 and not number, strong=c == strong) for c, number in enumerate(numbers)]
    bold = _largest(cells, best_of_column) | {
        (r, c) for c, r in _largest(list(zip(*cells, strict=True)), range(len(cells)), best_of_row)
    }
    head = "".join(f'<th scope="col"{k}>{_breakable(h)}</th>' for h, k in zip(header, classes, strict=True))
    body = "".join(
        f'<tr><th scope="row"{classes[0]}>{_breakable(row[0])}</th>'
        + "".join(f"<td{STRONG if (r, c) in bold else classes[c]}>{escape(row[c])}</td>" for c in range(1, len(row)))
        + "</tr>"
        for r, row in enumerate(cells)
    )
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return _scrolled(f'<table class="data">{above}', head, body, caption or "table")


def _largest(
    lines: Sequence[Sequence[str]], columns: Collection[int], among: Collection[int] | None = None
) -> set[tuple[int, int]]:
    """Places (line, column) of the largest number of each of some columns, if its numbers differ.

    Args: among: the lines that are compared, None: all.
    """
    places = set()
    for c in columns:
        values = {
            n: v
            for n, line in enumerate(lines)
            if (among is None or n in among) and (v := _number(line[c])) is not None
        }
        if len(set(values.values())) > 1:
            places |= {(n, c) for n, v in values.items() if v == max(values.values())}
    return places


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def metric_table(
    results: Mapping[str, Mapping[str, float]],
    names: Mapping[str, str],
    *,
    form: str = ".3f",
    whole: Collection[str] = (),
    by_model: bool = False,
    first: str = "",
    best: Collection[str] = (),
) -> Html:
    """A table of metrics by their names in the JSON file, of several models; metrics that no model has are omitted.

    Args: results: model -> metric -> value; names: metric -> heading; form: of values, those of the metrics `whole`
    have no digits after the point; by_model: a row a model, otherwise a column; first: heading of the first column;
    best: metrics whose largest value is bold.
    """
    shown = [name for name in names if any(name in values for values in results.values())]

    def cell(values: Mapping[str, float], name: str) -> str | None:
        return f"{values[name]:{'.0f' if name in whole else form}}" if name in values else None

    if by_model:
        rows = [[model, *(cell(values, name) for name in shown)] for model, values in results.items()]
        bold = [place for place, name in enumerate(shown, start=1) if name in best]
        return table(rows, [first, *(names[name] for name in shown)], best_of_column=bold)
    by_metric = [[names[name], *(cell(values, name) for values in results.values())] for name in shown]
    return table(by_metric, [first, *results])


def bars(rows: Mapping[str, Mapping[str, float]], marks: Mapping[str, float], mark: str) -> Html:
    """Horizontal bars of shares of 1, grouped by row, with a line across each group, such as chance.

    Args: rows: row -> name of the bar -> value in [0, 1]; at most 6 names; marks: row -> where its line is; mark: what
    the line shows.
    """
    names = list(dict.fromkeys(name for values in rows.values() for name in values))
    legend = "".join(
        f'<span><i style="background:var(--s{i % SERIES})"></i>{escape(n)}</span>' for i, n in enumerate(names)
    )
    groups = "".join(
        f'<div class="row"><b>{escape(row)}</b><div class="track">{_bars(names, values)}'
        f'<i class="mark" style="left:{100 * marks[row]:.1f}%"></i></div></div>'
        for row, values in rows.items()
    )
    return Html(f'<div class="bars"><p>{legend}<span>| {escape(mark)}</span></p>{groups}</div>') if groups else Html()


def _bars(names: Sequence[str], values: Mapping[str, float]) -> str:
    return "".join(
        f'<i class="bar" style="width:{100 * values[name]:.1f}%;background:var(--s{i % SERIES})" '
        f'title="{escape(name)} {values[name]:.3f}"></i>'
        for i, name in enumerate(names)
        if name in values
    )


def heat_map(
    matrix: npt.ArrayLike,
    row_names: Sequence[str],
    column_names: Sequence[str],
    *,
    caption: str = "",
    column_label: str = "predicted",
) -> Html:
    """A confusion matrix, a row a true class: every number is written, its colour is its share of the row.

    Args: matrix [rows, columns], at least 0; whole numbers are counts, others get two digits.
    Errors: ValueError for another shape, negative or non-finite numbers.
    """
    values, named = np.asarray(matrix), (len(row_names), len(column_names))
    if values.shape != named:
        raise ValueError(f"the heat map's matrix has shape {values.shape}, its names say {named}")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("the heat map's matrix holds negative or non-finite numbers: give counts or shares")
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
    corner = f'<td class="axis" style="--a:0">true ↓<br>{escape(column_label)} →</td>'
    cells = _scrolled("<table>", corner + head, body, caption or f"true against {column_label}")
    return Html(f'<figure class="heat">{above}{cells}</figure>')


def _scrolled(opening: str, head: str, body: str, label: str) -> Html:
    """A table that scrolls where the screen is narrow."""
    return Html(
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{opening}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heat_cell(value: float, share: float, whole: bool, same: bool) -> str:
    shown = f"{value:.0f}" if whole or value == 0 else f"{value:.2f}"
    return f'<td{_classes(none=value == 0, same=same)} style="--a:{share:.2f}">{shown}</td>'


def _classes(**on: bool) -> str:
    names = [name for name, holds in on.items() if holds]
    return f' class="{" ".join(names)}"' if names else ""


def _breakable(text: str) -> str:
    """Escaped; a long metric name may break after its last underscore, so that a phone shows more columns."""
    return "_<wbr>".join(escape(text).rsplit("_", 1))


DASH = "–"
STRONG = ' class="strong"'


def _shown(cell: object, digits: int) -> str:
    if cell is None:
        return DASH
    return f"{cell:.{digits}f}" if isinstance(cell, float | np.floating) else str(cell)
