"""Near-duplicate images, by features and then by pixels; captions that repeat."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kiloword.data.classes.names import caseless
from kiloword.model.encoding import chunks
from kiloword.report.blocks import Pixels
from kiloword.terminal.progress import track

NEIGHBOURS = 4  # of each image, by features, that may be the same image
GRID = 24  # pixels of a side at which images are compared
ALIKE = 0.9  # correlation of the colours of two such images, or of one mirrored, from which they are the same
SHARE, TINT = 0.1, 16.0  # largest differences of a channel: in its share of the contrast, and of mean colours (of 255)
STEP, ENOUGH = 200, 0.01  # pairs are compared in steps, best first, until so few of a step are the same

Look = Callable[[int], Pixels | None]
"""The pixels of an image [H, W, 3]; None where it cannot be read."""


class SameImage(NamedTuple):
    """Two images that are nearly the same."""

    first: int
    second: int  # above first
    cosine: float  # of their features
    pixels: float  # correlation of their colours; 1 of equal pixels


def near_duplicates(vectors: Tensor, look: Look, chunk: int = 1024) -> list[SameImage]:
    """Pairs of duplicate images: first pairs with equal pixels, then near duplicates, nearest first.

    Other candidates are each image's nearest ones by features [I, D] of unit norm; colours decide, since to a model
    that was trained on few images many scenes look alike. A crop that omits much is not found.
    """
    first, same = dict[tuple[bytes, tuple[int, ...]], int](), list[SameImage]()
    for image in track(range(len(vectors)), "pixels", "images", len(vectors)):
        if (pixels := look(image)) is not None:
            digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(), pixels.shape
            if (i := first.setdefault(digest, image)) != image:
                same.append(SameImage(i, image, float(vectors[i] @ vectors[image]), 1.0))
    copies = {pair.second for pair in same}
    different = torch.tensor([image for image in range(len(vectors)) if image not in copies], dtype=torch.int64)
    candidates = _candidates(vectors[different], chunk)
    for part in track(list(chunks(len(candidates), STEP)), "duplicates", "steps of pairs", -(-len(candidates) // STEP)):
        before, colours = len(same), dict[int, NDArray[np.float64] | None]()
        for cosine, *places in candidates[part]:
            i, j = different[places].tolist()
            for image in {i, j} - colours.keys():
                pixels = look(image)
                colours[image] = None if pixels is None else _small(pixels)
            a, b = colours[i], colours[j]
            if a is not None and b is not None and (alike := _alike(a, b)) >= ALIKE:
                same.append(SameImage(i, j, cosine, alike))
        if len(same) - before < ENOUGH * STEP:
            break
    return same


def groups(same: Sequence[SameImage]) -> list[list[int]]:
    """Groups of images that are linked, each ascending; in order of their first images."""
    group_of: dict[int, set[int]] = {}
    for pair in same:
        joined = group_of.get(pair.first, {pair.first}) | group_of.get(pair.second, {pair.second})
        group_of |= dict.fromkeys(joined, joined)
    return sorted({min(group): sorted(group) for group in group_of.values()}.values())


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


def _small(pixels: Pixels) -> NDArray[np.float64]:
    return np.asarray(Image.fromarray(pixels).resize((GRID, GRID), Image.Resampling.BOX), np.float64)


def _alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The correlation of two images [GRID, GRID, 3] or of one mirrored; 0 where more than their brightness differs."""
    means = [values.mean((0, 1)) for values in (a, b)]
    norms = [np.linalg.norm(values - mean) for values, mean in zip((a, b), means, strict=True)]
    if min(norms) <= GRID:  # of one colour
        return 0.0
    a, b = ((values - mean) / norm for values, mean, norm in zip((a, b), means, norms, strict=True))
    tint = (means[0] - means[0].mean()) - (means[1] - means[1].mean())
    share = np.linalg.norm(a, axis=(0, 1)) - np.linalg.norm(b, axis=(0, 1))
    if np.abs(tint).max() > TINT or np.abs(share).max() > SHARE:
        return 0.0
    return float(max((a * b).sum(), (a * b[:, ::-1]).sum()))


def repeated(captions: Sequence[str]) -> list[list[int]]:
    """Groups of repeated captions [T], largest first; case, white space and a final full stop are ignored."""
    places = defaultdict[str, list[int]](list)
    for place, caption in enumerate(captions):
        text = " ".join(caseless(caption).split())
        places[text.removesuffix(".").rstrip() or text].append(place)
    return sorted((group for group in places.values() if len(group) > 1), key=lambda group: (-len(group), group))
