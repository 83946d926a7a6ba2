"""The task `reconstruction`: whether the right caption improves the reconstruction of masked patches.

Text-guided masked images (arXiv:2401.02137, section 3.2), evaluated by their training loss, the L1 of masked patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kiloword.data.reading import EvalBatch
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.task import Findings, Inputs, Task
from kiloword.explain.reconstruct import fill, masked_patches, mean_colour, mim_settings, reconstruct
from kiloword.methods.coca import sycoca
from kiloword.model.encoding import inference
from kiloword.model.image import unfold
from kiloword.randomness import key
from kiloword.report import Block, Gallery, Tile
from kiloword.types import Skipped, Source

MASKS = ("attentive", "random")
GUIDES = ("right", "wrong", "none")
TRIES = 1000  # other images tried for a wrong caption, per image
SHOWN = 8  # images of the page


@dataclass(frozen=True, kw_only=True)
class ReconstructionTaskOptions:
    """There are none."""


def run(inputs: Inputs, options: ReconstructionTaskOptions) -> Findings:
    """Yield, for masks "attentive" and "random", losses of masked patches with the right caption, a wrong one and none.

    `reconstruction_l1_right@MASK`, `_wrong`, `_none`: mean over images of the L1 of their masked patches, in
    normalised pixels; baselines: `_mean_colour` of the visible patches, `_mean_image` of this data, and with `norm_pix`
    (predictions get mean and deviation of the true patches) `_own_mean`. `right_beats_wrong@MASK`: share of images, a
    tie counts one half; `wrong_minus_right@MASK`: mean difference, `wrong_minus_right_se@MASK`: its standard error; the
    same for none. The masked patches of an image are the same for all of these, as many as in training: those most
    similar to the right caption by this model, or random ones keyed by row, the same for all models.

    The right caption is the first of the image, the wrong one that of another image (see `wrong_captions`), none an
    empty one. A model trained without text has `_none` only.
    Raises: ValueError for a model without an image decoder, and for data without two images that differ in captions.
    """
    mim_settings(inputs.matcher)  # refuses a model that does not paint, before the data is read
    wrong, mean = _first_pass(inputs)

    def losses_and_blocks(part: EvalBatch) -> tuple[dict[str, dict[str, list[float]]], list[Block]]:
        return _painted(inputs, part, wrong, mean)

    losses: dict[str, dict[str, list[float]]] = {mask: {} for mask in MASKS}
    blocks: list[Block] = []
    usable = per_batch(replace(inputs, skipped=[]), losses_and_blocks, lambda part: [row in wrong for row in part.rows])
    for by_mask, drawn in usable:  # rows were skipped in the first pass
        blocks += drawn
        for mask, by_name in by_mask.items():
            for name, each in by_name.items():
                losses[mask].setdefault(name, []).extend(each)
    yield "images", float(len(wrong))
    for mask in MASKS:
        yield from values(losses[mask], mask)
    yield from blocks[: SHOWN * len(MASKS)]


def values(losses: Mapping[str, Sequence[float]], mask: str) -> Iterator[tuple[str, float]]:
    """The metrics of one kind of mask. Args: losses: of every image, by guide and baseline."""
    for name, each in losses.items():
        yield f"reconstruction_l1_{name}@{mask}", math.fsum(each) / len(each)
    for other in GUIDES[1:] if "right" in losses else ():
        difference = torch.tensor(losses[other], dtype=torch.float64) - torch.tensor(
            losses["right"], dtype=torch.float64
        )
        beats = (difference > 0).double().mean() + 0.5 * (difference == 0).double().mean()
        yield f"right_beats_{other}@{mask}", float(beats)
        yield f"{other}_minus_right@{mask}", float(difference.mean())
        if len(difference) > 1:
            yield f"{other}_minus_right_se@{mask}", float(difference.std()) / math.sqrt(len(difference))


def _first_pass(inputs: Inputs) -> tuple[dict[int, str], Tensor]:
    """A wrong caption by row, and the mean image [3, H, W], 0 to 255, of all images with captions."""

    def look(part: EvalBatch) -> tuple[list[tuple[int, str, list[str]]], Tensor]:
        return list(zip(part.rows, part.keys, part.captions, strict=True)), part.images.double().sum(0)

    source, captioned, total = inputs.source, list[tuple[int, str, list[str]]](), torch.zeros((), dtype=torch.float64)
    for named, batch_sum in per_batch(inputs, look, lambda part: list(map(bool, part.captions)), "no caption"):
        captioned += named
        total = total + batch_sum  # sums of integers are exact in any order
    wrong = wrong_captions(source, {row: captions for row, _, captions in captioned})
    why = "no caption of another image is wrong for it"
    inputs.skipped.extend(Skipped(row, name, why) for row, name, _ in captioned if row not in wrong)
    if not wrong:
        raise ValueError(f"{source.name}: expected at least two images with different captions.")
    return wrong, total / len(captioned)


def wrong_captions(source: Source, captions: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """By row, the first caption of another image that is not among its captions and, with ground truth, false.

    The images are permuted, keyed by the data; each gets the caption of the next image in the circle whose caption is
    wrong for it, so that nearly every caption is used once. Rows without a wrong caption are omitted.
    """
    rows, truth = list(captions), getattr(source, "relevance", None)
    rng = np.random.Generator(np.random.Philox(key(source.fingerprint, "wrong captions")))
    circle = [rows[n] for n in rng.permutation(len(rows))]
    wrong: dict[int, str] = {}
    for place, row in enumerate(circle):
        for step in range(1, min(len(rows), TRIES + 1)):
            other = captions[circle[(place + step) % len(rows)]][0]
            if other not in captions[row] and not (truth is not None and truth([other], [row])[0, 0]):
                wrong[row] = other
                break
    return wrong


def _painted(
    inputs: Inputs, part: EvalBatch, wrong: Mapping[int, str], mean: Tensor
) -> tuple[dict[str, dict[str, list[float]]], list[Block]]:
    """Losses of a batch of images by mask, then guide or baseline; and where a page is wanted its first images."""
    model, settings = inputs.matcher.model, mim_settings(inputs.matcher)
    images, patch, count = part.images.to(model.device), model.config.image.patch, len(part.rows)
    captions = {  # a dummy batch has no captions
        "right": [(of_image or [""])[0] for of_image in part.captions],
        "wrong": [wrong.get(row, "") for row in part.rows],
        "none": [""] * count,
    }
    seeds = torch.tensor([key(inputs.source.fingerprint, "reconstruction", row) for row in part.rows]).to(model.device)
    losses: dict[str, dict[str, list[float]]] = {}
    blocks: list[Block] = []
    for mask in MASKS:
        with inference(model):
            encode = inputs.matcher.tokenizer.encode
            guides = {name: encode(texts, model.config.text).to(model.device) for name, texts in captions.items()}
            hidden = masked_patches(model, images, guides["right"], seeds, mask == "attentive", settings)  # [n, m]
            used = guides if settings.guide == "text" else {"none": guides["none"]}
            painted = reconstruct(model, images, hidden, list(used.values()), settings)  # [n, m, 3 * patch^2] each
            target = sycoca.pixels(model, images, hidden, norm_pix=False)
            of_data = (mean.to(model.device).float() / 255 - model.mean.float()) / model.std.float()
            predictions = dict(zip(used, painted, strict=True)) | {
                "mean_colour": mean_colour(model.normalise(images).float(), hidden, patch),
                "mean_image": unfold(of_data[None], patch)[0][hidden],
            }
            if settings.norm_pix:
                predictions["own_mean"] = target.mean(-1, keepdim=True)
            found = {name: sycoca.distance(one, target).mean(1) for name, one in predictions.items()}
            losses[mask] = {name: each.double().tolist() for name, each in found.items()}
            for n in range(min(SHOWN, count) if inputs.page else 0):
                tiles, row = [], slice(n, n + 1)
                shown = {"original": target, "hidden": torch.zeros_like(target)} | {k: predictions[k] for k in used}
                for name, pixels in shown.items():
                    image = fill(model, images[row], hidden[row], pixels[row])[0].permute(1, 2, 0).cpu().numpy()
                    loss = f" {losses[mask][name][n]:.3f}" if name in used else ""
                    tiles.append(Tile(image, [name + loss, captions.get(name, [""] * count)[n]]))
                blocks.append(Gallery(tiles, f"{mask} mask: {captions['right'][n]}"))
    return losses, blocks


TASK = Task(
    name="reconstruction",
    help="Reconstruct hidden patches from the right caption, a wrong one and none: L1 of each.",
    data="images with captions",
    options=ReconstructionTaskOptions,
    run=run,
)
