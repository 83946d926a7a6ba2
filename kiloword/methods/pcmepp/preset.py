"""PCME++: images and captions are Gaussians matched by their distance. Source: arXiv:2305.18171."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kiloword.config.recipes import ModelConfig, sizes
from kiloword.config.settings import ABOVE_0, BaseSettings, only, setting
from kiloword.methods.method import Component, Method
from kiloword.methods.pcmepp.matching import WithDeterministic, matching_loss
from kiloword.methods.prolip.gaussian import GaussianSettings
from kiloword.methods.prolip.inclusion import InclusionSettings
from kiloword.methods.prolip.preset import bidirectional, included, is_gaussian, with_gaussian
from kiloword.model.heads import Head, Single, cosine_head


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
    method = matched(with_gaussian(plain, only(settings, GaussianSettings)), only(settings, Matching))
    method = included(method, InclusionSettings(image_in_text=0, masked=0, vib=settings.vib))
    return bidirectional(method) if settings.bidirectional is not False else method


def matched(method: Method, settings: Matching) -> Method:
    """Use PCME++'s loss, with its scale and bias of distances.

    Raises: ValueError for a method without Gaussians.
    """
    if not is_gaussian(method):
        raise ValueError(f"matching compares Gaussians, but {method.name} has none: add +gaussian.")

    def head(config: ModelConfig) -> Head:
        return method.head(config).rescale(settings.scale, settings.bias, distance=True)

    loss = partial(matching_loss, pseudo=settings.pseudo, reduction=settings.reduction)
    return replace(method, pair_loss=loss, head=head)


def deterministic(method: Method, settings: Deterministic) -> Method:
    """Add a loss on the means of Gaussians: PCME++ and CLIP, or ProLIP and SigLIP.

    Raises: ValueError for a method without Gaussians or with several vectors per image.
    """
    head = method.head(method.shape(sizes()["debug"]))
    if head.uncertainty is None:
        raise ValueError(f"deterministic adds a loss on the means of Gaussians, but {method.name} has no Gaussians.")
    if not isinstance(head.pooling, Single):
        raise ValueError(
            "deterministic compares one mean per image with one per text, but the pooling of "
            f"{method.name} does not give one vector per image: omit +deterministic."
        )
    loss = WithDeterministic(method.pair_loss, settings.loss, settings.weight)

    def with_auxiliary(config: ModelConfig) -> Head:
        main = method.head(config)
        if settings.loss == "softmax":
            main.deterministic = cosine_head(settings.scale or 1 / 0.07, max_scale=settings.max_scale)
        else:
            main.deterministic = cosine_head(settings.scale or 10.0, settings.bias)
        return main

    return replace(method, pair_loss=loss, head=with_auxiliary)


COMPONENTS = {
    "matching": Component("pair loss", "binary classification by the distance of Gaussians", Matching, matched),
    "deterministic": Component(
        "deterministic", "auxiliary loss on the means of Gaussians", Deterministic, deterministic
    ),
}
