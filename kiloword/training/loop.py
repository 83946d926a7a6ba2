"""The training loop, and the cadence at which it logs, saves, validates and stops. `setup.py` prepares what it uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from kiloword.config.options import RunOptions as RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives
from kiloword.distributed.allocator import keep_freed_memory
from kiloword.distributed.by_device import products
from kiloword.distributed.device import choose, on_device, precision_of
from kiloword.model.resnet import commit
from kiloword.models.saving import Saver
from kiloword.training import report
from kiloword.training.meter import Meter
from kiloword.training.resolve import Run, micro_batches, open_sources
from kiloword.training.run_folder import error_kept
from kiloword.training.setup import prepare, snapshot
from kiloword.training.signals import Stop, stop_signals
from kiloword.training.step import backward
from kiloword.training.validation import first_look, logged, validate
from kiloword.types import Batch, Source

GOES_ON = "The same command goes on from there."
SAVE_SECONDS = 120.0  # seconds between states where `save_every` is 0


def train(
    recipe: Recipe,
    out: Path | str,
    source: Source | None = None,
    options: RunOptions | None = None,
    usual: Recipe | None = None,
) -> Path:
    """Train or continue a run.

    Args: out: folder of the run; source: map-style data in place of the recipe's; usual: its defaults, for the report.
    Returns: the model folder.
    Raises: ValueError (bad recipe, data or folder; too many bad samples or steps; a rank that ended), Stopped (signal).
    """
    options = options or RunOptions()
    device = choose(options.device)
    keep_freed_memory()
    with stop_signals() as stop, collectives.process_group(device, options.timeout):
        with stop.at_once("stopped before its first step: there was nothing to save. The same command starts it."):
            run = prepare(recipe, Path(out), source or open_sources(recipe), device=device, options=options)
            base = Path(recipe.init) if recipe.init and recipe.lora.save == "apart" else None
            run.unusual = report.unusual(recipe, usual or recipe, options)
        with (
            run.lock or nullcontext(),  # an error may live on, with all that it refers to
            run.log,
            report.reported(run),
            error_kept(run.out),
            products(run.recipe.matmul),
            Saver(run.out, run.options.keep_states, partial(snapshot, run), base) as saves,
        ):
            _loop(run, Cadence(run, saves, stop))
        return run.out / "model"


def _loop(run: Run, cadence: Cadence) -> None:
    learner, precision = run.learner, precision_of(run.recipe.precision, run.device.type)
    cadence.begin()
    # No variable holds the loader: an exception then ends its workers at once, not at the interpreter's exit.
    for batch, micro in on_device(cadence.batches(), run.device, micro_batches(run.recipe)):
        if message := run.unfreezing.before(run.step, run.optimizer):
            run.log.say(message)
        learner.done = run.step / run.recipe.steps
        values = backward(learner, micro, precision, run.reducer)
        values |= run.optimizer.step(run.step, values["loss"])
        learner.clamp_()
        commit(learner, values["skipped_step"])
        run.average.update(run.step)
        learner.after_step(run.step + 1)
        cadence.after_step(values, len(batch))
        if run.best.stalled:
            break
    for line in run.bad.left_out.lines():
        run.log.say(line)


class Cadence:
    """Logs, saves, validates and stops a run, each after the steps where it is due, on all ranks alike."""

    def __init__(self, run: Run, saver: Saver, stop: Stop) -> None:
        self.run, self.saver, self.stop = run, saver, stop
        self.meter = Meter(run)
        self._saved = time.perf_counter()

    def begin(self) -> None:
        """Run the validation that a stopped run did not finish, or print the step from which the run continues."""
        run = self.run
        with self.meter.paused():
            if run.step == 0:
                first_look(run)
            elif run.best.step == run.step and not run.best.kept():
                self._keep_best()
            if self._validates() and not logged(run.out, run.step):
                self._validate()
                return
        if run.best.stalled:
            run.log.say(f"{run.out} was finished at step {run.step}: {run.best}. A larger --patience continues it.")
        elif run.finished:
            run.log.say(f"{run.out} was finished at step {run.step}: nothing to do.")
        elif run.step:
            run.log.say(f"{run.out} goes on from step {run.step} of {run.recipe.steps}.")

    def batches(self) -> Iterator[Batch]:
        """The batches of the steps that remain. Raises: ValueError for too many bad samples."""
        run = self.run
        end = run.step if run.best.stalled else run.recipe.steps
        batches = run.loader.batches(run.step, end, pin=run.device.type == "cuda")
        return map(self._count, self.meter.timed(batches))

    def after_step(self, values: dict[str, Tensor], pairs: int) -> None:
        """Count a step, then log, save, validate and stop where it is due.

        Args: values: scalars of the step; pairs: number of images on this rank.
        Raises: Stopped after a signal, once the state is saved; ValueError for too many bad steps.
        """
        run = self.run
        run.step += 1
        self.meter.add(values, pairs)
        last = run.step == run.recipe.steps
        if last or run.step % run.options.log_every == 0:
            row = self.meter.row()
            run.log.row(row)
            run.log.progress(row)
        stopping = self._save(last)
        if self._validates():
            with self.meter.paused():
                self._validate(stopping)
        if stopping and not last:
            report.write(run)
            collectives.wait()  # torchrun ends all ranks when one exits: none may before the state is written
            raise self.stop.stopped(f"stopped after step {run.step}; the state is saved. {GOES_ON}")

    def _count(self, batch: Batch) -> Batch:
        """Count bad samples and truncated captions of all ranks. Raises: ValueError for too many bad samples."""
        run = self.run
        for new in run.bad.count(collectives.all_lists(batch.skipped)):
            run.log.say(f"skipped {new.key}: {new.reason}")
        run.truncated += collectives.add_up(batch.texts.truncated)
        return batch

    def _save(self, last: bool) -> bool:
        """Save the state if it is due; before a validation and at the end, wait until it is on disk.

        Returns: whether any rank was asked to stop.
        """
        every, validates = self.run.options.save_every, self._validates()
        due = self.run.step % every == 0 if every else time.perf_counter() - self._saved > SAVE_SECONDS
        due, stopping, writing = collectives.any_rank(due or self.stop.state_asked(), self.stop(), self.saver.writing)
        if not writing:
            self.saver.advance()
        ending = last or stopping or validates
        if due or ending:
            self.meter.look()
            with self.meter.saving():
                self.saver.save()
                if ending:
                    self.saver.finish()
            self._saved = time.perf_counter()
        return stopping

    def _validates(self) -> bool:
        """Whether a validation is due after the last step."""
        run, every = self.run, self.run.options.eval_every
        due = every > 0 and run.step % every == 0
        if epochs := run.options.eval_epochs:
            between = epochs * run.loader.order.steps_per_epoch  # steps, perhaps not a whole number
            due = run.step // between > (run.step - 1) // between
        return bool(run.recipe.data.val) and ((due and run.step > 0) or run.step == run.recipe.steps)

    def _validate(self, stopping: bool = False) -> None:
        """Validate and log the metrics. The state is saved before: after a signal the same command repeats it.

        Args: stopping: a rank had a signal, by which this is left undone on all. Raises: Stopped.
        """
        run = self.run
        undone = f"stopped in the validation after step {run.step}; the state is saved. {GOES_ON}"
        if stopping:
            collectives.wait()  # as in `after_step`
            raise self.stop.stopped(undone)
        with self.stop.at_once(undone):
            metrics = validate(run)
        better = run.best.take(metrics, run.step)
        ended = {"stopped_early": 1} if run.best.stalled and run.step < run.recipe.steps else {}
        run.log.row({"step": run.step, **metrics, **ended})
        if better:
            self._keep_best()
        if ended:
            run.log.say(f"finished at step {run.step} of {run.recipe.steps}: {run.best}.")

    def _keep_best(self) -> None:
        """Keep the model of the last step, which is saved as OUT/model but after a resume from an older state."""
        if self.saver.last != self.run.step:
            self.saver.save()
            self.saver.finish()
        self.run.best.keep()
