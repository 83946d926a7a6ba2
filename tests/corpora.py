"""Small corpora of features, as mining reads them."""

from __future__ import annotations

import numpy as np

from kiloword.apps.mine.corpus import Corpus
from kiloword.methods.fff import Mined

LOW = Mined(p1=0.3, p2=0.4, p3=0.2, p1_text=0.1)


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
