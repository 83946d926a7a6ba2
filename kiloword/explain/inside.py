"""What decoders do with an image and each of some captions, as tiles and as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kiloword.explain.gradcam import gradcam
from kiloword.explain.reconstruct import (
    caption_similarity,
    fill,
    mask_settings,
    masked_patches,
    mean_colour,
    mim_settings,
    reconstruct,
)
from kiloword.explain.words import END, explain_words
from kiloword.generation.decoding import writer
from kiloword.methods.coca import masking
from kiloword.methods.coca import sycoca as masked_images
from kiloword.model.encoding import inference
from kiloword.report import Pixels, Tile
from kiloword.report.pictures import Floats, covered, overlay
from kiloword.types import Texts

if TYPE_CHECKING:
    from kiloword.api import Matcher

SIDE = 256  # pixels of an image with heat
Shown = tuple[list[Tile], Any]


@dataclass(frozen=True)
class Seen:
    """An image and T texts to explain."""

    matcher: Matcher
    pixels: Tensor  # uint8 [1, 3, H, W]
    large: Pixels  # the same part of the image at SIDE pixels
    texts: Sequence[str]
    seed: int = 0

    def encoded(self, text: str) -> Texts:
        """A text on the device of the pixels."""
        return self.matcher.tokenizer.encode([text], self.matcher.model.config.text).to(self.pixels.device)

    def lit(self, looks: Tensor, *lines: str) -> Tile:
        """The image with a map [P] over it."""
        return Tile(overlay(self.large, as_grid(looks), SIDE), lines)

    def covered(self, image: Pixels, hidden: Tensor, *lines: str) -> Tile:
        """An image with patches [1, m] covered."""
        config = self.matcher.model.config.image
        return Tile(covered(image, as_grid(masking.as_bool(hidden, (config.size // config.patch) ** 2)[0]) > 0), lines)


def as_grid(values: Tensor) -> Floats:
    """Values of P patches as rows and columns."""
    rows: Floats = values.float().view(math.isqrt(len(values)), -1).cpu().numpy()
    return rows


def words(seen: Seen) -> Iterator[Shown]:
    """Attention of the text decoder when it predicts each word, and the probability of that word."""
    for found in explain_words(seen.matcher, seen.pixels, seen.texts)[0]:
        columns = found.words, found.probabilities.tolist(), found.on_patches.tolist(), found.maps
        rows = list(zip(*columns, strict=True))
        names = ("word", "probability", "on_patches", "map")
        values = [dict(zip(names, (*row[:3], row[3].tolist()), strict=True)) for row in rows]
        drawn = rows if len(rows) == 1 else [row for row in rows if row[0] != END]
        yield [seen.lit(looks, word, f"{p:.0%}" if p >= 0.005 else "below 1%") for word, p, _, looks in drawn], values


def cams(seen: Seen) -> Iterator[Shown]:
    """Patches of the first layer that raise the score, and the probability of the caption."""
    maps = {"for the score": gradcam(seen.matcher, seen.pixels, seen.texts)[0]}
    if "words" in possible(seen.matcher):
        maps["for writing the caption"] = gradcam(seen.matcher, seen.pixels, seen.texts, "caption")[0]
    for t in range(len(seen.texts)):
        here = {name: each[t] for name, each in maps.items()}
        tiles = [seen.lit(x, name if bool(x.any()) else f"{name}: no patch raises it") for name, x in here.items()]
        yield tiles, {name: each.tolist() for name, each in here.items()}


def masks(seen: Seen) -> Iterator[Shown]:
    """The image decoder reconstructs the patches most similar to the caption; the text decoder sees only those."""
    settings, high, low = mask_settings(seen.matcher)
    for text in seen.texts:
        with inference(seen.matcher.model):
            row = caption_similarity(seen.matcher.model, seen.pixels, seen.encoded(text), settings)
        most, least = masking.select(row, high, most=True), masking.select(row, low, most=False)
        tiles = [
            seen.lit(row[0] - row.min(), "similarity to the caption"),
            seen.covered(seen.large, most, f"masked for the image decoder: the {high:.0%} most similar"),
            seen.covered(seen.large, least, f"masked for the text decoder: the {low:.0%} least similar"),
        ]
        yield tiles, {"similarity": row[0].tolist(), "most": most[0].tolist(), "least": least[0].tolist()}


def paintings(seen: Seen) -> Iterator[Shown]:
    """Masked patches as the image decoder reconstructs them; L1 is its error there, lower is better."""
    model, settings, image = seen.matcher.model, mim_settings(seen.matcher), seen.pixels
    seeds, attentive = torch.tensor([seen.seed], device=image.device), settings.mim_mask == "attentive"
    for t, text in enumerate(seen.texts):
        other = next((o for o in (*seen.texts[t + 1 :], *seen.texts[:t]) if o not in (text, "")), "")
        guides = {"from this caption": text, f"from “{other}”": other}
        guides = {**{name: guide for name, guide in guides.items() if guide}, "from no caption": ""}
        guides = guides if settings.guide == "text" else {"without text": ""}
        with inference(model):
            hidden = masked_patches(model, image, seen.encoded(text), seeds, attentive, settings)
            true = masked_images.pixels(model, image, hidden, norm_pix=False)
            flat = mean_colour(model.normalise(image).float(), hidden, model.config.image.patch)
            painted = reconstruct(model, image, hidden, [seen.encoded(guide) for guide in guides.values()], settings)
            worst, *each = (float(masked_images.distance(one, true).mean()) for one in (flat, *painted))
            filled = [_pixels(fill(model, image, hidden, patches)) for patches in painted]
        notes = [f"L1 {loss:.3f}{f', a flat colour {worst:.3f}' if loss >= worst else ''}" for loss in each]
        tiles = [Tile(pixels, [name, note]) for pixels, name, note in zip(filled, guides, notes, strict=True)]
        tiles = [seen.covered(_pixels(image), hidden, "what it sees"), *tiles, Tile(_pixels(image), ["the image"])]
        yield tiles, {"hidden": hidden[0].tolist(), "l1": dict(zip(guides, each, strict=True))}


def _pixels(image: Tensor) -> Pixels:
    """[1, 3, H, W] -> [H, W, 3]."""
    pixels: Pixels = image[0].permute(1, 2, 0).contiguous().cpu().numpy()
    return pixels


KINDS: dict[str, tuple[str, Callable[[Seen], Iterator[Shown]], int]] = {  # heading, maker, columns
    "words": ("Word by word", words, 8),
    "gradcam": ("Grad-CAM", cams, 4),
    "masks": ("Masks", masks, 4),
    "reconstruction": ("Reconstruction", paintings, 5),
}


def check(matcher: Matcher, kind: str) -> None:
    """Errors: ValueError where a model cannot show a kind."""
    if kind == "words":
        writer(matcher.model)
    if kind == "masks" or (kind == "reconstruction" and mim_settings(matcher).mim_mask == "attentive"):
        mask_settings(matcher)


def possible(matcher: Matcher) -> tuple[str, ...]:
    """What can be shown of a model's decoders; nothing for a model without decoders."""
    kinds = []
    for kind in KINDS:
        with suppress(ValueError):
            check(matcher, kind)
            kinds.append(kind)
    decodes = "words" in kinds or "image_decoder" in matcher.model.more
    return tuple(kinds) if decodes else ()
