"""The task `uncertainty`: what the variances of a model with Gaussians depend on, and whether they predict errors.

The uncertainty of an image or a text is the sum of the variances of its Gaussian (arXiv:2410.18857, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import ANY, Query, follows
from kiloword.data.source import key_of, texts_of
from kiloword.data.tables import has_images
from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.calibration import Bins, binned, calibration, defined, groups, intervals, spearman
from kiloword.evaluation.classes import classes_of
from kiloword.evaluation.features import seen, tile
from kiloword.evaluation.hierarchy import TAIL, boxes, read
from kiloword.evaluation.metrics import hit, standing
from kiloword.evaluation.retrieval import PANEL, standings
from kiloword.evaluation.task import ClassNames, Findings, Inputs, Prompts, PythonOnly, Task
from kiloword.evaluation.zeroshot import classifier, templates_of
from kiloword.methods.prolip.gaussian import csd, inclusion, variance_sum
from kiloword.model.encoding import chunks, join, rows
from kiloword.randomness import key
from kiloword.report import Beside, Block, Gallery, Plot, Table, Text, distributions
from kiloword.terminal.progress import track
from kiloword.types import BadSample, Features, Skipped, Source

PART = 4096  # texts encoded, or pairs compared, at a time
QUANTILES = (5, 25, 50, 75, 95)  # percent
LENGTHS = (0, 6, 11, 16, 21, 31)  # first length in words of each bucket
MOST = 2000  # largest number of chains to test
SHOWN = 12  # most and least certain images, and texts
CORNERS = {"certain": -1, "uncertain": 1}
NONE = torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class UncertaintyTaskOptions:
    """Classes of the zero-shot calibration, and the size of blocks."""

    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    # prompts with {c} or {} for the class name: a file, a data set, or one template. None: as in zeroshot
    templates: Prompts | None = None
    chunk: PythonOnly[int] = 1024  # rows and columns of scores held at a time


def run(inputs: Inputs, options: UncertaintyTaskOptions) -> Findings:
    """Encode a source and yield all metrics that its data allows; without captions, those of images and classes.

    `image_uncertainty_*`, `text_uncertainty_*` (mean, std, q05 to q95; by words, `_words_A-B` and `_words_spearman`; by
    level, `_level@k` and `_level_spearman`: negative if general texts are uncertain), `text_above_image`,
    `image_in_text`, `text_in_image` (H > 0), then the metrics of `of_truth`, `inclusion_tests` and `calibration`: of
    "text", the image of a caption ranks first; "image", any caption of an image does; "zeroshot", its class does.
    Raises: ValueError for a model without Gaussians.
    """
    matcher, source = inputs.matcher, inputs.source
    if matcher.model.head.uncertainty is None:
        raise ValueError(
            "this model's features have no variance, so there is no uncertainty to evaluate: train one with "
            "`kiloword train prolip`, or any method with --uncertainty gaussian."
        )
    data = encode(inputs) if has_images(source) else encode_texts_alone(inputs)
    first = different(data.captions)
    words, of_texts = torch.tensor([len(data.captions[i].split()) for i in first]), data.of_texts[first]
    h = distance = NONE
    if data.rows:
        yield from spread("image_uncertainty", data.of_images)
    if data.captions:
        yield from spread("text_uncertainty", data.of_texts)
    if data.texts is not None:
        yield "text_above_image", float((data.of_texts > data.of_images[data.image]).double().mean())
        h, distance = compared(data.images, data.texts, data.image, torch.arange(len(data.image)))
        yield "image_in_text", float((h > 0).double().mean())
        yield "text_in_image", float((h < 0).double().mean())  # H(b in a) is -H(a in b), to the last bit
    if data.captions:
        yield from defined("text_uncertainty_words_spearman", spearman(words, of_texts))
        yield from ((f"text_uncertainty_words_{name}", float(of_texts[w].mean())) for name, w in buckets(words))
    scenes = [] if not hasattr(source, "relevance") else [parse(data.captions[i]) for i in first]
    levels = None if None in scenes or not scenes else torch.tensor([level(q) for q in scenes if q is not None])
    if scenes:
        yield from of_truth(data, first, levels)
    by_row = read(source)[0] if data.rows else {}
    chains = [(i, texts) for i, row in enumerate(data.rows) for texts in by_row.get(row, [])]
    of_levels = of_texts
    if levels is None or (len(set(levels.tolist())) == 1 and chains):  # captions of one level: texts of the chains
        standing = list(dict.fromkeys((text, k) for _, texts in chains for k, text in enumerate(texts)))
        levels = torch.tensor([k for _, k in standing])
        of_levels = uncertainty(matcher.encode_text([t for t, _ in standing]), source) if standing else NONE
    by_level = {k: of_levels[levels == k] for k in sorted(set(levels.tolist()))}
    yield from defined("text_uncertainty_level_spearman", spearman(levels, of_levels))
    yield from ((f"text_uncertainty_level@{k}", float(values.mean())) for k, values in by_level.items())
    if chains:
        yield from inclusion_tests(inputs, chains)
    bins = {}
    for name, uncertainties, right in _judged(inputs, data, options):
        bins[name] = binned(uncertainties, right)
        yield from calibration(f"calibration_{name}", bins[name])
    if inputs.page:
        by_words = {name: of_texts[inside] for name, inside in buckets(words)}
        sides = {"images": data.of_images, "texts": data.of_texts}
        yield distributions({name: values for name, values in sides.items() if len(values)}, "sum of variances", TAIL)
        if by_words:
            yield boxes(by_words, "words of the text")
        if by_level:
            yield boxes({str(k): values for k, values in by_level.items()}, "level of the text, 0: most general")
        if len(h):
            yield distributions({"pairs": h}, "H(image in its caption)", TAIL)
        yield from (_calibrated(name, one) for name, one in bins.items())
        yield from _extremes(data, first)
        if len(distance):
            yield from _corners(data, distance)


@dataclass
class EncodedData:
    """I encoded images of a source and their T captions; or texts alone, with I 0."""

    source: Source
    captions: list[str]  # [T]
    of_texts: Tensor  # [T] sums of variances
    rows: Sequence[int] = ()  # [I] of the source
    images: Features | None = None
    of_images: Tensor = NONE  # [I] sums of variances
    labels: Tensor = NONE  # [I] int64, -1: none
    image: Tensor = NONE  # [T] int64, index of each caption's image
    texts: Features | None = None  # None: there are no captions, or no images


def encode(inputs: Inputs) -> EncodedData:
    """Encode a source in batches; images without captions are kept."""
    source, parts = inputs.source, list(seen(inputs))
    by_image = [captions for part in parts for captions in part.captions]
    captions = [caption for of_image in by_image for caption in of_image]
    images = join([part.images for part in parts])
    texts = inputs.matcher.encode_text(captions) if captions else None
    several = [part.labels.ndim == 2 for part in parts]  # with several labels an image is neither right nor wrong
    labels = [torch.full((len(p.rows),), -1) if many else p.labels for p, many in zip(parts, several, strict=True)]
    return EncodedData(
        source=source,
        captions=captions,
        of_texts=NONE if texts is None else uncertainty(texts, source),
        rows=[row for part in parts for row in part.rows],
        images=images,
        of_images=uncertainty(images, source),
        labels=torch.cat(labels),
        image=torch.tensor([i for i, of_image in enumerate(by_image) for _ in of_image], dtype=torch.int64),
        texts=texts,
    )


def encode_texts_alone(inputs: Inputs) -> EncodedData:
    """Texts and their uncertainties; millions of texts take no memory for features."""
    source, captions = inputs.source, list[str]()
    for row in range(len(source)):
        try:
            captions += texts_of(source, row)
        except BadSample as error:
            inputs.skipped.append(Skipped(row, key_of(source, row), str(error)))
    if not captions:
        raise ValueError(f"{source.name}: none of its {len(source)} rows has a text.")
    parts = list(chunks(len(captions), PART))
    sums = in_turns(parts, lambda part: uncertainty(inputs.matcher.encode_text(captions[part]), source))
    return EncodedData(source, captions, torch.cat(list(track(sums, "encodes", f"blocks of {PART} texts", len(parts)))))


def uncertainty(features: Features, source: Source) -> Tensor:
    """Sums of variances, [N] double, on the CPU. Raises: ValueError where one is not finite."""
    sums = variance_sum(features).double().cpu()
    if not bool(sums.isfinite().all()):
        raise ValueError(f"{source.name}: variances are not finite: the weights hold NaN, or log variances overflow.")
    return sums


def compared(a: Features | None, b: Features, of: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """H(a in b), summed over dimensions with eps 0, and CSD, of rows `of` [n] of a and `within` [n] of b: [n]."""
    assert a is not None
    h, distance = [], []
    for part in chunks(len(of), PART):
        x, y = rows(a, of[part]), rows(b, within[part])
        h.append(inclusion(x, y).double().sum(-1).cpu())
        distance.append(csd(x, y).double().cpu())
    return torch.cat(h), torch.cat(distance)


def different(items: Sequence[object]) -> list[int]:
    """Index of the first occurrence of each unique item, ascending."""
    first: dict[object, int] = {}
    return [i for i, item in enumerate(items) if first.setdefault(item, i) == i]


def spread(name: str, uncertainties: Tensor) -> Findings:
    """Mean, standard deviation (uncorrected) and quantiles of sums of variances [N]."""
    yield f"{name}_mean", float(uncertainties.mean())
    yield f"{name}_std", float(uncertainties.std(correction=0))
    for q, value in zip(QUANTILES, np.percentile(uncertainties.numpy(), QUANTILES).tolist(), strict=True):
        yield f"{name}_q{q:02d}", value


def buckets(words: Tensor) -> list[tuple[str, Tensor]]:
    """Non-empty buckets of lengths in words [N]: name ("6-10") and mask [N] bool."""
    masks = {f"{low}-{high - 1}": (words >= low) & (words < high) for low, high in pairwise(LENGTHS)}
    masks[f"{LENGTHS[-1]}+"] = words >= LENGTHS[-1]
    return [(name, inside) for name, inside in masks.items() if bool(inside.any())]


def level(query: Query) -> int:
    """How specific a query is: 0, true of every scene; 1, one fact; 3, all six facts of each named object; else 2."""
    named_facts = sum(fact is not None for thing in query.things for fact in thing)
    facts = named_facts + (query.count is not None) + (query.background is not None) + (query.relation is not None)
    if facts <= 1 and len(query.things) < 2:
        return facts
    return 3 if query.things and named_facts == len(query.things) * len(ANY) else 2


def of_truth(data: EncodedData, which: Sequence[int], levels: Tensor | None) -> Findings:
    """Spearman's correlation of uncertainty and the number of images that each of n captions `which` is true of.

    `truth_spearman`: over the captions that are true of some image, `truth_captions` of them, including those true of
    all images; `truth_spearman_level@k`: over those of one level; `truth_unmatched`: captions that are true of none.
    """
    truth = data.source.relevance  # type: ignore[attr-defined]
    texts, parts = [data.captions[i] for i in which], list(chunks(len(which), max(1, PANEL // len(data.rows))))
    counts = in_turns(parts, lambda part: torch.as_tensor(truth(texts[part], data.rows)).sum(1))
    count, uncertainties = torch.cat(list(counts)), data.of_texts[list(which)]
    true = count > 0
    yield from defined("truth_spearman", spearman(uncertainties[true], count[true]))
    for k in [] if levels is None else sorted(set(levels.tolist())):
        here = true & (levels == k)
        yield from defined(f"truth_spearman_level@{k}", spearman(uncertainties[here], count[here]))
    yield "truth_captions", float(true.sum())
    yield "truth_unmatched", float((~true).sum())


@dataclass
class InclusionAnswers:
    """Inclusion by a model of n pairs, and the ground truth. All [n]."""

    h: Tensor  # double, H(first in second)
    distance: Tensor  # double, CSD
    truth: Tensor  # bool
    held: Tensor  # bool, pairs of the chains used to choose the overlap

    def right(self, overlap: float = math.inf) -> Tensor:
        """Where `Matcher.includes` gives the truth."""
        return ((self.h > 0) & (self.distance < overlap)) == self.truth


Chain = tuple[int, list[str]]
"""An image, and texts about it from general to specific."""

Pairs = Mapping[str, list[tuple[str, str, int]]]
"""By kind: a specific text, a general one, and the number of their chain."""


def chain_pairs(chains: Sequence[Chain]) -> Pairs:
    """Pairs of texts to compare; equal texts of a chain make no pair.

    "chain_3_in_2", ...: adjacent levels; "chain": all of these; "reverse": the same reversed; "unrelated": a text and
    one of the next more general level of another image's chain.
    """
    pairs: dict[str, list[tuple[str, str, int]]] = {}
    unrelated = []
    for n, ((image, texts), (other, wrong)) in enumerate(zip(chains, [*chains[1:], *chains[:1]], strict=True)):
        for k in range(len(texts) - 1, 0, -1):
            if texts[k] != texts[k - 1]:
                pairs.setdefault(f"chain_{k}_in_{k - 1}", []).append((texts[k], texts[k - 1], n))
            if image != other:
                unrelated.append((texts[k], wrong[k - 1], n))
    every = [pair for linked in pairs.values() for pair in linked]
    return pairs | {"chain": every, "reverse": [(b, a, n) for a, b, n in every], "unrelated": unrelated}


def answered(inputs: Inputs, chains: Sequence[Chain], pairs: Pairs) -> dict[str, InclusionAnswers]:
    """The model's answers for every non-empty list of pairs. The truth is that of scenes, else of the chains."""
    texts = list(dict.fromkeys(text for _, texts in chains for text in texts))
    index, features = {text: i for i, text in enumerate(texts)}, inputs.matcher.encode_text(texts)
    queries = {text: parse(text) for text in texts} if hasattr(inputs.source, "relevance") else {}
    links = {(a, b) for a, b, _ in pairs["chain"]}

    def truth(a: str, b: str) -> bool:
        specific, general = queries.get(a), queries.get(b)
        return a == b or (a, b) in links if specific is None or general is None else follows(specific, general)

    answers = {}
    for name, linked in pairs.items():
        if linked:
            a, b = (torch.tensor([index[text] for text in side]) for side in list(zip(*linked, strict=True))[:2])
            true, held = [truth(a, b) for a, b, _ in linked], [n % 2 == 0 for *_, n in linked]
            answers[name] = InclusionAnswers(
                *compared(features, features, a, b), torch.tensor(true), torch.tensor(held)
            )
    return answers


