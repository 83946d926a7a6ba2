"""Pair losses: blocks of pairs -> sum and count. Gradients are computed in the forward pass, block by block.

A pair loss returns, for a block of logits, its values and its gradient by the logits. `Blocks` propagates that gradient
through the score of the head to features and head weights immediately, and frees the block. No tensor `[I, T]` is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed.collectives import extreme_over_ranks, ranks, sum_over_ranks
from kiloword.distributed.gather import gather_features
from kiloword.types import Features, Pairs, Positives, Rule, Total

if TYPE_CHECKING:
    from kiloword.model.heads import Head
    from kiloword.types import PairBlocks, PairLoss

# whether backward runs with retain_graph; versions of torch without this function get copies
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

BlockLoss = Callable[[Pairs, slice, slice], Tensor | tuple[Tensor, Tensor]]
"""Values [i] of one block, one per row, and the gradient of their sum by the logits [i, t].

A loss that returns the values alone is differentiated by autograd, from one block's logits. What the logits of other
blocks contribute, such as the sums of a softmax, autograd does not see: such a loss states its derivative.
"""


CONSTANT = "_features."  # in the names of precomputed features, which have no gradient


def learns(name: str, value: Tensor) -> bool:
    """Whether a feature can have a gradient: precomputed features are constants."""
    return value.is_floating_point() and CONSTANT not in name


class LazyFeatures(dict[str, Tensor]):
    """Features. Some are made when they are first read.

    Args: ready: features that are there; later: makes one by its name, or raises KeyError.
    """

    def __init__(self, ready: Mapping[str, Tensor], later: Callable[[str], Tensor]) -> None:
        super().__init__(ready)
        self.later = later

    def __missing__(self, name: str) -> Tensor:
        value = self[name] = self.later(name)
        return value

    def part(self, rows: slice) -> tuple[LazyFeatures, list[Tensor]]:
        """Some rows of every feature; the features that can have a gradient also as leaves of a graph."""
        ready = {name: value[rows] for name, value in self.items()}
        leaves = {name: x.detach().requires_grad_() for name, x in ready.items() if learns(name, x)}
        return LazyFeatures(ready | leaves, lambda name: self[name][rows]), list(leaves.values())


@dataclass
class PairInputs:
    """This rank's side of the pairs: R rows, and C columns that every rank needs."""

    rows: Features  # [R, ...] with "vec" and "position"
    columns: Features  # [C, ...] likewise, gathered over ranks with their gradients
    constants: Features = field(default_factory=dict)  # [C, ...] precomputed, gathered when a loss reads them

    def gathered(self) -> LazyFeatures:
        """The columns of all ranks. A collective call, and so is the first reading of every constant."""

        def later(name: str) -> Tensor:
            if name not in self.constants:
                there = ", ".join(map(repr, {**self.columns, **self.constants}))
                raise ValueError(
                    f"the loss reads {name!r}, which nothing provides: this batch has {there}. Precomputed features "
                    "come from --features and the method's `needs`."
                )
            return gather_features({name: self.constants[name]})[name]

        return LazyFeatures(gather_features(self.columns), later)

    @staticmethod
    def join(parts: list[PairInputs]) -> PairInputs:
        """The inputs of several micro-batches as one, features as leaves of a new graph."""
        rows, columns, constants = zip(*((part.rows, part.columns, part.constants) for part in parts), strict=True)
        return PairInputs(_leaves(rows), _leaves(columns), _leaves(constants))


def _leaves(parts: Sequence[Features]) -> Features:
    whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    return {k: v.requires_grad_() if learns(k, v) else v for k, v in whole.items()}


