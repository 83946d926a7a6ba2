"""`kiloword quickstart`: train on drawn scenes, evaluate the model on scenes that it never saw, write a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from kiloword.report import Block, Gallery, Page, Table, Text, Tile, made_by, say_blocks, write_page
from kiloword.runs.page import curve_plot
from kiloword.runs.run import Run
from kiloword.terminal import say
from kiloword.training.loop import RunOptions, train
from kiloword.types import Features

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
    "a large solid red circle",
    "a small hollow blue thing",
    "a yellow shape to the left of a green shape",
)
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
    and fours leave more to learn besides than the data's groups of eight (research/log.md).
    Softmax, since general captions (levels 1 and 2) match many scenes of a batch, which a sigmoid loss takes amiss.
    """
    base = default_recipe("clip", "tiny", ("scenes?hard=shape&levels=1:1,2:1,3:6",))
    return replace(base, data=replace(base.data, together=4), steps=1400, seed=seed)


def quickstart(chosen: Recipe, out: Path, n: int = HELD_OUT) -> dict[str, dict[str, float]]:
    """Run a recipe on scenes, evaluate it on `n` scenes and report into `out`; the same call again resumes.

    Writes `results.json`, `report.html` and `example.png` beside what `train` writes. Returns: metrics by set.
    Raises: ValueError when `out` holds another run.
    """
    folder = train(chosen, out, options=RunOptions(workers=1))  # two threads of two cores leave room for one
    matcher = load(folder)
    held_out = draw_all(f"scenes:test?n={n}", matcher.model.config.image.size)
    metrics = evaluated(matcher, n)
    write_json(out / "results.json", {"metrics": metrics})
    record_evaluation(folder, "retrieval", held_out.source.name, n, chosen.steps, metrics["retrieval"])
    with atomic(out / "example.png") as file:
        Image.fromarray(held_out.pixels[0].permute(1, 2, 0).numpy()).save(file, "PNG")
    table = Table([[name, metrics[of][metric]] for name, (of, metric) in SHOWN.items()], ("test", "kiloword"))
    curves = Run(out).curves
    sections: dict[str, Sequence[Block]] = {
        "Tests": [table, Text(TESTS)],
        "Training": [curve_plot("loss", {"loss": curves["loss"]})] if "loss" in curves else [],
        "Queries and their best images": galleries(matcher, held_out),
    }
    write_page(out / "report.html", Page("Kiloword quickstart", INTRO, sections, made_by([str(folder)])))
    say_blocks([table])
    say(f"model    {folder}", f"figures  {out / 'results.json'}", f"report   {out / 'report.html'}")
    return metrics


def evaluated(matcher: Matcher, n: int) -> dict[str, dict[str, float]]:
    """Metrics of held-out scenes by set."""
    tasks = {"retrieval": "", "one fact": "&levels=1", "one thing": "&levels=2"}
    metrics = {
        name: evaluation.evaluate(matcher, "retrieval", f"scenes:test?n={n}{more}") for name, more in tasks.items()
    }
    for task in TASKS:
        metrics[task] = evaluation.evaluate(matcher, "zeroshot", f"scenes:test?task={task}&n={2 * n}")
    hard = draw_all(f"scenes:test?hard=shape&n={n // GROUP * GROUP}", matcher.model.config.image.size)
    images, texts = matcher.encode_image(hard.pixels), matcher.encode_text(hard.captions)
    return metrics | {"hard": within_groups(matcher.score, images, texts)}


def within_groups(score: Score, images: Features, texts: Features) -> dict[str, float]:
    """Recall@1 both ways among the eight images and the eight captions of each group; rows i belong together."""
    groups = chunks(len(images["vec"]), GROUP)
    scores = torch.stack([score(rows(images, group), rows(texts, group)) for group in groups])  # [groups, 8, 8]
    matches = torch.eye(GROUP, dtype=torch.bool).repeat(len(scores), 1)
    ways = {"text": scores, "image": scores.transpose(1, 2)}
    return {f"{n}_retrieval_recall@1": recall_at(x.flatten(0, 1), matches, 1).mean().item() for n, x in ways.items()}


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
