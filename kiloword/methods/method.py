"""The slots of a method, and the interfaces of what fills them: pair losses, contrasts, terms, components.

A method never sees a rank, a device, a precision or a micro-batch. A pair loss or contrast sees pairs, gathered over
ranks; a term sees the local batch of one rank. docs/methods.md has a table of needs and slots, and worked examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig, Recipe, sizes
from kiloword.distributed.collectives import whole
from kiloword.model.heads import Head, Single
from kiloword.types import Batch, Encoded, Features, Input, PairBlocks, PairLoss, Pairs, Positives, Total, Transform

if TYPE_CHECKING:
    from kiloword.model.model import Model
    from kiloword.training.learner import Learner


class Term(Protocol):
    """A local loss: sees one micro-batch of one rank. Implemented as an nn.Module that may have parameters.

    It must be additive over examples: a loss that compares examples with each other cannot be a term. Parameters are
    initialised as `initial()` specifies, from the seed of the run and their names; torch's linear layers, convolutions
    and norms need no `initial()`, embeddings do. Above a trunk `batch.images` are its tokens, floating-point [I, N, W].
    """

    def count(self, batch: Batch) -> Tensor:
        """Scalar: the number of items to divide the sum by (images, caption tokens, selected rows)."""

    def __call__(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """Scalar sum over this batch."""


class Contrast(Protocol):
    """A further pair loss, of features of its own: image and image, text and text, student and teacher.

    Implemented as an nn.Module; its parameters start as those of terms do. Rows and columns are gathered over ranks and
    accumulated over micro-batches like those of the main pair loss, so that it is exact.
    """

    head: Head  # scores rows against columns: an nn.Module with `score`, `logits` and `block`

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Features of R rows and C columns, each with "vec".

        "position", the place of each row's and column's image in the global batch, is added where it is missing and
        the number is that of the images or of the captions; for a `TextGroup` return
        `batch.position[group.image_of_text]`. Rows and columns of one position are annotated pairs.
        """

    def loss(self, pairs: PairBlocks) -> Total:
        """The sum over this rank's rows, and the count to divide by."""


@dataclass(frozen=True)
class Ramp:
    """A weight that rises linearly from 0, where the share `first` of the run is done, to its value at `last`.

    Raises: ValueError for shares that do not ascend within [0, 1].
    """

    weight: float
    first: float = 0.0
    last: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= 1:
            raise ValueError(
                f"a weight cannot rise from the share {self.first:g} of the run to {self.last:g}: expected two "
                "ascending numbers in [0, 1]."
            )

    def __call__(self, done: float) -> float:
        return self.weight * min(max((done - self.first) / (self.last - self.first), 0.0), 1.0)


@dataclass(frozen=True)
class Between:
    """A weight of a term that counts while the share of the run in [first, last) is done; elsewhere it is 0, and the
    term is not computed.

    Raises: ValueError for shares that do not ascend within [0, 1].
    """

    weight: float
    first: float = 0.0
    last: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= 1:
            raise ValueError(
                f"nothing lies between the share {self.first:g} of the run and {self.last:g}: expected two ascending "
                "numbers in [0, 1]."
            )

    def __call__(self, done: float) -> float:
        return self.weight if self.first <= done < self.last else 0.0


Weight = float | Callable[[float], float]
"""Of a loss: a number, or a function of the share of the run that is done, in [0, 1), such as `Ramp` or `Between`."""


def weight_at(weight: Weight, done: float) -> float:
    """The weight when a share of the run is done."""
    return weight(done) if callable(weight) else weight


def annotated(pairs: Pairs) -> Tensor:
    """The pairs annotated in the data: [i, t] in {0, 1}."""
    return pairs.annotated.to(pairs.logits.dtype)


Encode = Callable[["Model", Batch, Tensor | None], Encoded]
"""Runs the towers in place of `encode_all`, such as on masked images. Args: the patches that images keep by
`--augment.drop-patches`, [I, k] int64, or None."""


def encode_all(model: Model, batch: Batch, keep: Tensor | None) -> Encoded:
    """Run both towers on whole images and texts. Args: keep: [I, k] patches that images keep, None: all."""
    image_tokens, images = model.encode_image(batch.images, keep)
    text_tokens, texts = model.encode_text(batch.texts)
    return Encoded(image_tokens, text_tokens, images, texts)