class _WithGradient(torch.autograd.Function):
    """A scalar with precomputed gradients: passed on in place, copied only if the graph is retained."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if _graph_is_kept():
            return None, None, *(None if g is None else g * upstream for g in ctx.gradients)
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "second backward pass through a graph that was not retained"
        return None, None, *(None if g is None else g.mul_(upstream) for g in gradients)


class Blocks:
    """All pairs of local images (rows) and texts of all ranks (columns), one block at a time."""

    def __init__(self, head: Head, images: Features, texts: Features, chunk: int = 0) -> None:
        """images: features of this rank, every value [I, ...] with "position" [I]; texts: features of all ranks,
        with the "position" [T] of the image of each text; chunk: rows and columns per block, 0: the head's choice."""
        column = torch.arange(len(texts["vec"]), device=texts["vec"].device)
        self.head, self.chunk = head, chunk
        self.images, self.texts = (LazyFeatures(side, side.__getitem__) for side in (images, texts))
        self.texts["column"] = column
        self.shape = (len(images["vec"]), len(texts["vec"]))
        self.step = (chunk, chunk) if chunk else head.block(images, texts)
        self.rows = images["vec"].new_zeros(self.shape[0])
        self._whole = self.shape[0] <= self.step[0] and self.shape[1] <= self.step[1]
        self._only: tuple[tuple[slice, slice], tuple[Pairs, list[Tensor]]] | None = None  # a single block, scored once

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of every block."""
        for i in range(0, self.shape[0], self.step[0]):
            for t in range(0, self.shape[1], self.step[1]):
                yield (
                    slice(i, min(i + self.step[0], self.shape[0])),
                    slice(t, min(t + self.step[1], self.shape[1])),
                )

    def beside(self, name: str) -> Blocks:
        """The same pairs, scored by another head: `Head.beside`."""
        return Blocks(self.head.beside(name), self.images, self.texts, self.chunk)

    def row(self, name: str) -> Tensor:
        """A feature of this rank's rows, [I, ...]."""
        return self.images[name]

    def column(self, name: str) -> Tensor:
        """A feature of all ranks' columns, [T, ...]; nothing is scored. Raises: ValueError when nothing provides it."""
        return self.texts[name]

    def block(self, rows: slice, columns: slice) -> Pairs:
        """One block, logits without gradient."""
        return self._scored(rows, columns, self._whole)[0]

    def total(self, loss: BlockLoss) -> Tensor:
        """Sum of `loss` over all blocks, with gradients for features and head weights; fills `rows`."""
        inputs = [v for side in (self.images, self.texts) for k, v in side.items() if learns(k, v)]
        inputs += [p for p in self.head.parameters() if p.requires_grad]
        learned = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        sums = [torch.zeros_like(x) if learned and x.requires_grad else None for x in inputs]
        self.rows = torch.zeros_like(self.rows)
        for rows, columns in self.blocks():
            self._add(loss, rows, columns, inputs, sums if learned else [])
        if not learned:
            return self.rows.sum()
        out: Tensor = _WithGradient.apply(self.rows.sum(), sums, *inputs)  # type: ignore[no-untyped-call]
        return out

    def _add(
        self, loss: BlockLoss, rows: slice, columns: slice, inputs: list[Tensor], sums: list[Tensor | None]
    ) -> None:
        """Add the values of one block to `rows`, and their gradients by `inputs` to `sums` where there are any."""
        pairs, leaves = self._scored(rows, columns, bool(sums) or self._whole)
        values, by_logits = self._values(loss, pairs, rows, columns, bool(sums))
        self.rows[rows] += values
        if by_logits is None:
            return
        targets = [*leaves, *inputs[len(leaves) :]]
        gradients = torch.autograd.grad(pairs.logits, targets, by_logits, allow_unused=True)
        self._only = None
        of_images = sum(learns(name, value) for name, value in self.images.items())
        for n, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
            if total is not None and gradient is not None:
                part = total[rows] if n < of_images else total[columns] if n < len(leaves) else total
                part += gradient

    @staticmethod
    def _values(
        loss: BlockLoss, block: Pairs, rows: slice, columns: slice, learned: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Values [i] of a block, and their gradient by the logits [i, t], which autograd finds if the loss does not."""
        with torch.no_grad():
            result = loss(block, rows, columns)
        values, gradient = result if isinstance(result, tuple) else (result, None)
        if getattr(values, "shape", None) != (rows.stop - rows.start,):
            raise ValueError(
                f"a pair loss returned values {getattr(values, 'shape', values)} for {rows.stop - rows.start} images: "
                "expected one per image, summed over its texts."
            )
        if gradient is None and learned:
            with torch.enable_grad():
                logits = block.logits.detach().requires_grad_()
                again: Any = loss(replace(block, logits=logits), rows, columns)
                (gradient,) = torch.autograd.grad(again.sum(), logits)
        return values.detach(), gradient if learned else None

    def _scored(self, rows: slice, columns: slice, graph: bool) -> tuple[Pairs, list[Tensor]]:
        """A block whose logits carry a graph, if any, to the returned leaves (images, then texts)."""
        if self._only and self._only[0] == (rows, columns):
            return self._only[1]
        (images, of_images), (texts, of_texts) = self.images.part(rows), self.texts.part(columns)
        with torch.set_grad_enabled(graph):
            logits = self.head.logits(self.head.score(images, texts))
        pairs = Pairs(logits, images["position"][:, None] == texts["position"][None], images, texts)
        scored = pairs, [*of_images, *of_texts]
        if self._whole:
            self._only = (rows, columns), scored
        return scored


def sigmoid_loss(pairs: PairBlocks, positives: Positives, reduction: Literal["images", "texts"] = "images") -> Total:
    """SigLIP: binary classification of every pair; any number of positives. Mean over images, or over texts (FFF).

    Source: arXiv:2303.15343, eq. 1 (logit s x + b with b < 0; the printed sign of the bias is a typo); over texts,
    arXiv:2405.10286, eq. 3 (the same typo).
    """

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        y = positives(block)  # [i, t]
        values = F.softplus(block.logits) - y * block.logits  # = -y logsig(z) - (1 - y) logsig(-z)
        return values.sum(1), block.logits.sigmoid() - y

    # counts are summed over ranks, and each rank sees every text
    return summed(pairs, loss, pairs.shape[0] if reduction == "images" else pairs.shape[1] / ranks())


def summed(pairs: PairBlocks, loss: BlockLoss, count: float) -> Total:
    """The sum of a loss over all blocks, and this rank's share of the number to divide by."""
    total = pairs.total(loss)
    return Total(total, total.new_full((), count), pairs.rows)


def weighted(positives: Positives, *parts: tuple[float, PairBlocks, PairLoss]) -> Total:
    """The weighted sum of pair losses, each a mean, as one loss that the count of the first one divides."""
    losses = [loss(pairs, positives) for _, pairs, loss in parts]
    count = losses[0].count
    total, rows = count.new_zeros(()), count.new_zeros(())
    for (weight, pairs, _), one in zip(parts, losses, strict=True):
        factor = weight * (sum_over_ranks(count) / sum_over_ranks(one.count))
        total = total + factor * one.sum
        rows = rows + factor * (pairs.rows if one.rows is None else one.rows)
    return Total(total, count, rows)


Anchors = Literal["apart", "together", "images", "texts"]


def softmax_loss(pairs: PairBlocks, positives: Positives, anchors: Anchors = "apart") -> Total:
    """CLIP: symmetric InfoNCE, the mean of image-to-text (mean over images) and text-to-image (over texts).

    Several positives of a row or column share its probability equally. Columns are normalised over all ranks by
    one reduction of a few numbers per text, so images stay local. Source: arXiv:2103.00020, figure 3.

    Args: anchors: "apart", two means; "images" and "texts", one of their halves; "together", one mean over images and
    texts, in which texts weigh more where an image has several (SupCon).
    """
    (row_norm, row_count), (column_norm, column_count) = log_sums(pairs, positives)
    by_image, by_text = anchor_weights(pairs, anchors, row_norm)

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        y = positives(block)
        by_row, by_column = row_norm[rows, None], column_norm[None, columns]
        row_share = y / row_count[rows, None].clamp_min(1) * by_image
        column_share = y / column_count[None, columns].clamp_min(1) * by_text
        values = (row_share * (by_row - block.logits) + column_share * (by_column - block.logits)).sum(1)
        row_mass = row_count / row_count.clamp_min(1) * by_image  # sum of the shares: below 1 where y is soft
        column_mass = column_count / column_count.clamp_min(1) * by_text
        pull = (block.logits - by_row).exp() * row_mass[rows, None]
        pull = pull + (block.logits - by_column).exp() * column_mass[None, columns]
        return values, pull - row_share - column_share

    return summed(pairs, loss, pairs.shape[0])


def anchor_weights(pairs: PairBlocks, anchors: Anchors, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the image and text parts of a symmetric loss that is divided by the number of images: two scalars."""
    images = sum_over_ranks(like.new_full((), float(pairs.shape[0])))
    if anchors != "together":
        half_of_images, half_of_texts = (0.5 * (anchors in ("apart", half)) for half in ("images", "texts"))
        return like.new_full((), half_of_images), half_of_texts * (images / pairs.shape[1])
    share = images / (images + pairs.shape[1])
    return share, share


def log_sums(pairs: PairBlocks, positives: Positives, of_positives: bool = False) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of logits, and numbers of positives: of rows [k, I] and, over all ranks, of columns [k, T].

    Returns: k is 2; 3 with `of_positives`, whose second row is the log-sum-exp over positives alone.
    """

    def values(block: Pairs) -> tuple[list[Tensor], list[Tensor]]:
        z, y = block.logits.detach(), positives(block)
        return [z, z + y.log()] if of_positives else [z], [y]

    return sums_of(pairs, values)


def sums_of(
    pairs: PairBlocks, values: Callable[[Pairs], tuple[Sequence[Tensor], Sequence[Tensor]]]
) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of n values of pairs, then sums of m others: of rows [n + m, I] and, over all ranks, of columns."""
    sums, n = list[Tensor](), 0
    for rows, columns in pairs.blocks():
        terms, others = values(pairs.block(rows, columns))
        if not sums:
            n = len(terms)
            sums = [terms[0].new_full((n + len(others), size), -torch.inf) for size in pairs.shape]
            for side in sums:
                side[n:].zero_()
        for side, part, dim in ((sums[0], rows, 1), (sums[1], columns, 0)):
            logs = torch.stack([x.logsumexp(dim) for x in terms])
            side[:n, part] = torch.logaddexp(side[:n, part], logs)
            for total, y in zip(side[n:], others, strict=True):
                total[part] += y.sum(dim)
    return sums[0], torch.cat(logsumexp_over_ranks(sums[1][:n], sums[1][n:]))


def logsumexp_over_ranks(logs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over ranks of logs [k, T], and sums over ranks of other values [j, T].

    Two reductions, so that memory does not grow with the number of ranks.
    """
    top = extreme_over_ranks(logs, "most")
    high = torch.where(top > -torch.inf, top, 0)  # a value that is minus infinity on all ranks stays so
    shared = sum_over_ranks(torch.cat([(logs - high).exp(), values]))
    return high + shared[: len(logs)].log(), shared[len(logs) :]


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
        return getattr(self.positives, "mined", False)

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

    return summed(pairs, loss, pairs.shape[0])
