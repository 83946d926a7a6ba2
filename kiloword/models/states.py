"""The states of a run: what a rank writes, which state is the newest, and what is read of it on any number of ranks.

A state is `state/step-N/` with one safetensors file per rank, and `state/step-N.json` with numbers and checksums. The
JSON is written last: without it the state does not exist. The files have the format of `HuggingFaceStorageWriter` of
`torch.distributed.checkpoint` with `save_distributed=True`; its writer is not used, as it writes under the final name,
keeps two more copies of the part in memory and computes no checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.files import SaveError, write_json
from kiloword.models.tensors import DTYPES, Spec, Tensors, spec_of, write_tensors
from kiloword.terminal import warn as say_warning

PLACES = "DCP_SHARDING_INFO"  # key of the metadata of a part: where its chunks begin in their tensors
MAX_JSON = 1 << 28  # bytes; a bad sample takes about 100
_NAME = re.compile(r"step-\d{1,18}\.json", re.ASCII)
Offsets = tuple[int, ...]
Part = dict[str, tuple[Tensor, Offsets]]  # what one rank writes: a chunk of each tensor, and where it begins in it


def chunk_of(value: Tensor) -> tuple[Tensor, Offsets]:
    """This rank's chunk of a plain or sharded tensor, and where it begins."""
    if not collectives.sharded(value):
        return value.detach(), (0,) * value.dim()
    (chunk,) = value.__create_chunk_list__()  # type: ignore[attr-defined]
    return collectives.local(value.detach()), tuple(chunk.offsets)


