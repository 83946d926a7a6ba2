"""The task `retrieval`: images by texts and texts by images, with several captions per image."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import torch
from torch import Tensor

from kiloword.config.recipes import Nearest
from kiloword.data.columns import load_json
from kiloword.data.open import open_source
from kiloword.data.query import read_options, split_query
from kiloword.data.source import keys, names_of, texts_of
from kiloword.distributed.sharing import gathered, in_turns, own, sums
from kiloword.evaluation.features import CaptionedImages, captioned
from kiloword.evaluation.metrics import (
    Standing,
    average_precision,
    average_precision_at_r,
    check_scores,
    hit,
    precision_at,
    recall_at,
    rounding,
)
from kiloword.evaluation.task import Findings, Inputs, PythonOnly, Task, Values
from kiloword.model.encoding import chunks, rows
from kiloword.model.pooling import at_least_float
from kiloword.terminal.progress import track
from kiloword.types import Features

if TYPE_CHECKING:
    import numpy as np

Score = Callable[[Features, Features], Tensor]
"""Images [i, ...] and texts [t, ...] -> [i, t], higher = better match: a head's `score`."""

Panel = Callable[[slice], Tensor]
"""Scores [q, items] of rows of the queries."""

Relevance = Callable[[slice], "Tensor | np.ndarray"]
"""Rows of texts -> [t, I] bool: the images that each text is true of."""

PANEL = 1 << 22  # scores sorted at once
GATHERED = 1 << 26  # bytes of features copied at once to score pairs
FILES = ("image_to_caption", "caption_to_image")  # in the names of the two files of ECCV Caption


@dataclass(frozen=True, kw_only=True)
class RetrievalTaskOptions:
    """How pairs are ranked."""

    # in place of the model's score: cosine of the features (of a Gaussian: its mean), or csd, the closed-form sampled
    # distance of Gaussians. None: the model's score
    nearest: Nearest | None = None
    shortlist: int | None = None  # exact scores of the N nearest images or texts alone; prints the recall lost
    # more positives than the annotated pairs: ECCV Caption's or CxC's json of ids with COCO's annotations,
    # FILE?captions=captions_val2014.json, or a table of images and captions
    extra_positives: str | None = None
    folds: int = 1  # mean of recall@k over N equal parts of the images, in order; COCO 1K: 5 of the 5000
    ks: PythonOnly[tuple[int, ...]] = (1, 5, 10)  # of recall@k
    chunk: PythonOnly[int] = 1024  # rows and columns of scores held at a time


def run(inputs: Inputs, options: RetrievalTaskOptions) -> Findings:
    """Encode a source and yield its retrieval metrics; true relevance too where the source offers it."""
    from kiloword.api.batches import check_room

    matcher, source, ks = inputs.matcher, inputs.source, options.ks
    data = captioned(inputs)
    truth = getattr(source, "relevance", None)
    relevance = None if truth is None else lambda c: truth(data.captions[c], data.rows)
    if not 1 <= options.folds <= len(data.keys):
        raise ValueError(f"--folds is {options.folds}: expected 1 to {len(data.keys)}, the number of images.")
    if options.shortlist is not None and (options.extra_positives is not None or options.folds > 1):
        raise ValueError("--extra-positives and --folds rank by all scores: omit --shortlist.")
    extra = None if options.extra_positives is None else read_positives(options.extra_positives, data)
    check_room(matcher.encode_text(data.captions[:1]), len(data.captions), "texts", matcher.model.device)
    texts = matcher.encode_text(data.captions)
    images, image_of_text = data.images, torch.tensor(data.image_of_text)
    if options.shortlist is not None:
        pairs = partial(matcher.score_pairs, nearest=options.nearest)
        values = dict(shortlisted(pairs, images, texts, image_of_text, options.shortlist, ks, relevance))
    else:
        score = partial(matcher.score, nearest=options.nearest)
        values = dict(retrieval(score, images, texts, image_of_text, ks, relevance, options.chunk))
    yield from values.items()
    yield from mean_recalls(values, ks)
    if options.folds > 1:
        yield from _folds(score, images, texts, image_of_text, options)
    if extra is not None:
        yield from extra_positives(score, images, texts, extra, ks, options.chunk)


