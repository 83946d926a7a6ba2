"""Features and scores as a person at a prompt or in a notebook sees them. Names and captions are data: escaped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from kiloword.report import image_data, thumbnail
from kiloword.terminal import shown
from kiloword.types import Features

ROWS, COLUMNS = 20, 10  # shown of a table
SIDE, LETTERS = 64, 60  # pixels of a thumbnail, characters of a name


class ShownFeatures(Features):
    """Features that print as their shapes; a dict in all else, and pickled as one."""

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name} {list(value.shape)}' for name, value in self.items())})"

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


@dataclass(frozen=True, repr=False)
class ScoreTable:
    """Scores [I, T] of images and texts, on the CPU. Prints as a table; in notebooks with thumbnails."""

    scores: Tensor
    images: Sequence[Any]  # paths, or images without a name
    texts: Sequence[str]
    pixels: Tensor  # uint8 [I, 3, H, W]

    def _rows(self) -> list[list[str]]:
        """The table as text, texts above it."""
        names = [Path(one).name if isinstance(one, str | Path) else f"image {n}" for n, one in enumerate(self.images)]
        cells = [[f"{score:.3f}" for score in row[:COLUMNS]] for row in self.scores[:ROWS].tolist()]
        rows = [["image", *self.texts[:COLUMNS]], *([name, *row] for name, row in zip(names, cells, strict=False))]
        return [[shown(cell)[:LETTERS] for cell in row] for row in rows]

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([*lines, f"{len(self.images)} images, {len(self.texts)} texts"])

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        for (name, *cells), pixels in zip(rows, self.pixels, strict=False):
            image = image_data(thumbnail(pixels.permute(1, 2, 0).contiguous().numpy(), SIDE))
            best = max(cells, key=float)
            scores = "".join(f"<td>{f'<b>{cell}</b>' if cell == best else cell}</td>" for cell in cells)
            lines.append(f'<td><img src="{image}" alt=""> {escape(name)}</td>{scores}')
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table>{table}</table>{len(self.images)} images, {len(self.texts)} texts"
