"""The slots of a method, and the interfaces of what fills them: pair losses, terms, components.

A method never sees a rank, a device, a precision or a micro-batch. A pair loss sees pairs; a term sees the local
batch of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.model.heads import Head, Single
from kiloword.types import Batch, Encoded, PairLoss, Pairs, Positives, Transform

if TYPE_CHECKING:
    from kiloword.model.model import Model
    from kiloword.training.learner import Learner


class Term(Protocol):
    """A local loss: sees one micro-batch of one rank. Implemented as an nn.Module that may have parameters.

    It must be additive over examples: a loss that compares examples with each other cannot be a term. Parameters are
    initialised as `initial()` specifies, from the seed of the run and their names; layers of torch need no `initial()`.
    """

    def count(self, batch: Batch) -> Tensor:
        """Scalar: the number of items to divide the sum by (images, caption tokens, selected rows)."""

    def __call__(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """Scalar sum over this batch."""


def annotated(pairs: Pairs) -> Tensor:
    """The pairs annotated in the data: [i, t] in {0, 1}."""
    return pairs.annotated.to(pairs.logits.dtype)


Prepare = Callable[["Learner", Iterator[Batch]], str]
"""Changes parameters before training, identically on every rank.

Args: an endless iterator of batches on the learner's device. Returns: a message for the log.
"""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training method. Replace a slot (`dataclasses.replace`) to make a new method."""

    name: str
    source: str  # the paper, "arXiv:..."
    summary: str  # one line for `kiloword methods`
    pair_loss: PairLoss
    head: Callable[[ModelConfig], Head] = lambda config: Head(Single(config))
    pair_weight: float = 1.0  # 0 disables the pair loss; only the captioning pooler of the head is trained
    positives: Positives = annotated
    transforms: tuple[Transform, ...] = ()
    terms: Mapping[str, tuple[float, Callable[[ModelConfig], nn.Module]]] = field(default_factory=dict)
    captions: int | Literal["one", "all"] = "one"
    shape: Callable[[ModelConfig], ModelConfig] = lambda config: config  # adapts the configuration of the towers
    towers: Mapping[str, Callable[[ModelConfig], nn.Module]] = field(default_factory=dict)  # additional: `Model.more`
    needs: tuple[str, ...] = ()  # names of precomputed features; "questions"; "truth": the images each text is true of
    prepare: Prepare | None = None  # called before the first step of a new run (bias search)

    def __post_init__(self) -> None:
        if self.transforms and "questions" in self.needs:
            raise ValueError(f"{self.name} needs unmixed images: it cannot be combined with transforms that mix them.")


@dataclass(frozen=True)
class Component:
    """A component that any method can use: `llip+compose+mined` is a preset with two components."""

    slot: str  # at most one component per slot: "transforms", "positives", "pair loss", "pooling", "uncertainty", ...
    summary: str  # one line for `kiloword methods`
    settings: type  # frozen dataclass of its settings
    apply: Callable[[Method, Any], Method]  # takes the method and the settings; raises ValueError for incompatible ones
