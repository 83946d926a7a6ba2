"""Near-duplicate images, by features and then by pixels; captions that repeat."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.data.classes.names import caseless
from kiloword.model.encoding import chunks
from kiloword.report.blocks import Pixels
from kiloword.terminal.progress import track
from kiloword.types import BadSample

NEIGHBOURS = 4  # of each image, by features, that may be the same image
GRID = 24  # pixels of a side at which images are compared
ALIKE = 0.9  # correlation of the colours of two such images, or of one mirrored, from which they are the same
SHARE, TINT = 0.1, 16.0  # largest differences of a channel: in its share of the contrast, and of mean colours (of 255)


def near_duplicates(vectors: Tensor, look: Callable[[int], Pixels]) -> list[tuple[int, int, float]]:
    """Images that duplicate an earlier one: the first image of their group, the image, and the correlation of colours.

    Images with equal pixels are duplicates. Other candidates are each image's nearest ones by features [I, D] of unit
    norm; colours decide, since to a model that was trained on few images many scenes look alike. A crop that omits much
    is not found. Args: look: the pixels of an image; BadSample where it cannot be read.
    """
    first, small = dict[tuple[bytes, tuple[int, ...]], int](), dict[int, Pixels]()
    group_of, best = dict[int, set[int]](), dict[int, float]()

    def join(i: int, j: int, alike: float) -> None:
        joined = group_of.get(i, {i}) | group_of.get(j, {j})
        group_of.update(dict.fromkeys(joined, joined))
        best.setdefault(i, alike)
        best.setdefault(j, alike)

    for image in track(range(len(vectors)), "pixels", "images", len(vectors)):
        try:
            pixels = look(image)
        except BadSample:
            continue
        i = first.setdefault((hashlib.blake2b(pixels.tobytes()).digest(), pixels.shape), image)
        if i == image:
            small[image] = np.asarray(Image.fromarray(pixels).resize((GRID, GRID), Image.Resampling.BOX))
        else:
            join(i, image, 1.0)
    different = torch.tensor(list(small), dtype=torch.int64)
    vectors, cosine_of = vectors[different], dict[tuple[int, int], float]()
    for part in chunks(len(vectors), 1024):
        cosines = vectors[part] @ vectors.T
        cosines[torch.arange(len(cosines)), torch.arange(part.start, part.stop)] = -2
        nearest = cosines.topk(min(NEIGHBOURS, len(vectors) - 1))
        pairs = (
            torch.stack([different[part, None].expand_as(nearest.indices), different[nearest.indices]]).sort(0).values
        )
        cosine_of |= zip(map(tuple, pairs.flatten(1).T.tolist()), nearest.values.flatten().tolist(), strict=True)
    for i, j in sorted(cosine_of, key=lambda pair: (-cosine_of[pair], pair)):
        if (alike := _alike(small[i], small[j])) >= ALIKE:
            join(i, j, alike)
    found = sorted((min(group), image, best[image]) for image, group in group_of.items())
    return [one for one in found if one[0] != one[1]]


def _alike(*images: Pixels) -> float:
    """The correlation of two images [GRID, GRID, 3] or of one mirrored; 0 where more than their brightness differs."""
    values = np.stack(images).astype(np.float64)
    means = values.mean((1, 2))  # [2, 3]
    a, b = values = values - means[:, None, None]
    norms = np.linalg.norm(values.reshape(2, -1), axis=1)
    if norms.min() <= GRID:  # of one colour
        return 0.0
    a, b = a / norms[0], b / norms[1]
    tint = means - means.mean(1, keepdims=True)
    share = np.linalg.norm(a, axis=(0, 1)) - np.linalg.norm(b, axis=(0, 1))
    if np.abs(tint[0] - tint[1]).max() > TINT or np.abs(share).max() > SHARE:
        return 0.0
    return float(max((a * b).sum(), (a * b[:, ::-1]).sum()))


def repeated(captions: Sequence[str]) -> list[list[int]]:
    """Groups of repeated captions [T], largest first; case, white space and a final full stop are ignored."""
    places = defaultdict[str, list[int]](list)
    for place, caption in enumerate(captions):
        text = " ".join(caseless(caption).split())
        places[text.removesuffix(".").rstrip() or text].append(place)
    return sorted((group for group in places.values() if len(group) > 1), key=lambda group: (-len(group), group))
