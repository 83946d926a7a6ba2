"""The best photos of a library for a text or an image.

All photos are scored exactly, straight from the memory map, where a score is a cosine minus uncertainties. A model that
compares a photo anew with each text (llip, flair, filip) scores a shortlist, the photos nearest by their vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
LONGEST_QUERY = 10_000  # characters
SCORED = 32  # of them at once, so that their features fit into memory
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
        raise ValueError(f"the query has {len(text):,} characters: expected words, at most {LONGEST_QUERY:,}.")
    model, texts = matcher.model, matcher.encode_text([text])
    scores = library.features["vec"] @ texts["vec"][0].float().cpu().numpy()
    if "penalty" in library.features:
        assert model.head.uncertainty is not None
        with inference(model):
            scores -= library.features["penalty"] + model.head.uncertainty.penalty(texts).float().cpu().numpy()
    if library.features.keys() <= {"vec", *OF_GAUSSIANS}:
        return _best(library, scores, top, within)
    rows = np.sort([match.row for match in _best(library, scores, max(SHORTLIST, top), within)]).astype(np.int64)
    exact = np.full_like(scores, -np.inf)
    for part in chunks(len(rows), SCORED):
        with inference(model):
            of_part = model.score(moved(library.taken(rows[part]), model.device), texts)[:, 0]
        exact[rows[part]] = of_part.float().cpu().numpy()
    return _best(library, exact, top)


def by_image(library: Library, vec: Floats, top: int, within: str = "") -> list[Match]:
    """The photos most like an image by the cosine of their vectors, [D]."""
    return _best(library, library.features["vec"] @ vec, top, within)


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
