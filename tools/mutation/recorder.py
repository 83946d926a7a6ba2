"""Records which lines of the package each test runs: a pytest plugin, and the same in the processes that a test starts.

sys.settrace alone: sys.monitoring needs Python 3.12, and `coverage` would be one more package to lock. A function is no
longer traced in a test once 10 calls in a row showed no new line, so that a main run costs about twice its own time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

QUIET_CALLS, QUIET_LINES = 10, 150


class Recorder:
    """Writes `test TAB file TAB line` to a file of its own for each process, once for each line that a test runs."""

    def __init__(self, package: str, out: str, test: str = "") -> None:
        self.package, self.out, self.test = package.rstrip("/") + "/", out, test
        self.seen: dict[CodeType, set[int] | None] = {}
        self.quiet: dict[CodeType, int] = {}
        self.file: int | None = None
        os.register_at_fork(after_in_child=self.reopen)

    def start(self) -> None:
        threading.settrace(self.on_call)
        sys.settrace(self.on_call)

    def reopen(self) -> None:
        self.file = None

    def begin(self, test: str) -> None:
        self.test, self.seen, self.quiet = test, {}, {}

    def write(self, text: str) -> None:
        if self.file is None:
            name = os.path.join(self.out, f"{os.getpid()}.{os.urandom(4).hex()}.tsv")
            self.file = os.open(name, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(self.file, text.encode())

    def on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        lines = self.seen.get(code, ...)
        if lines is None:
            return None
        if lines is ...:
            own = code.co_filename.startswith(self.package)
            lines = self.seen[code] = set() if own else None
            if lines is None:
                return None
        quiet = self.quiet.get(code, 0)
        if quiet > QUIET_CALLS:
            return None
        self.quiet[code] = quiet + 1
        return self.lines_of(code, lines)  # type: ignore[arg-type]

    def lines_of(self, code: CodeType, lines: set[int]) -> Callable[..., Any]:
        name, left = code.co_filename[len(self.package) :], QUIET_LINES

        def on_line(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal left
            line = frame.f_lineno
            left -= 1
            if line not in lines:
                lines.add(line)
                left, self.quiet[code] = QUIET_LINES, 0
                self.write(f"{self.test}\t{name}\t{line}\n")
            elif left < 0:
                frame.f_trace_lines = False
            return on_line

        return on_line


def started() -> Recorder | None:
    """A recorder as the environment asks for, running; none where it asks for none."""
    if not (out := os.environ.get("MUTATE_RECORD")):
        return None
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    recorder = Recorder(os.environ["MUTATE_PACKAGE"], out, test)
    recorder.start()
    return recorder


RECORDER = started()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if RECORDER is None:
        return (yield)
    RECORDER.begin(item.nodeid)
    before = os.times()
    done = yield
    cost = sum(os.times()[:4]) - sum(before[:4])
    RECORDER.write(f"{item.nodeid}\tseconds\t{cost:.3f}\t{os.times()[4] - before[4]:.3f}\n")
    RECORDER.begin("")
    return done


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if RECORDER is not None and report.outcome == "failed":
        RECORDER.write(f"{report.nodeid}\tfailed\t1\n")
