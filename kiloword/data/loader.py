"""The loader: read rows, augment, choose captions, apply transforms, pack batches; equal for any number of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, DataConfig, Resize, TextConfig
from kiloword.data.edits import stored_row
from kiloword.data.images.augmentation import TrainTransform
from kiloword.data.images.views import view_draw
from kiloword.data.reading import advice, left_out, name_of, read
from kiloword.data.remote import with_files
from kiloword.data.sample import question_in
from kiloword.data.sampler import Order, RowNumbers, choose_captions, share
from kiloword.data.source import check_asks
from kiloword.data.steps import in_order
from kiloword.data.stored import Join, StoreFile
from kiloword.data.text.eda import drop_words
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.randomness import Draw, key
from kiloword.types import BadSample, Batch, BatchInputs, Example, Input, Skipped, Source, TextGroup, Transform

ATTEMPTS = 32  # rows tried in place of a bad one; with 1% bad rows all fail with probability 10^-64


@dataclass
class Loader:
    """One rank's share of every global batch; a batch is a pure function of its step.

    Args: transforms: of examples, in order, bound to the source; inputs: further fields of a batch, made from
    transformed examples; stores: features that are added to examples; shown: the augmented views that they are of,
    which are then the images, one in each epoch; notes: for the user, printed before the first step; truth: texts also
    carry which images of the global batch they describe; questions: every image has the question that its texts answer;
    timeout: in seconds per step. Errors: ValueError when the source has no ground truth or no questions.
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
    notes: Sequence[str] = ()
    truth: bool = False
    questions: bool = False
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    workers: int = 0
    resize: Resize = "shortest"
    timeout: float = 300
    augmented: TrainTransform = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.truth and not hasattr(self.source, "relevance"):
            raise ValueError(
                f"{self.source.name} has no ground truth of which texts describe which images: expected scenes as the "
                "only source of the run."
            )
        if self.questions:
            check_asks(self.source)
        natural = getattr(self.source, "natural", True)
        self.augmented = TrainTransform(self.image_size, self.data.augment, self.resize, self.data.decoder, natural)

    def batches(self, start: int = 0, stop: int | None = None, pin: bool = False) -> Iterator[Batch]:
        """This rank's batches of the steps [start, stop); without end when stop is None.

        Args: pin: use page-locked memory, for a GPU.
        Errors: as `batch`; ValueError when a worker died or hangs.
        """
        steps: Iterable[int] = count(start) if stop is None else range(start, stop)
        steps = with_files(steps, self.source, self._rows_of, self.order.batch)
        return in_order(self.batch, steps, self.workers, self.timeout, pin)

    def batch(self, step: int) -> Batch:
        """This rank's share of the global batch of one step.

        Bad samples are listed in `skipped` and replaced by other rows, the same ones in every run.
        Errors: ValueError when no replacement for a bad row can be read, a feature store does not cover every row, or a
        row is bad whose ground truth is needed.
        """
        began = time.perf_counter()
        examples, seeds, skipped = self.examples(step)
        counts = [len(e.captions) for e in examples]
        questions = [e.question for e in examples if e.question is not None]
        if not all(counts):
            raise ValueError(
                f"a transform left {examples[counts.index(0)].key} without a caption; it must keep at least one"
            )
        first = self.rank * len(examples)
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
            made_s=time.perf_counter() - began,
        )

    def examples(self, step: int) -> tuple[list[Example], list[int], list[Skipped]]:
        """This rank's share of a batch before packing: transformed examples, their seeds, bad samples."""
        epoch, rows = self.order.batch_rows(step)
        reader = BatchReader(self, self._source_in(epoch), rows)
        examples, seeds = [], []
        for row in share(rows, self.rank, self.ranks).tolist():
            example, draw = reader.readable(row, Draw(self.seed, epoch, row))
            if self.truth:
                example.text_features["truth"] = self._truth(example, row, rows)
            for transform in self.transforms:
                example = transform(example, reader, draw)
            for name, one in self.inputs.items():
                example.inputs[name] = one.make(example, reader, draw)
            examples.append(example)
            seeds.append(draw.sample_seed)
        return examples, seeds, reader.skipped

    def _truth(self, example: Example, row: int, rows: RowNumbers) -> Tensor:
        """[captions, B] bool: whether each caption describes each image of the global batch."""
        if example.row != row:  # other ranks use the rows of the order
            raise ValueError(
                f"{self.source.name}: {name_of(self.source, row)} is bad. Positives by ground truth need every row: "
                "repair or remove it."
            )
        relevance: np.ndarray = self.source.relevance(example.captions, rows.tolist())  # type: ignore[attr-defined]
        return torch.from_numpy(relevance)

    def _source_in(self, epoch: int) -> Source:
        """The source, or that of an epoch if its rows differ by epoch (mixtures with fractional weights)."""
        at: Callable[[int], Source] = getattr(self.source, "at", lambda epoch: self.source)
        return at(epoch)

    def _rows_of(self, step: int) -> tuple[Source, list[int]]:
        """This rank's rows of a step, and the source that they are rows of."""
        epoch, rows = self.order.batch_rows(step)
        return self._source_in(epoch), share(rows, self.rank, self.ranks).tolist()

    def _field(self, name: str, examples: list[Example]) -> Tensor | TextGroup:
        """One of the method's inputs for a whole batch: [I, ...], or texts of the images."""
        values = [e.inputs[name] for e in examples]
        kinds = {isinstance(value, Tensor) for value in values}
        if len(kinds) > 1:
            raise ValueError(f"the input {name!r} is a tensor for some images and texts for others: expected one kind.")
        if kinds == {True}:
            return torch.stack(values)  # type: ignore[arg-type]
        texts = self.tokenizer.encode([str(text) for value in values for text in value], self.text)
        rows = np.repeat(np.arange(len(values)), [len(value) for value in values])
        return TextGroup(texts, torch.from_numpy(rows))


