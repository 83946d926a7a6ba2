"""The task `retrieval`: images by texts and texts by images, with several captions per image."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import torch
from torch import Tensor

from kiloword.data.columns import load_json
from kiloword.data.query import read_options, split_query
from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.features import Seen, captioned
from kiloword.evaluation.metrics import Standing, average_precision, check_scores, hit, r_precision, recall_at, standing
from kiloword.evaluation.task import Findings, Inputs, Values
from kiloword.evaluation.tasks import RetrievalTaskOptions
from kiloword.model.encoding import chunks, rows
from kiloword.model.pooling import at_least_float
from kiloword.terminal.progress import track
from kiloword.types import Features

Score = Callable[[Features, Features], Tensor]
"""Images [i, ...] and texts [t, ...] -> [i, t], higher = better match: a head's `score`."""

Relevance = Callable[[slice], Any]
"""Rows of texts -> [t, I] bool, of torch or NumPy: the images that each text is true of."""

Judged = TypeVar("Judged")

CHUNK, PANEL = 1024, 1 << 22  # largest number of queries, and of their scores, that are ranked at once
GATHERED = 1 << 26  # bytes of features copied at once to score pairs


def run(inputs: Inputs, options: RetrievalTaskOptions) -> Findings:
    """Encode a source and yield its retrieval metrics; true relevance too where the source offers it."""
    from kiloword.api.features import check_room

    matcher, ks = inputs.matcher, options.ks
    data = captioned(inputs)
    truth = getattr(inputs.source, "relevance", None)
    captions, owners = data.texts, data.image_of_text
    relevance = None if truth is None else lambda c: truth(captions[c], data.rows)
    if not 1 <= options.folds <= len(data.keys) or (options.shortlist is not None and options.shortlist < 1):
        raise ValueError(f"--folds must be 1 to {len(data.keys)}, the number of images, and --shortlist at least 1.")
    check_room(matcher.encode_text(captions[:1]), len(captions), "texts", matcher.model.device)
    images, texts, image_of_text = data.images, matcher.encode_text(captions), torch.tensor(owners)
    score = partial(matcher.score, nearest=options.nearest)
    if options.shortlist is None:
        values = dict(retrieval(score, images, texts, image_of_text, ks, relevance))
    else:
        pairs = partial(matcher.score_pairs, nearest=options.nearest)
        values = dict(shortlisted(pairs, images, texts, image_of_text, options.shortlist, ks, relevance))
    yield from values.items()
    yield from mean_recalls(values, ks)
    if options.folds > 1:
        size = len(data.keys) // options.folds  # the remainder of the division is in no part
        parts = []
        for first in range(0, size * options.folds, size):
            which = torch.where((image_of_text >= first) & (image_of_text < first + size))[0]
            fold = rows(images, slice(first, first + size)), rows(texts, which), image_of_text[which] - first
            parts.append(dict(retrieval(score, *fold, ks)))
        yield from ((f"{name}_folds", sum(part[name] / options.folds for part in parts)) for name in parts[0])
    if options.extra_positives is not None:
        yield from extra_recalls(score, images, texts, read_positives(options.extra_positives, data), ks)


def retrieval(
    score: Score,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    relevance: Relevance | None = None,
) -> Values:
    """Recall@k of image and text retrieval, defined and named as in CLIP_benchmark; never holds a tensor [I, T].

    `image_retrieval_recall@k`: share of texts whose image is among the first k images.
    `text_retrieval_recall@k`: share of images with any of their captions among the first k texts; an image
    without captions is a miss. With relevance also the metrics of `true_relevance`. Ties get their expected value.

    Args: images [I, ...]; texts [T, ...]; image_of_text [T] int64, in [0, I).
    """
    yield from _recalls(*all_pairs(score, images, texts, image_of_text), ks, relevance)


