"""Tensors of a file of weights that somebody else wrote. No code of a file runs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")  # in names: of DDP and torch.compile
INERT = (  # in pickles of training checkpoints, beside the weights
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *("numpy.dtype", "numpy.ndarray", "_codecs.encode", "argparse.Namespace", "pathlib.PosixPath"),
)


class _Inert:
    """Stands for an object in a checkpoint that is not read: numbers of numpy, settings, paths."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def read(path: str | Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, or from a .pt, .pth or .bin file of a model or of a training's checkpoint.

    Raises: ValueError when the file is missing, is something else, holds several models, or would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file of weights at {path}: check the path.")
    try:
        if path.suffix == ".safetensors":
            raw: Any = load_file(path)
        else:
            inert: list[Any] = [(_Inert, name) for name in INERT]
            with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(inert):  # old protocols
                raw = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler can raise almost anything; torch's words advise to run the file's code
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {code[1][:100]}, and code of a file is never run" if code else "damaged, or not tensors"
        if "TorchScript" in str(error):
            reason = "it is a TorchScript archive, whose code is never run"
        raise ValueError(
            f"{path} cannot be read as plain tensors ({reason}): copy it, or save its state_dict() as .safetensors."
        ) from error
    inner = raw if isinstance(raw, dict) and not _state(raw) else {"": raw}
    models = {str(key): state for key, value in inner.items() if (state := _state(value))}
    if len(models) != 1:
        found = f"several state dicts ({', '.join(models)[:200]})" if models else "no state dict"
        raise ValueError(f"{path} holds {found}: expected one. Save the tensors of the model alone.")
    (state,) = models.values()
    plain = {WRAPPERS.sub("", str(name)): value for name, value in state.items()}
    if len(plain) < len(state):
        raise ValueError(f"{path} holds weights with and without the prefixes module. and _orig_mod.: expected one.")
    shared = "model." if all(name.startswith("model.") for name in plain) else ""  # Lightning's
    return {name.removeprefix(shared): value for name, value in plain.items()}


def _state(value: Any) -> dict[str, Tensor]:
    """A state dict without counters, such as an epoch, of which tensors are the most; {} for anything else."""
    if not isinstance(value, dict):
        return {}
    state = {k: x for k, x in value.items() if not isinstance(x, int | float | None)}
    plain = (
        isinstance(x, Tensor) and x.layout == torch.strided and x.is_cpu and not (x.is_quantized or x.is_complex())
        for x in state.values()
    )
    return state if 2 * len(state) > len(value) and all(plain) else {}
