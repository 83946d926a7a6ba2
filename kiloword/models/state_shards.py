"""One rank's part of a state: its tensors, their copy in host memory and its file; and reading of all parts.

Planning and reading use `torch.distributed.checkpoint`. Its writer is not used: it writes under the final name, keeps
two more copies of the part in memory, computes no checksum and gathers the plans of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from kiloword.distributed import collectives
from kiloword.model.adapters import MARK, adapters_of, merge
from kiloword.models.tensors import Spec, in_order, spec_of, write_tensors

AT_ONCE = 1 << 28  # bytes of whole tensors assembled from shards at a time


@dataclass
class StateShard:
    """The data that one rank writes: a chunk of each tensor."""

    values: dict[str, Tensor]
    offsets: dict[str, tuple[int, ...]]  # of the chunk in its tensor


class Host:
    """Copies of this rank's part in host memory.

    They are reused by later saves: new pages cost 10 times the copying, and copies from a GPU need pinned memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> StateShard:
        """Copy this rank's part of `tensors`, which may change afterwards.

        Args: tensors: plain (equal on all ranks) or DTensors (sharded over all ranks).
        """
        part = StateShard({}, {})
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors))
        for item in _own(planner.create_local_plan().items):
            assert item.tensor_data is not None
            name, value = item.index.fqn, planner.resolve_data(item)
            assert isinstance(value, Tensor)
            part.values[name] = self._buffer(name, value.detach()).copy_(value, non_blocking=True)
            part.offsets[name] = tuple(item.tensor_data.chunk.offsets)
        if any(value.is_pinned() for value in part.values.values()):
            torch.cuda.synchronize()
        return part

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or spec_of(buffer) != spec_of(like):
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer


def _own(items: Sequence[WriteItem]) -> list[WriteItem]:
    """The items this rank writes: its chunks, and its share by size of replicated tensors (equal on all ranks)."""
    loads = [0] * collectives.ranks()
    selected = []
    for item in sorted(items, key=lambda item: (-_size(item), item.index.fqn)):
        if item.type == WriteItemType.SHARD:
            owner = collectives.rank() if _size(item) else None
        else:
            owner = loads.index(min(loads))
            loads[owner] += max(1, _size(item))
        if owner == collectives.rank():
            selected.append(item)
    return selected


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def write_part(folder: Path, part: StateShard, rank: int, ranks: int) -> dict[str, str]:
    """Write a rank's file. Returns: name -> SHA-256. Raises: SaveError."""
    path = folder / f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"
    specs = {name: spec_of(value) for name, value in part.values.items()}
    places = {name: {"saved_offsets": part.offsets[name]} for name in in_order(specs)}
    about = {"DCP_SHARDING_INFO": json.dumps(places)}
    return {path.name: write_tensors(path, specs, (part.values[name] for name in in_order(specs)), about)}


class _Listed(FileSystem):
    """Lists only the files of a state, not other files in their folder."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [str(file) for file in files]

    def ls(self, path: Any) -> list[str]:
        return self.files


class SavedState:
    """A whole state on disk.

    Args: files: of its tensors; numbers: its JSON.
    Errors: ValueError for files that are not safetensors or have an invalid header; nothing is allocated before.
    """

    def __init__(self, files: Sequence[Path], numbers: dict[str, Any]) -> None:
        self.files, self.numbers = list(files), numbers
        self._reader = HuggingFaceStorageReader(str(files[0].parent))
        self._reader.fs = _Listed(files)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, AssertionError, OSError) as e:
            raise ValueError(f"{files[0].name}: {type(e).__name__}: {str(e)[:200]}") from e
        self.specs: dict[str, Spec] = {}
        for name, stored in self._metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            self.specs[name] = stored.properties.dtype, tuple(stored.size)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill plain or sharded tensors in place; each rank reads its parts."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self._metadata)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    def whole(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Whole tensors in the order of `names`, AT_ONCE bytes at a time."""
        for group in self._groups(names):
            tensors = {name: torch.empty(self.specs[name][1], dtype=self.specs[name][0]) for name in group}
            self.load(tensors)
            yield from tensors.values()

    def unmerged_names(self) -> dict[str, str]:
        """The tensors of the model, adapters included, by name -> name in the state: averaged where there are any."""
        names = {}
        for name in self.specs:
            if name.startswith("learner/model."):
                short = name.removeprefix("learner/model.")
                averaged = f"average/model.{short}"
                names[short] = averaged if averaged in self.specs else name
        return names

    def model_specs(self) -> dict[str, Spec]:
        """The tensors of a model folder of this state, adapters merged: averaged weights where there are any."""
        return {short: self.specs[name] for short, name in self.unmerged_names().items() if MARK not in short}

    def model_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The tensors of `model_specs`, in the order of `names`."""
        stored = self.unmerged_names()
        for name, value in zip(names, self.whole([stored[name] for name in names]), strict=True):
            parts = [stored[part] for part in adapters_of(name, stored)]
            yield merge(value, *self.whole(parts)) if parts else value

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `model_weights`."""
        return {name: shape for name, (_, shape) in self.model_specs().items()}

    def model_weights(self) -> dict[str, Tensor]:
        """The weights that a model folder of this state holds."""
        names = list(self.model_specs())
        return dict(zip(names, self.model_tensors(names), strict=True))

    def _groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        group, size = list[str](), 0
        for name in names:
            dtype, shape = self.specs[name]
            tensor_size = dtype.itemsize * torch.Size(shape).numel()
            if group and size + tensor_size > AT_ONCE:
                yield group
                group, size = [], 0
            group.append(name)
            size += tensor_size
        if group:
            yield group
