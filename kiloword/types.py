"""Data types of kiloword, and the letters for dimensions in all comments and docstrings:

I  images in one rank's batch        T  texts (captions) in one rank's batch, T >= I
i, t  rows and columns of one block of pairs
S  tokens of all texts, packed end to end (no padding)
P  patches of an image      E  extra image tokens (class token first, then learned ones)
W  tower width               D  embedding size          L  longest text
K  mixture tokens            M  heads of a pooling
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.randomness import Draw

Features = dict[str, Tensor]
"""Features of N images or texts from a head: every value is [N, ...]; "vec" [N, D] of unit norm always exists."""


class BadSample(Exception):
    """A sample that cannot be used; the message is the reason, without key or path ("truncated image")."""


@dataclass(frozen=True)
class Skipped:
    """A bad sample that was counted, reported and replaced."""

    row: int  # in training its number by `kiloword.data.edits.stored_row`
    key: str
    reason: str


@dataclass(frozen=True)
class LabelSet:
    """The classes of an image that may have several."""

    indices: tuple[int, ...]
    classes: int | None = None  # number of all classes, where the data says it


def indices_of(label: int | LabelSet | None) -> tuple[int, ...]:
    """The class indices of a label."""
    return () if label is None else label.indices if isinstance(label, LabelSet) else (label,)


class StoredTokens(Protocol):
    """Tokens of an image tower's trunk, read from a store in place of an image's pixels."""

    def tokens(self, epoch: int) -> Tensor:
        """The tokens of the view of an epoch: fp16 or fp32 [N, W]."""


@dataclass
class Record:
    """One row of a source as it is stored: not decoded, without random choices."""

    key: str
    image: bytes | np.ndarray  # an encoded file, or uint8 [H, W, 3]
    captions: list[str]
    label: int | LabelSet | None = None  # class index, where the data has one
    info: dict[str, Any] = field(default_factory=dict)  # other values of the JSON, see `kiloword.data.source`
    tokens: StoredTokens | None = None  # of the image, which towers then take in its place; `image` may be b"" then


class NoCaption(BadSample):
    """A sample without a caption: not an example for training, but an image that can be captioned."""

    def __init__(self, record: Record) -> None:
        super().__init__("no caption")
        self.record = record  # with captions []


@runtime_checkable
class Source(Protocol):
    """A map-style data set. `record` may be called from any process, in any order; bad rows raise `BadSample`.

    These members suffice; those that `kiloword.data.source` lists are used where a source has them.
    """

    name: str  # as given by the user
    fingerprint: str  # changes when the data changes; the same on every machine

    def __len__(self) -> int: ...
    def record(self, row: int) -> Record: ...


@dataclass
class Example:
    """One augmented image and its captions, made in a loader worker."""

    key: str
    row: int
    image: Tensor  # uint8 [3, H, W], or tokens of a trunk, floating-point [N, W]
    captions: list[str]  # answers, where there is a question
    composed: bool = False  # a transform mixed it with another image
    question: str | None = None
    image_features: dict[str, Tensor] = field(default_factory=dict)  # of feature stores
    text_features: dict[str, Tensor] = field(default_factory=dict)  # every value [captions, ...]
    inputs: dict[str, Tensor | Sequence[str]] = field(default_factory=dict)  # of the method, by name

    @property
    def words(self) -> str:
        """The captions, or the question with its answers; composed examples are named so."""
        question = f"{self.question} " if self.question else ""
        return f"{'composed: ' if self.composed else ''}{question}{' | '.join(self.captions)}"


class Fetch(Protocol):
    """Access of a transform to the data: any other row of the data set, decoded and augmented."""

    @property
    def crops(self) -> bool:
        """Whether the augmentation crops images at random."""

    def __len__(self) -> int: ...
    def example(self, row: int, draw: Draw) -> Example: ...

    def view(self, row: int, draw: Draw, augment: Any, size: int = 0) -> Tensor:
        """The image of a readable row, such as `Example.row`, augmented otherwise: uint8 [3, size, size].

        Args: augment: an `AugmentConfig`; size: in pixels, 0: that of the model's images.
        Raises: ValueError where tokens are read in place of images.
        """


Transform = Callable[[Example, Fetch, Draw], Example]
"""A transform of one example (mixes it with another, rewrites captions). `draw` is keyed by (seed, epoch, row).

A transform that must know the data set (which row is nearest to which) also has `bind(source, open_store) ->
Transform`, called once before training. A transform that mixes images or captions sets `composed`, so that nobody mines
stale features for it, and keeps one row of every `text_features` value for each of its captions.
"""


class Tensors:
    """Base of dataclasses that hold tensors: directly, in a dict, or in another such dataclass."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor."""
        names = [f.name for f in fields(self) if f.init]  # type: ignore[arg-type]
        return replace(self, **{name: _changed(getattr(self, name), change) for name in names})  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        return self.each(lambda x: x.to(device, non_blocking=True))


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return type(value)({name: _changed(inner, change) for name, inner in value.items()})
    return value.each(change) if isinstance(value, Tensors) else change(value) if isinstance(value, Tensor) else value


