"""Mirror the rows of runs to TensorBoard events, which can be made again from the rows."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kiloword.checkpoint.files import replacing
from kiloword.watch.rows import RowReader
from kiloword.watch.rule import number
from kiloword.watch.runs import Watched

NO_CURVE = ("step", "time", "restarts")
PLACE = "mirrored.json"


def check_tensorboard() -> None:
    """Raises: ValueError when the package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard is not installed: pip install 'kiloword[log]', or omit it.")


@dataclass(frozen=True)
class Place:
    """The last mirrored row, and the first row of the run."""

    first: str = ""  # a different first row means another run, or one that began again
    restarts: int = -1
    step: int = -1

    def after(self, row: dict[str, Any]) -> Place:
        """The place after mirroring `row`."""
        return Place(self.first or _first(row), row.get("restarts", 0), row["step"])


def what_is_new(rows: list[dict[str, Any]], place: Place) -> tuple[list[dict[str, Any]], int]:
    """The rows to write, and the step from which TensorBoard must drop earlier events.

    A resumed run keeps the rows up to its state; its new rows have a higher number of restarts. The last step is always
    written again, as its writer may have been killed before it recorded the place.
    """
    if not rows or place.first != _first(rows[0]):
        return rows, 0
    kept = [row["step"] for row in rows if row.get("restarts", 0) <= place.restarts and row["step"] <= place.step]
    forget = min(kept[-1] + 1, place.step)
    return [row for row in rows if row["step"] >= forget], forget


def _first(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


class Mirror:
    """Writes the new rows of one run at each `update`, also after the run continued in another process.

    Rows that a resumed run writes again replace the old ones: an event makes TensorBoard drop those.
    """

    def __init__(self, run: Path, folder: Path) -> None:
        check_tensorboard()
        self.folder, self.place = folder, _read(folder / PLACE)
        self.reader = RowReader(run / "metrics.jsonl")
        self._writer: Any = None

    def update(self) -> int:
        """Returns the number of rows written. Raises: OSError (disk full, no permission)."""
        times = self.reader.times
        rows = list(self.reader())
        if self.reader.times != times and (self.place.first or any(self.folder.glob("events.out.*"))):
            rows, forget = what_is_new(rows, self.place)
            self._forget(forget)
        if not rows:
            return 0
        place = self.place
        for row in rows:
            self._write(row)
            place = place.after(row)
        self.writer.flush()
        self._settle(place)
        return len(rows)

    @property
    def writer(self) -> Any:
        """TensorBoard's writer of event files, opened at the first event."""
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self.folder))
        return self._writer

    def _forget(self, step: int) -> None:
        """Make TensorBoard drop all events from `step` on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        self.place = Place() if step == 0 else self.place

    def _write(self, row: dict[str, Any]) -> None:
        """One event with every finite number of the row, in single precision."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: number(row, name) for name in row if name not in NO_CURVE}
        values = [Summary.Value(tag=name, simple_value=v) for name, v in numbers.items() if v is not None]
        wall = number(row, "time") or time.time()
        self.writer.add_event(Event(wall_time=wall, step=row["step"], summary=Summary(value=values)))

    def _settle(self, place: Place) -> None:
        self.place = place
        with replacing(self.folder / PLACE) as file:
            file.write(json.dumps(asdict(place)).encode())


class Mirrors:
    """A mirror for each run in a subfolder of `folder`; none without a folder."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None:
            check_tensorboard()
        self.folder = folder
        self._mirrors: dict[Path, Mirror] = {}

    def update(self, runs: Iterable[Watched]) -> None:
        """Mirror new rows of the runs. Raises: ValueError when the folder cannot be written."""
        for run in runs if self.folder is not None else ():
            assert self.folder is not None
            if run.folder not in self._mirrors:
                name = "-".join(part for part in Path(run.name).parts if part not in ("/", "..", "."))
                self._mirrors[run.folder] = Mirror(run.folder, self.folder / (name or "run"))
            try:
                self._mirrors[run.folder].update()
            except OSError as e:
                raise ValueError(f"--tensorboard {self.folder} cannot be written: {e.strerror or e}.") from e


def in_training(run: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """A function that mirrors a run into its folder; an error is reported once and does not stop training."""
    mirror = Mirror(run, run / "tensorboard")
    broken = False

    def update() -> None:
        nonlocal broken
        if broken:
            return
        try:
            mirror.update()
        except OSError as e:
            broken = True
            say(f"TensorBoard's events cannot be written ({e.strerror or e}): the run goes on without.")

    return update


def _read(path: Path) -> Place:
    try:
        return Place(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Place()