def inclusion_tests(inputs: Inputs, chains: Sequence[Chain]) -> Findings:
    """Accuracies, in [0, 1], of predicting that one text includes another if H > 0, of at most MOST chains, drawn.

    `inclusion_NAME`: of pairs as `chain_pairs` names them; a share `inclusion_unrelated_true` of the unrelated is true.
    The sign of H mostly depends on which is wider, so that unrelated pairs pass too. For names with `_overlap`, the
    distance must also be below `inclusion_overlap`, as in `Matcher.includes`: it is chosen on every other chain, and
    the accuracies are those of the rest.
    """
    rng = np.random.Generator(np.random.Philox(key("chains", len(chains))))
    chains = [chains[n] for n in rng.permutation(len(chains))[:MOST].tolist()]
    answers = answered(inputs, chains, chain_pairs(chains))
    for name, answer in answers.items():
        yield f"inclusion_{name}", float(answer.right().double().mean())
    if "unrelated" in answers:
        yield "inclusion_unrelated_true", float(answers["unrelated"].truth.double().mean())
        overlap = best_overlap([answers[name] for name in ("chain", "unrelated") if name in answers])
        yield "inclusion_overlap", overlap
        for name, answer in answers.items():
            if not bool(answer.held.all()):
                yield f"inclusion_{name}_overlap", float(answer.right(overlap)[~answer.held].double().mean())
    if inputs.page:
        drawn = [name for name in answers if name.startswith("chain_")][:5]
        yield distributions(
            {name: answers[name].h for name in (*drawn, "unrelated") if name in answers}, "H(first in second)", TAIL
        )


