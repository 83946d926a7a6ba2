"""A terminal that remembers what it showed."""

from __future__ import annotations

import io
import re


class Terminal(io.StringIO):
    """What is written to it; `columns` wide for whoever asks the environment. Made by the fixture `terminal`."""

    columns = 120

    def isatty(self) -> bool:
        return True

    @property
    def frames(self) -> list[str]:
        """Each state of its lines in order, without bars; "" last, if the last line is ended."""
        plain = re.sub(r" \[=* *\]", "", self.getvalue())
        return [frame.rstrip() for frame in re.split("[\r\n]", plain.removeprefix("\r").replace("\n\r", "\n"))]
