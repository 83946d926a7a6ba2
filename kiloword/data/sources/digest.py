"""Digests of images and texts, which a resumed run compares: of a sample of rows, and of all if it was computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from kiloword.data.reading import patiently
from kiloword.data.sources.mixture import MixtureSource
from kiloword.randomness import generator
from kiloword.types import BadSample, Source

SAMPLED = 512  # rows of each source


def sampled(source: Source) -> str:
    """Digest of the images and texts of up to `SAMPLED` rows of each source, drawn by its fingerprint.

    Returns: 32 hexadecimal digits; "" if the fingerprint covers all.
    """
    digests = [_sampled(part) for part in _parts(source) if hasattr(part, "stored")]
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest() if any(digests) else ""


def whole(source: Source) -> str:
    """Digest of all images and texts, computed by `kiloword data index --digest`; "" if any source has none."""
    digests = [str(getattr(part, "digest", "")) for part in _parts(source)]
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest() if all(digests) else ""


def _parts(source: Source) -> list[Source]:
    return source.sources if isinstance(source, MixtureSource) else [source]


def _sampled(source: Any) -> str:
    rng = generator(source.fingerprint, "digest")
    rows = np.sort(rng.choice(len(source), min(SAMPLED, len(source)), replace=False))
    digest, is_empty = hashlib.blake2b(digest_size=16), True
    for raw in (raw for row in rows.tolist() for raw in _stored(source, row)):
        digest.update(f"{-1 if raw is None else len(raw)} ".encode() + (raw or b""))
        is_empty = False
    return "" if is_empty else digest.hexdigest()


def _stored(source: Any, row: int) -> Iterator[bytes | None]:
    try:
        yield from patiently(partial(source.stored, row))
    except BadSample:  # missing or too large
        yield None