def best_overlap(answer_lists: Sequence[InclusionAnswers]) -> float:
    """The largest distance at which to accept H > 0, such that most answers of the held pairs are right; 4: any.

    4 is the distance of opposite unit means without variance.
    """
    accepted = [(a.distance[mask], a.truth[mask]) for a in answer_lists for mask in [a.held & (a.h > 0)]]
    distance, truth = (torch.cat(each) for each in zip(*accepted, strict=True))
    values, which, _ = groups(distance)
    gain = torch.zeros_like(values).index_add(0, which, 2 * truth.double() - 1)  # of accepting pairs at this distance
    best = int(torch.cat([gain.new_zeros(1), gain.cumsum(0)]).argmax())
    if best == len(values):
        return max(4.0, 2 * float(values[-1])) if len(values) else 4.0
    return float(values[best]) if best == 0 else float((values[best - 1] + values[best]) / 2)


def _judged(inputs: Inputs, data: EncodedData, options: UncertaintyTaskOptions) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Predictions to calibrate: name, uncertainties [N] and probabilities of being right [N], by the model's score."""
    matcher, images = inputs.matcher, data.images
    if images is None:
        return
    if data.texts is not None:
        kept, place, _ = groups(data.image)
        for_images, for_texts = standings(matcher.score, rows(images, kept), data.texts, place, options.chunk)
        yield "text", data.of_texts, hit(for_texts, 1).cpu()
        yield "image", data.of_images[kept], hit(for_images, 1).cpu()
    named = classes_of(data.source, options.classnames)
    places = data.labels.new_empty(0) if named is None else named.places(data.labels)
    kept = (places >= 0).nonzero()[:, 0]
    if named is None or not len(kept):
        return
    prompts = templates_of(data.source, options.classnames, options.templates)
    classes, parts = classifier(matcher.model, matcher.tokenizer, named.names, prompts), []
    for part in chunks(len(kept), options.chunk):
        scores = matcher.score(rows(images, kept[part]), classes).cpu()
        right = torch.nn.functional.one_hot(places[kept[part]], len(named.names)).bool()
        parts.append(hit(standing(scores, right), 1))
    yield "zeroshot", data.of_images[kept], torch.cat(parts)


