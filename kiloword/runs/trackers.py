"""Trackers that take the rows of a run: TensorBoard, Weights & Biases and MLflow, by their own libraries.

A run that is resumed goes on behind the last step that its tracker has.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kiloword.errors import needs
from kiloword.files import write_json
from kiloword.runs.rows import Row, number, read_object

Kind = Literal["tensorboard", "wandb", "mlflow"]
EXTRAS = {"tensorboard": "log", "wandb": "wandb", "mlflow": "mlflow"}  # library -> extra that installs it
FILE = "tracking.json"  # of a run's folder: its names on the servers
PROJECT = "kiloword"
SECONDS = 15  # that a server has for an answer
PARAMS, LONGEST = 90, 500  # MLflow's limits: parameters of a request, characters of a value


def check_installed(kind: Kind) -> None:
    """Raises: ValueError when the package is not installed."""
    if find_spec(kind) is None:
        raise ValueError(needs(f"--log-to {kind}", kind, EXTRAS[kind], ", or omit it."))


def values_of(row: Row) -> dict[str, float]:
    """The finite numbers of a row that have a curve."""
    values = {name: number(row, name) for name in row if name not in ("step", "time", "restarts")}
    return {name: value for name, value in values.items() if value is not None}


def _names(folder: Path) -> dict[str, str]:
    """The names of a run at its trackers. A folder that was copied or moved is another run."""
    here, names = str(folder.absolute()), read_object(folder / FILE)
    return names if names.get("folder", here) == here else {}


def _keep_name(folder: Path, **names: str) -> None:
    write_json(folder / FILE, {**_names(folder), "folder": str(folder.absolute()), **names})


class _TensorBoard:
    """Event files of which later ones replace the steps that a resumed run does again."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.after = step if any(folder.glob("events.out.*")) else 0
        self.writer: Any = SummaryWriter(str(folder), purge_step=self.after + 1)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["step"] > self.after:
                for name, value in values_of(row).items():
                    self.writer.add_scalar(name, value, row["step"], walltime=number(row, "time"))
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class _Wandb:
    """A run of Weights & Biases, whose steps only ascend."""

    def __init__(self, folder: Path) -> None:
        import wandb

        name = _names(folder).get("wandb") or uuid.uuid4().hex[:16]
        _keep_name(folder, wandb=name)
        self.run: Any = wandb.init(
            id=name,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.absolute().name,
            dir=str(folder),
            config=read_object(folder / "config.json").get("recipe"),
            settings=wandb.Settings(
                init_timeout=SECONDS, console="off", silent=True, disable_git=True, save_code=False
            ),
        )
        self.first = int(self.run.step)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["step"] >= self.first:
                self.run.log(values_of(row), step=row["step"])

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class _Mlflow:
    """A run of MLflow, which keeps whatever it gets: of each metric the last step that it has is asked for."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SECONDS))
        import mlflow

        self.mlflow, name = mlflow, _names(folder).get("mlflow")
        if name is None:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run = mlflow.start_run(run_id=name, run_name=folder.absolute().name)
        history = mlflow.MlflowClient().get_metric_history
        self.last = {key: max(m.step for m in history(run.info.run_id, key)) for key in run.data.metrics}
        if name is None:
            _keep_name(folder, mlflow=run.info.run_id)
            recipe = leaves_of(read_object(folder / "config.json").get("recipe"))
            params = [(_key(path), str(value)[:LONGEST]) for path, value in recipe]
            for first in range(0, len(params), PARAMS):
                mlflow.log_params(dict(params[first : first + PARAMS]))

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {_key(name): value for name, value in values_of(row).items()}
            new = {key: value for key, value in values.items() if row["step"] > self.last.get(key, -1)}
            self.mlflow.log_metrics(new, step=row["step"])

    def close(self, finished: bool) -> None:
        self.mlflow.end_run("FINISHED" if finished else "KILLED")


Tracker = _TensorBoard | _Wandb | _Mlflow
"""One run at a tracker: `send` skips rows that it has, `close` says whether the run ended well. All raise whatever the
library raises when a server does not answer."""


def opened(kind: Kind, folder: Path, step: int) -> Tracker:
    """The run in a folder at a tracker, new or found again. Args: step: from which the run goes on."""
    if kind == "tensorboard":
        return _TensorBoard(folder / kind, step)
    return _Wandb(folder) if kind == "wandb" else _Mlflow(folder)


def _key(name: str) -> str:
    """A name that MLflow accepts: "recall@1" as "recall_at_1"."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def leaves_of(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values of nested settings by dotted paths."""
    if isinstance(settings, dict) and settings:
        for name, inner in settings.items():
            yield from leaves_of(inner, f"{path}.{name}" if path else name)
    else:
        yield path, settings
