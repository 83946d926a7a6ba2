"""The validation sets of a run: what `--val` names, and by which task each is evaluated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.data.open import open_source
from kiloword.data.reading import captions_at
from kiloword.evaluation import evaluate, find
from kiloword.evaluation.caption import CaptionOptions
from kiloword.methods.registry import preset
from kiloword.types import BadSample, Source

TRIED = 32  # rows searched for captions
LOCKSTEP = ("retrieval", "zeroshot", "vqa")  # tasks whose ranks can share the work on a sharded model


@dataclass(frozen=True)
class ValSet:
    """A data set that a run is evaluated on."""

    name: str  # in metrics, unique among those of the run
    task: str
    source: Source


def prefix(one: ValSet, every: Sequence[ValSet]) -> str:
    """The beginning of the names of a set's metrics: "val/", or "val/NAME/" where there are several sets."""
    return f"val/{one.name}/" if len(every) > 1 else "val/"


def open_val(recipe: Recipe) -> list[ValSet]:
    """The validation sets of a recipe. Raises: ValueError as `open_sets`."""
    if not recipe.data.val:
        return []
    asks = "questions" in preset(recipe.method, recipe.settings).needs
    return open_sets(recipe.data.val, asks, recipe.model.image.size, "--val")


def open_sets(words: Sequence[str], asks: bool, size: int | None, flag: str) -> list[ValSet]:
    """The data sets that SRC or TASK=SRC name, and the tasks to evaluate them by.

    Args: asks: whether the method answers questions; size: of drawn images in pixels; flag: for messages.
    Raises: ValueError for an unknown task, one set twice, data without captions or classes, and as `open_source`.
    """
    sets, sources = list[tuple[str, str]](), list[Source]()
    for word in words:
        task, _, src = word.partition("=")
        if src and re.fullmatch(r"[A-Za-z][\w+-]*", task) and not Path(word).exists():
            find(task)
            if task == "probe":
                raise ValueError(f"{flag} {word}: a probe needs training data of its own. Use kiloword eval probe.")
        else:
            task, src = "", word
        source = open_source(src, size=size)
        classes = getattr(source, "classnames", None)
        task = task or ("vqa" if asks else "zeroshot" if classes and not _has_captions(source) else "retrieval")
        if task in ("retrieval", "caption") and not _has_captions(source):
            raise ValueError(f"{flag} {src}: no caption in the rows that were tried. Name another task by TASK=SRC.")
        if task == "zeroshot" and not classes:
            raise ValueError(f"{flag} {src} has no class names: put classnames.txt in its folder or the one above.")
        sets.append((task, src))
        sources.append(source)
    return [ValSet(*one) for one in zip(set_names(sets, flag), [task for task, _ in sets], sources, strict=True)]


def _has_captions(source: Source) -> bool:
    for row in range(0, len(source), max(1, len(source) // TRIED))[:TRIED]:
        with suppress(BadSample):
            if captions_at(source, row):
                return True
    return False


def set_names(sets: Sequence[tuple[str, str]], flag: str) -> list[str]:
    """A short name for each (task, SRC): the end of its path, with as many folders as tell the sources apart; with the
    task where one source is evaluated by several. Raises: ValueError for a set that is given twice."""
    twice = next((pair for pair, count in Counter(sets).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{flag} names {twice[1]} twice for the task {twice[0]}: name it once.")
    sources = list(dict.fromkeys(src for _, src in sets))
    short = dict(zip(sources, _told_apart(sources), strict=True))
    tasks = Counter(src for _, src in sets)
    return [f"{task}={short[src]}" if tasks[src] > 1 else short[src] for task, src in sets]


def _told_apart(sources: Sequence[str]) -> list[str]:
    plain = [re.sub(r"\.(tar|csv|tsv|parquet|jsonl?)$", "", src.partition("?")[0].rstrip("/")) for src in sources]
    for parts in range(1, 1 + max((path.count("/") for path in plain), default=0)):
        names = ["/".join(path.split("/")[-parts:]) for path in plain]
        if len(set(names)) == len(names):
            return names
    return [path if plain.count(path) == 1 else src for path, src in zip(plain, sources, strict=True)]


def judged(matcher: Matcher, one: ValSet, train: Source | None) -> dict[str, float]:
    """The metrics of one set that its task prints. Args: train: training data, for the answers that vqa may give."""
    options: dict[str, Any] = {}
    if one.task == "vqa" and not hasattr(one.source, "answers"):
        options["train"] = train
    elif one.task == "caption":
        options["judge"] = CaptionOptions(meteor=False)  # its Java program takes longer than the other metrics
    metrics = evaluate(matcher, one.task, one.source, **options)
    return {name: v for name, v in metrics.items() if isinstance(v, float) and find(one.task).prints(name)}
