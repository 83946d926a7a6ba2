"""Evaluate a model on held-out scenes with complete ground truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.data.scenes.sample import GROUP
from kiloword.data.scenes.source import ScenesSource
from kiloword.data.scenes.world import TASKS, SceneRows, label
from kiloword.data.sources.open import mix, open_source
from kiloword.evaluation import baseline
from kiloword.evaluation.metrics import classification, recall_at, standing
from kiloword.evaluation.retrieval.relevance import true_relevance
from kiloword.evaluation.retrieval.task import retrieval
from kiloword.evaluation.zeroshot.task import classifier
from kiloword.model.encoding import rows
from kiloword.quickstart.contestants import Chance, Colours, Contestant, Scenes, TrainedModel, colour_classes, draw_all
from kiloword.quickstart.results import Compared, Figures, Hit, Metrics, Misses, QueryHits, SampleSizes, TaskFigures
from kiloword.types import Features, Source

BEST = 5  # images shown for a query
ATTRIBUTES = ("shape", "colour", "size", "fill")  # in the order of `world.SceneRows`
QUERIES = (  # beside two full descriptions of held-out scenes
    (1, "a picture with three objects"),
    (1, "something striped"),
    (1, "there is a star"),
    (2, "a large solid red circle"),
    (2, "a small hollow blue thing"),
    (2, "a yellow shape to the left of a green shape"),
)


def judge(matcher: Matcher, trained_on: Sequence[str], sizes: SampleSizes) -> Figures:
    """All figures of a model, beside histograms of colours that learn from `sizes.baseline` training images."""
    size = matcher.model.config.image.size
    seen = baseline.read(_training(trained_on, size), sizes.baseline, size)
    contestants: dict[str, Contestant] = {"model": TrainedModel(matcher), "colours": Colours(seen), "chance": Chance()}
    held_out = draw_all(f"scenes:test?n={sizes.retrieval}", size)
    features = {name: c.images(held_out.pixels) for name, c in contestants.items()}
    texts = {name: c.texts(held_out.captions) for name, c in contestants.items()}
    own = torch.arange(sizes.retrieval)
    scores = matcher.score(features["model"], texts["model"])  # [I, T]

    def general(level: int) -> Compared:
        captions, truth = _of_level(level, sizes.retrieval)
        return _compare(contestants, lambda n, c: dict(true_relevance(c.score, features[n], c.texts(captions), truth)))

    return Figures(
        retrieval=_compare(contestants, lambda n, c: dict(retrieval(c.score, features[n], texts[n], own))),
        general={"1": general(1), "2": general(2)},
        hard=_hard(contestants, draw_all(f"scenes:test?hard=shape&n={sizes.hard}", size)),
        tasks=_tasks(matcher, sizes, size),
        misses=misses(scores, held_out),
        gallery=_gallery(matcher, features["model"], held_out),
        image_size=size,
    )


def _training(sources: Sequence[str], size: int) -> Source:
    opened = [open_source(s, size) for s in sources]
    return opened[0] if len(opened) == 1 else mix(opened, (1.0,) * len(opened))


def _compare(contestants: dict[str, Contestant], measure: Callable[[str, Contestant], Metrics]) -> Compared:
    return Compared(**{name: measure(name, contestant) for name, contestant in contestants.items()})


def _of_level(level: int, n: int) -> tuple[list[str], Tensor]:
    """One caption of a level for each of the retrieval images, and which images each is true of: [T, I] bool."""
    source = open_source(f"scenes:test?n={n}&levels={level}")
    assert isinstance(source, ScenesSource)
    captions = [source.record(row).captions[0] for row in range(n)]
    return captions, torch.from_numpy(source.relevance(captions, range(n)))


def _hard(contestants: dict[str, Contestant], scenes: Scenes) -> Compared:
    def measure(name: str, c: Contestant) -> Metrics:
        return within_groups(c, c.images(scenes.pixels), c.texts(scenes.captions))

    return _compare(contestants, measure)


def within_groups(contestant: Contestant, images: Features, texts: Features) -> Metrics:
    """Recall@1 both ways among the eight images and the eight captions of each group; rows i belong together."""
    scores = torch.stack(
        [contestant.score(rows(images, g), rows(texts, g)) for g in _groups(len(images["vec"]))]
    )  # [groups, 8, 8], images before texts
    own = torch.eye(GROUP, dtype=torch.bool).repeat(len(scores), 1)
    return {
        "text_retrieval_recall@1": recall_at(scores.flatten(0, 1), own, 1).mean().item(),
        "image_retrieval_recall@1": recall_at(scores.transpose(1, 2).flatten(0, 1), own, 1).mean().item(),
    }


def _groups(n: int) -> list[slice]:
    return [slice(start, start + GROUP) for start in range(0, n, GROUP)]


def _tasks(matcher: Matcher, sizes: SampleSizes, size: int) -> dict[str, TaskFigures]:
    """Every class task; those of one object share their images."""
    found: dict[str, TaskFigures] = {}
    for group in (("colour", "shape", "fill"), ("count",)):
        test = draw_all(f"scenes:test?task={group[0]}&n={sizes.classes}", size)
        train = draw_all(f"scenes?task={group[0]}&n={sizes.baseline}&captions=1", size)
        images = matcher.encode_image(test.pixels)
        for name in group:
            found[name] = _task(matcher, name, images, test, train)
    return found


def _task(matcher: Matcher, name: str, images: Features, test: Scenes, train: Scenes) -> TaskFigures:
    task, labels = TASKS[name], _labels(name, test)
    classes = len(task.classnames)
    prompts = classifier(matcher.model, matcher.tokenizer, task.classnames, task.templates)
    scores = {
        "model": matcher.score(images, prompts),
        "colours": colour_classes(train.colours, _labels(name, train), test.colours, classes),
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
    """What first images have in common with the right ones, where the caption is false of them.

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
    return tuple(_found(*query, s, t) for query, s, t in zip(queries, scores, truth, strict=True))


def _found(level: int, text: str, scores: Tensor, truth: np.ndarray) -> QueryHits:
    best = scores.argsort(descending=True, stable=True)[:BEST].tolist()
    hits = tuple(Hit(row=r, score=float(scores[r]), match=bool(truth[r])) for r in best)
    return QueryHits(level=level, text=text, matches=int(truth.sum()), hits=hits)
