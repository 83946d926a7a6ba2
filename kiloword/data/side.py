"""Side tables: features of a data set's pictures and captions, computed once, joined to examples by key."""

from __future__ import annotations

from pathlib import Path

from kiloword.types import Example, Source


class SideTable:
    """Features of one teacher on one data set, memory-mapped; `kiloword embed` writes the folder.

    `join` adds `image_side[name]` [D], `text_side[name]` [captions, D] (unit norm; zeros where the table has none, which
    match nothing) and `image_side[name + ".texts"]` [D], the mean of the example's `text_side` rows.
    """

    name: str  # of the features in a batch, "teacher" unless said otherwise
    dim: int

    def __init__(self, path: Path | str) -> None:
        raise NotImplementedError

    def check(self, source: Source) -> None:
        """Raises: ValueError when the table was made from other data."""
        raise NotImplementedError

    def join(self, example: Example) -> None:
        """Add this table's features to an example, by its key and its captions' texts."""
        raise NotImplementedError
