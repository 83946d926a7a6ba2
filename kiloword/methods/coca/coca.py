"""CoCa: contrastive loss and captioning. Source: arXiv:2205.01917; open_clip's code; baseline of arXiv:2401.02137."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import only, setting
from kiloword.methods import clip
from kiloword.methods.coca.captioning import CaptionSettings, captioned
from kiloword.methods.method import Component, Method


@dataclass(frozen=True, kw_only=True)
class Settings(CaptionSettings, clip.Settings):
    """Captioning beside CLIP's pair loss."""

    contrast_weight: float = setting(
        1.0, "weight of the pair loss; 0 disables it (attentive masks then need --init)", 0
    )
    class_token: bool = setting(True, "append a class token to texts for the pair loss, where text_pool is last")


def preset(settings: Settings) -> Method:
    method = replace(clip.preset(only(settings, clip.Settings)), pair_weight=settings.contrast_weight)
    method = ended(method) if settings.class_token else method
    return replace(
        captioned(method, only(settings, CaptionSettings)),
        name="coca",
        source="arXiv:2205.01917",
        summary="CLIP with a text decoder that also predicts captions",
    )


def ended(method: Method) -> Method:
    """Append a class token to texts where text_pool is last; the end token is for the decoder."""

    def shape(config: ModelConfig) -> ModelConfig:
        shaped = method.shape(config)
        text = shaped.text
        if shaped.head.text_pool != "last" or "cls" in text.extra_tokens:
            return shaped
        return replace(shaped, text=replace(text, extra_tokens=(*text.extra_tokens, "cls")))

    return replace(method, shape=shape)


COMPONENTS = {
    "caption": Component(
        "terms", "a text decoder that predicts captions (needs a causal text tower)", CaptionSettings, captioned
    ),
}
