"""The task `uncertainty`: what the variances of a model with Gaussians depend on, and whether they predict errors.

The uncertainty of an image or a text is the sum of the variances of its Gaussian (arXiv:2410.18857, section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiloword.config.settings import Nothing
from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import ANY, Query, follows
from kiloword.evaluation.features import Seen, captioned, tile
from kiloword.evaluation.hierarchy import TAIL, read
from kiloword.evaluation.metrics import calibration, defined, groups, hit, spearman
from kiloword.evaluation.retrieval import all_pairs
from kiloword.evaluation.task import Findings, Inputs
from kiloword.methods.prolip.gaussian import csd, inclusion, variance_sum
from kiloword.model.encoding import chunks, rows
from kiloword.randomness import generator
from kiloword.report import Block, Gallery, distributions
from kiloword.types import Features, Source

PART = 4096  # pairs compared at a time
QUANTILES = (5, 25, 50, 75, 95)  # percent
LENGTHS = (0, 6, 11, 16, 21, 31)  # first length in words of each bucket
MOST = 2000  # largest number of chains to test
SHOWN = 6  # pairs of each corner
SIDES = {"certain": -1, "uncertain": 1}

Chains = Sequence[tuple[int, list[str]]]
"""Images, each with texts about it from general to specific."""


def run(inputs: Inputs, options: Nothing) -> Findings:
    """Yield all metrics that the data allows.

    `image_uncertainty_*`, `text_uncertainty_*` (mean, std, q05 to q95; by words and by level, with Spearman's
    correlation), `text_above_image`, `image_in_text`, `text_in_image` (H > 0), then the metrics of `of_truth`,
    `inclusion_tests` and `calibration`: of "text", the image of a caption ranks first; "image", any caption does.
    Raises: ValueError for a model without Gaussians.
    """
    matcher, source = inputs.matcher, inputs.source
    if matcher.model.head.uncertainty is None:
        raise ValueError(
            "this model's features have no variance, so there is no uncertainty to evaluate: train one with "
            "`kiloword train prolip`, or any method with +gaussian."
        )
    data = captioned(inputs)
    captions, image = data.texts, torch.tensor(data.image_of_text)
    texts = matcher.encode_text(captions)
    sides = all_pairs(matcher.score, data.images, texts, image)
    for_images, for_texts = (side.standing() for side in sides)  # refuses infinite variances
    of_images, of_texts = (variance_sum(features).double().cpu() for features in (data.images, texts))
    h, distance = compared(rows(data.images, image), texts)
    yield from spread("image_uncertainty", of_images)
    yield from spread("text_uncertainty", of_texts)
    yield "text_above_image", float((of_texts > of_images[image]).double().mean())
    yield "image_in_text", float((h > 0).double().mean())
    yield "text_in_image", float((h < 0).double().mean())  # H(b in a) is -H(a in b), to the last bit
    places: dict[str, int] = {}
    first = [i for i, caption in enumerate(captions) if places.setdefault(caption, i) == i]
    unique, of_unique = list(places), of_texts[first]
    words = torch.tensor([len(caption.split()) for caption in unique])
    by_words = {name: of_unique[inside] for name, inside in buckets(words)}
    yield from defined("text_uncertainty_words_spearman", spearman(words, of_unique))
    yield from ((f"text_uncertainty_words_{name}", float(values.mean())) for name, values in by_words.items())

    queries = [parse(caption) for caption in unique] if hasattr(source, "relevance") else []
    levels = torch.tensor([] if None in queries else [level(query) for query in queries if query is not None])
    if queries:
        yield from of_truth(source, unique, data.rows, of_unique, levels)
    by_row = read(source)[0]
    chains = [(i, texts) for i, row in enumerate(data.rows) for texts in by_row.get(row, [])]
    if chains and len(set(levels.tolist())) < 2:  # captions of one level: texts of the chains
        leveled = list(dict.fromkeys((text, k) for _, texts in chains for k, text in enumerate(texts)))
        levels = torch.tensor([k for _, k in leveled])
        of_unique = variance_sum(matcher.encode_text([text for text, _ in leveled])).double().cpu()
    if len(levels):
        yield from defined("text_uncertainty_level_spearman", spearman(levels, of_unique))
        for k in sorted(set(levels.tolist())):
            yield f"text_uncertainty_level@{k}", float(of_unique[levels == k].mean())
    if chains:
        yield from inclusion_tests(inputs, chains)
    yield from calibration("calibration_text", of_texts, hit(for_texts, 1))
    yield from calibration("calibration_image", of_images, hit(for_images, 1))
    if inputs.page:  # figures 5 and 6
        yield distributions({"images": of_images, "texts": of_texts}, "sum of variances", TAIL)
        yield distributions({f"{name} words": values for name, values in by_words.items()}, "sum of variances", TAIL)
        yield from corners(source, data, of_images[image], of_texts, distance)


def compared(a: Features, b: Features) -> tuple[Tensor, Tensor]:
    """H(a in b), summed over dimensions with eps 0, and CSD, of n pairs: [n] double each, on the CPU."""
    found = []
    for part in chunks(len(a["vec"]), PART):
        x, y = rows(a, part), rows(b, part)
        found.append((inclusion(x, y).double().sum(-1), csd(x, y)))
    h, distance = (torch.cat(each).double().cpu() for each in zip(*found, strict=True))
    return h, distance


def spread(name: str, uncertainties: Tensor) -> Findings:
    """Mean, standard deviation (uncorrected) and quantiles of sums of variances [N]."""
    yield f"{name}_mean", float(uncertainties.mean())
    yield f"{name}_std", float(uncertainties.std(correction=0))
    for q, value in zip(QUANTILES, np.percentile(uncertainties.numpy(), QUANTILES).tolist(), strict=True):
        yield f"{name}_q{q:02d}", value


def buckets(words: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Non-empty buckets of lengths in words [N]: name ("6-10") and mask [N] bool."""
    for low, high in pairwise((*LENGTHS, 1 << 30)):
        inside = (words >= low) & (words < high)
        if bool(inside.any()):
            yield f"{low}+" if low == LENGTHS[-1] else f"{low}-{high - 1}", inside


