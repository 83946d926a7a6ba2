"""Rows on their way to a tracker: none is missing and none is sent twice over a resumed run; a failure ends no run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commands import refused
from kiloword.methods.defaults import default_recipe
from kiloword.runs.trackers import Kind, opened
from kiloword.training.log import Log
from runs import Row, row, write

RECIPE = replace(default_recipe("siglip", "debug"), batch=10, steps=1000)


def rows_until(last: int, start: int = 1) -> list[Row]:
    """A row a step, and a validation every second step."""
    rows: list[Row] = []
    for n in range(start, last + 1):
        rows.append(row(n, time=100.0 + n))
        rows += [{"step": n, "restarts": 0, "time": 100.5 + n, "val/accuracy": n / 10}] if n % 2 == 0 else []
    return rows


def process(out: Path, kind: Kind, step: int, last: int, fails: bool = False) -> None:
    """A process of a run in `out`, from the state of `step` to `last`."""
    log = Log(RECIPE, quiet=True)
    log.open(out, step, kind)
    with suppress(KeyError), log:
        for values in rows_until(last, step + 1):
            log.row(values)
        if fails:
            raise KeyError


def scalars(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard shows: step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = events.Scalars(name)
    assert len({event.step for event in found}) == len(found), "a step twice"
    return {event.step: event.value for event in found}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_over_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard (the extra `log`) is not installed")
    out = write(tmp_path / "run", rows_until(3))
    process(out, "tensorboard", 3, 7)  # began without a tracker: earlier rows are sent, too
    process(out, "tensorboard", 5, 9)  # was killed, and goes on from step 5
    process(out, "tensorboard", 9, 9)
    shown = scalars(out / "tensorboard", "loss")
    assert shown == pytest.approx({n: 10.0 / n for n in range(1, 10)})
    assert scalars(out / "tensorboard", "val/accuracy") == pytest.approx({n: n / 10 for n in (2, 4, 6, 8)})


class Server:
    """What a server of Weights & Biases keeps: runs by id, of each step its values; it refuses steps that descend."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, Row]] = {}
        self.answers = True
        self.ends: list[int] = []

    def init(self, id: str, **_: Any) -> SimpleNamespace:
        kept = self.runs.setdefault(id, {})

        def log(values: Row, step: int) -> None:
            if not self.answers:
                raise TimeoutError("no answer from https://user:secret@server")
            assert step >= max(kept, default=0), "a step that descends"
            kept.setdefault(step, {}).update(values)

        return SimpleNamespace(
            step=max(kept) + 1 if kept else 0, log=log, finish=lambda exit_code: self.ends.append(exit_code)
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    wandb: Any = ModuleType("wandb")
    wandb.init, wandb.Settings = server.init, SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return server


def assert_whole(kept: dict[int, Row], last: int) -> None:
    assert {step: values["loss"] for step, values in kept.items()} == {n: 10.0 / n for n in range(1, last + 1)}
    assert [step for step, values in kept.items() if "val/accuracy" in values] == list(range(2, last + 1, 2))


def test_wandb_over_a_resumed_run(server: Server, tmp_path: Path) -> None:
    out = write(tmp_path / "run", rows_until(4))
    process(out, "wandb", 4, 6, fails=True)
    process(out, "wandb", 3, 9)
    process(out, "wandb", 9, 9)
    (kept,) = server.runs.values()
    assert_whole(kept, 9)
    assert server.ends == [1, 0, 0]
    shutil.copytree(out, tmp_path / "copy")
    process(tmp_path / "copy", "wandb", 9, 10)
    assert len(server.runs) == 2  # a copied folder is another run
    for kept in server.runs.values():
        assert_whole(kept, max(kept))


def test_a_server_that_does_not_answer_ends_no_run(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = write(tmp_path / "run", [])
    server.answers = False
    process(out, "wandb", 0, 4)
    said = capsys.readouterr().err
    assert said.count("does not take rows") == 1
    assert "secret" not in said
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 6
    server.answers = True
    process(out, "wandb", 4, 4)  # the same command again
    (kept,) = server.runs.values()
    assert_whole(kept, 4)


class Mlflow(ModuleType):
    """What MLflow keeps, which takes any metric any number of times."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.kept: dict[str, list[tuple[int, float]]] = {}
        self.params: dict[str, str] = {}
        self.status: list[str] = []
        self.experiments: list[str] = []
        self.set_experiment, self.log_params = self.experiments.append, self.params.update
        self.end_run = self.status.append

    def start_run(self, run_id: str | None, run_name: str) -> SimpleNamespace:
        assert run_id in (None, "r")
        return SimpleNamespace(info=SimpleNamespace(run_id="r"), data=SimpleNamespace(metrics=dict.fromkeys(self.kept)))

    def MlflowClient(self) -> SimpleNamespace:
        def history(run: str, key: str) -> Iterator[SimpleNamespace]:
            return (SimpleNamespace(step=step) for step, _ in self.kept[key])

        return SimpleNamespace(get_metric_history=history)

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self.kept.setdefault(key, []).append((step, value))


def test_mlflow_gets_each_metric_of_a_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    out = write(tmp_path / "run", [*rows_until(4), {"step": 4, "restarts": 0, "val/text_recall@1": 0.5}])
    process(out, "mlflow", 4, 6)
    process(out, "mlflow", 3, 7)
    assert [step for step, _ in mlflow.kept["loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert mlflow.kept["val/accuracy"] == [(2, 0.2), (4, 0.4), (6, 0.6)]
    assert mlflow.kept["val/text_recall_at_1"] == [(4, 0.5)]
    assert (mlflow.params["method"], mlflow.status) == ("siglip", ["FINISHED", "FINISHED"])
    assert mlflow.experiments == ["kiloword"]
    assert json.loads((out / "tracking.json").read_text()) == {"mlflow": "r", "folder": str(out)}


@pytest.mark.parametrize(("kind", "extra"), [("tensorboard", "log"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_library_that_is_missing(
    kind: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    assert f"kiloword[{extra}]" in refused(capsys, "train", "siglip", "--out", tmp_path / "new", "--log-to", kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_the_real_libraries(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(kind, reason=f"{kind} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = write(tmp_path / "run", rows_until(4))
    for step in (4, 2):
        tracker = opened(kind, out, step)
        tracker.send(rows_until(6))
        tracker.close(finished=True)
    assert kind in json.loads((out / "tracking.json").read_text())
