"""Tables on a terminal, drawn by rich; texts from data cannot control the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kiloword.terminal import LONGEST, say, shown


def say_table(rows: Iterable[Sequence[str]], *columns: str) -> None:
    """Print a table: a terminal folds its words, other output is as wide as its rows; numbers are aligned to the right.

    Texts are escaped and cut as lines are by `say`.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    table = Table(box=None, header_style="bold", show_header=any(columns), pad_edge=False)
    cells = [[Text(shown(cell[:LONGEST], console.encoding)) for cell in row] for row in [columns, *rows]]
    for head, *below in zip(*cells, strict=True):
        numbers = all(re.match(r"-?\d|[-–]?$", cell.plain) for cell in below)
        table.add_column(head, overflow="fold", justify="right" if numbers else "left")
    for row in cells[1:]:
        table.add_row(*row)
    if not console.is_terminal:
        widest = console.measure(table, options=console.options.update(width=1 << 20)).maximum
        console.width = max(console.width, widest)
    say()  # over a line of progress
    console.print(table)
