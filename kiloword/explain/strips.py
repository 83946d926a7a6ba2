"""Strips of a sheet of `kiloword score --explain DIR`: what the decoders of a model do with an image and a caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.explain.gradcam import gradcam
from kiloword.explain.reconstruct import (
    caption_similarity,
    fill,
    mask_settings,
    masked_by_caption,
    masked_patches,
    mean_colour,
    mim_settings,
    paints,
    reconstruct,
)
from kiloword.explain.words import END, explain_words
from kiloword.methods.coca import masking
from kiloword.methods.coca import sycoca as masked_images
from kiloword.methods.coca.sycoca import MimSettings
from kiloword.model.encoding import inference
from kiloword.model.image import grid
from kiloword.report.images import Pixels
from kiloword.report.overlay import Floats, covered, overlay, square
from kiloword.report.sheet import Panel, Strip
from kiloword.types import Texts

if TYPE_CHECKING:
    from kiloword.api import Matcher

What = Literal["words", "gradcam", "masks", "reconstruction"]
Draw = Callable[[int, int], tuple[Strip, Any]]
"""From the numbers of an image and a text to a strip and its values for JSON."""

WORD, LARGE = 94, 196  # pixels a side of panels


@dataclass(frozen=True)
class SheetInput:
    """I images and T texts to explain."""

    matcher: Matcher
    paths: Sequence[Path]  # I
    pixels: Tensor  # uint8 [I, 3, H, W]
    large: Sequence[Pixels]  # I, the same parts of the images at a higher resolution
    texts: Sequence[str]

    def encoded(self, text: str) -> Texts:
        """A text on the device of the pixels."""
        return self.matcher.tokenizer.encode([text], self.matcher.model.config.text).to(self.pixels.device)


def possible(matcher: Matcher) -> tuple[What, ...]:
    """What can be shown of a model's decoders; nothing for a model without decoders."""
    more = matcher.model.more
    writes, masked = "text_decoder" in more and "fuser" not in more, "image_decoder" in more
    masks = writes or masked
    try:
        masking.check(matcher.model.config)
    except ValueError:
        masks = False
    shows = (writes, writes or masked, masks, masks and paints(matcher))
    return tuple(kind for kind, shown in zip(get_args(What), shows, strict=True) if shown)


def strips(inputs: SheetInput, what: Sequence[What]) -> dict[What, Draw]:
    """The kinds of strips in `what`, in the order in which a sheet shows them.

    Raises: ValueError for a kind that the model cannot show.
    """
    kinds: tuple[Callable[[SheetInput], Draw], ...] = (_words, _gradcam, _masks, _reconstruction)
    return {kind: make(inputs) for kind, make in zip(get_args(What), kinds, strict=True) if kind in what}


def _words(inputs: SheetInput) -> Draw:
    explained = explain_words(inputs.matcher, inputs.pixels, inputs.texts)
    about = "Attention of the text decoder when it predicts each word, and the probability of that word."

    def draw(i: int, t: int) -> tuple[Strip, Any]:
        maps, panels, values = explained[i][t], [], []
        columns = zip(maps.words, maps.probabilities.tolist(), maps.on_patches.tolist(), maps.maps, strict=True)
        for word, probability, on_patches, looks in columns:
            values.append({"word": word, "probability": probability, "on_patches": on_patches, "map": looks.tolist()})
            if word != END or len(maps.words) == 1:
                percent = "below 1%" if probability < 0.005 else f"{probability:.0%}"
                panels.append(Panel(overlay(inputs.large[i], _grid(looks), WORD), word, percent))
        return Strip("Word by word", about, panels), values

    return draw


def _gradcam(inputs: SheetInput) -> Draw:
    maps = {"for the score": gradcam(inputs.matcher, inputs.pixels, inputs.texts)}
    about = ""
    if "words" in possible(inputs.matcher):
        maps["for writing the caption"] = gradcam(inputs.matcher, inputs.pixels, inputs.texts, "caption")
        about = "Patches of the first layer that raise the score, and the probability of the caption."

    def draw(i: int, t: int) -> tuple[Strip, Any]:
        panels = []
        for name, each in maps.items():
            image = overlay(inputs.large[i], _grid(each[i, t]), LARGE)
            panels.append(Panel(image, name, "" if bool(each[i, t].any()) else "no patch raises it"))
        return Strip("Grad-CAM", about, panels), {name: each[i, t].tolist() for name, each in maps.items()}

    return draw


