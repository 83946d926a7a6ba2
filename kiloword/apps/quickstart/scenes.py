"""`kiloword quickstart`: train on drawn scenes, evaluate the model on scenes that it never saw, write a report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from kiloword import evaluation
from kiloword.api import Matcher, load
from kiloword.config.recipes import Recipe
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.scenes.source import ScenesSource
from kiloword.data.scenes.world import GROUP, TASKS
from kiloword.evaluation.metrics import recall_at
from kiloword.evaluation.retrieval import Score
from kiloword.files import atomic, write_json
from kiloword.methods.defaults import default_recipe
from kiloword.model.encoding import chunks, rows
from kiloword.models.card import record_evaluation
from kiloword.report import (
    Beside,
    Block,
    Figures,
    Gallery,
    Matrix,
    Page,
    Plot,
    Table,
    Text,
    Tile,
    made_by,
    percent,
    say_blocks,
    write_page,
)
from kiloword.terminal import say
from kiloword.terminal.progress import duration
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.training.resolve import with_length
from kiloword.types import Features

SIDES = ("text", "image")
HELD_OUT = 500  # scenes; twice as many for a class task
SHOWN = {  # metrics of the table: name, set, metric
    "caption to image, R@1": ("retrieval", "image_retrieval_recall@1"),
    "caption to image, R@5": ("retrieval", "image_retrieval_recall@5"),
    "image to caption, R@1": ("retrieval", "text_retrieval_recall@1"),
    "image to caption, R@5": ("retrieval", "text_retrieval_recall@5"),
    "captions of one fact, mAP": ("one fact", "image_retrieval_true_map"),
    "captions of one thing, mAP": ("one thing", "image_retrieval_true_map"),
    **{f"{name}, {len(task.classnames)} classes": (name, "acc1") for name, task in TASKS.items()},
    "shape alone differs, R@1 of 8": ("hard", "image_retrieval_recall@1"),
}
QUERIES = (  # in addition to two full descriptions of held-out scenes
    "a picture with three objects",
    "something striped",
    "there is a star",
    "a large solid red circle",
    "a small hollow blue thing",
    "a yellow shape to the left of a green shape",
)


@dataclass(frozen=True)
class Scenes:
    """A set of scenes, drawn."""

    source: ScenesSource
    pixels: Tensor  # uint8 [N, 3, H, W]
    captions: list[str]  # [N], the first of each scene


def draw_all(src: str, size: int) -> Scenes:
    """Draw every image that `src` (scenes:...) names, `size` pixels a side."""
    source = open_source(src, size)
    assert isinstance(source, ScenesSource)
    parts = list(eval_batches(source, size))
    return Scenes(source, torch.cat([part.images for part in parts]), [c[0] for part in parts for c in part.captions])


def recipe(seed: int = 0) -> Recipe:
    """What is trained: every number of the run, in one place.

    Images come in fours that share all but shape, sixteen fours a batch: without them shape is not learned in time,
    and fours leave more to learn besides than the data's groups of eight (docs/log.md).
    Softmax, since general captions (levels 1 and 2) match many scenes of a batch, which a sigmoid loss takes amiss.
    """
    base = default_recipe("clip", "tiny", ("scenes?hard=shape&levels=1:1,2:1,3:6",))
    return replace(base, data=replace(base.data, together=4), steps=1400, seed=seed)


def run(out: Path, steps: int | None = None, seed: int = 0) -> None:
    """Train, evaluate and report into `out`; the same call again resumes. Prints the figures.

    Raises: ValueError when `out` holds another run or cannot be written, or steps is less than 1.
    """
    quickstart(with_length(recipe(seed), 0, steps), out)


def quickstart(chosen: Recipe, out: Path, n: int = HELD_OUT) -> dict[str, dict[str, float]]:
    """A run of a recipe on scenes, evaluated on `n` scenes and reported.

    Writes `results.json`, `report.html` and `example.png` beside what `train` writes. Returns: metrics by set.
    """
    folder = train(chosen, out, options=RunOptions(workers=1))  # two threads of two cores leave room for one
    matcher, log = load(folder), read_metrics(out / "metrics.jsonl")
    held_out = draw_all(f"scenes:test?n={n}", matcher.model.config.image.size)
    confusions = list[Block]()
    metrics = evaluated(matcher, n, confusions)
    facts: dict[str, Any] = {
        "method": chosen.method,
        "size": chosen.size,
        "seed": chosen.seed,
        "images": chosen.steps * chosen.batch,
        "parameters": sum(p.numel() for p in matcher.model.parameters()),
        "training_s": seconds_in_loop(log, chosen.batch),
    }
    write_json(out / "results.json", {"facts": facts, "metrics": metrics})
    record_evaluation(folder, "retrieval", held_out.source.name, n, chosen.steps, metrics["retrieval"])
    with atomic(out / "example.png") as file:
        Image.fromarray(held_out.pixels[0].permute(1, 2, 0).numpy()).save(file, "PNG")
    chances = {"retrieval": 1 / n, "hard": 1 / GROUP, **{name: 1 / len(t.classnames) for name, t in TASKS.items()}}
    lines = [
        (name, metrics[of][metric], chances[of] * int(metric.partition("@")[2] or 1) if of in chances else None)
        for name, (of, metric) in SHOWN.items()
    ]
    table = Table(lines, ("test", "kiloword", "chance"))
    trained = f"{facts['method']} {facts['size']}, {facts['parameters'] / 1e6:.1f} million parameters: "
    trained += f"{facts['images']:,} images in {duration(facts['training_s'])}"
    sections: dict[str, Sequence[Block]] = {
        "In short": [Figures({name: percent(value) for name, value, _ in lines if "R@5" not in name}), Text(trained)],
        "Training": curves(log),
        "Tests": [table, Text(TESTS)],
        "Queries and their best images": galleries(matcher, held_out),
        "Confusions": [Beside([block for block in confusions if isinstance(block, Matrix)])],
        "What to do next": next_steps(out, held_out.captions, chosen.steps),
    }
    write_page(out / "report.html", Page("Kiloword quickstart", INTRO, sections, made_by([str(folder)])))
    say(trained)
    say_blocks([table])
    say(f"model    {folder}", f"figures  {out / 'results.json'}", f"report   {out / 'report.html'}")
    return metrics


INTRO = (
    "A model started from random weights and learned from drawn scenes with captions. This page shows what it can do "
    "with scenes that it never saw.\n\nA scene holds one to three objects of eight shapes, eight colours, two sizes "
    "and three fills. Every caption is a logical statement, so which images it is true of is known exactly."
)
TESTS = (
    "R@k: the right answer is among the first k. A caption of one fact or one thing is true of many images; mAP is the "
    "mean average precision of their ranking. For classes, the model picks the class whose prompts, such as “a picture "
    "of something red”, fit the image best. In the last test the eight scenes of a group differ by shape alone."
)


def evaluated(matcher: Matcher, n: int, blocks: list[Block]) -> dict[str, dict[str, float]]:
    """Metrics of held-out scenes by set. Args: blocks: receives those of the class tasks."""
    sets = {"retrieval": "", "one fact": "&levels=1", "one thing": "&levels=2"}
    metrics = {
        name: evaluation.evaluate(matcher, "retrieval", f"scenes:test?n={n}{more}") for name, more in sets.items()
    }
    for task in TASKS:
        source = f"scenes:test?task={task}&n={2 * n}"
        metrics[task] = evaluation.evaluate(matcher, "zeroshot", source, blocks=blocks)
    hard = draw_all(f"scenes:test?hard=shape&n={n // GROUP * GROUP}", matcher.model.config.image.size)
    images, texts = matcher.encode_image(hard.pixels), matcher.encode_text(hard.captions)
    return metrics | {"hard": within_groups(matcher.score, images, texts)}


def within_groups(score: Score, images: Features, texts: Features) -> dict[str, float]:
    """Recall@1 both ways among the eight images and the eight captions of each group; rows i belong together."""
    groups = chunks(len(images["vec"]), GROUP)
    scores = torch.stack([score(rows(images, group), rows(texts, group)) for group in groups])  # [groups, 8, 8]
    matches = torch.eye(GROUP, dtype=torch.bool).repeat(len(scores), 1)
    return {
        "text_retrieval_recall@1": recall_at(scores.flatten(0, 1), matches, 1).mean().item(),
        "image_retrieval_recall@1": recall_at(scores.transpose(1, 2).flatten(0, 1), matches, 1).mean().item(),
    }


def seconds_in_loop(log: Sequence[dict[str, Any]], batch: int) -> float:
    """Time that the steps took, in all the calls that a resumed run had: a row tells the speed since the row before."""
    timed = [row for row in log if "pairs_per_s" in row]
    before = [0, *(row["step"] for row in timed[:-1])]
    return float(sum((row["step"] - a) * batch / row["pairs_per_s"] for a, row in zip(before, timed, strict=True)))


def curves(log: Sequence[dict[str, Any]]) -> list[Block]:
    """Plots of the loss, and of recall in validation."""
    plots = list[Block]()
    for title, names in {"loss": ["loss"], "recall at 1": [f"val/{side}_retrieval_recall@1" for side in SIDES]}.items():
        points = {name: [(row["step"], row[name]) for row in log if name in row] for name in names}

        def draw(axes: Any, points: dict[str, Any] = points) -> None:
            for name, found in points.items():
                axes.plot(*zip(*found, strict=True), label=name.removeprefix("val/"))
            axes.set_xlabel("step")

        if all(points.values()):
            plots.append(Plot(draw, f"{title} by step", title))
    return [Beside(plots)]


def galleries(matcher: Matcher, scenes: Scenes) -> list[Block]:
    """The first five images of each query; outlined where the query is true of them."""
    queries, pixels = [*QUERIES, *scenes.captions[:2]], scenes.pixels.permute(0, 2, 3, 1).numpy()
    scores = matcher.score(matcher.encode_image(scenes.pixels), matcher.encode_text(queries)).T  # [T, I]
    truth = scenes.source.relevance(queries, range(len(pixels)))  # [T, I]
    shown = list[Block]([Text(f"The first five of {len(pixels)} held-out scenes. Outlined: the query is true of it.")])
    for query, of_images, true in zip(queries, scores, truth, strict=True):
        best = of_images.argsort(descending=True, stable=True)[:5].tolist()
        tiles = [Tile(pixels[i], [f"{of_images[i]:.2f}"], bool(true[i]) or None) for i in best]
        shown.append(Gallery(tiles, f"{query} (true of {int(true.sum())})"))
    return shown


def next_steps(out: Path, captions: Sequence[str], steps: int) -> list[Block]:
    """Commands to go on with."""
    model, example = shlex.quote(str(out / "model")), shlex.quote(str(out / "example.png"))
    commands = {
        "Score an image against texts": f"kiloword score {model} --images {example} --texts {shlex.quote(captions[0])}",
        "Test it on other captions": f"kiloword eval retrieval {model} --data 'scenes:test?levels=2&captions=3'",
        "Train longer": f"kiloword quickstart --out {shlex.quote(f'{out}-longer')} --steps {2 * steps}",
        "Train on your own images": "kiloword train siglip --data photos/train --val photos/dev --out runs/photos",
        "Use the model in Python": f"import kiloword\nmatcher = kiloword.load({str(out / 'model')!r})\n"
        f"matcher.score([{str(out / 'example.png')!r}], [{captions[0]!r}, 'something red'])  # [images, texts]",
    }
    return [block for what, typed in commands.items() for block in (Text(what), Text(typed, "code"))]
