"""Images of noise in memory, some of which cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kiloword.types import BadSample, Record


@dataclass
class Images:
    """Row i holds a noisy image and 1 + i % `most` captions that name it; chosen rows are bad in several ways."""

    bad: dict[int, str] = field(default_factory=dict)
    rows: int = 40
    side: int = 8
    most: int = 4
    keys: dict[int, str] = field(default_factory=dict)
    name: str = "images"
    fingerprint: str = "f"

    def __len__(self) -> int:
        return self.rows

    def key(self, row: int) -> str:
        return self.keys.get(row, f"k{row:03}")

    def record(self, row: int) -> Record:
        how = self.bad.get(row)
        if how == "sample":
            raise BadSample("truncated image")
        if how == "crash":
            raise KeyError("column")
        pixels = np.random.default_rng(row).integers(0, 256, (self.side, self.side, 3), dtype=np.uint8)
        captions = [] if how == "silent" else [f"image {row} caption {j}" for j in range(1 + row % self.most)]
        return Record(self.key(row), b"no image" if how == "bytes" else pixels, captions, label=row % 3)
