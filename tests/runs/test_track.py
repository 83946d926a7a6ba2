"""Rows on their way to a server: none is missing and none is sent twice, whatever is killed or does not answer."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from kiloword.cli.main import main
from kiloword.runs import sinks, track
from kiloword.runs.track import Tracker, Tracking
from runs import Row, row, write


class Server:
    """What a server of Weights & Biases keeps: runs by id, of each step its values; it refuses steps that descend."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, Row]]] = {}
        self.answers = True
        self.finished: list[int] = []

    def init(self, id: str, **_: Any) -> SimpleNamespace:
        if not self.answers:
            raise TimeoutError("no answer from https://user:secret@server")
        kept = self.runs.setdefault(id, [])

        def log(values: Row, step: int) -> None:
            assert not kept or step > kept[-1][0], "a step twice"
            kept.append((step, dict(values)))

        def finish(exit_code: int) -> None:
            self.finished.append(exit_code)

        return SimpleNamespace(step=kept[-1][0] + 1 if kept else 0, log=log, finish=finish, offline=False)

    @property
    def kept(self) -> list[tuple[int, Row]]:
        (run,) = self.runs.values()
        return run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    wandb: Any = ModuleType("wandb")
    wandb.init, wandb.Settings = server.init, SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return server


def rows_until(last: int) -> list[Row]:
    """A row a step, and a validation every second step."""
    rows: list[Row] = []
    for n in range(1, last + 1):
        rows.append(row(n, time=100.0 + n))
        rows += [{"step": n, "restarts": 0, "time": 100.5 + n, "val/accuracy": n / 10}] if n % 2 == 0 else []
    return rows


def assert_kept(server: Server, last: int) -> None:
    assert [step for step, _ in server.kept] == list(range(1, last + 1))
    assert [values["loss"] for _, values in server.kept] == [10.0 / n for n in range(1, last + 1)]
    assert [s for s, values in server.kept if "val/accuracy" in values] == list(range(2, last + 1, 2))


def test_a_run_that_is_killed_and_resumed_is_whole_on_the_server(server: Server, tmp_path: Path) -> None:
    out = write(tmp_path / "run", rows_until(4)[:-1])  # killed before the validation of step 4
    killed = Tracking("wandb", out)
    assert killed.update(0.0)
    assert [step for step, _ in server.kept] == [1, 2, 3]  # more of step 4 may come
    write(out, rows_until(7))  # resumed from step 3: its rows are written again
    resumed = Tracking("wandb", out)
    assert resumed.update(0.0)
    write(out, rows_until(8))
    assert resumed.close(complete=True)
    assert_kept(server, 8)
    assert server.finished == [0]
    assert Tracking("wandb", out).close(complete=True)  # a third process has nothing to send
    assert_kept(server, 8)


