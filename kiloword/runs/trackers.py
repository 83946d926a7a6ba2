"""Trackers that take the rows of a run: TensorBoard, Weights & Biases and MLflow, by their own libraries.

A run that is resumed goes on behind the last step that its tracker has.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kiloword.config.settings import leaves_of
from kiloword.errors import needs
from kiloword.files import write_json
from kiloword.runs.rows import Row, numbers, read_object

Kind = Literal["tensorboard", "wandb", "mlflow"]
EXTRAS = {"tensorboard": "log", "wandb": "wandb", "mlflow": "mlflow"}  # library -> extra that installs it
FILE = "tracking.json"  # of a run's folder: its names on the servers
PROJECT = "kiloword"
SECONDS = 15  # that a server has for an answer
PARAMS = 90  # of a request, of which MLflow takes 100


def check_installed(kind: Kind) -> None:
    """Raises: ValueError when the package is not installed."""
    if find_spec(kind) is None:
        raise ValueError(needs(f"--log-to {kind}", kind, EXTRAS[kind], ", or omit it."))


@dataclass(frozen=True)
class Tracker:
    """A run at a tracker. All raise what the library raises where a server does not answer."""

    first: int  # step that it does not have yet
    log: Callable[[dict[str, float], Row], object]
    close: Callable[[bool], object]  # told whether the run ended well

    def send(self, rows: Sequence[Row]) -> None:
        """Send the finite numbers of the rows that are new."""
        for row in rows:
            if row["step"] >= self.first:
                values = numbers(row).items()
                self.log({name: value for name, value in values if name not in ("step", "time", "restarts")}, row)


def opened(kind: Kind, folder: Path, step: int) -> Tracker:
    """The run in a folder at a tracker, new or found again. Args: step: from which the run goes on."""
    return {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}[kind](folder, step)


def _tensorboard(folder: Path, step: int) -> Tracker:
    """Event files of which later ones replace the steps that a resumed run does again."""
    from torch.utils.tensorboard import SummaryWriter

    folder = folder / "tensorboard"
    first = step + 1 if any(folder.glob("events.out.*")) else 1
    writer: Any = SummaryWriter(str(folder), purge_step=first)

    def log(values: dict[str, float], row: Row) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, row["step"], walltime=row.get("time"))
        writer.flush()

    return Tracker(first, log, lambda _: writer.close())


def _wandb(folder: Path, step: int) -> Tracker:
    """A run of Weights & Biases, whose steps only ascend."""
    import wandb

    names = _names(folder)
    names.setdefault("wandb", uuid.uuid4().hex[:16])
    write_json(folder / FILE, names)
    run: Any = wandb.init(
        id=names["wandb"],
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.absolute().name,
        dir=str(folder),
        config=read_object(folder / "config.json").get("recipe"),
        settings=wandb.Settings(init_timeout=SECONDS, console="off", silent=True, disable_git=True),
    )
    return Tracker(
        int(run.step),
        lambda values, row: run.log(values, step=row["step"]),
        lambda finished: run.finish(exit_code=0 if finished else 1),
    )


def _mlflow(folder: Path, step: int) -> Tracker:
    """A run of MLflow, which keeps whatever it gets: the last step that it has is asked for."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SECONDS))
    import mlflow

    names = _names(folder)
    if "mlflow" not in names:
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    run = mlflow.start_run(run_id=names.get("mlflow"), run_name=folder.absolute().name)
    there = [m.step for key in run.data.metrics for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, key)]
    if "mlflow" not in names:
        write_json(folder / FILE, names | {"mlflow": run.info.run_id})
        params = {_key(p): str(v) for p, v in leaves_of(read_object(folder / "config.json").get("recipe"))}
        for first in range(0, len(params), PARAMS):
            mlflow.log_params(dict(list(params.items())[first : first + PARAMS]))
    return Tracker(
        max(there, default=-1) + 1,
        lambda values, row: mlflow.log_metrics({_key(n): v for n, v in values.items()}, step=row["step"]),
        lambda finished: mlflow.end_run("FINISHED" if finished else "KILLED"),
    )


def _names(folder: Path) -> dict[str, str]:
    """The folder of a run, and its names at trackers. A folder that was copied or moved is another run."""
    place = str(folder.absolute())
    names = read_object(folder / FILE)
    return names if names.get("folder") == place else {"folder": place}


def _key(name: str) -> str:
    """A name that MLflow accepts: "recall@1" as "recall_at_1"."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
