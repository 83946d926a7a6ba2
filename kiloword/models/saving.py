"""The state and the model folder of a run, written in the background while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kiloword.config.recipes import ModelFile
from kiloword.distributed import collectives
from kiloword.files import SaveError, sync, write_atomic, write_json
from kiloword.models.adapters import merged, write_adapter
from kiloword.models.model_folder import WEIGHTS, not_finite
from kiloword.models.states import Part, SavedState, copy_part, drop_old, shards_folder, write_numbers, write_part
from kiloword.models.tensors import write_tensors

STOPS = "The run stops; what was saved before is kept. Start again in another --out with a smaller --optim.lr."
Files = dict[str, str]  # names of a state's files -> SHA-256


class Snapshot(NamedTuple):
    """What is saved of a run after `step`. Args: numbers: as JSON holds them; file: of the model folder."""

    step: int
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    file: ModelFile


class Saver:
    """Saves in the background, one save at a time.

    Training waits only for the copy to host memory. Then a thread on every rank writes its part; when all have, a
    thread on rank 0 makes the model folder from the parts and writes the state's numbers. The threads use no
    collectives: ranks agree in `advance`, which all ranks call at the same place.

    Args: out: folder of the run; keep: number of states to keep, the newest ones; snapshot: makes the run's at a save;
    base: the model folder that the run adapts, where OUT/adapter is to hold its adapters apart.
    """

    def __init__(self, out: Path, keep: int, snapshot: Callable[[], Snapshot], base: Path | None = None) -> None:
        self.out, self.keep, self.snapshot, self.base = out, keep, snapshot, base
        self.last = 0  # step of the newest save
        self._buffers: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(1, "save")
        self._job: Future[Files] | None = None  # what this rank does for the save in progress
        self._then: Callable[[Files], Files] | None = None  # what rank 0 does after all ranks have written

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the save in progress; after an error with several ranks do not, as other ranks may be gone."""
        with self._pool:
            if kind is None:
                self.finish()
            elif collectives.ranks() == 1 and issubclass(kind, Exception):
                with suppress(SaveError):  # the first error is the one to report
                    self.finish()

    @property
    def writing(self) -> bool:
        """Whether this rank is writing."""
        return self._job is not None and not self._job.done()

    def save(self) -> None:
        """Begin to save the run in its present state. Raises: SaveError of the previous save."""
        self.finish()
        shot = self.snapshot()
        part, folder = copy_part(shot.tensors, self._buffers), shards_folder(self.out / "state", shot.step)
        self.last, self._then = shot.step, partial(self._commit, shot._replace(tensors={}), folder)
        self._job = self._pool.submit(_write, folder, part, collectives.rank(), collectives.ranks())

    def advance(self) -> None:
        """Start the next part of the save in progress, if any, as soon as all ranks have written theirs.

        Raises: SaveError on all ranks.
        """
        if self._job is None:
            return
        try:
            outcome: Files | str = self._job.result()
        except SaveError as e:
            outcome = str(e)
        except Exception as e:
            outcome = f"cannot save ({type(e).__name__}: {e}). What was there before is kept."
        collectives.wait(patient=True)  # a disk may be slow
        outcomes = collectives.all_lists([outcome])
        self._job, then, self._then = None, self._then, None
        files: Files = {}
        for one in outcomes:
            if isinstance(one, str):
                raise SaveError(one)
            files |= one
        if then is not None:
            self._job = self._pool.submit(then if collectives.rank() == 0 else dict, files)

    def finish(self) -> None:
        """Wait until the save in progress is complete. Raises: SaveError on all ranks."""
        while self._job is not None:
            self.advance()

    def _commit(self, shot: Snapshot, folder: Path, files: Files) -> Files:
        """Make the parts a state: flush the metrics, write the model folder, and write the state's numbers last.

        A crash before the numbers repeats some steps; it never leaves a finished run without its model.
        """
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise SaveError(
                f"{folder / missing[0]} of another rank is not here: --out must be a folder that all ranks share."
            )
        if (self.out / "metrics.jsonl").exists():
            sync(self.out / "metrics.jsonl")
        weights, model = SavedState([folder / name for name in files], {}).model, self.out / "model"
        write_json(model / "config.json", asdict(shot.file))
        write_tensors(model / WEIGHTS, merged(weights))
        if self.base is not None:
            for name in ("tokenizer.json", "config.json"):
                write_atomic(self.out / "adapter" / name, (model / name).read_bytes())
            write_adapter(self.out / "adapter", self.base, weights)
        write_numbers(folder.parent, shot.step, files, shot.numbers)
        drop_old(folder.parent, self.keep, shot.step)
        return files


def _write(folder: Path, part: Part, rank: int, ranks: int) -> Files:
    """Write a rank's part of a state whose weights, moments and averages are all finite. Raises: SaveError."""
    if bad := not_finite({name: value for name, (value, _) in part.items()}):
        first = min(bad, key=lambda name: not name.startswith("learner/"))
        raise SaveError(f"{first} is NaN or infinite ({len(bad)} tensors of {folder.name}). {STOPS}")
    return write_part(folder, part, rank, ranks)
