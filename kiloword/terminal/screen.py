"""Tables and frames on a terminal, drawn by rich; texts from data cannot control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kiloword.terminal import shown


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


def plain_table(*columns: str) -> Table:
    """A table without borders; without a header if all columns are unnamed."""
    return Table(*columns, box=None, header_style="bold", show_header=any(columns), pad_edge=False)
