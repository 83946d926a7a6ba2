"""Curves of runs on a page: which metrics are drawn, in which order, and one plot for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kiloword.report import Html, heading, line_plot, stack
from kiloword.report.page import SERIES
from kiloword.runs.rows import Numbers, thinned
from kiloword.runs.runs import Watched

POINTS = 300  # of a curve; more are averaged
SMOOTH = 60  # points from which a line of means is drawn over the rows
MAIN = ("recall@1", "/accuracy", "/acc1", "/mean_average_precision", "/cider")  # ends of the main metrics of validation
SPEED = ("pairs_per_s", "data_wait", "memory")
FROM_ZERO = SPEED  # amounts and shares of a whole: a rise of a tenth looks like one
OPTIMIZATION = ("gradient_norm", "lr", "scale", "bias", "skipped_steps")
COUNTS = ("step", "epoch", "time", "restarts", "skipped", "truncated", "captions", "save_s", "stopped_early")
NO_LOSS = (*SPEED, *OPTIMIZATION, *COUNTS, "slowest_data_wait", "loader_pairs_per_s", "mined_share")
LABELS = {
    "pairs_per_s": "image-text pairs per second",
    "data_wait": "share of time waited for data",
    "memory": "peak memory, MB",
    "gradient_norm": "gradient norm",
    "lr": "learning rate",
    "skipped_steps": "skipped steps",
}
Points = list[tuple[float, float]]
Ends = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    points: Points


def losses(runs: Sequence[Watched]) -> list[str]:
    """The loss and its terms; a pair loss that is the whole loss in every run is not drawn twice."""
    names = [n for n in names_of(runs) if n not in NO_LOSS and not n.startswith("val/")]
    if "pair" in names and all(_same(run, "pair", "loss") for run in runs):
        names.remove("pair")
    return sorted(names, key=lambda name: name != "loss")


def _same(run: Watched, a: str, b: str) -> bool:
    return np.array_equal(run.columns.of(a)[1], run.columns.of(b)[1])


def evaluations(runs: Sequence[Watched]) -> list[str]:
    """The metrics of validation, the main ones first."""
    names = [n for n in names_of(runs) if n.startswith("val/")]
    best = {run.best[0] for run in runs if run.best}
    return sorted(names, key=lambda name: not (name.endswith(MAIN) or name in best))


def main_evaluations(runs: Sequence[Watched]) -> list[str]:
    """The metrics of validation that are drawn: the main ones, of other tasks the first two."""
    names, best = evaluations(runs), {run.best[0] for run in runs if run.best}
    return [n for n in names if n.endswith(MAIN) or n in best] or names[:2]


def names_of(runs: Sequence[Watched]) -> list[str]:
    """All metrics of the runs, in the order of their rows."""
    return list(dict.fromkeys(name for run in runs for name in run.columns.names))


def points_of(runs: Sequence[Watched], name: str) -> Points:
    """(step, value) of a metric, the mean of some runs, at most POINTS of them; means where there are more."""
    steps, values = mean_curve(runs, name)
    if len(steps) > POINTS:
        low, high = float(steps[0]), float(steps[-1])
        at, values = thinned(steps, values, low, high, POINTS)
        steps = low + at * (high - low) / (POINTS - 1)
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def mean_curve(runs: Sequence[Watched], name: str) -> tuple[Numbers, Numbers]:
    """Steps and values [N] of a metric: the mean of some runs at the steps that all of them have so far."""
    curves = [curve for run in runs if len((curve := run.columns.of(name))[0])]
    if len(curves) < 2:
        return curves[0] if curves else (np.empty(0), np.empty(0))
    steps = curves[0][0]
    for other, _ in curves[1:]:
        steps = np.intersect1d(steps, other)
    values = [of[np.searchsorted(at, steps)] for at, of in curves]
    return steps, np.mean(values, axis=0) if len(steps) else np.empty(0)


def plot(name: str, curves: Sequence[Curve], title: str = "") -> Html:
    """One metric over the steps; more than SERIES curves are split over plots with the same axes."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return Html()
    label = LABELS.get(name, name.removeprefix("val/"))
    xs, ys = (sorted(p[axis] for curve in drawn for p in curve.points) for axis in (0, 1))
    ends = (xs[0], xs[-1]), (ys[0], ys[-1])
    long = max(len(curve.points) for curve in drawn) >= SMOOTH and not name.startswith("val/")
    shared = len(drawn) > SERIES
    if name in FROM_ZERO:
        ends, shared = (ends[0], (min(0.0, ys[0]), ys[-1])), True
    parts = [drawn[n : n + SERIES] for n in range(0, len(drawn), SERIES)]
    plots = [_plot(part, label, long, ends if shared else None) for part in parts]
    return stack(heading(title) if title else None, *plots)


def _plot(curves: Sequence[Curve], label: str, long: bool, ends: Ends | None) -> Html:
    series: Mapping[str, Points] = {curve.name: curve.points for curve in curves}
    return line_plot(series, "step", label, whole_x=True, smooth=9 if long else 0, ends=ends)
