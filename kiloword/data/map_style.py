"""A map-style data set of the user as a `Source`, for training from Python."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kiloword.data.images.decode import Pixels, to_rgb
from kiloword.data.sample import MAX_IMAGE, clean, label_set, read_whole
from kiloword.data.tables import CAPTION_COLUMNS, IMAGE_COLUMNS, LABEL_COLUMNS
from kiloword.errors import article
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet, NoCaption, Record

AnyImage = Image.Image | Pixels | str | Path | bytes
"""A Pillow image, uint8 [H, W, 3] (RGB) or [H, W] (grey), the path of a file, or an encoded file's bytes."""

_HASHED = 8  # rows that the fingerprint covers


class MapStyleSource:
    """A map-style data set whose samples are `(image, caption or captions)`, or `(image, class)` as torchvision's.

    A sample may also be a dictionary with the columns that kiloword knows in tables, such as `image` and `caption`. A
    class is an index, or a list of them; None: no label. Images should not be augmented: the recipe does that, so
    that a resumed run gets the same images. A row that raises an exception is a bad sample: it is counted and replaced.

    Args: name: recorded in runs and models; fingerprint: any text that changes when the data changes, by default of the
    length and 8 samples; classnames, templates: of the classes, the first by default the `classes` of the data set.
    Errors: ValueError for what is no data set, an empty one, and samples of another form.
    """

    def __init__(
        self,
        dataset: Any,
        name: str = "dataset",
        fingerprint: str | None = None,
        classnames: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, Mapping):
            kind = type(dataset).__name__
            raise ValueError(
                f"data set {name!r} is {article(kind)}: expected a path, or rows with a length and numbers."
            )
        if not len(dataset):
            raise ValueError(f"data set {name!r} is empty: expected at least one sample (image, caption).")
        self.dataset, self.name = dataset, name
        self.columns = _columns(dataset[0], name)
        self._is_class_data = _check_form(self._row(0), name)
        named = (classnames or getattr(dataset, "classes", None)) if self._is_class_data else None
        self.classnames = list(named) if named else None
        self.templates = list(templates) if templates else None
        self.fingerprint = self._digest() if fingerprint is None else fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def key(self, row: int) -> str:
        """The row's number as text."""
        return str(row)

    def captions(self, row: int) -> list[str]:
        """Captions; none of class data. This reads the sample from the data set, but decodes no image."""
        return [] if self._is_class_data else self._sample(row, lambda image: b"")[1]

    def record(self, row: int) -> Record:
        """The sample as bytes or pixels. Raises BadSample with the reason."""
        record = Record(self.key(row), *self._sample(row, _stored))
        if not record.captions and not self._is_class_data:
            raise NoCaption(record)
        return record

    def _row(self, row: int) -> Any:
        sample = self.dataset[row]
        return tuple(sample[column] for column in self.columns) if self.columns else sample

    def _sample(
        self, row: int, stored: Callable[[AnyImage], bytes | Pixels]
    ) -> tuple[bytes | Pixels, list[str], int | LabelSet | None]:
        try:
            image, text = self._row(row)
            if not self._is_class_data:
                return stored(image), clean([text] if isinstance(text, str) else list(text)), None
            several = isinstance(text, list | tuple)
            labels = label_set([operator.index(one) for one in (text if several else [text]) if one is not None])
            return stored(image), [], labels if several else next(iter(labels.indices), None)
        except (BadSample, MemoryError):
            raise
        except Exception as error:  # a user's class may raise anything; see `kiloword.data.reading.read`
            raise BadSample(f"{type(error).__name__}: {error}"[:200]) from error

    def _digest(self) -> str:
        """A digest of the length and of some samples, including the first and the last."""
        rows = np.linspace(0, len(self) - 1, min(_HASHED, len(self))).round().astype(int).tolist()
        digest = hashlib.blake2b(str(len(self)).encode(), digest_size=16)
        for row in rows:
            try:
                record = self.record(row)
            except BadSample as error:
                digest.update(str(error).encode())
                continue
            image = record.image
            digest.update(image if isinstance(image, bytes) else str(image.shape).encode() + image.tobytes())
            digest.update(("\n".join(record.captions) if record.label is None else str(record.label)).encode())
        return digest.hexdigest()


def _columns(sample: Any, name: str) -> tuple[str, ...]:
    """The columns of image and text, or label, of a sample with named columns; () for another one."""
    if not isinstance(sample, Mapping):
        return ()
    kinds = IMAGE_COLUMNS, (*CAPTION_COLUMNS, "text", *LABEL_COLUMNS)
    found = [column for kind in kinds for column in [c for c in kind if c in sample][:1]]
    if len(found) < len(kinds):
        raise ValueError(
            f"sample 0 of data set {name!r} has the columns {shown(', '.join(map(str, sample))[:200])}: expected an "
            f"image ({', '.join(IMAGE_COLUMNS[:3])}, ...) and a text or label ({', '.join(kinds[1][:4])}, ...)."
        )
    return tuple(found)


def _check_form(sample: Any, name: str) -> bool:
    """Whether samples have labels. Raises: ValueError unless a sample is an image and text, or an image and a label."""
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2
    if is_pair and isinstance(sample[0], Image.Image | np.ndarray | str | Path | bytes):
        texts = [sample[1]] if isinstance(sample[1], str) else sample[1]
        listed = texts if isinstance(texts, list | tuple) and texts else [texts]
        if all(isinstance(index, int | np.integer) and not isinstance(index, bool) for index in listed):
            return True
        if isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts):
            return False
    kinds = ", ".join(type(part).__name__ for part in sample) if is_pair else "no pair"
    raise ValueError(
        f"sample 0 of data set {name!r} is a {type(sample).__name__} ({kinds}): expected a pair (image, caption or "
        "captions) or (image, class index or indices), the image a Pillow image, a uint8 array [H, W, 3], a path or "
        "bytes, before any transform to tensors."
    )


def _stored(image: AnyImage) -> bytes | Pixels:
    """The image of a `Record`. Raises BadSample; OSError."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return read_whole(Path(image), "image", MAX_IMAGE)
    if isinstance(image, Image.Image):
        return np.array(to_rgb(image))  # a copy: an array of Pillow's own memory is read-only
    return np.repeat(image[:, :, None], 3, 2) if image.ndim == 2 else image
