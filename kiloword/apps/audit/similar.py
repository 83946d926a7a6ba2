"""Near-duplicate images, by features and then by pixels; captions that repeat."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kiloword.data.classes.names import caseless
from kiloword.model.encoding import chunks
from kiloword.terminal.progress import track

NEIGHBOURS = 4  # of each image, by features, that may be the same image
GRID = 24  # pixels of a side at which images are compared
ALIKE = 0.9  # correlation of the colours of two such images, or of one mirrored, from which they are the same
SHARE, TINT = 0.1, 16.0  # largest differences of a channel: in its share of the contrast, and of mean colours (of 255)
STEP, ENOUGH = 200, 0.01  # pairs are compared in steps, best first, until so few of a step are the same

Pixels = NDArray[np.uint8]
Look = Callable[[int], Pixels | None]
"""The pixels of an image [H, W, 3]; None where it cannot be read."""
Grid = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class SameImage:
    """Two images that are nearly the same."""

    first: int
    second: int  # above first
    cosine: float  # of their features
    pixels: float  # correlation of their colours; 1 of equal pixels


def near_duplicates(vectors: Tensor, look: Look, chunk: int = 1024) -> list[SameImage]:
    """Pairs of duplicate images: first pairs with equal pixels, then near duplicates, nearest first.

    Every image is read once for its pixels. Other candidates are each image's nearest ones by features [I, D] of unit
    norm; colours decide, since to a model that was trained on few images many scenes look alike. A crop that omits much
    is not found.
    """
    first, same = dict[bytes, int](), list[SameImage]()
    for image in track(range(len(vectors)), "pixels", "images", len(vectors)):
        pixels = look(image)
        if pixels is not None and (i := first.setdefault(_digest(pixels), image)) != image:
            same.append(SameImage(i, image, float(vectors[i] @ vectors[image]), 1.0))
    different = torch.tensor(sorted({*range(len(vectors))} - {pair.second for pair in same}), dtype=torch.int64)
    candidates = _candidates(vectors[different], chunk)
    seen: dict[int, Grid | None] = {}

    def grid(image: int) -> Grid | None:
        if image not in seen:
            pixels = look(image)
            seen[image] = None if pixels is None else _grid(pixels)
        return seen[image]

    for part in track(list(chunks(len(candidates), STEP)), "duplicates", "steps of pairs", -(-len(candidates) // STEP)):
        before = len(same)
        for cosine, *places in candidates[part]:
            i, j = different[places].tolist()
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


def _digest(pixels: Pixels) -> bytes:
    return hashlib.blake2b(pixels.tobytes(), digest_size=16, key=repr(pixels.shape).encode()).digest()


def _grid(pixels: Pixels) -> Grid:
    """The mean colour [3], and colours [GRID, GRID, 3] of mean 0 and norm 1; zeros for an image of one colour."""
    small = Image.fromarray(pixels).resize((GRID, GRID), Image.Resampling.BOX)
    values = np.asarray(small, np.float64)
    mean = values.mean((0, 1))
    norm = np.linalg.norm(values - mean)
    return mean, (values - mean) / norm if norm > GRID else np.zeros_like(values)


def _alike(a: Grid, b: Grid) -> float:
    """The correlation of two images or of one mirrored; 0 where their colours differ by more than brightness."""
    (mean_a, a_values), (mean_b, b_values) = a, b
    tint = (mean_a - mean_a.mean()) - (mean_b - mean_b.mean())
    share = np.linalg.norm(a_values, axis=(0, 1)) - np.linalg.norm(b_values, axis=(0, 1))
    if np.abs(tint).max() > TINT or np.abs(share).max() > SHARE:
        return 0.0
    return float(max((a_values * b_values).sum(), (a_values * b_values[:, ::-1]).sum()))


def repeated(captions: Sequence[str]) -> list[list[int]]:
    """Groups of repeated captions [T], largest first; case, white space and a final full stop are ignored."""
    places = defaultdict[str, list[int]](list)
    for place, caption in enumerate(captions):
        text = " ".join(caseless(caption).split())
        places[text.removesuffix(".").rstrip() or text].append(place)
    return sorted((group for group in places.values() if len(group) > 1), key=lambda group: (-len(group), group))
