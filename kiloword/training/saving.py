"""The state of a run: resumed from, and saved with the model folder in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from kiloword.config.recipes import ModelFile
from kiloword.distributed import collectives
from kiloword.files import SaveError, sync, write_json
from kiloword.models.adapters import merged, write_adapter
from kiloword.models.model_folder import check_fit, not_finite
from kiloword.models.states import (
    Part,
    SavedState,
    copy_part,
    drop_old,
    newest,
    shards_folder,
    states,
    write_numbers,
    write_part,
)
from kiloword.models.tensors import spec_of, write_tensors
from kiloword.training.run import Run

POLL_S = 0.01  # seconds between checks of the other ranks while waiting for a save
LONG_S = 60.0  # seconds of waiting for a save, after which a message says so

Files = dict[str, str]  # names of a state's files -> SHA-256


def resume(run: Run) -> None:
    """Continue from the newest state of the run's folder, if there is one; tensors are filled in place."""
    stored = newest(run.out / "state", run.log.say)
    if stored is None:
        return
    tensors = {k: v for k, v in state_of(run)[0].items() if not k.startswith("optimizer/")}
    # the optimizer creates its own tensors only at its first step
    names = [k.removeprefix("optimizer/") for k in stored.specs if k.startswith("optimizer/")]
    moments = run.optimizer.empty_state(names)
    whole = tensors | {f"optimizer/{k}": v for k, v in moments.items()}
    what = f"tensors in {run.out / 'state'}"
    check_fit({k: spec_of(v) for k, v in whole.items()}, stored.specs, what, "this run")
    stored.load(whole)
    _check_finite(run.out / "state", stored.numbers["step"], whole)
    run.optimizer.load_state_dict(moments)
    run.bad.load_state_dict(stored.numbers["bad"])
    run.step, run.truncated = stored.numbers["step"], stored.numbers["truncated"]
    run.skipped_steps, run.skipped_in_a_row = stored.numbers["skipped_steps"]
    run.since_row.load_state_dict(stored.numbers["since_row"], run.device)


