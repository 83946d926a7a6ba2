"""Model folders.

A model folder holds `model.safetensors`, `config.json` and `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.config.recipes import ModelFile
from kiloword.config.settings import read_config
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.by_device import encoder_precision
from kiloword.distributed.device import choose
from kiloword.files import write_json
from kiloword.methods.method import Method
from kiloword.model.model import Model
from kiloword.models import adapters
from kiloword.models.build import build, shapes
from kiloword.models.states import SavedState, open_state
from kiloword.models.tensors import open_tensors, shapes_of, write_tensors
from kiloword.models.trust import NONE, Trust, method_of

EXTRA_TOKENS = 16  # largest number in a text tower
WEIGHTS = "model.safetensors"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def save_model(folder: Path, model: Model, tokenizer: Tokenizer, file: ModelFile) -> None:
    """Write a model folder; weights come last, so that they never stand beside an older config."""
    tokenizer.save(folder)
    write_json(folder / "config.json", asdict(file))
    write_tensors(folder / WEIGHTS, model.state_dict())


def load_model(
    folder: Path | str, device: str = "cpu", dtype: str = "fp32", trust: Trust = NONE
) -> tuple[Model, Tokenizer]:
    """The model and tokenizer of a model folder; see `open_model`."""
    return open_model(folder, device, dtype, trust)[:2]


def open_model(
    folder: Path | str,
    device: str = "cpu",
    dtype: str = "fp32",
    trust: Trust = NONE,
    precision: str = "fp32",
    base: Path | str | None = None,
) -> tuple[Model, Tokenizer, Method]:
    """Read a model folder, a run's folder (its model) or state (`states.open_state`); code in it is not run unless the
    user trusts it.

    Args: dtype: of the weights, "fp32", "bf16" or "fp64"; precision: of the encoders, "auto", "fp32" or "bf16"; base:
    of a folder of adapters alone, the model folder from which their run started.
    Raises: ValueError when a file is missing or damaged, does not fit its config, or needs untrusted code (`Trust`).
    """
    device = choose(device, mps=True)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}.")
    folder, file, weights = open_weights(folder, base)
    computing = encoder_precision(precision, file.model, device)
    method = method_of(file, folder, trust)
    check_weights(folder, file, method, weights)
    model = build(file.model, method)
    load_weights(model, weights, str(folder))
    model.precision = computing
    return model.to(device=device, dtype=DTYPES[dtype]).eval(), Tokenizer.load(folder), method


def open_weights(path: Path | str, base: Path | str | None = None) -> tuple[Path, ModelFile, dict[str, Tensor]]:
    """The model folder of a path, its `config.json`, and the weights that are meant, named as for `open_model`."""
    folder, state = _located(Path(path))
    file = read_model_file(folder, WEIGHTS if base is None else adapters.FILE)
    if base is not None:
        return folder, file, adapters.joined(_located(Path(base))[0], folder)
    if state is not None:
        return folder, replace(file, steps=state.numbers["step"]), adapters.merged(state.model)
    return folder, file, open_tensors(folder / WEIGHTS)


def _located(path: Path) -> tuple[Path, SavedState | None]:
    """The model folder of a path, and the state whose weights are meant in place of its own, if any."""
    if path.name == "state" or path.parent.name == "state":
        run = path.parent if path.name == "state" else path.parent.parent
        return run / "model", open_state(path)
    inner = path / "model"
    return (inner if (inner / WEIGHTS).is_file() and not (path / "tokenizer.json").exists() else path), None


def model_files(path: Path | str) -> list[Path]:
    """The files that a model depends on, named as for `open_model`."""
    folder, state = _located(Path(path))
    weights = [folder / WEIGHTS] if state is None else state.files
    return [folder / "config.json", folder / "tokenizer.json", *weights]


def read_model_file(folder: Path | str, weights: str = WEIGHTS) -> ModelFile:
    """The validated `config.json` of a model folder. Args: weights: name of the file of its weights."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: expected a model folder, such as OUT/model of a training run; weights of other "
            "libraries become one by `kiloword import` (open_clip, ProLIP), towers by a training with --image-tower."
        )
    for name in ("config.json", weights, "tokenizer.json"):
        if not (folder / name).is_file():
            hint = f" Did you mean {folder / 'model'}?" if (folder / "model" / name).is_file() else ""
            if name == WEIGHTS and (folder / adapters.FILE).is_file():
                hint = (
                    " It holds adapters (LoRA) without the model they adapt: use the run's OUT/model, which has them "
                    f"merged, or from Python kiloword.load({folder}, base=BASE), where BASE is what --init was."
                )
            raise ValueError(f"{folder} has no {name}: expected a model folder such as OUT/model of a run.{hint}")
    file = read_config(folder / "config.json", ModelFile)
    if (number := len(file.model.text.extra_tokens)) > EXTRA_TOKENS:
        raise ValueError(f"{folder} has {number:,} extra tokens: expected {EXTRA_TOKENS} at most.")
    return file


def check_weights(folder: Path | str, file: ModelFile, method: Method, weights: Mapping[str, Tensor]) -> None:
    """Compare the shapes of weights with the config of their folder before allocating either.

    Raises: ValueError when they do not fit.
    """
    if ":" not in file.method:  # a user-defined method may read values, which meta tensors do not have
        try:
            declared = shapes(file.model, method)
        except ValueError as e:
            reason = str(e).rstrip(".")
            raise ValueError(f"{Path(folder) / 'config.json'} cannot be used: {reason}.") from e
        check_fit(declared, shapes_of(weights), f"weights in {folder}", "its config")


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], name: str, frame: str = "its config") -> None:
    """Load weights strictly: all tensors of the model and no others, with equal shapes, all finite.

    Raises: ValueError naming the tensors that do not fit.
    """
    check_fit(shapes_of(model.state_dict()), shapes_of(weights), f"weights in {name}", frame)
    check_finite(weights, name)
    model.load_state_dict(weights)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinite values.

    A finite sum shows that all terms are finite, ten times as fast as checking each; a sum may also overflow.
    """
    return [name for name, value in tensors.items() if not (value.sum().isfinite() or value.isfinite().all())]


def check_finite(weights: Mapping[str, Tensor], name: str) -> None:
    """Raises: ValueError naming the first tensor of a model with NaN or infinite values."""
    if bad := not_finite(weights):
        raise ValueError(
            f"weights in {name} cannot be used: {bad[0]} is NaN or infinite ({len(bad)} of {len(weights)} tensors). "
            "The training diverged, or the file is damaged: use an earlier model, or copy it again."
        )


def check_fit(expected: Mapping[str, Any], actual: Mapping[str, Any], what: str, frame: str) -> None:
    """Raises: ValueError unless both have the same names with the same shapes or specs."""
    problems = [f"missing {k}" for k in expected if k not in actual]
    problems += [f"unknown {k[:200]}" for k in actual if k not in expected]
    problems += [f"{k} is {_say(actual[k])} instead of {_say(v)}" for k, v in expected.items() if actual.get(k, v) != v]
    if problems:
        rest = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{what} do not fit {frame}: {'; '.join(problems[:3])}{rest}.")


def _say(spec: Any) -> str:
    return str(list(spec)) if all(isinstance(n, int) for n in spec) else f"{spec[0]} {list(spec[1])}"