def _calibrated(name: str, bins: Bins) -> Plot:
    """Accuracy by uncertainty with its 95% intervals, a dot for every bin."""
    low, high = np.array(intervals(bins)).T

    def draw(axes):  # type: ignore[no-untyped-def]
        right = bins.right.numpy()
        axes.errorbar(bins.uncertainty.numpy(), right, np.abs([right - low, high - right]), fmt="o-")
        axes.set(xlabel="sum of variances", ylabel=f"share of {name} that is right")

    return Plot(draw, f"calibration: the share of right predictions of {name} by uncertainty, in {len(low)} bins")


def _extremes(data: EncodedData, first: Sequence[int]) -> Iterator[Block]:
    """The most and the least certain images and texts (Fig. 4); equal captions count once."""
    images = data.of_images.argsort(stable=True).tolist()
    texts = [first[i] for i in data.of_texts[list(first)].argsort(stable=True).tolist()]
    for name, order in (("most certain", images[:SHOWN]), ("most uncertain", images[::-1][:SHOWN])):
        tiles = [tile(data.source, data.rows[i], f"{float(data.of_images[i]):#.3g}") for i in order]
        if tiles:
            yield Gallery(tiles, f"Images, {name}, with the sum of variances", 6)
    tables = []
    for name, order in (("most certain", texts[:SHOWN]), ("most uncertain", texts[::-1][:SHOWN])):
        lines = [[data.captions[i], f"{float(data.of_texts[i]):#.3g}"] for i in order]
        tables.append(Table(lines, [f"texts, {name}", "variance"]))
    yield Beside(tables)


