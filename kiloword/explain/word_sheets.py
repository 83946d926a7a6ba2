"""What `kiloword score --explain DIR` writes of a model with decoders: a sheet an image, and all numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.explain.gradcam import GradCam, gradcam
from kiloword.explain.reconstruct import (
    fill,
    mask_settings,
    masked_by_caption,
    mean_colour,
    mim_settings,
    reconstruct,
    speaks_of,
)
from kiloword.explain.words import END, explain_words
from kiloword.methods.coca import masked_images, masking
from kiloword.model.encoding import inference
from kiloword.randomness import uniform
from kiloword.report.overlay import Floats, Pixels, covered, overlay, square
from kiloword.report.sheet import Panel, Strip

if TYPE_CHECKING:
    from kiloword.api import Matcher

What = Literal["words", "gradcam", "masks", "reconstruction"]

WORD, LARGE = 94, 196  # pixels a side of panels


@dataclass(frozen=True)
class SheetInput:
    """Images and texts that are looked at."""

    matcher: Matcher
    pixels: Tensor  # uint8 [I, 3, H, W]
    large: Sequence[Pixels]  # I, the same parts of the images, finer
    texts: Sequence[str]


DrawnStrips = list[list[tuple[Strip, dict[str, Any]]]]
"""Of each image and text a strip, and its numbers."""


def possible(matcher: Matcher) -> tuple[What, ...]:
    """What can be shown of a model's decoders; of one without them nothing is shown that was not asked for."""
    more = matcher.model.more
    writes, paints = "text_decoder" in more and "fuser" not in more, "image_decoder" in more
    compares = _compares(matcher)
    shown: list[tuple[What, bool]] = [
        ("words", writes),
        ("gradcam", writes or paints),
        ("masks", (writes or paints) and compares),
        ("reconstruction", paints and compares and matcher.method is not None),
    ]
    return tuple(what for what, shows in shown if shows)


def _compares(matcher: Matcher) -> bool:
    try:
        masking.check(matcher.model.config)
    except ValueError:
        return False
    return True


def looked(asked: SheetInput, what: Sequence[What]) -> dict[What, DrawnStrips]:
    """All kinds that were asked for, in the order in which they are drawn."""
    draw: dict[What, Callable[[SheetInput], DrawnStrips]] = {
        "words": _words, "gradcam": _gradcam, "masks": _masks, "reconstruction": _reconstruction
    }  # fmt: skip
    return {kind: draw[kind](asked) for kind in get_args(What) if kind in what}


def _words(asked: SheetInput) -> DrawnStrips:
    about = "Where the text decoder looks as it writes each word, and what chance it gave that word after those before."
    found: DrawnStrips = []
    for image, row in zip(asked.large, explain_words(asked.matcher, asked.pixels, asked.texts), strict=True):
        found.append([])
        for maps in row:
            shown = [n for n, word in enumerate(maps.words) if word != END or len(maps.words) == 1]
            panels = [
                Panel(overlay(image, _grid(maps.maps[n], maps.grid), WORD), maps.words[n], _percent(maps.chances[n]))
                for n in shown
            ]
            words = zip(maps.words, maps.chances, maps.on_patches, maps.maps, strict=True)
            numbers = [
                {"word": word, "chance": float(chance), "on_patches": float(share), "map": looks.tolist()}
                for word, chance, share, looks in words
            ]
            found[-1].append((Strip("Word by word", about, panels), {"words": numbers}))
    return found


def _gradcam(asked: SheetInput) -> DrawnStrips:
    maps: dict[str, GradCam] = {"for the score": gradcam(asked.matcher, asked.pixels, asked.texts)}
    if "words" in possible(asked.matcher):
        maps["for writing the caption"] = gradcam(asked.matcher, asked.pixels, asked.texts, "caption")
    about = "What in the first layer spoke for the match, and for the words of the caption."
    found: DrawnStrips = []
    for i, image in enumerate(asked.large):
        found.append([])
        for t in range(len(asked.texts)):
            panels = [
                Panel(overlay(image, _grid(cam.maps[i, t], cam.grid), LARGE), name, _nothing(cam.maps[i, t]))
                for name, cam in maps.items()
            ]
            numbers = {name: cam.maps[i, t].tolist() for name, cam in maps.items()}
            found[-1].append((Strip("Grad-CAM", about if len(panels) > 1 else "", panels), {"gradcam": numbers}))
    return found


def _masks(asked: SheetInput) -> DrawnStrips:
    settings, high, low = mask_settings(asked.matcher)
    about = "The image decoder paints what the caption speaks of most; the text decoder is to see only that."
    if not masked_by_caption(asked.matcher):
        about += " This model was trained without such masks."
    found: DrawnStrips = []
    for i, image in enumerate(asked.large):
        found.append([])
        for row in _spoken_of(asked, i, settings):
            grid, n = (int(len(row) ** 0.5),) * 2, len(row)
            hidden = {
                name: masking.chosen(row[None], masking.number(share, n, "share"), most)[0]
                for name, share, most in (("most", high, True), ("least", low, False))
            }
            covers = {name: _grid(masking.as_bool(places[None], n)[0], grid) for name, places in hidden.items()}
            panels = [
                Panel(overlay(image, _grid(row - row.min(), grid), LARGE), "what it speaks of"),
                Panel(_cover(image, covers["most"]), "hidden for painting", f"the {high:.0%} it speaks of most"),
                Panel(_cover(image, covers["least"]), "hidden for writing", f"the {low:.0%} it speaks of least"),
            ]
            numbers = {"speaks_of": row.tolist(), **{name: places.tolist() for name, places in hidden.items()}}
            found[-1].append((Strip("Masks", about, panels), {"masks": numbers}))
    return found


