"""What flows through kiloword. One legend of letters, used in every comment and docstring:

I  images of one rank's batch        T  texts (captions) of one rank's batch, T >= I
i, t  rows and columns of one block of pairs
S  tokens of all texts, packed end to end (no padding)
P  patches of an image      E  extra image tokens (class token first, then learned ones)
W  tower width               D  embedding size          L  longest text
K  mixture tokens            M  heads of a pooling
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kiloword.randomness import Draw

Features = dict[str, Tensor]
"""What a head makes of images or texts: every value is [N, ...]; "vec" [N, D], unit norm, is always there."""


class BadSample(Exception):
    """A sample that cannot be used; the message is the reason, without key or path ("truncated image")."""


@dataclass(frozen=True)
class Skipped:
    """A bad sample that was counted, named and replaced."""

    row: int
    key: str
    reason: str


@dataclass
class Record:
    """One row of a source as it is stored: nothing decoded, nothing drawn."""

    key: str
    image: bytes | np.ndarray  # an encoded file, or uint8 [H, W, 3]
    captions: list[str]
    label: int | None = None  # class index, where the data has one
    info: dict[str, Any] = field(default_factory=dict)  # what else the sample's json held


class NoCaption(BadSample):
    """A sample without a caption: no example to learn from, but an image that can be described."""

    def __init__(self, record: Record) -> None:
        super().__init__("no caption")
        self.record = record  # its captions are []


@runtime_checkable
class Source(Protocol):
    """A map-style data set. `record` may be called from any process, in any order; bad rows raise `BadSample`."""

    name: str  # as the user wrote it
    fingerprint: str  # changes when the data changes; the same on every machine

    def __len__(self) -> int: ...
    def record(self, row: int) -> Record: ...


@dataclass
class Example:
    """One augmented image and its captions, made in a loader worker."""

    key: str
    row: int
    image: Tensor  # uint8 [3, H, W]
    captions: list[str]  # answers, where there is a question
    composed: bool = False  # a transform mixed it with another image
    question: str | None = None
    image_features: dict[str, Tensor] = field(default_factory=dict)  # feature stores, joined by key
    text_features: dict[str, Tensor] = field(default_factory=dict)  # every value [captions, ...]


class Fetch(Protocol):
    """What a transform sees of the data: any other row of the whole data set, decoded and augmented."""

    @property
    def crops(self) -> bool:
        """Whether the augmentation crops images at random."""
        ...

    def __len__(self) -> int: ...
    def example(self, row: int, draw: Draw) -> Example: ...


Transform = Callable[[Example, Fetch, Draw], Example]
"""Changes one example (mixes it with another, rewrites its captions). `draw` is keyed by (seed, epoch, row).

