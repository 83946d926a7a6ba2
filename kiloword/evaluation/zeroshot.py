"""The task `zeroshot`: classification by prompts of the class names, and how those of a class are combined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kiloword.data.classes import Templates
from kiloword.data.classes.names import SLOT, prompts, read_templates, template_sets, templates
from kiloword.evaluation.features import Seen, classes_of, joined, labelled, tile
from kiloword.evaluation.metrics import Standing, average_precision, hit, rounding, standing
from kiloword.evaluation.prompts import Prompts, choose, statistics
from kiloword.evaluation.task import Findings, Inputs, Values
from kiloword.evaluation.tasks import PromptOptions, ZeroshotTaskOptions
from kiloword.model.encoding import encode_texts
from kiloword.report.blocks import Block, Gallery, Matrix
from kiloword.types import Source

if TYPE_CHECKING:
    from kiloword.api import Matcher

USUAL = ZeroshotTaskOptions()
NO_GROUP = "Other"  # a group that is never the worst, as in WILDS' FMoW
MISTAKES = 12  # images on the page
MATRIX = 20  # classes whose confusion matrix fits a page


def run(inputs: Inputs, options: ZeroshotTaskOptions) -> Findings:
    """Classify the images of a source by prompts; class names and templates default to those of the source.

    `prompts` is how the prompts of a class are combined; all but "ensemble" need Gaussians and hold the features of
    all images. They also yield the metrics of the ensemble on the same images (`ensemble_acc1`, ...), and all weights.
    """
    matcher, source, way = inputs.matcher, inputs.source, options.prompts
    score = partial(matcher.score, nearest=options.nearest)
    classes = classes_of(source, options.classnames)
    if classes is None:
        raise ValueError(
            f"{source.name} has no class names: give --classnames FILE or NAME, or put classnames.txt in its folder or "
            "the one above (for scenes: scenes:test?task=colour)"
        )
    names = classes.names
    template, listed = options.templates, options.classnames
    if isinstance(template, str):
        template = read_templates(template)
    elif not template and not (template := getattr(source, "templates", None)):
        template = templates(listed) if isinstance(listed, str) and listed in template_sets() else [SLOT]
    asked = encoded(matcher, names, template)
    images = None if way == "ensemble" else Seen.whole(labelled(inputs, classes=classes))
    chosen = choose(way, matcher, asked, images, options.prompt_options)
    rest = None if images is None else images.without(chosen.taken)
    parts: Iterable[Seen] = labelled(inputs, classes=classes) if rest is None else [rest]
    scores, labels, rows, infos = list[Tensor](), list[Tensor](), list[int](), list[Mapping[str, Any]]()
    for part in parts:
        scores.append(score(part.images, chosen.classes).cpu())
        labels.append(part.labels.cpu())
        rows += part.rows
        infos += part.infos
    every, truth = torch.cat(scores), joined(labels)
    yield from figures(every, truth, options, names, infos)
    if rest is not None:
        ensemble = choose("ensemble", matcher, asked, None, PromptOptions()).classes
        values = figures(score(rest.images, ensemble).cpu(), rest.labels)
        yield from ((f"ensemble_{name}", value) for name, value in values)
        yield from statistics(way, chosen, asked)
    if inputs.page and truth.ndim == 1:
        yield from _blocks(source, names, every, truth, rows)


def figures(
    scores: Tensor,
    labels: Tensor,
    options: ZeroshotTaskOptions = USUAL,
    names: Sequence[str] = (),
    infos: Sequence[Mapping[str, Any]] = (),
) -> Values:
    """CLIP_benchmark's `acc1`, `acc5` (of at least 5 classes) and `mean_per_class_recall` (of classes that occur), or
    `mean_average_precision` of images with several classes; and what the options ask for, named as by DataComp and
    WILDS. Ties get their expected value; a class without positives counts 0 in average precisions.

    Args: labels [N] int64, or [N, C] 0/1; names of the classes; infos: `Record.info` of the images.
    Raises: ValueError for options that the labels, the names or the infos do not have.
    """
    count, several = scores.shape[1], labels.ndim == 2
    if several and (options.macro_f1 or options.attributes):
        raise ValueError("--macro-f1 and --attributes need one class per image, but these images have several.")
    positive = labels.bool() if several else torch.nn.functional.one_hot(labels, count).bool()
    where = standing(scores, positive)
    first = hit(where, 1)
    if several:
        precisions = average_precision(scores.T, positive.T)
        yield "mean_average_precision", precisions.mean().item()
        for c, name in enumerate(names):
            again = f" ({c})" if name in names[:c] else ""
            yield f"average_precision@{name}{again}", precisions[c].item()
    if options.any_label or not several:
        yield "acc1", first.mean().item()
        if count >= 5:
            yield "acc5", hit(where, 5).mean().item()
    if not several:
        actual, right = torch.bincount(labels, minlength=count), torch.bincount(labels, first, count)
        occurs = actual > 0
        yield "mean_per_class_recall", (right / actual)[occurs].mean().item()
    if options.macro_f1 or options.attributes:
        best = scores.amax(1, keepdim=True)
        predicted = (scores >= best - rounding(best)).double()
        predicted /= predicted.sum(1, keepdim=True)  # [N, C]: the chance of each class to be the prediction
        if options.macro_f1:  # as of WILDS' iWildCam: 2 hits / (predicted + actual), of the classes that occur
            yield "F1-macro_all", (2 * right / (predicted.sum(0) + actual))[occurs].mean().item()
        if options.attributes:
            words = [name.replace("_", " ").split(maxsplit=1) for name in names]
            if min(map(len, words)) < 2:
                raise ValueError('--attributes: expected "attribute object" of each class name, not one word.')
            for kind, of_class in zip(("attribute", "object"), zip(*words, strict=True), strict=True):
                part = torch.tensor([of_class.index(word) for word in of_class])
                yield f"{kind}_acc1", (predicted * (part == part[labels][:, None])).sum(1).mean().item()
    if options.group_by:
        yield from _by_group(where, count, options.group_by, infos)


def _by_group(where: Standing, count: int, by: Sequence[str], infos: Sequence[Mapping[str, Any]]) -> Values:
    fields = {field_name(field_): grouped(infos, field_) for field_ in by}
    for metric, right in {"acc": hit(where, 1), **({"acc_top5": hit(where, 5)} if count >= 5 else {})}.items():
        means = {f: {g: right[own].mean().item() for g, own in groups.items()} for f, groups in fields.items()}
        worst = {f: min(v for g, v in of.items() if g != NO_GROUP or len(of) == 1) for f, of in means.items()}
        yield f"{metric}_wg", min(worst.values())
        yield from ((f"{metric}_worst_{field_}", value) for field_, value in worst.items())
        yield from ((f"{metric}_{field_}:{g}", value) for field_, of in means.items() for g, value in of.items())
    yield from ((f"count_{f}:{g}", float(len(own))) for f, groups in fields.items() for g, own in groups.items())


def _blocks(
    source: Source, names: Sequence[str], scores: Tensor, labels: Tensor, rows: Sequence[int]
) -> Iterator[Block]:
    """The confusion matrix of few classes, and the mistakes whose score is furthest above that of the true class."""
    lead, predicted = scores.max(1)
    if len(names) <= MATRIX:
        confusion = torch.bincount(labels * len(names) + predicted, minlength=len(names) ** 2).view(len(names), -1)
        yield Matrix(confusion.numpy(), names, names, caption="Images by true class (rows) and predicted class.")
    lead -= scores.gather(1, labels[:, None])[:, 0]  # of a tie 0: no mistake, such as equal names of two classes
    surest = [i for i in lead.argsort(descending=True, stable=True)[:MISTAKES].tolist() if lead[i] > 0]
    tiles = [tile(source, rows[i], f"{names[int(labels[i])]}, called {names[int(predicted[i])]}") for i in surest]
    if tiles:
        yield Gallery(tiles, title="Mistakes whose class is furthest above the true one, by score", columns=4)


def group_of(info: Mapping[str, Any], field: str) -> str | None:
    """The group of an image: a value of its information as text. `a.b` is in the object `a`, `a.0` in the list `a`.

    `a=FIELD` is FIELD where the image has no `a`.
    """
    value: Any = info
    first, mark, other = field.partition("=")
    if mark and field not in info:
        group = group_of(info, first)
        return group_of(info, other) if group is None else group
    for name in [field] if field in info else field.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return str(value) if isinstance(value, str | int | float) and str(value) else None


def grouped(infos: Sequence[Mapping[str, Any]], field: str, known: bool = True) -> dict[str, list[int]]:
    """The places of images by their group, in the order of its name. Raises: ValueError for a known field of none."""
    places = dict[str, list[int]]()
    for n, info in enumerate(infos):
        if (group := group_of(info, field)) is not None:
            places.setdefault(group, []).append(n)
    if known and not places:
        there = ", ".join(sorted({name for info in infos for name in info})[:20]) or "none"
        raise ValueError(
            f"--group-by {field}: no image has this field. Expected a key of its json, or a column that "
            f"FILE?info=COLUMN names; there are: {there}."
        )
    return dict(sorted(places.items()))


def field_name(field: str) -> str:
    """How a field of groups is named in metrics: `region` of `region=npy.0`."""
    return field.partition("=")[0]


def encoded(matcher: Matcher, names: Sequence[str], templates: Templates) -> Prompts:
    """All prompts of all classes, and their features."""
    captions, group = prompts(names, templates)
    texts = encode_texts(matcher.model, matcher.tokenizer, captions)
    return Prompts(texts, torch.tensor(group, device=texts["vec"].device), len(names), captions)
