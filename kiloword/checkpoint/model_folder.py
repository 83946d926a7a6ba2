"""Model folders and safetensors files.

A model folder holds `model.safetensors`, `config.json` and `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor

from kiloword.checkpoint.files import SaveError, atomic, json_bytes, write_atomic
from kiloword.checkpoint.trust import NONE, Trust, method_of
from kiloword.config.recipes import ModelFile
from kiloword.config.settings import read_config
from kiloword.distributed.device import choose

if TYPE_CHECKING:
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.methods.method import Method
    from kiloword.model.model import Model

Spec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor in a file

CODES = {  # dtypes of safetensors, widest first; tensors are stored in this order, so that all are aligned
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
EXTRA_TOKENS = 16  # largest number in a text tower
FLOATS = ("F64", "F32", "BF16", "F16")  # dtypes of weights
LONGEST_HEADER = 1 << 24  # bytes, enough for 100,000 tensors


def save_model(folder: Path, model: Model, tokenizer: Tokenizer, file: ModelFile) -> None:
    """Write a model folder; weights come last, so that they never stand beside an older config."""
    for name, data in words_of(tokenizer, file).items():
        write_atomic(folder / name, data)
    weights = model.state_dict()
    specs = {name: spec_of(value) for name, value in weights.items()}
    write_tensors(folder / "model.safetensors", specs, (weights[name] for name in in_order(specs)))


def words_of(tokenizer: Tokenizer, file: ModelFile) -> dict[str, bytes]:
    """The files of a model folder except its weights: name -> contents."""
    return {"tokenizer.json": tokenizer.to_bytes(), "config.json": json_bytes(asdict(file))}


def spec_of(value: Tensor) -> Spec:
    return value.dtype, tuple(value.shape)


def in_order(specs: Mapping[str, Spec]) -> list[str]:
    """Names in the order of a file."""
    kinds = list(CODES)
    return sorted(specs, key=lambda name: (kinds.index(specs[name][0]), name))


def write_tensors(
    path: Path, specs: Mapping[str, Spec], values: Iterable[Tensor], about: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file one tensor at a time; the library needs all of them, and twice the memory.

    Args: specs: of every tensor; values: in the order of `in_order(specs)`; about: metadata of the file.
    Returns: its SHA-256. Raises: SaveError. Source: github.com/huggingface/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name in in_order(specs):
        dtype, shape = specs[name]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with atomic(path) as file:
        head: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for data in itertools.chain(head, _bytes(path, specs, values)):
            file.write(data)
            checksum.update(data)
    return checksum.hexdigest()


def _bytes(path: Path, specs: Mapping[str, Spec], values: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of the tensors. Raises: SaveError for values that do not match the specs."""
    for name, value in itertools.zip_longest(in_order(specs), values):
        if name is None or value is None or spec_of(value) != specs[name]:
            actual, expected = "nothing" if value is None else str(spec_of(value)), specs.get(name, "nothing more")
            raise SaveError(f"cannot write {path}: got {actual} for {name}, expected {expected}. This is a bug.")
        raw: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(raw)


def load_model(
    folder: Path | str, device: str = "cpu", dtype: str = "fp32", trust: Trust = NONE
) -> tuple[Model, Tokenizer]:
    """The model and tokenizer of a model folder; see `open_model`."""
    return open_model(folder, device, dtype, trust)[:2]


def open_model(
    folder: Path | str, device: str = "cpu", dtype: str = "fp32", trust: Trust = NONE, precision: str = "fp32"
) -> tuple[Model, Tokenizer, Method]:
    """Read a model folder; its code is not run unless the user trusts it.

    Args: dtype: of the weights, "fp32", "bf16" or "fp64"; precision: of the encoders, "auto", "fp32" or "bf16".
    Raises: ValueError when a file is missing or damaged, does not fit its config, or needs untrusted code (`Trust`).
    """
    from kiloword.config.by_device import encoder_precision
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import build

    device, folder = choose(device), Path(folder)
    file = read_model_file(folder)
    computing = encoder_precision(precision, file.model, device)
    method = method_of(file, folder, trust)
    check_weights(folder, file, method)
    model = build(file.model, method, seed=0)
    load_weights(model, read_tensors(folder / "model.safetensors"), str(folder))
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    if dtype not in kinds:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(kinds)}.")
    model.precision = computing
    return model.to(device=device, dtype=kinds[dtype]), Tokenizer.load(folder), method


def read_model_file(folder: Path | str) -> ModelFile:
    """The validated `config.json` of a model folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: expected a model folder such as OUT/model of a training run.")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            hint = f" Did you mean {folder / 'model'}?" if (folder / "model" / name).is_file() else ""
            raise ValueError(f"{folder} has no {name}: expected a model folder such as OUT/model of a run.{hint}")
    file = read_config(folder / "config.json", ModelFile)
    if len(file.model.text.extra_tokens) > EXTRA_TOKENS:
        raise ValueError(
            f"{folder} has {len(file.model.text.extra_tokens):,} extra tokens: expected {EXTRA_TOKENS} at most."
        )
    return file


def check_weights(folder: Path | str, file: ModelFile, method: Method) -> None:
    """Compare the shapes of a folder's weights with its config before allocating either.

    Raises: ValueError when the file is damaged or does not fit.
    """
    from kiloword.model.model import shapes

    stored = read_shapes(Path(folder) / "model.safetensors")
    if ":" not in file.method:  # a user-defined method may read values, which meta tensors do not have
        try:
            declared = shapes(file.model, method)
        except ValueError as e:
            raise ValueError(f"{Path(folder) / 'config.json'} cannot be used: {e}.") from e
        check_fit(declared, stored, f"weights in {folder}", "its config")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file; only the header is read.

    Raises: ValueError when it is damaged, or holds tensors that are not floating-point.
    """
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
    if not 2 <= size <= min(LONGEST_HEADER, path.stat().st_size - 8):
        raise ValueError(
            f"{path} is damaged (its header says that it has {size:,} bytes; expected at most {LONGEST_HEADER:,}, and "
            "no more than the file): copy it again, or use an earlier one."
        )
    shapes = {}
    try:
        with safe_open(path, framework="np") as file:
            names = file.keys()
            for name in names:
                part = file.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                if part.get_dtype() not in FLOATS:
                    raise ValueError(
                        f"{name[:200]} in {path} is {part.get_dtype()}: expected one of {', '.join(FLOATS)}."
                    )
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged ({e}): copy it again, or use an earlier one.") from e
    return shapes


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises: ValueError as `read_shapes`."""
    read_shapes(path)
    return load_tensors(path.read_bytes())


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], name: str) -> None:
    """Load weights strictly: all tensors of the model and no others, with equal shapes, all finite.

    Raises: ValueError naming the tensors that do not fit.
    """
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    check_fit(expected, {k: tuple(v.shape) for k, v in weights.items()}, f"weights in {name}", "its config")
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
