"""Local terms over Gaussians: an image inside its texts, a whole inside its masked copy, and the bottleneck.

They compare matched pairs of one rank's own batch, never pairs of the whole. Source: arXiv:2410.18857, section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.methods.prolip.gaussian import Form, inclusion_loss, rows, vib
from kiloword.model.model import Model
from kiloword.model.text import is_special
from kiloword.randomness import uniform
from kiloword.types import Batch, Encoded, Features, Texts


@dataclass(frozen=True, kw_only=True)
class InclusionSettings(recipes.Settings):
    """What includes what, how strongly, and how a masked copy is made."""

    image_in_text: float = 1e-7  # weight of: an image lies within its caption; 0: left out
    masked: float = 1e-3  # weight of: whole images and captions lie within their masked copies; 0: left out
    spread: float = 0.0  # weight of: variances fit the distances of matched pairs (not in the paper); 0: left out
    vib: float = 1e-4  # weight of the divergence to N(0, 1); 0: left out
    inclusion_form: Form = "paper"  # eq. 3 as printed, or the exact integral
    inclusion_reduction: Literal["per_dimension", "joint"] = "per_dimension"  # a sigmoid each, or one of the sum
    eps: float = -10.0  # in log space, widens both Gaussians inside A, B, C; the paper: -20
    c: float = 10.0  # sharpness of the sigmoid; the paper: 1000
    vib_form: Literal["textbook", "released"] = "textbook"  # the authors' code has sigma where the variance belongs
    masked_every: int = 8  # one image in so many gets masked copies: 12.5% of the batch
    drop_patches: float = 0.75  # share of a copy's patches that are dropped; the authors' code: 0.25
    mask_words: float = 0.75  # share of a copy's word tokens that become the mask token
    hide_words: Literal["mask", "drop"] = "mask"  # drop: those words are left out, which makes copies general captions


def terms(settings: InclusionSettings) -> dict[str, tuple[float, Any]]:
    """`Method.terms` for these settings, each with its weight; what has weight 0 is left out.

    Raises: ValueError for settings out of their range.
    """
    _check(settings)
    made: dict[str, tuple[float, Any]] = {}
    if settings.image_in_text:
        made["image_in_text"] = (settings.image_in_text, lambda config: ImageInText(settings))
    if settings.masked:
        made["masked_image"] = (settings.masked, lambda config: MaskedImage(settings, config))
        made["masked_text"] = (settings.masked, lambda config: MaskedText(settings, config))
    if settings.spread:
        made["spread"] = (settings.spread, lambda config: Spread())
    if settings.vib:
        made["vib_image"] = (settings.vib, lambda config: Vib(settings, "image"))
        made["vib_text"] = (settings.vib, lambda config: Vib(settings, "text"))
    return made


def _check(settings: InclusionSettings) -> None:
    for name in ("image_in_text", "masked", "spread", "vib"):
        if not 0 <= getattr(settings, name) < math.inf:
            raise ValueError(f"{name} is {getattr(settings, name)}: expected a weight of 0 or more.")
    for name in ("drop_patches", "mask_words"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} is {getattr(settings, name)}: expected a share, 0 to 1.")
    if settings.masked_every < 1:
        raise ValueError(
            f"masked_every is {settings.masked_every}: expected at least 1; for no masked copies, masked 0."
        )
    if not 0 < settings.c < math.inf:
        raise ValueError(f"c is {settings.c}: expected a sharpness above 0.")
    if not abs(settings.eps) <= 50:  # False for NaN
        raise ValueError(f"eps is {settings.eps}: expected a logarithm, -50 to 50.")


class _Inclusion(nn.Module):
    """What the inclusion terms share."""

    def __init__(self, settings: InclusionSettings) -> None:
        super().__init__()
        self.settings = settings

    def loss(self, a: Features, b: Features) -> Tensor:
        """[N]: how far each a is from lying within its b."""
        s = self.settings
        return inclusion_loss(a, b, s.eps, s.c, s.inclusion_form, s.inclusion_reduction)

    def chosen(self, batch: Batch) -> Tensor:
        """[I] bool, the images with masked copies: by place in the global batch, whose order is drawn."""
        return batch.position % self.settings.masked_every == 0

    def chosen_texts(self, batch: Batch) -> Tensor:
        """[T] bool, the texts of those images."""
        return self.chosen(batch)[batch.image_of_text]


class ImageInText(_Inclusion):
    """Every image lies within each of its own captions; mean over captions."""

    def count(self, batch: Batch) -> Tensor:
        return batch.position.new_full((), len(batch.texts))

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        return self.loss(rows(encoded.images, batch.image_of_text), encoded.texts).sum()


class MaskedImage(_Inclusion):
    """Whole images lie within their copies of few patches; mean over the chosen images."""

    def __init__(self, settings: InclusionSettings, config: ModelConfig) -> None:
        super().__init__(settings)
        patches = (config.image.size // config.image.patch) ** 2
        self.patches, self.kept = patches, max(1, round(patches * (1 - settings.drop_patches)))

    def count(self, batch: Batch) -> Tensor:
        return self.chosen(batch).sum()

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        which, weight = at_least_one(self.chosen(batch), int(self.chosen(batch.host).sum()))
        noise = uniform(batch.seeds[which], "masked.image", self.patches)
        keep = noise.argsort(dim=1, stable=True)[:, : self.kept].sort(1).values
        _, copies = model.encode_image(batch.images[which], keep=keep)
        return self.loss(rows(encoded.images, which), copies).sum() * weight


class MaskedText(_Inclusion):
    """Whole captions lie within their copies of few words; mean over the chosen images' captions."""

    def __init__(self, settings: InclusionSettings, config: ModelConfig) -> None:
        super().__init__(settings)
        self.config = config.text

    def count(self, batch: Batch) -> Tensor:
        return self.chosen_texts(batch).sum()

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        which, weight, texts = self._whole(batch)
        of = batch.image_of_text[which]
        caption = which - torch.searchsorted(batch.image_of_text, of)  # its number among its image's
        hide = drop_words if self.settings.hide_words == "drop" else mask_words
        copies = hide(texts, batch.seeds[of] + caption, self.settings.mask_words, self.config)
        return self.loss(rows(encoded.texts, which), model.encode_text(copies)[1]).sum() * weight

    def _whole(self, batch: Batch) -> tuple[Tensor, float, Texts]:
        """Indices [n] of the captions with masked copies, their weight, and the captions themselves."""
        host = batch.host
        chosen = self.chosen_texts(host)
        n = int(chosen.sum())
        which, weight = at_least_one(self.chosen_texts(batch), n)
        lengths = host.texts.starts.diff()
        return which, weight, take(batch.texts, which, int((lengths[chosen] if n else lengths[:1]).sum()))


