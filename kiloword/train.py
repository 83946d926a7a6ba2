"""The loop. A fork of it should cost one screen; what it calls is prepared in `prepare.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from kiloword import parallel
from kiloword.accumulate import backward
from kiloword.device import choose
from kiloword.meter import Meter
from kiloword.prepare import Run, micro_batches, open_sources, open_val, prepare
from kiloword.ranges import check
from kiloword.recipes import Recipe
from kiloword.saving import save
from kiloword.stopping import Stopped, stop_signals
from kiloword.types import Source
from kiloword.validate import validate, validated

SAVE_SECONDS = 120.0  # without `save_every`, a state at most this often


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may change between a run and its resumption without changing its result."""

    workers: int = 0  # loader processes
    device: str = "auto"
    log_every: int = 10  # steps
    save_every: int = 0  # steps; 0: about every two minutes
    eval_every: int = 0  # steps; 0: at the end alone
    extend: bool = False  # the recipe may have another number of steps than the run in `out`
    quiet: bool = False

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("log_every", 1), ("save_every", 0), ("eval_every", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: expected at least {least}.")


def train(recipe: Recipe, out: Path | str, source: Source | None = None, options: Options | None = None) -> Path:
    """Train, or continue, a run.

    Args: recipe: see `recipes.Recipe`; out: its folder; source: your own map-style data in place of the recipe's.
    Returns: the model folder. Raises: ValueError (bad recipe, data or folder; NaN loss), Stopped (Ctrl-C).
    """
    options = options or Options()
    device = choose(options.device)
    with parallel.process_group(device), stop_signals() as stop:
        check(recipe)
        pieces = micro_batches(recipe)
        open_val(recipe)  # a wrong name is said now, not after hours of training
        run = prepare(
            recipe,
            Path(out),
            source or open_sources(recipe),
            device=device,
            workers=options.workers,
            extend=options.extend,
            quiet=options.quiet,
        )
        _loop(run, pieces, options, stop)
        return run.out / "model"


def _loop(run: Run, pieces: int, options: Options, stop: Callable[[], bool]) -> None:
    recipe, model, precision = run.recipe, run.learner.model, _precision(run)
    saved, meter = time.perf_counter(), Meter(run)
    if recipe.data.val and run.step == recipe.steps and not validated(run):
        run.log.row({"step": run.step, **validate(run)})
    for batch in meter.timed(run.loader.batches(run.step, recipe.steps)):
        for new in run.bad.count(parallel.all_lists(batch.skipped)):
            run.log.say(f"skipped {new.key}: {new.reason}")
        run.truncated += parallel.add_up(batch.texts.truncated)
        report = backward(run.learner, batch.to(run.device).split(pieces), precision)
        report["gradient_norm"] = run.optimizer.step(run.step)
        model.head.clamp_()
        run.average.update(run.learner, run.step)
        run.step += 1
        meter.add(report, len(batch))
        last = run.step == recipe.steps
        if last or run.step % options.log_every == 0:
            row = meter.row()
            run.log.row(row)
            run.log.progress(row)
        due = run.step % options.save_every == 0 if options.save_every else time.perf_counter() - saved > SAVE_SECONDS
        due, stopping = parallel.any_rank(due, stop())
        if last or stopping or due:
            meter.check_finite()
            save(run)
            saved = time.perf_counter()
        if recipe.data.val and (last or (options.eval_every and run.step % options.eval_every == 0)):
            run.log.row({"step": run.step, **validate(run)})
        if stopping and not last:
            parallel.wait()  # torchrun ends all ranks when one is gone: not before the state is written
            raise Stopped(f"stopped after step {run.step}; the state is saved. The same command goes on from there.")


def _precision(run: Run) -> Callable[[], AbstractContextManager[object]]:
    if run.recipe.precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(run.device.type, torch.bfloat16)
