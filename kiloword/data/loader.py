"""The loader: read rows, augment, choose captions, apply transforms, pack batches; equal for any number of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, DataConfig, Resize, TextConfig
from kiloword.data.edits import stored_row
from kiloword.data.images.augmentation import EvalTransform, TrainTransform
from kiloword.data.images.views import view_draw
from kiloword.data.joins import Omitted, omitted
from kiloword.data.reading import EMBEDDED, advice, left_out, name_of, read
from kiloword.data.remote import Ahead, ahead_of
from kiloword.data.sample import question_in
from kiloword.data.sampler import Order, Rows, choose_captions, share
from kiloword.data.source import check_asks
from kiloword.data.steps import in_order
from kiloword.data.stored import FindTokens, Join, StoreFile, WithTokens
from kiloword.data.text.eda import drop_words
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.randomness import Draw, key
from kiloword.types import BadSample, Batch, BatchInputs, Example, Input, Skipped, Source, TextGroup, Transform

ATTEMPTS = 32  # rows tried in place of a bad one; with 1% bad rows all fail with probability 10^-64


@dataclass
class Loader:
    """One rank's share of every global batch; a batch is a pure function of its step.

    Args: order: of the rows; data: how images are read and captions chosen; text: how captions are packed; transforms:
    of examples, in order; inputs: further fields of a batch, made from transformed examples; stores: features that are
    added to examples; shown: the augmented views that they are of, which are then the images, one in each epoch;
    image_tokens: tokens in place of images (of the view epoch mod K); open_store: opens stores that transforms name;
    told: further notes; truth: texts also carry which images of the global batch they describe; questions: every image
    has the question that its texts answer; train: False: images as for evaluation, no transforms; timeout: in seconds
    per step.
    Errors: ValueError when the batch does not divide over the ranks, the order is of other data, or the source has no
    ground truth or no questions.
    """

    source: Source
    order: Order
    data: DataConfig
    text: TextConfig
    image_size: int
    tokenizer: Tokenizer
    transforms: Sequence[Transform] = ()
    inputs: Mapping[str, Input] = field(default_factory=dict)
    stores: Sequence[Join] = ()
    shown: StoreFile | None = None
    image_tokens: FindTokens | None = None
    open_store: Callable[[str], Any] | None = None
    told: Sequence[str] = ()
    truth: bool = False
    questions: bool = False
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    workers: int = 0
    train: bool = True
    resize: Resize = "shortest"
    timeout: float = 300
    _train: TrainTransform = field(init=False, repr=False)
    _eval: EvalTransform = field(init=False, repr=False)
    _untouched: bool = field(init=False, repr=False)
    _views: dict[tuple[AugmentConfig, int], TrainTransform] = field(default_factory=dict, init=False, repr=False)
    _epochs: dict[int, Source] = field(init=False, repr=False)
    _ahead: Ahead | None = field(init=False, repr=False)
    _omitted: Omitted | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        share(np.zeros(self.order.batch, np.int64), self.rank, self.ranks)
        if len(self.source) != self.order.total:
            raise ValueError(f"{self.source.name} has {len(self.source)} rows, but the order is for {self.order.total}")
        if isinstance(self.data.captions, int) and self.data.captions < 1:
            raise ValueError(f"captions is {self.data.captions}: expected at least 1, 'one' or 'all'")
        if self.truth and not hasattr(self.source, "relevance"):
            raise ValueError(
                f"{self.source.name} has no ground truth of which texts describe which images: expected scenes as the "
                "only source of the run."
            )
        if self.questions:
            check_asks(self.source)
        self.transforms = [
            transform.bind(self.source, self.open_store) if hasattr(transform, "bind") else transform
            for transform in self.transforms
        ]
        self._omitted = omitted(self.source)
        if self.image_tokens:
            self.source = WithTokens(self.source, self.image_tokens, lean=True)
        natural = getattr(self.source, "natural", True)
        self._train = TrainTransform(self.image_size, self.data.augment, self.resize, self.data.decoder, natural)
        self._eval = EvalTransform(self.image_size, self.resize, self.data.decoder)
        self._epochs = {}
        self._ahead = ahead_of(self.source, self._rows_of, self.order.batch)
        self._untouched = not self.train or not _changes(self.data.augment, natural)

    @property
    def notes(self) -> list[str]:
        """Notes of keep-lists, transforms and inputs for the user, printed before the first step."""
        lists = [] if self._omitted is None else [f"--keep {self._omitted}"]
        inputs = [one.note(self.source) for one in self.inputs.values() if one.note]
        return [
            *lists,
            *self.told,
            *(note for transform in self.transforms if (note := getattr(transform, "note", None))),
            *inputs,
        ]

    def batches(self, start: int = 0, stop: int | None = None, pin: bool = False) -> Iterator[Batch]:
        """This rank's batches of the steps [start, stop); without end when stop is None.

        Args: pin: use page-locked memory, for a GPU.
        Errors: as `batch`; ValueError when a worker died or hangs.
        """
        steps = count(start) if stop is None else range(start, stop)
        if self._ahead:
            self._ahead.stop = stop
        return in_order(self.batch, steps, self.workers, self.timeout, pin)

    def batch(self, step: int) -> Batch:
        """This rank's share of the global batch of one step.

        Bad samples are listed in `skipped` and replaced by other rows, the same ones in every run.
        Errors: ValueError when no replacement for a bad row can be read, a feature store does not cover every row, or a
        row is bad whose ground truth is needed.
        """
        began = time.perf_counter()
        examples, seeds, skipped = self.examples(step)
        batch = self._pack(examples, seeds, self.rank * len(examples), skipped)
        batch.made_s = time.perf_counter() - began
        return batch

    def examples(self, step: int) -> tuple[list[Example], list[int], list[Skipped]]:
        """This rank's share of a batch before packing: transformed examples, their seeds, bad samples."""
        if self._ahead:
            self._ahead.at(step)
        epoch, rows = self.order.batch_rows(step)
        reader = BatchReader(self, self._source_in(epoch), rows)
        examples, seeds = [], []
        for row in share(rows, self.rank, self.ranks).tolist():
            example, draw = reader.readable(row, Draw(self.seed, epoch, row))
            if self.truth:
                example.text_features["truth"] = self._truth(example, row, rows)
            for transform in self.transforms if self.train else ():
                example = transform(example, reader, draw)
            for name, one in self.inputs.items() if self.train else ():
                example.inputs[name] = one.make(example, reader, draw)
            examples.append(example)
            seeds.append(draw.sample_seed)
        return examples, seeds, reader.skipped

    def _truth(self, example: Example, row: int, rows: Rows) -> Tensor:
        """[captions, B] bool: whether each caption describes each image of the global batch."""
        if example.row != row:  # other ranks use the rows of the order
            raise ValueError(
                f"{self.source.name}: {name_of(self.source, row)} is bad. Positives by ground truth need every row: "
                "repair or remove it."
            )
        relevance: np.ndarray = self.source.relevance(example.captions, rows.tolist())  # type: ignore[attr-defined]
        return torch.from_numpy(relevance)

    def image(self, image: bytes | np.ndarray, draw: Draw) -> Tensor:
        """The image as uint8 [3, H, W]; an array that needs no change is not copied."""
        if self._untouched and isinstance(image, np.ndarray):
            fits = image.shape == (self.image_size, self.image_size, 3) and image.dtype == np.uint8
            if fits and image.flags.writeable:  # torch warns about read-only arrays
                return torch.from_numpy(image).permute(2, 0, 1)
        return self._train(image, draw) if self.train else self._eval(image)

    def _source_in(self, epoch: int) -> Source:
        """The source, or that of an epoch if its rows differ by epoch (mixtures with fractional weights)."""
        if not hasattr(self.source, "at"):
            return self.source
        if epoch not in self._epochs:  # keep two: prefetched rows may be of the next epoch
            near = {e: source for e, source in self._epochs.items() if abs(e - epoch) == 1}
            self._epochs = {**near, epoch: self.source.at(epoch)}
        return self._epochs[epoch]

    def _rows_of(self, step: int) -> tuple[Source, list[int]]:
        """This rank's rows of a step, and the source that they are rows of."""
        epoch, rows = self.order.batch_rows(step)
        return self._source_in(epoch), share(rows, self.rank, self.ranks).tolist()

    def _pack(self, examples: list[Example], seeds: list[int], first: int, skipped: list[Skipped]) -> Batch:
        counts = [len(e.captions) for e in examples]
        questions = [e.question for e in examples if e.question is not None]
        if not all(counts):
            raise ValueError(
                f"a transform left {examples[counts.index(0)].key} without a caption; it must keep at least one"
            )
        return Batch(
            images=torch.stack([e.image for e in examples]),
            texts=self.tokenizer.encode([c for e in examples for c in e.captions], self.text),
            image_of_text=torch.from_numpy(np.repeat(np.arange(len(examples)), counts)),
            seeds=torch.tensor(seeds, dtype=torch.int64),
            position=torch.arange(first, first + len(examples)),
            composed=torch.tensor([e.composed for e in examples]),
            image_features=_join([e.image_features for e in examples], torch.stack),
            text_features=_join([e.text_features for e in examples], torch.cat),
            questions=self.tokenizer.encode(questions, self.text) if self.questions else None,
            inputs=BatchInputs({name: self._field(name, examples) for name in examples[0].inputs}),
            skipped=skipped,
        )

    def _field(self, name: str, examples: list[Example]) -> Tensor | TextGroup:
        """One of the method's inputs for a whole batch: [I, ...], or texts of the images."""
        values = [e.inputs[name] for e in examples]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(values):
            return torch.stack(tensors)
        if tensors:
            raise ValueError(f"the input {name!r} is a tensor for some images and texts for others: expected one kind.")
        texts = self.tokenizer.encode([text for value in values for text in value], self.text)
        rows = np.repeat(np.arange(len(values)), [len(value) for value in values])
        return TextGroup(texts, torch.from_numpy(rows))


