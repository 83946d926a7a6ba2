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


def average(models: Annotated[Positional[tuple[str, ...]], REQUIRED], out: Path, alpha: float | None = None) -> None:
    """Average the weights of models: kiloword average models/b32 runs/tuned/model --alpha 0.5 --out runs/average

    With the model that a run started from, it keeps what the start could do (WiSE-FT). Several get equal shares.

    Args:
        models: model folders of one method, shape and tokenizer, or models of other libraries as --init of train takes
            them; of two, the first is the start.
        out: model folder to write.
        alpha: share of the second of two models, from 0 to 1; default: equal shares.
    """
    from kiloword.interop.names import local_folder
    from kiloword.models.average import average as run

    run([str(local_folder(model)) for model in models], out, alpha)
