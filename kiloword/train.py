"""The loop. A fork of it should cost one screen; what it calls is prepared in `prepare.py`."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kiloword import parallel
from kiloword.accumulate import backward
from kiloword.checkpoint import save_model, save_state
from kiloword.device import choose
from kiloword.log import read_metrics
from kiloword.prepare import Run, micro_batches, open_sources, open_val, prepare, state_of
from kiloword.ranges import check
from kiloword.recipes import ModelFile, Recipe
from kiloword.types import Source

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


class Stopped(ValueError):
    """The run ended before its last step; its state is saved."""


def train(recipe: Recipe, out: Path | str, source: Source | None = None, options: Options | None = None) -> Path:
    """Train, or continue, a run.

    Args: recipe: see `recipes.Recipe`; out: its folder; source: your own map-style data in place of the recipe's.
    Returns: the model folder. Raises: ValueError (bad recipe, data or folder; NaN loss), Stopped (Ctrl-C).
    """
    options = options or Options()
    device = choose(options.device)
    with parallel.process_group(device), _stop_signals() as stop:
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
    saved, meter = time.perf_counter(), _Meter(run)
    if recipe.data.val and run.step == recipe.steps and not _validated(run):
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


def save(run: Run) -> None:
    """Model folder and state, by rank 0; the model is the average where there is one.

    The state comes last: a crash between the two repeats some steps, and never leaves a finished run without its model.
    """
    if parallel.rank():
        return
    recipe = run.recipe
    file = ModelFile(
        method=recipe.method,
        settings=recipe.settings,
        model=recipe.model,
        size=recipe.size,
        steps=run.step,
        data=run.loader.source.name,
    )
    with _averaged(run):
        save_model(run.out / "model", run.learner.model, run.tokenizer, file)
    tensors, numbers = state_of(run)
    save_state(run.out / "state", run.step, tensors, numbers)


def validate(run: Run) -> dict[str, float]:
    """Retrieval on the recipe's validation data, or answers where the method wants questions; "val/" before names."""
    from kiloword.api import Matcher
    from kiloword.evaluation import evaluate

    source = open_val(run.recipe)
    assert source is not None
    asks = "questions" in run.learner.method.needs
    names = ("accuracy",) if asks else ("text_retrieval_recall@1", "image_retrieval_recall@1")
    options: dict[str, Any] = {"train": run.loader.source} if asks and not hasattr(source, "answers") else {}
    run.learner.eval()
    with _averaged(run):
        matcher = Matcher(run.learner.model, run.tokenizer)
        found = evaluate(matcher, "vqa" if asks else "retrieval", source, **options)
    run.learner.train()
    run.log.say(f"val at step {run.step}: " + ", ".join(f"{k} {found[k]:.3f}" for k in names))
    return {f"val/{k}": v for k, v in found.items() if isinstance(v, float)}


def _validated(run: Run) -> bool:
    """Its metrics hold the last step's validation: a run that was killed before may have ended without."""
    rows = read_metrics(run.out / "metrics.jsonl") if parallel.rank() == 0 else []
    found = any(row["step"] == run.step and any(name.startswith("val/") for name in row) for row in rows)
    return parallel.any_rank(found)[0]


class _Meter:
    """Collects what a log row says, without waiting for the device between rows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._reset()

    def _reset(self) -> None:
        self._reports: list[dict[str, torch.Tensor]] = []
        self._pairs, self._wait, self._start = 0, 0.0, time.perf_counter()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time spent waiting for them is data wait."""
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._wait += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def add(self, report: dict[str, torch.Tensor], pairs: int) -> None:
        self._reports.append({k: v.detach() for k, v in report.items()})
        self._pairs += pairs
        if self.run.device.type == "cpu":
            self.check_finite()

    def row(self) -> dict[str, Any]:
        """Means since the last row, and where things stand. Raises: ValueError on a loss that is no number."""
        self.check_finite()
        run, head = self.run, self.run.learner.model.head
        means = {k: float(torch.stack([r[k] for r in self._reports]).nanmean()) for k in self._reports[0]}
        seconds = time.perf_counter() - self._start
        row: dict[str, Any] = {
            "step": run.step,
            "epoch": run.step * run.recipe.batch / run.order.rows,
            **{k: v for k, v in means.items() if not math.isnan(v)},
        }
        row["scale"] = float(head.log_scale.detach().exp())
        if head.bias is not None:
            row["bias"] = float(head.bias.detach())
        row["pairs_per_s"] = self._pairs * parallel.ranks() / seconds
        row["data_wait"] = self._wait / seconds
        row |= {"skipped": len(run.bad), "truncated": run.truncated}
        self._reset()
        return row

    def check_finite(self) -> None:
        for n, report in enumerate(reversed(self._reports[-1:] if self.run.device.type == "cpu" else self._reports)):
            loss, norm = float(report["loss"]), float(report["gradient_norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise ValueError(
                    f"step {self.run.step - n}: loss is {loss} and gradient norm {norm}. The last good state in "
                    f"{self.run.out / 'state'} is kept; start again with "
                    "a smaller --optim.lr or --optim.clip 1, in another --out."
                )


def _precision(run: Run) -> Callable[[], AbstractContextManager[object]]:
    if run.recipe.precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(run.device.type, torch.bfloat16)


@contextmanager
def _averaged(run: Run) -> Iterator[None]:
    run.average.swap(run.learner)
    try:
        yield
    finally:
        run.average.swap(run.learner)


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask the loop to stop after its step; a second Ctrl-C ends at once.

    Not under torchrun: it hands on each Ctrl-C that the terminal has sent already, and ends what does not stop itself.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if asked and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        asked.append(number)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for s, old in before.items():
            signal.signal(s, old)
