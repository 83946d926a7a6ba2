"""Tables and frames on a terminal, drawn by rich; texts from data cannot control the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kiloword.terminal import LONGEST, end_line, shown


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
    end_line(sys.stdout)
    console.print(table)


class Screen(Console):
    """A rich console for texts from data: no markup, every text on one line and escaped by `terminal.shown`.

    A `Text` keeps its lines and styles; code that makes one from data must call `shown`.
    Args: width: columns where the output is not a terminal; None: as detected by rich; file: default stdout.
    """

    def __init__(self, width: int | None = None, file: TextIO | None = None, **options: Any) -> None:
        file = sys.stdout if file is None else file
        width = None if file.isatty() else width
        super().__init__(file=file, width=width, markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As in rich, but no table is cut: a terminal folds its words, other output is as wide as its rows."""
        for table in (thing for thing in objects if isinstance(thing, Table)):
            for column in table.columns:
                column.overflow = "fold"
            if not self.is_terminal:
                self.width = max(self.width, self._widths(table)[1])
        super().print(*objects, **options)

    def print_table(self, table: Table, lines: Iterable[Text]) -> None:
        """Print a table, or in its place these lines where it would fold words."""
        if self._widths(table)[0] <= self.width:
            self.print(table)
            return
        for line in lines:
            self.print(line, soft_wrap=True)

    def _widths(self, table: Table) -> tuple[int, int]:
        """Columns that a table takes where its texts are wrapped, and where they are not."""
        return self.measure(table, options=self.options.update(width=1 << 20))[:2]

    def render_str(self, text: str, **options: Any) -> Text:
        """As in rich, with escaped text."""
        return super().render_str(shown(text, self.encoding), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in rich; also escapes the contents of each `Text`."""
        for segment in super().render(renderable, options):
            text = "\n".join(shown(part, self.encoding) for part in segment.text.split("\n"))
            yield segment if segment.control or text == segment.text else Segment(text, segment.style)


def plain_table(*columns: str) -> Table:
    """A table without borders; without a header if all columns are unnamed."""
    return Table(*columns, box=None, header_style="bold", show_header=any(columns), pad_edge=False)
