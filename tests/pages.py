"""Reads a page as a reader does: headings, and below each its paragraphs and tables."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Section:
    words: list[str] = field(default_factory=list)  # paragraphs, figures, items of lists, captions of images
    tables: list[list[list[str]]] = field(default_factory=list)  # rows of cells, the header first

    @property
    def text(self) -> str:
        return "\n".join(self.words)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, Section] = {"": Section()}
        self.here, self.buffer = self.sections[""], ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "h2", "h3", "th", "td", "li", "div", "span", "blockquote", "pre", "dt", "dd", "style", "svg"):
            self.keep()
        if tag == "table":
            self.here.tables.append([])
        if tag == "tr" and self.here.tables:
            self.here.tables[-1].append([])

    def handle_endtag(self, tag: str) -> None:
        if tag in ("style", "svg", "title", "nav"):
            self.buffer = ""
        elif tag in ("th", "td") and self.here.tables:
            self.here.tables[-1][-1].append(self.buffer.strip())
            self.buffer = ""
        elif tag == "h2":
            self.here = self.sections[self.buffer] = Section()
            self.buffer = ""
        elif tag in ("p", "li", "span", "div", "blockquote", "figcaption", "caption", "h3", "pre", "dt", "dd", "b"):
            self.keep()

    def handle_data(self, data: str) -> None:
        self.buffer += data

    def keep(self) -> None:
        if words := re.sub(r"[ \n]+", " ", self.buffer).strip():
            self.here.words.append(words)
        self.buffer = ""


def sections(html: str) -> dict[str, Section]:
    """Heading -> what stands below it; before the first heading under ""."""
    reader = _Reader()
    reader.feed(html)
    return reader.sections
