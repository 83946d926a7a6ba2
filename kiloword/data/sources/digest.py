"""Digests of what data sets hold, which a resumed run compares: of some samples always, of all where one was made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from kiloword.data.reading import patiently
from kiloword.data.sources.mixture import MixtureSource
from kiloword.randomness import key
from kiloword.types import BadSample, Source

SAMPLED = 512  # rows of each source


@runtime_checkable
class StoredSource(Protocol):
    """A source whose samples are files, or members of tars, of this machine."""

    fingerprint: str

    def __len__(self) -> int: ...

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's image and texts that the fingerprint does not cover; None: not there.

        Raises: BadSample, OSError.
        """


def sampled(source: Source) -> str:
    """Digest of the images and texts of up to `SAMPLED` rows of each source, drawn by its fingerprint.

    Returns: 32 hexadecimal digits; "" where there is nothing that the fingerprint does not cover.
    """
    digests = [_sampled(part) for part in _parts(source) if isinstance(part, StoredSource)]
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest() if any(digests) else ""


def whole(source: Source) -> str:
    """Digest of all images and texts, as `kiloword data index --digest` made it; "" where it did not, of any source."""
    digests = [str(getattr(part, "digest", "")) for part in _parts(source)]
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest() if all(digests) else ""


def _parts(source: Source) -> list[Source]:
    return source.sources if isinstance(source, MixtureSource) else [source]


def _sampled(source: StoredSource) -> str:
    rng = np.random.Generator(np.random.Philox(key(source.fingerprint, "digest")))
    rows = np.sort(rng.choice(len(source), min(SAMPLED, len(source)), replace=False))
    digest, some = hashlib.blake2b(digest_size=16), False
    for raw in (raw for row in rows.tolist() for raw in _stored(source, row)):
        digest.update(f"{-1 if raw is None else len(raw)} ".encode() + (raw or b""))
        some = True
    return digest.hexdigest() if some else ""


def _stored(source: StoredSource, row: int) -> Iterator[bytes | None]:
    try:
        yield from patiently(partial(source.stored, row))
    except BadSample:  # missing, larger than what is read
        yield None
