"""Zero-shot classification by prompts: `kiloword eval zeroshot MODEL`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.data.classes import Templates
from kiloword.data.classes.names import SLOT, prompts, read_templates, template_sets, templates
from kiloword.evaluation.classes import Classes, classes_of
from kiloword.evaluation.features import Seen, labelled
from kiloword.evaluation.metrics import (
    Standing,
    average_precision,
    check_scores,
    classification,
    in_parts,
    interpolated_average_precision,
    standing,
)
from kiloword.evaluation.retrieval import Score
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.zeroshot import PRECISION, PromptOptions, Way, ZeroshotTaskOptions
from kiloword.evaluation.zeroshot.bprw import combined
from kiloword.evaluation.zeroshot.mistakes import Predictions, mistakes
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
from kiloword.evaluation.zeroshot.tally import Tally
from kiloword.model.encoding import chunks, encode_texts, inference, join, rows
from kiloword.types import Features, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model


def classifier(
    model: Model,
    tokenizer: Tokenizer,
    classnames: Sequence[str],
    templates: Templates,
    options: PromptOptions | None = None,
) -> Features:
    """Text features of classes, from the ensemble of their prompts: every value [C, ...]."""
    captions, group = prompts(classnames, templates)
    texts = encode_texts(model, tokenizer, captions)
    options = options or PromptOptions()
    check_gaussians(texts, "ensemble", options)
    with inference(model):
        group_of = torch.tensor(group, device=texts["vec"].device)
        return combined(model.head, texts, group_of, len(classnames), None, options)


def zeroshot(
    score: Score, batches: Iterable[tuple[Features, Tensor]], classes: Features, tally: Tally | None = None
) -> Iterator[tuple[str, float]]:
    """CLIP_benchmark's metrics: `acc1`, `acc5`, `mean_per_class_recall`; or `mean_average_precision` for many labels.

    For many labels also `mean_average_precision_11` (VOC 2007's), and with the names of a tally each class's.

    Args: batches of image features [n, ...] with labels, [n] int64 or [n, C] 0/1; classes [C, ...].
    Holds three numbers an image, and [N, C] scores only for many labels. Ties get their expected value.
    Raises: ValueError for labels out of range, and of both forms.
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
        if tally is not None:
            tally.add(block, targets[-1])
    if scores and standings:
        raise ValueError("some images have one class, others a list of classes: expected a list for every image.")
    if scores:
        yield from _precisions(torch.cat(scores), torch.cat(targets), [] if tally is None else tally.names)
    else:
        columns = [torch.cat(column) for column in zip(*standings, strict=True)]
        yield from classification(Standing(*columns), torch.cat(targets), count)
    if tally is not None:
        yield from tally.values()


def _precisions(scores: Tensor, targets: Tensor, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Precisions of images with several classes, as means over classes; a class without positives counts 0, as in
    CLIP_benchmark. Args: scores, targets [N, C]; names: of the classes, or none.
    """
    of_classes, relevant = scores.T, targets.T.bool()  # [C, N]
    by_class = in_parts(average_precision, of_classes, relevant)
    yield "mean_average_precision", by_class.mean().item()
    yield "mean_average_precision_11", in_parts(interpolated_average_precision, of_classes, relevant).mean().item()
    if names:
        again = {c for c, name in enumerate(names) if name in names[:c]}
        words = (f"{name} ({c})" if c in again else name for c, name in enumerate(names))
        yield from ((f"{PRECISION}{word}", value) for word, value in zip(words, by_class.tolist(), strict=True))


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
    score = partial(inputs.matcher.score, nearest=options.nearest)
    all_classes = classes_of(source, options.classnames)
    if all_classes is None:
        raise ValueError(
            f"{source.name} has no class names: give --classnames FILE or NAME, or put classnames.txt in its folder or "
            "the one above (for scenes: scenes:test?task=colour)"
        )
    names, prompt_templates = all_classes.names, templates_of(source, options.classnames, options.templates)
    options.check()
    if prompts == "ensemble":
        tally, seen = Tally(options, names), Predictions()
        classes = classifier(matcher.model, matcher.tokenizer, names, prompt_templates, options.prompt_options)
        parts = _noted(labelled(inputs, classes=all_classes), tally, seen)
        yield from zeroshot(score if inputs.shown is None else seen.scoring(score), parts, classes, tally)
        if inputs.shown is not None:
            inputs.shown.update(mistakes(matcher, source, seen, names))
        return
    captions, class_prompts = encoded(matcher, names, prompt_templates)
    check_gaussians(class_prompts.texts, prompts, options.prompt_options)
    images = encoded_images(inputs, all_classes)
    chosen = chosen_by(matcher, prompts, class_prompts, images, options.prompt_options)
    rest = images.without(chosen.taken)
    seen = Predictions()
    yield from judged(score if inputs.shown is None else seen.scoring(score), rest, chosen.classes, seen)
    ensemble = chosen_by(matcher, "ensemble", class_prompts, rest, PromptOptions())
    yield from ((f"ensemble_{name}", value) for name, value in judged(score, rest, ensemble.classes))
    yield from values(prompts, chosen, class_prompts, captions)
    if inputs.shown is not None:
        inputs.shown.update(drawn(matcher, source, prompts, chosen, class_prompts, images, captions))
        inputs.shown.update(mistakes(matcher, source, seen, names))


def _noted(parts: Iterable[Seen], tally: Tally, seen: Predictions) -> Iterator[tuple[Features, Tensor]]:
    """Features and labels of batches, after tally and predictions have noted them."""
    for part in parts:
        tally.see(part.infos)
        seen.note(part.rows, part.labels)
        yield part.images, part.labels


def templates_of(source: Source, classnames: Sequence[str] | str | None, chosen: Templates | str | None) -> Templates:
    """The chosen templates; else those of the data, of the data set that `classnames` names, or the name alone."""
    if isinstance(chosen, str):
        return read_templates(chosen)
    of_data: Templates | None = chosen or getattr(source, "templates", None)
    if of_data:
        return of_data
    return templates(classnames) if isinstance(classnames, str) and classnames in template_sets() else [SLOT]


def encoded(matcher: Matcher, names: Sequence[str], templates: Templates) -> tuple[list[str], Prompts]:
    """All prompts of all classes, and their features."""
    captions, group = prompts(names, templates)
    texts = encode_texts(matcher.model, matcher.tokenizer, captions)
    return captions, Prompts(texts, torch.tensor(group, device=texts["vec"].device), len(names), names)


def chosen_by(matcher: Matcher, way: Way, class_prompts: Prompts, images: Images, options: PromptOptions) -> Chosen:
    """`prompts.choose` with a model."""
    with inference(matcher.model):
        return choose(way, matcher.model.head, matcher.score, class_prompts, images, options)


def judged(
    score: Score, images: Images, classes: Features, seen: Predictions | None = None
) -> Iterator[tuple[str, float]]:
    """`zeroshot` of images in memory."""

    def batches() -> Iterator[tuple[Features, Tensor]]:
        for part in chunks(len(images.rows), ROWS):
            if seen is not None:
                seen.note(images.rows[part], images.labels[part])
            yield rows(images.images, part), images.labels[part]

    yield from zeroshot(score, batches(), classes)


def encoded_images(inputs: Inputs, classes: Classes) -> Images:
    """All labelled images of a source, in memory."""
    parts = list(labelled(inputs, classes=classes))
    labels = torch.cat([part.labels.cpu() for part in parts])
    rows = [row for part in parts for row in part.rows]
    return Images(join([part.images for part in parts]), labels, rows, inputs.source.fingerprint)
