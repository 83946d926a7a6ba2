"""Tables and frames on a terminal, drawn by rich, from texts that cannot steer it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kiloword.terminal import shown


class Screen(Console):
    """A rich console for texts from data: no markup, and every text on one line, as `terminal.shown` makes it.

    A `Text` keeps its lines and styles; whoever makes one from data calls `shown`.
    Args: width: columns where the output is no terminal; None: as rich finds them.
    """

    def __init__(self, width: int | None = None, **options: Any) -> None:
        file = getattr(sys.stdout, "raw_stream", sys.stdout)
        width = None if file.isatty() else width
        super().__init__(file=file, width=width, markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich's, of the harmless text."""
        return super().render_str(shown(text, self.encoding), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's; a last look at what is in a `Text`."""
        for segment in super().render(renderable, options):
            text = "\n".join(shown(part, self.encoding) for part in segment.text.split("\n"))
            yield segment if segment.control or text == segment.text else Segment(text, segment.style)


def plain_table(*columns: str) -> Table:
    """A table without lines around it; without a name for any column, without a header too."""
    return Table(*columns, box=None, header_style="bold", show_header=any(columns), pad_edge=False)