@dataclass
class Texts(Tensors):
    """T captions packed end to end."""

    ids: Tensor  # [S] int64 token ids; start, end, pad, mask, class and uncertainty tokens are ids too
    starts: Tensor  # [T + 1] int64 cumulative lengths
    longest: int  # length of the longest text, a Python int so that reading it does not wait for the device
    truncated: int = 0  # number of captions truncated to the context length
    tokens: Tensor | None = None  # [S, W'] tokens of the text tower's trunk, in place of its run; zeros at extra tokens

    def __len__(self) -> int:
        return len(self.starts) - 1

    @staticmethod
    def pack(sequences: Sequence[Sequence[int]], truncated: int = 0) -> Texts:
        """Pack T sequences of token ids."""
        lengths = [len(s) for s in sequences]
        ids, starts = np.array([i for s in sequences for i in s], np.int64), np.cumsum([0, *lengths], dtype=np.int64)
        return Texts(torch.from_numpy(ids), torch.from_numpy(starts), max(lengths, default=0), truncated)

    def cut(self, first: int, end: int) -> Texts:
        """Texts `first` to `end`."""
        starts = self.starts[first : end + 1]
        part = self.at(slice(int(starts[0]), int(starts[-1])), starts - starts[0])
        return replace(part, longest=int(starts.diff().max()) if end > first else 0)

    def spans(self, first: Tensor, lengths: Tensor, tokens: int) -> tuple[Tensor, Texts]:
        """Spans of tokens as texts: the places [tokens] of the tokens in `ids`, and the texts.

        Args: first, lengths [n]: place of the first token of each span, and its number of tokens; tokens: their sum.
        """
        starts = F.pad(lengths.cumsum(0), (1, 0))
        shift = torch.repeat_interleave(first - starts[:-1], lengths, output_size=tokens)
        place = torch.arange(tokens, device=shift.device) + shift
        return place, self.at(place, starts)

    def at(self, place: Tensor | slice, starts: Tensor) -> Texts:
        """The tokens at places [n], or at those that are True [S], as texts with other `starts`; no text is longer."""
        tokens = None if self.tokens is None else self.tokens[place]
        return Texts(self.ids[place], starts, self.longest, tokens=tokens)


@dataclass
class TextGroup(Tensors):
    """Further texts of the images of a batch: any number for each, none too."""

    texts: Texts
    image_of_text: Tensor  # [T'] int64, row of `Batch.images`, ascending

    def part(self, i: int, j: int) -> TextGroup:
        """Those of images i to j."""
        bounds = self.image_of_text.new_tensor([i, j])
        first, end = torch.searchsorted(self.image_of_text, bounds).tolist()
        return TextGroup(self.texts.cut(first, end), self.image_of_text[first:end] - i)


class BatchInputs(dict[str, Tensor | TextGroup]):
    """Further fields of a batch, by name."""

    def __missing__(self, name: str) -> Tensor | TextGroup:
        raise ValueError(f"a loss reads the input {name!r}, but `Method.inputs` makes only {list(self)}.")

    def tensor(self, name: str) -> Tensor:
        """An input that is a tensor, [I, ...]."""
        return cast(Tensor, self[name])

    def texts(self, name: str) -> TextGroup:
        """An input of texts."""
        return cast(TextGroup, self[name])


