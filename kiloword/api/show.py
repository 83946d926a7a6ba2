"""Features and scores as a person at a prompt or in a notebook sees them. Names and captions are data: escaped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from kiloword.report import image_data
from kiloword.terminal import shown
from kiloword.types import Features

ROWS, COLUMNS = 20, 10  # shown of a table
SIDE, LETTERS = 64, 60  # pixels of a thumbnail, characters of a name


class ShownFeatures(Features):
    """Features that print as their shapes; a dict in all else, and pickled as one."""

    def __repr__(self) -> str:
        kinds = (
            f"{name}: {str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
            for name, value in self.items()
        )
        return f"Features({', '.join(kinds)})"

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
        """The table as text, texts above it, and below it what it omits."""
        names = [Path(one).name if isinstance(one, str | Path) else f"image {n}" for n, one in enumerate(self.images)]
        cells = [[f"{score:.3f}" for score in row[:COLUMNS]] for row in self.scores.tolist()]
        rows = [["image", *self.texts[:COLUMNS]], *([name, *row] for name, row in zip(names, cells, strict=True))]
        omitted = {"images": len(names) - ROWS, "texts": len(self.texts) - COLUMNS}
        more = " and ".join(f"{n} more {what}" for what, n in omitted.items() if n > 0)
        return [[_cut(cell) for cell in row] for row in rows[: ROWS + 1]] + [[f"and {more}"]] * bool(more)

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[c]) for row in rows if len(row) > 1) for c in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=False)) for row in rows)

    def _repr_html_(self) -> str:
        lines = []
        for n, row in enumerate(self._rows()):
            best = max(row[1:], key=float) if 0 < n <= len(self.images) and len(row) > 1 else None
            cells = [f"<b>{cell}</b>" if cell == best else escape(cell) for cell in row]
            if best is not None:
                image = Image.fromarray(self.pixels[n - 1].permute(1, 2, 0).contiguous().numpy())
                image.thumbnail((SIDE, SIDE))
                cells[0] = f'<img src="{image_data(np.asarray(image))}" alt=""> {cells[0]}'
            lines.append("".join(f"<td>{cell}</td>" for cell in cells))
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cut(text: str) -> str:
    text = shown(text)
    return text if len(text) <= LETTERS else text[: LETTERS - 3] + "..."
