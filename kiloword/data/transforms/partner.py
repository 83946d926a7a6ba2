"""Choice of the partner of an example among all rows of the data set, and captions that a file has for pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.columns import read_columns
from kiloword.data.edits import MixtureSource
from kiloword.data.images.decode import decode
from kiloword.data.reading import read
from kiloword.data.source import keys
from kiloword.data.transforms.settings import PartnerSettings
from kiloword.randomness import Draw, permutation
from kiloword.types import BadSample, Source

Partners = NDArray[np.integer[Any]]  # [N] the partner of every row; -1 for a row that cannot be read
Rewrites = dict[tuple[str, str], list[str]]  # captions of pairs of samples, by their keys

_BLOCK = 1 << 24  # similarities computed at once: 64 MB
_TRIED = 5000  # pairs of which the share with rewritten captions is told


@dataclass(frozen=True)
class Partner:
    """Chooses partners; `bind` reads those that files name."""

    settings: PartnerSettings
    rows: Partners | None = None

    def __post_init__(self) -> None:
        needed = {"nearest": "partner_table", "farthest": "partner_table", "file": "partner_file"}
        name = needed.get(self.settings.partner)
        if name and getattr(self.settings, name) is None:
            raise ValueError(f"partner {self.settings.partner} needs {name}: name its file or folder.")

    def bind(self, source: Source, open_store: Callable[[str], Any] | None = None) -> Partner:
        """Bind to a data set. Args: open_store: opens feature stores.

        Raises: ValueError for rows without a partner, or a feature store of other data.
        """
        s = self.settings
        if s.partner == "random":
            return self
        if isinstance(source, MixtureSource) and any(weight % 1 for weight in source.weights):
            raise ValueError(
                f"{source.name}: rows change between epochs, which needs partner random. Use whole weights."
            )
        if s.partner == "fixed":
            return self
        if s.partner == "file":
            return replace(self, rows=named(source, str(s.partner_file)))
        assert open_store is not None, "nearest and farthest need a feature store"
        return replace(self, rows=similar(source, open_store(str(s.partner_table)), farthest=s.partner == "farthest"))

    def row(self, row: int, n: int, draw: Draw, rng: np.random.Generator) -> int:
        """The row of the partner among n rows; never `row` itself if there is another."""
        random_row = another(row, n, rng)
        if self.settings.partner == "fixed":
            return int(cycle(draw.seed, n)[row])
        if self.rows is None or self.rows[row] < 0:
            assert self.rows is not None or self.settings.partner == "random", "a transform was used before its bind"
            return random_row
        return int(self.rows[row])


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


def rewritten(rewrites: Rewrites, partner: Partner, source: Source) -> float:
    """The share of the pairs of rows and their partners that have captions, of some rows in some epochs."""
    names, n = keys(source), len(source)
    draws = [Draw(0, epoch, row) for epoch in range(-(-_TRIED // n)) for row in range(0, n, -(-n // _TRIED))]
    others = [partner.row(draw.row, n, draw, draw.rng("compose")) for draw in draws]
    found = [bool(either(rewrites, names[draw.row], names[row])) for draw, row in zip(draws, others, strict=True)]
    return sum(found) / len(found)


def named(source: Source, path: str) -> Partners:
    """Partners from a parquet file (key, partner).

    Raises: ValueError for a key twice, a partner that the source does not have, or a readable row without partner.
    """
    table = read_columns(path, "key", "partner")
    own_keys, others = table
    partner_of = dict(zip(own_keys, others, strict=True))
    if len(partner_of) < len(own_keys):
        twice = Counter(own_keys).most_common(1)[0][0]
        raise ValueError(f"{path} names a partner of {twice!r} twice. Expected one row per sample.")
    all_keys = keys(source)
    row_of = {k: row for row, k in reversed(list(enumerate(all_keys)))}
    unknown = next((o for o in others if o not in row_of), None)
    if unknown is not None:
        raise ValueError(f"{path} names the partner {unknown!r}, which {source.name} does not have.")
    rows = np.array([row_of[partner_of[k]] if k in partner_of else -1 for k in all_keys], np.int64)
    _check_covered(source, rows < 0, path)
    return rows


def similar(source: Source, table: Any, farthest: bool) -> Partners:
    """For each row the row with the largest (or smallest) cosine of mean caption embeddings.

    Raises: ValueError when the feature store lacks a readable row.
    """
    places, means = table.places(source), table.text_means()
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    embedded = (places >= 0) & (norms[places, 0] > 0)
    _check_covered(source, ~embedded, "the partner table")
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


def _check_covered(source: Source, missing: NDArray[np.bool_], where: str) -> None:
    """Raises: ValueError for a missing row that is readable; bad rows are never composed."""
    for row in np.flatnonzero(missing).tolist():
        try:
            record = read(source, row)
            decode(record.image)
        except BadSample:
            continue
        if not record.captions:  # the loader skips it too
            continue
        raise ValueError(f"{where} has no entry for {record.key!r} of {source.name}. Expected every sample's key.")
