"""CLIP: one vector a side, symmetric softmax. Source: arXiv:2103.00020."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword import recipes
from kiloword.heads import Head, Single
from kiloword.losses import softmax_loss
from kiloword.method import Method, Piece
from kiloword.recipes import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Settings(recipes.Settings):
    scale: float = 1 / 0.07  # initial factor of the cosine
    max_scale: float = 100.0  # upper limit while training; a larger loaded scale stays as it is


def preset(settings: Settings) -> Method:
    def head(config: ModelConfig) -> Head:  # no bias: softmax gives it no gradient
        return Head(Single(config), scale=settings.scale, max_scale=settings.max_scale)

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
        return method.head(config).rescale(settings.scale, max_scale=settings.max_scale)

    return replace(method, pair_loss=softmax_loss, head=head)


PIECES = {"softmax": Piece(slot="pair loss", summary="symmetric softmax", settings=Settings, apply=softmax)}
