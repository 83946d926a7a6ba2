"""`kiloword quickstart`: train on drawn scenes, evaluate the model on scenes that it never saw, write a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword import evaluation
from kiloword.api import Matcher, load
from kiloword.apps.quickstart.results import REPORT, RESULTS, export, sentence, table, tell
from kiloword.config.recipes import HeadConfig, ImageConfig, Recipe, TextConfig
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.scenes.source import ScenesSource, parse_scenes
from kiloword.data.scenes.world import TASKS
from kiloword.files import atomic, write_json
from kiloword.methods.defaults import default_recipe
from kiloword.models.card import record_retrieval
from kiloword.report import Block, Gallery, Matrix, Page, Text, Tile, made_by, write_page
from kiloword.runs.page import curve_plot
from kiloword.runs.run import Run
from kiloword.terminal import say
from kiloword.training.loop import RunOptions, train
from kiloword.training.run_folder import earlier

HELD_OUT = 500  # scenes; twice as many for a class task
TRAINS = 300  # seconds of training at most; a slower machine makes fewer steps
TRIAL = 10  # steps that measure the rate
DRAWN = 160  # pixels of a scene on the page
QUERIES = (  # after two full descriptions of held-out scenes
    "a large red shape in the top left",
    "a yellow shape to the left of a green shape",
    "a picture with three objects",
    "something striped",
    "a large red circle",
)
INTRO = (
    "A model started from random weights and learned from drawn scenes with captions. This page shows what it can do "
    "with scenes that it never saw.\n\nA scene holds one to three objects of eight shapes, eight colours, two sizes "
    "and three fills. Every caption is a logical statement, so which images it is true of is known exactly."
)
TESTS = (
    "R@k: the right answer is among the first k. A caption of one fact or one thing is true of many images; mAP is the "
    "mean average precision of their ranking. For classes, the model picks the class whose prompts, such as “a picture "
    "of something red”, fit the image best."
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
    """What is trained: every number of the run, in one place. It was searched in fp32 (research/log.md).

    A patch is a cell of the scenes' grid. Stem and pooling are CLIP's, so that other libraries can load an export.
    Softmax, since general captions (levels 1 and 2) match many scenes of a batch, which a sigmoid loss takes amiss.
    """
    base = default_recipe("clip", "tiny", ("scenes?levels=1:1,2:1,3:8&captions=3",))
    width: dict[str, Any] = {"width": 96, "heads": 3, "mlp": 384}
    init = 0.1  # small positions: places are learned early
    model = replace(
        base.model,
        image=ImageConfig(size=48, depth=3, init_std=init, **width),
        text=TextConfig(context=64, vocab=base.model.text.vocab, depth=2, init_std=init, **width),
        head=HeadConfig(dim=96),
    )
    return replace(base, model=model, optim=replace(base.optim, lr=2e-3, muon_lr=1e-2), steps=800, batch=128, seed=seed)


def sized(chosen: Recipe, out: Path) -> Recipe:
    """The recipe with at most as many steps as this machine makes in TRAINS seconds, measured by a short run.

    A run that `out` holds keeps its number of steps.
    """
    if before := earlier(out):
        return replace(chosen, steps=before.recipe.steps)
    short = replace(chosen, steps=TRIAL, data=replace(chosen.data, sources=(f"scenes?n={TRIAL * chosen.batch}",)))
    with TemporaryDirectory() as folder:
        train(short, folder, options=RunOptions(workers=1, log_every=TRIAL // 2, quiet=True))
        rate = Run(Path(folder)).curves["pairs_per_s"][1][-1] / chosen.batch  # steps a second, warm
    steps = min(chosen.steps, max(TRIAL, int(TRAINS * rate)))
    if steps < chosen.steps:
        say(
            f"This machine makes {rate:.2g} steps a second: to end in about {TRAINS / 60:g} minutes, the run makes "
            f"{steps} of {chosen.steps} steps and learns less. For all of them, add --steps {chosen.steps}."
        )
    return replace(chosen, steps=steps)


def quickstart(chosen: Recipe, out: Path, n: int = HELD_OUT) -> dict[str, dict[str, float]]:
    """Run a recipe on scenes, evaluate it on `n` scenes and report into `out`; the same call again resumes.

    Writes `results.json`, `report.html` and `example.png` beside what `train` writes. Returns: metrics by set.
    Raises: ValueError when `out` holds another run.
    """
    # two threads of two cores leave room for one worker
    folder = train(chosen, out, options=RunOptions(workers=1, extend=True))
    matcher = load(folder)
    held_out = draw_all(f"scenes:test?n={n}", matcher.model.config.image.size)
    metrics, matrices = evaluated(matcher, n)
    confusion = worst(matrices)
    record_retrieval(folder, held_out.source.name, n, chosen.steps, metrics["retrieval"])
    with atomic(out / "example.png") as file:
        Image.fromarray(held_out.pixels[0].permute(1, 2, 0).numpy()).save(file, "PNG")
    curves = Run(out).curves
    sections: dict[str, Sequence[Block]] = {
        "Queries and their best images": galleries(matcher, held_out),
        "What it confuses": [Text(sentence(confusion)), *([matrices[confusion["task"]]] if confusion else [])],
        "Figures": [table(metrics), Text(TESTS)],
        "Training": [curve_plot("loss", {"loss": curves["loss"]})] if "loss" in curves else [],
        "Use the model": [Text("This exports the model to another library:"), Text(export(out), "code")],
    }
    write_page(out / REPORT, Page("Kiloword quickstart", INTRO, sections, made_by([str(folder)])))
    results = {"metrics": metrics, "confusion": confusion, "run": {"seed": chosen.seed, "steps": chosen.steps}}
    write_json(out / RESULTS, results)  # last: it says that all is there
    tell(out, results)
    return metrics


def evaluated(matcher: Matcher, n: int) -> tuple[dict[str, dict[str, float]], dict[str, Matrix]]:
    """Metrics of held-out scenes by set, and the confusion matrix of each class task."""
    tasks = {"retrieval": "", "one fact": "&levels=1", "one thing": "&levels=2"}
    metrics, matrices = dict[str, dict[str, float]](), dict[str, Matrix]()
    for name, more in tasks.items():
        metrics[name] = evaluation.evaluate(matcher, "retrieval", f"scenes:test?n={n}{more}")
    for task in TASKS:
        blocks = list[Block]()
        metrics[task] = evaluation.evaluate(matcher, "zeroshot", f"scenes:test?task={task}&n={2 * n}", blocks=blocks)
        matrices[task] = next(block for block in blocks if isinstance(block, Matrix))
    return metrics, matrices


def worst(matrices: Mapping[str, Matrix]) -> dict[str, Any]:
    """The two classes of a task that are confused most, by share of the images of the true one; {}: none are."""
    largest, found = 0.0, dict[str, Any]()
    for task, matrix in matrices.items():
        counts = matrix.values
        shares = counts * ~np.eye(len(counts), dtype=bool) / np.maximum(counts.sum(1, keepdims=True), 1)
        true, named = divmod(int(shares.argmax()), len(counts))
        if shares.max() > largest:
            largest = float(shares.max())
            found = {"task": task, "true": matrix.rows[true], "named": matrix.columns[named]}
            found |= {"count": int(counts[true, named]), "of": int(counts[true].sum())}
    return found


def galleries(matcher: Matcher, scenes: Scenes) -> list[Block]:
    """The first five images of each query; outlined where the query is true of them."""
    queries, large = [*scenes.captions[:2], *QUERIES], parse_scenes(scenes.source.name, DRAWN)
    scores = matcher.score(matcher.encode_image(scenes.pixels), matcher.encode_text(queries)).T  # [T, I]
    truth = scenes.source.relevance(queries, range(len(large)))  # [T, I]
    shown = list[Block]([Text(f"The first five of {len(large)} held-out scenes. Outlined: the query is true of it.")])
    for query, of_images, true in zip(queries, scores, truth, strict=True):
        best = of_images.argsort(descending=True, stable=True)[:5].tolist()
        tiles = [Tile(large.draw(large.scene(i)), [f"{of_images[i]:.2f}"], bool(true[i])) for i in best]
        shown.append(Gallery(tiles, f"{query} (true of {int(true.sum())})"))
    return shown
