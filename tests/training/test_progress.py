"""Lines of progress, by a clock that the test moves: of a run and of `kiloword embed`."""

from __future__ import annotations

import io
from typing import Any

import pytest

from kiloword.stores import pieces as tables
from kiloword.stores.pieces import ProgressReport
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
    monkeypatch.setattr(tables, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_features_are_counted_on_a_terminal(clock: Clock, terminal: Terminal) -> None:
    """A line that rewrites itself; a message gets a line of its own."""
    report = ProgressReport(terminal)
    report.start(3000, 3000)
    for rows, seconds in ((500, 0.5), (500, 0.25)):
        clock.now += seconds
        report.add(rows, 2 * rows)
    first = "row 500/3,000  1,000 images/s  2,000 captions/s  ETA 0:02"
    second = "row 1,000/3,000  1,333 images/s  2,667 captions/s  ETA 0:01"
    assert terminal.frames == [first, second]
    report.say("one.")
    report.say("two.")
    assert terminal.frames[1:] == [second, "one.", "two.", ""]
    clock.now += 0.25
    report.add(1000, 0, ranks=3)  # of 2,000 that are left
    last = "row 3,000/3,000  3,000 images/s  2,000 captions/s  ETA 0:00"
    assert terminal.frames[-2:] == [last, ""]
    report.start(1, 1)
    clock.now += 1
    report.add(1, 1)
    assert terminal.frames[-2:] == ["row 1/1  1 images/s  1 captions/s  ETA 0:00", ""]


def test_elsewhere_lines_are_rare_but_the_last_comes(clock: Clock) -> None:
    file = io.StringIO()
    report = ProgressReport(file)
    report.start(100, 4100)
    for seconds in (1.0, PLAIN_EVERY_S - 1.5, 0.5, 9.0, 1.0, 1.0):
        clock.now += seconds
        report.add(10, 0)
    report.add(40, 7)
    assert [line.partition("  ")[0] for line in file.getvalue().splitlines()] == [
        "4,000 of 4,100 rows are done already.",
        "row 30/100",
        "row 50/100",
        "row 100/100",
    ]
    assert file.getvalue().endswith("\n")
    silent = ProgressReport(None)
    silent.start(3, 4)
    silent.add(3, 3)
    silent.say("nobody reads this")


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
