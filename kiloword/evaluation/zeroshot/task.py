"""Zero-shot classification by prompts: `kiloword eval zeroshot MODEL`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.evaluation.features import labelled
from kiloword.evaluation.metrics import Standing, check_scores, classification, mean_average_precision, standing
from kiloword.evaluation.retrieval.relevance import Score
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.zeroshot import PromptOptions, Templates, Way, ZeroshotTaskOptions
from kiloword.evaluation.zeroshot.page import drawn
from kiloword.evaluation.zeroshot.prompts import (
    ROWS,
    Chosen,
    Images,
    Prompts,
    check_gaussians,
    choose,
    values,
)
from kiloword.model.encoding import chunks, encode_texts, inference, join, rows
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model


def prompts(classnames: Sequence[str], templates: Templates) -> tuple[list[str], list[int]]:
    """All prompts, class by class, and the class index of each."""
    if isinstance(classnames, str) or not all(isinstance(name, str) for name in classnames):
        raise ValueError(f"class names must be a list of strings, got {classnames!r}")
    if not classnames:
        raise ValueError("there are no class names: at least one is needed")
    if isinstance(templates, Mapping):
        missing = [name for name in classnames if not templates.get(name)]
        if missing:
            raise ValueError(f"templates give no prompts for the class {missing[0]!r} ({len(missing)} such classes)")
        lists = [list(templates[name]) for name in classnames]
    else:
        plain = [template for template in templates if "{c}" not in template]
        if plain or not templates or isinstance(templates, str):
            raise ValueError(f"templates must be a list of prompts with {{c}} for the class name, got {templates!r}")
        lists = [[template.replace("{c}", name) for template in templates] for name in classnames]
    return [prompt for group in lists for prompt in group], [i for i, group in enumerate(lists) for _ in group]


def classifier(model: Model, tokenizer: Tokenizer, classnames: Sequence[str], templates: Templates) -> Features:
    """Text features of classes, from the ensemble of their prompts: every value [C, ...]."""
    captions, group = prompts(classnames, templates)
    texts = encode_texts(model, tokenizer, captions)
    with inference(model):
        return model.head.ensemble(texts, torch.tensor(group, device=texts["vec"].device), len(classnames))


def zeroshot(
    score: Score, batches: Iterable[tuple[Features, Tensor]], classes: Features
) -> Iterator[tuple[str, float]]:
    """CLIP_benchmark's metrics: `acc1`, `acc5`, `mean_per_class_recall`; or `mean_average_precision` for many labels.

    Args: batches of image features [n, ...] with labels, [n] int64 or [n, C] 0/1; classes [C, ...].
    Holds three numbers an image, and [N, C] scores only for many labels. Ties get their expected value.
    """
    count = len(classes["vec"])
    standings: list[Standing] = []
    targets: list[Tensor] = []
    scores: list[Tensor] = []
    for images, labels in batches:
        block = score(images, classes).cpu()  # [n, C]
        targets.append(labels.cpu())
        if labels.ndim == 2:
            scores.append(check_scores(block))
        else:
            standings.append(_standing(block, targets[-1], count))
    if scores:
        yield "mean_average_precision", mean_average_precision(torch.cat(scores), torch.cat(targets))
    else:
        columns = [torch.cat(column) for column in zip(*standings, strict=True)]
        yield from classification(Standing(*columns), torch.cat(targets), count)


def _standing(scores: Tensor, labels: Tensor, count: int) -> Standing:
    """Standing of the true class of every image among all classes."""
    _check_labels(labels, count)
    return standing(scores, torch.nn.functional.one_hot(labels, count).bool())


def _check_labels(labels: Tensor, count: int) -> None:
    if not 0 <= int(labels.min()) <= int(labels.max()) < count:
        raise ValueError(f"labels run from {int(labels.min())} to {int(labels.max())}, but there are {count} classes")


def run(inputs: Inputs, options: ZeroshotTaskOptions) -> Values:
    """Classify the images of a source by prompts; class names and templates default to those of the source.

    `prompts` is how the prompts of a class are combined; all but "ensemble" need Gaussians and hold the features of
    all images. They also yield the metrics of the ensemble on the same images (`ensemble_acc1`, ...), and all weights.
    """
    matcher, source, prompts = inputs.matcher, inputs.source, options.prompts
    names = options.classnames or getattr(source, "classnames", None)
    if not names:
        raise ValueError(
            f"{source.name} has no class names: expected classnames.txt in its folder or the one above "
            "(for scenes: scenes:test?task=colour)"
        )
    prompt_templates = options.templates or getattr(source, "templates", None) or ["{c}"]
    options.prompt_options.check(prompts)
    if prompts == "ensemble":
        classes = classifier(matcher.model, matcher.tokenizer, names, prompt_templates)
        yield from zeroshot(matcher.score, ((part.images, part.labels) for part in labelled(inputs)), classes)
        return
    captions, class_prompts = encoded(matcher, names, prompt_templates)
    check_gaussians(class_prompts.texts, prompts)
    images = encoded_images(inputs, len(names))
    chosen = chosen_by(matcher, prompts, class_prompts, images, options.prompt_options)
    rest = images.without(chosen.taken)
    yield from judged(matcher, rest, chosen.classes)
    ensemble = chosen_by(matcher, "ensemble", class_prompts, rest, PromptOptions())
    yield from ((f"ensemble_{name}", value) for name, value in judged(matcher, rest, ensemble.classes))
    yield from values(prompts, chosen, class_prompts, captions)
    if inputs.shown is not None:
        inputs.shown.update(drawn(matcher, source, prompts, chosen, class_prompts, images, captions))


def encoded(matcher: Matcher, names: Sequence[str], templates: Templates) -> tuple[list[str], Prompts]:
    """All prompts of all classes, and their features."""
    captions, group = prompts(names, templates)
    texts = encode_texts(matcher.model, matcher.tokenizer, captions)
    return captions, Prompts(texts, torch.tensor(group, device=texts["vec"].device), len(names), names)


def chosen_by(matcher: Matcher, way: Way, class_prompts: Prompts, images: Images, options: PromptOptions) -> Chosen:
    """`prompts.choose` with a model."""
    with inference(matcher.model):
        return choose(way, matcher.model.head, matcher.score, class_prompts, images, options)


def judged(matcher: Matcher, images: Images, classes: Features) -> Iterator[tuple[str, float]]:
    """`zeroshot` of images in memory."""
    parts = chunks(len(images.rows), ROWS)
    yield from zeroshot(matcher.score, ((rows(images.images, p), images.labels[p]) for p in parts), classes)


def encoded_images(inputs: Inputs, classes: int) -> Images:
    """All labelled images of a source, in memory."""
    parts = list(labelled(inputs))
    labels = torch.cat([part.labels.cpu() for part in parts])
    if labels.ndim == 1:
        _check_labels(labels, classes)
    rows = [row for part in parts for row in part.rows]
    return Images(join([part.images for part in parts]), labels, rows, inputs.source.fingerprint)