TASK = Task(
    name="retrieval",
    help="Rank images by text and texts by image: recall@k, and mean average precision where ground truth is known.",
    data="images with captions",
    options=RetrievalTaskOptions,
    run=run,
)


def retrieval(
    score: Score,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    relevance: Relevance | Tensor | None = None,
    chunk: int = 1024,
) -> Values:
    """Recall@k of image and text retrieval, defined and named as in CLIP_benchmark; never holds a tensor [I, T].

    `image_retrieval_recall@k`: share of texts whose image is among the first k images.
    `text_retrieval_recall@k`: share of images with any of their captions among the first k texts; an image
    without captions is a miss. With relevance also the metrics of `true_relevance`. Ties get their expected value.

    Args: images [I, ...]; texts [T, ...]; image_of_text [T] int64; relevance as a function of rows or [T, I] bool.
    """
    _check_pairs(images, texts, image_of_text)
    for_images, for_texts = standings(score, images, texts, image_of_text, chunk)
    for k in ks:
        yield f"text_retrieval_recall@{k}", hit(for_images, k).mean().item()
        yield f"image_retrieval_recall@{k}", hit(for_texts, k).mean().item()
    if relevance is not None:
        yield from true_relevance(score, images, texts, relevance, ks, chunk)


def _check_pairs(images: Features, texts: Features, image_of_text: Tensor) -> None:
    n, t = len(images["vec"]), len(texts["vec"])
    if not (n and t and image_of_text.shape == (t,) and 0 <= int(image_of_text.min()) <= int(image_of_text.max()) < n):
        raise ValueError(f"image_of_text must hold, for each of the {t} texts, the row of one of the {n} images.")


def mean_recalls(values: Mapping[str, float], ks: Sequence[int]) -> Values:
    """Means of the recalls among the metrics of `retrieval`.

    `mean_recall@1`: of both directions (DataComp). `text_retrieval_mean_recall` and `image_retrieval_mean_recall`: over
    all k (mTR and mIR). `rsum`: the sum of all recalls, up to 6 for three k; papers give it in percent, up to 600.
    """
    sides = {side: [values[f"{side}_recall@{k}"] for k in ks] for side in ("text_retrieval", "image_retrieval")}
    if 1 in ks:
        yield "mean_recall@1", sum(recalls[ks.index(1)] for recalls in sides.values()) / 2
    for side, recalls in sides.items():
        yield f"{side}_mean_recall", sum(recalls) / len(recalls)
    yield "rsum", sum(map(sum, sides.values()))


def _folds(
    score: Score, images: Features, texts: Features, image_of_text: Tensor, options: RetrievalTaskOptions
) -> Values:
    """Means of recall@k over equal parts of the images, in order; the remainder of the division is in no part."""
    size = len(images["vec"]) // options.folds
    totals: dict[str, float] = {}
    for first in range(0, size * options.folds, size):
        which = ((image_of_text >= first) & (image_of_text < first + size)).nonzero()[:, 0]
        part = _at(texts, which)
        own_images = rows(images, slice(first, first + size))
        for name, value in retrieval(
            score, own_images, part, image_of_text[which] - first, options.ks, None, options.chunk
        ):
            totals[name] = totals.get(name, 0.0) + value / options.folds
    yield from ((f"{name}_folds", value) for name, value in totals.items())


def _at(features: Features, which: Tensor) -> Features:
    return {name: value[which.to(value.device)] for name, value in features.items()}


