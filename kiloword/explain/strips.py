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
    reconstruct,
)
from kiloword.explain.words import END, explain_words
from kiloword.methods.coca import masked_images, masking
from kiloword.model.encoding import inference
from kiloword.report.overlay import Floats, Pixels, covered, overlay, square
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

    def encoded(self) -> Texts:
        """The texts on the device of the pixels."""
        return self.matcher.tokenizer.encode(list(self.texts), self.matcher.model.config.text).to(self.pixels.device)


def possible(matcher: Matcher) -> tuple[What, ...]:
    """What can be shown of a model's decoders; nothing for a model without decoders."""
    more, can_mask = matcher.model.more, True
    try:
        masking.check(matcher.model.config)
    except ValueError:
        can_mask = False
    writes, paints = "text_decoder" in more and "fuser" not in more, "image_decoder" in more
    shown: dict[What, bool] = {
        "words": writes,
        "gradcam": writes or paints,
        "masks": (writes or paints) and can_mask,
        "reconstruction": paints and can_mask and matcher.method is not None,
    }
    return tuple(what for what, shows in shown.items() if shows)


def strips(inputs: SheetInput, what: Sequence[What]) -> dict[What, Draw]:
    """The kinds of strips in `what`, in the order in which a sheet shows them.

    Raises: ValueError for a kind that the model cannot show.
    """
    kinds: dict[What, Callable[[SheetInput], Draw]] = {
        "words": _words,
        "gradcam": _gradcam,
        "masks": _masks,
        "reconstruction": _reconstruction,
    }
    return {kind: kinds[kind](inputs) for kind in get_args(What) if kind in what}


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
        panels = [
            Panel(
                overlay(inputs.large[i], _grid(each[i, t]), LARGE),
                name,
                "" if bool(each[i, t].any()) else "no patch raises it",
            )
            for name, each in maps.items()
        ]
        return Strip("Grad-CAM", about, panels), {name: each[i, t].tolist() for name, each in maps.items()}

    return draw


def _masks(inputs: SheetInput) -> Draw:
    settings, high, low = mask_settings(inputs.matcher)
    similarity, texts = [], inputs.encoded()
    with inference(inputs.matcher.model):
        for image in inputs.pixels:
            images = image.expand(len(texts), -1, -1, -1)
            similarity.append(caption_similarity(inputs.matcher.model, images, texts, settings))
    about = "The patches most similar to the caption are masked for the image decoder, the least similar for the text decoder."
    if not masked_by_caption(inputs.matcher):
        about += " This model was trained without such masks."

    def draw(i: int, t: int) -> tuple[Strip, Any]:
        row, image = similarity[i][t], inputs.large[i]
        most, least = (
            masking.chosen(row[None], masking.number(share, len(row), "share"), most=is_high)[0]
            for share, is_high in ((high, True), (low, False))
        )
        panels = [
            Panel(overlay(image, _grid(row - row.min()), LARGE), "similarity to the caption"),
            Panel(_cover(image, most, len(row)), "masked for the image decoder", f"the {high:.0%} most similar"),
            Panel(_cover(image, least, len(row)), "masked for the text decoder", f"the {low:.0%} least similar"),
        ]
        return Strip("Masks", about, panels), {
            "similarity": row.tolist(),
            "most": most.tolist(),
            "least": least.tolist(),
        }

    return draw


def _reconstruction(inputs: SheetInput) -> Draw:
    settings, model, texts = mim_settings(inputs.matcher), inputs.matcher.model, inputs.encoded()
    about = "Masked patches as the image decoder reconstructs them; L1 is its error there, lower is better."
    if settings.norm_pix:
        about += " It reconstructs patterns only: mean and deviation are those of the true patch."
    masked = []
    with inference(model):
        for i, image in enumerate(inputs.pixels):
            seeds = torch.full((len(texts),), i, device=inputs.pixels.device)
            images = image.expand(len(texts), -1, -1, -1)
            masked.append(masked_patches(model, images, texts, seeds, settings.mim_mask == "attentive", settings))

    def draw(i: int, t: int) -> tuple[Strip, Any]:
        panels, losses = _reconstructed(inputs, i, t, masked[i][t : t + 1])
        return Strip("Reconstruction", about, panels), {"hidden": masked[i][t].tolist(), "l1": losses}

    return draw


def _reconstructed(inputs: SheetInput, i: int, t: int, hidden: Tensor) -> tuple[list[Panel], dict[str, float]]:
    """Image i with hidden patches [1, m], and as reconstructed from text t, from another one and from none."""
    model, settings = inputs.matcher.model, mim_settings(inputs.matcher)
    guides = _guides(inputs.texts, t) if settings.guide == "text" else {"without text": ""}
    image = inputs.pixels[i : i + 1]
    losses, results = {}, []
    with inference(model):
        texts = [inputs.matcher.tokenizer.encode([g], model.config.text).to(image.device) for g in guides.values()]
        true = masked_images.pixels(model, image, hidden, norm_pix=False)
        flat = mean_colour(model.normalise(image).float(), hidden, model.config.image.patch)
        worst = float(masked_images.distance(flat, true).mean())
        for name, patches in zip(guides, reconstruct(model, image, hidden, texts, settings), strict=True):
            loss = losses[name] = float(masked_images.distance(patches, true).mean())
            note = f"L1 {loss:.3f}{f', a flat colour {worst:.3f}' if loss >= worst else ''}"
            results.append(Panel(_enlarged(_pixels(fill(model, image, hidden, patches)[0])), name, note))
    original, n = _pixels(image[0]), (model.config.image.size // model.config.image.patch) ** 2
    seen = Panel(_cover(original, hidden[0], n), "what it sees")
    return [seen, *results, Panel(_enlarged(original), "the image")], losses


def _guides(texts: Sequence[str], t: int) -> dict[str, str]:
    """By name, the texts that guide a reconstruction: text t, the next one that differs, none."""
    others = [text for text in (*texts[t + 1 :], *texts[:t]) if text not in (texts[t], "")]
    guides = {"from this caption": texts[t]} if texts[t] else {}
    guides |= {f"from “{other}”": other for other in others[:1]}
    return {**guides, "from no caption": ""}


def _cover(image: Pixels, hidden: Tensor, patches: int) -> Image.Image:
    """The image with hidden patches [m] of P covered."""
    return _enlarged(covered(np.asarray(_enlarged(image)), _grid(masking.as_bool(hidden[None], patches)[0]) > 0))


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
    pixels: Pixels = image.permute(1, 2, 0).cpu().numpy()
    return pixels
