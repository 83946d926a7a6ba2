"""The verb watch. It does not import torch."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional


def watch(
    runs: Positional[tuple[Path, ...]],
    once: bool = False,
    every: float = 2.0,
    smooth: float = 0.0,
    curves: tuple[str, ...] = (),
    tensorboard: Path | None = None,
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
    """
    from kiloword.watch.command import main as run

    run(runs, once, every, smooth, curves, tensorboard)
