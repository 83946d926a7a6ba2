"""The slots of a method, and the base classes of what fills them: contrasts, terms, components.

A method never sees a rank, a device, a precision or a micro-batch. A pair loss or contrast sees pairs, gathered over
ranks; a term sees the local batch of one rank. docs/own-method.md has a table of needs and slots, and examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig, Recipe
from kiloword.distributed.collectives import whole
from kiloword.losses.pairs import PairInputs
from kiloword.model.heads import Head, Piece, Pooling, Scale, Single, Uncertainty
from kiloword.model.model import Model
from kiloword.model.pooling import at_least_float
from kiloword.types import Batch, Encoded, Features, Input, PairBlocks, PairLoss, Pairs, Positives, Total, Transform

if TYPE_CHECKING:
    from kiloword.training.step import Learner

PAIR = "pair"  # the name of the main pair loss
M = TypeVar("M", bound=Piece, covariant=True)


@dataclass(frozen=True)
class Part(Generic[M]):
    """A module of a method: its class, and its settings. `Part(Contextual, s)(config)` is `Contextual(config, s)`."""

    kind: type[M]
    settings: Any = None

    def __call__(self, config: ModelConfig) -> M:
        make: Callable[..., M] = self.kind
        return make(config) if self.settings is None else make(config, self.settings)

    def shape(self, config: ModelConfig) -> ModelConfig:
        """The configuration of the towers that the module needs."""
        return self.kind.towers(config, self.settings)


class Term(Piece):
    """A local loss: sees one micro-batch of one rank. It may have parameters.

    It must be additive over examples: a loss that compares examples with each other cannot be a term. Parameters are
    initialised as `initial()` specifies, from the seed of the run and their names; torch's linear layers, convolutions
    and norms need no `initial()`, embeddings do. Above a trunk `batch.images` are its tokens, floating-point [I, N, W].
    """

    def count(self, batch: Batch) -> Tensor | int:
        """The number of items to divide the sum by (images, caption tokens, selected rows); a scalar on the device
        where it depends on values there."""
        raise NotImplementedError

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """Scalar sum over this batch."""
        raise NotImplementedError


class Contrast(Piece):
    """A further pair loss, of features of its own: image and image, text and text, student and teacher.

    Columns are gathered over ranks, and all features accumulated over micro-batches, so that the loss is exact.
    Parameters start as the parameters of a `Term` start.
    """

    head: Head  # scores rows against columns

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Features of R rows and C columns, each with "vec".

        "position", the place of each row's and column's image in the global batch, is added where it is missing and
        the number is that of the images or of the captions; for a `TextGroup` return
        `batch.position[group.image_of_text]`. Rows and columns of one position are annotated pairs.
        """
        raise NotImplementedError

    def loss(self, pairs: PairBlocks) -> Total:
        """The sum over this rank's rows, and the count to divide by."""
        raise NotImplementedError

    def inputs(self, model: Model, batch: Batch, encoded: Encoded) -> PairInputs:
        """`features` in at least fp32, with the position of each image. Raises: ValueError where it cannot be told."""
        places = {len(batch.texts): batch.position[batch.image_of_text], len(batch): batch.position}
        sides = []
        for features in self.features(model, batch, encoded):
            side = {k: at_least_float(v) for k, v in features.items()}
            n = len(side["vec"])
            if "position" not in side and n not in places:
                raise ValueError(
                    f"{type(self).__name__} returned {n} features, neither one for each of {len(batch)} images nor for "
                    f"each of {len(batch.texts)} texts: add 'position' [{n}], the place of each one's image."
                )
            sides.append(side if "position" in side else side | {"position": places[n]})
        return PairInputs(*sides)

    def figures(self, inputs: PairInputs, total: Total) -> dict[str, Tensor]:
        """Further figures for the log: shares whose sums over ranks are the values."""
        return {}


class ScaledContrast(Contrast):
    """A contrast by the scale of the model's head, which its rows carry: their vectors times `log_scale.exp()`."""

    def __init__(self, config: ModelConfig, settings: Any = None) -> None:
        super().__init__()
        self.settings = settings
        self.head = Head(Pooling(), scale=Scale(1.0, trained=False))


@dataclass(frozen=True)
class _Changing:
    weight: float
    first: float = 0.0
    last: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= 1:
            raise ValueError(
                f"a weight cannot change from the share {self.first:g} of the run to {self.last:g}: expected two "
                "ascending numbers in [0, 1]."
            )


class Ramp(_Changing):
    """A weight that rises linearly from 0, where the share `first` of the run is done, to its value at `last`.

    Raises: ValueError for shares that do not ascend within [0, 1].
    """

    def __call__(self, done: float) -> float:
        return self.weight * min(max((done - self.first) / (self.last - self.first), 0.0), 1.0)


@dataclass(frozen=True)
class Between(_Changing):
    """A weight of a term that counts while the share of the run in [first, last) is done; elsewhere it is 0, and the
    term is not computed.

    Raises: ValueError for shares that do not ascend within [0, 1].
    """

    last: float = 1.0

    def __call__(self, done: float) -> float:
        return self.weight if self.first <= done < self.last else 0.0


