"""Lines of progress, by a clock that the test moves: of a run."""

from __future__ import annotations

import io
from typing import Any

import pytest

from kiloword.terminal import progress
from kiloword.terminal.progress import PLAIN_EVERY_S
from kiloword.training.log import Log
from kiloword.watch.rule import About
from terminals import Terminal


class Clock:
    now = 50.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.25, "pairs_per_s": 100.0, "data_wait": 0.25, **more}


def test_a_run_on_a_terminal_and_elsewhere(clock: Clock, terminal: Terminal) -> None:
    file, nothing = io.StringIO(), io.StringIO()
    logs = [Log(None, 100, out=out, about=About(batch=10), quiet=out is nothing) for out in (terminal, file, nothing)]
    for step, seconds in ((10, 1.0), (20, PLAIN_EVERY_S - 0.5), (30, 0.5), (99, 1.0), (100, 1.0), (101, 1.0)):
        clock.now += seconds
        for one in logs:
            one.progress(row(step, epoch=step / 40))
    for one in logs:
        one.say("first.")
        one.say("second.")
    start, wait = "step 10/100  epoch 0.25  loss 1.250  100 pairs/s  ETA 0:09", "data wait 25%"
    lines = [*dict.fromkeys(filter(None, terminal.frames))]
    assert lines[0] == f"{start}  {wait}"
    assert [line.partition("/")[0] for line in lines[:-2]] == [f"step {n}" for n in (10, 20, 30, 99, 100, 101)]
    assert terminal.frames[-3:] == ["first.", "second.", ""]
    plain = file.getvalue().splitlines()
    assert plain[0] == f"{start}  {wait}"
    assert [line.partition("/")[0] for line in plain] == [
        *(f"step {n}" for n in (10, 30, 100, 101)),
        "first.",
        "second.",
    ]
    assert nothing.getvalue() == ""
