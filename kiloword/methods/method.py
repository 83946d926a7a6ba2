"""The slots of a method, and what may not mix.

A method never sees a rank, a device, a precision or a micro-batch. A pair loss sees pairs; a term sees one rank's
own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.types import Batch, Encoded, Pairs, Positives, Total, View

if TYPE_CHECKING:
    from kiloword.model.heads import Head
    from kiloword.model.model import Model
    from kiloword.training.learner import Learner


class PairBlocks(Protocol):
    """What a pair loss pulls: all pairs of local images and every rank's texts, a block at a time."""

    shape: tuple[int, int]  # local images, every rank's texts
    rows: Tensor  # [I] after `total`: each image's part of it

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of every block."""
        ...

    def beside(self, name: str) -> PairBlocks:
        """The same pairs scored by another head that stands in the model's under a name."""
        ...

    def block(self, rows: slice, columns: slice) -> Pairs:
        """One block, without gradient."""
        ...

    def total(self, loss: Callable[[Pairs, slice, slice], tuple[Tensor, Tensor]]) -> Tensor:
        """Sum over all blocks of `loss`, which returns a block's values [i] and its gradient by the logits [i, t]."""
        ...


PairLoss = Callable[["PairBlocks", Positives], Total]
"""Sum over this rank's rows, and the count (images or texts) that makes it a mean."""


class Term(Protocol):
    """A local loss: sees one micro-batch of one rank. Implemented as an nn.Module that may own parameters.

    Its sum over a batch is that of the sums over its parts: what relates examples to each other is no term. Parameters
    start as `initial()` says, from the seed of the run and their names; layers of torch need none.
    """

    def count(self, batch: Batch) -> Tensor:
        """Scalar: what the sum is divided by (images, caption tokens, selected rows); of the batch alone."""
        ...

    def __call__(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """Scalar sum over this batch."""
        ...


def annotated(pairs: Pairs) -> Tensor:
    """The pairs the data names: [i, t] in {0, 1}."""
    return pairs.annotated.to(pairs.logits.dtype)


Prepare = Callable[["Learner", Iterator[Batch]], str]
"""Changes parameters before training, equally on every rank; batches come on the learner's device, without end.

Returns a sentence for the log.
"""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Five slots. Replace one (`dataclasses.replace`) and you have a new method."""

    name: str
    source: str  # the paper, "arXiv:..."
    summary: str  # one line for `kiloword methods`
    head: Callable[[ModelConfig], Head]
    pair_loss: PairLoss
    pair_weight: float = 1.0  # 0: no pair loss, and of the head only what captions look through learns
    positives: Positives = annotated
    views: tuple[View, ...] = ()
    terms: Mapping[str, tuple[float, Callable[[ModelConfig], nn.Module]]] = field(default_factory=dict)
    captions: int | Literal["one", "all"] = "one"
    shape: Callable[[ModelConfig], ModelConfig] = lambda config: config  # what the method asks of the two towers
    towers: Mapping[str, Callable[[ModelConfig], nn.Module]] = field(default_factory=dict)  # more: `Model.more`
    needs: tuple[str, ...] = ()  # names of side features; "questions"; "truth": which images a text is true of
    prepare: Prepare | None = None  # before the first step of a fresh run: bias search

    def __post_init__(self) -> None:
        if self.views and "questions" in self.needs:
            raise ValueError(f"{self.name} asks about images as they are: views, which mix them, do not go with it.")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One slot's filling that any method may take: `llip+compose+mined` is a preset and two pieces."""

    slot: str  # one piece a slot: "views", "positives", "pair loss", "pooling", "uncertainty", ...
    summary: str  # one line for `kiloword methods`
    settings: type  # its own frozen settings dataclass
    apply: Callable[[Method, Any], Method]  # takes the method and the settings; ValueError says what cannot mix