def _spoken_of(asked: SheetInput, i: int, settings: masking.MaskSettings) -> Tensor:
    """How much each text speaks of the patches of image i: [T, P]."""
    model = asked.matcher.model
    with inference(model):
        packed = asked.matcher.tokenizer.encode(list(asked.texts), model.config.text).to(asked.pixels.device)
        return speaks_of(model, asked.pixels[i : i + 1].expand(len(packed), -1, -1, -1), packed, settings)


def _reconstruction(asked: SheetInput) -> DrawnStrips:
    settings, model = mim_settings(asked.matcher), asked.matcher.model
    about = "Hidden patches as the image decoder paints them; L1 is its error there, less is better."
    if settings.norm_pix:
        about += " It paints patterns alone: mean and deviation are those of the true patch."
    patches = (model.config.image.size // model.config.image.patch) ** 2
    found: DrawnStrips = []
    for i in range(len(asked.pixels)):
        if settings.mim_mask == "attentive":
            scored = _spoken_of(asked, i, settings)
        else:
            scored = uniform(torch.tensor([i]), "reconstruction.mask", patches).expand(len(asked.texts), -1)
        hidden = masking.chosen(scored, masking.number(settings.mim_share, patches, "mim_share"), most=True)
        found.append([])
        for t in range(len(asked.texts)):
            panels, losses = _painted(asked, i, t, hidden[t : t + 1].to(asked.pixels.device))
            numbers = {"hidden": hidden[t].tolist(), "l1": losses}
            found[-1].append((Strip("Reconstruction", about, panels), {"reconstruction": numbers}))
    return found


def _painted(asked: SheetInput, i: int, t: int, hidden: Tensor) -> tuple[list[Panel], dict[str, float]]:
    """Image i with hidden patches [1, m], and as painted from text t, from another one and from none."""
    model, settings = asked.matcher.model, mim_settings(asked.matcher)
    guides = _guides(asked.texts, t) if settings.guide == "text" else {"without text": ""}
    image = asked.pixels[i : i + 1]
    with inference(model):
        packed = [asked.matcher.tokenizer.encode([g], model.config.text).to(image.device) for g in guides.values()]
        painted = dict(zip(guides, reconstruct(model, image, hidden, packed, settings), strict=True))
        true = masked_images.pixels(model, image, hidden, norm_pix=False)
        losses = {name: float(masked_images.distance(one, true).mean()) for name, one in painted.items()}
        flat = mean_colour(model.normalise(image).float(), hidden, model.config.image.patch)
        worst = float(masked_images.distance(flat, true).mean())
        filled = {name: _pixels(fill(model, image, hidden, one)[0]) for name, one in painted.items()}
    side = model.config.image.size // model.config.image.patch
    cover = _grid(masking.as_bool(hidden, side**2)[0], (side, side))
    panels = [Panel(_cover(_pixels(image[0]), cover), "what it sees")]
    panels += [Panel(_enlarged(filled[name]), name, _l1(losses[name], worst)) for name in guides]
    return [*panels, Panel(_enlarged(_pixels(image[0])), "the image")], losses


def _l1(loss: float, flat: float) -> str:
    return f"L1 {loss:.3f}{f', a flat colour {flat:.3f}' if loss >= flat else ''}"


def _guides(texts: Sequence[str], t: int) -> dict[str, str]:
    """By name what hidden patches are painted from: a text, the next one that is another, none."""
    others = [text for text in (*texts[t + 1 :], *texts[:t]) if text not in (texts[t], "")]
    guides = {"from this caption": texts[t]} if texts[t] else {}
    if others:
        guides[f"from “{others[0]}”"] = others[0]
    return {**guides, "from no caption": ""}


def _cover(image: Pixels, hidden: Floats) -> Image.Image:
    return _enlarged(covered(np.asarray(_enlarged(image)), hidden > 0))


def _enlarged(image: Pixels) -> Image.Image:
    """Small images keep their hard edges, as the model sees them."""
    if image.shape[0] >= LARGE:
        return square(image, LARGE)
    return Image.fromarray(image).resize((LARGE, LARGE), Image.Resampling.NEAREST)


def _grid(values: Tensor, grid: tuple[int, int]) -> Floats:
    found: Floats = values.float().view(grid).cpu().numpy()
    return found


def _pixels(image: Tensor) -> Pixels:
    found: Pixels = image.permute(1, 2, 0).cpu().numpy()
    return found


def _percent(chance: Tensor) -> str:
    return "below 1%" if float(chance) < 0.005 else f"{float(chance):.0%}"


def _nothing(looks: Tensor) -> str:
    return "" if bool((looks > 0).any()) else "nothing spoke for it"
