"""HTML report of a quickstart, from its results, without the model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kiloword import report
from kiloword.apps.quickstart.judge import Scenes
from kiloword.apps.quickstart.results import Compared, Figures, QueryHits, QuickstartResults
from kiloword.apps.quickstart.words import SIDES, weaknesses
from kiloword.report import Html, duration, percent, section

LEVELS = {1: "One fact", 2: "One thing, or how two things lie", 3: "Whole scenes"}


def page(results: QuickstartResults, out: Path, metrics: Sequence[dict[str, Any]], held_out: Scenes) -> str:
    """The whole document. Args: metrics, rows of `metrics.jsonl`; held_out, the scenes that retrieval was tested on."""
    judged = results.judged
    html = report.page(
        "Kiloword quickstart",
        _intro(results),
        [
            section("In short", _headline(results)),
            section("Training", *_training(results, metrics)),
            section("Retrieval", *_retrieval(results)),
            section("Zero-shot classification", *_naming(results)),
            section("Hard set: only shapes differ", *_hard(results)),
            section("Queries and their best images", *_gallery(judged.gallery, held_out)),
            section("Confusions", *_confusions(judged)),
            section("What it still gets wrong", *_wrong(judged)),
            section("What to do next", *_next(results, out, held_out.captions)),
        ],
    )
    return report.signed(html, report.made_by([str(out / "model")]))


def _intro(results: QuickstartResults) -> str:
    f = results.facts
    return (
        f"A {f.method} model of {f.parameters / 1e6:.1f} million parameters started from random weights and was shown "
        f"{f.images:,} drawn scenes with captions in {duration(f.training_s)}. This page shows what it can do with "
        "scenes that it never saw.\n\n"
        "A scene holds one to three objects of eight shapes, eight colours, two sizes and three fills. Every caption "
        "is a logical statement, so which images it is true of is known exactly."
    )


def _headline(results: QuickstartResults) -> Html:
    judged, f = results.judged, results.facts
    figures = [
        (judged.retrieval.model["image_retrieval_recall@1"], "of full captions find their own image first"),
        (judged.retrieval.model["text_retrieval_recall@1"], "of images find their own caption first"),
        *(
            (t.compared.model["acc1"], f"{name} right, of {len(t.classnames)} classes")
            for name, t in judged.tasks.items()
        ),
        (judged.hard.model["image_retrieval_recall@1"], "right among eight that differ by shape alone"),
    ]
    shown = [(percent(value), name) for value, name in figures]
    return report.headline([*shown, (duration(f.training_s + f.judging_s), "training and testing")])


def _training(results: QuickstartResults, metrics: Sequence[dict[str, Any]]) -> Iterator[str]:
    f = results.facts
    yield (
        f"{f.steps:,} steps of {f.batch} images, size {f.size}, seed {f.seed}, data {' '.join(f.data)}. "
        f"Training took {duration(f.training_s)}, the tests on this page {duration(f.judging_s)}."
    )
    if loss := _curve(metrics, "loss"):
        yield report.line_plot({"loss": loss}, "step", "loss", smooth=1 + len(loss) // 30)
    sides = {f"{side} retrieval": _curve(metrics, f"val/{side}_retrieval_recall@1") for side in ("text", "image")}
    if validated := {name: points for name, points in sides.items() if len(points) > 1}:
        yield report.line_plot(validated, "step", "recall at 1, validation")


def _curve(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in metrics if name in row]


Row = tuple[str, Compared, str]
"""Name, a measurement, and which of its metrics."""


def _table(rows: Iterable[Row], name: str, caption: str) -> Html:
    cells = [[row, *(each[metric] for each in (c.model, c.colours, c.chance))] for row, c, metric in rows]
    header = [name, "kiloword", "colours alone", "chance"]
    return report.table(cells, header, caption=caption, best_of_row=(1, 2, 3), digits=3)


def _retrieval(results: QuickstartResults) -> Iterator[str]:
    j, n = results.judged, results.sizes.retrieval
    full = [(f"{name}, R@{k}", j.retrieval, f"{side}_recall@{k}") for side, name in SIDES.items() for k in (1, 5, 10)]
    general = [
        (f"{LEVELS[level].lower()}, {name}", compared, f"image_retrieval_true_{metric}")
        for level, compared in ((1, j.general["1"]), (2, j.general["2"]))
        for metric, name in (("map", "mAP"), ("recall@1", "first is true"))
    ]
    yield _table(full, "full captions", f"{n} held-out scenes, a full caption each")
    yield _table(general, "general captions", f"{n} general captions, the same {n} scenes")
    yield (
        "R@k: the one right answer is among the first k. A general caption is true of many images; all of them "
        "count: mAP is the mean average precision of their ranking."
    )
    yield _colours(results, "the captions of", "Like the model, it learned from captions.")


def _colours(results: QuickstartResults, what: str, more: str) -> str:
    return (
        f"Colours alone: a histogram of each image's colours, and least squares on {what} "
        f"{results.sizes.baseline:,} training images. It sees neither shapes nor places. {more}"
    )


def _naming(results: QuickstartResults) -> Iterator[str]:
    tasks = results.judged.tasks
    rows = [(f"{name}, {len(task.classnames)} classes", task.compared, "acc1") for name, task in tasks.items()]
    yield _table(rows, "accuracy", f"{results.sizes.classes:,} held-out scenes for each row")
    yield (
        "The model never saw a label: it picks the class whose prompts, such as “a picture of something red”, fit "
        "the image best. Scenes hold one object, for the count one to three."
    )
    yield _colours(results, "the class labels of", "It is supervised, which favours it.")


def _hard(results: QuickstartResults) -> Iterator[str]:
    rows = [(f"{name}, R@1", results.judged.hard, f"{side}_recall@1") for side, name in SIDES.items()]
    yield _table(rows, "within the group", f"{results.sizes.hard // 8} groups of eight held-out scenes")
    yield (
        "The scenes of a group have the same objects at the same places, in the same colours, sizes and fills; every "
        "object takes each of the eight shapes once. Shapes also differ in area, which is all that a histogram of "
        "colours can tell of them."
    )


def _gallery(queries: Sequence[QueryHits], held_out: Scenes) -> Iterator[str]:
    images = held_out.pixels.permute(0, 2, 3, 1).numpy()  # [I, H, W, 3]
    yield f"The first five of {len(images)} held-out scenes. Outlined: the query is true of it."
    for level, name in LEVELS.items():
        these = [query for query in queries if query.level == level]
        *others, last = [str(query.matches) for query in these]
        counts = f"{', '.join(others)} and {last}" if others else last
        yield report.heading(name)
        yield f"They are true of {counts} of the {len(images)} scenes."
        yield report.gallery([(q.text, [(images[h.row], h.score, h.match) for h in q.hits]) for q in these])


def _confusions(judged: Figures) -> Iterator[str]:
    yield "Each row holds the scenes of one class; a framed cell is the right answer."
    yield report.grid(
        report.heat_map(
            np.array(t.confusion, np.int64),
            t.classnames,
            t.classnames,
            caption=f"{name.capitalize()}, {percent(t.compared.model['acc1'])} right",
            column_label="named",
        )
        for name, t in judged.tasks.items()
    )


def _wrong(judged: Figures) -> Iterator[str]:
    yield report.bullets(weaknesses(judged))
    misses = judged.misses
    rows = [[name, share, misses.anywhere[name]] for name, share in misses.same.items()]
    header = ["the same in both", "wrong and right", "any two images"]
    caption = f"What the {misses.missed} wrong first images share with the right ones"
    yield report.table(rows, header, caption=caption, strong=1, digits=3)


def _next(results: QuickstartResults, out: Path, captions: Sequence[str]) -> Iterator[str]:
    q = shlex.quote
    model, example = q(str(out / "model")), q(str(out / "example.png"))
    texts = " ".join(map(q, captions[:2]))
    longer = f"{q(f'{out}-longer')} --steps {2 * results.facts.steps}"
    commands = {
        "Score an image against texts": f"kiloword score {model} --images {example} --texts {texts}",
        "Test it on other captions": f"kiloword eval retrieval {model} --data 'scenes:test?levels=2&captions=3'",
        "Train longer": f"kiloword quickstart --out {longer}",
        "Train on your own images": "kiloword train siglip --data photos/train --val photos/dev --out runs/photos",
        "Look at your data first": "kiloword data stats photos/train --png samples.png",
        "Use the model in Python": (
            "import kiloword\n"
            f"matcher = kiloword.load({str(out / 'model')!r})\n"
            f"matcher.score([{str(out / 'example.png')!r}], [{captions[0]!r}, 'something red'])  # [images, texts]"
        ),
    }
    for what, typed in commands.items():
        yield what
        yield report.code(typed)
