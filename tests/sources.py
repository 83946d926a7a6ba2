"""Data in memory: images some of which cannot be used, corpora of features; and all that is in a source or batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.fff import Mined
from kiloword.types import BadSample, Batch, Record, Source, Texts

LOW = Mined(p1=0.3, p2=0.4, p3=0.2, p1_text=0.1)


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


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(of: Batch) -> list[Tensor]:
    found = list[Tensor]()
    of.each(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def decoded(tokenizer: Tokenizer, texts: Texts) -> list[str]:
    return [tokenizer.decode(texts.cut(t, t + 1).ids.tolist()) for t in range(len(texts))]


def records(data: Source | str) -> list[Record]:
    """All rows of a source, or of the data that a name opens."""
    source = open_source(data) if isinstance(data, str) else data
    return [source.record(row) for row in range(len(source))]


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)


def corpus(images: np.ndarray, texts: list[np.ndarray], captions: list[str] | None = None) -> Corpus:
    """Images [N, D] and every image's captions [k, D]."""
    starts = np.concatenate([[0], np.cumsum([len(t) for t in texts])])
    names = captions or [f"caption {n}" for n in range(starts[-1])]
    return Corpus([f"k{n}" for n in range(len(images))], names, starts, images, np.concatenate(texts))


def random_corpus(seed: int, n: int = 9, dim: int = 6, without: bool = False) -> Corpus:
    """Args: without: some images have no caption."""
    rng = np.random.default_rng(seed)
    images = unit(rng.normal(size=(n, dim)))
    texts = [unit(rng.normal(size=(int(rng.integers(0 if without else 1, 4)), dim)) + images[i]) for i in range(n)]
    return corpus(images.astype(np.float32), [t.astype(np.float32) for t in texts])
