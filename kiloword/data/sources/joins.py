"""What is made from a source is joined to it by key, and to no other source with equal keys.

Data sets number their images alike (000000000, ...), so captions and keep-lists say which images they were made from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow.parquet as pq

from kiloword.data.reading import digest_of
from kiloword.data.sources.mixture import MixtureSource, every_row, mix, parts_of
from kiloword.data.sources.optional import keys
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record, Source

SAMPLED = 64  # images of each source by which a file recognises it


class Keyed(Protocol):
    """A file that is joined to a source by key; `str` names it."""

    @property
    def images(self) -> Mapping[str, str]:
        """Digests of some images that it was made from, by key; {}: it does not say."""

    @property
    def first_key(self) -> str: ...
    def __contains__(self, key: str) -> bool: ...


Made = TypeVar("Made", bound=Keyed)


def sampled_images(source: Source) -> dict[str, str]:
    """Digests of some encoded images of each source of a mixture, by key; none of images that are drawn."""
    digests = {}
    for part in parts_of(source):
        for row in range(0, len(part), -(-len(part) // SAMPLED)):
            record = _record(part, row)
            if record is not None and isinstance(record.image, bytes):
                digests[record.key] = digest_of(record.image).hex()
    return digests


def images_in(path: Path) -> dict[str, str]:
    """`sampled_images` of the data that a parquet table was made from, by its metadata; {} where it does not say."""
    try:
        images = json.loads(pq.read_schema(path).metadata[b"kiloword"])["images"]
    except (KeyError, TypeError, ValueError):
        return {}
    return images if isinstance(images, dict) else {}


def joined(source: Source, made: Sequence[Made], wrap: Callable[[Source, list[Made]], Source]) -> Source:
    """The source, or each source of a mixture, wrapped with the files that were made from its images.

    A file that does not say what it was made from is of every source, whose keys must then differ.
    Raises: ValueError for a file of other images, and for keys by which a file fits two images.
    """
    parts = parts_of(every_row(source))
    of: dict[tuple[str, str], list[Made]] = {(part.name, part.fingerprint): [] for part in parts}
    for one in made:
        fits = [_is_of(one, part) for part in parts]
        chosen = [part for part, fit in zip(parts, fits, strict=True) if fit is not False]
        if not chosen:
            raise ValueError(
                f"{one} was made from other images than those of {source.name}, which have the same keys: name the "
                "data that it was made from, or make it again from this data."
            )
        every = (key for part in chosen for key in keys(part) if key is not None)
        if (other := next(every, "")) not in one and not any(key in one for key in every):
            raise ValueError(
                f"{one} is of another data set: it has none of the {len(source):,} images of {source.name}. Its keys "
                f"are such as {shown(one.first_key[:100])!r}, the images' such as {shown(other[:100])!r}."
            )
        if len(chosen) > 1 or True not in fits:
            check_keys(mix(chosen), str(one), one.__contains__)
        for part in chosen:
            of[part.name, part.fingerprint].append(one)

    def wrapped(source: Source) -> Source:
        if isinstance(source, MixtureSource):
            return MixtureSource([wrapped(part) for part in source.sources], source.weights, source.epoch)
        return wrap(source, of[source.name, source.fingerprint])

    return wrapped(source)


def check_keys(source: Source, what: str, known: Callable[[str], bool] | None = None, texts: bool = False) -> None:
    """Raises: ValueError where two images of a source, or of the sources of a mixture, have one key and differ.

    Args: what: is joined by key, for the message; known: whether a key matters; texts: compare captions too.
    """
    whole, first = every_row(source), dict[str, int]()
    for row, key in enumerate(keys(whole)):
        earlier = row if key is None else first.setdefault(key, row)
        if key is None or earlier == row or (known is not None and not known(key)):
            continue
        if _compared(whole, earlier, texts) != _compared(whole, row, texts):
            names = [(whole.locate(n)[0] if isinstance(whole, MixtureSource) else whole).name for n in (earlier, row)]
            raise ValueError(
                f"two images of {' and '.join(dict.fromkeys(names))} have the key {shown(key[:100])!r} and differ"
                f"{' (or their captions)' * texts}, but {what} is joined by key: give each image a unique key, or use "
                "one source at a time."
            )


def _is_of(made: Keyed, source: Source) -> bool | None:
    """Whether most of the images that a file knows are those of a source; None where the source has none of them."""
    rows = {key: row for row, key in enumerate(keys(source)) if key in made.images} if made.images else {}
    same = [
        digest_of(record.image).hex() == made.images[record.key]
        for row in rows.values()
        if (record := _record(source, row)) is not None and isinstance(record.image, bytes)
    ]
    return 2 * sum(same) > len(same) if same else None


def _compared(source: Source, row: int, texts: bool) -> tuple[bytes, list[str]] | None:
    record = _record(source, row)
    return None if record is None else (digest_of(record.image), record.captions if texts else [])


def _record(source: Source, row: int) -> Record | None:
    """The record of a row, with or without captions; None for a bad row."""
    try:
        return source.record(row)
    except NoCaption as error:
        return error.record
    except BadSample:
        return None
