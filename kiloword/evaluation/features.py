"""Encode the images of a task's source. Ranks that share the work encode batches in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kiloword.data.classes.names import places_among, read_classnames
from kiloword.data.images.decode import decode
from kiloword.data.reading import EvalBatch, eval_batches, left_out, read_image
from kiloword.distributed.sharing import in_turns, lockstep, own, share
from kiloword.evaluation.task import Inputs
from kiloword.model.encoding import chunks, inference, join, moved
from kiloword.report import Tile, thumbnail
from kiloword.terminal import shown
from kiloword.terminal.progress import track
from kiloword.types import BadSample, Features, Skipped, Source

Made = TypeVar("Made")
LISTS = ("rows", "keys", "captions", "infos")  # of `Seen`
WHOLE = ("skipped", "fingerprint")  # of a batch, not of its rows


def tile(source: Source, row: int, *lines: str, side: int = 160) -> Tile:
    """An image of a page, of at most `side` pixels, above lines of text; grey where it can no longer be read."""
    try:
        pixels = decode(read_image(source, row).image, at_least=2 * side)
    except BadSample:
        pixels = np.full((side, side, 3), 128, np.uint8)
    return Tile(thumbnail(pixels, side), lines)


def per_batch(
    inputs: Inputs,
    do: Callable[[EvalBatch], Made],
    usable: Callable[[EvalBatch], list[bool]] | None = None,
    reason: str = "",
    captions: bool = True,
) -> Iterator[Made]:
    """Yield the result of `do` for every batch of usable images of the source, in order; others go to `skipped`.

    Each rank processes its share of the batches and all get all results, which must be on the CPU if ranks share the
    work. In lockstep, a rank without a batch runs `do` on a dummy batch.

    Args: usable: which of a batch's readable rows are used; reason: why the others are not; captions: False
    accepts images without captions. Raises: ValueError if no row is usable.
    """
    source, config = inputs.source, inputs.matcher.model.config
    size, resize = config.image.size, config.preprocess.resize

    def work(_: range) -> tuple[list[Made], list[Skipped]]:
        part = next(mine, None)
        skipped = [] if part is None else part.skipped
        if part is not None and usable is not None:
            part = kept(part, usable(part), reason, skipped)
        if part is not None and part.rows:
            return [do(part)], skipped
        if lockstep():
            do(EvalBatch([-1], [""], torch.zeros(1, 3, size, size, dtype=torch.uint8), [[]], None, [], [{}]))
        return [], skipped

    every = [range(len(source))[part] for part in chunks(len(source), inputs.batch)]
    mine = eval_batches(source, size, resize, inputs.batch, inputs.workers, own(every), captions=captions)
    empty, results = True, zip(every, in_turns(every, work), strict=True)
    for _, (made, skipped) in track(results, "images", "images", len(source), lambda result: len(result[0])):
        inputs.skipped.extend(skipped)
        yield from made
        empty = empty and not made
    if empty:
        why = f", the first because: {inputs.skipped[0].reason}" if inputs.skipped else ""
        other = ". Photos without captions: `kiloword index`, `classify` and `caption` take them"
        why += other if why.endswith(": no caption") else ""
        raise ValueError(f"{source.name}: none of its {len(source)} rows is a usable image{why}")


Batch = TypeVar("Batch", EvalBatch, "Seen")


def kept(batch: Batch, usable: Sequence[bool], reason: str, skipped: list[Skipped]) -> Batch:
    """A copy with the usable rows; the others are appended to `skipped`."""
    rows = zip(batch.rows, batch.keys, usable, strict=True)
    skipped += [Skipped(row, key, reason) for row, key, good in rows if not good]

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: inner[usable] for name, inner in value.items()}
        return value[usable] if isinstance(value, Tensor) else value and list(compress(value, usable))

    new = {f.name: of(getattr(batch, f.name)) for f in fields(batch) if f.name not in WHOLE}
    return batch if all(usable) else replace(batch, **new)


NONE, OTHER = -1, -2  # places of a row without label, and of one whose class is not among those of the task
NOT_AMONG = "its class is not among the class names"  # why a row is skipped


@dataclass(frozen=True)
class Classes:
    """C classes. Labels of the data are indices of `names`, or, where the data names others, of `place`."""

    names: list[str]
    place: Tensor | None = None  # [classes of the data] int64, the class in `names`, or OTHER

    def __len__(self) -> int:
        return len(self.names)

    @property
    def labels(self) -> int:
        """The number of classes that labels of the data count."""
        return len(self.names if self.place is None else self.place)

    def places(self, labels: Tensor) -> Tensor:
        """Classes of labels, [n] int64; labels below 0 stay. Raises: ValueError for one out of range."""
        if len(labels) and int(labels.max()) >= self.labels:
            span = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"labels run from {span}, but there are {self.labels} classes")
        return labels if self.place is None else torch.where(labels < 0, labels, self.place[labels.clamp(min=0)])

    def targets(self, part: EvalBatch) -> Tensor:
        """Classes of images that may have several: [n, C] int64, 0 or 1; -1 for an image without label.

        Raises: ValueError for a class out of range, a set of another number of classes, and an image with one class.
        """
        sets = part.label_sets or []
        targets = torch.zeros(len(sets), len(self), dtype=torch.int64)
        for row, classes in enumerate(sets):
            if classes is not None:
                if classes.classes not in (None, self.labels):
                    raise ValueError(
                        f"{part.keys[row]} has a label of {classes.classes} classes, not of {self.labels}."
                    )
                places = self.places(torch.tensor(classes.indices, dtype=torch.int64))
                targets[row, places[places >= 0]] = 1
            elif part.labels is None or part.labels[row] < 0:
                targets[row] = NONE
            else:
                raise ValueError(f"{part.keys[row]} has one class, but other images have lists: expected lists.")
        return targets


def classes_of(source: Source, chosen: Sequence[str] | str | None) -> Classes | None:
    """The classes that a task tells apart; None where neither the data nor the user names any.

    Chosen names that the data has, too, are matched by name: rows of other classes are omitted. Others go by their
    order, which needs equal numbers.

    Args: chosen: class names; a file of them or a known data set (`data.classes.names`); None: those of the data.
    Raises: ValueError for names that do not fit the data.
    """
    named = list(getattr(source, "classnames", None) or [])
    if chosen is None:
        return Classes(named) if named else None
    names = read_classnames(chosen) if isinstance(chosen, str) else list(chosen)
    if not named or named == names:
        return Classes(names)
    places = [OTHER if place is None else place for place in places_among(named, names)]
    if sum(place != OTHER for place in places) in (len(named), len(names)):
        return Classes(names, torch.tensor(places))
    if len(named) == len(names) and all(place in (at, OTHER) for at, place in enumerate(places)):
        return Classes(names)
    raise ValueError(
        f"{len(names)} class names are given, but {source.name} has {len(named)} classes, the first "
        f"{shown(', '.join(named[:3])[:200])}: expected one list to hold the other, or as many in the same order."
    )


@dataclass
class Seen:
    """One encoded batch of a source, in the order of the source, without bad rows."""

    rows: list[int]
    keys: list[str]
    images: Features  # [n, ...]
    captions: list[list[str]]
    labels: Tensor  # [n] int64, -1: none; or [n, C] 0/1 for many labels an image, [n, 1] where C is not known
    infos: list[dict[str, Any]]
    fingerprint: str = ""  # of the source

    @staticmethod
    def whole(parts: Iterable[Seen]) -> Seen:
        """All batches in one. Raises: ValueError as `joined`."""
        every = list(parts)
        lists: dict[str, Any] = {n: [x for part in every for x in getattr(part, n)] for n in LISTS}
        images, labels = join([part.images for part in every]), joined([part.labels for part in every])
        return Seen(images=images, labels=labels, fingerprint=every[0].fingerprint, **lists)

    @property
    def texts(self) -> list[str]:
        """All captions, image by image: T."""
        return [text for of_image in self.captions for text in of_image]

    @property
    def image_of_text(self) -> list[int]:
        """The place of the image of each caption, [T]."""
        return [place for place, of_image in enumerate(self.captions) for _ in of_image]

    def without(self, places: Tensor) -> Seen:
        """A copy without the images at `places`."""
        omitted = {*places.tolist()}
        return kept(self, [n not in omitted for n in range(len(self.rows))], "", [])


def joined(labels: Sequence[Tensor]) -> Tensor:
    """Labels of batches in one. Raises: ValueError where some have one class and others lists."""
    if len({part.ndim for part in labels}) > 1:
        raise ValueError("some images have one class, others a list of classes: expected a list for every image.")
    return torch.cat(list(labels))


def seen(
    inputs: Inputs, encode: Callable[[Tensor], Features] | None = None, classes: Classes | None = None
) -> Iterator[Seen]:
    """Encode every image of the source once; bad rows are appended to `skipped`.

    Args: encode: uint8 [n, 3, H, W], or tokens [n, N, W], to features, in place of the model's; classes: to which
    labels are mapped; without them an image that may have several has none.
    """
    model = inputs.matcher.model

    def usual(images: Tensor) -> Features:
        if not images.is_floating_point():
            return inputs.matcher.encode_image(images, batch=inputs.batch)
        with inference(model):
            return model.image_features(images.to(model.device))

    def encoded(part: EvalBatch) -> Seen:
        images = (encode or usual)(part.images)
        if share()[1] > 1:
            images = moved(images, "cpu")
        labels = torch.full((len(part.rows),), -1) if part.labels is None else part.labels
        if part.label_sets is not None:
            labels = torch.zeros(len(part.rows), 1, dtype=torch.int64) if classes is None else classes.targets(part)
        elif classes is not None:
            labels = classes.places(labels)
        return Seen(part.rows, part.keys, images, part.captions, labels, part.infos, inputs.source.fingerprint)

    for part in per_batch(inputs, encoded):
        yield replace(part, images=moved(part.images, model.device))


def captioned(inputs: Inputs, encode: Callable[[Tensor], Features] | None = None) -> Seen:
    """Encode every image that has captions; the others are appended to `skipped`.

    Args: encode: as for `seen`. Raises: ValueError where no image has one, and for features that memory cannot hold.
    """
    from kiloword.api.features import check_room

    source, parts = inputs.source, list[Seen]()
    for part in seen(inputs, encode):
        if not parts:
            check_room(part.images, len(source), "images", part.images["vec"].device)
        parts.append(kept(part, list(map(bool, part.captions)), "no caption", inputs.skipped))
    if not any(part.rows for part in parts):
        raise ValueError(
            f"{source.name} has no captions to retrieve with: expected images with captions. Class data is for "
            "`kiloword eval zeroshot MODEL`."
        )
    return Seen.whole(parts)


def labelled(
    inputs: Inputs, encode: Callable[[Tensor], Features] | None = None, classes: Classes | None = None
) -> Iterator[Seen]:
    """As `seen`, without rows that have no class label, or one that is not among the classes.

    Raises: ValueError where no row has one.
    """
    empty = True
    for part in seen(inputs, encode, classes):
        for value, reason in ((OTHER, NOT_AMONG), (NONE, "no class label")):
            least = part.labels if part.labels.ndim == 1 else part.labels.amin(1)
            part = kept(part, (least != value).tolist(), reason, inputs.skipped)
        if part.rows:
            empty = False
            yield part
    if empty:
        why = f" None of {len(inputs.skipped)} rows is left: {left_out(inputs.skipped)}." if inputs.skipped else ""
        raise ValueError(
            f"{inputs.source.name} has no class labels: expected class folders, a column `label`, or a .cls for every "
            f"image.{why}"
        )