@dataclass
class BatchReader:
    """Reads examples of one batch, also for transforms, and lists bad samples in `skipped`."""

    loader: Loader
    source: Source
    batch: RowNumbers
    skipped: list[Skipped] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def crops(self) -> bool:
        """Whether the augmentation crops images at random."""
        return self.loader.augmented.crops

    def example(self, row: int, draw: Draw) -> Example:
        """Any row of the data set, augmented with `draw`; another row replaces a bad one."""
        return self.readable(row, draw)[0]

    def view(self, row: int, draw: Draw, augment: AugmentConfig, size: int = 0) -> Tensor:
        """The image of a readable row, augmented otherwise. Raises: ValueError where tokens are read for images."""
        record = read(self.source, row)
        if record.tokens is not None:
            raise ValueError(
                "the method makes views of images, but --image-features gives tokens in their place: omit it, so that "
                "the images are read."
            )
        return replace(self.loader.augmented, augment=augment, size=size or self.loader.image_size)(record.image, draw)

    def readable(self, row: int, draw: Draw) -> tuple[Example, Draw]:
        """The example of a row, or of the first readable replacement in a walk keyed by (seed, epoch, row, attempt).

        If `draw` is that of the row, a replacement gets its own draw: it is the same example as in its own turn.
        """
        own_draw, failed = draw.row == row, []
        for candidate in islice(self._walk(row, draw), ATTEMPTS + 1):
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
        taken = set(self.batch.tolist()) if 2 * len(self.batch) <= order.rows else set()
        for attempt in count():
            place = key(draw.seed, draw.epoch, row, "instead", attempt) % order.rows
            if (candidate := int(order.rows_at(np.array([place]))[0])) not in taken:
                yield candidate

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
            raise BadSample("no caption")
        for caption in captions:
            loader.tokenizer.check(caption, loader.text)
        view = 0 if loader.shown is None else loader.shown.view(draw, loader.seed)
        shown = draw if loader.shown is None else view_draw(loader.shown.seed, view, record.key)
        image = record.tokens.tokens(draw.epoch) if record.tokens else loader.augmented(record.image, shown)
        example = Example(record.key, row, image, captions, question=question)
        for store in loader.stores:
            store(example, self.source, view)  # before words are dropped: features are of whole captions
        if loader.data.augment.drop_words > 0 and question is None:  # answers keep all words
            example.captions = drop_words(captions, loader.data.augment.drop_words, draw)
        return example


def _join(features: list[dict[str, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    names = features[0].keys()
    if any(one.keys() != names for one in features):
        raise ValueError(
            f"precomputed features {sorted(names)} are missing for some rows; a feature store must cover every row"
        )
    return {name: join([one[name] for one in features]) for name in names}
