"""Servers that take the rows of a run: Weights & Biases and MLflow.

What the server holds decides which rows are sent, so that nothing is sent twice and nothing is missing, whatever was
killed, was rewritten by a resumed run, or did not answer for a while.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from kiloword.config.options import Trackers
from kiloword.errors import needs
from kiloword.files import write_json
from kiloword.runs.groups import leaves_of
from kiloword.runs.mirror import NO_CURVE
from kiloword.runs.rows import number
from kiloword.runs.runs import read_object, settings_of

FILE = "tracking.json"  # of a run's folder: its names on the servers
PROJECT = "kiloword"
SECONDS = 15  # that a server has for its first answer
BATCH, PARAMS, LONGEST = 900, 90, 500  # MLflow's limits: metrics and parameters of a request, characters of a value
Row = Mapping[str, Any]


class Sink(Protocol):
    """One run on a server. All functions raise whatever the library raises when the server does not answer."""

    def send(self, rows: Sequence[Row]) -> None:
        """Take all rows of the run so far that are new to this process, in their order."""

    def close(self, complete: bool) -> None:
        """End. Args: complete: no row of the last step will follow."""


def check_installed(kind: str) -> None:
    """Raises: ValueError when the package is not installed."""
    if importlib.util.find_spec(kind) is None:
        raise ValueError(needs(f"--log-to {kind}", kind, kind, ", or omit it."))


def opened(kind: Trackers, run: Path) -> Sink:
    """The run on the server, new or found again by the name in its folder."""
    return Wandb(run) if kind == "wandb" else Mlflow(run)


def known_names(run: Path) -> dict[str, Any]:
    """What tracking.json has of this run: nothing where it came with a copy of another folder that is still there."""
    stored = read_object(run / FILE)
    of = stored.get("folder")
    copied = isinstance(of, str) and of != str(run.absolute()) and (Path(of) / FILE).is_file()
    return {"folder": str(run.absolute())} if copied else stored | {"folder": str(run.absolute())}


def values_of(row: Row) -> dict[str, float]:
    """The finite numbers of a row that have a curve."""
    numbers = {name: number(row, name) for name in row if name not in NO_CURVE}
    return {name: value for name, value in numbers.items() if value is not None}


class Wandb(Sink):
    """A run of Weights & Biases, whose steps only ascend: a step is sent when a row of a later one is known."""

    def __init__(self, run: Path) -> None:
        import wandb

        stored = known_names(run)
        name = stored.get("wandb")
        self.folder, self.name = run, name if isinstance(name, str) and name.isalnum() else uuid.uuid4().hex[:16]
        write_json(run / FILE, stored | {"wandb": self.name})
        self.run: Any = wandb.init(
            id=self.name,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.absolute().name,
            dir=str(run),
            config=settings_of(run),
            settings=wandb.Settings(
                init_timeout=SECONDS, console="off", silent=True, disable_git=True, save_code=False
            ),
        )
        self.offline = bool(getattr(self.run, "offline", False))
        sent = stored.get("wandb_step", -1)
        self.next = sent + 1 if self.offline and type(sent) is int else int(self.run.step)
        self._step, self._values = -1, dict[str, float]()

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["step"] < self.next:
                continue
            if row["step"] != self._step:
                self._flush()
                self._step = row["step"]
            self._values |= values_of(row)

    def _flush(self) -> None:
        if self._values:
            self.run.log(self._values, step=self._step)
            self.next = self._step + 1
        self._values = {}

    def close(self, complete: bool) -> None:
        if complete:
            self._flush()
        self.run.finish(exit_code=0 if complete else 1)
        if self.offline:  # no server knows; before its end the library may lose rows that it took
            write_json(self.folder / FILE, {**read_object(self.folder / FILE), "wandb_step": self.next - 1})


class Mlflow(Sink):
    """A run of MLflow, which keeps whatever it gets: of each metric the last step that it has is asked for."""

    def __init__(self, run: Path) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SECONDS))
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient()
        stored = known_names(run)
        name = stored.get("mlflow")
        data = self._data(name) if isinstance(name, str) else None
        self.name: str = name if data is not None and isinstance(name, str) else self._created(run)
        write_json(run / FILE, stored | {"mlflow": self.name})  # at once: a retry goes on with this run
        if data is None or not data.params:
            self._describe(run)
        known = () if data is None else data.metrics
        self.last = {key: max(m.step for m in self.client.get_metric_history(self.name, key)) for key in known}
        self.client.set_terminated(self.name, "RUNNING")

    def _data(self, name: str) -> Any:
        """What the server has of a run; None where it does not know it, such as a new database."""
        try:
            return self.client.get_run(name).data
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _created(self, run: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        place = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        made: str = self.client.create_run(place, run_name=run.absolute().name).info.run_id
        return made

    def _describe(self, run: Path) -> None:
        """Send the settings of the run."""
        from mlflow.entities import Param

        params = [Param(_key(path), str(value)[:LONGEST]) for path, value in leaves_of(settings_of(run))]
        for first in range(0, len(params), PARAMS):
            self.client.log_batch(self.name, params=params[first : first + PARAMS])

    def send(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        new: list[Any] = []
        for row in rows:
            wall = round(1000 * (number(row, "time") or time.time()))
            for name, value in values_of(row).items():
                if row["step"] > self.last.get(key := _key(name), -1):
                    new.append(Metric(key, value, wall, row["step"]))
                    self.last[key] = row["step"]
        for first in range(0, len(new), BATCH):
            self.client.log_batch(self.name, metrics=new[first : first + BATCH])

    def close(self, complete: bool) -> None:
        with suppress(Exception):  # the rows are there
            self.client.set_terminated(self.name, "FINISHED" if complete else "KILLED")


def _key(name: str) -> str:
    """A name that MLflow accepts: "recall@1" as "recall_at_1"."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
