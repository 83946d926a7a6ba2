"""Losses for many positives per image and text: balanced positives, supervised contrastive loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kiloword.distributed.collectives import sum_over_ranks
from kiloword.losses.pairs import anchor_weights, log_sums, softmax_loss
from kiloword.types import PairBlocks, Pairs, Positives, Rule, Total


@dataclass(frozen=True)
class Balanced(Rule):
    """Positives divided by their sum over the images of all ranks, so that those of each text sum to one.

    Without this, a text that matches half of the images ("a scene") outweighs specific texts. Texts without a positive
    are unchanged. Costs one more pass over all pairs.
    """

    positives: Positives
    sums: Tensor | None = None  # [T]

    @property
    def mined(self) -> bool:
        return isinstance(self.positives, Rule) and self.positives.mined

    def bind(self, pairs: PairBlocks) -> Balanced:
        """A copy with the sums over these pairs."""
        sums = torch.empty(0)
        for n, (rows, columns) in enumerate(pairs.blocks()):
            y = self.positives(pairs.block(rows, columns))
            if n == 0:
                sums = y.new_zeros(pairs.shape[1])
            sums[columns] += y.sum(0)
        return Balanced(self.positives, sum_over_ranks(sums))

    def __call__(self, pairs: Pairs) -> Tensor:
        """[i, t] in [0, 1]."""
        assert self.sums is not None, "bind first"
        sums = self.sums[pairs.texts["column"]]
        return self.positives(pairs) / torch.where(sums > 0, sums, 1)


def supcon_loss(pairs: PairBlocks, positives: Positives, form: Literal["out", "in"] = "out") -> Total:
    """Supervised contrastive loss (SupCon): every image and text is an anchor, with all texts or images as candidates.

    With p the softmax over candidates, the loss of an anchor is the mean over its positives of -log p ("out") or minus
    the log of the mean of p over them ("in"); 0 without a positive. "out" differs from `softmax_loss` in the weights:
    there all images weigh as much as all texts, here each image as much as each text. Both are equal with one text per
    image. The paper also contrasts images with images; a pair loss sees pairs of image and text only.
    Source: arXiv:2004.11362, eq. 2 and 3, the baseline of arXiv:2405.10286, section 6.
    """
    if form == "out":
        return softmax_loss(pairs, positives, anchors="together")
    by_row, by_column = log_sums(pairs, positives, of_positives=True)  # [3, I], [3, T]
    weight, _ = anchor_weights(pairs, "together", by_row)

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        z, log_y = block.logits, positives(block).log()
        values, gradient = torch.zeros_like(z), torch.zeros_like(z)
        for every, chosen, count in (by_row[:, rows, None], by_column[:, None, columns]):
            share = torch.where(count > 0, (log_y + z - chosen).exp(), 0)  # sums to one over the positives of an anchor
            values += share * torch.where(count > 0, every - chosen + count.log(), 0)
            gradient += torch.where(count > 0, (z - every).exp(), 0) - share
        return weight * values.sum(1), weight * gradient

    total = pairs.total(loss)
    return Total(total, total.new_full((), float(pairs.shape[0])), pairs.rows)
