"""Files of a run: model folders and resumable states. Writes are atomic: a reader sees the old file or the new one.

A model folder holds `model.safetensors`, `config.json` and `tokenizer.json`. A state is `step-N.safetensors` (tensors)
and `step-N.json` (numbers and the checksum of the tensors), written in that order: without its json it does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from kiloword.device import choose
from kiloword.recipes import ModelFile, read_config

if TYPE_CHECKING:
    from kiloword.data.tokenizer import Tokenizer
    from kiloword.model import Model

KEEP = 2  # states: the newest and the one before, should the newest be damaged


class SaveError(ValueError):
    """A file could not be written; what was there before still is."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one. Raises SaveError (disk full, no permission)."""
    with atomic(path) as file:
        file.write(data)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when it is whole. Raises SaveError as `write_atomic`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as e:
        raise SaveError(f"cannot write {path}: {e.strerror or e}. What was there before is kept.") from e
    finally:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def save_model(folder: Path, model: Model, tokenizer: Tokenizer, file: ModelFile) -> None:
    """Write a model folder; weights come last, so that they never stand beside another model's config."""
    tokenizer.save(folder)
    write_json(folder / "config.json", asdict(file))
    write_atomic(folder / "model.safetensors", save_tensors(_contiguous(model.state_dict())))


def load_model(folder: Path | str, device: str = "cpu", dtype: str = "fp32") -> tuple[Model, Tokenizer]:
    """Read a model folder.

    Args: dtype "fp32", "bf16" or "fp64".
    Raises: ValueError when a file is missing or damaged, or does not fit its config.
    """
    from kiloword.data.tokenizer import Tokenizer
    from kiloword.methods import preset
    from kiloword.model import build

    device, folder = choose(device), Path(folder)
    file = read_model_file(folder)
    model = build(file.model, preset(file.method, file.settings), seed=0)
    load_weights(model, read_tensors(folder / "model.safetensors"), str(folder))
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    if dtype not in kinds:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(kinds)}.")
    return model.to(device=device, dtype=kinds[dtype]), Tokenizer.load(folder)


def read_model_file(folder: Path | str) -> ModelFile:
    """The validated `config.json` of a model folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: expected a model folder such as OUT/model of a training run.")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            hint = f" Did you mean {folder / 'model'}?" if (folder / "model" / name).is_file() else ""
            raise ValueError(f"{folder} has no {name}: expected a model folder such as OUT/model of a run.{hint}")
    return read_config(folder / "config.json", ModelFile)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises: ValueError when it is damaged."""
    try:
        return load_tensors(path.read_bytes())
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged ({e}): copy it again, or use an earlier one.") from e


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], name: str) -> None:
    """Strict: every tensor of the model, no others, of the same shapes. Raises: ValueError naming what differs."""
    own = model.state_dict()
    problems = [f"missing {k}" for k in own if k not in weights] + [f"unknown {k}" for k in weights if k not in own]
    problems += [
        f"{k} is {list(weights[k].shape)} instead of {list(v.shape)}"
        for k, v in own.items()
        if k in weights and weights[k].shape != v.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"weights in {name} do not fit its config: {'; '.join(problems[:3])}{more}.")
    model.load_state_dict(weights)


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write the state after `step` steps and drop all but the newest `KEEP`."""
    data = save_tensors(_contiguous(tensors))
    write_atomic(folder / f"step-{step:09d}.safetensors", data)
    write_json(folder / f"step-{step:09d}.json", {"step": step, "checksum": _checksum(data), **numbers})
    for old in _states(folder)[KEEP:]:
        old.unlink()
    whole = {path.stem for path in _states(folder)}
    for path in [*folder.glob("step-*.safetensors"), *folder.glob(".*.tmp")]:  # of old states, or cut by a crash
        if path.stem not in whole:
            path.unlink()


def load_state(folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest undamaged state, or None when there is none; `warn` gets a sentence for each damaged one."""
    states = _states(folder)
    for path in states:
        try:
            numbers = json.loads(path.read_text())
            data = path.with_suffix(".safetensors").read_bytes()
            if _checksum(data) != numbers["checksum"]:
                raise ValueError("its checksum differs")
            return load_tensors(data), numbers
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
            warn(f"state {path.stem} is damaged ({e}): falling back to the one before.")
    if states:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def steps_done(folder: Path) -> int:
    """Steps of the newest state; 0 where there is none."""
    return max((int(path.stem.removeprefix("step-")) for path in _states(folder)), default=0)


def _states(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
