"""Page data of the task `uncertainty`: numbers and images, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.data.images.augmentation import fit
from kiloword.data.images.decode import decode
from kiloword.evaluation.calibration import Bins
from kiloword.evaluation.uncertainty.data import EncodedData, Levelled, different
from kiloword.evaluation.uncertainty.inclusion import InclusionAnswers
from kiloword.explain.plane import project
from kiloword.randomness import key
from kiloword.report.images import Pixels
from kiloword.types import Features

SHOWN = 12  # most and least certain images, and texts
LONG = 90  # percentile of length from which texts are long
PAIRS = 3  # of each kind, in the gallery of pairs
PLANE = 4  # images in the plane
CAPTIONS = 4  # captions of each of these
KINDS = {
    "Image and text certain": (-1, -1),
    "Image certain, text uncertain": (-1, 1),
    "Image uncertain, text certain": (1, -1),
    "Image and text uncertain": (1, 1),
}
SIDE = 128  # largest side of an image on the page, in pixels


@dataclass
class Findings:
    """Results of `run` besides its metrics."""

    data: EncodedData
    matched: Tensor | None = None  # [T] H(image in caption) of matched pairs
    distance: Tensor | None = None  # [T] CSD of matched pairs
    true_of: Tensor | None = None  # [N] images that each different caption is true of
    levelled: Levelled | None = None
    answers: dict[str, InclusionAnswers] = field(default_factory=dict)
    exact: bool = False  # ground truth of the answers is exact
    bins: dict[str, Bins] = field(default_factory=dict)


@dataclass
class CertaintyPair:
    """An image and its caption."""

    image: Pixels
    caption: str
    distance: float  # CSD
    image_uncertainty: float
    text_uncertainty: float


@dataclass
class Plane:
    """A few images and captions in the plane of their means' two largest principal components."""

    images: list[Pixels]  # [n]
    of: list[int]  # [m] of each point, an image
    texts: list[str | None]  # [m], None for images
    means: Tensor  # [m, 2]
    spread: Tensor  # [m, 2, 2] covariances
    share: Tensor  # [2] of the means' variance


def drawn(findings: Findings) -> dict[str, Any]:
    """Page data by name; equal captions count once."""
    data = findings.data
    first = different(data.captions)
    texts, uncertainties = [data.captions[i] for i in first], data.text_uncertainty[first]
    ranked = [(texts[i], float(uncertainties[i])) for i in uncertainties.argsort(stable=True).tolist()]
    words = torch.tensor([len(text.split()) for text in texts])
    long = np.percentile(words, LONG) if texts else 0
    images = data.image_uncertainty.argsort(stable=True).tolist()
    return {
        "image": data.image_uncertainty,
        "text": data.text_uncertainty,
        "own": data.image_uncertainty[data.image],  # of each caption's image
        "words": words,
        "different": uncertainties,
        "certain": _images(data, images[:SHOWN]),
        "uncertain": _images(data, images[::-1][:SHOWN]),
        "certain texts": ranked[:SHOWN],
        "uncertain texts": ranked[::-1][:SHOWN],
        "long texts": [one for one in ranked[::-1] if len(one[0].split()) >= long][:SHOWN],
        "plane": plane(data),
        "pairs": {} if findings.distance is None else pairs(data, findings.distance),
        **{name: value for name, value in vars(findings).items() if name not in ("data", "distance")},
    }


def pairs(data: EncodedData, distance: Tensor) -> dict[str, list[CertaintyPair]]:
    """At most PAIRS pairs by kind: those nearest to each corner of the ranks of both uncertainties, of unique images.

    Args: distance: CSD of every caption with its image, [T]. Source: arXiv:2410.18857, Fig. C.1.
    """
    image, text = data.image_uncertainty[data.image], data.text_uncertainty
    image_rank, text_rank = (values.argsort(stable=True).argsort().double() for values in (image, text))
    by_kind: dict[str, list[CertaintyPair]] = {}
    for kind, (sign, text_sign) in KINDS.items():
        order = (sign * image_rank + text_sign * text_rank).argsort(descending=True, stable=True).tolist()
        first = [order[n] for n in different([int(data.image[t]) for t in order])][:PAIRS]
        by_kind[kind] = [
            CertaintyPair(
                pixels(data, int(data.image[t])), data.captions[t], float(distance[t]), float(image[t]), float(text[t])
            )
            for t in first
        ]
    return by_kind


def _images(data: EncodedData, which: Sequence[int]) -> list[tuple[Pixels, float]]:
    return [(pixels(data, i), float(data.image_uncertainty[i])) for i in which]


def pixels(data: EncodedData, image: int) -> Pixels:
    """The centre of an image, at most SIDE pixels a side: uint8 [H, W, 3]."""
    whole = decode(data.source.record(data.rows[image]).image)
    square: Pixels = fit(Image.fromarray(whole), min(SIDE, *whole.shape[:2])).permute(1, 2, 0).numpy()
    return square


def plane(data: EncodedData) -> Plane | None:
    """A few images and captions, the same for every model; None below two points."""
    if data.texts is None:
        return None
    owners = sorted(set(data.image.tolist()))
    chosen = sorted(owners, key=lambda i: key(data.source.fingerprint, "plane", data.rows[i]))[:PLANE]
    captions = [(n, t) for n, i in enumerate(chosen) for t in (data.image == i).nonzero()[:CAPTIONS, 0].tolist()]
    parts = [_rows(data.images, chosen), _rows(data.texts, [t for _, t in captions])]
    projection = project(parts)
    assert projection.spread is not None, "the task refuses models without Gaussians"
    return Plane(
        [pixels(data, i) for i in chosen],
        [*range(len(chosen)), *(n for n, _ in captions)],
        [None] * len(chosen) + [data.captions[t] for _, t in captions],
        projection.means,
        projection.spread,
        projection.share,
    )


def _rows(features: Features, which: Sequence[int]) -> Features:
    return {name: features[name][list(which)] for name in ("vec", "log_var")}
