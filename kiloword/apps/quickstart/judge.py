"""Evaluate a model on held-out scenes with complete ground truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.apps.quickstart import baseline
from kiloword.apps.quickstart.results import (
    Compared,
    Figures,
    Hit,
    Metrics,
    Misses,
    QueryHits,
    SampleSizes,
    TaskFigures,
)
from kiloword.data.open import mix, open_source
from kiloword.data.reading import eval_batches
from kiloword.data.scenes.source import ScenesSource
from kiloword.data.scenes.world import GROUP, TASKS, SceneRows, label
from kiloword.evaluation.metrics import classification, recall_at, standing
from kiloword.evaluation.retrieval import Score, retrieval, true_relevance
from kiloword.evaluation.zeroshot import classifier
from kiloword.model.encoding import chunks, rows
from kiloword.types import Features

BEST = 5  # images shown for a query
ATTRIBUTES = ("shape", "colour", "size", "fill")  # in the order of `world.SceneRows`
QUERIES = (  # in addition to two full descriptions of held-out scenes
    (1, "a picture with three objects"),
    (1, "something striped"),
    (1, "there is a star"),
    (2, "a large solid red circle"),
    (2, "a small hollow blue thing"),
    (2, "a yellow shape to the left of a green shape"),
)


@dataclass(frozen=True)
class Scenes:
    """A set of scenes, drawn."""

    source: ScenesSource
    pixels: Tensor  # uint8 [N, 3, H, W]
    captions: list[str]  # [N], the first of each scene

    @cached_property
    def colours(self) -> Tensor:
        """Histograms [N, BINS^3]."""
        return baseline.histogram(self.pixels)


def draw_all(src: str, size: int) -> Scenes:
    """Draw every image that `src` (scenes:...) names, `size` pixels a side."""
    source = open_source(src, size)
    assert isinstance(source, ScenesSource)
    parts = list(eval_batches(source, size))
    return Scenes(source, torch.cat([part.images for part in parts]), [c[0] for part in parts for c in part.captions])


@dataclass(frozen=True)
class Contestant:
    """Embeds both sides, and scores every image against every text; higher is a better match."""

    images: Callable[[Scenes], Features]
    texts: Callable[[Sequence[str]], Features]
    score: Score


# The same score for every pair: its metrics are those of chance.
CHANCE = Contestant(
    lambda scenes: {"vec": torch.zeros(len(scenes.pixels), 1)},
    lambda captions: {"vec": torch.zeros(len(captions), 1)},
    baseline.dot,
)


def judge(matcher: Matcher, trained_on: Sequence[str], sizes: SampleSizes) -> Figures:
    """All figures of a model, beside histograms of colours that learn from `sizes.baseline` training images."""
    size = matcher.model.config.image.size
    opened = [open_source(s, size) for s in trained_on]
    training = opened[0] if len(opened) == 1 else mix(opened, (1.0,) * len(opened))
    colours = baseline.ColourMatcher(baseline.read(training, sizes.baseline, size))
    contestants = {
        "model": Contestant(lambda scenes: matcher.encode_image(scenes.pixels), matcher.encode_text, matcher.score),
        "colours": Contestant(lambda scenes: colours.images(scenes.colours), colours.texts, baseline.dot),
        "chance": CHANCE,
    }

    def compare(measure: Callable[[str, Contestant], Iterable[tuple[str, float]]]) -> Compared:
        return Compared(**{name: dict(measure(name, contestant)) for name, contestant in contestants.items()})

    held_out = draw_all(f"scenes:test?n={sizes.retrieval}", size)
    images = {name: c.images(held_out) for name, c in contestants.items()}
    texts = {name: c.texts(held_out.captions) for name, c in contestants.items()}
    image_of_text = torch.arange(sizes.retrieval)

    def general(level: int) -> Compared:
        source = open_source(f"scenes:test?n={sizes.retrieval}&levels={level}")
        assert isinstance(source, ScenesSource)
        captions = [source.record(row).captions[0] for row in range(sizes.retrieval)]
        truth = torch.from_numpy(source.relevance(captions, range(sizes.retrieval)))  # [T, I]
        return compare(lambda name, c: true_relevance(c.score, images[name], c.texts(captions), truth))

    hard = draw_all(f"scenes:test?hard=shape&n={sizes.hard}", size)
    return Figures(
        retrieval=compare(lambda name, c: retrieval(c.score, images[name], texts[name], image_of_text)),
        general={"1": general(1), "2": general(2)},
        hard=compare(lambda _, c: within_groups(c.score, c.images(hard), c.texts(hard.captions)).items()),
        tasks=_tasks(matcher, sizes, size),
        misses=misses(matcher.score(images["model"], texts["model"]), held_out),
        gallery=_gallery(matcher, images["model"], held_out),
        image_size=size,
    )


def within_groups(score: Score, images: Features, texts: Features) -> Metrics:
    """Recall@1 both ways among the eight images and the eight captions of each group; rows i belong together."""
    groups = chunks(len(images["vec"]), GROUP)
    scores = torch.stack([score(rows(images, group), rows(texts, group)) for group in groups])  # [groups, 8, 8]
    matches = torch.eye(GROUP, dtype=torch.bool).repeat(len(scores), 1)
    return {
        "text_retrieval_recall@1": recall_at(scores.flatten(0, 1), matches, 1).mean().item(),
        "image_retrieval_recall@1": recall_at(scores.transpose(1, 2).flatten(0, 1), matches, 1).mean().item(),
    }


def _tasks(matcher: Matcher, sizes: SampleSizes, size: int) -> dict[str, TaskFigures]:
    """Every class task; those of one object share their images."""
    figures: dict[str, TaskFigures] = {}
    for group in (("colour", "shape", "fill"), ("count",)):
        test = draw_all(f"scenes:test?task={group[0]}&n={sizes.classes}", size)
        train = draw_all(f"scenes?task={group[0]}&n={sizes.baseline}&captions=1", size)
        images = matcher.encode_image(test.pixels)
        figures |= {name: _task(matcher, name, images, test, train) for name in group}
    return figures


def _task(matcher: Matcher, name: str, images: Features, test: Scenes, train: Scenes) -> TaskFigures:
    task, labels = TASKS[name], _labels(name, test)
    classes = len(task.classnames)
    prompts = classifier(matcher.model, matcher.tokenizer, task.classnames, task.templates)
    scores = {
        "model": matcher.score(images, prompts),
        "colours": baseline.class_scores(train.colours, _labels(name, train), test.colours, classes),
        "chance": torch.zeros(len(labels), classes),
    }
    true = torch.nn.functional.one_hot(labels, classes).bool()
    compared = {k: dict(classification(standing(v, true), labels, classes)) for k, v in scores.items()}
    pairs = torch.bincount(labels * classes + scores["model"].argmax(1), minlength=classes**2)
    confusion = tuple(tuple(row) for row in pairs.view(classes, classes).tolist())
    return TaskFigures(classnames=task.classnames, compared=Compared(**compared), confusion=confusion)


def _labels(name: str, scenes: Scenes) -> Tensor:
    return torch.tensor([label(name, scenes.source.scene(row)) for row in range(len(scenes.source))])


def misses(scores: Tensor, scenes: Scenes) -> Misses:
    """What first images share with the right ones, where the caption is false of the first image.

    Args: scores [I, T] of the scenes' images and captions.
    """
    n = len(scenes.captions)
    truth = scenes.source.relevance(scenes.captions, range(n))  # [T, I]
    first = scores.argmax(0).numpy()  # [T]
    wrong = np.flatnonzero(~truth[np.arange(n), first])
    same = _same(scenes.source.rows, wrong, first[wrong])
    a, b = (np.asarray(x).reshape(-1) for x in np.nonzero(~np.eye(n, dtype=np.bool_)))
    return Misses(captions=n, missed=len(wrong), same=same, anywhere=_same(scenes.source.rows, a, b))


def _same(scenes: SceneRows, a: np.ndarray, b: np.ndarray) -> Metrics:
    """Share of pairs of scenes that agree in the background, and in all values of an attribute; {} for no pair."""
    if not len(a):
        return {}
    parts = {"background": scenes[:, :1], "number of objects": (scenes[:, 1::5] >= 0).sum(1, keepdims=True)}
    parts["places"] = scenes[:, 1::5]
    parts |= {f"{name}s": np.sort(scenes[:, k::5], 1) for k, name in enumerate(ATTRIBUTES, start=2)}
    return {name: float((values[a] == values[b]).all(1).mean()) for name, values in parts.items()}


def _gallery(matcher: Matcher, images: Features, scenes: Scenes) -> tuple[QueryHits, ...]:
    queries = [*QUERIES, *((3, caption) for caption in scenes.captions[:2])]
    captions = [text for _, text in queries]
    scores = matcher.score(images, matcher.encode_text(captions)).T  # [T, I]
    truth = scenes.source.relevance(captions, range(len(scenes.captions)))  # [T, I]
    gallery = []
    for (level, text), s, t in zip(queries, scores, truth, strict=True):
        best = s.argsort(descending=True, stable=True)[:BEST].tolist()
        hits = tuple(Hit(row=r, score=float(s[r]), match=bool(t[r])) for r in best)
        gallery.append(QueryHits(level=level, text=text, matches=int(t.sum()), hits=hits))
    return tuple(gallery)
