"""Data of the task `uncertainty`: images, captions and their levels, encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import ANY, Query
from kiloword.data.source import key_of, texts_of
from kiloword.data.tables import has_images
from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.features import seen
from kiloword.evaluation.hierarchy.chains import read
from kiloword.evaluation.task import Inputs
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.model.encoding import chunks, join
from kiloword.terminal.progress import track
from kiloword.types import BadSample, Features, Skipped, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher

PART = 4096  # texts encoded at a time
QUANTILES = (5, 25, 50, 75, 95)  # percent, of metrics and of boxes
LENGTHS = (0, 6, 11, 16, 21, 31)  # first length in words of each bucket

Chain = tuple[int, list[str]]
"""An image (index, not row) and texts about it from general to specific."""


@dataclass
class EncodedData:
    """I encoded images of a source and their T captions; or texts alone, with I 0."""

    source: Source
    rows: list[int]  # [I] of the source
    images: Features
    labels: Tensor  # [I] int64, -1: none
    captions: list[str]  # [T]
    image: Tensor  # [T] int64, index of each caption's image
    texts: Features | None  # None: there are no captions, or no images
    image_uncertainty: Tensor  # [I] sums of variances
    text_uncertainty: Tensor  # [T]


@dataclass
class Levelled:
    """N unique texts with their levels of generality, 0 the most general."""

    level: Tensor  # [N] int64
    uncertainty: Tensor  # [N] sums of variances
    captions: bool  # True: the unique captions of the data, in order; False: texts of chains


def gather(inputs: Inputs) -> EncodedData:
    """Encode a source in batches; images without captions are kept."""
    matcher, source = inputs.matcher, inputs.source
    if not has_images(source):
        return _texts_alone(inputs, source)
    rows: list[int] = []
    images: list[Features] = []
    labels: list[Tensor] = []
    captions: list[str] = []
    image: list[int] = []
    for part in seen(inputs):
        for i, image_captions in enumerate(part.captions, start=len(rows)):
            image += [i] * len(image_captions)
            captions += image_captions
        rows += part.rows
        images.append(part.images)
        several = part.labels.ndim == 2  # with several labels an image is neither right nor wrong
        labels.append(torch.full((len(part.rows),), -1) if several else part.labels)
    joined, texts = join(images), matcher.encode_text(captions) if captions else None
    return EncodedData(
        source=source,
        rows=rows,
        images=joined,
        labels=torch.cat(labels),
        captions=captions,
        image=torch.tensor(image, dtype=torch.int64),
        texts=texts,
        image_uncertainty=uncertainty(joined, source.name),
        text_uncertainty=torch.empty(0) if texts is None else uncertainty(texts, source.name),
    )


def _texts_alone(inputs: Inputs, source: Source) -> EncodedData:
    """Texts and their uncertainties; millions of texts take no memory for features."""
    captions: list[str] = []
    for row in range(len(source)):
        try:
            captions += texts_of(source, row)
        except BadSample as error:
            inputs.skipped.append(Skipped(row, key_of(source, row), str(error)))
    if not captions:
        raise ValueError(f"{source.name}: none of its {len(source)} rows has a text.")
    parts = list(chunks(len(captions), PART))
    encoded = in_turns(parts, lambda part: uncertainty(inputs.matcher.encode_text(captions[part]), source.name))
    sums = track(encoded, "encodes", f"blocks of {PART} texts", len(parts))
    none, no_images = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    return EncodedData(source, [], {}, none, captions, none, None, no_images, torch.cat(list(sums)))


def selected(features: Features, which: Tensor) -> Features:
    """Rows of features at indices [n]."""
    return {name: value[which.to(value.device)] for name, value in features.items()}


def uncertainty(features: Features, name: str) -> Tensor:
    """Sums of variances, [N] double; ValueError when one is not finite."""
    sums = variance_sum(features).double().cpu()
    if not bool(sums.isfinite().all()):
        raise ValueError(f"{name}: variances are not finite: the weights hold NaN, or log variances overflow")
    return sums


def different(items: Sequence[object]) -> list[int]:
    """Index of the first occurrence of each unique item, ascending."""
    first: dict[object, int] = {}
    return [i for i, item in enumerate(items) if first.setdefault(item, i) == i]


def buckets(words: Tensor) -> list[tuple[str, Tensor]]:
    """Non-empty buckets of lengths in words [N]: name ("6-10") and mask [N] bool."""
    masks = {f"{low}-{high - 1}": (words >= low) & (words < high) for low, high in pairwise(LENGTHS)}
    masks[f"{LENGTHS[-1]}+"] = words >= LENGTHS[-1]
    return [(name, inside) for name, inside in masks.items() if bool(inside.any())]


def caption_levels(source: Source, captions: Sequence[str]) -> list[int] | None:
    """Levels of captions of scenes, if the source has ground truth; else None."""
    if not captions or not hasattr(source, "relevance"):
        return None
    queries = [parse(caption) for caption in captions]
    return None if None in queries else [level(query) for query in queries if query is not None]


def level(query: Query) -> int:
    """How specific a query is.

    0: true of every scene; 1: one fact; 3: all six facts of every object it names; 2: otherwise.
    """
    named_facts = sum(fact is not None for thing in query.things for fact in thing)
    facts = named_facts + (query.count is not None) + (query.background is not None) + (query.relation is not None)
    if facts == 0 and len(query.things) < 2:
        return 0
    if facts <= 1 and len(query.things) < 2:
        return 1
    return 3 if query.things and named_facts == len(query.things) * len(ANY) else 2


def chains(data: EncodedData) -> list[Chain]:
    """Chains of every encoded image, all of one length, from the source or from its json (HierarCaps)."""
    by_row = read(data.source).chains
    return [(i, texts) for i, row in enumerate(data.rows) for texts in by_row.get(row, [])]


def levelled(matcher: Matcher, data: EncodedData, text_chains: Sequence[Chain]) -> Levelled | None:
    """Captions of scenes if they have several levels, else texts of chains; None without levels."""
    levels = caption_levels(data.source, data.captions)
    if levels is not None and (len(set(levels)) > 1 or not text_chains):
        first = different(data.captions)
        return Levelled(torch.tensor(levels)[first], data.text_uncertainty[first], captions=True)
    standing = [(text, k) for _, texts in text_chains for k, text in enumerate(texts)]
    if not standing:
        return None
    texts, level = zip(*(standing[i] for i in different(standing)), strict=True)
    return Levelled(torch.tensor(level), uncertainty(matcher.encode_text(texts), data.source.name), captions=False)