@torch.no_grad()
def copy_part(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> Part:
    """Copy what this rank writes of `tensors`, which may change afterwards.

    These are its chunks of tensors that are sharded over all ranks, and its share, by size, of plain ones, which are
    equal on all ranks.

    Args: buffers: copies in host memory, used again: new pages cost 10 times the copying, and copies from a GPU need
    pinned memory.
    """
    part, loads = Part(), [0] * collectives.ranks()
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        value, offsets = chunk_of(tensors[name])
        owner = collectives.rank() if value.numel() else -1
        if not collectives.sharded(tensors[name]):
            owner = loads.index(min(loads))
            loads[owner] += max(1, value.nbytes)
        if owner == collectives.rank():
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
    """A whole state on disk.

    Args: files: of its tensors; numbers: its JSON.
    Attributes: specs: dtypes and shapes of its tensors.
    Raises: ValueError for files that are not safetensors, or not the whole of their tensors; nothing is allocated.
    """

    def __init__(self, files: Sequence[Path], numbers: dict[str, Any]) -> None:
        self.files, self.numbers = list(files), numbers
        self.specs: dict[str, Spec] = {}
        self._chunks: defaultdict[str, list[tuple[Any, Offsets, Offsets]]] = defaultdict(list)
        for path in files:
            try:
                self._open(path)
            except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as e:
                raise ValueError(f"{path.name}: {type(e).__name__}: {str(e)[:200]}") from e
        for name, (_, shape) in self.specs.items():
            if sum(math.prod(size) for _, _, size in self._chunks[name]) != math.prod(shape):
                raise ValueError(f"{files[0].parent.name}: its parts do not make up {name[:200]}")

    def _open(self, path: Path) -> None:
        """Note the chunks of a part. The file stays mapped into memory."""
        file: Any = safe_open(path, framework="pt")
        places = json.loads(file.metadata()[PLACES])
        for name, place in places.items():
            chunk, start = file.get_slice(name), tuple(place["saved_offsets"])
            size = tuple(chunk.get_shape())
            end = tuple(a + n for a, n in zip(start, size, strict=True))
            whole = self.specs.get(name, (None, end))[1]
            if min(start, default=0) < 0:
                raise ValueError(f"{name[:200]} begins at {start}")
            self.specs[name] = DTYPES[chunk.get_dtype()], tuple(map(max, end, whole))
            self._chunks[name].append((file, start, size))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill plain or sharded tensors in place; each rank reads its parts."""
        for name, value in tensors.items():
            chunk, start = chunk_of(value)
            for file, first, size in self._chunks[name]:
                low = tuple(map(max, start, first))
                high = [min(a + n, b + m) for a, n, b, m in zip(start, chunk.shape, first, size, strict=True)]
                if all(a < b for a, b in zip(low, high, strict=True)):
                    here, there = (
                        tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                        for origin in (start, first)
                    )
                    chunk[here].copy_(file.get_tensor(name)[there])

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        dtype, shape = self.specs[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.load({name: tensor})
        return tensor

    @property
    def model(self) -> Tensors:
        """The tensors of the model, adapters included; averaged ones where there are any."""
        names = {}
        for place in self.specs:
            if place.startswith("learner/model."):
                name = place.removeprefix("learner/model.")
                averaged = f"average/model.{name}"
                names[name] = averaged if averaged in self.specs else place
        specs = {name: self.specs[place] for name, place in names.items()}
        return Tensors(specs, lambda name: self.whole(names[name]))


def shards_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


def states(folder: Path) -> list[Path]:
    """The JSON files of all states, newest first."""
    named = [path for path in folder.glob("step-*.json") if _NAME.fullmatch(path.name)]
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def steps_done(folder: Path) -> int:
    """Number of steps of the newest state; 0 without a state."""
    return max(map(_step, states(folder)), default=0)


def write_numbers(folder: Path, step: int, files: Mapping[str, str], numbers: Mapping[str, Any]) -> None:
    """Write the JSON that makes a state exist. Args: files: names in its folder -> SHA-256. Raises: SaveError."""
    write_json(folder / f"step-{step:09d}.json", {"step": step, **numbers, "files": dict(files)})


def drop_old(folder: Path, keep: int, step: int) -> None:
    """Keep the newest `keep` states up to that of this step; remove others, and remains of crashes. Raises: SaveError.

    A state of a later step is one that could not be read when the run was resumed: it takes the place of no good one.
    """
    try:
        kept = [path for path in states(folder) if _step(path) <= step][:keep]
        for path in states(folder):
            if path not in kept:
                path.unlink()
        for path in folder.glob("step-*"):
            if path.is_dir() and path.with_suffix(".json") not in kept:
                shutil.rmtree(path)
    except OSError as e:
        raise SaveError(f"cannot drop old states in {folder}: {e.strerror or e}.") from e


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
        warn(f"state {Path(name).stem} is damaged ({problems[0]}): falling back to the one before.")
    if names:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def open_state(path: Path) -> SavedState:
    """A state of a run that may still train: `OUT/state` is the newest one, `OUT/state/step-000000100` that of a step.

    A collective. Raises: ValueError where there is none, it is damaged, or the run has dropped it meanwhile.
    """
    if path.name == "state":
        stored = newest(path, say_warning)
        if stored is None:
            raise ValueError(f"{path} holds no state: expected the state folder of a run that has saved one.")
        return stored
    file = path if path.suffix == ".json" else path.with_name(f"{path.name}.json")
    if file not in states(path.parent):
        known = ", ".join(one.stem for one in states(path.parent)) or "none"
        raise ValueError(f"{path} is no state: {path.parent} has {known}.")
    try:
        return _read(file)
    except ValueError as e:
        raise ValueError(f"{path} cannot be read ({e}): the run may have dropped it, or it is damaged.") from e


def _read(path: Path) -> SavedState:
    """The state of a JSON; each rank compares the checksums of its share of the files.

    Raises: ValueError when a file is missing or damaged, or is none (a pipe, a device).
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON:
            raise ValueError(f"{path.name} is no file of at most {MAX_JSON:,} bytes")
        numbers = json.loads(path.read_text(encoding="utf-8"))
        expected = numbers["files"]
        files = [file for file in sorted(path.with_suffix("").iterdir()) if file.name in expected and file.is_file()]
        if not files or len(files) < len(expected):
            raise ValueError(f"files of {path.stem} are missing")
        for file in files[collectives.rank() :: collectives.ranks()]:
            with file.open("rb") as data:
                if hashlib.file_digest(data, "sha256").hexdigest() != expected[file.name]:
                    raise ValueError(f"the checksum of {path.stem}/{file.name} differs")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(str(e)) from e
    return SavedState(files, numbers)
