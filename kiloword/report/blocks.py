"""What a task, an application or a run has to show: blocks, which become a page, JSON or lines on a terminal.

Blocks are plain data; strings are plain text and are escaped where they are rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pixels = npt.NDArray[np.uint8]
"""An image [H, W, 3]."""


# Control characters, characters that change the direction of the text after them, and lone surrogates.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """With characters that would turn or hide text as escapes such as \\u202e."""
    return _STEERING.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class Text:
    """A paragraph; or a heading within a section, or code as it is typed."""

    text: str
    kind: Literal["paragraph", "heading", "code"] = "paragraph"


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows. Cells: text, numbers, and None for a dash."""

    rows: Sequence[Sequence[object]]  # each as long as header; without rows nothing is shown
    header: Sequence[str]
    caption: str = ""
    digits: int = 3  # after the point of floats
    best: Collection[int] = ()  # columns whose largest number is bold


@dataclass(frozen=True)
class Plot:
    """A plot by matplotlib: `draw` gets the axes, on which it draws and writes its labels, and imports nothing itself.

    Colours "C0" to "C5" are those of the page, light and dark; `legend` is added where labels are given.
    """

    draw: Callable[[Axes], object]
    about: str  # what one sees, in a sentence, for readers who do not see it
    height: float = 3.2  # inches, of a width of 6.4


def distributions(series: Mapping[str, npt.ArrayLike], label: str, tail: float = 0.0) -> Plot:
    """Histograms of several series; the outermost bars also hold the `tail` percent of all numbers at each end."""
    arrays = {name: np.asarray(values, np.float64) for name, values in series.items()}
    low, high = np.percentile(np.concatenate(list(arrays.values())), (tail, 100 - tail))

    def draw(axes: Axes) -> None:
        for n, (name, values) in enumerate(arrays.items()):
            counts, edges = np.histogram(values.clip(low, high), bins=40, range=(low, high))
            axes.stairs(100 * counts / len(values), edges, color=f"C{n}", label=name)
            axes.stairs(100 * counts / len(values), edges, color=f"C{n}", fill=True, alpha=0.12)
        axes.set(xlabel=label, ylabel="% of each")

    return Plot(draw, f"histograms of {label}: {', '.join(series)}")


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix, a row a true class: every number is written, its colour is its share of the row."""

    values: npt.NDArray[np.int64]  # [rows, columns], counts
    rows: Sequence[str]
    columns: Sequence[str]
    caption: str = ""


@dataclass(frozen=True)
class Tile:
    """An image with lines of text below it."""

    image: Pixels
    lines: Sequence[str] = ()
    right: bool | None = None  # outlined and ticked where True, marked as wrong where False


@dataclass(frozen=True)
class Gallery:
    """Images in rows, below a text (a query, a caption) if there is one."""

    tiles: Sequence[Tile]
    title: str = ""
    columns: int = 5


@dataclass(frozen=True)
class Beside:
    """Blocks side by side where there is room."""

    blocks: Sequence[Block]


Block = Text | Table | Plot | Matrix | Gallery | Beside


@dataclass(frozen=True)
class Page:
    """A title, an introduction of paragraphs, sections (heading -> blocks), and how it was made."""

    title: str
    intro: str
    sections: Mapping[str, Sequence[Block]]
    made_by: Mapping[str, Any] = field(default_factory=dict)
