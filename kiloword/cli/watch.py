"""The verb watch. No torch here, also when it runs."""

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
    """Curves and alerts of runs while they train: kiloword watch runs/first

    Several runs in the same plots: kiloword watch runs (all that are in there), or kiloword watch runs/a runs/b

    Args:
        runs: folders of runs (--out of train), or folders that hold some.
        once: print one frame and end; so also where the output is no terminal.
        every: seconds between frames.
        smooth: weight of the past in curves of training, from 0 (none) to below 1.
        curves: metrics to draw whose names begin so, such as loss val/.
        tensorboard: folder to mirror the rows to as TensorBoard events, in which the same command goes on later.
    """
    from kiloword.watch.command import main as run

    run(runs, once, every, smooth, curves, tensorboard)
