"""ProLIP: images and captions are Gaussians; general ones include specific ones. Source: arXiv:2410.18857."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.settings import setting
from kiloword.methods import siglip
from kiloword.methods.method import Component, Method, Part
from kiloword.methods.prolip import inclusion
from kiloword.methods.prolip.gaussian import Gaussian, GaussianSettings
from kiloword.methods.prolip.inclusion import InclusionSettings


@dataclass(frozen=True, kw_only=True)
class Settings(GaussianSettings, InclusionSettings, siglip.Settings):
    """Gaussians, inclusion losses, and SigLIP's logit before training."""

    bidirectional: bool | None = setting(None, "text tower without causal mask; None: True unless --init is causal")


def preset(settings: Settings) -> Method:
    method = included(with_gaussian(siglip.preset(settings), settings), settings)
    return replace(
        bidirectional(method) if settings.bidirectional is not False else method,
        name="prolip",
        source="arXiv:2410.18857",
        summary="Gaussians, sigmoid over all pairs; general includes specific",
    )


def bidirectional(method: Method) -> Method:
    """Use a text tower without causal mask."""
    return replace(method, towers=lambda c: method.towers(replace(c, text=replace(c.text, causal=False))))


def with_gaussian(method: Method, settings: GaussianSettings) -> Method:
    """Make features Gaussians: half of each variance sum is subtracted from the score (PPCL, eq. 2, with sigmoid).

    Raises: ValueError for a method that has an uncertainty already, or several scores.
    """
    if method.uncertainty is not None:
        raise ValueError(f"{method.name} has Gaussians already: omit +gaussian.")
    if method.several_scores:
        raise ValueError(f"{method.name} scores pairs in several ways, of which gaussian would change one: omit it.")
    return replace(method, uncertainty=Part(Gaussian, settings))


def included(method: Method, settings: InclusionSettings) -> Method:
    """Add the inclusion terms and the information bottleneck, except those of weight 0.

    Raises: ValueError for a method with inclusion terms already.
    """
    every = {
        "image_in_text": (settings.image_in_text, inclusion.ImageInText),
        "masked_image": (settings.masked, inclusion.MaskedImage),
        "masked_text": (settings.masked, inclusion.MaskedText),
        "spread": (settings.spread, inclusion.Spread),
        "vib_image": (settings.vib, inclusion.VibImage),
        "vib_text": (settings.vib, inclusion.VibText),
    }
    added = {name: (weight, Part(kind, settings)) for name, (weight, kind) in every.items() if weight}
    without = {name: term for name, term in method.terms.items() if not name.startswith("vib") or name not in added}
    return replace(method, terms=without).plus(terms=added)


COMPONENTS = {
    "gaussian": Component(
        "uncertainty", "features are Gaussians, read from an uncertainty token", GaussianSettings, with_gaussian
    ),
    "ppcl": Component(  # eq. 2
        "pair_loss", "binary classification of all pairs of Gaussians", siglip.Settings, siglip.sigmoid, gaussians=True
    ),
    "inclusion": Component(
        "terms", "general ones include specific ones (needs Gaussians)", InclusionSettings, included, gaussians=True
    ),
}
