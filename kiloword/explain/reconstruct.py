"""Reconstruct masked patches, and select the patches that captions mask, as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.methods.coca import masking, sycoca as masked_images
from kiloword.methods.coca.sycoca import MimSettings
from kiloword.model.blocks import take
from kiloword.model.image import fold, grid, unfold
from kiloword.model.pooling import at_least_float
from kiloword.randomness import uniform
from kiloword.types import Batch, Encoded, Texts

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.model.model import Model


def mim_settings(matcher: Matcher) -> MimSettings:
    """Settings of the masked image term that the model was trained with.

    Raises: ValueError for a model without an image decoder, or of unknown method, and for one that predicts tokens.
    """
    terms = {} if matcher.method is None else matcher.method.terms
    settings = getattr(terms["mim"][1](matcher.model.config), "settings", None) if "mim" in terms else None
    if not isinstance(settings, MimSettings):
        raise ValueError(
            "this model has no image decoder whose settings are known, so it cannot reconstruct patches: train sycoca, "
            "or a method with +mim, and load it by kiloword.load(folder)."
        )
    if settings.mim_target == "tokens":
        raise ValueError("this model predicts tokens of its trunk (mim_target tokens), not pixels that can be shown.")
    return settings


def masked_patches(
    model: Model, images: Tensor, texts: Texts, seeds: Tensor, attentive: bool, settings: MimSettings
) -> Tensor:
    """Patches of N images to mask for the image decoder: [N, m] int64, ascending.

    Args: images uint8 [N, 3, H, W]; texts: N captions, for attentive masks: caption n is compared with image n, both
    unmasked; seeds [N], for random masks.
    Raises: ValueError for attentive masks of a model whose patches and words cannot be compared.
    """
    if attentive:
        masking.check(model.config)
        places = torch.arange(len(images), device=images.device)
        batch = Batch(images, texts, places, seeds=places, position=places, composed=places < 0)
        encoded = Encoded(model.image_tokens(images), model.text_tower(texts), {}, {})
        scores = masking.scores(model, batch, encoded, settings)
    else:
        scores = uniform(seeds, "reconstruction.mask", grid(model.config.image) ** 2)
    return masking.select(scores, settings.mim_share, most=True)


def reconstruct(
    model: Model, images: Tensor, hidden: Tensor, guides: Sequence[Texts], settings: MimSettings
) -> list[Tensor]:
    """Reconstruct masked patches, once per guide: normalised pixels [N, m, 3 * patch^2].

    Args: images uint8 [N, 3, H, W]; hidden [N, m] int64, ascending; guides: N captions each, ignored by a model trained
    without text. For a model with `norm_pix`, mean and deviation are those of the true patch.
    """
    tokens = masking.visible(model, images, hidden, settings.mim_op)  # shared by all guides
    painted = []
    for texts in guides:
        packing = model.text_tower.packing(texts)
        guide = (model.text_tower(texts), packing) if settings.guide == "text" else ()
        painted.append(at_least_float(model.more["image_decoder"](tokens, hidden, *guide)))
    if not settings.norm_pix:
        return painted
    true = masked_images.pixels(model, images, hidden, norm_pix=False)
    deviation = (true.var(-1, keepdim=True) + masked_images.EPSILON).sqrt()
    return [patches * deviation + true.mean(-1, keepdim=True) for patches in painted]


def fill(model: Model, images: Tensor, hidden: Tensor, painted: Tensor) -> Tensor:
    """Images uint8 [N, 3, H, W] with normalised pixels [N, m, 3 * patch^2] in place of their hidden patches."""
    patch = model.config.image.patch
    std, mean = (x.float().view(1, 1, 3, 1) for x in (model.std, model.mean))
    colours = (painted.float().view(*painted.shape[:2], 3, -1) * std + mean).flatten(-2)
    new = (colours * 255).round().clamp(0, 255).to(torch.uint8)
    pixels, filled = unfold(images, patch), images.clone()
    used = fold(pixels.scatter(1, hidden[..., None].expand(-1, -1, pixels.shape[-1]), new), patch)
    filled[..., : used.shape[2], : used.shape[3]] = used
    return filled


def mean_colour(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The mean colour of the visible patches, for every masked one: [N, m, 3 * patch^2].

    Args: images: normalised, [N, 3, H, W].
    """
    pixels = unfold(images, patch)
    seen = take(pixels, masking.complement(hidden, pixels.shape[1]))
    colour = seen.view(*seen.shape[:2], 3, -1).mean((1, 3))  # [N, 3]
    return colour.repeat_interleave(patch**2, 1)[:, None].expand(-1, hidden.shape[1], -1)
