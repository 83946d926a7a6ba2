"""The best photos of a library for texts and images.

All photos are scored exactly, straight from the memory map, where a score is a cosine minus uncertainties. A model that
compares a photo anew with each text (llip, flair, filip) scores a shortlist, the photos nearest by their vectors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kiloword.apps.search.library import OF_GAUSSIANS, Library
from kiloword.data.classes.names import caseless
from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.model.encoding import chunks, inference, moved
from kiloword.report import Pixels, thumbnail
from kiloword.types import BadSample

if TYPE_CHECKING:
    from kiloword.api import Matcher

SHORTLIST = 300  # photos scored exactly by a model that compares photos anew with each text
SCORED = 32  # of them at once, so that their features fit into memory
Floats = NDArray[np.float32]
Part = tuple[str | Path | bytes | Floats, float]  # of a query, and its weight


@dataclass(frozen=True)
class Match:
    """A photo in the order of a search."""

    row: int  # of the library
    score: float
    uncertainty: float | None = None  # of a Gaussian


def find(library: Library, matcher: Matcher, query: list[Part], top: int, within: str = "") -> list[Match]:
    """The photos whose scores, summed over the parts of a query, are largest.

    Args: query: texts, and images, whose score is the cosine, or their vectors [D]; each with its weight; []: all
    scores are 0; within: part of the path that photos must have.
    Raises: ValueError for an empty text, and an image that cannot be used.
    """
    scores, words, weights = np.zeros(len(library), np.float32), list[str](), list[float]()
    for part, weight in query:
        if not isinstance(part, str):
            vec = part if isinstance(part, np.ndarray) else matcher.encode_image(part)["vec"].float().cpu().numpy()
            scores += library.features["vec"] @ (vec * weight)
            continue
        if not part.strip():
            raise ValueError("a part of the query is empty: expected words.")
        words.append(part)
        weights.append(weight)
    if not words:
        return _best(library, scores, top, within)
    model, texts, by = matcher.model, matcher.encode_text(words), np.array(weights, np.float32)
    quick = scores + library.features["vec"] @ (by @ texts["vec"].float().cpu().numpy())
    if "penalty" in library.features:
        assert model.head.uncertainty is not None
        with inference(model):
            of_texts = model.head.uncertainty.penalty(texts).float().cpu().numpy()
        quick -= library.features["penalty"] * by.sum() + of_texts @ by
    if library.features.keys() <= {"vec", *OF_GAUSSIANS}:
        return _best(library, quick, top, within)
    rows = np.sort([match.row for match in _best(library, quick, max(SHORTLIST, top), within)]).astype(np.int64)
    exact = np.full_like(scores, -np.inf)
    for some in chunks(len(rows), SCORED):
        with inference(model):
            of_part = model.score(moved(library.taken(rows[some]), model.device), texts).float().cpu().numpy()
        exact[rows[some]] = scores[rows[some]] + of_part @ by
    return _best(library, exact, top)


def listed(library: Library, found: list[Match]) -> list[dict[str, Any]]:
    """What a JSON says of photos that were found."""
    return [library.cells(match.row) | asdict(match) for match in found]


def best(scores: Floats, top: int) -> NDArray[np.int64]:
    """Places of the largest scores, without -inf and NaN; ties in their order, however many are wanted."""
    scores = np.where(np.isnan(scores), -np.inf, scores)
    top = min(top, len(scores))
    rows = np.flatnonzero(scores >= np.partition(scores, -top)[-top]) if top else np.zeros(0, np.int64)
    rows = rows[np.argsort(-scores[rows], kind="stable")][:top]
    return rows[scores[rows] > -np.inf]


def _best(library: Library, scores: Floats, top: int, within: str = "") -> list[Match]:
    """The best photos whose path has `within`."""
    if within:
        inside = [caseless(within) in caseless(path) for path in library.rows["path"].to_pylist()]
        scores[~np.array(inside, bool)] = -np.inf
    of = library.features.get("uncertainty")
    return [Match(int(n), float(scores[n]), None if of is None else float(of[n])) for n in best(scores, top)]


def shrunk(photo: Path, side: int) -> Pixels:
    """A photo [H, W, 3] with at most `side` pixels a side. Raises: ValueError for one that cannot be read."""
    try:
        return thumbnail(decode(read_whole(photo, "it", MAX_IMAGE), at_least=side), side)
    except (OSError, BadSample) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"the photo cannot be read ({reason}).") from None
