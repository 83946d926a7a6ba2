"""The loop. A fork of it should cost one screen; what it calls is prepared in `setup.py`."""

from __future__ import annotations

import time
from pathlib import Path

from kiloword.config.by_device import products
from kiloword.config.options import Options as Options
from kiloword.config.ranges import check
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives, cuda_graphs, heartbeat
from kiloword.distributed.device import choose, cores, on_device, precision_of
from kiloword.training.accumulate import backward
from kiloword.training.bad_steps import Guard
from kiloword.training.meter import Meter
from kiloword.training.run_folder import error_kept
from kiloword.training.saving import Saver
from kiloword.training.setup import Run, micro_batches, open_sources, open_val, prepare
from kiloword.training.signals import Stop, stop_signals
from kiloword.training.validation import check_val, validate, validated
from kiloword.types import Batch, Source

GOES_ON = "The same command goes on from there."
MOSTLY = 0.5  # share of the time of a run that it waits for data, above which it says so at its end
SAVE_SECONDS = 120.0  # without `save_every`, a state at most this often


def train(recipe: Recipe, out: Path | str, source: Source | None = None, options: Options | None = None) -> Path:
    """Train, or continue, a run.

    Args: recipe: see `recipes.Recipe`; out: its folder; source: your own map-style data in place of the recipe's.
    Returns: the model folder.
    Raises: ValueError (bad recipe, data or folder; too many bad samples or steps; a rank that ended), Stopped (signal).
    """
    options = options or Options()
    device = choose(options.device)
    with stop_signals() as stop, collectives.process_group(device, options.timeout):
        with stop.at_once("stopped before its first step: there was nothing to save. The same command starts it."):
            check(recipe)
            pieces = micro_batches(recipe)
            cuda_graphs.check(options, pieces, device)
            val = open_val(recipe)  # a wrong name, and below what cannot be used, is refused now, not after hours
            run = prepare(
                recipe,
                Path(out),
                source or open_sources(recipe),
                device=device,
                options=options,
            )
            with error_kept(run.out):
                check_val(recipe, val, run.tokenizer, run.loader.source)
            run.val = val if run.recipe.model.image.size == recipe.model.image.size else None  # scenes are drawn by it
        with error_kept(run.out), products(run.recipe.matmul), Saver(run, options.keep_states) as saver:
            _loop(run, saver, pieces, options, stop)
        return run.out / "model"


def _loop(run: Run, saver: Saver, pieces: int, options: Options, stop: Stop) -> None:
    recipe, model, precision = run.recipe, run.learner.model, precision_of(run.recipe.precision, run.device.type)
    saved, meter = time.perf_counter(), Meter(run, Guard(run, options.max_skipped_steps))
    if _validates(run, options) and not validated(run):
        _validate(run, stop)
    elif run.step == recipe.steps:
        run.log.say(f"{run.out} was finished at step {run.step}: nothing to do.")
    elif run.step:
        run.log.say(f"{run.out} goes on from step {run.step} of {recipe.steps}.")
    # No name holds the loader: an exception ends its workers at once, not when Python waits for them at its end.
    for batch, micro in on_device(
        meter.timed(stop.batches(run.loader.batches(run.step, recipe.steps, pin=run.device.type == "cuda"), run.step)),
        run.device,
        pieces,
    ):
        _count(run, batch)
        report = backward(run.learner, micro, precision, run.reducer)
        report |= run.optimizer.step(run.step, report["loss"])
        model.head.clamp_()
        run.average.update(run.learner, run.step, report["skipped_step"])
        run.step += 1
        meter.add(report, len(batch))
        last = run.step == recipe.steps
        if last or run.step % options.log_every == 0:
            row = meter.row()
            run.log.row(row)
            run.log.progress(row)
        due = run.step % options.save_every == 0 if options.save_every else time.perf_counter() - saved > SAVE_SECONDS
        due, stopping, writing = collectives.any_rank(due or stop.state_asked(), stop(), saver.writing)
        if not writing:
            saver.advance()
        if last or stopping or due or _validates(run, options):
            meter.guard.look()
            with meter.saving():
                saver.save()
            saved = time.perf_counter()
        if last or stopping or _validates(run, options):
            with meter.saving():
                saver.finish()
        if _validates(run, options):
            with meter.paused():
                _validate(run, stop)
        if stopping and not last:
            collectives.wait()  # torchrun ends all ranks when one is gone: not before the state is written
            raise stop.stopped(_after(run))
    if (share := meter.data_wait()) > MOSTLY:
        run.log.say(f"{share:.0%} of the time of this run was spent waiting for data: {_remedy(run.loader.workers)}.")
    if run.step < recipe.steps:  # stopped while it waited for a batch
        saver.save()
        saver.finish()
        raise stop.stopped(_after(run))


def _remedy(workers: int) -> str:
    now = f"now {workers}, on {cores()} cores"
    return f"raise --workers ({now}), or make decoding cheaper (smaller images on disk, --decoder simplejpeg)"


def _count(run: Run, batch: Batch) -> None:
    """Bad samples and cut captions of all ranks. Raises: ValueError for too many bad ones."""
    for new in run.bad.count(collectives.all_lists(batch.skipped)):
        run.log.say(f"skipped {new.key}: {new.reason}")
    run.truncated += collectives.add_up(batch.texts.truncated)


def _validates(run: Run, options: Options) -> bool:
    """Whether a validation belongs behind the step that was made last."""
    due = options.eval_every > 0 and run.step > 0 and run.step % options.eval_every == 0
    return run.recipe.data.val is not None and (due or run.step == run.recipe.steps)


def _validate(run: Run, stop: Stop) -> None:
    """Its state is saved before: a signal ends it at once, and the same command makes it again."""
    heartbeat.at(f"validating after step {run.step}")
    with stop.at_once(f"stopped in the validation after step {run.step}; the state is saved. {GOES_ON}"):
        found = validate(run)
    run.log.row({"step": run.step, **found})


def _after(run: Run) -> str:
    return f"stopped after step {run.step}; the state is saved. {GOES_ON}"
