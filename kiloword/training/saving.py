"""What is saved of a run, and read when it is resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kiloword.config.recipes import ModelFile
from kiloword.distributed import collectives
from kiloword.models.model_folder import check_fit
from kiloword.models.saving import Saver, Snapshot
from kiloword.models.states import newest
from kiloword.models.tensors import spec_of
from kiloword.training.run import Run


def saver(run: Run) -> Saver:
    """What saves a run."""
    lora, init = run.recipe.lora, run.recipe.init
    base = Path(init) if init and lora.rank and lora.save == "apart" else None
    return Saver(run.out, run.options.keep_states, partial(snapshot, run), base)


def snapshot(run: Run) -> Snapshot:
    """The tensors and numbers that `resume` reads. A collective."""
    tensors = {f"learner/{k}": v for k, v in run.learner.state_dict().items()}
    tensors |= {f"optimizer/{k}": v for k, v in run.optimizer.state_dict().items()}
    tensors |= {f"average/{k}": v for k, v in run.average.shadow.items()}
    numbers = {
        "truncated": run.truncated,
        "skipped_steps": [run.skipped_steps, run.skipped_in_a_row],
        "bad": run.bad.state_dict(),
        "reports": list(run.reports),
        "captions": collectives.add_up(run.captions),
        "best": run.best.state,
    }
    same = {name: getattr(run.recipe, name) for name in ("method", "settings", "model", "size")}
    return Snapshot(run.step, tensors, numbers, ModelFile(**same, steps=run.step, data=run.loader.source.name))


def resume(run: Run) -> None:
    """Continue from the newest state of the run's folder, if there is one; tensors are filled in place."""
    stored = newest(run.out / "state", run.log.say)
    if stored is None:
        return
    tensors = snapshot(run).tensors
    what = f"tensors in {run.out / 'state'}"
    check_fit({k: spec_of(v) for k, v in tensors.items()}, stored.specs, what, "this run")
    stored.load(tensors)
    numbers = stored.numbers
    run.bad.load_state_dict(numbers["bad"])
    run.step, run.truncated, run.reports = numbers["step"], numbers["truncated"], numbers["reports"]
    run.skipped_steps, run.skipped_in_a_row = numbers["skipped_steps"]
    run.best.resume(numbers["best"], run.step)
    run.captions = 0 if collectives.rank() else numbers["captions"]
