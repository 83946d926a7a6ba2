"""Whether the right caption improves the reconstruction of masked patches: `kiloword eval reconstruction MODEL`.

Text-guided masked images (arXiv:2401.02137, section 3.2), evaluated by their training loss, the L1 of masked patches.
The paper reports no such metric; the term is meant to make the right caption the best guide.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kiloword.data.reading import EvalBatch
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.reconstruction import ReconstructionTaskOptions
from kiloword.evaluation.reconstruction.page import SHOWN, PaintedExample, worse_than_flat
from kiloword.evaluation.task import Inputs, Values
from kiloword.explain.reconstruct import fill, masked_patches, mean_colour, mim_settings, reconstruct
from kiloword.methods.coca import masking
from kiloword.methods.coca import sycoca as masked_images
from kiloword.model.encoding import inference
from kiloword.model.image import grid, unfold
from kiloword.randomness import key
from kiloword.types import Skipped, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher


log = logging.getLogger(__name__)

MASKS = ("attentive", "random")
GUIDES = ("right", "wrong", "none")
TRIES = 1000  # other images tried for a wrong caption, per image


def run(inputs: Inputs, options: ReconstructionTaskOptions) -> Values:
    """Yield, for masks "attentive" and "random", losses of masked patches with the right caption, a wrong one and none.

    `reconstruction_l1_right@MASK`, `_wrong`, `_none`: mean over images of the L1 of their masked patches, in
    normalised pixels; baselines: `_mean_colour` of the visible patches, `_mean_image` of this data.
    `right_beats_wrong@MASK`: share of images, a tie counts one half; `wrong_minus_right@MASK`: mean difference,
    `wrong_minus_right_se@MASK`: its standard error; the same for none. The masked patches of an image are the same for
    all of these, as many as in training: those most similar to the right caption by this model, or random ones keyed
    by row, which are the same for all models of equal number of patches.

    The right caption is the first of the image, the wrong one that of another image (see `wrong_captions`), none an
    empty one, which may not occur in training: then `_none` includes the effect of an unfamiliar input. A model trained
    without text has `_none` only. A model with `norm_pix` gets mean and deviation of the true patches; its baseline
    `_own_mean` is that mean.

    Logs a warning if a model is worse than one flat colour.

    Raises: ValueError for a model without an image decoder, and for data without two images that differ in captions.
    """
    judge, source = Judge(inputs.matcher, inputs.source), inputs.source
    wrong, mean = _first_pass(inputs)
    judged, usable = partial(judge.judged, wrong=wrong, mean=mean), lambda part: [row in wrong for row in part.rows]
    for batch in per_batch(replace(inputs, skipped=[]), judged, usable):  # rows were skipped in the first pass
        judge.add(batch)
    if inputs.shown is not None:
        truth = hasattr(source, "relevance")
        inputs.shown.update(examples=judge.examples, norm_pix=judge.settings.norm_pix, truth=truth)
    yield "images", float(len(wrong))
    for mask, losses in judge.losses.items():
        metrics = dict(values(losses, mask))
        if worse := worse_than_flat(metrics, mask):
            log.warning("%s patches: %s", mask, worse)
        yield from metrics.items()


def values(losses: dict[str, list[float]], mask: str) -> Iterator[tuple[str, float]]:
    """The metrics of one kind of mask. Args: losses: of every image, by guide and baseline."""
    for name, each in losses.items():
        yield f"reconstruction_l1_{name}@{mask}", math.fsum(each) / len(each)
    if "right" not in losses:
        return
    right, *others = (torch.tensor(losses[guide], dtype=torch.float64) for guide in GUIDES)
    for other, loss in zip(GUIDES[1:], others, strict=True):
        difference = loss - right
        beats = (difference > 0).double().mean() + 0.5 * (difference == 0).double().mean()
        yield f"right_beats_{other}@{mask}", float(beats)
        yield f"{other}_minus_right@{mask}", float(difference.mean())
        if len(difference) > 1:
            yield f"{other}_minus_right_se@{mask}", float(difference.std()) / math.sqrt(len(difference))


def _first_pass(inputs: Inputs) -> tuple[dict[int, str], Tensor]:
    """A wrong caption by row, and the mean image [3, H, W], 0 to 255, of all images with captions."""

    def look(part: EvalBatch) -> tuple[list[tuple[int, str, list[str]]], Tensor]:
        return list(zip(part.rows, part.keys, part.captions, strict=True)), part.images.double().sum(0)

    source, bad = inputs.source, inputs.skipped
    captioned: list[tuple[int, str, list[str]]] = []
    total = torch.zeros((), dtype=torch.float64)  # sums of integers are exact in any order
    for named, batch_sum in per_batch(inputs, look, lambda part: list(map(bool, part.captions)), "no caption"):
        captioned += named
        total = total + batch_sum
    wrong = wrong_captions(source, {row: captions for row, _, captions in captioned})
    why = "no caption of another image is wrong for it"
    bad += [Skipped(row, name, why) for row, name, _ in captioned if row not in wrong]
    if not wrong:
        raise ValueError(
            f"{source.name}: of its {len(captioned)} images with captions none has a wrong one among those of others; "
            "expected at least two images with different captions."
        )
    return wrong, total / len(captioned)


def wrong_captions(source: Source, captions: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """By row, the first caption of another image that is not among its captions and, with ground truth, false.

    The images are permuted, keyed by the data; each gets the caption of the next image in the circle whose caption is
    wrong for it, so that nearly every caption is used once. Rows without a wrong caption are omitted.

    Args: captions: by row of the source, at least one each.
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


