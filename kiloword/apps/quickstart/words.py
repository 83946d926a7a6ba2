"""Sentences of the quickstart report, derived from its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kiloword.apps.quickstart.results import Compared, Figures, Metrics, Misses, QuickstartResults, TaskFigures
from kiloword.report import duration, percent

BLIND, SURE = 0.15, 0.95  # of the way from chance to perfect: hardly better than chance, and no weakness
SIDES = {"image_retrieval": "caption to image", "text_retrieval": "image to caption"}


def weaknesses(judged: Figures) -> list[str]:
    """What the model still gets wrong, worst first."""
    rated = [(skill(t.compared), _of_task(name, t)) for name, t in judged.tasks.items()]
    rated.append((skill(judged.hard, "image_retrieval_recall@1"), _of_hard(judged.hard)))
    sentences = [sentence for worth, sentence in sorted(rated) if worth < SURE]
    sentences += _of_misses(judged.misses)
    sentences += _of_colours(judged)
    return sentences or ["None of these tests is hard enough to show what this model gets wrong."]


def skill(compared: Compared, metric: str = "acc1") -> float:
    """How far the model is from chance (0) to perfect (1)."""
    chance = compared.chance[metric]
    return (compared.model[metric] - chance) / (1 - chance)


def _of_task(name: str, task: TaskFigures) -> str:
    acc, chance = task.compared.model["acc1"], task.compared.chance["acc1"]
    if skill(task.compared) < BLIND:
        start = f"It can hardly tell the {name}: {percent(acc)} right, where guessing gives {percent(chance)}."
    else:
        start = f"It names the {name} of {percent(acc)} of the scenes correctly."
    return " ".join([start, *_confused(task)])


def _confused(task: TaskFigures) -> Iterator[str]:
    """The pair of classes that it takes for each other most often."""
    counts = np.array(task.confusion)
    totals = np.maximum(counts.sum(1), 1)
    shares = (counts / totals[:, None]) * (1 - np.eye(len(counts)))
    true, guess = np.unravel_index(int(shares.argmax()), shares.shape)
    if shares[true, guess] > 0:
        names = task.classnames
        yield f"Its most frequent error: “{names[guess]}” for {percent(shares[true, guess])} of “{names[true]}”."


def _of_hard(hard: Compared) -> str:
    metric = "image_retrieval_recall@1"
    verdict = "hardly better than guessing" if skill(hard, metric) < BLIND else "better than guessing, not reliably"
    return (
        f"Among eight scenes that differ by shape alone, {percent(hard.model[metric])} of the captions find their "
        f"image: {verdict} ({percent(hard.chance[metric])})."
    )


def _of_misses(misses: Misses) -> Iterator[str]:
    """Which attributes the wrongly found images lack."""
    if not misses.missed:
        return
    yield (
        f"{misses.missed} of {misses.captions} full captions find first an image that they are false of. "
        f"What those have in common with the right image most often: {_named(misses.same, best=True)}; "
        f"least often: {_named(misses.same, best=False)}."
    )


def _named(shares: Metrics, best: bool) -> str:
    ordered = sorted(shares, key=shares.__getitem__, reverse=best)[:2]
    return " and ".join(f"{name} ({percent(shares[name])})" for name in ordered)


def _of_colours(judged: Figures) -> Iterator[str]:
    """Tests in which colours alone are better than the model."""
    pairs = {f"the {name}": (t.compared, "acc1") for name, t in judged.tasks.items()}
    pairs |= {f"full captions, {SIDES[s]}": (judged.retrieval, f"{s}_recall@1") for s in SIDES}
    pairs["captions of one fact"] = (judged.general["1"], "image_retrieval_true_map")
    pairs["captions of one thing"] = (judged.general["2"], "image_retrieval_true_map")
    pairs["scenes that differ by shape"] = (judged.hard, "image_retrieval_recall@1")
    ahead = [name for name, (c, metric) in pairs.items() if c.colours[metric] > c.model[metric]]
    if ahead:
        yield f"A histogram of colours, which learned from captions or labels, does better at: {'; '.join(ahead)}."


def summary(results: QuickstartResults) -> str:
    """What a terminal shows: what was trained, and the main figures as columns."""
    f, j = results.facts, results.judged
    rows: list[tuple[str, ...]] = [("", "kiloword", "colours*", "chance")]
    for side, name in SIDES.items():
        rows += [_cells(f"{name}, R@{k}", j.retrieval, f"{side}_recall@{k}") for k in (1, 5)]
    rows += [_cells(f"{name}, {len(t.classnames)} classes", t.compared, "acc1") for name, t in j.tasks.items()]
    rows.append(_cells("shape alone differs, R@1 of 8", j.hard, "image_retrieval_recall@1"))
    return (
        f"{f.method} {f.size}, {f.parameters / 1e6:.1f} million parameters: {f.images:,} images in "
        f"{duration(f.training_s)}, judged in {duration(f.judging_s)}\n\n{columns(rows)}\n\n"
        f"* histograms of colours, learned from captions or labels of {results.sizes.baseline:,} images"
    )


def _cells(name: str, compared: Compared, metric: str) -> tuple[str, ...]:
    return (name, *(f"{m[metric]:.3f}" for m in (compared.model, compared.colours, compared.chance)))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
