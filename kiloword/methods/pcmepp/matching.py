"""PCME++'s matching loss with pseudo-positives, and a loss of means alone beside one of Gaussians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.distributed.collectives import extreme_over_ranks, sum_over_ranks
from kiloword.losses.pairs import sigmoid_loss, softmax_loss
from kiloword.methods.method import PairBlocks, PairLoss
from kiloword.model.heads import Head
from kiloword.model.pooling import at_least_float
from kiloword.types import Features, Pairs, Positives, Total

ROUNDING = 1e3  # resolutions of a logit: equal captions are equally near on any number of ranks


def matching_loss(
    pairs: PairBlocks, positives: Positives, pseudo: float = 0.1, reduction: Literal["pairs", "images"] = "pairs"
) -> Total:
    """PCME++: every pair is a yes-or-no question, its logit -a CSD + b; mean over all pairs, or sum over images.

    Pseudo-positives ask again, with a weight, and the mean of two answers counts: a text at least as near to an image
    as the farthest of the texts written for it is one of the image, an image at least as near to a text as the
    text's own is one of the text. They match in full, and carry no gradient. The authors' code takes the sum of both
    directions everywhere, hence twice this, and of several texts the first. Source: arXiv:2305.18171, eq. 2 to 4.

    Args: pseudo: weight of the second question, 0: it is not asked; reduction: what the sum is divided by.
    """
    nearest = _thresholds(pairs) if pseudo else None

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        z, y = block.logits, positives(block)
        target = y
        if nearest is not None:
            of_image, of_text = (z >= nearest[0][rows, None]), (z >= nearest[1][columns])
            target = y + 0.5 * pseudo * (y.maximum(of_image.to(y)) + y.maximum(of_text.to(y)))
        values = (1 + pseudo) * F.softplus(z) - target * z
        return values.sum(1), (1 + pseudo) * z.sigmoid() - target

    total = pairs.total(loss)
    count = pairs.shape[0] * (pairs.shape[1] if reduction == "pairs" else 1)
    return Total(total, total.new_full((), float(count)), pairs.rows)


def _thresholds(pairs: PairBlocks) -> tuple[Tensor, Tensor]:
    """The least logit of each image [I] and, over all ranks, of each text [T] with its own; infinite without any."""
    found: list[Tensor] = []
    for rows, columns in pairs.blocks():
        block = pairs.block(rows, columns)
        own = block.logits.detach().masked_fill(~block.annotated, torch.inf)
        found = found or [own.new_full((size,), torch.inf) for size in pairs.shape]
        for least, part, dim in ((found[0], rows, 1), (found[1], columns, 0)):
            least[part] = least[part].minimum(own.amin(dim))
    margin = ROUNDING * torch.finfo(found[0].dtype).eps
    return found[0] - margin, extreme_over_ranks(found[1], "least") - margin


class Cosine(nn.Module):
    """The pooling of a head that stands in another: it scores what that has read by the cosine of "vec" alone."""

    def score(self, images: Features, texts: Features) -> Tensor:
        return at_least_float(images["vec"]) @ at_least_float(texts["vec"]).T


def cosine_head(scale: float, bias: float | None = None, max_scale: float | None = None) -> Head:
    """A scale, and a bias, of cosines of what another head has read."""
    pooling: Any = Cosine()
    return Head(pooling, scale=scale, bias=bias, max_scale=max_scale)


@dataclass(frozen=True)
class WithDeterministic:
    """A pair loss, and beside it a softmax or sigmoid loss of means alone, by the head's "deterministic" head.

    The sum is so scaled that dividing by the first one's count gives both means. Source: arXiv:2410.18857, table C.3.
    """

    own: PairLoss
    loss: Literal["softmax", "sigmoid"]
    weight: float

    def __call__(self, pairs: PairBlocks, positives: Positives) -> Total:
        means = softmax_loss if self.loss == "softmax" else sigmoid_loss
        first, second = self.own(pairs, positives), means(pairs.beside("deterministic"), positives)
        factor = self.weight * sum_over_ranks(first.count) / sum_over_ranks(second.count)
        assert first.rows is not None
        assert second.rows is not None
        return Total(first.sum + factor * second.sum, first.count, first.rows + factor * second.rows)
