"""ProLIP: images and captions are Gaussians; general ones include specific ones. Source: arXiv:2410.18857."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import ModelConfig, sizes
from kiloword.config.settings import only, setting
from kiloword.methods import siglip
from kiloword.methods.method import Component, Method
from kiloword.methods.prolip import gaussian
from kiloword.methods.prolip.gaussian import Gaussian, GaussianSettings
from kiloword.methods.prolip.inclusion import InclusionSettings, terms
from kiloword.model.heads import Head


@dataclass(frozen=True, kw_only=True)
class Settings(GaussianSettings, InclusionSettings, siglip.Settings):
    """Gaussians, inclusion losses, and SigLIP's logit before training."""

    bidirectional: bool | None = setting(None, "text tower without causal mask; None: True unless --init is causal")


def preset(settings: Settings) -> Method:
    base = siglip.preset(only(settings, siglip.Settings))
    method = included(with_gaussian(base, only(settings, GaussianSettings)), only(settings, InclusionSettings))
    return replace(
        bidirectional(method) if settings.bidirectional is not False else method,
        name="prolip",
        source="arXiv:2410.18857",
        summary="Gaussians, sigmoid over all pairs; general includes specific",
    )


def bidirectional(method: Method) -> Method:
    """Use a text tower without causal mask."""

    def shape(config: ModelConfig) -> ModelConfig:
        return method.shape(replace(config, text=replace(config.text, causal=False)))

    return replace(method, shape=shape)


def with_gaussian(method: Method, settings: GaussianSettings) -> Method:
    """Make features Gaussians: half of each variance sum is subtracted from the score (PPCL, eq. 2, with sigmoid).

    Raises: ValueError for a method that has an uncertainty already, or a variance out of range.
    """
    if is_gaussian(method):
        raise ValueError(f"{method.name} has Gaussians already: omit +gaussian.")
    if method.head(method.shape(sizes()["debug"])).inner():
        raise ValueError(f"{method.name} scores pairs in several ways, of which gaussian would change one: omit it.")

    def head(config: ModelConfig) -> Head:
        gaussian_head = method.head(config)
        gaussian_head.uncertainty = Gaussian(config, settings)
        return gaussian_head

    return replace(method, head=head, shape=lambda config: gaussian.tokens(method.shape(config), settings))


def included(method: Method, settings: InclusionSettings) -> Method:
    """Add the inclusion terms and the information bottleneck.

    Raises: ValueError for a method without Gaussians, or with inclusion terms already.
    """
    if not is_gaussian(method):
        raise ValueError(f"inclusion compares Gaussians, but {method.name} has none: add +gaussian.")
    if "image_in_text" in method.terms:
        raise ValueError(f"{method.name} has inclusion terms already: omit +inclusion, they are in its settings.")
    return replace(method, terms={**method.terms, **terms(settings)})


def ppcl(method: Method, settings: siglip.Settings) -> Method:
    """Use SigLIP's loss, scale and bias over Gaussians (eq. 2).

    Raises: ValueError for a method without Gaussians.
    """
    if not is_gaussian(method):
        raise ValueError(f"ppcl compares Gaussians, but {method.name} has none: add +gaussian, or use +sigmoid.")
    return siglip.sigmoid(method, settings)


def is_gaussian(method: Method) -> bool:
    """Whether the features of a method are Gaussians."""
    return method.head(method.shape(sizes()["debug"])).uncertainty is not None


COMPONENTS = {
    "gaussian": Component(
        "uncertainty", "features are Gaussians, read from an uncertainty token", GaussianSettings, with_gaussian
    ),
    "ppcl": Component("pair loss", "binary classification of all pairs of Gaussians", siglip.Settings, ppcl),
    "inclusion": Component(
        "terms", "general ones include specific ones (needs Gaussians)", InclusionSettings, included
    ),
}