@dataclass(frozen=True)
class Painted:
    """A batch of images with masked patches, reconstructed from several guides."""

    images: Tensor  # uint8 [n, 3, H, W]
    hidden: Tensor  # [n, m]
    pixels: dict[str, Tensor]  # [n, m, 3 * patch^2] by guide, normalised
    losses: dict[str, Tensor]  # [n] by guide, and by baseline


JudgedImages = dict[str, tuple[dict[str, list[float]], list[PaintedExample]]]
"""By mask: losses of a batch of images by guide and baseline, and a few examples."""


class Judge:
    """Reconstructs images with a model; collects losses and a few examples."""

    def __init__(self, matcher: Matcher, source: Source) -> None:
        self.settings = mim_settings(matcher)
        self.matcher, self.model, self.source = matcher, matcher.model, source
        self.losses: dict[str, dict[str, list[float]]] = {mask: {} for mask in MASKS}  # by mask, then guide: [images]
        self.examples: list[PaintedExample] = []

    def add(self, batch: JudgedImages) -> None:
        """Add the losses and examples of a batch."""
        for mask, (losses, examples) in batch.items():
            for name, each in losses.items():
                self.losses[mask].setdefault(name, []).extend(each)
            self.examples += examples[: self._room(mask)]

    def _room(self, mask: str) -> int:
        return SHOWN - sum(example.mask == mask for example in self.examples)

    def judged(self, part: EvalBatch, wrong: Mapping[int, str], mean: Tensor) -> JudgedImages:
        """Reconstruct the images of a batch, each from its right caption, a wrong one and none."""
        device = self.model.device
        rights = [(captions or [""])[0] for captions in part.captions]  # a dummy batch has no captions
        wrongs = [wrong.get(row, "") for row in part.rows]
        seeds = torch.tensor([key(self.source.fingerprint, "reconstruction", row) for row in part.rows])
        batch: JudgedImages = {}
        for mask in MASKS:
            with inference(self.model):
                images = part.images.to(device)
                done = self.paint(images, rights, wrongs, seeds.to(device), mask, mean.to(device))
            losses = {name: each.double().tolist() for name, each in done.losses.items()}
            shown = range(min(self._room(mask), len(rights)))
            batch[mask] = losses, [self.example(done, n, mask, rights[n], wrongs[n]) for n in shown]
        return batch

    def paint(
        self, images: Tensor, right: Sequence[str], wrong: Sequence[str], seeds: Tensor, mask: str, mean: Tensor
    ) -> Painted:
        """Reconstruct images uint8 [n, 3, H, W]; seeds [n] of random masks; mean: the mean image."""
        model, config = self.model, self.model.config
        captions = dict(zip(GUIDES, (right, wrong, [""] * len(right)), strict=True))
        guides = {k: self.matcher.tokenizer.encode(v, config.text).to(images.device) for k, v in captions.items()}
        hidden = masked_patches(model, images, guides["right"], seeds, mask == "attentive", self.settings)
        used = guides if self.settings.guide == "text" else {"none": guides["none"]}
        pixels = dict(zip(used, reconstruct(model, images, hidden, list(used.values()), self.settings), strict=True))
        target = masked_images.pixels(model, images, hidden, norm_pix=False)
        every = {**pixels, **self.baselines(images, hidden, target, mean)}
        losses = {name: masked_images.distance(prediction, target).mean(1) for name, prediction in every.items()}
        return Painted(images, hidden, pixels, losses)

    def baselines(self, images: Tensor, hidden: Tensor, target: Tensor, mean: Tensor) -> dict[str, Tensor]:
        """Baseline predictions: [n, m, 3 * patch^2], or broadcastable to it."""
        patch, std = self.model.config.image.patch, self.model.std.float()
        everywhere = unfold(((mean.float() / 255 - self.model.mean.float()) / std)[None], patch)[0]
        predictions = {
            "mean_colour": mean_colour(self.model.normalise(images).float(), hidden, patch),
            "mean_image": everywhere[hidden],
        }
        return {**predictions, "own_mean": target.mean(-1, keepdim=True)} if self.settings.norm_pix else predictions

    def example(self, done: Painted, n: int, mask: str, right: str, wrong: str) -> PaintedExample:
        """Page data of image n of a batch."""
        row = slice(n, n + 1)
        filled = {
            name: fill(self.model, done.images[row], done.hidden[row], pixels[row])[0].permute(1, 2, 0).cpu().numpy()
            for name, pixels in done.pixels.items()
        }
        original = done.images[n].permute(1, 2, 0).cpu().numpy()
        losses = {name: float(done.losses[name][n]) for name in done.pixels}
        side = grid(self.model.config.image)
        hidden = masking.as_bool(done.hidden[row], side * side)[0].view(side, side).cpu().numpy()
        return PaintedExample(mask, original, hidden, filled, losses, right, wrong)
