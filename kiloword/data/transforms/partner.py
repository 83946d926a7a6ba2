"""Choice of the partner of an example among all rows of the data set, and captions that a file has for pairs."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.columns import read_columns
from kiloword.data.images.decode import decode
from kiloword.data.reading import read
from kiloword.data.source import keys
from kiloword.randomness import permutation
from kiloword.types import BadSample, Source

Partners = NDArray[np.integer[Any]]  # [N] the partner of every row; -1 for a row that cannot be read
Rewrites = dict[tuple[str, str], list[str]]  # captions of pairs of samples, by their keys

_BLOCK = 1 << 24  # similarities computed at once: 64 MB


def another(row: int, n: int, rng: np.random.Generator) -> int:
    """Any other of n rows with equal probability; `row` itself if it is the only one."""
    if n == 1:
        return row
    other = int(rng.integers(n - 1))
    return other + (other >= row)


@lru_cache(maxsize=2)
def cycle(seed: int, n: int) -> Partners:
    """Every row's successor in a keyed cycle of all n rows: each row is the partner of exactly one other."""
    order = permutation(n, seed, "partners")
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -1)
    return partners


def read_rewrites(path: str, source: Source) -> Rewrites:
    """Captions of pairs from a parquet file (key, partner, caption); several rows of a pair are several captions.

    Raises: ValueError when it cannot be read, or names no pair of the source.
    """
    rewrites: Rewrites = {}
    table = read_columns(path, "key", "partner", "caption")
    for key, partner, caption in zip(*table, strict=True):
        rewrites.setdefault((key, partner), []).append(caption)
    known = set(keys(source))
    if not any(known.issuperset(pair) for pair in rewrites):
        first = next(iter(rewrites), ("", ""))
        raise ValueError(
            f"{path}: no row names two samples of {source.name}, the first is {first}. Was it made of other data?"
        )
    return rewrites


def either(rewrites: Rewrites, key: str | None, partner: str | None) -> list[str]:
    """Captions of a pair, in either order; [] if there are none."""
    return rewrites.get((key, partner)) or rewrites.get((partner, key)) or []  # type: ignore[arg-type]


def named(source: Source, path: str) -> Partners:
    """Partners from a parquet file (key, partner).

    Raises: ValueError for a key twice, a partner that the source does not have, or a readable row without partner.
    """
    own, others = read_columns(path, "key", "partner")
    if twice := [key for key, count in Counter(own).items() if count > 1]:
        raise ValueError(f"{path} names a partner of {twice[0]!r} twice. Expected one row per sample.")
    all_keys, partner_of = keys(source), dict(zip(own, others, strict=True))
    row_of = {key: row for row, key in reversed(list(enumerate(all_keys)))}
    if unknown := [other for other in others if other not in row_of]:
        raise ValueError(f"{path} names the partner {unknown[0]!r}, which {source.name} does not have.")
    rows = np.array([row_of[partner_of[key]] if key in partner_of else -1 for key in all_keys], np.int64)
    for row in np.flatnonzero(rows < 0).tolist():
        with suppress(BadSample):  # bad rows are never composed
            record = read(source, row)
            decode(record.image)
            if record.captions:
                raise ValueError(f"{path} has no entry for {record.key!r} of {source.name}. Expected every key.")
    return rows


def similar(source: Source, table: Any, farthest: bool) -> Partners:
    """For each row the row with the largest (or smallest) cosine of mean caption embeddings.

    Raises: ValueError when the feature store lacks a readable row.
    """
    places, means = table.places(source), table.text_means()
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    embedded = (places >= 0) & (norms[places, 0] > 0)
    rows, place = np.flatnonzero(embedded), places[embedded]
    if len(set(place.tolist())) < 2:
        raise ValueError(f"{source.name} has one sample with an embedding: nearest and farthest need at least two.")
    unit = (means / np.maximum(norms, 1e-12))[place]
    partners = np.full(len(places), -1, np.int64)
    partners[rows] = rows[_best(-unit if farthest else unit, unit, place)]
    return partners


def _best(queries: NDArray[np.float32], features: NDArray[np.float32], place: Partners) -> Partners:
    """For each query [N, D] the feature [N, D] of another sample with the largest product."""
    step = max(1, _BLOCK // len(features))
    best = []
    for start in range(0, len(queries), step):
        product = queries[start : start + step] @ features.T
        product[place[start : start + step, None] == place[None]] = -np.inf
        best.append(product.argmax(1))
    return np.concatenate(best).astype(np.int64)