def standings(
    score: Score, images: Features, texts: Features, image_of_text: Tensor, chunk: int
) -> tuple[Standing, Standing]:
    """Standing of the best caption of every image [I] and of the image of every text [T], computed in blocks.

    Annotated pairs are scored first; all other scores are then compared with them. Ranks share the blocks.
    """
    device = images["vec"].device
    n, t = len(images["vec"]), len(texts["vec"])
    image = image_of_text.to(device)
    every = [(r, c) for r in chunks(n, chunk) for c in chunks(t, chunk)]
    annotated = _annotated(score, images, texts, image, every)  # [T]
    best = annotated.new_full((n,), -torch.inf).scatter_reduce(0, image, annotated, "amax")
    low_i, high_i = best - rounding(best), best + rounding(best)
    low_t, high_t = annotated - rounding(annotated), annotated + rounding(annotated)
    above_i, reach_i, above_t, reach_t = (torch.zeros(k, dtype=torch.int64, device=device) for k in (n, n, t, t))
    blocks = own(every)
    for r, c in track(blocks, "ranks", "blocks of pairs", len(blocks)):
        block, at = check_scores(score(rows(images, r), rows(texts, c))), _pairs(image[c], r)
        if len(at):  # annotated pairs become NaN, which compares as neither above nor tied
            block = block.index_put((image[c][at] - r.start, at), block.new_tensor(torch.nan))
        count = partial(torch.sum, dtype=torch.int32)  # three times as fast as int64; a block is smaller than 2^31
        above_i[r] += count(block > high_i[r, None], 1)
        reach_i[r] += count(block >= low_i[r, None], 1)
        above_t[c] += count(block > high_t[c], 0)
        reach_t[c] += count(block >= low_t[c], 0)
    # reach: above or tied, without annotated pairs
    above_i, reach_i, above_t, reach_t = sums(above_i, reach_i, above_t, reach_t)
    is_best = (annotated >= low_i[image]).long()
    positives, ones = torch.zeros_like(above_i).index_add_(0, image, is_best), torch.ones_like(above_t)
    return Standing(above_i, reach_i + positives - above_i, positives), Standing(above_t, reach_t + 1 - above_t, ones)


def _annotated(
    score: Score, images: Features, texts: Features, image: Tensor, every: Sequence[tuple[slice, slice]]
) -> Tensor:
    """Score of every text with its image: [T]. Skips blocks without such a pair."""
    parts = []
    for r, c in own([(r, c) for r, c in every if len(_pairs(image[c], r))]):
        at = _pairs(image[c], r)
        block = check_scores(score(rows(images, r), rows(texts, c)))
        parts.append(((at + c.start).cpu(), block[image[c][at] - r.start, at].cpu()))
    columns, values = zip(*(part for rank_parts in gathered(parts) for part in rank_parts), strict=True)
    joined = torch.cat(values)
    return torch.empty_like(joined).scatter(0, torch.cat(columns), joined).to(image.device)


def _pairs(image: Tensor, r: slice) -> Tensor:
    """Columns of a block whose image is one of its rows."""
    return torch.where((image >= r.start) & (image < r.stop))[0]


def _panels(score: Score, images: Features, texts: Features, chunk: int, of_texts: bool) -> Panel:
    """Scores of images with all texts, or of texts with all images."""
    n, t = len(images["vec"]), len(texts["vec"])
    if of_texts:
        return lambda q: torch.cat([score(rows(images, r), rows(texts, q)) for r in chunks(n, chunk)]).T
    return lambda q: torch.cat([score(rows(images, q), rows(texts, c)) for c in chunks(t, chunk)], 1)