AfterStep = Callable[["Learner", int], None]
"""Changes what has no gradient (teachers, centres, queues: buffers of contrasts and terms) identically on every rank.

Args: the learner, with `model`, `contrasts`, `terms` and `done`; the number of steps done: 0 before the first, to copy
initial weights. Buffers and frozen parameters are saved and resumed. `follow` is the step of an EMA teacher.
"""


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move the weights of a teacher towards those of the student, which may be sharded: t = m t + (1 - m) s.

    Args: teacher: a module like the student, whole on every rank; momentum: in [0, 1], 0 copies.
    Raises: ValueError for a weight of the teacher that the student lacks, as one that adapters replaced.
    """
    now = dict(student.named_parameters()) | dict(student.named_buffers())
    for name, value in (*teacher.named_parameters(), *teacher.named_buffers()):
        if name not in now:
            raise ValueError(f"the teacher follows the weight {name!r}, which the model lacks: omit its adapters.")
        source = whole(now[name].detach()).to(value)
        if value.is_floating_point():
            value.mul_(momentum).add_(source, alpha=1 - momentum)
        else:
            value.copy_(source)


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
    pair_weight: Weight = 1.0  # 0 disables the pair loss; only the captioning pooler of the head is trained
    positives: Positives = annotated
    transforms: tuple[Transform, ...] = ()
    contrasts: Mapping[str, tuple[Weight, Callable[[ModelConfig], nn.Module]]] = field(default_factory=dict)
    terms: Mapping[str, tuple[Weight, Callable[[ModelConfig], nn.Module]]] = field(default_factory=dict)
    inputs: Mapping[str, Input] = field(default_factory=dict)  # further fields of a batch
    encode: Encode = encode_all
    captions: int | Literal["one", "all"] = "one"
    shape: Callable[[ModelConfig], ModelConfig] = lambda config: config  # adapts the configuration of the towers
    towers: Mapping[str, Callable[[ModelConfig], nn.Module]] = field(default_factory=dict)  # additional: `Model.more`
    needs: tuple[str, ...] = ()  # names of precomputed features; "questions"; "truth": the images each text is true of
    notes: tuple[Callable[[Recipe], str], ...] = ()  # for the user, printed before the first step; "": none
    prepare: Prepare | None = None  # called before the first step of a new run (bias search)
    after_step: tuple[AfterStep, ...] = ()  # called after every step, and before the first
    stops_gradient: bool = False  # parts of a loss are detached on purpose: `verify` does not compare its slope

    def __post_init__(self) -> None:
        twice = ({"pair", "loss"} | self.terms.keys()) & self.contrasts.keys() or {"pair", "loss"} & self.terms.keys()
        if twice:
            raise ValueError(f"{self.name} has two losses named {sorted(twice)[0]!r}: rename one.")
        if self.transforms and "questions" in self.needs:
            raise ValueError(f"{self.name} needs unmixed images: it cannot be combined with transforms that mix them.")


@dataclass(frozen=True)
class Component:
    """A component that any method can use: `llip+compose+mined` is a preset with two components."""

    slot: str  # "transforms", "positives", "pair loss", "pooling", ...: one of each; "terms", "contrasts": several
    summary: str  # one line for `kiloword methods`
    settings: type  # frozen dataclass of its settings
    apply: Callable[[Method, Any], Method]  # takes the method and the settings; raises ValueError for incompatible ones


def small_head(method: Method) -> Head:
    """The head of a small model, without values."""
    with torch.device("meta"):
        return method.head(method.shape(sizes()["debug"]))


def scored_in_several_ways(head: Head) -> bool:
    """Whether a loss of its own trains a further head inside, as that of whole images in flair."""
    return any(isinstance(part, Head) for part in head.children())


def check_vectors(method: Method, component: str, text: str) -> None:
    """Check that a method has what a component compares: a trained vector per image and per text.

    Args: text: what a text is there, such as "caption". Raises: ValueError where it has not.
    """
    lacks = f"{component} compares one vector per image with one per {text}, which {method.name} has not"
    if type(small_head(method).pooling) is not Single:
        raise ValueError(f"{lacks}.")
    if method.pair_weight == 0:
        raise ValueError(
            f"{lacks}: without a pair loss its vectors are not trained. Use a method that has one, such as coca for "
            "cappa (--settings.parallel)."
        )
