"""CoCa: contrast and captions. Source: arXiv:2205.01917; open_clip's code; the baseline of arXiv:2401.02137."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kiloword.config.recipes import ModelConfig, only
from kiloword.methods import clip
from kiloword.methods.coca.captioning import CaptionSettings, captioned
from kiloword.methods.method import Method, Piece


@dataclass(frozen=True, kw_only=True)
class Settings(CaptionSettings, clip.Settings):
    # of the pair loss; 0: captions alone; of the head only what they look through learns; attentive masks want --init
    contrast_weight: float = 1.0
    class_token: bool = True  # texts end in a class token for the pair loss, where their last token is read


def preset(settings: Settings) -> Method:
    method = contrasted(clip.preset(only(settings, clip.Settings)), settings.contrast_weight)
    method = ended(method) if settings.class_token else method
    return replace(
        captioned(method, only(settings, CaptionSettings)),
        name="coca",
        source="arXiv:2205.01917",
        summary="CLIP whose text decoder also writes the captions",
    )


def contrasted(method: Method, weight: float) -> Method:
    """A method whose pair loss has a weight. Raises: ValueError for one below 0."""
    if not 0 <= weight < math.inf:
        raise ValueError(f"contrast_weight is {weight}: expected a weight of 0 or more.")
    return replace(method, pair_weight=weight)


def ended(method: Method) -> Method:
    """A method whose texts end in a class token, where their last token is read: the end token is for the decoder."""

    def shape(config: ModelConfig) -> ModelConfig:
        shaped = method.shape(config)
        text = shaped.text
        if shaped.head.text_pool != "last" or "cls" in text.extra_tokens:
            return shaped
        return replace(shaped, text=replace(text, extra_tokens=(*text.extra_tokens, "cls")))

    return replace(method, shape=shape)


PIECES = {
    "caption": Piece(
        slot="terms", summary="a text decoder that writes the captions (needs a causal text tower)",
        settings=CaptionSettings, apply=captioned,
    ),
}  # fmt: skip
