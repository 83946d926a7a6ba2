"""Mirror the rows of runs to TensorBoard events.

The events can be made again from the rows: when a mirror starts, or a resumed run rewrites its rows, all are written
anew, and an event makes TensorBoard drop those that it read before. (`SummaryWriter(purge_step=0)` writes the same
event, but needs torch and one event per value.)
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kiloword.errors import needs
from kiloword.runs.rows import RowReader, number
from kiloword.runs.runs import Watched

NO_CURVE = ("step", "time", "restarts")
SUFFIX = ".kiloword"  # end of the names of the files written here


def check_tensorboard(flag: str = "--tensorboard") -> None:
    """Args: flag: that asks for it. Raises: ValueError when the package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(needs(flag, "tensorboard", "log", ", or omit it."))


class Mirror:
    """Writes the new rows of one run at each `update`."""

    def __init__(self, run: Path, folder: Path) -> None:
        check_tensorboard()
        self.folder, self.reader = folder, RowReader(run / "metrics.jsonl")
        self._writer: Any = None

    def update(self) -> None:
        """Raises: OSError (disk full, no permission)."""
        times = self.reader.times
        for row in self.reader():
            if self.reader.times != times:  # read from the first row on
                times = self.reader.times
                self._begin()
            self._write(row)
        if self._writer is not None:
            self._writer.flush()

    def _begin(self) -> None:
        """Replace the events by a file whose first event makes TensorBoard drop all earlier ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is not None:
            self._writer.close()
        for old in self.folder.glob(f"events.out.*{SUFFIX}"):
            os.truncate(old, 0)  # a TensorBoard that reads it would not go on to the next file if it were gone
        self._writer = EventFileWriter(str(self.folder), filename_suffix=SUFFIX)
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=start))

    def _write(self, row: dict[str, Any]) -> None:
        """One event with every finite number of the row, in single precision."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: number(row, name) for name in row if name not in NO_CURVE}
        values = [Summary.Value(tag=name, simple_value=v) for name, v in numbers.items() if v is not None]
        wall = number(row, "time") or time.time()
        self._writer.add_event(Event(wall_time=wall, step=row["step"], summary=Summary(value=values)))


class Mirrors:
    """A mirror for each run in a subfolder of `folder`; none without a folder."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None:
            check_tensorboard()
        self.folder = folder
        self._mirrors: dict[Path, Mirror] = {}

    def update(self, runs: Iterable[Watched]) -> None:
        """Mirror new rows of the runs. Raises: ValueError when the folder cannot be written."""
        if self.folder is None:
            return
        for run in runs:
            if run.folder not in self._mirrors:
                name = "-".join(part for part in Path(run.name).parts if part not in ("/", "..", "."))
                self._mirrors[run.folder] = Mirror(run.folder, self.folder / (name or "run"))
            try:
                self._mirrors[run.folder].update()
            except OSError as e:
                raise ValueError(f"--tensorboard {self.folder} cannot be written: {e.strerror or e}.") from e


def in_training(run: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """A function that mirrors a run into its folder; an error is reported once and does not stop training."""
    mirror: Mirror | None = Mirror(run, run / "tensorboard")

    def update() -> None:
        nonlocal mirror
        try:
            if mirror is not None:
                mirror.update()
        except OSError as e:
            mirror = None
            say(f"TensorBoard's events cannot be written ({e.strerror or e}): the run goes on without.")

    return update
