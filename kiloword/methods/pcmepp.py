"""PCME++: images and captions are Gaussians matched by their distance. Source: arXiv:2305.18171."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.settings import ABOVE_0, BaseSettings, setting
from kiloword.distributed.collectives import extreme_over_ranks
from kiloword.losses.pairs import sigmoid_loss, softmax_loss, summed, weighted
from kiloword.methods.method import Component, Method
from kiloword.methods.prolip.gaussian import GaussianSettings
from kiloword.methods.prolip.inclusion import InclusionSettings
from kiloword.methods.prolip.preset import bidirectional, included, with_gaussian
from kiloword.model.heads import Head, Pooling, Scale
from kiloword.types import PairBlocks, PairLoss, Pairs, Positives, Total

ROUNDING = 1e3  # margin in machine epsilons: ties of equal captions do not depend on the number of ranks
MEANS = "deterministic"  # the head of the auxiliary loss: the cosine of means


@dataclass(frozen=True, kw_only=True)
class Matching(BaseSettings):
    """Logit of a pair: -scale * CSD + bias."""

    scale: float = setting(
        5.0,
        "initial scale; its logarithm is trained (the authors train the scale itself)",
        ABOVE_0,
        initial="head.log_scale",
    )
    bias: float = setting(5.0, "initial bias", initial="head.bias")
    pseudo: float = setting(0.1, "weight of the loss with pseudo-positives (as close as annotated pairs); 0: off", 0)
    reduction: Literal["pairs", "images"] = setting("pairs", "the loss is a mean over pairs (authors' code) or images")


@dataclass(frozen=True, kw_only=True)
class Settings(GaussianSettings, Matching):
    """Gaussians, the matching loss, and the divergence to the prior."""

    vib: float = setting(1e-4, "weight of the divergence to N(0, 1); 0: off; 5e-5 in the authors' code", 0)
    bidirectional: bool | None = setting(None, "text tower without causal mask; None: True unless --init is causal")


@dataclass(frozen=True, kw_only=True)
class Deterministic(BaseSettings):
    """An auxiliary loss on the means of Gaussians."""

    loss: Literal["softmax", "sigmoid"] = setting("softmax", "CLIP's or SigLIP's, with separate scale (and bias)")
    weight: float = setting(1.0, "weight of the auxiliary loss", ABOVE_0)
    scale: float = setting(0.0, "initial scale of the cosine; 0: 1 / 0.07 for softmax, 10 for sigmoid", 0)
    max_scale: float = setting(100.0, "softmax: upper limit in training")
    bias: float = setting(-10.0, "sigmoid: initial bias")


def preset(settings: Settings) -> Method:
    """Gaussians on both sides, the matching loss and the divergence to the prior."""
    plain = Method(
        name="pcme++",
        source="arXiv:2305.18171",
        summary="Gaussians, sigmoid over their distances; pseudo-positives",
        pair_loss=matching_loss,
    )
    method = matched(with_gaussian(plain, settings), settings)
    method = included(method, InclusionSettings(image_in_text=0, masked=0, vib=settings.vib))
    return bidirectional(method) if settings.bidirectional is not False else method


def matched(method: Method, settings: Matching) -> Method:
    """Use PCME++'s loss, with its scale and bias of distances."""
    loss = partial(matching_loss, pseudo=settings.pseudo, reduction=settings.reduction)
    return replace(method, pair_loss=loss, scale=Scale(settings.scale, settings.bias, distance=True))


def deterministic(method: Method, settings: Deterministic) -> Method:
    """Add a loss on the means of Gaussians: PCME++ and CLIP, or ProLIP and SigLIP (arXiv:2410.18857, table C.3).

    Raises: ValueError for a method with several vectors per image.
    """
    if not method.pooling.kind.one_vector:
        raise ValueError(
            "deterministic compares one mean per image with one per text, but the pooling of "
            f"{method.name} does not give one vector per image: omit +deterministic."
        )
    of_means: PairLoss = softmax_loss if settings.loss == "softmax" else sigmoid_loss
    if settings.loss == "softmax":
        scale = Scale(settings.scale or 1 / 0.07, limit=settings.max_scale)
    else:
        scale = Scale(settings.scale or 10.0, settings.bias)

    def with_means(pairs: PairBlocks, positives: Positives) -> Total:
        return weighted(positives, (1.0, pairs, method.pair_loss), (settings.weight, pairs.beside(MEANS), of_means))

    heads = (*method.further, lambda config, score: {MEANS: Head(Pooling(), scale=scale)})
    return replace(method, pair_loss=with_means, further=heads)


def matching_loss(
    pairs: PairBlocks, positives: Positives, pseudo: float = 0.1, reduction: Literal["pairs", "images"] = "pairs"
) -> Total:
    """PCME++: binary classification of every pair with logit -a CSD + b; mean over all pairs, or sum per image.

    A second loss of weight `pseudo` adds pseudo-positives, in the mean of two directions: texts at least as close to
    an image as the farthest of its captions, and images at least as close to a text as its own image. Their target is
    1; the selection has no gradient. The authors' code sums both directions, hence twice this loss, and compares with
    the first caption of an image. Source: arXiv:2305.18171, eq. 2 to 4.

    Args: pseudo: weight of the loss with pseudo-positives, 0: off; reduction: what the sum is divided by.
    """
    nearest = _thresholds(pairs) if pseudo else None

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        z, y = block.logits, positives(block)
        target = y
        if nearest is not None:
            of_image, of_text = (z >= nearest[0][rows, None]), (z >= nearest[1][columns])
            target = y + 0.5 * pseudo * (y.maximum(of_image.to(y)) + y.maximum(of_text.to(y)))
        values = (1 + pseudo) * F.softplus(z) - target * z
        return values.sum(1), (1 + pseudo) * z.sigmoid() - target

    return summed(pairs, loss, pairs.shape[0] * (pairs.shape[1] if reduction == "pairs" else 1))


def _thresholds(pairs: PairBlocks) -> tuple[Tensor, Tensor]:
    """Least logit of the annotated pairs of each image [I] and, over all ranks, each text [T]; infinite without any."""
    of_image, of_text = (pairs.rows.new_full((size,), torch.inf) for size in pairs.shape)
    for rows, columns in pairs.blocks():
        block = pairs.block(rows, columns)
        annotated = block.logits.detach().masked_fill(~block.annotated, torch.inf)
        of_image[rows] = of_image[rows].minimum(annotated.amin(1))
        of_text[columns] = of_text[columns].minimum(annotated.amin(0))
    margin = ROUNDING * torch.finfo(of_image.dtype).eps
    return of_image - margin, extreme_over_ranks(of_text, "least") - margin


COMPONENTS = {
    "matching": Component(
        "pair_loss", "binary classification by the distance of Gaussians", Matching, matched, gaussians=True
    ),
    "deterministic": Component(
        "further", "auxiliary loss on the means of Gaussians", Deterministic, deterministic, gaussians=True
    ),
}
