"""Two images in one, captions joined, words swapped across them as negatives. Source: CLIC, arXiv:2505.24424."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.settings import BaseSettings, setting
from kiloword.data.transforms.mix import another, halves
from kiloword.distributed.collectives import sum_over_ranks
from kiloword.losses.pairs import logsumexp_over_ranks
from kiloword.methods.method import Component, Method, Part, ScaledContrast
from kiloword.methods.negatives import WORD, content_words, without
from kiloword.methods.sub_captions import sentences_of
from kiloword.model.model import Model
from kiloword.randomness import Draw
from kiloword.types import Batch, Encoded, Example, Features, Fetch, Input, PairBlocks, Pairs, Total, image_shape

IMAGES, POSITIVES, NEGATIVES = "clic_images", "clic_positives", "clic_negatives"  # inputs: uint8 [I, 3, H, W], texts
PIXELS = (
    "clic composes images, and --image-features has tokens of single images: omit --image-features, so that the image "
    "tower (which may be frozen) sees the composed images."
)


@dataclass(frozen=True, kw_only=True)
class ClicSettings(BaseSettings):
    """Composed images and the three parts of their loss, with the weights of CLIC's published code."""

    weight: float = setting(1.0, "weight of the loss of composed images, beside the pair loss of single ones", 0)
    contrast: float = setting(0.5, "weight of the contrast of composed images with the positives of all", 0)
    negative: float = setting(0.5, "weight of the choice between a positive and the negative of one image", 0)
    same: float = setting(1.0, "weight of the squared distance of the two orders of captions", 0)
    positives: int = setting(4, "positives of an image: two orders of its captions, then further sentences", 2, 16)
    crop: Literal["squash", "centre"] = setting("squash", "all of each image resized, or its centre half")


def clic(method: Method, settings: ClicSettings) -> Method:
    """Add the loss, which costs one more pass of each tower. Raises: ValueError for a method that it does not fit."""

    def make(name: str, example: Example, fetch: Fetch, draw: Draw) -> Tensor | Sequence[str]:
        if name not in example.inputs:  # all three are made at once: the partner is read once
            example.inputs |= composed(example, fetch, draw, settings)
        return example.inputs[name]

    inputs = {
        IMAGES: Input(partial(make, IMAGES), image_shape(), pixels=PIXELS),
        POSITIVES: Input(partial(make, POSITIVES)),
        NEGATIVES: Input(partial(make, NEGATIVES), note=partial(without, name="clic", words=1)),
    }
    return method.plus(contrasts={"clic": (settings.weight, Part(ClicContrast, settings))}, inputs=inputs)


def composed(example: Example, fetch: Fetch, draw: Draw, settings: ClicSettings) -> dict[str, Tensor | Sequence[str]]:
    """The inputs of one example: its image and a random other one in one, positives, and a negative or none."""
    rng = draw.rng("clic")
    other = fetch.example(another(example.row, len(fetch), rng), draw.other("clic partner"))
    pair = (example, other) if rng.random() < 0.5 else (other, example)
    image = halves(pair[0].image, pair[1].image, bool(rng.random() < 0.5), settings.crop == "squash")
    one, two = (sentences_of(e.captions) or e.captions[:1] for e in (example, other))
    swapped = swapped_across(one[0], two[0], rng)
    return {
        IMAGES: image,
        POSITIVES: joined(one, two, settings.positives, rng),
        NEGATIVES: [] if swapped is None else [_in_any_order(*swapped, rng)],
    }


def joined(one: Sequence[str], two: Sequence[str], n: int, rng: np.random.Generator) -> list[str]:
    """The first sentences of two images in either order, then other sentences of both, in any order: at most n texts.

    Where an image has one sentence alone, the texts are two; where it has too few, they return.
    """
    texts = [_stopped(one[0], two[0]), _stopped(two[0], one[0])]
    rest = [(rng.permutation(len(side) - 1) + 1).tolist() for side in (one, two)]
    for k in range(n - 2 if all(rest) else 0):
        a, b = (side[order[k % len(order)]] for side, order in zip((one, two), rest, strict=True))
        texts.append(_in_any_order(a, b, rng))
    return texts


def swapped_across(one: str, two: str, rng: np.random.Generator) -> tuple[str, str] | None:
    """Swap one content word between two captions. Returns: None where one has no word that the other lacks."""
    words = [{m[0].lower() for m in content_words(caption)} for caption in (one, two)]
    unlike = [sorted(words[0] - words[1]), sorted(words[1] - words[0])]
    if not all(unlike):
        return None
    a, b = (side[int(rng.integers(len(side)))] for side in unlike)
    return _replaced(one, a, b), _replaced(two, b, a)


def _replaced(caption: str, old: str, new: str) -> str:
    def change(m: re.Match[str]) -> str:  # capitals would tell negatives from positives
        return m[0] if m[0].lower() != old else new.capitalize() if m[0][0].isupper() else new

    return WORD.sub(change, caption)


def _in_any_order(one: str, two: str, rng: np.random.Generator) -> str:
    return _stopped(one, two) if rng.random() < 0.5 else _stopped(two, one)


def _stopped(*sentences: str) -> str:
    return " ".join(text if text.endswith((".", "!", "?")) else f"{text}." for text in map(str.strip, sentences))


