"""Llip: the image features depend on the text that they are compared with. Source: arXiv:2405.00740."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import ModelConfig, sizes
from kiloword.config.settings import only
from kiloword.methods import siglip
from kiloword.methods.llip import pooling
from kiloword.methods.llip.pooling import ContextualSettings
from kiloword.methods.method import Component, Method
from kiloword.model.heads import Head, Single


@dataclass(frozen=True, kw_only=True)
class Settings(ContextualSettings, siglip.Settings):
    """Mixture tokens and their pooling, and the logit before training."""


def preset(settings: Settings) -> Method:
    return replace(
        mixed(siglip.preset(only(settings, siglip.Settings)), only(settings, ContextualSettings)),
        name="llip",
        source="arXiv:2405.00740",
        summary="tokens mixed for every text, sigmoid over all pairs",
    )


def mixed(method: Method, settings: ContextualSettings) -> Method:
    """Replace the pooling of a method by mixture tokens and theirs; scale, bias and uncertainty stay.

    Raises: ValueError for a method that does not pool each image and each text into one vector.
    """

    def before(config: ModelConfig) -> Head:  # the replaced pooling may need the class token, which is gone
        return method.head(replace(config, head=replace(config.head, image_pool="mean")))

    if type(before(method.shape(sizes()["debug"])).pooling) is not Single:
        raise ValueError(f"{method.name} has a pooling that contextual cannot replace: choose one of them.")

    def head(config: ModelConfig) -> Head:
        contextual = before(config)
        contextual.pooling = pooling.pooling(config, settings)
        return contextual

    return replace(method, head=head, shape=lambda config: pooling.tokens(method.shape(config), settings))


COMPONENTS = {
    "contextual": Component("pooling", "mixture tokens, mixed separately for every text", ContextualSettings, mixed)
}
