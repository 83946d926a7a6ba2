"""TensorBoard shows the rows, whatever was killed or began again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword.cli.main import main
from kiloword.runs.mirror import Mirror, Mirrors, in_training
from kiloword.runs.runs import Watched
from runs import Row, row, write


def open_accumulator(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0})


def scalars(read: Any) -> dict[str, list[tuple[int, float, float]]]:
    """What TensorBoard shows: name -> (step, value, time)."""
    read.Reload()
    tags = {tag: [(e.step, e.value, e.wall_time) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    return {tag: values for tag, values in tags.items() if values}


def events(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    return scalars(open_accumulator(folder))


def expected(rows: list[Row]) -> dict[str, list[tuple[int, float, float]]]:
    out: dict[str, list[tuple[int, float, float]]] = {}
    for one in rows:
        for name, value in one.items():
            if name not in ("step", "time", "restarts"):
                out.setdefault(name, []).append((one["step"], float(np.float32(value)), one["time"]))
    return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_are_the_rows_over_restarts_of_both(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard (the extra `log`) is not installed")
    timed = lambda first, end, **more: [row(n, time=100.0 + n, **more) for n in range(first, end)]  # noqa: E731
    out, folder = tmp_path / "run", tmp_path / "events"
    rows = timed(1, 6)
    write(out, rows)
    mirror = Mirror(out, folder)
    mirror.update()
    assert events(folder) == expected(rows)
    shown = open_accumulator(folder)  # TensorBoard, open while all of this happens
    rows.append({"step": 5, "restarts": 0, "time": 107.0, "val/accuracy": 0.5})
    write(out, rows)
    mirror.update()
    assert events(folder) == expected(rows) == scalars(shown)
    rows.append(row(6, time=108.0))
    write(out, rows)
    Mirror(out, folder).update()  # another process goes on
    assert events(folder) == expected(rows) == scalars(shown)
    rows = timed(1, 4) + timed(4, 9, restarts=1, loss=0.125)
    write(out, rows)
    mirror = Mirror(out, folder)
    mirror.update()
    assert events(folder) == expected(rows) == scalars(shown)
    rows = rows[:6] + timed(7, 12, restarts=2, loss=0.0625)
    write(out, rows)
    mirror.update()  # the run was resumed while its mirror went on
    assert events(folder) == expected(rows) == scalars(shown)
    rows = timed(1, 3, restarts=0, loss=8.0)
    write(out, rows)
    mirror.update()
    assert events(folder) == expected(rows) == scalars(shown)
    assert sum(path.stat().st_size > 0 for path in folder.iterdir()) == 1


def test_without_tensorboard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = write(tmp_path / "run", [row(1)])
    with pytest.raises(SystemExit):
        main(["watch", str(out), "--tensorboard", str(tmp_path / "events")])
    assert "pip install 'kiloword[log]'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--tensorboard needs tensorboard: pip"):
        Mirror(out, tmp_path / "events")
    with pytest.raises(SystemExit):
        main(["train", "siglip", "--out", str(tmp_path / "new"), "--log-to", "tensorboard"])
    assert "--log-to tensorboard needs tensorboard: pip" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_run_has_a_folder_of_its_own_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard (the extra `log`) is not installed")
    folders = {name: write(tmp_path / name, [row(1), row(2)]) for name in ("one", "two")}
    runs = [Watched(folders["one"], "../runs/one"), Watched(folders["two"], "/")]
    mirrors = Mirrors(tmp_path / "events")
    mirrors.update(runs)
    write(folders["one"], [row(1), row(2), row(3)])
    mirrors.update(runs)
    assert {p.name for p in (tmp_path / "events").iterdir()} == {"runs-one", "run"}
    assert [len(events(tmp_path / "events" / name)["loss"]) for name in ("runs-one", "run")] == [3, 2]
    assert len(list((tmp_path / "events" / "runs-one").glob("events.out.*"))) == 1  # one writer goes on
    Mirrors(None).update(runs)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--tensorboard .*file cannot be written: "):
        Mirrors(tmp_path / "file").update(runs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_goes_on_without_a_mirror_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard (the extra `log`) is not installed")
    said: list[str] = []
    out = write(tmp_path / "run", [row(1)])
    update = in_training(out, said.append)
    update()
    write(out, [row(1), row(2)])
    update()
    assert len(events(out / "tensorboard")["loss"]) == 2
    assert said == []
    bare = write(tmp_path / "bare", [row(1)])
    (bare / "tensorboard").touch()
    update = in_training(bare, said.append)
    update()
    (bare / "tensorboard").unlink()
    update()
    (line,) = said
    assert line.startswith("TensorBoard's events cannot be written (")
    assert line.endswith("): the run goes on without.")
    assert not (bare / "tensorboard").exists()
