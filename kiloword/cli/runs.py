"""The verbs that take runs: watch, compare, and average, of their models. No torch at import: help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from kiloword.config.execution import REQUIRED
from kiloword.config.options import Trackers


def watch(
    runs: Annotated[Positional[tuple[Path, ...]], REQUIRED],
    once: bool = False,
    every: float = 2.0,
    smooth: float = 0.0,
    curves: tuple[str, ...] = (),
    tensorboard: Path | None = None,
    log_to: Trackers | None = None,
    expected: str = "",
) -> None:
    """Show curves and alerts of runs: kiloword watch runs/first

    Several runs in the same plots: kiloword watch runs (all runs in the folder), or kiloword watch runs/a runs/b

    Args:
        runs: folders of runs (--out of train), or folders that contain runs.
        once: print one frame and exit, as when the output is not a terminal.
        every: seconds between frames.
        smooth: exponential smoothing of training curves, from 0 (none) to below 1.
        curves: metrics to draw, by the start of their names, such as loss val/.
        tensorboard: folder for a copy of the rows as TensorBoard events; the same command continues it later.
        log_to: first send the rows that the server of wandb or mlflow lacks.
        expected: compare with the expected curves of a recipe (its name, or a file), or with a folder of finished runs.
    """
    from kiloword.runs.command import main as run

    run(runs, once, every, smooth, curves, tensorboard, log_to=log_to, expected=expected)


def compare(
    runs: Annotated[Positional[tuple[Path, ...]], REQUIRED], json: Path | None = None, html: Path | None = None
) -> None:
    """Compare runs, over seeds where they differ in nothing else: kiloword compare runs/a runs/b --html compare.html

    All runs in a folder, such as that of a sweep: kiloword compare runs/k

    Args:
        runs: folders of runs (--out of train), or folders that contain runs.
        json: write settings that differ and metrics to this file.
        html: write a page with tables and curves.
    """
    from kiloword.runs.compare import main as run

    run(runs, json, html)
