"""Near-duplicate images, by features and then by pixels; captions that repeat."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kiloword.model.encoding import chunks
from kiloword.terminal.progress import track

NEIGHBOURS = 4  # of each image, by features, that may be the same image
GRID = 24  # pixels of a side at which images are compared
ALIKE = 0.9  # correlation of the grey values of two such images, or of one mirrored, from which they are the same
STEP, ENOUGH = 200, 0.01  # pairs are compared in steps, best first, until so few of a step are the same

Pixels = NDArray[np.uint8]
Look = Callable[[int], Pixels | None]
"""The pixels of an image [H, W, 3]; None where it cannot be read."""


@dataclass(frozen=True)
class SameImage:
    """Two images that are nearly the same."""

    first: int
    second: int  # above first
    cosine: float  # of their features
    pixels: float  # correlation of their grey values


def near_duplicates(vectors: Tensor, look: Look, chunk: int = 1024) -> list[SameImage]:
    """Pairs of images that are nearly the same, the nearest first.

    Candidates are each image's nearest ones by features [I, D] of unit norm; pixels decide, since to a model that was
    trained on few images many scenes look alike. A crop that omits much is not found.
    """
    candidates = _candidates(vectors, chunk)
    seen: dict[int, NDArray[np.float64] | None] = {}

    def grid(image: int) -> NDArray[np.float64] | None:
        if image not in seen:
            pixels = look(image)
            seen[image] = None if pixels is None else _grid(pixels)
        return seen[image]

    same = list[SameImage]()
    for part in track(list(chunks(len(candidates), STEP)), "duplicates", "steps of pairs", -(-len(candidates) // STEP)):
        before = len(same)
        for cosine, i, j in candidates[part]:
            a, b = grid(i), grid(j)
            if a is not None and b is not None and (alike := _alike(a, b)) >= ALIKE:
                same.append(SameImage(i, j, cosine, alike))
        if len(same) - before < ENOUGH * STEP:
            break
        seen.clear()
    return same


def groups(same: Sequence[SameImage]) -> list[list[int]]:
    """Groups of images that are linked, each ascending; in order of their first images."""
    root = dict[int, int]()

    def of(image: int) -> int:
        while root.setdefault(image, image) != image:
            image = root[image]
        return image

    for pair in same:
        first, second = sorted((of(pair.first), of(pair.second)))
        root[second] = first
    linked = defaultdict[int, list[int]](list)
    for image in sorted(root):
        linked[of(image)].append(image)
    return list(linked.values())


def _candidates(vectors: Tensor, chunk: int) -> list[tuple[float, int, int]]:
    """(cosine, i, j) with i < j of each image's nearest others, largest cosine first."""
    vectors, cosine_of = vectors.float(), dict[tuple[int, int], float]()
    n = len(vectors)
    for part in chunks(n, chunk):
        cosines = vectors[part] @ vectors.T
        cosines[torch.arange(part.stop - part.start), torch.arange(part.start, part.stop)] = -2
        best = cosines.topk(min(NEIGHBOURS, n - 1), dim=1)
        for i, (values, columns) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            for value, j in zip(values, columns, strict=True):
                cosine_of[min(i + part.start, j), max(i + part.start, j)] = value
    return sorted(((value, *pair) for pair, value in cosine_of.items()), key=lambda one: (-one[0], one[1:]))


def _grid(pixels: Pixels) -> NDArray[np.float64]:
    """Grey values [GRID, GRID] of mean 0 and norm 1; zeros of an image of one colour."""
    small = Image.fromarray(pixels).convert("L").resize((GRID, GRID), Image.Resampling.BOX)
    values = np.asarray(small, np.float64)
    values = values - values.mean()
    norm = np.linalg.norm(values)
    return values / norm if norm > GRID else np.zeros_like(values)


def _alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(max((a * b).sum(), (a * b[:, ::-1]).sum()))


def repeated(captions: Sequence[str]) -> list[list[int]]:
    """Groups of captions [T] that are the same but for case, space and punctuation, most frequent first."""
    places = defaultdict[str, list[int]](list)
    for place, caption in enumerate(captions):
        places[" ".join(re.findall(r"\w+", caption.casefold())) or caption].append(place)
    return sorted((group for group in places.values() if len(group) > 1), key=lambda group: (-len(group), group))
