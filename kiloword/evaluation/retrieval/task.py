"""Image and text retrieval with several captions per image: `kiloword eval retrieval MODEL`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kiloword.api.batches import check_room
from kiloword.distributed.sharing import gathered, own, sums
from kiloword.evaluation.features import CaptionedImages, captioned
from kiloword.evaluation.metrics import Standing, check_scores, hit, rounding
from kiloword.evaluation.retrieval import RetrievalTaskOptions
from kiloword.evaluation.retrieval.positives import Positives, extra_positives, read
from kiloword.evaluation.retrieval.relevance import Relevance, Score, check_pairs, true_relevance
from kiloword.evaluation.retrieval.shortlist import shortlisted
from kiloword.evaluation.task import Inputs, Values
from kiloword.model.encoding import chunks, rows
from kiloword.terminal.progress import track
from kiloword.types import Features


def retrieval(
    score: Score,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    relevance: Relevance | Tensor | None = None,
    chunk: int = 1024,
) -> Iterator[tuple[str, float]]:
    """Recall@k of image and text retrieval, defined and named as in CLIP_benchmark; never holds a tensor [I, T].

    `image_retrieval_recall@k`: share of texts whose image is among the first k images.
    `text_retrieval_recall@k`: share of images with any of their captions among the first k texts; an image
    without captions is a miss. With relevance also the metrics of `true_relevance`. Ties get their expected value.

    Args: images [I, ...]; texts [T, ...]; image_of_text [T] int64; relevance as a function of rows or [T, I] bool.
    """
    check_pairs(images, texts, image_of_text)
    for_images, for_texts = standings(score, images, texts, image_of_text, chunk)
    for k in ks:
        yield f"text_retrieval_recall@{k}", hit(for_images, k).mean().item()
        yield f"image_retrieval_recall@{k}", hit(for_texts, k).mean().item()
    if relevance is not None:
        yield from true_relevance(score, images, texts, relevance, ks, chunk)


def run(inputs: Inputs, options: RetrievalTaskOptions) -> Values:
    """Encode a source and yield its retrieval metrics; true relevance too where the source offers it."""
    matcher, source, ks = inputs.matcher, inputs.source, options.ks
    data = captioned(inputs)
    truth = getattr(source, "relevance", None)
    relevance = None if truth is None else lambda c: truth(data.captions[c], data.rows)
    extra = _extra(options, data)
    check_room(matcher.encode_text(data.captions[:1]), len(data.captions), "texts", matcher.model.device)
    texts = matcher.encode_text(data.captions)
    images, image_of_text = data.images, torch.tensor(data.image_of_text)
    score = partial(matcher.score, nearest=options.nearest)
    if options.shortlist is None:
        yield from _with_means(retrieval(score, images, texts, image_of_text, ks, relevance, options.chunk), ks)
        yield from _folds(score, images, texts, image_of_text, options)
        if extra is not None:
            yield from extra_positives(score, images, texts, extra, ks, options.chunk)
    else:
        pairs = partial(matcher.score_pairs, nearest=options.nearest)
        values = shortlisted(pairs, images, texts, image_of_text, options.shortlist, ks, relevance)
        yield from _with_means(values, ks)


def _with_means(values: Values, ks: Sequence[int]) -> Values:
    """The metrics, then their `mean_recalls`."""
    collected: dict[str, float] = {}
    for name, value in values:
        collected[name] = value
        yield name, value
    yield from mean_recalls(collected, ks)


def mean_recalls(values: Mapping[str, float], ks: Sequence[int]) -> Iterator[tuple[str, float]]:
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


def _extra(options: RetrievalTaskOptions, data: CaptionedImages) -> Positives | None:
    """The extra positives that the options name. Raises: ValueError for options that do not fit together."""
    if not 1 <= options.folds <= len(data.keys):
        raise ValueError(f"--folds is {options.folds}: expected 1 to {len(data.keys)}, the number of images.")
    if options.shortlist is not None and (options.extra_positives is not None or options.folds > 1):
        raise ValueError("--extra-positives and --folds rank by all scores: omit --shortlist.")
    return None if options.extra_positives is None else read(options.extra_positives, data)


def _folds(
    score: Score, images: Features, texts: Features, image_of_text: Tensor, options: RetrievalTaskOptions
) -> Iterator[tuple[str, float]]:
    """Means of recall@k over equal parts of the images, in order; the remainder of the division is in no part."""
    size = len(images["vec"]) // options.folds
    totals: dict[str, float] = {}
    for first in range(0, size * options.folds, size) if options.folds > 1 else ():
        which = ((image_of_text >= first) & (image_of_text < first + size)).nonzero()[:, 0].to(texts["vec"].device)
        part = {name: value[which] for name, value in texts.items()}
        own_images, of = rows(images, slice(first, first + size)), image_of_text[which.cpu()] - first
        for name, value in retrieval(score, own_images, part, of, options.ks, None, options.chunk):
            totals[name] = totals.get(name, 0.0) + value / options.folds
    yield from ((f"{name}_folds", value) for name, value in totals.items())


def standings(
    score: Score, images: Features, texts: Features, image_of_text: Tensor, chunk: int
) -> tuple[Standing, Standing]:
    """Standing of the best caption of every image [I] and of the image of every text [T], computed in blocks.

    Annotated pairs are scored first; all other scores are then compared with them. Ranks share the blocks.
    """
    device = images["vec"].device
    n, t = len(images["vec"]), len(texts["vec"])
    image = image_of_text.to(device)
    annotated = _own_scores(score, images, texts, image, chunk)  # [T]
    best = torch.full((n,), -torch.inf, dtype=annotated.dtype, device=device).scatter_reduce(
        0, image, annotated, "amax"
    )
    low_i, high_i = best - rounding(best), best + rounding(best)
    low_t, high_t = annotated - rounding(annotated), annotated + rounding(annotated)
    above_i, reach_i, above_t, reach_t = (torch.zeros(k, dtype=torch.int64, device=device) for k in (n, n, t, t))
    blocks = own(_blocks(n, t, chunk))
    for r, c in track(blocks, "ranks", "blocks of pairs", len(blocks)):
        block = _others(check_scores(score(rows(images, r), rows(texts, c))), image[c], r)
        above_i[r] += _count(block > high_i[r, None], 1)
        reach_i[r] += _count(block >= low_i[r, None], 1)
        above_t[c] += _count(block > high_t[c], 0)
        reach_t[c] += _count(block >= low_t[c], 0)
    # reach: above or tied, without annotated pairs
    above_i, reach_i, above_t, reach_t = sums(above_i, reach_i, above_t, reach_t)
    is_best = (annotated >= low_i[image]).long()
    positives, ones = torch.zeros_like(above_i).index_add_(0, image, is_best), torch.ones_like(above_t)
    return Standing(above_i, reach_i + positives - above_i, positives), Standing(above_t, reach_t + 1 - above_t, ones)


def _blocks(n: int, t: int, chunk: int) -> list[tuple[slice, slice]]:
    """Rows and columns of every block of n images and t texts."""
    return [(r, c) for r in chunks(n, chunk) for c in chunks(t, chunk)]


def _count(mask: Tensor, dim: int) -> Tensor:
    return mask.sum(dim, dtype=torch.int32)  # three times as fast as int64, and a block is smaller than 2^31


def _own_scores(score: Score, images: Features, texts: Features, image: Tensor, chunk: int) -> Tensor:
    """Score of every text with its image: [T]. Skips blocks without such a pair."""
    parts = []
    blocks = [(r, c) for r, c in _blocks(len(images["vec"]), len(image), chunk) if len(_pairs(image[c], r))]
    for r, c in own(blocks):
        at = _pairs(image[c], r)
        block = check_scores(score(rows(images, r), rows(texts, c)))
        parts.append(((at + c.start).cpu(), block[image[c][at] - r.start, at].cpu()))
    columns, values = zip(*(part for rank_parts in gathered(parts) for part in rank_parts), strict=True)
    joined = torch.cat(values)
    return torch.empty_like(joined).scatter(0, torch.cat(columns), joined).to(image.device)


def _others(block: Tensor, image: Tensor, r: slice) -> Tensor:
    """A block of scores [i, t] with annotated pairs set to NaN, which compares as neither above nor tied."""
    at = _pairs(image, r)
    if not len(at):
        return block
    others: Tensor = block.index_put((image[at] - r.start, at), block.new_tensor(torch.nan))
    return others


def _pairs(image: Tensor, r: slice) -> Tensor:
    """Columns of a block whose image is one of its rows."""
    return torch.where((image >= r.start) & (image < r.stop))[0]
