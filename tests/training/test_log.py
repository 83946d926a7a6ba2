"""The log of a run: rows, alerts, the line on a terminal, and what a resumed run keeps."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kiloword.methods.defaults import default_recipe
from kiloword.terminal.progress import PLAIN_EVERY_S, duration, per_second, time_left
from kiloword.training.log import Log, read_metrics

RECIPE = replace(default_recipe("siglip", "debug"), batch=10, steps=1000)


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "pairs_per_s": 100.0, "data_wait": 0.25, **more}


def opened(out: Path, step: int = 0, quiet: bool = False, **more: Any) -> Log:
    log = Log(RECIPE, quiet)
    log.open(out, step, **more)
    return log


def test_rows_say_when_and_how_often_the_run_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, restarts in ((0, 0), (2, 1), (2, 2), (0, 3)):
        log = opened(tmp_path, start)
        for step in (start + 1, start + 2):
            log.row(row(step))
        rows = read_metrics(path)
        assert [r["step"] for r in rows] == list(range(1, start + 3))
        assert [r["restarts"] for r in rows[start:]] == [restarts] * 2
        assert abs(rows[-1]["time"] - time.time()) < 60
    inode = path.stat().st_ino
    opened(tmp_path, 2)
    assert path.stat().st_ino == inode  # nothing to drop
    path.write_text(path.read_text() + '{"step": 3, "lo')  # a crash cut this line
    opened(tmp_path, 2).row(row(3))
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    Log(RECIPE).row(row(4))  # of a rank that has no file


def test_alerts_are_printed_once_also_over_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = opened(tmp_path)
    for n in range(1, 100):
        log.row(row(n, loss=1.0 + n % 3 / 100, skipped_steps=int(n >= 50)))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["alert at step 50", "over at step 70"]
    log = opened(tmp_path, 60)
    for n in range(61, 80):
        log.row(row(n, skipped_steps=1))
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["over at step 70"]


def test_a_line_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes now and then and at the end, and never where all is quiet."""
    now = 50.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for quiet in (True, False):
        log = Log(replace(RECIPE, steps=100), quiet)
        for step, seconds in ((10, 1.0), (20, PLAIN_EVERY_S - 0.5), (30, 0.5), (99, 1.0), (100, 1.0)):
            now += seconds
            log.progress(row(step, epoch=step / 40, lr=1e-3, skipped=3, skipped_steps=1))
    lines = capsys.readouterr().err.splitlines()
    assert [one.partition("/")[0] for one in lines] == [f"step {n}" for n in (10, 30, 100)]
    expected = "step 10/100  ETA 0:09  epoch 0.25  loss 1  100 pairs/s  data wait 25%  lr 1.00e-03  3 bad samples"
    assert lines[0].startswith(expected)


def test_time_left_follows_the_recent_rate() -> None:
    assert time_left(50, []) is None
    rates = [1.0] * 100 + [50.0] * 20
    assert time_left(1000, rates) == pytest.approx(20)
    assert time_left(1000, [*rates, 25.0]) == pytest.approx(1000 * (19 / 50 + 1 / 25) / 20)  # rows hold equally many


def test_durations_and_rates() -> None:
    durations = {None: "?", 0: "0:00", 65: "1:05", 3600: "1:00:00", 86399: "23:59:59", 1e6: "11d 13h"}
    assert {seconds: duration(seconds) for seconds in durations} == durations
    rates = {0.0: "0", 0.134: "0.13", 2.96: "3", 9.949: "9.9", 9.96: "10", 1523.4: "1,523"}
    assert {rate: per_second(rate) for rate in rates} == rates
