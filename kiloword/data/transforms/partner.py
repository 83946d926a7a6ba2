"""With whom an example is composed: any row of the whole data set, not of the batch alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kiloword.data.images.decode import decode
from kiloword.data.reading import read
from kiloword.data.transforms.files import keys, read_columns
from kiloword.data.transforms.settings import PartnerSettings
from kiloword.features.store import FeatureStore
from kiloword.randomness import Draw, key
from kiloword.types import BadSample, Source

Partners = NDArray[np.int64]  # [N] the partner of every row; -1: it has none, as it cannot be read

_BLOCK = 1 << 24  # similarities at a time: 64 MB


@dataclass(frozen=True)
class Partner:
    """The choice of partners; after `bind` it knows those that files name."""

    settings: PartnerSettings
    rows: Partners | None = None

    def __post_init__(self) -> None:
        wanted = {"nearest": "partner_table", "farthest": "partner_table", "file": "partner_file"}
        name = wanted.get(self.settings.partner)
        if name and getattr(self.settings, name) is None:
            raise ValueError(f"partner {self.settings.partner} needs {name}: name the file or folder that it is in.")

    def bind(self, source: Source) -> Partner:
        """The same, knowing the data set. Raises: ValueError for rows without a partner, or a table of other data."""
        s = self.settings
        if s.partner == "random":
            return self
        _check_steady(source)
        if s.partner == "file":
            assert s.partner_file is not None
            return replace(self, rows=named(source, s.partner_file))
        if s.partner in ("nearest", "farthest"):
            assert s.partner_table is not None
            table = FeatureStore(s.partner_table)
            table.check(source)
            return replace(self, rows=similar(source, table, farthest=s.partner == "farthest"))
        return self

    def row(self, own: int, n: int, draw: Draw, rng: np.random.Generator) -> int:
        """The partner's row among n; never one's own when there is another."""
        anyone = another(own, n, rng)
        if self.settings.partner == "fixed":
            return int(cycle(draw.seed, n)[own])
        if self.rows is None or self.rows[own] < 0:
            assert self.rows is not None or self.settings.partner == "random", "a transform was used before its bind"
            return anyone
        return int(self.rows[own])


def another(own: int, n: int, rng: np.random.Generator) -> int:
    """Any other row of n with equal probability; one's own when it is the only one."""
    if n == 1:
        return own
    other = int(rng.integers(n - 1))
    return other + (other >= own)


@lru_cache(maxsize=2)
def cycle(seed: int, n: int) -> Partners:
    """Every row's successor in one keyed circle of all n rows: each is the partner of one, none its own."""
    order = np.random.Generator(np.random.Philox(key(seed, "partners"))).permutation(n)
    partners = np.empty(n, np.int64)
    partners[order] = np.roll(order, -1)
    return partners


def named(source: Source, path: str) -> Partners:
    """Partners that a parquet file (key, partner) names.

    Raises: ValueError for a key twice, a partner that the source does not have, or a readable row without partner.
    """
    own, others = read_columns(path, ("key", "partner"))
    partner_of = dict(zip(own, others, strict=True))
    if len(partner_of) < len(own):
        twice = Counter(own).most_common(1)[0][0]
        raise ValueError(f"{path} names a partner of {twice!r} twice. Expected one row a sample.")
    all_keys = keys(source)
    row_of = {k: row for row, k in reversed(list(enumerate(all_keys)))}
    unknown = next((o for o in others if o not in row_of), None)
    if unknown is not None:
        raise ValueError(f"{path} names the partner {unknown!r}, which {source.name} does not have.")
    rows = np.array([row_of[partner_of[k]] if k in partner_of else -1 for k in all_keys], np.int64)
    _check_covered(source, rows < 0, path)
    return rows


def similar(source: Source, table: FeatureStore, farthest: bool) -> Partners:
    """The row whose captions' mean embedding has the greatest (or least) cosine with a row's own.

    Raises: ValueError when the table has no embedding of a readable row.
    """
    all_keys, places = keys(source), {k: place for place, k in enumerate(table.keys)}
    means = np.asarray(table.text_means(), np.float32)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    known = np.array([k in places and bool(norms[places[k]] > 0) for k in all_keys])
    _check_covered(source, ~known, "the partner table")
    rows = np.flatnonzero(known)
    place = np.array([places[all_keys[row] or ""] for row in rows], np.int64)
    if len(set(place.tolist())) < 2:
        raise ValueError(f"{source.name} has one sample with an embedding: nearest and farthest need at least two.")
    unit = (means / np.maximum(norms, 1e-12))[place]
    partners = np.full(len(all_keys), -1, np.int64)
    partners[rows] = rows[_best(-unit if farthest else unit, unit, place)]
    return partners


def _best(queries: NDArray[np.float32], features: NDArray[np.float32], place: Partners) -> Partners:
    """For each query [N, D] the feature [N, D] with the greatest product, of another sample."""
    step = max(1, _BLOCK // len(features))
    found = []
    for start in range(0, len(queries), step):
        product = queries[start : start + step] @ features.T
        product[place[start : start + step, None] == place[None]] = -np.inf
        found.append(product.argmax(1))
    return np.concatenate(found).astype(np.int64)


def _check_covered(source: Source, missing: NDArray[np.bool_], where: str) -> None:
    """Rows that are missing must be bad ones, which are never composed. Raises: ValueError."""
    for row in np.flatnonzero(missing).tolist():
        try:
            record = read(source, row)
            decode(record.image)
        except BadSample:
            continue
        if not record.captions:  # the loader passes it over too
            continue
        raise ValueError(f"{where} says nothing of {record.key!r} of {source.name}. Expected every sample's key.")


def _check_steady(source: Source) -> None:
    """Raises: ValueError where a row's sample changes from epoch to epoch."""
    if any(weight % 1 for weight in getattr(source, "weights", ())):
        raise ValueError(
            f"{source.name}: rows change from epoch to epoch, so only partner random fits. Use whole weights."
        )
