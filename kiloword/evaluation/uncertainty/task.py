"""Evaluate a model's uncertainty: `kiloword eval uncertainty MODEL` (arXiv:2410.18857, section 4.3).

The uncertainty of an image or a text is the sum of the variances of its Gaussian. It is compared with the length and
level of captions, the number of images that they are true of, inclusion, and errors (calibration, as in PCME++).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.calibration import binned, calibration, defined, groups, spearman
from kiloword.evaluation.classes import classes_of
from kiloword.evaluation.metrics import hit, standing
from kiloword.evaluation.retrieval import PANEL, standings
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.uncertainty import UncertaintyTaskOptions
from kiloword.evaluation.uncertainty.data import (
    QUANTILES,
    EncodedData,
    buckets,
    caption_levels,
    chains,
    different,
    gather,
    levelled,
    selected,
)
from kiloword.evaluation.uncertainty.inclusion import answers, inclusion_tests, links, matched
from kiloword.evaluation.uncertainty.shown import Findings, drawn
from kiloword.evaluation.zeroshot.task import classifier, templates_of
from kiloword.model.encoding import chunks

if TYPE_CHECKING:
    from kiloword.api import Matcher


def run(inputs: Inputs, options: UncertaintyTaskOptions) -> Values:
    """Encode a source and yield all metrics that its data allows; without captions, those of images and classes.

    `image_uncertainty_*`, `text_uncertainty_*` (mean, std, q05 to q95; by words, `_words_A-B` and `_words_spearman`; by
    level, `_level@k` and `_level_spearman`: negative if general texts are uncertain), `text_above_image`,
    `image_in_text`, `text_in_image`, then the metrics of `of_truth`, `inclusion_tests` and `calibration`.

    Raises: ValueError for a model without Gaussians.
    """
    matcher, source = inputs.matcher, inputs.source
    if matcher.model.head.uncertainty is None:
        raise ValueError(
            "this model's features have no variance, so there is no uncertainty to evaluate: train one with "
            "`kiloword train prolip`, or any method with --uncertainty gaussian"
        )
    data = gather(inputs)
    findings = Findings(data)
    if data.rows:
        yield from spread("image_uncertainty", data.image_uncertainty)
    if data.captions:
        yield from _of_texts(data, findings)
    written = chains(data) if data.rows else []
    texts = findings.levelled = levelled(matcher, data, written)
    if texts is not None:
        yield from defined("text_uncertainty_level_spearman", spearman(texts.level, texts.uncertainty))
        for k in sorted(set(texts.level.tolist())):
            yield f"text_uncertainty_level@{k}", float(texts.uncertainty[texts.level == k].mean())
    if written:
        findings.exact = caption_levels(source, [text for _, texts in written for text in texts]) is not None
        findings.answers = answers(matcher, links(written, findings.exact))
        yield from inclusion_tests(findings.answers)
    for name, uncertainties, right in _judged(matcher, data, options):
        findings.bins[name] = binned(uncertainties, right)
        yield from calibration(f"calibration_{name}", findings.bins[name])
    if inputs.shown is not None:
        inputs.shown.update(drawn(findings))


def spread(name: str, uncertainties: Tensor) -> Values:
    """Mean, standard deviation (uncorrected) and quantiles of sums of variances [N]."""
    yield f"{name}_mean", float(uncertainties.mean())
    yield f"{name}_std", float(uncertainties.std(correction=0))
    for q, value in zip(QUANTILES, np.percentile(uncertainties.numpy(), QUANTILES).tolist(), strict=True):
        yield f"{name}_q{q:02d}", value


def _of_texts(data: EncodedData, findings: Findings) -> Values:
    """Metrics of captions, and of captions with their images."""
    yield from spread("text_uncertainty", data.text_uncertainty)
    if data.texts is not None:
        above = data.text_uncertainty > data.image_uncertainty[data.image]
        yield "text_above_image", float(above.double().mean())
        h, findings.distance = matched(data)
        findings.matched = h
        yield "image_in_text", float((h > 0).double().mean())
        yield "text_in_image", float((h < 0).double().mean())  # H(b in a) is -H(a in b), to the last bit
    first = different(data.captions)
    words, uncertainties = torch.tensor([len(data.captions[i].split()) for i in first]), data.text_uncertainty[first]
    yield from defined("text_uncertainty_words_spearman", spearman(words, uncertainties))
    for name, inside in buckets(words):
        yield f"text_uncertainty_words_{name}", float(uncertainties[inside].mean())
    if hasattr(data.source, "relevance"):
        findings.true_of = true_of(data, first)
        yield from of_truth(data, first, findings.true_of)


def true_of(data: EncodedData, which: Sequence[int]) -> Tensor:
    """Number of images that each of n captions is true of: [n] int64, computed in blocks."""
    truth = data.source.relevance  # type: ignore[attr-defined]
    texts = [data.captions[i] for i in which]
    parts = list(chunks(len(texts), max(1, PANEL // len(data.rows))))
    return torch.cat(list(in_turns(parts, lambda part: torch.as_tensor(truth(texts[part], data.rows)).sum(1))))


def of_truth(data: EncodedData, which: Sequence[int], count: Tensor) -> Values:
    """Spearman's correlation of uncertainty and the (logarithm of the) number of images that a caption is true of.

    `truth_spearman`: over the unique captions that are true of some image, `truth_captions` of them, including those
    true of all images; `truth_spearman_level@k`: over those of one level, if their numbers differ; `truth_unmatched`:
    number of captions that are true of no image, which are omitted.
    """
    uncertainties, matched_texts = data.text_uncertainty[list(which)], count > 0
    yield from defined("truth_spearman", spearman(uncertainties[matched_texts], count[matched_texts]))
    levels = caption_levels(data.source, [data.captions[i] for i in which])
    for k in sorted(set(levels or [])):
        here = matched_texts & (torch.tensor(levels) == k)
        yield from defined(f"truth_spearman_level@{k}", spearman(uncertainties[here], count[here]))
    yield "truth_captions", float(matched_texts.sum())
    yield "truth_unmatched", float((~matched_texts).sum())


def _judged(
    matcher: Matcher, data: EncodedData, options: UncertaintyTaskOptions
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Predictions to calibrate: name, uncertainties [N] and probabilities of being right [N].

    "text": the image of a caption ranks first; "image": any caption of an image ranks first, both by the model's score;
    "zeroshot": the class of an image ranks first. Images without captions, or without a label, are omitted.
    """
    if data.texts is not None:
        kept, place, _ = groups(data.image)
        for_images, for_texts = standings(matcher.score, selected(data.images, kept), data.texts, place, options.chunk)
        yield "text", data.text_uncertainty, hit(for_texts, 1).cpu()
        yield "image", data.image_uncertainty[kept], hit(for_images, 1).cpu()
    named = classes_of(data.source, options.classnames)
    if named is None:
        return
    places = named.places(data.labels)
    kept = (places >= 0).nonzero()[:, 0]
    if not len(kept):
        return
    names, labels, parts = named.names, places[kept], []
    prompts = templates_of(data.source, options.classnames, options.templates)
    classes = classifier(matcher.model, matcher.tokenizer, names, prompts)
    for part in chunks(len(kept), options.chunk):
        scores = matcher.score(selected(data.images, kept[part]), classes).cpu()
        parts.append(hit(standing(scores, torch.nn.functional.one_hot(labels[part], len(names)).bool()), 1))
    yield "zeroshot", data.image_uncertainty[kept], torch.cat(parts)
