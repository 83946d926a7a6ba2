"""PCME++: an image and a caption are Gaussians that match the more likely the nearer. Source: arXiv:2305.18171."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig, only, sizes
from kiloword.methods.method import Method, Piece
from kiloword.methods.pcmepp.matching import WithDeterministic, cosine_head, matching_loss
from kiloword.methods.prolip.gaussian import GaussianSettings
from kiloword.methods.prolip.inclusion import InclusionSettings
from kiloword.methods.prolip.preset import bidirectional, included, is_gaussian, with_gaussian
from kiloword.model.heads import Head, Single


@dataclass(frozen=True, kw_only=True)
class Matching(recipes.Settings):
    """How near Gaussians must be to match; the logit is -scale * CSD + bias."""

    scale: float = 5.0  # initial; learned as its logarithm, so it stays positive (the authors' code: as it is)
    bias: float = 5.0  # initial
    pseudo: float = 0.1  # weight of the loss with pseudo-positives: what is as near as one's own; 0: none
    reduction: Literal["pairs", "images"] = "pairs"  # what the loss is divided by; pairs: the authors' code


@dataclass(frozen=True, kw_only=True)
class Settings(GaussianSettings, Matching):
    vib: float = 1e-4  # weight of the divergence to N(0, 1); 0: left out; as the authors' code weighs it: 5e-5
    # words see later words too, as those of prolip; False: as the size says; None: yes, unless --init is causal
    bidirectional: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Deterministic(recipes.Settings):
    """A loss of means alone beside that of Gaussians."""

    loss: Literal["softmax", "sigmoid"] = "softmax"  # CLIP's or SigLIP's, with a scale (and bias) of its own
    weight: float = 1.0
    scale: float = 0.0  # initial factor of the cosine; 0: 1 / 0.07 of softmax, 10 of sigmoid
    max_scale: float = 100.0  # softmax: upper limit while training
    bias: float = -10.0  # sigmoid: initial


def preset(settings: Settings) -> Method:
    def head(config: ModelConfig) -> Head:
        return Head(Single(config))

    plain = Method(
        name="pcme++",
        source="arXiv:2305.18171",
        summary="Gaussians, a yes-or-no question of their distance; pseudo-positives",
        head=head,
        pair_loss=matching_loss,
    )
    made = matched(with_gaussian(plain, only(settings, GaussianSettings)), only(settings, Matching))
    made = included(made, InclusionSettings(image_in_text=0, masked=0, vib=settings.vib))
    return bidirectional(made) if settings.bidirectional is not False else made


def matched(method: Method, settings: Matching) -> Method:
    """A method with PCME++'s loss, its scale and bias of distances.

    Raises: ValueError for a method without Gaussians, a scale that is not positive, or a negative weight.
    """
    if not is_gaussian(method):
        raise ValueError(f"matching measures how far apart Gaussians are, but {method.name} has none: add +gaussian.")
    _check("scale", settings.scale, settings.scale > 0)
    _check("pseudo", settings.pseudo, settings.pseudo >= 0, "at least 0")

    def head(config: ModelConfig) -> Head:
        return method.head(config).rescale(settings.scale, settings.bias, distance=True)

    loss = partial(matching_loss, pseudo=settings.pseudo, reduction=settings.reduction)
    return replace(method, pair_loss=loss, head=head)


def deterministic(method: Method, settings: Deterministic) -> Method:
    """A method of Gaussians with a loss of their means alone beside its own: PCME++ and CLIP, or ProLIP and SigLIP.

    Raises: ValueError for a method without Gaussians, whose images have not one mean, or a weight that is no weight.
    """
    head = method.head(method.shape(sizes()["debug"]))
    if head.uncertainty is None:
        raise ValueError(f"deterministic adds a loss of means to that of Gaussians, but {method.name} has only means.")
    if not isinstance(head.pooling, Single):
        raise ValueError(
            "deterministic compares one mean an image with one a text, but the pooling of "
            f"{method.name} does not read images into one: leave +deterministic away."
        )
    _check("weight", settings.weight, settings.weight > 0)
    _check("scale", settings.scale, settings.scale >= 0, "at least 0")
    loss = WithDeterministic(method.pair_loss, settings.loss, settings.weight)
    return replace(method, pair_loss=loss, head=lambda config: _beside(method.head(config), settings))


def _beside(head: Head, settings: Deterministic) -> Head:
    """A head with another one in it."""
    if settings.loss == "softmax":
        head.deterministic = cosine_head(settings.scale or 1 / 0.07, max_scale=settings.max_scale)
    else:
        head.deterministic = cosine_head(settings.scale or 10.0, settings.bias)
    return head


def _check(name: str, value: float, fits: bool, expected: str = "above 0") -> None:
    if not (fits and math.isfinite(value)):
        raise ValueError(f"{name} is {value:g}: expected a number {expected}.")


PIECES = {
    "matching": Piece(
        slot="pair loss", summary="a yes-or-no question of the distance of Gaussians",
        settings=Matching, apply=matched,
    ),
    "deterministic": Piece(
        slot="deterministic", summary="beside the loss of Gaussians one of their means alone",
        settings=Deterministic, apply=deterministic,
    ),
}  # fmt: skip
