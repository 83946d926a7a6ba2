"""One run of an experiment in this process: train or resume, evaluate, add the row; or compare its first steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from kiloword.api import load
from kiloword.config.recipes import Recipe
from kiloword.files import write_json
from kiloword.models.states import steps_done
from kiloword.runs.rows import read_metrics
from kiloword.terminal import say
from kiloword.training import loop
from kiloword.training.signals import Stopped
from research import arms_rows as rows
from research.arms import Arm, Experiment, Options
from research.evidence import packed

POLL_S = 0.05  # between looks at how far a run is


def run_here(experiment: Experiment, options: Options) -> None:
    """What `--only` names. Raises: ValueError when it names nothing, SystemExit(OTHER_LOSSES) as a check finds them."""
    if options.only == "first":
        if experiment.first is not None:
            experiment.first(options)
        return
    name, _, seed = options.only.rpartition(":")
    if not (seed.isascii() and seed.isdecimal()):
        raise ValueError(f"--only {options.only}: expected ARM:SEED, or first.")
    (arm,) = experiment.chosen(replace(options, arms=(name,)))
    if options.check:
        raise SystemExit(0 if check_one(options, arm, int(seed)) else rows.OTHER_LOSSES)
    run_one(experiment, options, arm, int(seed))


def run_one(experiment: Experiment, options: Options, arm: Arm, seed: int) -> None:
    """Train what is not trained, evaluate and add the row; nothing if the row exists."""
    folder = rows.folder_of(options.out, arm, seed)
    with rows.alone(folder):
        if rows.finished(rows.read(options.out), arm, seed, options) is not None:
            return
        at = rows.commit()
        spent = _train(arm, seed, folder, options, at)
        start = time.perf_counter()
        judged = arm.judge(load(folder / "model", device=options.device, method=arm.recipe.method))
        metrics = {name: packed(v) if isinstance(v, np.ndarray) else v for name, v in judged.items()}
        results = {"metrics": metrics, **spent, "judge_s": time.perf_counter() - start}
        rows.append(options.out, _row(experiment, options, arm, seed, folder, at) | results)
        shutil.rmtree(folder / "state", ignore_errors=True)  # 20 times the size of the model


def _row(experiment: Experiment, options: Options, arm: Arm, seed: int, folder: Path, at: tuple[str, bool]) -> rows.Row:
    """What was run, and on what; `judged_at` is the commit of the judge where that is another one, "+" if changed."""
    recipe, losses, begun = arm.recipe, rows.losses(folder), _begun(folder)
    of_training = (begun.get("commit", at[0]), begun.get("dirty", at[1]))
    return {
        "experiment": experiment.module.rpartition(".")[2],
        "arm": arm.name,
        "seed": seed,
        "rate": arm.rate,
        "recipe": rows.recipe_hash(recipe),
        "steps": recipe.steps,
        "images": recipe.steps * recipe.batch,
        "losses": rows.losses_hash(losses),
        "losses_of": len(losses),
        "commit": of_training[0],
        "dirty": of_training[1],
        **({} if of_training == at else {"judged_at": at[0] + "+" * at[1]}),
        "judged": rows.judged_by(options),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": options.device,
    }


def _train(arm: Arm, seed: int, folder: Path, options: Options, at: tuple[str, bool]) -> dict[str, Any]:
    """Seconds of the loop in all its calls, and of the processor (`_counted`)."""
    recipe = replace(arm.recipe, seed=seed)
    if not (folder / "spent.json").is_file():
        with _counted(folder, at):
            _start(arm, recipe, folder, options)
        spent = {"train_s": _loop_s(folder, recipe.batch), "cpu_s": _begun(folder)["cpu_s"]}
        write_json(folder / "spent.json", spent)
    return _json(folder / "spent.json")


@contextmanager
def _counted(folder: Path, at: tuple[str, bool]) -> Iterator[None]:
    """Keep in the run's begun.json the commit of its first step, and the processor's seconds of all calls so far.

    A call that begins without a state begins anew. Lost are the seconds of killed calls (SIGKILL), and, in a folder
    that an older version began, those of the calls of that version, and its commit.
    """
    fresh: dict[str, Any] = {"commit": at[0], "dirty": at[1]}
    begun = _begun(folder) if steps_done(folder / "state") else fresh
    write_json(folder / "begun.json", begun)
    start = time.process_time()
    try:
        yield
    finally:
        cpu_s = begun.get("cpu_s", 0.0) + time.process_time() - start
        write_json(folder / "begun.json", begun | {"cpu_s": cpu_s})


def _begun(folder: Path) -> dict[str, Any]:
    """What `_counted` has kept."""
    path = folder / "begun.json"
    return _json(path) if path.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return contents


def _start(arm: Arm, recipe: Recipe, folder: Path, options: Options) -> None:
    source = None if arm.source is None else arm.source(recipe)
    how = loop.RunOptions(workers=options.workers, device=options.device, log_every=1)
    loop.train(recipe, folder, source=source, options=how)


def _loop_s(folder: Path, batch: int) -> float:
    """A row of every step tells the speed of that step, whatever call it was made in."""
    return sum(
        batch / float(row["pairs_per_s"]) for row in read_metrics(folder / "metrics.jsonl") if "pairs_per_s" in row
    )


def check_one(options: Options, arm: Arm, seed: int) -> bool:
    """Whether the first losses of a finished run are what they were, bit for bit; says so. Raises: Stopped."""
    row = rows.finished(rows.read(options.out), arm, seed)
    if row is None:
        say(f"{arm.name}, seed {seed}: not finished, nothing to compare")
        return True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with _stop_after(folder, row["losses_of"]):
            try:
                _start(arm, replace(arm.recipe, seed=seed), folder, options)
            except Stopped:
                if len(rows.losses(folder)) < row["losses_of"]:
                    raise
        same = rows.losses_hash(rows.losses(folder)[: row["losses_of"]]) == str(row["losses"])
    at = row["commit"][:7] + ("+" if row["dirty"] else "")
    say(f"{arm.name}, seed {seed}: the first {row['losses_of']} losses are {'' if same else 'NOT '}those of {at}")
    return same


@contextmanager
def _stop_after(folder: Path, steps: int) -> Iterator[None]:
    """Ask the training loop to stop as Ctrl-C does, as soon as it has logged `steps` steps.

    Raises: KeyboardInterrupt at a SIGTERM of somebody else outside the loop, which handles those inside.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if len(rows.losses(folder)) >= steps:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def outside(number: int, frame: FrameType | None) -> None:
        if len(rows.losses(folder)) < steps:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, outside)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGTERM, before)