Weight = float | Callable[[float], float]
"""Of a loss: a number, or a function of the share of the run that is done, in [0, 1), such as `Ramp` or `Between`."""


def annotated(pairs: Pairs) -> Tensor:
    """The pairs annotated in the data: [i, t] in {0, 1}."""
    return pairs.annotated.to(pairs.logits.dtype)


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


Weighted = Mapping[str, tuple[Weight, Part[M]]]


SINGLE, PLAIN = Part(Single), Scale()  # one vector per image and text, CLIP's scale


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training method: slots, all of them data. Replace a slot (`dataclasses.replace`) to make a new method."""

    name: str
    source: str  # the paper, "arXiv:..."
    summary: str  # one line for `kiloword methods`
    # scores
    pooling: Part[Pooling] = SINGLE
    uncertainty: Part[Uncertainty] | None = None
    scale: Scale = PLAIN
    further: tuple[Callable[[ModelConfig, Scale], Mapping[str, Head]], ...] = ()  # further scores, by name
    towers: Callable[[ModelConfig], ModelConfig] = lambda config: config  # adapts the configuration, before all parts
    # losses
    pair_loss: PairLoss
    pair_weight: Weight = 1.0  # 0 disables the pair loss; only the captioning pooler of the head is trained
    positives: Positives = annotated
    contrasts: Weighted[Contrast] = field(default_factory=dict)  # further pair losses
    terms: Weighted[Term] = field(default_factory=dict)
    decoders: Mapping[str, Callable[[ModelConfig], nn.Module]] = field(default_factory=dict)  # `Model.more`
    # data
    transforms: tuple[Transform, ...] = ()
    inputs: Mapping[str, Input] = field(default_factory=dict)  # further fields of a batch
    captions: int | Literal["one", "all"] = "one"
    needs: tuple[str, ...] = ()  # names of precomputed features; "questions"; "truth": the images each text is true of
    # the run
    notes: tuple[Callable[[Recipe], str], ...] = ()  # for the user, printed before the first step; "": none
    prepare: Prepare | None = None  # called before the first step of a new run (bias search)

    def __post_init__(self) -> None:
        twice = ({PAIR, "loss"} | self.terms.keys()) & self.contrasts.keys() or {PAIR, "loss"} & self.terms.keys()
        if twice:
            raise ValueError(f"{self.name} has two losses named {sorted(twice)[0]!r}: rename one.")
        losses = {f"loss {name}": part for name, (_, part) in (*self.terms.items(), *self.contrasts.items())}
        for name, part in {"pooling": self.pooling, "uncertainty": self.uncertainty or SINGLE, **losses}.items():
            if not (isinstance(part, Part) and isinstance(part.kind, type) and issubclass(part.kind, Piece)):
                raise ValueError(f"the {name} is {part}: expected Part of a subclass of Piece.")
        if self.transforms and "questions" in self.needs:
            raise ValueError(f"{self.name} needs unmixed images: it cannot be combined with transforms that mix them.")

    def plus(self, **slots: Mapping[str, Any]) -> Method:
        """The method with further terms, decoders, inputs, ... by name. Raises: ValueError for a name that it has."""
        for slot, more in slots.items():
            if twice := getattr(self, slot).keys() & more.keys():
                raise ValueError(f"{self.name} has {min(twice)} already: omit it, and set that of {self.name}.")
        return replace(self, **{slot: getattr(self, slot) | more for slot, more in slots.items()})

    @property
    def several_scores(self) -> bool:
        """Whether the pair loss reads further scores, each of which it trains."""
        return bool(self.further) or self.pooling.kind.several

    def shape(self, config: ModelConfig) -> ModelConfig:
        """The configuration of the towers that the parts of this method need."""
        config = self.towers(config)
        losses = (part for _, part in (*self.terms.values(), *self.contrasts.values()))
        for part in (self.uncertainty, self.pooling, *losses):
            config = config if part is None else part.shape(config)
        return config

    def head(self, config: ModelConfig) -> Head:
        """The head of a model, for a configuration that `shape` made; without values, until `initialise`."""
        further = {name: head for make in self.further for name, head in make(config, self.scale).items()}
        uncertainty = None if self.uncertainty is None else self.uncertainty(config)
        return Head(self.pooling(config), uncertainty, self.scale, further)


Slot = Literal[  # in order of application, as components check what others set
    "uncertainty", "pair_loss", "scale", "positives", "pooling", "towers", "transforms", "inputs", "decoders", "needs",
    "terms", "contrasts", "prepare", "further", "captions",
]  # fmt: skip
SLOTS = get_args(Slot)


@dataclass(frozen=True)
class Component:
    """A component that any method can use: `llip+compose+mined` is a preset with two components."""

    slot: Slot  # one of each in a method; of terms and contrasts several
    summary: str  # one line for `kiloword methods`
    settings: type  # frozen dataclass of its settings
    apply: Callable[[Method, Any], Method]  # takes the method and the settings; raises ValueError for incompatible ones
    vectors: str = ""  # what a text is, as "caption", where it compares a trained vector of each with one of each image
    gaussians: bool = False  # whether it compares Gaussians

    def __post_init__(self) -> None:
        if self.slot not in SLOTS:
            raise ValueError(f"{self.slot!r} is none of the slots {', '.join(SLOTS)}")