class Spread(nn.Module):
    """A caption's variance is how far its images lie from it: mean over captions of -log of the integral of p_v p_t.

    Its constants are left out, and the mean over dimensions is taken. Only variances learn from it: means would only be
    drawn together. A caption of many scenes lies far from each, whatever its length, so that its variance grows with
    what it is true of. Not in the paper, which leaves it to the pair loss.
    """

    def count(self, batch: Batch) -> Tensor:
        return batch.position.new_full((), len(batch.texts))

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        images, texts = rows(encoded.images, batch.image_of_text), encoded.texts
        both = torch.logaddexp(images["log_var"], texts["log_var"])
        gap = (images["vec"] - texts["vec"]).detach()
        return 0.5 * (both + gap.square() * (-both).exp()).mean(-1).sum()


class Vib(nn.Module):
    """Divergence of one side's Gaussians to N(0, 1), so that variances do not vanish; mean over images or texts."""

    def __init__(self, settings: InclusionSettings, side: Literal["image", "text"]) -> None:
        super().__init__()
        self.settings, self.side = settings, side

    def count(self, batch: Batch) -> Tensor:
        return batch.position.new_full((), len(batch) if self.side == "image" else len(batch.texts))

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        return vib(encoded.images if self.side == "image" else encoded.texts, self.settings.vib_form).sum()


def at_least_one(chosen: Tensor, n: int) -> tuple[Tensor, float]:
    """Indices of the n that are chosen [N] bool; of nothing the first, with weight 0: no rank may skip a tower pass."""
    order = chosen.to(torch.uint8).argsort(descending=True, stable=True)  # `nonzero` would wait for the device
    return order[: max(n, 1)], float(n > 0)


def take(texts: Texts, which: Tensor, tokens: int) -> Texts:
    """Some texts, packed, in the order of `which` [n], which have so many tokens."""
    lengths = texts.starts.diff()[which]
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0))
    shift = torch.repeat_interleave(texts.starts[which] - starts[:-1], lengths, output_size=tokens)
    return Texts(texts.ids[torch.arange(len(shift), device=shift.device) + shift], starts, texts.longest)


def chosen_words(texts: Texts, seeds: Tensor, share: float, config: TextConfig) -> Tensor:
    """A share (rounded) of each text's words: [S] bool; never special tokens.

    Args: seeds [T] int64, of every text its own.
    """
    lengths = texts.starts.diff()
    of = torch.repeat_interleave(lengths, output_size=len(texts.ids))  # [S]; the size known, no device is waited for
    place = torch.arange(len(of), device=of.device) - texts.starts[of]
    words = ~is_special(texts.ids, config)
    noise = uniform(seeds, "masked.text", texts.longest)  # [T, L]
    order = torch.full_like(noise, 2.0)
    order[of, place] = torch.where(words, noise[of, place], 2.0)  # others come last
    rank = order.argsort(dim=1, stable=True).argsort(1)[of, place]
    wanted = (torch.zeros_like(lengths).index_add(0, of, words.long()) * share).round()
    return words & (rank < wanted[of])


def mask_words(texts: Texts, seeds: Tensor, share: float, config: TextConfig) -> Texts:
    """Texts with a share of each one's words replaced by the mask token; arguments as `chosen_words`."""
    hidden = chosen_words(texts, seeds, share, config)
    return Texts(texts.ids.masked_fill(hidden, config.special["mask"]), texts.starts, texts.longest)


def drop_words(texts: Texts, seeds: Tensor, share: float, config: TextConfig) -> Texts:
    """Texts without a share of each one's words, packed anew; arguments as `chosen_words`."""
    kept = ~chosen_words(texts, seeds, share, config)
    before = nn.functional.pad(kept.cumsum(0), (1, 0))  # kept tokens before each place
    return Texts(texts.ids[kept], before[texts.starts], texts.longest)