@dataclass
class Batch(Tensors):
    """One rank's (or one micro-batch's) share of a global batch."""

    images: Tensor  # uint8 [I, 3, H, W], which the model normalises on the device; or tokens of its trunk [I, N, W]
    texts: Texts
    image_of_text: Tensor  # [T] int64, row of `images`, ascending; every image has at least one text
    seeds: Tensor  # [I] int64 from (seed, epoch, row): every later random choice derives from it
    position: Tensor  # [I] int64 place in the global batch, unique over ranks and micro-batches
    composed: Tensor  # [I] bool
    image_features: dict[str, Tensor] = field(default_factory=dict)  # [I, ...]
    text_features: dict[str, Tensor] = field(default_factory=dict)  # [T, ...]
    questions: Texts | None = None  # [I] texts, for VQA
    inputs: BatchInputs = field(default_factory=BatchInputs)  # of the method: [I, ...], or texts of images
    skipped: list[Skipped] = field(default_factory=list)
    made_s: float = 0.0  # seconds that the loader took for it
    before_move: Batch | None = field(default=None, init=False)  # the batch on which `to` was called

    def __len__(self) -> int:
        return len(self.images)

    @property
    def host(self) -> Batch:
        """The batch before `to`. Read lengths and counts from it, so that nothing waits for the device."""
        return self if self.before_move is None else self.before_move

    def split(self, parts: int) -> list[Batch]:
        """Equal micro-batches of consecutive images with their texts; `parts` must divide I."""
        size = len(self) // parts
        assert size * parts == len(self), f"{len(self)} images do not split into {parts}"
        if parts == 1:
            return [self]
        first_text = torch.searchsorted(self.image_of_text, torch.arange(0, len(self) + 1, size).to(self.images.device))
        bounds = first_text.tolist()
        return [self._part(n * size, (n + 1) * size, bounds[n], bounds[n + 1]) for n in range(parts)]

    def _part(self, i: int, j: int, t: int, u: int) -> Batch:
        """Images i to j with their texts t to u."""
        return Batch(
            images=self.images[i:j],
            texts=self.texts.cut(t, u),
            image_of_text=self.image_of_text[t:u] - i,
            seeds=self.seeds[i:j],
            position=self.position[i:j],
            composed=self.composed[i:j],
            image_features={k: v[i:j] for k, v in self.image_features.items()},
            text_features={k: v[t:u] for k, v in self.text_features.items()},
            questions=None if self.questions is None else self.questions.cut(i, j),
            inputs=BatchInputs({k: v[i:j] if isinstance(v, Tensor) else v.part(i, j) for k, v in self.inputs.items()}),
        )

    def to(self, device: torch.device | str) -> Batch:
        moved = super().to(device)
        moved.before_move = self.host
        return moved

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory, from which copies to a GPU are asynchronous. (Called by a DataLoader.)"""
        return self.each(Tensor.pin_memory)


@dataclass
class Encoded:
    """The results of the towers. Tokens stay on their rank."""

    image_tokens: Tensor  # [I, E + P, W]
    text_tokens: Tensor  # [S, W], packed
    images: Features
    texts: Features
    cache: dict[str, Tensor] = field(default_factory=dict)  # results that several terms share
    done: float = 0.0  # share of the run that is done, in [0, 1)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The result of `make`, computed once per batch."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]


@dataclass
class Pairs:
    """A block of this rank's images against a block of all ranks' texts."""

    logits: Tensor  # [i, t]
    annotated: Tensor  # [i, t] bool: the text was written for the image
    images: Features  # of the head, and "position" [i], "mineable" [i] bool, precomputed "image_features.NAME"
    texts: Features  # likewise of the image of each text, and "text_features.NAME", "column" [t]


Positives = Callable[[Pairs], Tensor]
"""How far the pairs of a block match: [i, t] in [0, 1]."""


class Rule:
    """Base of positives that depend on all pairs; with `mined = True` the share of mined pairs is logged."""

    def bind(self, pairs: PairBlocks) -> Positives:
        """The positives of these pairs, once per step."""
        return self

    def __call__(self, pairs: Pairs) -> Tensor:
        """[i, t] in [0, 1]."""
        raise NotImplementedError


@dataclass
class Total:
    """A sum over this rank's share, and its count: sum over ranks / count over ranks is the mean.

    Raises: ValueError for a sum that is no scalar tensor.
    """

    sum: Tensor  # scalar, with gradient
    count: Tensor  # scalar, or a number; depends only on the batch, not on parameters
    rows: Tensor | None = None  # [I] part of the sum of each local image, without gradient

    def __post_init__(self) -> None:
        if not isinstance(self.sum, Tensor) or self.sum.dim():
            found = getattr(self.sum, "shape", self.sum)
            raise ValueError(f"a loss or a term returned {found}: expected its sum, a scalar tensor.")
        self.count = torch.as_tensor(self.count, device=self.sum.device)


class PairBlocks(Protocol):
    """Input of a pair loss: all pairs of local images and the texts of all ranks, one block at a time."""

    shape: tuple[int, int]  # number of local images, number of texts of all ranks
    rows: Tensor  # [I] set by `total`: the contribution of each image to the sum

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of every block."""

    def beside(self, name: str) -> PairBlocks:
        """The same pairs with another score: a head inside the model's head, or a side of its pooling."""

    def row(self, name: str) -> Tensor:
        """A feature of the local images, [I, ...], without scoring anything."""

    def column(self, name: str) -> Tensor:
        """A feature of the texts of all ranks, [T, ...]; precomputed ones are gathered when they are first read."""

    def block(self, rows: slice, columns: slice) -> Pairs:
        """One block, without gradient."""

    def total(self, loss: Callable[[Pairs, slice, slice], Tensor | tuple[Tensor, Tensor]]) -> Tensor:
        """Sum over all blocks of `loss`, which returns values [i] and, unless autograd shall compute it, their gradient
        by the logits [i, t]."""


PairLoss = Callable[[PairBlocks, Positives], Total]
"""Returns the sum over the rows of this rank, and the count (images or texts) to divide by for a mean."""


@dataclass(frozen=True)
class Input:
    """A further field of every batch, `Batch.inputs[name]`, which the loader makes from each example.

    It stays on its rank: what other ranks need of it, a contrast returns as features.
    """

    make: Callable[[Example, Fetch, Draw], Tensor | Sequence[str]]  # after the transforms; uint8 for images, or texts
    shape: Callable[[Any], tuple[int, ...]] | None = None  # of the tensor, by the ModelConfig; None: texts, any number
    note: Callable[[Source], str] | None = None  # for the user, printed before the first step
    pixels: str | None = None  # why tokens in place of images are refused, where it needs pixels


def image_shape(*leading: int) -> Callable[[Any], tuple[int, ...]]:
    """The shape of an input of images of the model's size: [*leading, 3, H, W] for each example."""
    return lambda config: (*leading, 3, config.image.size, config.image.size)