A transform that must know the data set (which row is nearest to which) also has `bind(source) -> Transform`, called
once before training. A transform that mixes images or captions sets `composed`, so that nobody mines stale features
for it, and keeps one row of every `text_features` value for each of its captions.
"""


@dataclass
class Texts:
    """T captions packed end to end."""

    ids: Tensor  # [S] int64 token ids; start, end, pad, mask, class and uncertainty tokens are ids too
    starts: Tensor  # [T + 1] int64 cumulative lengths
    longest: int  # max length, a Python number so that no kernel waits for the device
    truncated: int = 0  # captions that were cut to the context length

    def __len__(self) -> int:
        return len(self.starts) - 1

    @staticmethod
    def pack(sequences: Sequence[Sequence[int]], truncated: int = 0) -> Texts:
        """Pack T token sequences (lists of ids)."""
        lengths = [len(s) for s in sequences]
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        starts[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        ids = torch.tensor([i for s in sequences for i in s], dtype=torch.int64)
        return Texts(ids, starts, max(lengths, default=0), truncated)

    def cut(self, first: int, end: int) -> Texts:
        """Texts `first` to `end`."""
        starts = self.starts[first : end + 1]
        a, b = int(starts[0]), int(starts[-1])
        return Texts(self.ids[a:b], starts - a, int(starts.diff().max()) if end > first else 0)

    def each(self, change: Callable[[Tensor], Tensor]) -> Texts:
        """The same texts with every tensor changed."""
        return replace(self, ids=change(self.ids), starts=change(self.starts))

    def to(self, device: torch.device | str) -> Texts:
        return self.each(lambda x: x.to(device, non_blocking=True))


@dataclass
class Batch:
    """One rank's (or one micro-batch's) share of a global batch."""

    images: Tensor  # uint8 [I, 3, H, W]; normalised once, on the device, by the model
    texts: Texts
    image_of_text: Tensor  # [T] int64, row of `images`, ascending; every image has at least one text
    seeds: Tensor  # [I] int64 from (seed, epoch, row): every later random choice derives from it
    position: Tensor  # [I] int64 place in the global batch, unique over ranks and micro-batches
    composed: Tensor  # [I] bool
    image_features: dict[str, Tensor] = field(default_factory=dict)  # [I, ...]
    text_features: dict[str, Tensor] = field(default_factory=dict)  # [T, ...]
    questions: Texts | None = None  # for VQA: fused with the image by the text tower
    skipped: list[Skipped] = field(default_factory=list)
    made_s: float = 0.0  # seconds that the loader took to make it
    before_move: Batch | None = field(default=None, init=False)  # what `to` was called on; a changed copy has none

    def __len__(self) -> int:
        return len(self.images)

    @property
    def host(self) -> Batch:
        """The same batch as it was before `to`: lengths and counts are read here, so that no kernel is waited for."""
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
        """Images i to j, whose texts are t to u."""
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
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed."""
        return replace(
            self,
            images=change(self.images),
            texts=self.texts.each(change),
            image_of_text=change(self.image_of_text),
            seeds=change(self.seeds),
            position=change(self.position),
            composed=change(self.composed),
            image_features={k: change(v) for k, v in self.image_features.items()},
            text_features={k: change(v) for k, v in self.text_features.items()},
            questions=None if self.questions is None else self.questions.each(change),
        )

    def to(self, device: torch.device | str) -> Batch:
        moved = self.each(lambda x: x.to(device, non_blocking=True))
        moved.before_move = self.host
        return moved

    def pin_memory(self) -> Batch:
        """In page-locked memory, from which a GPU copies while the host goes on. (A DataLoader calls this.)"""
        return self.each(Tensor.pin_memory)


@dataclass
class Encoded:
    """After the towers. Tokens never leave the rank."""

    image_tokens: Tensor  # [I, E + P, W]
    text_tokens: Tensor  # [S, W], packed
    images: Features
    texts: Features
    found: dict[str, Tensor] = field(default_factory=dict)  # what several terms need, made by the first

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, made once a batch."""
        if name not in self.found:
            self.found[name] = make()
        return self.found[name]


@dataclass
class Pairs:
    """A block of local images against a block of every rank's texts."""

    logits: Tensor  # [i, t]
    annotated: Tensor  # [i, t] bool: the text was written for the image
    images: Features  # beside the head's: "position" [i], "mineable" [i] bool, precomputed "image_features.NAME"
    texts: Features  # likewise, of the image that the text was written for, "text_features.NAME", and "column" [t]


Positives = Callable[[Pairs], Tensor]
"""Which pairs of a block match: [i, t] in [0, 1].

Positives that must see all pairs before they judge one also have `bind(blocks) -> Positives`, called once a step.
"""


@dataclass
class Total:
    """A sum over this rank's share, and the count that turns the sum of all shares into a mean."""

    sum: Tensor  # scalar, with gradient
    count: Tensor  # scalar; depends on the batch alone, never on parameters
    rows: Tensor | None = None  # [I] each local image's part of the sum, without gradient


class PairBlocks(Protocol):
    """Input of a pair loss: all pairs of local images and the texts of all ranks, one block at a time."""

    shape: tuple[int, int]  # number of local images, number of texts of all ranks
    rows: Tensor  # [I] set by `total`: the contribution of each image to the sum

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of every block."""
        ...

    def beside(self, name: str) -> PairBlocks:
        """The same pairs, scored by the auxiliary head that is the attribute `name` of the model's head."""
        ...

    def block(self, rows: slice, columns: slice) -> Pairs:
        """One block, without gradient."""
        ...

    def total(self, loss: Callable[[Pairs, slice, slice], tuple[Tensor, Tensor]]) -> Tensor:
        """Sum over all blocks of `loss`, which returns values [i] and their gradient by the logits [i, t]."""
        ...


PairLoss = Callable[[PairBlocks, Positives], Total]
"""Returns the sum over the rows of this rank, and the count (images or texts) to divide by for a mean."""