def test_a_server_that_does_not_answer_is_named_once_and_catches_up(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = write(tmp_path / "run", rows_until(2))
    tracking = Tracking("wandb", out)
    server.answers = False
    assert not tracking.update(0.0)
    assert not tracking.update(1.0)  # not asked again at once
    assert not tracking.update(10.0)
    said = capsys.readouterr().err
    assert said.count("wandb does not take the rows") == 1
    assert "secret" not in said
    server.answers = True
    write(out, rows_until(6))
    assert not tracking.update(11.0)  # the wait has doubled
    assert tracking.update(30.0)
    assert tracking.close(complete=True)
    assert_kept(server, 6)


def test_offline_rows_are_known_here(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server knows the last step: the run's folder does."""
    segments: list[list[int]] = []

    def init(**_: Any) -> SimpleNamespace:
        steps: list[int] = []
        segments.append(steps)
        return SimpleNamespace(step=0, log=lambda v, step: steps.append(step), finish=lambda exit_code: 0, offline=True)

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    out = write(tmp_path / "run", rows_until(3))
    assert Tracking("wandb", out).close(complete=False)
    write(out, rows_until(5))
    assert Tracking("wandb", out).close(complete=True)
    assert segments == [[1, 2], [3, 4, 5]]


def test_rows_that_an_offline_library_lost_are_sent_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with its library before the end, which alone writes what was taken."""
    segments: list[list[int]] = []

    def init(**_: Any) -> SimpleNamespace:
        segments.append([])
        logged = segments[-1].append
        return SimpleNamespace(step=0, log=lambda v, step: logged(step), finish=lambda exit_code: 0, offline=True)

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    out = write(tmp_path / "run", rows_until(3))
    assert Tracking("wandb", out).update(0.0)  # and no end
    assert Tracking("wandb", out).close(complete=True)
    assert segments == [[1, 2], [1, 2, 3]]


def test_a_copied_folder_is_another_run(tmp_path: Path) -> None:
    out = write(tmp_path / "run", rows_until(2))
    (out / sinks.FILE).write_text(json.dumps(sinks.known_names(out) | {"wandb": "abc"}))
    assert sinks.known_names(out)["wandb"] == "abc"
    shutil.copytree(out, tmp_path / "copy")
    assert sinks.known_names(tmp_path / "copy") == {"folder": str(tmp_path / "copy")}
    out.rename(tmp_path / "moved")
    assert sinks.known_names(tmp_path / "moved")["wandb"] == "abc"


class Client:
    """What MLflow keeps, which takes any metric any number of times."""

    kept: ClassVar[dict[str, list[tuple[int, float]]]] = {}
    params: ClassVar[list[Any]] = []
    fails = False

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def get_run(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(data=SimpleNamespace(metrics=dict.fromkeys(self.kept), params=self.params))

    def get_metric_history(self, name: str, key: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(step=step) for step, _ in self.kept[key]]

    def log_batch(self, name: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        self.params.extend(params)
        for key, value, _, step in metrics:
            self.kept.setdefault(key, []).append((step, value))
            if self.fails:
                raise ConnectionError("cut off in the middle")

    def set_terminated(self, name: str, status: str) -> None:
        self.status = status


def test_mlflow_gets_each_metric_of_a_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "kept", {})
    monkeypatch.setattr(Client, "params", [])
    tracking, entities, mlflow = ModuleType("mlflow.tracking"), ModuleType("mlflow.entities"), ModuleType("mlflow")
    vars(tracking)["MlflowClient"] = Client
    vars(entities).update(Metric=lambda *values: values, Param=lambda *values: values)
    for module in (mlflow, tracking, entities):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    out = write(tmp_path / "run", rows_until(3))
    monkeypatch.setattr(Client, "fails", True)
    first = Tracking("mlflow", out)
    assert not first.update(0.0)
    monkeypatch.setattr(Client, "fails", False)
    write(out, [*rows_until(4), {"step": 4, "restarts": 0, "val/text_recall@1": 0.5}])
    assert first.update(100.0)
    assert Tracking("mlflow", out).close(complete=True)
    assert [step for step, _ in Client.kept["loss"]] == [1, 2, 3, 4]
    assert Client.kept["val/accuracy"] == [(2, 0.2), (4, 0.4)]
    assert Client.kept["val/text_recall_at_1"] == [(4, 0.5)]
    assert ("method", "siglip") in Client.params
    assert json.loads((out / sinks.FILE).read_text()) == {"mlflow": "r", "folder": str(out)}


def test_a_run_that_the_server_lost_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "kept", {})
    monkeypatch.setattr(Client, "params", [])
    tracking, entities, mlflow = ModuleType("mlflow.tracking"), ModuleType("mlflow.entities"), ModuleType("mlflow")

    class Forgetful(Client):
        def get_run(self, name: str) -> SimpleNamespace:
            error = RuntimeError("no such run")
            vars(error)["error_code"] = "RESOURCE_DOES_NOT_EXIST"
            raise error

    vars(tracking)["MlflowClient"] = Forgetful
    vars(entities).update(Metric=lambda *values: values, Param=lambda *values: values)
    for module in (mlflow, tracking, entities):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    out = write(tmp_path / "run", rows_until(3))
    (out / sinks.FILE).write_text(json.dumps({"mlflow": "gone"}))
    assert Tracking("mlflow", out).close(complete=True)
    assert [step for step, _ in Client.kept["loss"]] == [1, 2, 3]
    assert json.loads((out / sinks.FILE).read_text())["mlflow"] == "r"


def test_the_process_beside_a_run_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that hangs is ended, and what is missing is said."""
    package = tmp_path / "libs" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "libs"), prepend=":")
    monkeypatch.setattr(track, "GRACE", 0.2)
    out = write(tmp_path / "run", rows_until(2))
    tracker = Tracker("wandb", out)
    tracker.close(complete=True)
    assert tracker._process.returncode != 0
    assert f"`kiloword watch {out} --log-to wandb` sends them" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["watch", "{run}", "--once"], ["train", "siglip", "--out", "{run}"]])
def test_a_library_that_is_missing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    out = write(tmp_path / "run", rows_until(2)) if words[0] == "watch" else tmp_path / "new"
    with pytest.raises(SystemExit) as end:
        main([word.format(run=out) for word in words] + ["--log-to", "mlflow"])
    assert end.value.code == 2
    assert "--log-to mlflow needs mlflow: pip install 'kiloword[mlflow]', or omit it." in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_library_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb (the extra `wandb`) is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = write(tmp_path / "run", rows_until(4))
    tracker = Tracker("wandb", out)
    tracker.close(complete=True)
    assert tracker._process.returncode == 0
    assert json.loads((out / sinks.FILE).read_text())["wandb_step"] == 4
