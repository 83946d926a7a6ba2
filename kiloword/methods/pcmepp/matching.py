"""PCME++'s matching loss with pseudo-positives, and an auxiliary loss on the means of Gaussians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed.collectives import extreme_over_ranks, sum_over_ranks
from kiloword.losses.pairs import sigmoid_loss, softmax_loss
from kiloword.types import PairBlocks, PairLoss, Pairs, Positives, Total

ROUNDING = 1e3  # margin in machine epsilons: ties of equal captions do not depend on the number of ranks


def matching_loss(
    pairs: PairBlocks, positives: Positives, pseudo: float = 0.1, reduction: Literal["pairs", "images"] = "pairs"
) -> Total:
    """PCME++: binary classification of every pair with logit -a CSD + b; mean over all pairs, or sum per image.

    A second loss of weight `pseudo` adds pseudo-positives, in the mean of two directions: texts at least as close to
    an image as the farthest of its captions, and images at least as close to a text as its own image. Their target is
    1; the selection has no gradient. The authors' code sums both directions, hence twice this loss, and compares with
    the first caption of an image. Source: arXiv:2305.18171, eq. 2 to 4.

    Args: pseudo: weight of the loss with pseudo-positives, 0: off; reduction: what the sum is divided by.
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
    """Least logit of the annotated pairs of each image [I] and, over all ranks, each text [T]; infinite without any."""
    least_logits: list[Tensor] = []
    for rows, columns in pairs.blocks():
        block = pairs.block(rows, columns)
        annotated = block.logits.detach().masked_fill(~block.annotated, torch.inf)
        least_logits = least_logits or [annotated.new_full((size,), torch.inf) for size in pairs.shape]
        for least, part, dim in ((least_logits[0], rows, 1), (least_logits[1], columns, 0)):
            least[part] = least[part].minimum(annotated.amin(dim))
    margin = ROUNDING * torch.finfo(least_logits[0].dtype).eps
    return least_logits[0] - margin, extreme_over_ranks(least_logits[1], "least") - margin


@dataclass(frozen=True)
class WithDeterministic:
    """A pair loss plus a softmax or sigmoid loss of the means, scored by the auxiliary head "deterministic".

    The second sum is scaled such that dividing by the first count gives both means.
    Source: arXiv:2410.18857, table C.3.
    """

    main: PairLoss
    loss: Literal["softmax", "sigmoid"]
    weight: float

    def __call__(self, pairs: PairBlocks, positives: Positives) -> Total:
        means = softmax_loss if self.loss == "softmax" else sigmoid_loss
        first, second = self.main(pairs, positives), means(pairs.beside("deterministic"), positives)
        factor = self.weight * sum_over_ranks(first.count) / sum_over_ranks(second.count)
        assert first.rows is not None
        assert second.rows is not None
        return Total(first.sum + factor * second.sum, first.count, first.rows + factor * second.rows)
