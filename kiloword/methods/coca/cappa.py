"""CapPa: captions alone, most of them predicted all at once from the image. Source: arXiv:2306.07915."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import ABOVE_0, setting
from kiloword.methods.coca import coca
from kiloword.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Settings(coca.Settings):
    """CoCa's settings with CapPa's values; 0 as `parallel` is its Cap."""

    caption_weight: float = setting(1.0, "weight of the caption loss", ABOVE_0)
    contrast_weight: float = setting(0.0, "weight of a pair loss, which the paper has not", 0)
    class_token: bool = setting(False, "append a class token to texts for the pair loss, where text_pool is last")
    parallel: float = setting(
        0.75, "share of images whose captions are predicted all at once, from mask tokens; others word by word", 0, 1
    )


def preset(settings: Settings) -> Method:
    """CoCa without its pair loss, and images pooled by the mean of their tokens in place of a class token."""
    method = coca.preset(settings)

    def towers(config: ModelConfig) -> ModelConfig:
        shaped = method.towers(config)
        # as in big_vision's evaluations: no loss makes a class token the vector of its image
        pool = "mean" if shaped.head.image_pool == "cls" and not settings.contrast_weight else shaped.head.image_pool
        return replace(shaped, head=replace(shaped.head, image_pool=pool))

    return replace(
        method,
        towers=towers,
        name="cappa",
        source="arXiv:2306.07915",
        summary="captions alone, most of them predicted in parallel (no retrieval)",
    )