def mean_recalls(values: Mapping[str, float], ks: Sequence[int]) -> Values:
    """Means of the recalls among the metrics of `retrieval`.

    `mean_recall@1`: of both directions (DataComp). `text_retrieval_mean_recall` and `image_retrieval_mean_recall`: over
    all k (mTR and mIR). `rsum`: the sum of all recalls, up to 6 for three k; papers give it in percent, up to 600.
    """
    sides = {side: [values[f"{side}_recall@{k}"] for k in ks] for side in ("text_retrieval", "image_retrieval")}
    if 1 in ks:
        yield "mean_recall@1", sum(recalls[ks.index(1)] for recalls in sides.values()) / 2
    yield from ((f"{side}_mean_recall", sum(recalls) / len(recalls)) for side, recalls in sides.items())
    yield "rsum", sum(map(sum, sides.values()))


class Side(NamedTuple):
    """Queries that rank items. `scores` and `positive` map rows of the queries to [q, items]."""

    scores: Callable[[slice], Tensor]
    positive: Callable[[slice], Tensor]
    queries: int
    items: int

    def judged(self, judge: Callable[[Tensor, Tensor], Judged]) -> Iterator[Judged]:
        """What `judge` makes of scores and positives, block by block of the queries; ranks share the blocks."""

        def of(q: slice) -> Judged:
            scores = self.scores(q)
            return judge(scores, self.positive(q).to(scores.device))

        parts = list(chunks(self.queries, max(1, min(CHUNK, PANEL // self.items))))
        yield from track(in_turns(parts, of), "ranks", "blocks of queries", len(parts))

    def standing(self) -> Standing:
        """The standing of the best positive of every query, on the CPU."""
        parts = self.judged(lambda *block: [values.cpu() for values in standing(*block)])
        return Standing(*map(torch.cat, zip(*parts, strict=True)))


def _sides(
    of_images: Callable[[slice], Tensor], of_texts: Callable[[slice], Tensor], image: Tensor, n: int
) -> tuple[Side, Side]:
    """Images that rank texts, and texts that rank images, with the annotated pairs as positives."""
    own, every, t = image.cpu(), torch.arange(n), len(image)
    return (
        Side(of_images, lambda r: own == every[r, None], n, t),
        Side(of_texts, lambda c: own[c, None] == every, t, n),
    )


def all_pairs(score: Score, images: Features, texts: Features, image_of_text: Tensor) -> tuple[Side, Side]:
    """Images that rank texts, and texts that rank images, by the scores of all pairs."""
    return _sides(
        lambda q: score(rows(images, q), texts),
        lambda q: score(images, rows(texts, q)).T,
        image_of_text,
        len(images["vec"]),
    )


def _recalls(of_images: Side, of_texts: Side, ks: Sequence[int], relevance: Relevance | None) -> Values:
    for_images, for_texts = of_images.standing(), of_texts.standing()
    for k in ks:
        yield f"text_retrieval_recall@{k}", hit(for_images, k).mean().item()
        yield f"image_retrieval_recall@{k}", hit(for_texts, k).mean().item()
    if relevance is not None:
        side = of_texts._replace(positive=lambda c: torch.as_tensor(relevance(c)))
        yield from true_relevance(side, ks)


def true_relevance(texts: Side, ks: Sequence[int]) -> Values:
    """Metrics of image retrieval with complete ground truth: every image that a text is true of is relevant.

    `image_retrieval_true_map` (average precision), `image_retrieval_true_r_precision` (hits among the first R over R,
    with R relevant images), `image_retrieval_true_recall@k` (any hit among the first k). Means over the texts that are
    true of some image; `image_retrieval_true_unmatched` is the number of others, if any.
    """
    count, values = _means(texts, ks, {"map": average_precision, "r_precision": r_precision})
    if not count:
        raise ValueError("no text is true of any image: there is nothing to retrieve")
    yield from ((f"image_retrieval_true_{name}", value) for name, value in values.items())
    if count < texts.queries:
        yield "image_retrieval_true_unmatched", texts.queries - count


FILES = ("image_to_caption", "caption_to_image")
Listed = dict[int, list[int]]
"""Query -> its positives, both by their places in the data."""


class Positives(NamedTuple):
    """Ground truth in both directions; queries that are not listed are not counted."""

    texts: Listed  # of images
    images: Listed  # of texts
    unmatched: int  # listed queries of which the data has nothing, or no positive


def truth(listed: Listed, items: int) -> Callable[[slice], Tensor]:
    """Rows of the listed queries -> [q, items] bool: which items are positives."""
    places = list(listed.values())
    return lambda q: torch.stack([torch.zeros(items).index_fill(0, torch.tensor(p), 1).bool() for p in places[q]])


def read_positives(src: str, data: Seen) -> Positives:
    """The positives of `..._image_to_caption.json` and `..._caption_to_image.json`; both are read where one is named.

    Captions are ids of COCO, whose texts come from its annotations: `FILE?captions=captions_val2014.json`.
    Raises: ValueError for files of another form, and when they have nothing to do with the data.
    """
    path, query = split_query(src)
    file = Path(path).expanduser()
    annotations = read_options(path, query, {"captions": (unquote, "COCO's annotations")})
    name = next((name for name in FILES if name in file.name), None)
    if name is None or "captions" not in annotations:
        raise ValueError(
            f"--extra-positives {src}: expected a json of ECCV Caption or CxC, named ..._image_to_caption.json or "
            "..._caption_to_image.json, with COCO's annotations: FILE?captions=captions_val2014.json."
        )
    images = {number: place for place, key in enumerate(data.keys) if (number := _number(key)) is not None}
    pairs = zip(data.image_of_text, data.texts, strict=True)
    places = {(_number(data.keys[i]), text): t for t, (i, text) in enumerate(pairs)}
    try:
        of_image, of_text = (load_json(file.with_name(file.name.replace(name, other))) for other in FILES)
        listed = load_json(Path(annotations["captions"]).expanduser())["annotations"]
        ids = {one["id"]: places.get((one["image_id"], str(one["caption"]).strip())) for one in listed}
        texts = {number: place for number, place in ids.items() if place is not None}
        of_images, of_texts = _placed(of_image, images, texts), _placed(of_text, texts, images)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"--extra-positives {src}: expected lists of ids, and COCO's annotations.") from error
    if not of_images or not of_texts:
        raise ValueError(f"--extra-positives {src}: it lists no image and caption of the data.")
    return Positives(of_images, of_texts, len(of_image) + len(of_text) - len(of_images) - len(of_texts))


def _placed(listed: Mapping[str, list[int]], queries: Mapping[Any, int], items: Mapping[Any, int]) -> Listed:
    """The positives of a file by places in the data."""
    numbered = ((queries.get(_number(name)), {items[i] for i in ids if i in items}) for name, ids in listed.items())
    return {place: sorted(found) for place, found in numbered if place is not None and found}


def _number(key: str) -> int | None:
    """COCO's id of an image, the digits at the end of its key: COCO_val2014_000000391895 -> 391895."""
    digits = re.search(r"([0-9]{1,18})(?:\.\w+)?$", key)
    return None if digits is None else int(digits[1])


def extra_recalls(score: Score, images: Features, texts: Features, positives: Positives, ks: Sequence[int]) -> Values:
    """ECCV Caption's metrics (arXiv:2204.03359) in both directions, as means over the listed queries.

    `..._extra_recall@k` (any hit among the first k), `..._extra_r_precision` (hits among the first R over R, with R
    positives) and `..._extra_map_at_r` (the precision at each hit among the first R, summed, over R); ties get their
    expected value. `extra_unmatched` is the number of listed queries that the data lacks, if any.
    """
    own, asked = (rows(x, torch.tensor(list(y))) for x, y in ((images, positives.texts), (texts, positives.images)))
    for name, listed, items, of in (
        ("text", positives.texts, len(texts["vec"]), lambda q: score(rows(own, q), texts)),
        ("image", positives.images, len(images["vec"]), lambda q: score(images, rows(asked, q)).T),
    ):
        side = Side(of, truth(listed, items), len(listed), items)
        map_at_r = partial(average_precision, at_r=True)
        values = _means(side, ks, {"r_precision": r_precision, "map_at_r": map_at_r})[1]
        yield from ((f"{name}_retrieval_extra_{metric}", value) for metric, value in values.items())
    if positives.unmatched:
        yield "extra_unmatched", float(positives.unmatched)


def _means(
    side: Side, ks: Sequence[int], metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]]
) -> tuple[float, dict[str, float]]:
    """The number of queries that have a positive, and the means of metrics, recall@k the last, over these."""
    metrics = {**metrics, **{f"recall@{k}": partial(recall_at, k=k) for k in ks}}

    def judge(scores: Tensor, positive: Tensor) -> list[float]:
        found = positive.any(1)
        scores, positive = scores[found], positive[found]
        return [float(found.sum()), *(metric(scores, positive).sum().item() for metric in metrics.values())]

    count, *totals = map(sum, zip(*side.judged(judge), strict=True))
    return count, {name: total / max(count, 1) for name, total in zip(metrics, totals, strict=True)}


def shortlisted(
    score: Score,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    shortlist: int,
    ks: Sequence[int] = (1, 5, 10),
    relevance: Relevance | None = None,
) -> Values:
    """The metrics of `retrieval` if only the `shortlist` items nearest by "vec" are scored, by a head's `score_pairs`;
    the rest follows them by "vec". Also the recall of the first stage, shares of texts:

    `image_retrieval_shortlist_recall@N`: whose image is among the N images nearest to them.
    `text_retrieval_shortlist_recall@N`: that are among the N texts nearest to their image.

    Args: images [I, ...]; texts [T, ...]; image_of_text [T] int64.
    """
    n = len(images["vec"])
    of_images = partial(_reranked, score, images, texts, shortlist)
    of_texts = partial(_reranked, lambda text, own: score(own, text), texts, images, shortlist)
    yield from _recalls(*_sides(of_images, of_texts, image_of_text, n), ks, relevance)

    def listed(scores: Tensor, positive: Tensor) -> int:
        return int(positive.gather(1, scores.topk(min(shortlist, scores.shape[1]), 1).indices).sum())

    sides = _sides(partial(_near, images, texts), partial(_near, texts, images), image_of_text, n)
    for name, side in zip(("text", "image"), sides, strict=True):
        yield f"{name}_retrieval_shortlist_recall@{shortlist}", sum(side.judged(listed)) / len(image_of_text)


def _near(queries: Features, items: Features, q: slice) -> Tensor:
    return check_scores(at_least_float(queries["vec"][q]) @ at_least_float(items["vec"]).T)


def _reranked(score: Score, queries: Features, items: Features, n: int, q: slice) -> Tensor:
    """Scores [q, C] of rows of the queries, exact for the n items nearest by "vec", which are above all others."""
    near = _near(queries, items, q)
    short = near.topk(min(n, near.shape[1]), 1).indices
    query = torch.arange(len(short), device=short.device).repeat_interleave(short.shape[1])
    exact = check_scores(scores_of_pairs(score, rows(queries, q), items, query, short.flatten()).view(short.shape))
    rest = near.to(exact.dtype) - 2 + exact.amin(1, keepdim=True)  # cosines are at most 1
    return rest.scatter(1, short, exact)


def scores_of_pairs(score: Score, queries: Features, items: Features, query: Tensor, item: Tensor) -> Tensor:
    """Scores [P] of query[p] with item[p], indices [P] of rows of features; few features are gathered at a time."""
    row_bytes = sum(x[0].numel() * x.element_size() for x in (*queries.values(), *items.values()))
    parts = chunks(len(item), max(1, GATHERED // row_bytes))
    return torch.cat([score(rows(queries, query[p]), rows(items, item[p])) for p in parts])