def _check_finite(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ValueError on all ranks when the state has NaN or infinite values on any rank."""
    if bad := collectives.all_lists(not_finite({name: collectives.local(x) for name, x in tensors.items()})):
        raise ValueError(
            f"the state of step {step} in {folder} cannot be used: {bad[0]} is NaN or infinite. Start again in another "
            f"--out with a smaller --optim.lr, or remove {folder / f'step-{step:09d}.json'} to go on from the state "
            "before, if there is one."
        )


def state_of(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and numbers that `resume` reads."""
    tensors = {f"learner/{k}": v for k, v in run.learner.state_dict().items()}
    tensors |= {f"optimizer/{k}": v for k, v in run.optimizer.state_dict().items()}
    tensors |= {f"average/{k}": v for k, v in run.average.shadow.items()}
    skipped = run.skipped_steps, run.skipped_in_a_row
    numbers = {"truncated": run.truncated, "skipped_steps": list(skipped), "bad": run.bad.state_dict()}
    return tensors, {**numbers, "since_row": run.since_row.state_dict()}


class Saver:
    """Saves in the background, one save at a time.

    Training waits only for the copy to host memory. Then a thread on every rank writes its part; when all have, a
    thread on rank 0 makes the model folder from the parts and writes the state's numbers. The threads use no
    collectives: ranks agree in `save`, `advance` and `finish`, which all ranks call at the same place.

    Args: keep: number of states to keep, the newest ones.
    """

    def __init__(self, run: Run, keep: int) -> None:
        self.run, self.keep = run, keep
        self.last = 0  # step of the newest save
        self._buffers: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(1, "save")
        self._job: Future[Files] | None = None  # what this rank does for the save in progress
        self._then: Callable[[Files], Files] | None = None  # what rank 0 does after all ranks have written

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Finish the save in progress; after an error with several ranks do not, as other ranks may be gone."""
        try:
            if kind is None:
                self.finish()
            elif collectives.ranks() == 1 and issubclass(kind, Exception):
                with suppress(SaveError):  # the first error is the one to report
                    self.finish()
        finally:
            self._pool.shutdown()

    @property
    def writing(self) -> bool:
        """Whether this rank is writing."""
        return self._job is not None and not self._job.done()

    def save(self) -> None:
        """Begin to save the run in its present state. Raises: SaveError of the previous save."""
        self.finish()
        run = self.run
        tensors, numbers = state_of(run)
        part, folder = copy_part(tensors, self._buffers), shards_folder(run.out / "state", run.step)
        same = {name: getattr(run.recipe, name) for name in ("method", "settings", "model", "size")}
        file = ModelFile(**same, steps=run.step, data=run.loader.source.name)
        self._then = partial(_commit, run, folder, file, deepcopy(numbers), self.keep)
        self.last = run.step
        self._job = self._pool.submit(_write, run.out, folder, part, collectives.rank(), collectives.ranks())

    def advance(self) -> None:
        """Start the next part of the save in progress, if any. Call it only when no rank is writing.

        Raises: SaveError on all ranks.
        """
        if self._job is None:
            return
        outcomes = collectives.all_lists([_outcome(self._job)])
        self._job, then, self._then = None, self._then, None
        files: Files = {}
        for outcome in outcomes:
            if isinstance(outcome, str):
                raise SaveError(outcome)
            files |= outcome
        if then is not None:
            self._job = self._pool.submit(then if collectives.rank() == 0 else dict, files)

    def finish(self) -> None:
        """Wait until the save in progress is complete. Raises: SaveError on all ranks."""
        start, reported = time.monotonic(), False
        while self._job is not None:
            while collectives.any_rank(self.writing)[0]:
                time.sleep(POLL_S)
                if not reported and time.monotonic() - start > LONG_S:
                    reported = True
                    self.run.log.say(f"still waiting for {self.run.out / 'state'} to be written after {LONG_S:.0f} s.")
            self.advance()


def _write(out: Path, folder: Path, part: Part, rank: int, ranks: int) -> Files:
    """Write a rank's part of a state whose weights, moments and averages are all finite. Raises: SaveError."""
    if bad := not_finite({name: value for name, (value, _) in part.items()}):
        first = min(bad, key=lambda name: not name.startswith("learner/"))
        raise SaveError(
            f"{first} is NaN or infinite ({len(bad)} tensors of {folder.name}), which is not saved. The run stops"
            f"{what_is_left(out)}."
        )
    return write_part(folder, part, rank, ranks)


def _outcome(job: Future[Files]) -> Files | str:
    """The files that a job wrote, or its error message."""
    try:
        return job.result()
    except SaveError as e:
        return str(e)
    except Exception as e:
        return f"cannot save ({type(e).__name__}: {e}). What was there before is kept."


def _commit(run: Run, folder: Path, file: ModelFile, numbers: dict[str, Any], keep: int, files: Files) -> Files:
    """Make the parts a state: flush the metrics, write the model folder, and write the state's numbers last.

    A crash before the numbers repeats some steps; it never leaves a finished run without its model.
    """
    assert file.steps is not None
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise SaveError(
            f"{folder / missing[0]} of another rank is not here: --out must be a folder that all ranks share."
        )
    if (run.out / "metrics.jsonl").exists():
        sync(run.out / "metrics.jsonl")
    write_model(run, file, SavedState([folder / name for name in files], numbers))
    write_numbers(folder.parent, file.steps, files, numbers)
    drop_old(folder.parent, keep, file.steps)
    return files


def write_model(run: Run, file: ModelFile, stored: SavedState) -> None:
    """Write the model folder of a state, with averaged weights if any. Weights come last, as in `save_model`."""
    folder = run.out / "model"
    write_json(folder / "config.json", asdict(file))
    write_tensors(folder / "model.safetensors", merged(stored.model))
    if run.recipe.lora.rank and run.recipe.lora.save == "apart":
        _write_apart(run, file, stored)


def _write_apart(run: Run, file: ModelFile, stored: SavedState) -> None:
    """Write OUT/adapter: what a state changes of the model that the run started from, adapters unmerged."""
    assert run.recipe.init is not None
    folder = run.out / "adapter"
    run.tokenizer.save(folder)
    write_json(folder / "config.json", asdict(file))
    write_adapter(folder, Path(run.recipe.init), stored.model)


def what_is_left(out: Path) -> str:
    """The end of the message about a diverged run, after "The run stops": the state that remains, what to do."""
    again = "Start again in another --out with a smaller --optim.lr"
    if not states(out / "state"):
        return f" before its first state. {again}"
    kept = f"{out / 'state'} keeps the last state, which is finite"
    return f"; {kept}. {again}, from {out / 'model'} by --init if you like"
