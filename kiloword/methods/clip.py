"""CLIP: one vector a side, symmetric softmax. Source: arXiv:2103.00020."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig
from kiloword.losses.pairs import softmax_loss
from kiloword.methods.method import Method, Piece
from kiloword.model.heads import Head, Single


@dataclass(frozen=True, kw_only=True)
class Settings(recipes.Settings):
    scale: float = 1 / 0.07  # initial factor of the cosine
    max_scale: float = 100.0  # upper limit while training; a larger loaded scale stays as it is
    fixed_scale: bool = False  # the scale does not learn, so that ablations differ in nothing else


def preset(settings: Settings) -> Method:
    def head(config: ModelConfig) -> Head:
        return scaled(Head(Single(config)), settings)

    return Method(
        name="clip",
        source="arXiv:2103.00020",
        summary="one vector a side, symmetric softmax",
        head=head,
        pair_loss=softmax_loss,
    )


def softmax(method: Method, settings: Settings) -> Method:
    """A method with CLIP's loss, scale and limit; several positives share a row's and a column's probability."""

    def head(config: ModelConfig) -> Head:
        return scaled(method.head(config), settings)

    return replace(method, pair_loss=softmax_loss, head=head)


def scaled(head: Head, settings: Settings) -> Head:
    """The head with CLIP's scale and limit, and no bias, to which softmax gives no gradient."""
    head.rescale(settings.scale, max_scale=settings.max_scale)
    head.log_scale.requires_grad_(not settings.fixed_scale)
    return head


PIECES = {"softmax": Piece(slot="pair loss", summary="symmetric softmax", settings=Settings, apply=softmax)}
