"""HTML report of a quickstart, from its results, without the model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from kiloword import report
from kiloword.quickstart.contestants import Scenes
from kiloword.quickstart.results import Compared, Figures, QueryHits, QuickstartResults
from kiloword.quickstart.words import SIDES, weaknesses
from kiloword.report.parts import duration, percent

HEADER = ("kiloword", "colours alone", "chance")
LEVELS = {1: "One fact", 2: "One thing, or how two things lie", 3: "Whole scenes"}


def page(results: QuickstartResults, out: Path, metrics: Sequence[dict[str, Any]], held_out: Scenes) -> str:
    """The whole document. Args: metrics, rows of `metrics.jsonl`; held_out, the scenes that retrieval was tested on."""
    judged = results.judged
    sections = [
        ("In short", _headline(results)),
        ("Training", _training(results, metrics)),
        ("Retrieval", _retrieval(results)),
        ("Zero-shot classification", _naming(results)),
        ("Hard set: only shapes differ", _hard(results)),
        ("Queries and their best images", _gallery(judged.gallery, held_out)),
        ("Confusions", _confusions(judged)),
        ("What it still gets wrong", _wrong(judged)),
        ("What to do next", _next(results, out, held_out.captions)),
    ]
    return report.page("Kiloword quickstart", _intro(results), sections)


def _intro(results: QuickstartResults) -> str:
    f = results.facts
    return (
        f"A {f.method} model of {f.parameters / 1e6:.1f} million parameters started from random weights and was shown "
        f"{f.images:,} drawn scenes with captions in {duration(f.training_s)}. This page tells what it can do with "
        "scenes that it never saw.\n\n"
        "A scene holds one to three objects of eight shapes, eight colours, two sizes and three fills. Every caption "
        "is a logical statement, so which images it is true of is known exactly."
    )


def _headline(results: QuickstartResults) -> str:
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


def _training(results: QuickstartResults, metrics: Sequence[dict[str, Any]]) -> str:
    f = results.facts
    loss = [(row["step"], row["loss"]) for row in metrics if "loss" in row]
    text = (
        f"{f.steps:,} steps of {f.batch} images, size {f.size}, seed {f.seed}, data {' '.join(f.data)}. "
        f"Training took {duration(f.training_s)}, the tests on this page {duration(f.judging_s)}."
    )
    parts = [report.paragraph(text)]
    if loss:
        parts.append(report.line_plot({"loss": loss}, "step", "loss", smooth=1 + len(loss) // 30))
    if validated := _validated(metrics):
        parts.append(report.line_plot(validated, "step", "recall at 1, validation"))
    return "".join(parts)


def _validated(metrics: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    sides = {"text retrieval": "val/text_retrieval_recall@1", "image retrieval": "val/image_retrieval_recall@1"}
    series = {name: [(row["step"], row[key]) for row in metrics if key in row] for name, key in sides.items()}
    return {name: points for name, points in series.items() if len(points) > 1}


def _row(name: str, compared: Compared, metric: str) -> list[str | float | None]:
    return [name, compared.model[metric], compared.colours[metric], compared.chance[metric]]


def _retrieval(results: QuickstartResults) -> str:
    j, n = results.judged, results.sizes.retrieval
    own = [
        _row(f"{name}, R@{k}", j.retrieval, f"{side}_recall@{k}") for side, name in SIDES.items() for k in (1, 5, 10)
    ]
    general = [
        _row(f"{LEVELS[level].lower()}, {name}", compared, f"image_retrieval_true_{metric}")
        for level, compared in ((1, j.general["1"]), (2, j.general["2"]))
        for metric, name in (("map", "mAP"), ("recall@1", "first is true"))
    ]
    return (
        _table(own, "full captions", f"{n} held-out scenes, a full caption each")
        + _table(general, "general captions", f"{n} general captions, the same {n} scenes")
        + report.paragraph(
            "R@k: the one right answer is among the first k. A general caption is true of many images; all of them "
            "count: mAP is the mean average precision of their ranking."
        )
        + report.paragraph(_colours(results, "the captions of", "Like the model, it learned from captions."))
    )


def _table(rows: Sequence[Sequence[str | float | None]], name: str, caption: str) -> str:
    return report.table(rows, [name, *HEADER], caption=caption, strong=1, digits=3)


def _colours(results: QuickstartResults, what: str, more: str) -> str:
    return (
        f"Colours alone: a histogram of each image's colours, and least squares on {what} "
        f"{results.sizes.baseline:,} training images. It sees neither shapes nor places. {more}"
    )


def _naming(results: QuickstartResults) -> str:
    rows = [
        _row(f"{name}, {len(t.classnames)} classes", t.compared, "acc1") for name, t in results.judged.tasks.items()
    ]
    return (
        _table(rows, "accuracy", f"{results.sizes.classes:,} held-out scenes for each row")
        + report.paragraph(
            "The model never saw a label: it picks the class whose prompts, such as “a picture of something red”, fit "
            "the image best. Scenes hold one object, for the count one to three."
        )
        + report.paragraph(_colours(results, "the class labels of", "It is supervised, which favours it."))
    )


def _hard(results: QuickstartResults) -> str:
    hard, n = results.judged.hard, results.sizes.hard
    rows = [_row(f"{name}, R@1", hard, f"{side}_recall@1") for side, name in SIDES.items()]
    return _table(rows, "within the group", f"{n // 8} groups of eight held-out scenes") + report.paragraph(
        "The scenes of a group have the same objects at the same places, in the same colours, sizes and fills; every "
        "object takes each of the eight shapes once. Shapes also differ in area, which is all that a histogram of "
        "colours can tell of them."
    )


def _gallery(found: Sequence[QueryHits], held_out: Scenes) -> str:
    images = held_out.pixels.permute(0, 2, 3, 1).numpy()  # [I, H, W, 3]
    parts = [report.paragraph(f"The first five of {len(images)} held-out scenes. Outlined: the query is true of it.")]
    for level, name in LEVELS.items():
        these = [f for f in found if f.level == level]
        counts = [str(f.matches) for f in these]
        parts.append(f'<h3 style="margin:2.5rem 0 .5rem;font-size:1.05rem">{escape(name)}</h3>')
        parts.append(report.paragraph(f"They are true of {_and(counts)} of the {len(images)} scenes."))
        parts.append(report.gallery([(f.text, [(images[h.row], h.score, h.match) for h in f.hits]) for f in these]))
    return "".join(parts)


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _confusions(judged: Figures) -> str:
    maps = [
        report.heat_map(
            np.array(t.confusion, np.int64),
            t.classnames,
            t.classnames,
            caption=f"{name.capitalize()}, {percent(t.compared.model['acc1'])} right",
            column_label="named",
        )
        for name, t in judged.tasks.items()
    ]
    return report.paragraph("Each row holds the scenes of one class; a framed cell is the right answer.") + report.grid(
        maps
    )


def _wrong(judged: Figures) -> str:
    text = "".join(f'<li style="margin:0 0 .6rem">{escape(sentence)}</li>' for sentence in weaknesses(judged))
    misses = judged.misses
    parts = [f'<ul style="max-width:42rem;margin:0 0 1.5rem;padding-left:1.2rem">{text}</ul>']
    if misses.missed:
        rows: list[list[str | float | None]] = [
            [name, share, misses.anywhere[name]] for name, share in misses.same.items()
        ]
        parts.append(
            report.table(
                rows,
                ["the same in both", "wrong and right", "any two images"],
                caption=f"What the {misses.missed} wrong first images share with the right ones",
                strong=1,
                digits=3,
            )
        )
    return "".join(parts)


def _next(results: QuickstartResults, out: Path, captions: Sequence[str]) -> str:
    f, q = results.facts, shlex.quote
    model, other = q(str(out / "model")), q(f"{out}-longer")
    texts = " ".join(q(caption) for caption in captions[:2])
    commands = [
        (
            "Score an image against texts",
            f"kiloword score {model} --images {q(str(out / 'example.png'))} --texts {texts}",
        ),
        ("Test it on other captions", f"kiloword eval retrieval {model} --data 'scenes:test?levels=2&captions=3'"),
        ("Train longer", f"kiloword quickstart --out {other} --steps {2 * f.steps}"),
        ("Train on your own images", "kiloword train siglip --data photos/train --val photos/dev --out runs/photos"),
        ("Look at your data first", "kiloword data stats photos/train --png samples.png"),
        ("Use the model in Python", _python(out, captions[0])),
    ]
    return "".join(report.paragraph(what) + report.code(typed) for what, typed in commands)


def _python(out: Path, caption: str) -> str:
    return (
        "import kiloword\n"
        f"matcher = kiloword.load({str(out / 'model')!r})\n"
        f"matcher.score([{str(out / 'example.png')!r}], [{caption!r}, 'something red'])  # [images, texts]"
    )
