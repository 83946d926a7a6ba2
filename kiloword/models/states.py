"""The states of a run: what a rank writes, which state is the newest, and what is read of it on any number of ranks.

A state is `state/step-N/` with one safetensors file per rank, and `state/step-N.json` with numbers and checksums. The
JSON is written last: without it the state does not exist. The files have the format of `HuggingFaceStorageWriter` of
`torch.distributed.checkpoint` with `save_distributed=True`; its writer is not used, as it writes under the final name,
keeps two more copies of the part in memory and computes no checksum.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.files import write_json
from kiloword.models.tensors import Spec, checksum, spec_of, write_tensors
from kiloword.terminal import warn as say_warning

PLACES = "DCP_SHARDING_INFO"  # key of the metadata of a part: where its rows begin in their tensors
Offsets = tuple[int, ...]
Part = dict[str, tuple[Tensor, Offsets]]  # what one rank writes: rows of each tensor, and where they begin in it


@torch.no_grad()
def copy_part(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> Part:
    """Copy what this rank writes of `tensors`, which may change afterwards.

    These are its rows of tensors that are sharded over all ranks, and its share, by size, of plain ones, which are
    equal on all ranks.

    Args: buffers: copies in host memory, used again: new pages cost 10 times the copying, and copies from a GPU need
    pinned memory.
    """
    part = Part()
    for n, name in enumerate(sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))):
        whole = tensors[name].detach()
        value, offsets = collectives.local(whole), (0,) * whole.dim()
        mine = n % collectives.ranks() == collectives.rank()
        if collectives.sharded(whole):
            mine = value.numel() > 0
            offsets = tuple(whole.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
        if mine:
            if name not in buffers or spec_of(buffers[name]) != spec_of(value):
                buffers[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            part[name] = buffers[name].copy_(value, non_blocking=True), offsets
    if any(value.is_pinned() for value, _ in part.values()):
        torch.cuda.synchronize()
    return part


def write_part(folder: Path, part: Part, rank: int, ranks: int) -> dict[str, str]:
    """Write a rank's file. Returns: name -> SHA-256. Raises: SaveError."""
    path = folder / f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"
    places = {name: {"saved_offsets": offsets} for name, (_, offsets) in part.items()}
    return {path.name: write_tensors(path, {k: value for k, (value, _) in part.items()}, {PLACES: json.dumps(places)})}


class SavedState:
    """A whole state on disk, mapped into memory.

    Args: files: of its tensors; numbers: its JSON. Attributes: specs: dtypes and shapes of its tensors.
    """

    def __init__(self, files: Sequence[Path], numbers: dict[str, Any]) -> None:
        self.files, self.numbers = list(files), numbers
        self._parts: defaultdict[str, list[tuple[list[int], Tensor]]] = defaultdict(list)
        for path in files:
            with safe_open(path, framework="pt") as file:
                places = json.loads(file.metadata()[PLACES])
            for name, part in load_file(path).items():
                self._parts[name].append((places[name]["saved_offsets"], part))
        self.specs: dict[str, Spec] = {}
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part[0])
            (dtype, shape), rows = spec_of(parts[0][1]), sum(len(part) for _, part in parts if part.dim())
            self.specs[name] = dtype, (rows, *shape[1:])[: len(shape)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill plain or sharded tensors in place, on any number of ranks."""
        for name, value in tensors.items():
            collectives.fill(value, self.whole(name))

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        parts = [part for _, part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def model(self) -> dict[str, Tensor]:
        """The tensors of the model, adapters included; averaged ones where there are any."""
        names = [place.removeprefix("learner/") for place in self.specs if place.startswith("learner/model.")]
        kinds = {name: "average" if f"average/{name}" in self.specs else "learner" for name in names}
        return {name.removeprefix("model."): self.whole(f"{kind}/{name}") for name, kind in kinds.items()}


def shards_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


def states(folder: Path) -> list[Path]:
    """The JSON files of all states, newest first."""
    return sorted(folder.glob(f"step-{'[0-9]' * 9}.json"), reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def steps_done(folder: Path) -> int:
    """Number of steps of the newest state; 0 without a state."""
    return max(map(_step, states(folder)), default=0)


def write_numbers(folder: Path, step: int, files: Mapping[str, str], numbers: Mapping[str, Any]) -> None:
    """Write the JSON that makes a state exist. Args: files: names in its folder -> SHA-256. Raises: SaveError."""
    write_json(folder / f"step-{step:09d}.json", {"step": step, **numbers, "files": dict(files)})


def drop_old(folder: Path, keep: int, step: int) -> None:
    """Keep the newest `keep` states up to that of this step; remove others, and remains of crashes. Raises: OSError.

    A state of a later step is one that could not be read when the run was resumed: it takes the place of no good one.
    """
    kept = [path for path in states(folder) if _step(path) <= step][:keep]
    for path in states(folder):
        if path not in kept:
            path.unlink()
    for path in folder.glob("step-*"):
        if path.is_dir() and path.with_suffix(".json") not in kept:
            shutil.rmtree(path)


def newest(folder: Path, warn: Callable[[str], None]) -> SavedState | None:
    """The newest undamaged state, the same on all ranks, or None without states. A collective.

    Rank 0 lists the states, and every rank checks a share of the files. `warn` gets a message for each damaged state.
    Raises: ValueError when all are damaged.
    """
    names = collectives.all_lists([path.name for path in states(folder)] if collectives.rank() == 0 else [])
    for name in names:
        stored, problems = None, list[str]()
        try:
            stored = _read(folder / name)
        except ValueError as e:
            problems = [str(e)]
        problems = collectives.all_lists(problems)
        if not problems:
            return stored
        warn(f"{problems[0]}: falling back to the one before.")
    if names:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def open_state(path: Path) -> SavedState:
    """A state of a run that may still train: `OUT/state` is the newest one, `OUT/state/step-000000100` that of a step.

    A collective. Raises: ValueError where there is none, it is damaged, or the run has dropped it meanwhile.
    """
    folder = path if path.name == "state" else path.parent
    file = folder / f"{path.stem}.json"
    stored = newest(path, say_warning) if path == folder else _read(file) if file in states(folder) else None
    if stored is None:
        known = ", ".join(one.stem for one in states(folder)) or "none"
        raise ValueError(f"{path} is no state: expected one of a run that has saved some; {folder} has {known}.")
    return stored


def _read(path: Path) -> SavedState:
    """The state of a JSON; each rank compares the checksums of its share of the files. Raises: ValueError."""
    try:
        numbers = json.loads(path.read_text("utf-8"))
        files = [path.with_suffix("") / name for name in sorted(numbers["files"])]
        for file in files[collectives.rank() :: collectives.ranks()]:
            if checksum(file) != numbers["files"][file.name]:
                raise ValueError(f"the checksum of {file.name} differs")
        return SavedState(files, numbers)
    except Exception as e:
        raise ValueError(f"state {path.stem} is damaged ({type(e).__name__}: {str(e)[:200]})") from e
