"""ProLIP: an image and a caption are Gaussians, and the general includes the specific. Source: arXiv:2410.18857."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import ModelConfig, only, sizes
from kiloword.methods import siglip
from kiloword.methods.method import Method, Piece
from kiloword.methods.prolip import gaussian
from kiloword.methods.prolip.gaussian import Gaussian, GaussianSettings
from kiloword.methods.prolip.inclusion import InclusionSettings, terms
from kiloword.model.heads import Head


@dataclass(frozen=True, kw_only=True)
class Settings(GaussianSettings, InclusionSettings, siglip.Settings):
    # words see later words too, as in the authors' code; False: as the size says; None: yes, unless --init is causal
    bidirectional: bool | None = None


def preset(settings: Settings) -> Method:
    base = siglip.preset(only(settings, siglip.Settings))
    made = included(with_gaussian(base, only(settings, GaussianSettings)), only(settings, InclusionSettings))
    return replace(
        bidirectional(made) if settings.bidirectional is not False else made,
        name="prolip",
        source="arXiv:2410.18857",
        summary="Gaussians, sigmoid over all pairs; the general includes the specific",
    )


def bidirectional(method: Method) -> Method:
    """A method whose text tower sees later words too."""

    def shape(config: ModelConfig) -> ModelConfig:
        return method.shape(replace(config, text=replace(config.text, causal=False)))

    return replace(method, shape=shape)


def with_gaussian(method: Method, settings: GaussianSettings) -> Method:
    """A method whose features are Gaussians: its score loses half of both variance sums (PPCL, eq. 2, with sigmoid).

    Raises: ValueError for a method that has an uncertainty already, or a variance out of range.
    """
    if is_gaussian(method):
        raise ValueError(f"{method.name} has Gaussians already: leave +gaussian away.")
    if not abs(settings.log_var) <= 50:  # False for NaN
        raise ValueError(f"log_var is {settings.log_var}: expected a logarithm, -50 to 50.")

    def head(config: ModelConfig) -> Head:
        made = method.head(config)
        made.uncertainty = Gaussian(config, settings)
        return made

    return replace(method, head=head, shape=lambda config: gaussian.tokens(method.shape(config)))


def included(method: Method, settings: InclusionSettings) -> Method:
    """A method with the inclusion terms and the information bottleneck.

    Raises: ValueError for a method without Gaussians, or with inclusion terms already.
    """
    if not is_gaussian(method):
        raise ValueError(f"inclusion compares Gaussians, but {method.name} has none: add +gaussian.")
    if "image_in_text" in method.terms:
        raise ValueError(f"{method.name} has inclusion terms already: leave +inclusion away, they are in its settings.")
    return replace(method, terms={**method.terms, **terms(settings)})


def ppcl(method: Method, settings: siglip.Settings) -> Method:
    """A method with SigLIP's loss, scale and bias over Gaussians (eq. 2).

    Raises: ValueError for a method without Gaussians.
    """
    if not is_gaussian(method):
        raise ValueError(f"ppcl compares Gaussians, but {method.name} has none: add +gaussian, or take +sigmoid.")
    return siglip.sigmoid(method, settings)


def is_gaussian(method: Method) -> bool:
    """Whether a method's features are Gaussians."""
    return method.head(method.shape(sizes()["debug"])).uncertainty is not None


PIECES = {
    "gaussian": Piece(
        slot="uncertainty", summary="features are Gaussians, read from an uncertainty token",
        settings=GaussianSettings, apply=with_gaussian,
    ),
    "ppcl": Piece(
        slot="pair loss", summary="a yes-or-no question a pair of Gaussians",
        settings=siglip.Settings, apply=ppcl,
    ),
    "inclusion": Piece(
        slot="terms", summary="the general includes the specific (needs Gaussians)",
        settings=InclusionSettings, apply=included,
    ),
}  # fmt: skip