def _masks(inputs: SheetInput) -> Draw:
    settings, high, low = mask_settings(inputs.matcher)
    model = inputs.matcher.model
    masking.check(model.config)
    about = "The image decoder reconstructs the patches most similar to the caption; the text decoder sees only those."
    if not masked_by_caption(inputs.matcher):
        about += " This model was trained without such masks."

    def draw(i: int, t: int) -> tuple[Strip, Any]:
        with inference(model):
            row = caption_similarity(model, inputs.pixels[i : i + 1], inputs.encoded(inputs.texts[t]), settings)
        n, image = row.shape[1], inputs.large[i]
        most = masking.select(row, high, most=True)
        least = masking.select(row, low, most=False)
        panels = [
            Panel(overlay(image, _grid(row[0] - row.min()), LARGE), "similarity to the caption"),
            Panel(_cover(image, most, n), "masked for the image decoder", f"the {high:.0%} most similar"),
            Panel(_cover(image, least, n), "masked for the text decoder", f"the {low:.0%} least similar"),
        ]
        values = {name: x[0].tolist() for name, x in (("similarity", row), ("most", most), ("least", least))}
        return Strip("Masks", about, panels), values

    return draw


def _reconstruction(inputs: SheetInput) -> Draw:
    settings = mim_settings(inputs.matcher)
    if settings.mim_mask == "attentive":
        masking.check(inputs.matcher.model.config)
    about = "Masked patches as the image decoder reconstructs them; L1 is its error there, lower is better."
    if settings.norm_pix:
        about += " It reconstructs patterns only: mean and deviation are those of the true patch."

    def draw(i: int, t: int) -> tuple[Strip, Any]:
        with inference(inputs.matcher.model):
            panels, values = _reconstructed(inputs, i, t, settings)
        return Strip("Reconstruction", about, panels), values

    return draw


def _reconstructed(inputs: SheetInput, i: int, t: int, settings: MimSettings) -> tuple[list[Panel], dict[str, Any]]:
    """Image i with masked patches, and as reconstructed from text t, from another one and from none."""
    model, image, config = inputs.matcher.model, inputs.pixels[i : i + 1], inputs.matcher.model.config.image
    text, seeds = inputs.encoded(inputs.texts[t]), torch.tensor([i], device=image.device)
    hidden = masked_patches(model, image, text, seeds, settings.mim_mask == "attentive", settings)
    true = masked_images.pixels(model, image, hidden, norm_pix=False)
    flat = mean_colour(model.normalise(image).float(), hidden, config.patch)
    worst = float(masked_images.distance(flat, true).mean())
    guides = _guides(inputs.texts, t) if settings.guide == "text" else {"without text": ""}
    results = reconstruct(model, image, hidden, [inputs.encoded(guide) for guide in guides.values()], settings)
    panels, losses = [Panel(_cover(_pixels(image), hidden, grid(config) ** 2), "what it sees")], {}
    for name, patches in zip(guides, results, strict=True):
        loss = losses[name] = float(masked_images.distance(patches, true).mean())
        note = f"L1 {loss:.3f}{f', a flat colour {worst:.3f}' if loss >= worst else ''}"
        panels.append(Panel(_enlarged(_pixels(fill(model, image, hidden, patches))), name, note))
    panels.append(Panel(_enlarged(_pixels(image)), "the image"))
    return panels, {"hidden": hidden[0].tolist(), "l1": losses}


def _guides(texts: Sequence[str], t: int) -> dict[str, str]:
    """By name, the texts that guide a reconstruction: text t, the next one that differs, none."""
    others = [text for text in (*texts[t + 1 :], *texts[:t]) if text not in (texts[t], "")]
    guides = {"from this caption": texts[t]} if texts[t] else {}
    guides |= {f"from “{other}”": other for other in others[:1]}
    return {**guides, "from no caption": ""}


def _cover(image: Pixels, hidden: Tensor, patches: int) -> Image.Image:
    """The image with hidden patches [1, m] of P covered."""
    return _enlarged(covered(np.asarray(_enlarged(image)), _grid(masking.as_bool(hidden, patches)[0]) > 0))


def _enlarged(image: Pixels) -> Image.Image:
    """Small images keep their hard edges, as the model sees them."""
    if image.shape[0] >= LARGE:
        return square(image, LARGE)
    return Image.fromarray(image).resize((LARGE, LARGE), Image.Resampling.NEAREST)


def _grid(values: Tensor) -> Floats:
    """Values of P patches as rows and columns."""
    side = math.isqrt(len(values))
    grid: Floats = values.float().view(side, side).cpu().numpy()
    return grid


def _pixels(image: Tensor) -> Pixels:
    """[1, 3, H, W] -> [H, W, 3]."""
    pixels: Pixels = image[0].permute(1, 2, 0).cpu().numpy()
    return pixels
