"""The features of an audit, written as they are computed, so that the same command goes on after a kill.

`encoded/` beside the report holds them until the audit is finished: `identity.json`, what they were computed from, and
`part-N.safetensors` with consecutive rows of the data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import count as numbers
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from kiloword.apps.audit.findings import AuditedData
from kiloword.errors import count
from kiloword.evaluation.features import Seen, seen
from kiloword.evaluation.task import Inputs
from kiloword.files import write_json
from kiloword.model.encoding import join, moved
from kiloword.models.tensors import write_tensors
from kiloword.runs.rows import read_object
from kiloword.terminal import say
from kiloword.types import Features, Skipped

FOLDER, IDENTITY = "encoded", "identity.json"
IMAGE, TEXTS = "image.", "texts."  # before the names of features in a file
EVERY_S = 30.0  # seconds of work that a killed audit loses at most, and one batch


@dataclass(frozen=True)
class EncodedRows:
    """Consecutive rows of a source, encoded."""

    data: AuditedData
    texts: Features  # of all captions [T, ...]; {}: there is none

    @property
    def done(self) -> int:
        """The number of rows, of which each was read or skipped."""
        return len(self.data.rows) + len(self.data.skipped)


class SavedRows:
    """What an audit has encoded so far, in a folder; parts of another model or of other data are dropped."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        if read_object(folder / IDENTITY) != identity:
            if self._path(0).exists():
                say(f"{folder} holds rows of another model, precision or other data: they are removed.")
            self.clear()
            write_json(folder / IDENTITY, identity)
        self.parts = list(self._read())

    def _read(self) -> Iterator[EncodedRows]:
        """The parts up to the first that is missing or damaged."""
        first = 0
        for number in numbers():
            try:
                values = load(self._path(number).read_bytes())
                words = json.loads(values.pop("words").numpy().tobytes())
                images, texts = ({n[6:]: v for n, v in values.items() if n.startswith(k)} for k in (IMAGE, TEXTS))
                skipped = [Skipped(*one) for one in words["skipped"]]
                data = AuditedData(words["rows"], words["keys"], words["captions"], values["labels"], images, skipped)
                part = EncodedRows(data, texts)
                if words["first"] != first:  # a part before it was damaged, and written again with other rows
                    return
            except (OSError, SafetensorError, ValueError, KeyError, TypeError):
                return
            first += part.done
            yield part

    def add(self, part: EncodedRows) -> None:
        """Write the next part atomically. Raises: SaveError."""
        data = part.data
        words = {"first": self.done, "rows": data.rows, "keys": data.keys, "captions": data.captions}
        raw = json.dumps({**words, "skipped": [astuple(one) for one in data.skipped]}).encode()
        values = {"labels": data.labels, "words": torch.frombuffer(bytearray(raw), dtype=torch.uint8)}
        values |= {IMAGE + name: value for name, value in data.images.items()}
        values |= {TEXTS + name: value for name, value in part.texts.items()}
        write_tensors(self._path(len(self.parts)), values)
        self.parts.append(part)

    @property
    def done(self) -> int:
        """The number of rows in all parts."""
        return sum(part.done for part in self.parts)

    def clear(self) -> None:
        """Remove the parts, and the folder unless it holds something else."""
        for path in (*self.folder.glob("part-*.safetensors"), self.folder / IDENTITY):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"


def encoded(inputs: Inputs, saved: SavedRows | None = None) -> tuple[AuditedData, Features]:
    """All readable images of a source with their captions, encoded. Args: saved: goes on there; None: in memory alone.

    Raises: KeyboardInterrupt, whose message counts the rows that stay.
    """
    first, rows, device = 0 if saved is None else saved.done, len(inputs.source), inputs.matcher.model.device
    for part in [] if saved is None else saved.parts:
        inputs.skipped.extend(part.data.skipped)
    if first:
        say(f"{first:,} of {count(rows, 'row')} are encoded already.")
    waiting, last = list[EncodedRows](), time.monotonic()
    try:
        for batch in seen(replace(inputs, first=first)) if first < rows else ():
            waiting.append(_with_texts(inputs, batch))
            if saved is not None and time.monotonic() - last > EVERY_S:
                waiting, last = _flushed(inputs, saved, waiting), time.monotonic()
    except KeyboardInterrupt:
        if saved is None:
            raise
        _flushed(inputs, saved, waiting)
        raise KeyboardInterrupt(
            f"{saved.done:,} of {count(rows, 'row')} are encoded; the same command goes on."
        ) from None
    if saved is not None:
        _flushed(inputs, saved, waiting)
        waiting, saved.parts = saved.parts, []  # not twice in memory
    whole = _joined(waiting, inputs.skipped)
    whole.data.images = moved(whole.data.images, device)
    return whole.data, moved(whole.texts, device)


def _with_texts(inputs: Inputs, batch: Seen) -> EncodedRows:
    """A batch with the features of its captions."""
    texts = [caption for captions in batch.captions for caption in captions]
    features = moved(inputs.matcher.encode_text(texts, progress=False), "cpu") if texts else {}
    labels = batch.labels if batch.labels.ndim == 1 else torch.full((len(batch.rows),), -1)
    data = AuditedData(batch.rows, batch.keys, batch.captions, labels.cpu(), moved(batch.images, "cpu"), [])
    return EncodedRows(data, features)


def _flushed(inputs: Inputs, saved: SavedRows, waiting: list[EncodedRows]) -> list[EncodedRows]:
    """Write the batches that wait, with the rows skipped between them; nothing waits then.

    A part ends with a row that was read, as rows behind it may be of a batch that was interrupted.
    """
    if waiting:
        since, end = sum(len(part.data.skipped) for part in saved.parts), waiting[-1].data.rows[-1]
        saved.add(_joined(waiting, [one for one in inputs.skipped[since:] if one.row < end]))
    return []


def _joined(parts: list[EncodedRows], skipped: list[Skipped]) -> EncodedRows:
    every = [part.data for part in parts]
    data = AuditedData(
        rows=[row for one in every for row in one.rows],
        keys=[key for one in every for key in one.keys],
        captions=[captions for one in every for captions in one.captions],
        labels=torch.cat([one.labels for one in every]),
        images=join([one.images for one in every]),
        skipped=skipped,
    )
    texts = [part.texts for part in parts if part.texts]
    return EncodedRows(data, join(texts) if texts else {})
