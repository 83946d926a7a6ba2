"""The best photos of a library for a text or an image.

Where a score is a cosine minus uncertainties, all photos are scored, block by block. A model that pools a photo anew
for each text (llip) scores a shortlist, the photos nearest by their vectors, and a library of codes scores the photos
nearest by their codes; `measure` says what that loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kiloword.apps.search.codes import first
from kiloword.apps.search.library import Library
from kiloword.apps.search.nearest import open_nearest
from kiloword.data.classes.names import IMAGENET, caseless, classnames
from kiloword.model.encoding import chunks, inference, join, moved
from kiloword.terminal.progress import track
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher

RESCORE = {"int8": 4, "binary": 16}  # photos that are scored by their vectors, for each one that is wanted
SHORTLIST = 300  # photos scored exactly by a model that pools for each text
QUERIES, PAIRS = 64, 1 << 20  # to measure recall: texts tried; photos scored for all of them, but for 4 texts at least
TOP = 10  # the best photos that a shortlist should have
LONGEST_QUERY = 10_000  # characters
GATHERED = 1 << 28  # bytes of features read at once to score photos


@dataclass(frozen=True)
class Match:
    """A photo in the order of a search."""

    row: int  # of the library
    score: float
    uncertainty: float | None = None  # of a Gaussian


def check_query(text: str) -> str:
    """The query without outer white space. Raises: ValueError for an empty or a huge one."""
    text = " ".join(text.split())
    if not text:
        raise ValueError("the query is empty: expected words that describe a photo.")
    if len(text) > LONGEST_QUERY:
        raise ValueError(
            f"the query has {len(text):,} characters: expected at most {LONGEST_QUERY:,}, such as a sentence."
        )
    return text


class Ranker:
    """Scores the photos of a library by a model, which must be the one that made it.

    Args: matcher: may keep fewer numbers of the embedding (`keep_prefix_`) than a library without codes has; rescore:
    with codes, how many photos are scored by their vectors for each one that is wanted; 0: none; None: RESCORE.
    Raises: ValueError where the library lacks what these need.
    """

    def __init__(self, library: Library, matcher: Matcher, rescore: int | None = None) -> None:
        self.library, self.matcher = library, matcher
        self.dim, self.rescore = matcher.model.config.head.dim, check_rescore(library, rescore)
        self.contextual = bool(library.file.shapes)
        self.nearest = open_nearest(library) if self.dim == library.file.dim else None

    def by_text(self, text: str, top: int, within: str = "") -> list[Match]:
        """The best photos for a text. Args: within: part of the path that photos must have."""
        features = moved(self.matcher.encode_text([check_query(text)]), "cpu")
        return self.hits(self._by_features(features, top, within))

    def by_image(self, vec: Tensor, top: int, within: str = "", but: int | None = None) -> list[Match]:
        """The photos most like an image by the cosine of their vectors, [D]. Args: but: a row to omit."""
        return self.hits(self._by_codes(vec, self._masked(self.near(vec), within, but), top))

    def hits(self, best: tuple[Tensor, Tensor]) -> list[Match]:
        """Scores and rows [k] as hits."""
        hits = []
        for score, row in zip(best[0].tolist(), best[1].tolist(), strict=True):
            part, inner = self.library.place(row)
            values = part.uncertain.get("uncertainty")
            hits.append(Match(row, score, None if values is None else float(values[inner])))
        return hits

    def near(self, vec: Tensor) -> Tensor:
        """Cosine of every photo with a vector [D], of a library of codes about that: [N]."""
        parts = self.library.parts
        whole = self.dim == self.library.file.dim
        blocks = [part.near(vec) if whole else first(part.vec, self.dim) @ vec for part in parts]
        return torch.cat(blocks) if blocks else torch.zeros(0)

    def _by_codes(self, vec: Tensor, near: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """The best photos by `near` [N]; `rescore` times as many are scored by their vectors first, if any."""
        if not self.rescore:
            return _best(near, top)
        rows = _best(near, self.rescore * top)[1].sort().values
        scores, order = _best(self.vectors(rows.tolist()) @ vec, top)
        return scores, rows[order]

    def vectors(self, rows: Sequence[int]) -> Tensor:
        """The vectors of photos: [len(rows), D] float32."""
        return self.library.features(rows)["vec"] if rows else torch.zeros(0, self.dim)

    def first_stage(self, features: Features) -> Tensor:
        """Scores of all photos for one text: [N]; exact, but of a model that pools for each text."""
        near, parts = self.near(features["vec"][0].float()), self.library.parts
        if not self.library.file.gaussian or not len(near):
            return near
        return near - torch.cat([part.uncertain["penalty"] for part in parts]) - self._penalty(features)

    def _penalty(self, features: Features) -> Tensor:
        """What the uncertainty of one text takes off its scores: [1]."""
        model = self.matcher.model
        assert model.head.uncertainty is not None
        with inference(model):
            return model.head.uncertainty.penalty(moved(features, model.device)).cpu()

    def exact(self, features: Features, rows: Sequence[int]) -> Tensor:
        """The model's scores of photos for one text: [len(rows)]."""
        model = self.matcher.model
        sizes = [4 * int(torch.Size(shape).numel()) for shape in self.library.file.shapes.values()]
        texts, scores = moved(features, model.device), []
        with inference(model):
            for part in chunks(len(rows), max(1, GATHERED // (sum(sizes) + 4 * self.library.file.dim))):
                photos = moved(self.library.features(rows[part]), model.device)
                scores.append(model.score(photos, texts)[:, 0].float().cpu())
        return torch.cat(scores) if scores else torch.zeros(0)

    def listed(self, features: Features, most: int) -> tuple[Tensor, Tensor]:
        """Scores, as of `first_stage`, and rows of the best photos that the approximate index lists: at most `most`."""
        assert self.nearest is not None, "this library has no approximate index"
        vec = features["vec"][0].float()
        rows = sorted(self.nearest.rows(vec))
        scores = self.vectors(rows) @ vec
        if self.library.file.gaussian:
            places = [self.library.place(row) for row in rows]
            penalties = torch.stack([part.uncertain["penalty"][inner] for part, inner in places])
            scores = scores - penalties - self._penalty(features)
        scores, order = _best(scores, most)
        return scores, torch.tensor(rows)[order]

    def _by_features(self, features: Features, top: int, within: str) -> tuple[Tensor, Tensor]:
        if self.nearest is not None and not within:
            near, rows = self.listed(features, max(SHORTLIST, top))
        else:
            scored = self._masked(self.first_stage(features), within)
            vec, most = features["vec"][0].float(), max(SHORTLIST, top) if self.contextual else top
            near, rows = self._by_codes(vec, scored, most)
        if self.contextual:
            rows = rows.sort().values
            near = self.exact(features, rows.tolist())
        scores, order = _best(near, top)
        return scores, rows[order]

    def _masked(self, near: Tensor, within: str, but: int | None = None) -> Tensor:
        """-inf for photos whose path has no `within`, and for the row `but`."""
        if not within and but is None:
            return near
        paths = (caseless(path) for part in self.library.parts for path in part.paths)
        out = torch.zeros(len(near), dtype=torch.bool)
        if within:
            out = torch.tensor([caseless(within) not in path for path in paths], dtype=torch.bool)
        if but is not None:
            out[but] = True
        return near.masked_fill(out, -torch.inf)


def _best(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The largest scores and their places, without -inf; ties in the library's order, however many are wanted."""
    values, places = scores.topk(min(top, len(scores)))
    if len(values):  # `topk` takes any of those that equal the last one
        above = places[values > values[-1]].sort().values
        ties = torch.from_numpy(np.flatnonzero(scores.numpy() == values[-1].numpy()))
        places = torch.cat([above, ties[: len(values) - len(above)]])
    values, order = scores[places].sort(descending=True, stable=True)
    kept = values > -torch.inf
    return values[kept], places[order[kept]]


def query_image(matcher: Matcher, image: bytes, name: str = "of the query") -> Tensor:
    """The vector [D] of an encoded image. Args: name: of the file. Raises: ValueError for bytes that are no image."""
    from kiloword.data.images.augmentation import EvalTransform
    from kiloword.types import BadSample

    config = matcher.model.config
    try:
        pixels = EvalTransform(config.image.size, config.preprocess.resize)(image)
    except BadSample as error:
        raise ValueError(f"the image {name} cannot be used: {error}.") from None
    features = join([matcher.encode_image(pixels[None])])
    return features["vec"][0].float().cpu()


def texts_for(ranker: Ranker, most: int) -> list[str]:
    """Captions of the library where it has enough, else names of ImageNet's classes; spread over all of them."""
    captions = [c.split(" / ")[0] for part in ranker.library.parts for c in part.captions if c]
    names = captions if len(captions) >= most else [f"a photo of a {name}." for name in classnames(IMAGENET)]
    return [names[n * len(names) // most] for n in range(most)]


def measure(ranker: Ranker) -> dict[str, float]:
    """Recall of the shortlist, by exact scores of all photos; {} where a search scores all photos exactly.

    "recall@10": mean over texts of the share of the 10 best photos that the shortlist has; "shortlist": its length;
    "queries": number of texts; "photos": those of the library.
    """
    n = len(ranker.library)
    shortlist = ranker.rescore * TOP if ranker.rescore and ranker.nearest is None else SHORTLIST
    if ranker.nearest is None and (not (ranker.contextual or ranker.rescore) or n <= shortlist):
        return {}
    queries = min(QUERIES, max(4, PAIRS // n))
    encoded = moved(ranker.matcher.encode_text(texts_for(ranker, queries)), "cpu")
    shares = []
    for q in track(range(queries), "recall of the shortlist", "texts", queries):
        text = {name: value[q : q + 1] for name, value in encoded.items()}
        near = ranker.first_stage(text)
        best = _best(_exact(ranker, text, near), TOP)[1]
        listed = _best(near, shortlist)[1] if ranker.nearest is None else ranker.listed(text, shortlist)[1]
        shares.append(torch.isin(best, listed).float().mean().item())
    return {"recall@10": sum(shares) / queries, "shortlist": shortlist, "queries": queries, "photos": n}


def _exact(ranker: Ranker, text: Features, near: Tensor) -> Tensor:
    """Exact scores of all photos for one text: [N]. Args: near: those of the first stage."""
    if ranker.contextual:
        return ranker.exact(text, range(len(ranker.library)))
    if ranker.library.file.codes == "float":
        return near
    return torch.cat([part.vec @ text["vec"][0].float() for part in ranker.library.parts])


def check_rescore(library: Library, rescore: int | None) -> int:
    """How many photos to score by their vectors for each one wanted. Raises: ValueError where there are no vectors."""
    file = library.file
    stored = file.codes != "float" and file.vectors != "none"
    if rescore is None:
        return RESCORE[file.codes] if stored else 0
    if rescore < 0:
        raise ValueError(f"--rescore is {rescore}: expected 0 or more.")
    if rescore and file.codes == "float":
        raise ValueError(f"--rescore is for libraries of codes, and {library.folder} compares vectors: omit it.")
    if rescore and not stored:
        raise ValueError(
            f"--rescore {rescore} needs the vectors, and {library.folder} stores codes alone (--vectors none): omit "
            "it, or index the photos in a new folder with --vectors fp16."
        )
    return rescore