def level(query: Query) -> int:
    """How specific a query is: 0, true of every scene; 1, one fact; 3, all six facts of each named object; else 2."""
    named_facts = sum(fact is not None for thing in query.things for fact in thing)
    facts = named_facts + (query.count is not None) + (query.background is not None) + (query.relation is not None)
    if facts <= 1 and len(query.things) < 2:
        return facts
    return 3 if query.things and named_facts == len(query.things) * len(ANY) else 2


def of_truth(source: Any, texts: Sequence[str], images: Sequence[int], of_texts: Tensor, levels: Tensor) -> Findings:
    """Spearman's correlation of uncertainty and the number of images that each of n captions is true of.

    `truth_spearman`: over the captions that are true of some image, `truth_captions` of them, including those true of
    all images; `truth_spearman_level@k`: over those of one level; `truth_unmatched`: captions that are true of none.
    """
    count = torch.as_tensor(source.relevance(texts, images)).sum(1)
    true = count > 0
    yield from defined("truth_spearman", spearman(of_texts[true], count[true]))
    for k in sorted(set(levels.tolist())):
        here = true & (levels == k)
        yield from defined(f"truth_spearman_level@{k}", spearman(of_texts[here], count[here]))
    yield "truth_captions", float(true.sum())
    yield "truth_unmatched", float((~true).sum())


def chain_pairs(chains: Chains) -> list[tuple[str, tuple[str, str], int]]:
    """Pairs of texts to compare: kind, one that may be specific and one that may be general, number of the chain.

    "chain_3_in_2", ...: adjacent levels, where they differ; "reverse": the same reversed; "unrelated": a text and one
    of the next more general level of another image's chain.
    """
    pairs = []
    for n, ((image, texts), (other, wrong)) in enumerate(zip(chains, [*chains[1:], *chains[:1]], strict=True)):
        for k in range(len(texts) - 1, 0, -1):
            if texts[k] != texts[k - 1]:
                pairs.append((f"chain_{k}_in_{k - 1}", (texts[k], texts[k - 1]), n))
                pairs.append(("reverse", (texts[k - 1], texts[k]), n))
            if image != other:
                pairs.append(("unrelated", (texts[k], wrong[k - 1]), n))
    return pairs


