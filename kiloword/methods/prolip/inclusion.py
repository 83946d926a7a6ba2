"""Terms over Gaussians: an image lies in its texts, an original in its masked copy; information bottleneck.

They compare matched pairs of the local batch, never all pairs. Source: arXiv:2410.18857, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.config.settings import ABOVE_0, BaseSettings, setting
from kiloword.methods.method import Term
from kiloword.methods.prolip.gaussian import Form, inclusion_loss, rows, vib
from kiloword.model.attention import Packing
from kiloword.model.image import grid
from kiloword.model.model import Model
from kiloword.model.text import is_special
from kiloword.randomness import uniform
from kiloword.types import Batch, Encoded, Features, Texts


@dataclass(frozen=True, kw_only=True)
class InclusionSettings(BaseSettings):
    """Weights and form of the inclusion terms, and how masked copies are made."""

    image_in_text: float = setting(1e-7, "weight of the inclusion of images in their captions; 0: off", 0)
    masked: float = setting(1e-3, "weight of the inclusion of images and captions in their masked copies; 0: off", 0)
    spread: float = setting(0.0, "weight of fitting variances to the distances of pairs (not in the paper); 0: off", 0)
    vib: float = setting(1e-4, "weight of the divergence to N(0, 1); 0: off", 0)
    inclusion_form: Form = setting("paper", "eq. 3 as printed, or its exact integral")
    inclusion_reduction: Literal["per_dimension", "joint"] = setting(
        "per_dimension", "one sigmoid per dimension, or one of the sum over dimensions"
    )
    eps: float = setting(-10.0, "log of a variance added to both Gaussians in eq. 3; the paper: -20", -50, 50)
    c: float = setting(10.0, "sharpness of the sigmoid; the paper: 1000", ABOVE_0)
    vib_form: Literal["textbook", "released"] = setting(
        "textbook", "released: sigma instead of the variance, as in the authors' code"
    )
    masked_every: int = setting(8, "every n-th image gets masked copies", 1, hint="; masked 0 disables them")
    drop_patches: float = setting(0.75, "share of patches dropped from a copy; the authors' code: 0.25", 0, 1)
    mask_words: float = setting(0.75, "share of words hidden in a copy", 0, 1)
    hide_words: Literal["mask", "drop"] = setting("mask", "replace words by the mask token, or drop them")


class _OfGaussians(Term):
    """Base of the terms over Gaussians; their mean is over captions."""

    def __init__(self, config: ModelConfig, settings: InclusionSettings) -> None:
        super().__init__()
        self.settings, self.config = settings, config

    def count(self, batch: Batch) -> Tensor | int:
        return len(batch.texts)

    def loss(self, a: Features, b: Features) -> Tensor:
        """[N]: loss of each a that does not lie within its b."""
        s = self.settings
        return inclusion_loss(a, b, s.eps, s.c, s.inclusion_form, s.inclusion_reduction)


class ImageInText(_OfGaussians):
    """Every image lies within each of its captions; mean over captions."""

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        return self.loss(rows(encoded.images, batch.image_of_text), encoded.texts).sum()


class MaskedImage(_OfGaussians):
    """Images lie within their copies of few patches; mean over the selected images."""

    def selected(self, batch: Batch) -> Tensor:
        """[I] bool, what has a masked copy: by position in the global batch, whose order is random."""
        return batch.position % self.settings.masked_every == 0

    def count(self, batch: Batch) -> Tensor:
        return self.selected(batch).sum()

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        which, weight = at_least_one(self.selected(batch), int(self.selected(batch.host).sum()))
        patches = grid(self.config.image) ** 2
        kept = max(1, round(patches * (1 - self.settings.drop_patches)))
        noise = uniform(batch.seeds[which], "masked.image", patches)
        keep = noise.argsort(stable=True)[:, :kept].sort(1).values
        _, copies = model.encode_image(batch.images[which], keep=keep)
        return self.loss(rows(encoded.images, which), copies).sum() * weight


class MaskedText(MaskedImage):
    """Captions lie within their copies of few words; mean over the captions of the selected images."""

    def selected(self, batch: Batch) -> Tensor:
        """[T] bool: the captions of the selected images."""
        return super().selected(batch)[batch.image_of_text]

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        on_host, lengths, starts = self.selected(batch.host), batch.host.texts.starts.diff(), batch.texts.starts
        which, weight = at_least_one(self.selected(batch), int(on_host.sum()))
        tokens = int((lengths[on_host] if weight else lengths[:1]).sum())
        texts = batch.texts.spans(starts[which], starts.diff()[which], tokens)[1]
        of = batch.image_of_text[which]
        caption = which - torch.searchsorted(batch.image_of_text, of)  # index among the captions of its image
        hide = drop_words if self.settings.hide_words == "drop" else mask_words
        copies = hide(texts, batch.seeds[of] + caption, self.settings.mask_words, self.config.text)
        return self.loss(rows(encoded.texts, which), model.encode_text(copies)[1]).sum() * weight


class Spread(_OfGaussians):
    """The variance of a caption fits its distance to its images: mean over captions of -log of the integral of p_v p_t.

    Without constants; mean over dimensions. Only variances get a gradient: means would only be drawn together. A
    caption that is true of many scenes is far from each, whatever its length, so that its variance grows with the
    number of scenes. Not in the paper, which leaves this to the pair loss.
    """

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        images, texts = rows(encoded.images, batch.image_of_text), encoded.texts
        both = torch.logaddexp(images["log_var"], texts["log_var"])
        gap = (images["vec"] - texts["vec"]).detach()
        return 0.5 * (both + gap.square() * (-both).exp()).mean(-1).sum()


class VibText(_OfGaussians):
    """KL divergence of text Gaussians to N(0, 1), against vanishing variances; mean over texts."""

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        return vib(encoded.texts, self.settings.vib_form).sum()


class VibImage(_OfGaussians):
    """KL divergence of image Gaussians to N(0, 1); mean over images."""

    def count(self, batch: Batch) -> int:
        return len(batch)

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        return vib(encoded.images, self.settings.vib_form).sum()


def at_least_one(chosen: Tensor, n: int) -> tuple[Tensor, float]:
    """Indices of the n chosen [N] bool; if none, index 0 with weight 0: no rank may skip a tower pass."""
    order = chosen.to(torch.uint8).argsort(descending=True, stable=True)  # `nonzero` would synchronise with the device
    return order[: max(n, 1)], float(n > 0)


def chosen_words(texts: Texts, seeds: Tensor, share: float, config: TextConfig) -> Tensor:
    """Select a share (rounded) of the words of each text: [S] bool; never special tokens.

    Args: seeds [T] int64, one per text.
    """
    packing, words = Packing.of(texts), ~is_special(texts.ids, config)
    of, place = packing.text, packing.place
    noise = uniform(seeds, "masked.text", texts.longest)  # [T, L]
    order = torch.full_like(noise, 2.0)
    order[of, place] = torch.where(words, noise[of, place], 2.0)  # special tokens come last
    rank = order.argsort(stable=True).argsort(1)[of, place]
    wanted = (torch.zeros_like(seeds).index_add(0, of, words.long()) * share).round()
    return words & (rank < wanted[of])


def mask_words(texts: Texts, seeds: Tensor, share: float, config: TextConfig) -> Texts:
    """Replace a share of the words of each text by the mask token; arguments as `chosen_words`."""
    hidden = chosen_words(texts, seeds, share, config)
    tokens = None if texts.tokens is None else texts.tokens.masked_fill(hidden[:, None], 0.0)
    return replace(texts, ids=texts.ids.masked_fill(hidden, config.special["mask"]), tokens=tokens)


def drop_words(texts: Texts, seeds: Tensor, share: float, config: TextConfig) -> Texts:
    """Drop a share of the words of each text; arguments as `chosen_words`."""
    kept = ~chosen_words(texts, seeds, share, config)
    before = nn.functional.pad(kept.cumsum(0), (1, 0))  # kept tokens before each place
    return texts.at(kept, before[texts.starts])