class BatchReader:
    """Reads examples of one batch, also for transforms, and lists bad samples in `skipped`."""

    def __init__(self, loader: Loader, source: Source, batch: Rows) -> None:
        self.loader, self.source, self.batch = loader, source, batch
        self.skipped: list[Skipped] = []

    def __len__(self) -> int:
        return len(self.source)

    @property
    def crops(self) -> bool:
        """Whether the augmentation crops images at random."""
        return self.loader.train and self.loader._train.crops

    def example(self, row: int, draw: Draw) -> Example:
        """Any row of the data set, augmented with `draw`; another row replaces a bad one."""
        return self.readable(row, draw)[0]

    def view(self, row: int, draw: Draw, augment: AugmentConfig, size: int = 0) -> Tensor:
        """The image of a readable row, augmented otherwise. Raises: ValueError where tokens are read for images."""
        loader = self.loader
        record = read(self.source, row)
        if record.tokens is not None:
            raise ValueError(
                "the method makes views of images, but --image-features gives tokens in their place: omit it, so that "
                "the images are read."
            )
        key = augment, size or loader.image_size
        if key not in loader._views:
            natural = loader._train.natural
            loader._views[key] = TrainTransform(key[1], augment, loader.resize, loader.data.decoder, natural)
        return loader._views[key](record.image, draw)

    def readable(self, row: int, draw: Draw) -> tuple[Example, Draw]:
        """The example of a row, or of the first readable replacement in a walk keyed by (seed, epoch, row, attempt).

        If `draw` is that of the row, a replacement gets its own draw: it is the same example as in its own turn.
        """
        own_draw, failed = draw.row == row, []
        for candidate in self._walk(row, draw):
            drawn = replace(draw, row=candidate) if own_draw else draw
            try:
                example = self._read(candidate, drawn)
            except BadSample as error:
                stored = stored_row(self.source, candidate)
                failed.append(Skipped(stored, name_of(self.source, candidate), str(error)))
                continue
            self.skipped += failed
            return example, drawn
        tried = f"{len(failed)} rows tried one after another are bad"
        raise ValueError(f"{self.source.name}: {tried}: {left_out(failed)}{advice(failed)}")

    def _walk(self, row: int, draw: Draw) -> Iterator[int]:
        """The row, then candidates: outside this global batch if at least half of the data set is."""
        yield row
        order = self.loader.order
        n = order.rows
        taken = set(self.batch.tolist()) if 2 * len(self.batch) <= n else set()
        places = (key(draw.seed, draw.epoch, row, "instead", a) % n for a in count())
        fresh = (c for place in places if (c := int(order.rows_at(np.array([place]))[0])) not in taken)
        for _ in range(ATTEMPTS):
            yield next(fresh)

    def _read(self, row: int, draw: Draw) -> Example:
        loader = self.loader
        record = read(self.source, row)
        question = question_in(record.info) if loader.questions else None
        if loader.questions and question is None:
            raise BadSample("no question with an answer")
        captions = choose_captions(
            record.captions, loader.data.captions, replace(draw, row=row), loader.data.first_captions
        )
        if not captions:
            raise BadSample(f"{EMBEDDED if loader.data.text_features else ''}no caption")
        for caption in captions:
            loader.tokenizer.check(caption, loader.text)
        view = 0 if loader.shown is None else loader.shown.view(draw, loader.seed)
        shown = draw if loader.shown is None else view_draw(loader.shown.seed, view, record.key)
        image = record.tokens.tokens(draw.epoch) if record.tokens else loader.image(record.image, shown)
        example = Example(record.key, row, image, captions, question=question)
        for store in loader.stores:
            store(example, self.source, view)  # before words are dropped: features are of whole captions
        if loader.train and loader.data.augment.drop_words > 0 and question is None:  # answers keep all words
            example.captions = drop_words(captions, loader.data.augment.drop_words, draw)
        return example


def _changes(augment: AugmentConfig, natural: bool) -> bool:
    geometry = natural and (augment.crop < 1 or augment.flip > 0)
    return geometry or augment.jitter > 0 or augment.grayscale > 0 or augment.blur > 0


def _join(features: list[dict[str, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    names = features[0].keys()
    if any(one.keys() != names for one in features):
        raise ValueError(
            f"precomputed features {sorted(names)} are missing for some rows; a feature store must cover every row"
        )
    return {name: join([one[name] for one in features]) for name in names}
