"""SyCoCa: captioning and text-guided masked image modelling, both with attentive masks. Source: arXiv:2401.02137.

Masked image modelling (section 3.2, TG-MIM, eq. 5 and 6) predicts masked patches from the visible ones and, if guided,
from the caption; above a frozen trunk, the trunk's tokens at masked places. The rows of the paper's table 5 are `clip`;
`coca`; `coca --settings.caption-mask attentive`; and this preset with `--settings.guide none|text --settings.mim-mask
random|attentive`. Table 6: `caption_share` and `mim_share`; table 7: `mim_weight`. The paper's initial weights:
`--model.init-std 0.01`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kiloword.config.recipes import DEPTH, ModelConfig
from kiloword.config.settings import ABOVE_0, BELOW_1, setting
from kiloword.methods.coca import coca, masking
from kiloword.methods.coca.masking import Mask, MaskSettings
from kiloword.methods.method import Component, Method, Part, Term
from kiloword.model.blocks import take
from kiloword.model.decoder import ImageDecoder
from kiloword.model.image import grid, unfold
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
    mim_target: Literal["pixels", "tokens"] = setting(
        "pixels",
        "pixels of masked patches; tokens: those of a frozen trunk (--image-tower), each less its mean, over "
        "its deviation",
    )
    norm_pix: bool = setting(False, "normalise the target pixels of each patch by their mean and deviation")
    image_decoder_depth: int = setting(0, "layers of the image decoder; 0: as many as the text tower's", 0, DEPTH)


@dataclass(frozen=True, kw_only=True)
class Settings(MimSettings, coca.Settings):
    """CoCa's settings, those of masked images, and which patches captions see."""

    caption_mask: Literal["none", "attentive", "random"] = setting(
        "attentive", "patches hidden from the text decoder; attentive: those least similar to the caption"
    )


def preset(settings: Settings) -> Method:
    return replace(
        masked(coca.preset(settings), settings),
        name="sycoca",
        source="arXiv:2401.02137",
        summary="CoCa that also reconstructs patches masked by the caption",
    )


def masked(method: Method, settings: MimSettings) -> Method:
    """Add an image decoder and the L1 loss of the pixels, or the trunk's tokens, of masked patches.

    Raises: ValueError for a method that has them already, or settings out of range.
    """
    if settings.norm_pix and settings.mim_target == "tokens":
        raise ValueError("norm_pix is about pixels; tokens are normalised always: omit it, or mim_target tokens.")
    weight = masking.in_window(settings.mim_weight, settings)

    def image_decoder(config: ModelConfig) -> ImageDecoder:
        depth = settings.image_decoder_depth or max(config.text.depth, 1)
        out = config.image.trunk.width if settings.mim_target == "tokens" else 0
        return ImageDecoder(config, depth, guided=settings.guide == "text", dropped=settings.mim_op == "drop", out=out)

    return method.plus(decoders={"image_decoder": image_decoder}, terms={"mim": (weight, Part(MaskedImages, settings))})


class MaskedImages(Term):
    """L1 between masked patches and their prediction; mean over masked patches and their pixels, or channels of tokens.

    The text tower's output and the scores are computed once per batch and shared with the caption term. The image tower
    runs once per mask: per image for random masks, per caption for attentive ones. Only masked patches are predicted.
    """

    @staticmethod
    def towers(config: ModelConfig, settings: MimSettings) -> ModelConfig:
        trunk = config.image.trunk.name
        if bool(trunk) != (settings.mim_target == "tokens"):
            raise ValueError(
                "masked images (sycoca, +mim) are predicted as pixels, or above a frozen trunk, which has seen all "
                f"pixels, as its tokens; this image tower has {f'the trunk {trunk}' if trunk else 'no trunk'}: choose "
                "the other --settings.mim-target, add or omit --image-tower, or use a method without it, such as coca."
            )
        return masking.towers(config, settings.mim_mask, settings.mim_op)

    def __init__(self, config: ModelConfig, settings: MimSettings) -> None:
        super().__init__()
        self.settings = settings
        self.hidden = masking.number(settings.mim_share, grid(config.image) ** 2)
        self.by_caption = settings.guide == "text" or settings.mim_mask == "attentive"

    def count(self, batch: Batch) -> int:
        return (len(batch.texts) if self.by_caption else len(batch)) * self.hidden

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        of, s = batch.image_of_text, self.settings
        how = (s.mim_mask, s.mim_share, s.mim_op)
        images, hidden, tokens = masking.masked(model, batch, encoded, s, how, most=True, purpose="mim.mask")
        if self.by_caption and len(images) != len(of):
            images, hidden, tokens = images[of], hidden[of], tokens.index_select(0, of)
        guide = (encoded.text_tokens, model.text_tower.packing(batch.texts)) if s.guide == "text" else ()
        predicted = model.more["image_decoder"](tokens, hidden, *guide)
        if s.mim_target == "tokens":
            return distance(predicted, trunk_tokens(model, images, hidden)).sum()
        return distance(predicted, pixels(model, images, hidden, s.norm_pix)).sum()


def pixels(model: Model, images: Tensor, hidden: Tensor, norm_pix: bool) -> Tensor:
    """The targets, normalised pixels of masked patches: [N, m, 3 * patch^2], at least fp32."""
    patch = model.config.image.patch
    raw = take(unfold(images, patch), hidden).view(*hidden.shape, 3, patch, patch)
    target = at_least_float(model.normalise(raw)).flatten(2)
    return standardised(target) if norm_pix else target


def trunk_tokens(model: Model, tokens: Tensor, hidden: Tensor) -> Tensor:
    """The targets, the trunk's tokens at masked places: [N, m, W'], at least fp32, without gradient.

    Each has mean 0 and deviation 1 over its channels, as features of a teacher have in arXiv:2202.03555 (section 3.3)
    and arXiv:2205.14141 (section 3): a few channels of large values would be most of the loss otherwise.

    Args: tokens [N, prefix + P, W'] of the trunk; hidden [N, m]. Raises: ValueError for a trunk that is trained.
    """
    trunk = model.config.image.trunk
    if any(p.requires_grad for p in model.image_tower.get_submodule("trunk").parameters()):
        raise ValueError(
            f"mim_target tokens needs a frozen trunk, but the run trains weights of {trunk.name}, which could make all "
            "tokens alike: freeze it (--freeze image:trunk, and no --lora.targets of it), or choose another method."
        )
    return standardised(at_least_float(take(tokens[:, trunk.prefix :], hidden)).detach())


def standardised(target: Tensor) -> Tensor:
    """Targets [N, m, W'] less their mean over the last dimension, over their deviation."""
    deviation = target.var(-1, keepdim=True) + EPSILON
    return (target - target.mean(-1, keepdim=True)) / deviation.sqrt()


def distance(predicted: Tensor, target: Tensor) -> Tensor:
    """L1 of each masked patch, mean over its values: [N, m]."""
    return (at_least_float(predicted) - target).abs().mean(-1)


COMPONENTS = {
    "mim": Component(
        "terms", "an image decoder that reconstructs masked patches, guided by the caption", MimSettings, masked
    ),
}