class ClicContrast(ScaledContrast):
    """Composed images against their positives and negatives."""

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Composed images as rows, with the squared distance "apart" [I] of the first two positives (or 0).

        Positives, then negatives as columns: "set" [C] int64, the place of a positive among those of its image; -1.
        """
        groups = [batch.inputs.texts(name) for name in (POSITIVES, NEGATIVES)]
        vec = [model.encode_text(group.texts)[1]["vec"] for group in groups]
        of, of_negative = (group.image_of_text for group in groups)
        place = torch.arange(len(of), device=of.device) - torch.searchsorted(of, of)
        images = model.encode_image(batch.inputs.tensor(IMAGES))[1]["vec"]
        rows = {"vec": images * model.head.log_scale.exp(), "apart": apart(vec[0], of, place, len(batch))}
        columns = {
            "vec": torch.cat(vec),
            "position": batch.position[torch.cat([of, of_negative])],
            "set": torch.cat([place, torch.full_like(of_negative, -1)]),
        }
        return rows, columns

    def loss(self, pairs: PairBlocks) -> Total:
        return clic_loss(pairs, self.settings)


def apart(vec: Tensor, of: Tensor, place: Tensor, images: int) -> Tensor:
    """Squared distance of the first two positives of each image, [I]; 0 where it has one. Args: vec [T, D]; of [T]."""
    first, second = (
        vec.new_zeros(images, vec.shape[1]).index_add(0, of, vec * (place == n)[:, None]) for n in range(2)
    )
    both = of.new_zeros(images).index_add(0, of, (place < 2).long()) == 2
    return (first - second).square().sum(1) * both


def clic_loss(pairs: PairBlocks, settings: ClicSettings) -> Total:
    """Contrast, choice of the positive, distance of the two orders: means over positives, the last over images.

    Set k has the k-th positive of every image. An image is contrasted with each set apart, so that its positives do not
    compete; a positive with all images. An image without a negative adds nothing to the choices. Source:
    arXiv:2505.24424, eq. 4 to 7, as the published code computes them.
    """
    sets = pairs.column("set")
    of_rows, of_columns, chosen, has, of_negatives = _sums(pairs, settings.positives)
    push = (has * (of_negatives - chosen).sigmoid()).sum(0)  # [I], the derivative of the choices by the negative
    n = of_rows.new_full((), float(pairs.shape[0]))
    each = sum_over_ranks(n) / (sets >= 0).sum().clamp_min(1)
    contrast, choice = 0.5 * settings.contrast * each, settings.negative * each

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        z, of_set = block.logits, sets[columns].clamp_min(0)
        positive = sets[columns] >= 0
        mine = block.annotated & positive
        by_row, by_column = of_rows[:, rows][of_set].T, of_columns[columns]
        negative = of_negatives[rows, None]
        values = torch.where(mine, contrast * (by_row + by_column - 2 * z) + choice * F.softplus(negative - z), 0)
        pull = has[:, rows][of_set].T * (z - by_row).exp() + (z - by_column).exp()
        towards = contrast * 2 + choice * (negative - z).sigmoid()
        gradient = torch.where(positive, contrast * pull, 0) - torch.where(mine, towards, 0)
        share = torch.where(block.annotated & ~positive, (z - negative).exp() * push[rows, None], 0)
        return values.sum(1), gradient + choice * share

    total = pairs.total(loss) + settings.same * pairs.row("apart").sum()
    return Total(total, n)


def _sums(pairs: PairBlocks, positives: int) -> tuple[Tensor, ...]:
    """What one block cannot see.

    Returns: log-sum-exps of rows over each set [K, I] and of columns over the images of all ranks [C]; the logit of the
    image's own positive of each set [K, I], and whether there is one; the log-sum-exp over its own negatives [I].
    """
    sets, like = pairs.column("set"), pairs.row("vec").detach()
    n, columns_n = pairs.shape
    of_rows, negative, of_columns = (like.new_full(s, -torch.inf) for s in ((positives, n), (n,), (columns_n,)))
    chosen, has = like.new_zeros(2, positives, n)
    for rows, columns in pairs.blocks():
        block = pairs.block(rows, columns)
        z, annotated = block.logits.detach(), block.annotated
        of_columns[columns] = torch.logaddexp(of_columns[columns], z.logsumexp(0))
        mine = annotated & (sets[columns] < 0)
        negative[rows] = torch.logaddexp(negative[rows], z.masked_fill(~mine, -torch.inf).logsumexp(1))
        for k in range(positives):
            inside = sets[columns] == k
            of_rows[k, rows] = torch.logaddexp(of_rows[k, rows], z.masked_fill(~inside, -torch.inf).logsumexp(1))
            chosen[k, rows] += torch.where(annotated & inside, z, 0).sum(1)
            has[k, rows] += (annotated & inside).sum(1)
    of_columns = logsumexp_over_ranks(of_columns[None], of_columns[None][:0])[0][0]
    return of_rows, of_columns, chosen, has, negative


COMPONENTS = {
    "clic": Component(
        "contrasts", "two images in one, words swapped across their captions", ClicSettings, clic, "caption"
    )
}
