"""Two-stage retrieval: a shortlist by "vec", then exact scores of the items on it.

For heads whose score is more expensive than a dot product: `kiloword eval retrieval MODEL --shortlist 50`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.metrics import Standing, check_scores, hit, standing
from kiloword.evaluation.retrieval.relevance import PANEL, Relevance, check_pairs, true_means
from kiloword.model.encoding import chunks, rows
from kiloword.model.pooling import at_least_float
from kiloword.terminal.progress import track
from kiloword.types import Features

PairScore = Callable[[Features, Features], Tensor]
"""n images and n texts, row by row: [n], higher = better match; a head's `score_pairs`."""

GATHERED = 1 << 26  # bytes of features copied at once to score pairs


def shortlisted(
    score: PairScore,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    shortlist: int,
    ks: Sequence[int] = (1, 5, 10),
    relevance: Relevance | Tensor | None = None,
) -> Iterator[tuple[str, float]]:
    """The metrics of `retrieval` if only the `shortlist` items nearest by "vec" are scored exactly.

    These items rank first, by their scores; the rest follows by "vec". With all items on the shortlist, the metrics are
    those of `retrieval`. Also yields the recall of the first stage:
    `image_retrieval_shortlist_recall@N`: share of texts whose image is among the N images nearest to them.
    `text_retrieval_shortlist_recall@N`: share of texts that are among the N texts nearest to their image.

    Args: images [I, ...]; texts [T, ...]; image_of_text [T] int64; relevance as a function of rows or [T, I] bool.
    """
    if shortlist < 1:
        raise ValueError(f"--shortlist is {shortlist}: expected at least 1.")
    check_pairs(images, texts, image_of_text)
    image = image_of_text.to(images["vec"].device)
    by_text = _Panels(lambda t, i: score(i, t), texts, images, shortlist)
    every_image = torch.arange(len(images["vec"]), device=image.device)
    listed = {
        "text_retrieval": _standing(
            _Panels(score, images, texts, shortlist), lambda r: image == every_image[r, None], image.device
        ),
        "image_retrieval": _standing(by_text, lambda c: image[c, None] == every_image, image.device),
    }
    for k in ks:
        for name, (where, _) in listed.items():
            yield f"{name}_recall@{k}", hit(where, k).mean().item()
    for name, (_, kept) in listed.items():
        yield f"{name}_shortlist_recall@{shortlist}", kept / len(image)
    if relevance is not None:
        yield from true_means(lambda c: by_text.scores(c)[0], len(images["vec"]), len(texts["vec"]), relevance, ks)


@dataclass(frozen=True)
class _Panels:
    """Scores of queries with C items, of which the n nearest by "vec" are scored exactly."""

    score: PairScore
    queries: Features
    items: Features
    n: int

    def scores(self, q: slice) -> tuple[Tensor, Tensor]:
        """Scores [q, C] of a block of queries with all items, and the shortlists [q, N]."""
        queries, items = rows(self.queries, q), self.items
        near = check_scores(at_least_float(queries["vec"]) @ at_least_float(items["vec"]).T)
        short = near.topk(min(self.n, len(items["vec"])), 1).indices
        exact = check_scores(_listed(self.score, queries, items, short))
        # cosines are at most 1, so that the rest is below all exact scores
        rest = near.to(exact.dtype) - 2 + exact.amin(1, keepdim=True)
        return rest.scatter(1, short, exact), short


def _listed(score: PairScore, queries: Features, items: Features, short: Tensor) -> Tensor:
    """Exact scores [q, N] of every query with the items on its shortlist [q, N]."""
    query = torch.arange(len(short), device=short.device).repeat_interleave(short.shape[1])
    return scores_of_pairs(score, queries, items, query, short.flatten()).view(short.shape)


def scores_of_pairs(score: PairScore, queries: Features, items: Features, query: Tensor, item: Tensor) -> Tensor:
    """Scores [P] of query[p] with item[p], indices [P] of rows of features; few features are gathered at a time."""
    row_bytes = sum(x[0].numel() * x.element_size() for x in (*queries.values(), *items.values()))
    parts = [
        score({k: v[query[p]] for k, v in queries.items()}, {k: v[item[p]] for k, v in items.items()})
        for p in chunks(len(item), max(1, GATHERED // row_bytes))
    ]
    return torch.cat(parts)


def _standing(panels: _Panels, positives: Callable[[slice], Tensor], device: torch.device) -> tuple[Standing, float]:
    """Standing of the best positive of every query, and the number of positives on the shortlists."""

    def judged(q: slice) -> tuple[list[Tensor], int]:
        panel, short = panels.scores(q)
        positive = positives(q)  # [q, C] bool
        return [x.cpu() for x in standing(panel, positive)], int(positive.gather(1, short).sum())

    queries = list(chunks(len(panels.queries["vec"]), max(1, PANEL // len(panels.items["vec"]))))
    parts, kept = zip(*track(in_turns(queries, judged), "ranks", "blocks of queries", len(queries)), strict=True)
    return Standing(*(torch.cat(values).to(device) for values in zip(*parts, strict=True))), sum(kept)
