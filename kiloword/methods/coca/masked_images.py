"""The masked image term: predict masked patches from the visible ones and, if guided, from the caption.

Source: arXiv:2401.02137, section 3.2 (TG-MIM), eq. 5 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from kiloword.config.recipes import DEPTH, ModelConfig
from kiloword.config.settings import ABOVE_0, BELOW_1, setting
from kiloword.methods.coca import masking
from kiloword.methods.coca.masking import Mask, MaskSettings
from kiloword.methods.method import Method
from kiloword.model.attention import Packing
from kiloword.model.blocks import take
from kiloword.model.decoder import ImageDecoder
from kiloword.model.image import unfold
from kiloword.model.model import Model
from kiloword.model.pooling import at_least_float
from kiloword.types import Batch, Encoded

EPSILON = 1e-6  # added to the variance of a patch, as in MAE (arXiv:2111.06377, its public code)


@dataclass(frozen=True, kw_only=True)
class MimSettings(MaskSettings):
    """Which patches are masked, and what they are predicted from."""

    mim_weight: float = setting(
        1.0, "weight of the masked image loss: lambda_TM", ABOVE_0, hint="; to disable it, choose a method without"
    )
    guide: Literal["text", "none"] = setting("text", "text: the decoder attends to the caption too (TG-MIM)")
    mim_mask: Mask = setting("attentive", "attentive: the patches most similar to the caption")
    mim_share: float = setting(0.5, "share of masked patches: r_h", ABOVE_0, BELOW_1)
    mim_op: Literal["token", "drop"] = setting("token", "replace masked patches by a learned token, or drop them")
    norm_pix: bool = setting(False, "normalise the target pixels of each patch by their mean and deviation")
    image_decoder_depth: int = setting(0, "layers of the image decoder; 0: as many as the text tower's", 0, DEPTH)


def masked(method: Method, settings: MimSettings) -> Method:
    """Add an image decoder and the L1 loss of the pixels of masked patches.

    Raises: ValueError for a method that has them already, or settings out of range.
    """
    if "image_decoder" in method.towers:
        raise ValueError(f"{method.name} predicts patches already: omit +mim, its settings are those of {method.name}.")

    def shape(config: ModelConfig) -> ModelConfig:
        shaped = method.shape(config)
        if shaped.image.trunk.name:
            raise ValueError(
                "masked image modelling (sycoca, +mim) reconstructs masked pixels, but the trunk "
                f"{shaped.image.trunk.name} has seen the whole image, so that its other tokens tell what is masked: "
                "omit --image-tower, or choose a method without it, such as coca."
            )
        if settings.mim_mask == "attentive":
            masking.check(shaped)
        return masking.with_token(shaped) if settings.mim_op == "token" else shaped

    def image_decoder(config: ModelConfig) -> ImageDecoder:
        depth = settings.image_decoder_depth or max(config.text.depth, 1)
        return ImageDecoder(config, depth, guided=settings.guide == "text", dropped=settings.mim_op == "drop")

    return replace(
        method,
        shape=shape,
        towers={**method.towers, "image_decoder": image_decoder},
        terms={**method.terms, "mim": (settings.mim_weight, lambda config: MaskedImages(settings, config))},
    )


class MaskedImages(nn.Module):
    """L1 between masked patches and their prediction; mean over masked patches and their pixels.

    The text tower's output and the scores are computed once per batch and shared with the caption term. The image tower
    runs once per mask: per image for random masks, per caption for attentive ones. Only masked pixels are predicted.
    """

    def __init__(self, settings: MimSettings, config: ModelConfig) -> None:
        super().__init__()
        self.settings = settings
        self.patches = masking.patches_of(config)
        self.hidden = masking.number(settings.mim_share, self.patches)
        self.by_caption = settings.guide == "text" or settings.mim_mask == "attentive"

    def count(self, batch: Batch) -> Tensor:
        rows = len(batch.texts) if self.by_caption else len(batch)
        return batch.position.new_full((), rows * self.hidden)

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        of, attentive = batch.image_of_text, self.settings.mim_mask == "attentive"
        if attentive:
            images, scored = batch.images[of], masking.scores(model, batch, encoded, self.settings)
        else:
            images, scored = batch.images, masking.noise(batch, "mim.mask", self.patches)
        hidden = masking.select(scored, self.hidden, most=True)
        tokens = masking.visible(model, images, hidden, self.settings.mim_op)
        if self.by_caption and not attentive and len(of) != len(batch):
            images, hidden, tokens = images[of], hidden[of], tokens.index_select(0, of)
        guide = (encoded.text_tokens, model.text_tower.packing(batch.texts)) if self.settings.guide == "text" else None
        predicted = predict(model, tokens, hidden, guide)
        return distance(predicted, pixels(model, images, hidden, self.settings.norm_pix)).sum()


def predict(model: Model, tokens: Tensor, hidden: Tensor, guide: tuple[Tensor, Packing] | None) -> Tensor:
    """Predicted pixels [N, m, 3 * patch^2] of masked patches; guide: packed text tokens [S, W], text n for image n."""
    decoder = model.more["image_decoder"]
    assert isinstance(decoder, ImageDecoder)
    predicted: Tensor = decoder(tokens, hidden, *(guide or (None, None)))
    return predicted


def pixels(model: Model, images: Tensor, hidden: Tensor, norm_pix: bool) -> Tensor:
    """The targets, normalised pixels of masked patches: [N, m, 3 * patch^2], at least fp32."""
    patch = model.config.image.patch
    raw = take(unfold(images, patch), hidden).view(*hidden.shape, 3, patch, patch)
    target = at_least_float(model.normalise(raw)).flatten(2)
    if not norm_pix:
        return target
    deviation = target.var(-1, keepdim=True) + EPSILON
    return (target - target.mean(-1, keepdim=True)) / deviation.sqrt()


def distance(predicted: Tensor, target: Tensor) -> Tensor:
    """L1 of each masked patch, mean over its pixels: [N, m]."""
    return (at_least_float(predicted) - target).abs().mean(-1)