def _corners(data: EncodedData, distance: Tensor) -> Iterator[Block]:
    """Pairs nearest to each corner of the ranks of both uncertainties, of unique images, with their CSD (Fig. C.1)."""
    yield Text("CSD is the expected squared distance of samples of both: the lower, the better they match.")
    image, text = data.of_images[data.image], data.of_texts
    image_rank, text_rank = (values.argsort(stable=True).argsort().double() for values in (image, text))
    for of_image, sign in CORNERS.items():
        for of_text, text_sign in CORNERS.items():
            order = (sign * image_rank + text_sign * text_rank).argsort(descending=True, stable=True).tolist()
            chosen = [order[n] for n in different([int(data.image[t]) for t in order])][:3]
            tiles = []
            for t in chosen:
                values = f"CSD {distance[t]:#.4g}, variances {image[t]:#.3g} and {text[t]:#.3g}"
                tiles.append(tile(data.source, data.rows[int(data.image[t])], data.captions[t], values))
            yield Gallery(tiles, f"Image {of_image}, text {of_text}", 3)


TASK = Task(
    name="uncertainty",
    help="Compare the uncertainty of images and texts with lengths, levels, ground truth and errors (calibration).",
    data="images, with captions or labels where there are any, or texts alone (a table without images, .txt); the "
    "model needs Gaussians",
    options=UncertaintyTaskOptions,
    run=run,
    texts=True,
    hidden=r"_right@|_uncertainty@|_q(25|75)$",  # bins, most quantiles
)
