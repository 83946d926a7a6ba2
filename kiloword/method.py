"""The slots of a method, and what may not mix.

A method never sees a rank, a device, a precision or a micro-batch. A pair loss sees pairs; a term sees one rank's
own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor, nn

from kiloword.recipes import ModelConfig
from kiloword.types import Batch, Encoded, Pairs, Positives, Total, View

if TYPE_CHECKING:
    from kiloword.heads import Head
    from kiloword.model import Model


class PairBlocks(Protocol):
    """What a pair loss pulls: all pairs of local pictures and every rank's texts, a block at a time."""

    shape: tuple[int, int]  # local pictures, every rank's texts

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of every block."""
        ...

    def block(self, rows: slice, columns: slice) -> Pairs:
        """One block, without gradient."""
        ...

    def total(self, loss: Callable[[Pairs, slice, slice], tuple[Tensor, Tensor]]) -> Tensor:
        """Sum over all blocks of `loss`, which returns a block's value and its gradient by the logits [i, t]."""
        ...


PairLoss = Callable[["PairBlocks", Positives], Total]
"""Sum over this rank's rows, and the count (pictures or texts) that makes it a mean."""


class Term(Protocol):
    """A local loss: sees one micro-batch of one rank. Implemented as an nn.Module that may own parameters."""

    def count(self, batch: Batch) -> Tensor:
        """Scalar: what the sum is divided by (pictures, caption tokens, selected rows); of the batch alone."""
        ...

    def __call__(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """Scalar sum over this batch."""
        ...


def annotated(pairs: Pairs) -> Tensor:
    """The pairs the data names: [i, t] in {0, 1}."""
    return pairs.annotated.to(pairs.logits.dtype)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Five slots. Replace one (`dataclasses.replace`) and you have a new method."""

    name: str
    source: str  # the paper, "arXiv:..."
    summary: str  # one line for `kiloword methods`
    head: Callable[[ModelConfig], Head]
    pair_loss: PairLoss
    positives: Positives = annotated
    views: tuple[View, ...] = ()
    terms: Mapping[str, tuple[float, Callable[[ModelConfig], nn.Module]]] = field(default_factory=dict)
    captions: int | Literal["one", "all"] = "one"
    shape: Callable[[ModelConfig], ModelConfig] = lambda config: config  # what the method asks of the two towers
    towers: Mapping[str, Callable[[ModelConfig], nn.Module]] = field(default_factory=dict)  # more: `Model.more`
    prepare: Callable[[Model, Iterator[Batch]], None] | None = None  # before step 1: bias search, teachers
