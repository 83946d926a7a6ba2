"""The task `reconstruction`: whether the right caption improves the reconstruction of masked patches.

Text-guided masked images (arXiv:2401.02137, section 3.2), evaluated by their training loss, the L1 of masked patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kiloword.config.settings import Nothing
from kiloword.data.reading import EvalBatch
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.task import Findings, Inputs
from kiloword.explain.reconstruct import masked_patches, mean_colour, mim_settings, reconstruct
from kiloword.methods.coca import sycoca
from kiloword.model.encoding import inference
from kiloword.model.image import unfold
from kiloword.randomness import generator, key
from kiloword.types import Skipped, Source

MASKS = ("attentive", "random")
TRIES = 1000  # other images tried for a wrong caption, per image

Losses = dict[str, Tensor]
"""By guide or baseline, L1 of every image: [I] double."""


def run(inputs: Inputs, options: Nothing) -> Findings:
    """Yield, for masks "attentive" (patches most similar to the right caption) and "random" (keyed by row), as many as
    in training, the L1 of masked patches with the first caption of an image, one of another image, and an empty one.

    `reconstruction_l1_right@MASK`, `_wrong`, `_none`: means over images, in normalised pixels; baselines:
    `_mean_colour` of the visible patches, `_mean_image` of this data, and with `norm_pix` `_own_mean` of true patches.
    `right_beats_wrong@MASK`: share of images, a tie is one half; `wrong_minus_right@MASK`: mean difference, and `_se`
    its standard error; the same for none, the only one of a model trained without text.
    Raises: ValueError for a model without an image decoder, and for data without two images that differ in captions.
    """
    model, settings = inputs.matcher.model, mim_settings(inputs.matcher)
    captioned, total = list[tuple[int, str, list[str]]](), torch.zeros((), dtype=torch.float64)

    def look(part: EvalBatch) -> tuple[list[tuple[int, str, list[str]]], Tensor]:
        return list(zip(part.rows, part.keys, part.captions, strict=True)), part.images.double().sum(0)

    for named, batch_sum in per_batch(inputs, look, lambda part: list(map(bool, part.captions)), "no caption"):
        captioned, total = captioned + named, total + batch_sum  # sums of integers are exact in any order
    wrong = wrong_captions(inputs.source, {row: captions for row, _, captions in captioned})
    why = "no caption of another image is wrong for it"
    inputs.skipped.extend(Skipped(row, name, why) for row, name, _ in captioned if row not in wrong)
    if not wrong:
        raise ValueError(f"{inputs.source.name}: expected at least two images with different captions.")

    mean = total / len(captioned)

    def paint(part: EvalBatch) -> dict[str, Losses]:
        """Losses of a batch of images by mask."""
        captions = {  # a dummy batch has no captions
            "right": [(of_image or [""])[0] for of_image in part.captions],
            "wrong": [wrong.get(row, "") for row in part.rows],
            "none": [""] * len(part.rows),
        }
        drawn = [key(inputs.source.fingerprint, "reconstruction", row) for row in part.rows]
        images, seeds, encode = part.images.to(model.device), torch.tensor(drawn), inputs.matcher.tokenizer.encode
        with inference(model):
            texts = {name: encode(each, model.config.text).to(model.device) for name, each in captions.items()}
            guides = texts if settings.guide == "text" else {"none": texts["none"]}
            of_data = (mean.to(model.device).float() / 255 - model.mean.float()) / model.std.float()
            found = {}
            for mask in MASKS:
                by_text = mask == "attentive"
                hidden = masked_patches(model, images, texts["right"], seeds.to(model.device), by_text, settings)
                painted = reconstruct(model, images, hidden, list(guides.values()), settings)  # [n, m, 3 * patch^2]
                target = sycoca.pixels(model, images, hidden, norm_pix=False)
                patch, colour = model.config.image.patch, model.normalise(images).float()
                guesses = dict(zip(guides, painted, strict=True))
                guesses["mean_colour"] = mean_colour(colour, hidden, patch)
                guesses["mean_image"] = unfold(of_data[None], patch)[0][hidden]
                if settings.norm_pix:
                    guesses["own_mean"] = target.mean(-1, keepdim=True)
                distances = {name: sycoca.distance(guess, target).mean(1) for name, guess in guesses.items()}
                found[mask] = {name: each.double().cpu() for name, each in distances.items()}
        return found

    parts = list(per_batch(replace(inputs, skipped=[]), paint, lambda part: [row in wrong for row in part.rows]))
    for mask in MASKS:
        yield from values({name: torch.cat([part[mask][name] for part in parts]) for name in parts[0][mask]}, mask)
    yield "images", float(len(wrong))


def values(losses: Losses, mask: str) -> Iterator[tuple[str, float]]:
    """The metrics of one kind of mask."""
    for name, each in losses.items():
        yield f"reconstruction_l1_{name}@{mask}", math.fsum(each.tolist()) / len(each)
    for other in ("wrong", "none") if "right" in losses else ():
        difference = losses[other] - losses["right"]
        beats = (difference > 0).double().mean() + 0.5 * (difference == 0).double().mean()
        yield f"right_beats_{other}@{mask}", float(beats)
        yield f"{other}_minus_right@{mask}", float(difference.mean())
        if len(difference) > 1:
            yield f"{other}_minus_right_se@{mask}", float(difference.std()) / math.sqrt(len(difference))


def wrong_captions(source: Source, captions: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """By row, the first caption of another image that is not among its captions and, with ground truth, false.

    The images are permuted, keyed by the data; each gets the caption of the next image in the circle whose caption is
    wrong for it, so that nearly every caption is used once. Rows without a wrong caption are omitted.
    """
    rows, truth = list(captions), getattr(source, "relevance", None)
    circle = [rows[n] for n in generator(source.fingerprint, "wrong captions").permutation(len(rows))]
    wrong: dict[int, str] = {}
    for place, row in enumerate(circle):
        for step in range(1, min(len(rows), TRIES + 1)):
            other = captions[circle[(place + step) % len(rows)]][0]
            if other not in captions[row] and not (truth is not None and truth([other], [row])[0, 0]):
                wrong[row] = other
                break
    return wrong
