"""What a save waits for and says, without a run: jobs that the test finishes, a clock that it moves."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kiloword.distributed import collectives
from kiloword.files import SaveError
from kiloword.models.states import SavedState
from kiloword.training import saving
from kiloword.training.saving import LONG_S, Saver, _outcome, _write


class Clock:
    now = 0.0

    def __init__(self) -> None:
        self.ends: dict[float, Any] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.ends if at <= self.now]:
            self.ends.pop(at)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(saving, "time", clock)
    return clock


def saver(lines: list[str]) -> Saver:
    return Saver(SimpleNamespace(out=Path("run"), log=SimpleNamespace(say=lines.append)), keep=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "lines"), [(LONG_S - 1, 0), (LONG_S + 1, 1), (5 * LONG_S, 1)])
def test_a_long_wait_for_the_disk_is_printed_once(clock: Clock, seconds: float, lines: int) -> None:
    said: list[str] = []
    one = saver(said)
    with one:
        one._job = job = Future()
        assert one.writing
        clock.ends[seconds] = lambda: job.set_result({})
    assert not one.writing
    assert clock.now == pytest.approx(seconds, abs=0.1)
    assert said == [f"still waiting for {Path('run', 'state')} to be written after 60 s."] * lines


@pytest.mark.parametrize("rank", [0, 1])
def test_when_all_have_written_rank_0_makes_a_state_of_the_parts(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Of every rank's files; the others wait for it with a job of their own, which does nothing."""
    made: list[dict[str, str]] = []
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "ranks", lambda: 2)
    monkeypatch.setattr(collectives, "all_lists", lambda mine: [*mine, {"b": "2"}])
    monkeypatch.setattr(collectives, "any_rank", lambda *mine: mine)
    one = saver([])
    one.advance()  # nothing is in flight
    one._job, one._then = Future(), lambda files: made.append(files) or files
    one._job.set_result({"a": "1"})
    one.advance()
    assert one._then is None
    assert one._job is not None
    one._job.result(60)
    assert made == ([{"a": "1", "b": "2"}] if rank == 0 else [])
    one.advance()
    assert one._job is None
    monkeypatch.setattr(collectives, "all_lists", lambda mine: [*mine, "the disk of rank 1 is full."])
    one._job = Future()
    one._job.set_result({})
    with pytest.raises(SaveError, match="the disk of rank 1 is full"):
        one.advance()
    assert one._job is None
    one._pool.shutdown()


@pytest.mark.parametrize(
    ("ranks", "error", "finished"),
    [
        (1, None, True),
        (2, None, True),
        (1, ValueError(), True),
        (2, ValueError(), False),
        (1, KeyboardInterrupt(), False),
    ],
)
def test_what_is_in_flight_at_an_end(
    monkeypatch: pytest.MonkeyPatch, ranks: int, error: BaseException | None, finished: bool
) -> None:
    monkeypatch.setattr(collectives, "ranks", lambda: ranks)
    monkeypatch.setattr(collectives, "any_rank", lambda *mine: mine)
    monkeypatch.setattr(collectives, "all_lists", lambda mine: mine)
    one = saver([])

    def run() -> None:
        with one:
            one._job = Future()
            one._job.set_result({})
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert (one._job is None) == finished
    with pytest.raises(RuntimeError, match="after shutdown"):
        one._pool.submit(dict)


def test_the_first_error_is_reported_not_that_of_the_save_behind_it() -> None:
    def run() -> None:
        with saver([]) as one:
            one._job = Future()
            one._job.set_exception(SaveError("second"))
            raise ValueError("first")

    with pytest.raises(ValueError, match="first") as told:
        run()
    assert not isinstance(told.value, SaveError)


def test_what_a_job_says() -> None:
    for error, said in ((SaveError("full."), "full."), (KeyError("k"), "cannot save (KeyError: 'k'). What was there")):
        job: Future[dict[str, str]] = Future()
        job.set_exception(error)
        assert str(_outcome(job)).startswith(said)


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    """The message names a weight rather than a moment of the optimizer."""
    folder = tmp_path / "state" / "step-000000007"
    bad, good = torch.tensor([1.0, float("nan")]), torch.ones(2)
    values = {"average/a": bad, "learner/b": good, "learner/c": bad, "optimizer/d": bad, "optimizer/e": good}
    part = {name: (value, (0,)) for name, value in values.items()}
    with pytest.raises(SaveError, match=r"^learner/c is NaN or infinite \(3 tensors of step-000000007\), which is not"):
        _write(tmp_path, folder, part, 0, 1)
    assert not folder.exists()
    part = dict.fromkeys(values, (good, (0,)))
    (file,) = _write(tmp_path, folder, part, 2, 12)
    assert file == "shard-00003-of-00012.safetensors"
    stored = SavedState([folder / file], {})
    assert {name: stored.whole(name).tolist() for name in values} == {name: [1.0, 1.0] for name in values}


@pytest.mark.parametrize("rows", [False, True])
def test_a_state_exists_once_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    """Rows before it (where there are any), then the model, then the numbers; old states go last."""
    folder, calls = tmp_path / "state" / "step-000000004", list[Any]()
    folder.mkdir(parents=True)
    (folder / "a").touch()
    if rows:
        (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(saving, "sync", lambda path: calls.append(("sync", path.name)))
    monkeypatch.setattr(saving, "SavedState", lambda files, numbers: (files, numbers))
    monkeypatch.setattr(saving, "write_model", lambda run, file, stored: calls.append(("model", file.steps, stored)))
    monkeypatch.setattr(saving, "write_numbers", lambda *given: calls.append(("numbers", *given)))
    monkeypatch.setattr(saving, "drop_old", lambda *given: calls.append(("drop", *given)))
    run: Any = SimpleNamespace(out=tmp_path)
    file: Any = SimpleNamespace(steps=4)
    assert saving._commit(run, folder, file, {"n": 1}, 3, {"a": "x"}) == {"a": "x"}
    assert calls == [
        *([("sync", "metrics.jsonl")] if rows else []),
        ("model", 4, ([folder / "a"], {"n": 1})),
        ("numbers", tmp_path / "state", 4, {"a": "x"}, {"n": 1}),
        ("drop", tmp_path / "state", 3, 4),
    ]
    calls.clear()
    with pytest.raises(SaveError, match=r"b of another rank is not here: --out must be a folder that all ranks share"):
        saving._commit(run, folder, file, {}, 3, {"a": "x", "b": "y"})
    assert calls == []
