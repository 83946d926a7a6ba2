"""Models, features and scores as tables in notebooks. Every text in them is escaped: names and captions are data."""

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

from kiloword.report.images import image_data
from kiloword.terminal import shown
from kiloword.types import Features

ROWS, COLUMNS = 20, 10  # shown of a table
SIDE = 64  # pixels of a thumbnail
WORDS = 60  # characters shown of a name or text
CELL = "padding:2px 8px;border-bottom:1px solid #8884;text-align:"


class ShownFeatures(Features):
    """Features that a notebook shows as a table; a dict in all else, and pickled as one."""

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}: {_kind(value)}' for name, value in self.items())})"

    def _repr_html_(self) -> str:
        rows = [[name, _kind(value), _numbers(value)] for name, value in self.items()]
        return _table(["features", "type", "first values"], rows)

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def _numbers(value: Tensor) -> str:
    first = value.detach().flatten()[:4].float().cpu().tolist()
    return ", ".join(f"{number:.3g}" for number in first) + (", ..." if value.numel() > len(first) else "")


@dataclass(frozen=True, repr=False)
class ScoreTable:
    """Scores [I, T] of images and texts, on the CPU. Prints as a table; in notebooks with thumbnails."""

    scores: Tensor
    images: Sequence[str]  # names
    texts: Sequence[str]
    pixels: Tensor  # uint8 [I, 3, H, W]

    def __repr__(self) -> str:
        names = [_cut(name) for name in self.images[:ROWS]]
        texts = [_cut(text) for text in self.texts[:COLUMNS]]
        first, widths = max(map(len, names)), [max(7, len(text)) for text in texts]
        lines = ["  ".join([" " * first, *(f"{text:>{w}}" for text, w in zip(texts, widths, strict=True))])]
        for name, row in zip(names, self.scores.tolist(), strict=False):
            lines.append("  ".join([f"{name:{first}}", *(f"{s:{w}.3f}" for s, w in zip(row, widths, strict=False))]))
        return "\n".join([*lines, *self._rest()])

    def _repr_html_(self) -> str:
        rows = []
        for pixels, name, row in zip(self.pixels, self.images[:ROWS], self.scores.tolist(), strict=False):
            best = max(row)
            cells = (f"<b>{score:.3f}</b>" if score == best else f"{score:.3f}" for score in row[:COLUMNS])
            rows.append([f"{_thumbnail(pixels, _cut(name))} {escape(_cut(name))}", *map(Markup, cells)])
            rows[-1][0] = Markup(rows[-1][0])
        return _table(["image", *map(_cut, self.texts[:COLUMNS])], rows) + "".join(
            f"<div>{escape(line)}</div>" for line in self._rest()
        )

    def _rest(self) -> list[str]:
        """What the table omits."""
        images, texts = len(self.images) - ROWS, len(self.texts) - COLUMNS
        more = [f"{n} more {what}" for n, what in ((images, "images"), (texts, "texts")) if n > 0]
        return [f"and {' and '.join(more)}"] if more else []


class Markup(str):
    """HTML that is escaped already."""


def model_html(method: str, words: str) -> str:
    """A model as a table. Args: its method, and what `model_in_words` says of it, parts between semicolons."""
    parts = [part.strip() for part in words.split(";")]
    return _table(["Matcher", method], list(zip(("images", "texts", "features", "weights"), parts, strict=False)))


def names_of(images: Any) -> list[str]:
    """Names of several images: those of files, else their places."""
    return [Path(one).name if isinstance(one, str | Path) else f"image {n}" for n, one in enumerate(images)]


def _cut(text: str) -> str:
    text = shown(text)
    return text if len(text) <= WORDS else text[: WORDS - 3] + "..."


def _thumbnail(pixels: Tensor, words: str) -> str:
    """A small image of uint8 [3, H, W]."""
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((SIDE, SIDE))
    return f'<img src="{image_data(np.asarray(image))}" alt="{escape(words)}" style="vertical-align:middle">'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th style="{CELL}left">{escape(word)}</th>' for word in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{CELL}left">{one if isinstance(one, Markup) else escape(one)}</td>' for one in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
