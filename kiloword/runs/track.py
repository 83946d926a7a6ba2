"""`--log-to wandb` and `mlflow`: a process beside the run sends the rows of its `metrics.jsonl` to a server.

The run never waits for the server, nor for the server's library. What is not sent when the run ends is sent by the next
process that tracks the folder.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kiloword.addresses import scrubbed
from kiloword.config.options import Trackers
from kiloword.runs.rows import RowReader
from kiloword.runs.sinks import Sink, opened
from kiloword.terminal import warn

EVERY = 2.0  # seconds between looks at the rows
WAITS = (5.0, 300.0)  # seconds before the server is tried again: first, and at most, each wait twice the one before
GRACE = 30.0  # seconds that the server has when the run ends
COMPLETE = b"complete\n"
LATER = "The run goes on; rows are kept and sent later."
CATCH_UP = "`kiloword watch {run} --log-to {kind}` sends them"


class Tracking:
    """The rows of one run on their way to a server. An error is printed once, until the server answers again."""

    def __init__(self, kind: Trackers, run: Path, open_sink: Callable[[Trackers, Path], Sink] = opened) -> None:
        self.kind, self.run, self._open = kind, run, open_sink
        self.sink: Sink | None = None
        self._reader = RowReader(run / "metrics.jsonl")
        self._warned, self._wait, self._next = False, WAITS[0], 0.0

    def update(self, now: float) -> bool:
        """Send new rows, unless the server failed a moment ago. Returns: whether all rows were handed over."""
        if now < self._next:
            return False
        try:
            if self.sink is None:  # it asks which rows the server has: all are read again
                self._reader = RowReader(self._reader.path)
                self.sink = self._open(self.kind, self.run)
            self.sink.send(list(self._reader()))
        except Exception as e:
            self._failed(e, now)
            return False
        self._warned, self._wait = False, WAITS[0]
        return True

    def _failed(self, error: Exception, now: float) -> None:
        self.sink, self._next = None, now + self._wait
        self._wait = min(2 * self._wait, WAITS[1])
        if not self._warned:
            reason = scrubbed(" ".join(str(error).split()))[:600] or type(error).__name__
            warn(f"{self.kind} does not take the rows of {self.run} ({reason}). {LATER}")
        self._warned = True

    def close(self, complete: bool) -> bool:
        """Send what is left, and end. Returns: whether the server has all rows."""
        self._next = 0.0
        if not self.update(0.0) or self.sink is None:
            return False
        try:
            self.sink.close(complete)
        except Exception as e:
            self._failed(e, 0.0)
            return False
        return True


class Tracker:
    """The process that tracks a run, as seen from the run."""

    def __init__(self, kind: Trackers, run: Path) -> None:
        self.kind, self.run = kind, run
        command = [sys.executable, "-m", "kiloword.runs.track", kind, str(run)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self, complete: bool) -> None:
        """End it, after at most GRACE seconds. Args: complete: no row will follow for the last step."""
        pipe: Any = self._process.stdin
        with suppress(OSError):
            if complete:
                pipe.write(COMPLETE)
            pipe.close()
        try:
            sent = self._process.wait(GRACE) == 0
        except subprocess.TimeoutExpired:
            sent = False
        with suppress(OSError):  # helpers of its library end with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not sent:
            warn(f"{self.kind} lacks rows of {self.run}: {CATCH_UP.format(run=self.run, kind=self.kind)}.")


def catch_up(kind: Trackers, run: Path, complete: bool) -> None:
    """Send the rows that the server lacks. Raises: ValueError when it does not take them."""
    if not Tracking(kind, run).close(complete):
        raise ValueError(f"{kind} did not take the rows of {run}: see above; the same command tries again.")


def main(kind: Any, run: Path) -> int:
    """The process beside a run: until its input ends. Returns: its exit code, 0 if the server has all rows."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run ends this process
        signal.signal(number, signal.SIG_IGN)
    tracking, words = Tracking(kind, run), b""
    while True:
        ready, _, _ = select.select([sys.stdin.buffer], [], [], EVERY)
        if ready:
            part = os.read(sys.stdin.fileno(), 100)
            words += part
            if not part:
                break
        tracking.update(time.monotonic())
    return 0 if tracking.close(words == COMPLETE) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
