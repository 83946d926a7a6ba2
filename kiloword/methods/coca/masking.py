"""Attentive masks: which patches are similar to a caption. Source: arXiv:2401.02137, section 3.3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.methods.method import Between, Weight
from kiloword.model.attention import Packing
from kiloword.model.blocks import as_bool
from kiloword.model.heads import unit
from kiloword.model.image import extra, grid
from kiloword.model.model import Model
from kiloword.model.pooling import at_least_float, place_from_end
from kiloword.model.resnet import check_vit
from kiloword.model.text import is_special
from kiloword.randomness import uniform
from kiloword.types import Batch, Encoded, Texts

Mask = Literal["attentive", "random"]
Operation = Literal["token", "drop"]
How = tuple[Mask, float, Operation]  # with the share of masked patches
CAPTIONS = 256  # captions scored at once: each copies the patches of its image


@dataclass(frozen=True, kw_only=True)
class MaskSettings(BaseSettings):
    """How attentive masks compare patches with a caption."""

    similarity: Literal["cosine", "dot"] = setting("cosine", "similarity of a patch and a token as embeddings")
    similar_to: Literal["tokens", "words", "class"] = setting(
        "tokens", "tokens compared with patches; tokens: words, start, end; class: the token that the head pools"
    )
    masks_from: float = setting(0.0, "share of the run from which images are masked; before, all are whole", 0, 1)
    masks_until: float = setting(1.0, "share of the run until which images are masked; after, all are whole", 0, 1)


def in_window(weight: float, settings: MaskSettings) -> Weight:
    """The weight of a loss that has it while images are masked. Raises: ValueError for a window that is empty."""
    window = Between(weight, settings.masks_from, settings.masks_until)
    return weight if window == Between(weight) else window


def towers(config: ModelConfig, mask: str, op: str) -> ModelConfig:
    """The configuration of towers for masked patches, with a token for them where `op` is "token".

    Raises: ValueError for a ResNet or images of one patch, and as `check` for attentive masks.
    """
    if mask == "none":
        return config
    check_vit(config.image, "masking of patches")
    if grid(config.image) < 2:
        raise ValueError("images of one patch cannot be masked in part: use smaller patches or larger images.")
    if mask == "attentive":
        check(config)
    return replace(config, image=replace(config.image, mask_token=True)) if op == "token" else config


def masked(
    model: Model, batch: Batch, encoded: Encoded, settings: MaskSettings, how: How, most: bool, purpose: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, their masked patches [N, m] as `select` chooses them, and tokens as of `visible`.

    Attentive masks make a row of each caption, random ones a row of each image, whatever its captions.
    """
    mask, share, op = how
    if mask == "attentive":
        images, scored = batch.images[batch.image_of_text], scores(model, batch, encoded, settings)
    else:
        images, scored = batch.images, uniform(batch.seeds, purpose, grid(model.config.image) ** 2)
    hidden = select(scored, share, most)
    return images, hidden, visible(model, images, hidden, op)


def scores(model: Model, batch: Batch, encoded: Encoded, settings: MaskSettings) -> Tensor:
    """Similarity of each caption with each patch of its image: [T, P], computed once per batch, without gradient.

    The maximum over the tokens of the caption (eq. 7); pads and extra tokens are ignored.
    """

    @torch.no_grad()
    def make() -> Tensor:
        config = model.config
        if encoded.image_tokens.shape[1] < extra(config.image) + grid(config.image) ** 2:
            raise ValueError("masks by attention compare a caption with all patches: omit --augment.drop-patches.")
        pooling = model.head.pooling
        with torch.autocast(batch.images.device.type, enabled=False):
            kind = next(model.head.parameters()).dtype  # as autocast is disabled here
            patches = pooling.project_image_tokens(encoded.image_tokens.detach()[:, extra(config.image) :].to(kind))
            tokens = pooling.project_text_tokens(encoded.text_tokens.detach().to(kind))
            packing = Packing.of(batch.texts)
            words, counted = packing.pad(tokens), packing.pad(countable(batch.texts, packing, config.text, settings))
            parts = zip(*(torch.split(x, CAPTIONS) for x in (batch.image_of_text, words, counted)), strict=True)
            return torch.cat([similarity(patches[of], caption, is_token, settings) for of, caption, is_token in parts])

    return encoded.once(f"attentive {settings.similarity} {settings.similar_to}", make)


def check(config: ModelConfig) -> None:
    """Raises: ValueError for towers whose patches and words cannot be compared."""
    head = config.head
    if head.image_pool == "attentional" and head.pool_width not in (0, config.image.width):
        raise ValueError(
            f"attentive masks project patches of width {config.image.width} with the projection of the head, but this "
            f"head projects pooled queries of width {head.pool_width}: use random masks, or --model.head.pool-width 0 "
            "in a model from scratch."
        )


def similarity(patches: Tensor, tokens: Tensor, counted: Tensor, settings: MaskSettings) -> Tensor:
    """Largest similarity of each patch [T, P, D] with a counted token: tokens [T, L, D], counted [T, L] -> [T, P]."""
    patches, tokens = at_least_float(patches), at_least_float(tokens)
    if settings.similarity == "cosine":
        patches, tokens = unit(patches), unit(tokens)
    pairs = patches @ tokens.transpose(1, 2)  # [T, P, L]
    return pairs.masked_fill(~counted[:, None], float("-inf")).amax(2)


def countable(texts: Texts, packing: Packing, config: TextConfig, settings: MaskSettings) -> Tensor:
    """[S] bool, the tokens that patches are compared with; for a caption without words its start and end."""
    words = texts.starts.diff() - len(config.extra_tokens)
    if settings.similar_to == "class":  # section 3.3: "a coarse-grained semantic"
        return packing.place == (texts.starts.diff() - place_from_end(config, "cls"))[packing.text]
    inside = packing.place < words[packing.text]
    if config.pad_to_context:
        ends = (texts.ids == config.special["end"]).long()  # pads may have the same id: the first one is the end
        before = ends.cumsum(0) - ends
        inside &= before == before[texts.starts[:-1]][packing.text]
    if settings.similar_to == "tokens":
        return inside
    is_word = inside & ~is_special(texts.ids, config)
    empty = torch.zeros_like(words).index_add(0, packing.text, is_word.long()) == 0
    return is_word | (inside & empty[packing.text])


def select(scored: Tensor, share: float, most: bool) -> Tensor:
    """Indices of a share of the patches, of most (or least) score [N, P], ascending: [N, m] int64; ties: the first."""
    order = scored.argsort(descending=most, stable=True)
    return order[:, : number(share, scored.shape[1])].sort(1).values


def complement(masked: Tensor, patches: int) -> Tensor:
    """Indices of the patches not in masked [N, m], ascending: [N, P - m]."""
    # sorted, as `nonzero` would synchronise with the device
    return as_bool(masked, patches).byte().argsort(stable=True)[:, : patches - masked.shape[1]]


def visible(model: Model, images: Tensor, hidden: Tensor, op: Operation) -> Tensor:
    """Tokens of images [N, 3, H, W] whose patches `hidden` [N, m] are masked by a token, or dropped."""
    patches = grid(model.config.image) ** 2
    if op == "drop":
        return model.image_tokens(images, keep=complement(hidden, patches))
    return model.image_tokens(images, masked=as_bool(hidden, patches))


def number(share: float, patches: int) -> int:
    """Number of masked patches for a share of P: at least one masked, one visible."""
    return min(max(1, round(share * patches)), patches - 1)
