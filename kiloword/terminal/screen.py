"""Tables and frames on a terminal, drawn by rich; texts from data cannot control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kiloword.terminal import shown

UNLIMITED = 1 << 20  # columns


class Screen(Console):
    """A rich console for texts from data: no markup, every text on one line and escaped by `terminal.shown`.

    A `Text` keeps its lines and styles; code that makes one from data must call `shown`.
    Args: width: columns where the output is not a terminal; None: as detected by rich; file: default stdout;
    hides_cursor: whether live displays may; a killed process cannot show it again.
    """

    def __init__(
        self, width: int | None = None, file: TextIO | None = None, hides_cursor: bool = True, **options: Any
    ) -> None:
        file = sys.stdout if file is None else file
        file = getattr(file, "raw_stream", file)
        self._hides_cursor = hides_cursor
        width = None if file.isatty() else width
        super().__init__(file=file, width=width, markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As in rich, but no table is cut: a narrow terminal folds its words, other output is as wide as they need."""
        needed = max((self._fit(table) for table in objects if isinstance(table, Table)), default=0)
        if self.is_terminal or needed <= (before := self.width):  # a terminal may change its width at any time
            super().print(*objects, **options)
            return
        self.width = needed
        super().print(*objects, **options)
        self.width = before

    def print_table(self, table: Table, lines: Iterable[Text]) -> None:
        """Print a table, or in its place these lines where it would fold words."""
        if self._fit(table) <= self.width:
            self.print(table)
            return
        for line in lines:
            self.print(line, soft_wrap=True)

    def _fit(self, table: Table) -> int:
        """Give each column of a table room for its longest word; returns the width that this takes.

        Where a terminal is too narrow, headings are folded, and then the longest words below them.
        """
        for column in table.columns:
            column.overflow, column.width = "fold", None
        every = self.options.update(width=UNLIMITED)
        heads = [self.measure(column.header if table.show_header else "", options=every) for column in table.columns]
        below, widest = [], []
        for column, head in zip(table.columns, heads, strict=True):
            spans = [self.measure(cell, options=every) for cell in column.cells]
            widest.append(max([head.maximum, *(span.maximum for span in spans)]))
            below.append(widest[-1] if column.no_wrap else max((span.minimum for span in spans), default=0))
        words = [max(head.minimum, width) for head, width in zip(heads, below, strict=True)]
        frame = self.measure(table, options=every).maximum - sum(widest)
        room = self.width - frame
        fits = sum(words) <= room or not self.is_terminal
        least = words if fits else shares([1] * len(below), below, room)
        for column, width in zip(table.columns, shares(least, widest, room), strict=True):
            column.width = width
        return frame + sum(words)

    def show_cursor(self, show: bool = True) -> bool:
        """As in rich, if this console hides the cursor."""
        return self._hides_cursor and super().show_cursor(show)

    def render_str(self, text: str, **options: Any) -> Text:
        """As in rich, with escaped text."""
        return super().render_str(shown(text, self.encoding), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in rich; also escapes the contents of each `Text`."""
        for segment in super().render(renderable, options):
            text = "\n".join(shown(part, self.encoding) for part in segment.text.split("\n"))
            yield segment if segment.control or text == segment.text else Segment(text, segment.style)


def shares(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths of columns between their limits, the narrowest of them as wide as the room allows."""
    widths = list(least)
    for _ in range(room - sum(widths)):
        if not (narrow := [n for n, width in enumerate(widths) if width < most[n]]):
            break
        widths[min(narrow, key=lambda n: widths[n])] += 1
    return widths


def plain_table(*columns: str) -> Table:
    """A table without borders; without a header if all columns are unnamed."""
    return Table(*columns, box=None, header_style="bold", show_header=any(columns), pad_edge=False)
