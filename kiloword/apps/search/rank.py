"""The best photos of a library for a text or an image.

All photos are scored exactly, block by block, where a score is a cosine minus uncertainties. A model that compares a
photo anew with each text (llip, flair, filip) scores a shortlist, the photos nearest by their vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kiloword.apps.search.library import BLOCK, OF_GAUSSIANS, Library
from kiloword.data.classes.names import caseless
from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.model.encoding import chunks, inference, moved
from kiloword.report import Pixels, thumbnail
from kiloword.types import BadSample

if TYPE_CHECKING:
    from kiloword.api import Matcher

SHORTLIST = 300  # photos scored exactly by a model that compares photos anew with each text
LONGEST_QUERY = 10_000  # characters
GATHERED = 1 << 28  # bytes of features read at once to score photos
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Match:
    """A photo in the order of a search."""

    row: int  # of the library
    score: float | None = None
    uncertainty: float | None = None  # of a Gaussian


def by_text(library: Library, matcher: Matcher, text: str, top: int, within: str = "") -> list[Match]:
    """The best photos for a text. Args: within: part of the path that photos must have.

    Raises: ValueError for a text that is empty or too long.
    """
    text = " ".join(text.split())
    if not 0 < len(text) <= LONGEST_QUERY:
        wrong = f"the query has {len(text):,} characters, more than {LONGEST_QUERY:,}" if text else "the query is empty"
        raise ValueError(f"{wrong}: expected words that describe a photo.")
    model, texts = matcher.model, matcher.encode_text([text])
    scores = cosines(library.features["vec"], texts["vec"][0].float().cpu().numpy())
    if "penalty" in library.features:
        assert model.head.uncertainty is not None
        with inference(model):
            scores -= library.features["penalty"] + model.head.uncertainty.penalty(texts).float().cpu().numpy()
    contextual = not library.features.keys() <= {"vec", *OF_GAUSSIANS}
    rows = best(_within(library, scores, within), max(SHORTLIST, top) if contextual else top)
    if contextual:
        rows.sort()
        size = sum(4 * value[0].size for value in library.features.values())
        for part in chunks(len(rows), max(1, GATHERED // size)):
            with inference(model):
                exact = model.score(moved(library.taken(rows[part]), model.device), texts)[:, 0]
            scores[rows[part]] = exact.float().cpu().numpy()
        rows = rows[best(scores[rows], top)]
    return _matches(library, scores, rows)


def by_image(library: Library, vec: Floats, top: int, within: str = "") -> list[Match]:
    """The photos most like an image by the cosine of their vectors, [D]."""
    scores = _within(library, cosines(library.features["vec"], vec), within)
    return _matches(library, scores, best(scores, top))


def cosines(vectors: NDArray[Any], query: Floats) -> Floats:
    """The cosine of every row [N, D] with a vector [D], or of its first numbers with a shorter one: [N]."""
    scores = np.empty(len(vectors), np.float32)
    for part in chunks(len(vectors), BLOCK):
        block = vectors[part, : len(query)]
        scores[part] = block @ query
        if len(query) < vectors.shape[1]:
            scores[part] /= np.linalg.norm(block, axis=1)
    return scores


def best(scores: Floats, top: int) -> NDArray[np.int64]:
    """Places of the largest scores, without -inf and NaN; ties in their order, however many are wanted."""
    scores = np.where(np.isnan(scores), -np.inf, scores)
    top = min(top, len(scores))
    rows = np.flatnonzero(scores >= np.partition(scores, -top)[-top]) if top else np.zeros(0, np.int64)
    rows = rows[np.argsort(-scores[rows], kind="stable")][:top]
    return rows[scores[rows] > -np.inf]


def _within(library: Library, scores: Floats, within: str) -> Floats:
    """-inf for photos whose path lacks `within`."""
    if within:
        inside = [caseless(within) in caseless(path) for path in library.rows["path"].to_pylist()]
        scores[~np.array(inside, bool)] = -np.inf
    return scores


def _matches(library: Library, scores: Floats, rows: NDArray[np.int64]) -> list[Match]:
    of = library.features.get("uncertainty")
    return [Match(int(n), float(scores[n]), None if of is None else float(of[n])) for n in rows]


def shrunk(photo: Path, side: int) -> Pixels:
    """A photo [H, W, 3] with at most `side` pixels a side. Raises: ValueError for one that cannot be read."""
    try:
        return thumbnail(decode(read_whole(photo, "it", MAX_IMAGE), at_least=side), side)
    except (OSError, BadSample) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"the photo cannot be read ({reason}).") from None
