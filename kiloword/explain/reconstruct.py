"""Images whose hidden patches a model paints, and which patches captions hide: as in training, to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.methods.coca import masked_images, masking
from kiloword.methods.coca.captioning import CaptionSettings
from kiloword.methods.coca.masked_images import MimSettings
from kiloword.methods.coca.masking import MaskSettings
from kiloword.model.image import fold, unfold
from kiloword.model.pooling import at_least_float
from kiloword.types import Batch, Encoded, Texts

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.model.model import Model


def mim_settings(matcher: Matcher) -> MimSettings:
    """How the model learned to paint hidden patches.

    Raises: ValueError for a model without an image decoder, or whose method is not known.
    """
    if "image_decoder" not in matcher.model.more:
        raise ValueError(
            "this model has no image decoder, so it cannot paint patches: train sycoca, or another method with +mim."
        )
    if matcher.method is None:
        raise ValueError("how this model's images were masked is not known: load it by kiloword.load(folder).")
    settings = _term(matcher, "mim")
    assert isinstance(settings, MimSettings)
    return settings


def mask_settings(matcher: Matcher) -> tuple[MaskSettings, float, float]:
    """How captions choose patches, the share hidden from the image decoder and that from the text decoder.

    Of a model that was trained without such masks: the paper's (arXiv:2401.02137).
    """
    mim, caption = _term(matcher, "mim"), _term(matcher, "caption")
    high = mim.mim_share if isinstance(mim, MimSettings) else MimSettings().mim_share
    low = caption.caption_share if isinstance(caption, CaptionSettings) else CaptionSettings().caption_share
    settings = next((s for s in (mim, caption) if isinstance(s, MaskSettings)), MaskSettings())
    return settings, high, low


def masked_by_caption(matcher: Matcher) -> bool:
    """Whether captions chose the masks of its training."""
    mim, caption = _term(matcher, "mim"), _term(matcher, "caption")
    return "attentive" in (getattr(mim, "mim_mask", None), getattr(caption, "caption_mask", None))


def _term(matcher: Matcher, name: str) -> object:
    """The settings of one of the method's terms; None where it has none."""
    if matcher.method is None or name not in matcher.method.terms:
        return None
    return getattr(matcher.method.terms[name][1](matcher.model.config), "settings", None)


def speaks_of(model: Model, images: Tensor, texts: Texts, settings: MaskSettings) -> Tensor:
    """How much caption n speaks of each patch of image n, both whole: [N, P] (arXiv:2401.02137, eq. 7).

    Args: images uint8 [N, 3, H, W]; texts: N captions.
    Raises: ValueError for a model whose patches and words cannot be compared.
    """
    masking.check(model.config)
    tokens, places = model.text_tower(texts), torch.arange(len(images), device=images.device)
    nobody = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    batch = Batch(images, texts, places, seeds=places, position=places, composed=nobody)
    return masking.scores(model, batch, Encoded(model.image_tokens(images), tokens, {}, {}), settings)


def reconstruct(
    model: Model, images: Tensor, hidden: Tensor, guides: Sequence[Texts], settings: MimSettings
) -> list[Tensor]:
    """What a model paints where patches are hidden, once for each guide: normalised pixels [N, m, 3 * patch^2].

    Args: images uint8 [N, 3, H, W]; hidden [N, m] int64, ascending; guides: N captions each, which a model that was
    trained without text does not see. Of a model with `norm_pix` they get mean and deviation of the true patch.
    """
    tokens = masked_images.visible(model, images, hidden, settings.mim_op)  # the guides share this pass
    painted = []
    for texts in guides:
        packing = model.text_tower.packing(texts)
        guide = (model.text_tower(texts), packing) if settings.guide == "text" else None
        painted.append(at_least_float(masked_images.predict(model, tokens, hidden, guide)))
    if not settings.norm_pix:
        return painted
    true = masked_images.pixels(model, images, hidden, norm_pix=False)
    deviation = (true.var(-1, keepdim=True) + masked_images.EPSILON).sqrt()
    return [one * deviation + true.mean(-1, keepdim=True) for one in painted]


def fill(model: Model, images: Tensor, hidden: Tensor, painted: Tensor) -> Tensor:
    """Images uint8 [N, 3, H, W] with normalised pixels [N, m, 3 * patch^2] in place of their hidden patches."""
    patch = model.config.image.patch
    std, mean = (x.float().view(1, 1, 3, 1) for x in (model.std, model.mean))
    colours = (painted.float().view(*painted.shape[:2], 3, -1) * std + mean).flatten(-2)
    new = (colours * 255).round().clamp(0, 255).to(torch.uint8)
    pixels = unfold(images, patch)
    return fold(pixels.scatter(1, hidden[..., None].expand(-1, -1, pixels.shape[-1]), new), patch)


def mean_colour(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The mean colour of the patches that are seen, for every hidden one: [N, m, 3 * patch^2].

    Args: images: normalised, [N, 3, H, W].
    """
    pixels = unfold(images, patch)
    seen = pixels.gather(1, masking.others(hidden, pixels.shape[1])[..., None].expand(-1, -1, pixels.shape[-1]))
    colour = seen.view(*seen.shape[:2], 3, -1).mean((1, 3))  # [N, 3]
    return colour.repeat_interleave(patch**2, 1)[:, None].expand(-1, hidden.shape[1], -1)
