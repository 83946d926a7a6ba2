"""TensorBoard shows the rows, whatever was killed or began again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kiloword.cli.main import main
from kiloword.watch.mirror import Mirror, Mirrors, Place, in_training, what_is_new
from kiloword.watch.runs import Watched
from runs import Row, row, write


def test_what_is_new_to_the_mirror() -> None:
    rows = [row(n) for n in range(1, 6)]
    place = Place()
    assert what_is_new(rows, place) == (rows, 0)
    for one in rows:
        place = place.after(one)
    assert what_is_new(rows, place) == (rows[4:], 5)
    validation = {"step": 5, "restarts": 0, "val/accuracy": 1.0}
    assert what_is_new([*rows, validation], place) == ([rows[4], validation], 5)
    again = [row(n, restarts=1) for n in range(4, 8)]
    assert what_is_new(rows[:3] + again, place) == (again, 4)
    later = [row(8, restarts=1)]  # another --log-every: steps 4 and 5 have no row any more
    assert what_is_new(rows[:3] + later, place) == (later, 4)
    assert what_is_new(rows[:3], place) == ([], 4)
    other = [row(n, loss=0.0) for n in range(1, 4)]
    assert what_is_new(other, place) == (other, 0)


def events(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """What TensorBoard shows: name -> (step, value, time)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    scalars = {tag: [(e.step, e.value, e.wall_time) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    return {tag: found for tag, found in scalars.items() if found}


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
    assert mirror.update() == 5
    assert mirror.update() == 0
    rows.append({"step": 5, "restarts": 0, "time": 107.0, "val/accuracy": 0.5})
    write(out, rows)
    assert mirror.update() == 1
    assert events(folder) == expected(rows)
    noted = (folder / "mirrored.json").read_text()
    assert Mirror(out, folder).update() == 2
    rows.append(row(6, time=108.0))
    write(out, rows)
    assert Mirror(out, folder).update() == 3
    (folder / "mirrored.json").write_text(noted)  # killed before it noted the last row
    rows = timed(1, 4) + timed(4, 9, restarts=1, loss=0.125)
    write(out, rows)
    assert Mirror(out, folder).update() == 5
    assert events(folder) == expected(rows)
    rows = rows[:6] + timed(7, 12, restarts=2, loss=0.0625)
    write(out, rows)
    assert Mirror(out, folder).update() == 5
    assert events(folder) == expected(rows)
    rows = timed(1, 3, restarts=0, loss=8.0)
    write(out, rows)
    assert Mirror(out, folder).update() == 2
    assert events(folder) == expected(rows)


def test_without_tensorboard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = write(tmp_path / "run", [row(1)])
    with pytest.raises(SystemExit):
        main(["watch", str(out), "--tensorboard", str(tmp_path / "events")])
    assert "pip install 'kiloword[log]'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="tensorboard is not installed"):
        Mirror(out, tmp_path / "events")


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