def _sums(
    panel: Panel,
    truth: Callable[[slice], Tensor],
    queries: int,
    items: int,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
) -> tuple[dict[str, float], int]:
    """Sums of metrics over the queries that have a positive, and their number; ranks share the queries.

    Args: truth: the positives of rows of the queries, [q, items] bool; metrics of scores and positives, [q] each.
    """

    def judged(q: slice) -> tuple[dict[str, float], int]:
        scores, positive = panel(q), truth(q)
        found = positive.any(1)
        scores, positive = scores[found.to(scores.device)], positive[found].to(scores.device)
        return {name: metric(scores, positive).sum().item() for name, metric in metrics.items()}, int(found.sum())

    parts = list(chunks(queries, max(1, PANEL // items)))
    totals, counts = zip(*track(in_turns(parts, judged), "ranks", "blocks of queries", len(parts)), strict=True)
    if not sum(counts):
        raise ValueError("no text is true of any image: there is nothing to retrieve")
    return {name: sum(part[name] for part in totals) for name in metrics}, sum(counts)


def _recalls(ks: Sequence[int]) -> dict[str, Any]:
    return {f"recall@{k}": partial(recall_at, k=k) for k in ks}


def _r_precision(scores: Tensor, positive: Tensor) -> Tensor:
    return precision_at(scores, positive, positive.sum(1))


def true_relevance(
    score: Score,
    images: Features,
    texts: Features,
    relevance: Relevance | Tensor,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = 1024,
) -> Values:
    """Metrics of image retrieval with complete ground truth: every image that a text is true of is relevant.

    `image_retrieval_true_map` (average precision), `image_retrieval_true_r_precision` (hits among the first R over R,
    with R relevant images), `image_retrieval_true_recall@k` (any hit among the first k). Means over the texts that are
    true of some image; `image_retrieval_true_unmatched` is the number of others, if any.
    """
    panel = _panels(score, images, texts, chunk, of_texts=True)
    yield from _true_means(panel, len(images["vec"]), len(texts["vec"]), relevance, ks)


def _true_means(panel: Panel, n: int, t: int, relevance: Relevance | Tensor, ks: Sequence[int]) -> Values:
    def truth(c: slice) -> Tensor:
        return torch.as_tensor(relevance[c] if isinstance(relevance, Tensor) else relevance(c))

    metrics = {"map": average_precision, "r_precision": _r_precision, **_recalls(ks)}
    totals, answerable = _sums(panel, truth, t, n, metrics)
    yield from ((f"image_retrieval_true_{name}", value / answerable) for name, value in totals.items())
    if answerable < t:
        yield "image_retrieval_true_unmatched", float(t - answerable)


def shortlisted(
    score: Score,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    shortlist: int,
    ks: Sequence[int] = (1, 5, 10),
    relevance: Relevance | Tensor | None = None,
) -> Values:
    """The metrics of `retrieval` if only the `shortlist` items nearest by "vec" are scored, by a head's `score_pairs`.

    These items rank first, by their scores; the rest follows by "vec". With all items on the shortlist, the metrics are
    those of `retrieval`. Also yields the recall of the first stage:
    `image_retrieval_shortlist_recall@N`: share of texts whose image is among the N images nearest to them.
    `text_retrieval_shortlist_recall@N`: share of texts that are among the N texts nearest to their image.

    Args: images [I, ...]; texts [T, ...]; image_of_text [T] int64; relevance as a function of rows or [T, I] bool.
    """
    if shortlist < 1:
        raise ValueError(f"--shortlist is {shortlist}: expected at least 1.")
    _check_pairs(images, texts, image_of_text)
    image = image_of_text.to(images["vec"].device)
    every_image = torch.arange(len(images["vec"]), device=image.device)
    of_images = partial(_reranked, score, images, texts, shortlist)
    of_texts = partial(_reranked, lambda t, i: score(i, t), texts, images, shortlist)

    def listed(scores: Tensor, positive: Tensor) -> Tensor:
        """Positives on the shortlist, whose items score highest."""
        return positive.gather(1, scores.topk(min(shortlist, scores.shape[1]), 1).indices).sum(1)

    n, t, metrics = len(every_image), len(image), {**_recalls(ks), "listed": listed}
    by_image, _ = _sums(of_images, lambda r: image == every_image[r, None], n, t, metrics)
    by_text, _ = _sums(of_texts, lambda c: image[c, None] == every_image, t, n, metrics)
    for k in ks:
        yield f"text_retrieval_recall@{k}", by_image[f"recall@{k}"] / n
        yield f"image_retrieval_recall@{k}", by_text[f"recall@{k}"] / t
    yield f"text_retrieval_shortlist_recall@{shortlist}", by_image["listed"] / t
    yield f"image_retrieval_shortlist_recall@{shortlist}", by_text["listed"] / t
    if relevance is not None:
        yield from _true_means(of_texts, n, t, relevance, ks)


def _reranked(score: Score, queries: Features, items: Features, n: int, q: slice) -> Tensor:
    """Scores [q, C] of rows of the queries, exact for the n items nearest by "vec", which are above all others."""
    queries = rows(queries, q)
    near = check_scores(at_least_float(queries["vec"]) @ at_least_float(items["vec"]).T)
    short = near.topk(min(n, len(items["vec"])), 1).indices
    query = torch.arange(len(short), device=short.device).repeat_interleave(short.shape[1])
    exact = check_scores(scores_of_pairs(score, queries, items, query, short.flatten()).view(short.shape))
    rest = near.to(exact.dtype) - 2 + exact.amin(1, keepdim=True)  # cosines are at most 1
    return rest.scatter(1, short, exact)


def scores_of_pairs(score: Score, queries: Features, items: Features, query: Tensor, item: Tensor) -> Tensor:
    """Scores [P] of query[p] with item[p], indices [P] of rows of features; few features are gathered at a time."""
    row_bytes = sum(x[0].numel() * x.element_size() for x in (*queries.values(), *items.values()))
    parts = chunks(len(item), max(1, GATHERED // row_bytes))
    return torch.cat([score(_at(queries, query[p]), _at(items, item[p])) for p in parts])


Listed = dict[int, list[int]]
"""The positives of every query: places of items by the place of the query."""


@dataclass(frozen=True)
class Positives:
    """Ground truth in both directions; queries that are not listed are not counted."""

    texts: Listed  # of images
    images: Listed  # of texts
    unmatched: int  # listed queries of which the data has nothing, or no positive


def extra_positives(
    score: Score, images: Features, texts: Features, positives: Positives, ks: Sequence[int], chunk: int = 1024
) -> Values:
    """ECCV Caption's metrics (arXiv:2204.03359) in both directions, as means over the listed queries.

    `..._extra_recall@k` (any hit among the first k), `..._extra_r_precision` (hits among the first R over R, with R
    positives) and `..._extra_map_at_r` (the precision at each hit among the first R, summed, over R); ties get their
    expected value. `extra_unmatched` is the number of listed queries that the data lacks, if any.
    """

    metrics = {**_recalls(ks), "r_precision": _r_precision, "map_at_r": average_precision_at_r}
    for name, listed, of_texts in (
        ("text_retrieval", positives.texts, False),
        ("image_retrieval", positives.images, True),
    ):
        asked, places = torch.tensor(list(listed)), list(listed.values())
        some_images, some_texts = (images, _at(texts, asked)) if of_texts else (_at(images, asked), texts)
        items = len((images if of_texts else texts)["vec"])

        def truth(q: slice, places: Sequence[list[int]] = places, items: int = items) -> Tensor:
            return torch.stack([torch.zeros(items).index_fill(0, torch.tensor(p), 1).bool() for p in places[q]])

        panel = _panels(score, some_images, some_texts, chunk, of_texts)
        totals, count = _sums(panel, truth, len(places), items, metrics)
        yield from ((f"{name}_extra_{metric}", value / count) for metric, value in totals.items())
    if positives.unmatched:
        yield "extra_unmatched", float(positives.unmatched)


def read_positives(src: str, data: CaptionedImages) -> Positives:
    """The positives that a file lists.

    ECCV Caption's and CxC's `..._image_to_caption.json` and `..._caption_to_image.json`, both read where one is named,
    list all positives of a query. Captions are ids of COCO, whose texts come from its annotations,
    `FILE?captions=captions_val2014.json`. Any other data set adds its pairs to the annotated ones.
    Raises: ValueError for files of another form, and when they have nothing to do with the data.
    """
    path, query = split_query(src)
    if path.lower().endswith(".json") and any(name in Path(path).name for name in FILES):
        chosen = read_options(path, query, {"captions": (unquote, "COCO's annotations")})
        positives = _of_coco(Path(path).expanduser(), chosen.get("captions"), data)
    else:
        positives = _of_pairs(src, data)
    if not positives.images or not positives.texts:
        raise ValueError(f"--extra-positives {src}: it lists no image and caption of the data.")
    return positives


def _of_pairs(src: str, data: CaptionedImages) -> Positives:
    """The annotated pairs, and those of a source whose image and caption are both in the data."""
    source = open_source(src)
    images, captions = dict[str, list[int]](), dict[str, list[int]]()
    for place, key in enumerate(data.keys):
        for name in names_of(key):
            images.setdefault(name, []).append(place)
    for place, text in enumerate(data.captions):
        captions.setdefault(text, []).append(place)
    pairs = set(enumerate(data.image_of_text))
    unmatched = 0
    for row, key_of_row in enumerate(keys(source)):
        places = next((images[name] for name in names_of(key_of_row or "") if name in images), [])
        found = [t for text in (texts_of(source, row) if places else []) for t in captions.get(text, [])]
        pairs |= {(t, i) for t in found for i in places}
        unmatched += not found
    of_images, of_texts = Listed(), Listed()
    for t, i in sorted(pairs) if len(pairs) > len(data.image_of_text) else ():
        of_images.setdefault(i, []).append(t)
        of_texts.setdefault(t, []).append(i)
    return Positives(of_images, of_texts, unmatched)


def _of_coco(path: Path, annotations: str | None, data: CaptionedImages) -> Positives:
    """Positives of json by ids of COCO's images and captions."""
    if annotations is None:
        raise ValueError(
            f"{path} names captions by COCO's ids: name the annotations that have them, such as "
            f"{path.name}?captions=captions_val2014.json."
        )
    name = next(name for name in FILES if name in path.name)
    image_file, text_file = (_lists(path.with_name(path.name.replace(name, other))) for other in FILES)
    images = {number: place for place, key in enumerate(data.keys) if (number := _number(key)) is not None}
    pairs = zip(data.image_of_text, data.captions, strict=True)
    places = {(_number(data.keys[i]), text): t for t, (i, text) in enumerate(pairs)}
    try:
        listed = load_json(Path(annotations).expanduser())["annotations"]
        ids = {one["id"]: places.get((one["image_id"], str(one["caption"]).strip())) for one in listed}
    except (KeyError, TypeError):
        raise ValueError(f"{annotations} has no list `annotations` of objects with id, image_id and caption.") from None
    texts = {number: place for number, place in ids.items() if place is not None}
    of_images, of_texts = _placed(image_file, images, texts), _placed(text_file, texts, images)
    return Positives(of_images, of_texts, len(image_file) + len(text_file) - len(of_images) - len(of_texts))


def _lists(path: Path) -> dict[str, list[int]]:
    listed = load_json(path)
    if not isinstance(listed, dict) or not all(isinstance(ids, list) for ids in listed.values()):
        raise ValueError(f"{path} is no object of lists of ids: expected a file of ECCV Caption.")
    return listed


def _placed(listed: Mapping[str, list[int]], queries: Mapping[Any, int], items: Mapping[Any, int]) -> Listed:
    """The positives of a file by places in the data."""
    numbered = ((queries.get(_number(name)), {items[i] for i in ids if i in items}) for name, ids in listed.items())
    return {place: sorted(found) for place, found in numbered if place is not None and found}


def _number(key: str) -> int | None:
    """COCO's id of an image, the digits at the end of its key: COCO_val2014_000000391895 -> 391895."""
    digits = re.search(r"([0-9]{1,18})(?:\.\w+)?$", key)
    return None if digits is None else int(digits[1])
