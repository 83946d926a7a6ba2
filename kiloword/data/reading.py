"""Reading of single records, and of all rows in order for evaluation; counts of bad samples."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from kiloword.config.recipes import Resize
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.decode import Pixels
from kiloword.data.images.views import Augmented
from kiloword.data.remote import Unreachable, with_files
from kiloword.data.rows import PASSING
from kiloword.data.sample import question_in
from kiloword.data.source import texts_of
from kiloword.data.steps import in_order
from kiloword.errors import NAMED, LeftOut
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet, NoCaption, Record, Skipped, Source

TOKENIZER_ROWS = 10_000  # rows whose captions train the tokenizer; more hardly change a vocabulary of a few thousand
AGAIN_S = (0.1, 0.4, 1.0)  # seconds before each retry after an error of the file system

T = TypeVar("T")


def read(source: Source, row: int) -> Record:
    """Read one record. Raises: BadSample for any error, so that the row is skipped.

    Sources may be classes of users, which can raise anything. Their bugs do not stay hidden: a run stops with the most
    frequent reasons when more than `DataConfig.bad_share` of the rows are bad. If a network is down, no row is bad, but
    Unreachable ends the run. Errors of network drives are retried.
    """
    return patiently(lambda: source.record(row))


def patiently(get: Callable[[], T]) -> T:
    """The result of `get`, with retries after errors of network drives. Raises: BadSample for any error."""
    for wait in (*AGAIN_S, None):
        try:
            return get()
        except (BadSample, MemoryError, Unreachable):
            raise
        except Exception as error:
            if wait is None or getattr(error, "errno", None) not in PASSING:
                raise BadSample(shown(f"{type(error).__name__}: {error}"[:200])) from error
            time.sleep(wait)
    raise AssertionError


def captions_of(source: Source) -> Iterator[str]:
    """Captions of about TOKENIZER_ROWS rows spread over the source, if possible without reading images; skips bad rows.

    A row with a question yields its answers, then the question.
    """
    for row in range(0, len(source), max(1, len(source) // TOKENIZER_ROWS)):
        with suppress(BadSample):
            if hasattr(source, "captions"):
                captions, info = source.captions(row), source.info(row) if hasattr(source, "info") else {}
            else:
                record = read(source, row)
                captions, info = record.captions, record.info
            question = question_in(info)
            yield from captions if question is None else [*captions, question]


def captions_at(source: Source, row: int) -> list[str]:
    """Captions or answers of a row, without reading its image if the source supports that. Raises: BadSample."""
    return patiently(partial(texts_of, source, row))


def read_image(source: Source, row: int) -> Record:
    """As `read`, but an image without a caption is not bad."""
    try:
        return read(source, row)
    except NoCaption as error:
        return error.record


def name_of(source: Source, row: int) -> str:
    """The key of a row, or "row N" if the source cannot give it without reading the row."""
    with suppress(AttributeError, BadSample, OSError):  # the last: its file is gone
        return shown(str(source.key(row)))  # type: ignore[attr-defined]
    return f"row {row}"


class ImageTransform(Protocol):
    """Transforms stored images to tensors of one shape."""

    @property
    def size(self) -> int:
        """Height and width in pixels."""

    def __call__(self, image: bytes | Pixels) -> Tensor:
        """[3, size, size]. Errors: BadSample for an image that cannot be decoded."""


@dataclass
class EvalBatch:
    """Consecutive readable rows of a source."""

    rows: list[int]
    keys: list[str]
    images: Tensor  # uint8 [n, 3, size, size]; or tokens of a trunk, floating-point [n, N, W]
    captions: list[list[str]]
    labels: Tensor | None  # [n] int64, -1 for a row without class or with a set of them; None if no row has one
    skipped: list[Skipped]
    infos: list[dict[str, Any]]  # `Record.info` of every row
    label_sets: list[LabelSet | None] | None = None  # of rows that may have several classes; None if no row may
    stored: list[bytes] = field(default_factory=list)  # with `Augmented`: digests of the images before any transform


def eval_batches(
    source: Source,
    image_size: int,
    resize: Resize = "shortest",
    batch: int = 64,
    workers: int = 0,
    parts: Sequence[range] | None = None,
    transform: ImageTransform | Augmented | None = None,
    captions: bool = True,
) -> Iterator[EvalBatch]:
    """Every row once, in order, in batches of at most `batch` (n may be 0); bad rows are omitted and listed.

    Args: parts: ranges of rows instead of all rows; a batch never crosses two parts; transform: instead of that by
    image_size and resize, by `Augmented` images [n, K, 3, size, size]; captions: False accepts images without captions.
    Errors: ValueError when a worker died or hangs.
    """
    if batch < 1:
        raise ValueError(f"--batch is {batch}: expected at least 1.")
    ranges = [
        part[start : start + batch]
        for part in ([range(len(source))] if parts is None else parts)
        for start in range(0, len(part), batch)
    ]
    make = partial(_eval_batch, source, transform or EvalTransform(image_size, resize), ranges, captions)
    steps = with_files(range(len(ranges)), source, lambda step: (source, ranges[step]), batch)
    return in_order(make, steps, min(workers, len(ranges)))


def _eval_batch(
    source: Source, transform: ImageTransform | Augmented, ranges: Sequence[range], captions: bool, step: int
) -> EvalBatch:
    records, rows, images, skipped = [], [], [], []
    for row in ranges[step]:
        try:
            record = (read if captions else read_image)(source, row)
            if isinstance(transform, Augmented):
                images.append(transform(record.image, row, record.key))
            elif record.tokens is not None and isinstance(transform, EvalTransform):
                images.append(record.tokens.tokens(0))  # where the source has them, and nothing else was asked for
            else:
                images.append(transform(record.image))
        except BadSample as error:
            skipped.append(Skipped(row, name_of(source, row), str(error)))
            continue
        records.append(record)
        rows.append(row)
    size = transform.size
    pixels = torch.stack(images) if images else torch.empty(0, 3, size, size, dtype=torch.uint8)
    classes = [r.label if isinstance(r.label, int | np.integer) else -1 for r in records]
    labels = None if all(r.label is None for r in records) else torch.tensor(classes)
    sets = [r.label if isinstance(r.label, LabelSet) else None for r in records]
    texts, infos = [r.captions for r in records], [r.info for r in records]
    stored = [digest_of(r.image) for r in records] if isinstance(transform, Augmented) else []
    keys, label_sets = [r.key for r in records], sets if any(sets) else None
    return EvalBatch(rows, keys, pixels, texts, labels, skipped, infos, label_sets, stored)


def digest_of(image: bytes | np.ndarray) -> bytes:
    """A digest of a stored image."""
    raw = image if isinstance(image, bytes) else np.ascontiguousarray(image).data
    return hashlib.blake2b(raw, digest_size=16).digest()


class BadRows:
    """Distinct bad rows of a run; its length is their number.

    Args: rows: of the data set; share: of rows that may be bad (`DataConfig.bad_share`).
    """

    def __init__(self, rows: int, share: float) -> None:
        self.rows, self.share = rows, share
        self._seen: dict[int, Skipped] = {}
        self.left_out = LeftOut("sample")

    def __len__(self) -> int:
        return len(self._seen)

    def count(self, skipped: Iterable[Skipped]) -> list[Skipped]:
        """Add the skipped samples of one step; returns the new ones that are to be named, the first of each reason.

        Errors: ValueError, with the most frequent reasons, when more than the allowed share of the samples is bad.
        """
        new = {sample.row: sample for sample in skipped if sample.row not in self._seen}
        self._seen |= new
        named = [sample for sample in new.values() if self.left_out.add(sample.key, sample.reason)]
        if len(self) > self.share * self.rows:
            raise ValueError(
                f"{len(self)} of the data set's {self.rows} samples are bad, more than the allowed {self.share:.2%}: "
                f"{self.left_out}. Look with `kiloword data check`; allow more with --bad-share, "
                "or mend them and give another --out, as mended data are other data."
            )
        return named

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as plain lists."""
        return {"bad": [[sample.row, sample.key, sample.reason] for sample in self._seen.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {row: Skipped(row, key, reason) for row, key, reason in state["bad"]}
        self.left_out = left_out(self._seen.values())


_ADVICE = {
    "image cannot be read (No such file or directory)": ". Images of a table are looked for in its folder and "
    "those near it: name another one by FILE?images=FOLDER.",
    "no caption": ". Captions are .txt or .json beside the images, or the column of FILE?caption=COLUMN.",
}


def advice(skipped: Iterable[Skipped]) -> str:
    """What to do where all samples are bad for one reason that the source's name can change, or nothing."""
    reasons = {sample.reason for sample in skipped}
    return _ADVICE.get(reasons.pop(), "") if len(reasons) == 1 else ""


def left_out(skipped: Iterable[Skipped], most: int = NAMED) -> LeftOut:
    """Skipped samples by reason. Args: most: that are named for one reason."""
    found = LeftOut("sample", most)
    for one in skipped:
        found.add(one.key, one.reason)
    return found