def inclusion_tests(inputs: Inputs, chains: Chains) -> Findings:
    """Accuracies, in [0, 1], of predicting that one text includes another if H > 0, of at most MOST chains, drawn.

    `inclusion_NAME`: of pairs as `chain_pairs` names them, `chain` of all adjacent levels; `inclusion_unrelated_true`:
    share of the unrelated that is true. With `_overlap`, the distance must also be below `inclusion_overlap`, as in
    `Matcher.includes`: chosen on every other chain, with accuracies of the rest. Of scenes the truth is known.
    """
    rng = generator("chains", len(chains))
    names, pairs, numbers = zip(*chain_pairs([chains[n] for n in rng.permutation(len(chains))[:MOST]]), strict=True)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    index, features = {text: i for i, text in enumerate(texts)}, inputs.matcher.encode_text(texts)
    h, distance = compared(*(rows(features, side) for side in torch.tensor([[index[a], index[b]] for a, b in pairs]).T))
    kinds = {name: torch.tensor([name == one for one in names]) for name in dict.fromkeys(names)}
    kinds["chain"] = torch.tensor([name.startswith("chain") for name in names])
    links = {pair for name, pair in zip(names, pairs, strict=True) if name.startswith("chain")}
    queries = {text: parse(text) for text in texts} if hasattr(inputs.source, "relevance") else {}

    def entails(specific: str, general: str) -> bool:
        a, b = queries.get(specific), queries.get(general)
        return specific == general or (specific, general) in links if a is None or b is None else follows(a, b)

    truth, held = torch.tensor([entails(*pair) for pair in pairs]), torch.tensor(numbers) % 2 == 0
    right = (h > 0) == truth
    for name, mask in kinds.items():
        yield f"inclusion_{name}", float(right[mask].double().mean())
    if "unrelated" in kinds:
        yield "inclusion_unrelated_true", float(truth[kinds["unrelated"]].double().mean())
        accepted = (h > 0) & held & ~kinds["reverse"]
        overlap = best_overlap(distance[accepted], truth[accepted])
        yield "inclusion_overlap", overlap
        right = ((h > 0) & (distance < overlap)) == truth
        for name, mask in kinds.items():
            if bool((mask & ~held).any()):
                yield f"inclusion_{name}_overlap", float(right[mask & ~held].double().mean())


def best_overlap(distance: Tensor, truth: Tensor) -> float:
    """The largest distance at which to accept pairs with H > 0, such that most answers are right; 4: any.

    4 is the distance of opposite unit means without variance. Args: of the pairs with H > 0, [n] each.
    """
    values, which, _ = groups(distance)
    gain = torch.zeros_like(values).index_add(0, which, 2 * truth.double() - 1)  # of accepting pairs at this distance
    best = int(torch.cat([gain.new_zeros(1), gain.cumsum(0)]).argmax())
    if best == len(values):
        return max(4.0, 2 * float(values[-1])) if len(values) else 4.0
    return float(values[best]) if best == 0 else float((values[best - 1] + values[best]) / 2)


def corners(source: Source, data: Seen, image: Tensor, text: Tensor, distance: Tensor) -> Iterator[Block]:
    """Pairs nearest to each corner of the ranks of both uncertainties, with their CSD (figures 4 and C.1)."""
    captions, owners = data.texts, data.image_of_text
    image_rank, text_rank = (values.argsort(stable=True).argsort() for values in (image, text))
    for (name, sign), (other, text_sign) in product(SIDES.items(), SIDES.items()):
        tiles = []
        for t in (sign * image_rank + text_sign * text_rank).argsort(descending=True, stable=True).tolist()[:SHOWN]:
            values = f"CSD {distance[t]:#.4g}, variances {image[t]:#.3g} and {text[t]:#.3g}"
            tiles.append(tile(source, data.rows[owners[t]], captions[t], values))
        yield Gallery(tiles, f"Image {name}, text {other}", 3)
