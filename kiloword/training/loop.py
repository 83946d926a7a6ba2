"""The training loop. `setup.py` prepares what it uses; `cadence.py` logs, saves, validates and stops around steps."""

from __future__ import annotations

from pathlib import Path

from kiloword.config.by_device import products
from kiloword.config.options import RunOptions as RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives
from kiloword.distributed.device import choose, on_device, precision_of
from kiloword.training.accumulate import backward
from kiloword.training.cadence import Cadence
from kiloword.training.resolve import micro_batches, open_sources
from kiloword.training.run_folder import error_kept
from kiloword.training.saving import Saver
from kiloword.training.setup import Run, prepare
from kiloword.training.signals import stop_signals
from kiloword.types import Source


def train(recipe: Recipe, out: Path | str, source: Source | None = None, options: RunOptions | None = None) -> Path:
    """Train or continue a run.

    Args: recipe: see `recipes.Recipe`; out: folder of the run; source: map-style data in place of the recipe's.
    Returns: the model folder.
    Raises: ValueError (bad recipe, data or folder; too many bad samples or steps; a rank that ended), Stopped (signal).
    """
    options = options or RunOptions()
    device = choose(options.device)
    with stop_signals() as stop, collectives.process_group(device, options.timeout):
        with stop.at_once("stopped before its first step: there was nothing to save. The same command starts it."):
            run = prepare(recipe, Path(out), source or open_sources(recipe), device=device, options=options)
        with error_kept(run.out), products(run.recipe.matmul), Saver(run, options.keep_states) as saver:
            _loop(run, Cadence(run, saver, options, stop))
        return run.out / "model"


def _loop(run: Run, cadence: Cadence) -> None:
    learner, precision = run.learner, precision_of(run.recipe.precision, run.device.type)
    cadence.begin()
    # No variable holds the loader: an exception then ends its workers at once, not at the interpreter's exit.
    for batch, micro in on_device(cadence.batches(), run.device, micro_batches(run.recipe)):
        report = backward(learner, micro, precision, run.reducer)
        report |= run.optimizer.step(run.step, report["loss"])
        learner.model.head.clamp_()
        run.average.update(learner, run.step, report["skipped_step"])
        cadence.after_step(report, len(batch))
    cadence.end()
