"""The task `zeroshot`: classification by prompts of the class names, and how those of a class are combined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from tyro.conf import arg

from kiloword.config.recipes import Nearest
from kiloword.data.classes import Templates
from kiloword.data.classes.names import SLOT, prompts, read_templates, template_sets, templates
from kiloword.errors import suggestion
from kiloword.evaluation.classes import Classes, classes_of
from kiloword.evaluation.features import labelled
from kiloword.evaluation.metrics import (
    Standing,
    average_precision,
    check_scores,
    classification,
    hit,
    in_parts,
    interpolated_average_precision,
    macro_f1,
    rounding,
    standing,
)
from kiloword.evaluation.prompts import (
    ROWS,
    Chosen,
    Images,
    PromptOptions,
    Prompts,
    Way,
    check_gaussians,
    choose,
    combined,
    statistics,
)
from kiloword.evaluation.retrieval import Score
from kiloword.evaluation.task import ClassNames, Findings, Inputs, Task, Values
from kiloword.evaluation.task import Prompts as PromptTexts
from kiloword.model.encoding import chunks, encode_texts, inference, join, rows
from kiloword.report.blocks import Block, Gallery, Matrix, Table, Tile
from kiloword.types import Features, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model

NO_GROUP = "Other"  # a group that is never the worst, as in WILDS' FMoW
MISTAKES = 12  # images on the page
MATRIX = 20  # classes whose whole confusion matrix fits a page, and most frequent confusions of more classes


@dataclass(frozen=True, kw_only=True)
class ZeroshotTaskOptions:
    """How the prompts of a class become its classifier."""

    # prompts of a class: all alike (ensemble), the least uncertain (filter, topk), or weighted by how well they explain
    # images (bprw); all but the first need a model with Gaussians
    prompts: Way = "ensemble"
    # how prompts are combined, and parameters of filter, topk and bprw
    prompt_options: Annotated[PromptOptions, arg(name="prompts")] = field(default_factory=PromptOptions)
    # score of an image and a class; None: the model's own, which does not subtract half the squared norm of the class's
    # mean, as csd does
    nearest: Nearest | None = None
    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    # prompts with {c} or {} for the class name: a file, a data set, or one template. None: those of the data, of the
    # data set that --classnames names, or the class name alone
    templates: PromptTexts | None = None
    # fields of the json, or of FILE?info=COLUMN, whose values are groups of images: accuracy of each, and of the worst;
    # npy.0: the first number of the .npy beside a .cls; NAME=FIELD: FIELD where there is no NAME
    group_by: tuple[str, ...] = ()
    any_label: bool = False  # an image with several classes is right if any of them is among the first: acc1, acc5
    macro_f1: bool = False  # also F1 as a mean over the classes that occur
    attributes: bool = False  # class names are "attribute object": also the accuracy of each of the two

    def check(self) -> None:
        """Raises: ValueError for options of another selection of prompts, and for those that need the ensemble."""
        self.prompt_options.check(self.prompts)
        counted = ("group_by", "any_label", "macro_f1", "attributes")
        chosen = next((name for name in counted if getattr(self, name)), None)
        if chosen is not None and self.prompts != "ensemble":
            raise ValueError(f"--{chosen.replace('_', '-')} counts with --prompts ensemble, but it is {self.prompts}.")
        if len({field_name(field) for field in self.group_by}) < len(self.group_by):
            raise ValueError(f"--group-by names a field twice: {', '.join(self.group_by)}.")


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
    options.check()
    names, class_templates = classes.names, templates_of(source, options.classnames, options.templates)
    tally = Tally(options, names if way == "ensemble" else [], inputs.page)
    if way == "ensemble":
        features = classifier(matcher.model, matcher.tokenizer, names, class_templates, options.prompt_options)

        def batches() -> Iterator[tuple[Features, Tensor]]:
            for part in labelled(inputs, classes=classes):
                tally.see(part.rows, part.infos)
                yield part.images, part.labels

        yield from zeroshot(score, batches(), features, tally)
    else:
        captions, class_prompts = encoded(matcher, names, class_templates)
        check_gaussians(class_prompts.texts, way, options.prompt_options)
        images = encoded_images(inputs, classes)
        chosen = chosen_by(matcher, way, class_prompts, images, options.prompt_options)
        rest = images.without(chosen.taken)
        tally.see(rest.rows)
        yield from judged(score, rest, chosen.classes, tally)
        ensemble = chosen_by(matcher, "ensemble", class_prompts, rest, PromptOptions())
        yield from ((f"ensemble_{name}", value) for name, value in judged(score, rest, ensemble.classes))
        yield from statistics(way, chosen, class_prompts, captions)
    if inputs.page:
        yield from tally.blocks(names, partial(_images, matcher, source))


TASK = Task(
    name="zeroshot",
    help="Classify images by prompts of the class names: accuracy, or mean average precision of many labels.",
    data="class folders, a table with a column `label`, tars with .cls, or scenes:test?task=colour",
    options=ZeroshotTaskOptions,
    run=run,
    hidden="^(weight|average_precision)@|^count_",
)


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
) -> Values:
    """CLIP_benchmark's metrics: `acc1`, `acc5`, `mean_per_class_recall`; or `mean_average_precision` for many labels.

    For many labels also `mean_average_precision_11` (VOC 2007's), and with the names of a tally each class's.

    Args: batches of image features [n, ...] with labels, [n] int64 or [n, C] 0/1; classes [C, ...].
    Holds three numbers an image, and [N, C] scores only for many labels. Ties get their expected value.
    Raises: ValueError for labels out of range, and of both forms.
    """
    tally = tally or Tally()
    for images, labels in batches:
        tally.add(score(images, classes).cpu(), labels.cpu())
    yield from tally.values(len(classes["vec"]))


class Tally:
    """What zero-shot classification counts over batches of images; `see` and `add` are called in the same order.

    Names of metrics are those of CLIP_benchmark, DataComp's evaluation and WILDS. Args: names: of the C classes, or
    none; page: collect what the page shows. Raises: ValueError for a class name of one word with `attributes`.
    """

    def __init__(
        self, options: ZeroshotTaskOptions | None = None, names: Sequence[str] = (), page: bool = False
    ) -> None:
        self.options, self.names, self.page = options or ZeroshotTaskOptions(), names, page
        self._rows: list[int] = []  # of the source, one an image
        self._groups: list[list[str | None]] = [[] for _ in self.options.group_by]  # of each field, by image
        self._fields = set[str]()  # that any image has
        self._standings: list[Standing] = []
        self._labels: list[Tensor] = []  # [n], or [n, C] 0/1
        self._scores: list[Tensor] = []  # [n, C] of images with several classes
        self._predicted: list[Tensor] = []  # [n, C] summed: how often each class is predicted
        self._leads: list[tuple[Tensor, Tensor]] = []  # predicted class, and its score above the true one's: [n] each
        self._parts = _parts_of(names) if self.options.attributes else {}
        self._part_hits: dict[str, list[Tensor]] = {part: [] for part in self._parts}

    def see(self, rows: Sequence[int], infos: Sequence[Mapping[str, Any]] = ()) -> None:
        """The rows of a batch of images, and their `Record.info` for groups."""
        self._rows += rows
        for groups, field_ in zip(self._groups, self.options.group_by, strict=True):
            groups += [group_of(info, field_) for info in infos]
        self._fields.update(*infos)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Scores [n, C] of a batch. Args: labels [n] int64, or [n, C] 0/1 of images with several classes."""
        options, count = self.options, scores.shape[1]
        self._labels.append(labels)
        if labels.ndim == 2:
            single = next((name for name in ("attributes", "macro_f1") if getattr(options, name)), None)
            if single is not None:
                flag = single.replace("_", "-")
                raise ValueError(f"--{flag} needs one class per image, but these images have several.")
            self._scores.append(check_scores(scores))
            if options.group_by or options.any_label:
                self._standings.append(standing(scores, labels.bool()))
            return
        if not 0 <= int(labels.min()) <= int(labels.max()) < count:
            span = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"labels run from {span}, but there are {count} classes")
        self._standings.append(standing(scores, torch.nn.functional.one_hot(labels, count).bool()))
        if options.macro_f1 or options.attributes:
            best = scores.amax(1, keepdim=True)
            first = (scores >= best - rounding(best)).double()
            first /= first.sum(1, keepdim=True)  # [n, C]: the chance of each class to be the prediction
            self._predicted.append(first.sum(0))
            for name, part in self._parts.items():
                self._part_hits[name].append((first * (part == part[labels][:, None])).sum(1))
        if self.page:
            lead, predicted = scores.max(1)
            self._leads.append((predicted, lead - scores.gather(1, labels[:, None])[:, 0]))

    def values(self, count: int) -> Values:
        """The metrics of `count` classes, with those that the options ask for."""
        if self._scores and len(self._scores) < len(self._labels):
            raise ValueError("some images have one class, others a list of classes: expected a list for every image.")
        where = Standing(*map(torch.cat, zip(*self._standings, strict=True))) if self._standings else None
        labels = torch.cat(self._labels)
        if self._scores:
            yield from self._precisions(torch.cat(self._scores), labels)
        elif where is not None:
            yield from classification(where, labels, count)
        if where is None:
            return
        if self.options.any_label:
            yield "acc1", hit(where, 1).mean().item()
            if count >= 5:
                yield "acc5", hit(where, 5).mean().item()
        if self.options.macro_f1:
            right = torch.bincount(labels, weights=hit(where, 1), minlength=count)
            predicted = sum(self._predicted, torch.zeros(count, dtype=torch.float64))
            yield "F1-macro_all", macro_f1(right, predicted, torch.bincount(labels, minlength=count).double())
        for name, hits in self._part_hits.items():
            yield f"{name}_acc1", torch.cat(hits).mean().item()
        if self.options.group_by:
            yield from self._by_group(where, count)

    def _precisions(self, scores: Tensor, targets: Tensor) -> Values:
        """Precisions of images with several classes, as means over classes; a class without positives counts 0, as in
        CLIP_benchmark. Args: scores, targets [N, C].
        """
        of_classes, relevant = scores.T, targets.T.bool()  # [C, N]
        by_class = in_parts(average_precision, of_classes, relevant)
        yield "mean_average_precision", by_class.mean().item()
        yield "mean_average_precision_11", in_parts(interpolated_average_precision, of_classes, relevant).mean().item()
        for c, name in enumerate(self.names):
            again = f" ({c})" if name in self.names[:c] else ""
            yield f"average_precision@{name}{again}", by_class[c].item()

    def _by_group(self, where: Standing, count: int) -> Values:
        fields = {}  # name -> group -> places of its images
        for field_, groups in zip(self.options.group_by, self._groups, strict=True):
            places: dict[str, list[int]] = {}
            for place, group in enumerate(groups):
                if group is not None:
                    places.setdefault(group, []).append(place)
            if not places:
                known = sorted(self._fields)
                raise ValueError(
                    f"--group-by {field_}: no image has this field. Expected a key of its json, or a column that "
                    f"FILE?info=COLUMN names; it has {', '.join(known[:20]) or 'none'}.{suggestion(field_, known)}"
                )
            fields[field_name(field_)] = dict(sorted(places.items()))
        for metric, right in {"acc": hit(where, 1), **({"acc_top5": hit(where, 5)} if count >= 5 else {})}.items():
            means = {f: {g: right[own].mean().item() for g, own in groups.items()} for f, groups in fields.items()}
            worst = {f: min(v for g, v in of.items() if g != NO_GROUP or len(of) == 1) for f, of in means.items()}
            yield f"{metric}_wg", min(worst.values())
            yield from ((f"{metric}_worst_{field_}", value) for field_, value in worst.items())
            yield from ((f"{metric}_{field_}:{g}", value) for field_, of in means.items() for g, value in of.items())
        yield from ((f"count_{f}:{g}", float(len(own))) for f, groups in fields.items() for g, own in groups.items())

    def blocks(self, names: Sequence[str], images: Any) -> Iterator[Block]:
        """The confusion matrix, of many classes the most frequent confusions, and the mistakes with the largest lead.

        Args: names: of the classes; images: rows -> images.
        """
        if not self._leads:
            return
        true, count = torch.cat(self._labels), len(names)
        predicted, lead = (torch.cat(column) for column in zip(*self._leads, strict=True))
        confusion = torch.bincount(true * count + predicted, minlength=count**2).view(count, count)
        if count <= MATRIX:
            yield Matrix(confusion.numpy(), names, names, caption="Images by true class (rows) and predicted class.")
        else:
            wrong = confusion.clone().fill_diagonal_(0)
            pairs = [divmod(place, count) for place in wrong.flatten().topk(MATRIX).indices.tolist()]
            lines = [[names[t], names[p], int(wrong[t, p]), int(confusion[t].sum())] for t, p in pairs if wrong[t, p]]
            yield Table(lines, ["class", "taken for", "images", "of"], caption="The most frequent confusions.")
        wrong = ((true != predicted) & (lead > 0)).nonzero()[:, 0]  # a tie is no mistake: equal names of two classes
        surest = wrong[lead[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist()
        captions = [f"{names[int(true[i])]}, called {names[int(predicted[i])]}" for i in surest]
        pictures = images([self._rows[i] for i in surest])
        tiles = [Tile(picture, [caption], right=False) for picture, caption in zip(pictures, captions, strict=True)]
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


def field_name(field: str) -> str:
    """How a field of groups is named in metrics: `region` of `region=npy.0`."""
    return field.partition("=")[0]


def _parts_of(names: Sequence[str]) -> dict[str, Tensor]:
    """The attribute and the object of each class, each as the number of the first class that has it: [C].

    Raises: ValueError for a class name that is not "attribute object".
    """
    pairs = [name.replace("_", " ").split(maxsplit=1) for name in names]
    single = next((name for name, words in zip(names, pairs, strict=True) if len(words) < 2), None)
    if single is not None:
        raise ValueError(f'--attributes: the class {single!r} is one word. Expected "attribute object" of each.')
    columns = {"attribute": [pair[0] for pair in pairs], "object": [pair[1] for pair in pairs]}
    return {part: torch.tensor([words.index(word) for word in words]) for part, words in columns.items()}


def templates_of(source: Source, classnames: Sequence[str] | str | None, chosen: Templates | str | None) -> Templates:
    """The chosen templates; else those of the data, of the data set that `classnames` names, or the name alone."""
    if isinstance(chosen, str):
        return read_templates(chosen)
    of_data: Templates | None = chosen or getattr(source, "templates", None)
    if of_data:
        return of_data
    return templates(classnames) if isinstance(classnames, str) and classnames in template_sets() else [SLOT]


def _images(matcher: Matcher, source: Source, wanted: Sequence[int]) -> list[Any]:
    """Images [H, W, 3] of rows as the model sees them, also of one that reads stored tokens."""
    from kiloword.data.reading import eval_batches
    from kiloword.data.stored import WithTokens
    from kiloword.report import thumbnail

    config = matcher.model.config
    source = source.source if isinstance(source, WithTokens) else source
    parts = [range(row, row + 1) for row in wanted]
    batches = eval_batches(source, config.image.size, config.preprocess.resize, parts=parts) if parts else ()
    return [thumbnail(image.permute(1, 2, 0).contiguous().numpy(), 160) for b in batches for image in b.images]


def encoded(matcher: Matcher, names: Sequence[str], templates: Templates) -> tuple[list[str], Prompts]:
    """All prompts of all classes, and their features."""
    captions, group = prompts(names, templates)
    texts = encode_texts(matcher.model, matcher.tokenizer, captions)
    return captions, Prompts(texts, torch.tensor(group, device=texts["vec"].device), len(names), names)


def encoded_images(inputs: Inputs, classes: Classes) -> Images:
    """All labelled images of a source, in memory."""
    parts = list(labelled(inputs, classes=classes))
    labels = torch.cat([part.labels.cpu() for part in parts])
    places = [row for part in parts for row in part.rows]
    return Images(join([part.images for part in parts]), labels, places, inputs.source.fingerprint)


def chosen_by(matcher: Matcher, way: Way, class_prompts: Prompts, images: Images, options: PromptOptions) -> Chosen:
    """`prompts.choose` with a model."""
    with inference(matcher.model):
        return choose(way, matcher.model.head, matcher.score, class_prompts, images, options)


def judged(score: Score, images: Images, classes: Features, tally: Tally | None = None) -> Values:
    """`zeroshot` of images in memory."""
    parts = chunks(len(images.rows), ROWS)
    yield from zeroshot(score, ((rows(images.images, p), images.labels[p]) for p in parts), classes, tally)
