"""Records as they are stored, one at a time, and every row in order for evaluation."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.decode import Pixels
from kiloword.data.images.time_limit import decoding
from kiloword.data.remote.ahead import Ahead, ahead_of
from kiloword.data.remote.errors import Unreachable
from kiloword.data.sources.questions import question, question_of
from kiloword.data.steps import in_order
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record, Skipped, Source

TOKENIZER_ROWS = 10_000  # rows whose captions train the tokenizer; more change a vocabulary of a few thousand little
AGAIN_S = (0.1, 0.4, 1.0)  # between attempts at a row whose file system refuses it
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENETUNREACH)

T = TypeVar("T")


def read(source: Source, row: int) -> Record:
    """One record; whatever goes wrong while reading it is a reason to skip the row.

    Sources are also users' own classes over any storage, which raise anything. Their bugs do not stay hidden: a run
    stops, with the most frequent reasons, as soon as more than `DataConfig.bad_share` of the rows are bad. A network
    that is down makes no row bad: Unreachable ends the run. What a network drive refuses is asked for again.
    """
    return patiently(lambda: source.record(row))


def patiently(get: Callable[[], T]) -> T:
    """What `get` returns, asked again where a network drive refuses it. Raises: BadSample for whatever goes wrong."""
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


def captions_of(source: Source, most: int = TOKENIZER_ROWS) -> Iterator[str]:
    """Captions of about `most` rows spread over the source, without an image where it can; bad rows give none.

    Of a row that asks a question, its answers, then the question.
    """
    stride = max(1, len(source) // most)
    for row in range(0, len(source), stride):
        try:
            captions, asked = _words(source, row)
        except BadSample:
            continue
        yield from captions
        if asked is not None:
            yield asked


def captions_at(source: Source, row: int) -> list[str]:
    """Captions or answers of a row, without its image where the source can do that. Raises: BadSample."""
    own = getattr(source, "captions", None)
    return list(own(row) if callable(own) else read(source, row).captions)


def _words(source: Source, row: int) -> tuple[list[str], str | None]:
    """Captions or answers, and the question. Raises BadSample."""
    words = getattr(source, "captions", None)
    if words is None:
        found = read(source, row)
        return found.captions, question_of(found)
    return words(row), question(source, row) if hasattr(source, "question") else None


def read_image(source: Source, row: int) -> Record:
    """As `read`, for who wants images: one without a caption is not bad."""
    try:
        return read(source, row)
    except NoCaption as error:
        return error.record


def name_of(source: Source, row: int) -> str:
    """The key of a row that cannot be read, where the source can tell."""
    name = getattr(source, "key", None)
    try:
        return shown(str(name(row))) if callable(name) else f"row {row}"
    except (BadSample, OSError):  # its file is gone
        return f"row {row}"


class ImageTransform(Protocol):
    """From a stored image to a tensor of one shape for all."""

    @property
    def size(self) -> int:
        """Pixels a side."""

    def __call__(self, image: bytes | Pixels) -> Tensor:
        """[3, size, size]. Raises BadSample for an image that cannot be decoded."""


@dataclass
class EvalBatch:
    """Consecutive readable rows of a source."""

    rows: list[int]
    keys: list[str]
    images: Tensor  # uint8 [n, 3, size, size]
    captions: list[list[str]]
    labels: Tensor | None  # [n] int64, -1 where a row has none; None: no row of the batch has one
    skipped: list[Skipped]
    infos: list[dict[str, Any]]  # `Record.info` of every row


def eval_batches(
    source: Source,
    image_size: int,
    resize: Literal["shortest", "squash"] = "shortest",
    batch: int = 64,
    workers: int = 0,
    parts: Sequence[range] | None = None,
    transform: ImageTransform | None = None,
    captions: bool = True,
) -> Iterator[EvalBatch]:
    """Every row once, in order, at most `batch` at a time (n may be 0); bad rows are left out and named.

    Args: parts: the rows that are wanted, in place of all; no batch holds rows of two parts; transform: in place of
    what image_size and resize say; captions False: images without captions are not bad.
    Errors: LoaderStopped when a worker died or stalled.
    """
    if batch < 1:
        raise ValueError(f"a batch of {batch} images; expected at least 1")
    wanted = [range(len(source))] if parts is None else parts
    batches = [part[start : start + batch] for part in wanted for start in range(0, len(part), batch)]
    make = partial(_eval_batch, source, transform or EvalTransform(image_size, resize), batches, captions)
    ahead = ahead_of(source, partial(_rows_of, source, batches), batch, len(batches))
    if ahead is not None:
        make = partial(_with_ahead, ahead, make)
    workers = min(workers, len(batches))
    return in_order(make, range(len(batches)), workers, apart=getattr(source, "from_files", False))


def _rows_of(source: Source, batches: Sequence[range], step: int) -> tuple[Source, range]:
    return source, batches[step]


def _with_ahead(ahead: Ahead, make: Callable[[int], EvalBatch], step: int) -> EvalBatch:
    ahead.at(step)
    return make(step)


def _eval_batch(
    source: Source, transform: ImageTransform, batches: Sequence[range], captions: bool, step: int
) -> EvalBatch:
    records, rows, images, skipped = [], [], [], []
    for row in batches[step]:
        try:
            record = (read if captions else read_image)(source, row)
            with decoding(row):
                images.append(transform(record.image))
        except BadSample as error:
            skipped.append(Skipped(row, name_of(source, row), str(error)))
            continue
        records.append(record)
        rows.append(row)
    pixels = torch.stack(images) if images else torch.empty(0, 3, transform.size, transform.size, dtype=torch.uint8)
    classes = [r.label for r in records]
    labels = None if all(c is None for c in classes) else torch.tensor([-1 if c is None else c for c in classes])
    texts, infos = [r.captions for r in records], [r.info for r in records]
    return EvalBatch(rows, [r.key for r in records], pixels, texts, labels, skipped, infos)
