"""Weights from open_clip: the CLIP families, with and without quick GELU, SigLIP and CoCa."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.interop import folder, open_clip_coca
from kiloword.interop.open_clip_config import model_config
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Single
from kiloword.model.model import Model

MAX_SCALE = 100.0  # of CLIP


@dataclass(frozen=True)
class ImportReport:
    """The loaded, new and unused weights of an import."""

    loaded: dict[str, str]  # name in kiloword -> name in the file
    new: list[str]  # names in kiloword without a source, which keep initial values
    left_over: list[str]  # names in the file that are not used


@dataclass(frozen=True)
class Imported:
    """Translated weights of another library."""

    config: ModelConfig
    method: Literal["clip", "siglip", "prolip-released", "coca"]
    state: dict[str, Tensor]
    report: ImportReport
    settings: dict[str, Any] = field(default_factory=dict)  # of the method


def read(path: str | Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, or from a .pt, .pth or .bin file that contains only tensors.

    Raises: ValueError when the file is missing, is something else, or would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file of weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler can raise almost anything for damaged files
        first = "it is damaged, or holds more than tensors"  # torch's own message advises to run the file's code
        if isinstance(error, SafetensorError | RuntimeError | OSError):
            first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} cannot be read as plain tensors ({first}); give a .safetensors file or a .pt of a state dict"
        ) from error
    if isinstance(raw, dict) and isinstance(raw.get("state_dict"), dict):
        raw = raw["state_dict"]  # a training checkpoint
    if not isinstance(raw, dict) or not all(_plain(v) for v in raw.values()):
        raise ValueError(f"{path} holds no state dict of plain tensors")
    return {str(k).removeprefix("module."): v for k, v in raw.items()}


def _plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex())
    )


def import_state(name: str, state: Mapping[str, Tensor]) -> Imported:
    """Translate a state dict of open_clip's model `name`.

    The scale and bias are unchanged. A model with a bias becomes a siglip, one with a text decoder a coca, any other a
    clip. Raises: ValueError for an unknown model, an unsupported architecture, or weights of another shape.
    """
    config = model_config(name)
    coca = open_clip_coca.is_coca(state)
    siglip = "logit_bias" in state and not coca
    placed, unused = _placed(state, coca)
    depth = open_clip_coca.decoder_depth(state)
    settings = {"decoder_depth": depth} if depth not in (0, config.text.depth) else {}
    with torch.device("meta"):
        head = Head(Single(config), bias=0.0 if siglip else None)
        towers = preset("coca", settings).towers if coca else {}
        expected = Model(config, head, {tower: make(config) for tower, make in towers.items()}).state_dict()
    for ours in [n for n in placed if n not in expected]:
        unused.append(placed.pop(ours)[0])
    _check(name, expected, placed)
    ours_state = {n: value for n, (_, value) in placed.items()}
    if not siglip and "head.log_scale" in ours_state:
        ours_state["head.log_limit"] = ours_state["head.log_scale"].clamp(min=math.log(MAX_SCALE))
    report = ImportReport(
        {n: theirs for n, (theirs, _) in sorted(placed.items())},
        sorted(expected.keys() - placed.keys()),
        sorted(unused),
    )
    return Imported(config, "coca" if coca else "siglip" if siglip else "clip", ours_state, report, settings)


def _placed(state: Mapping[str, Tensor], coca: bool) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """Name in kiloword -> name in open_clip and the reshaped value; and unused names of open_clip.

    Raises: ValueError for a tensor that cannot be reshaped.
    """
    theirs, unused = "text_decoder", []
    try:
        placed, rest = open_clip_coca.parts(state) if coca else ({}, state)
        for theirs, value in rest.items():
            ours, reshaped = place(theirs, value)
            if ours is None:
                unused.append(theirs)
            else:
                placed[ours] = (theirs, reshaped)
    except (IndexError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"{theirs[:200]} has a shape that no model of open_clip's has ({reason}).") from error
    return placed, unused


def _check(name: str, expected: Mapping[str, Tensor], placed: Mapping[str, tuple[str, Tensor]]) -> None:
    if not placed:
        raise ValueError(f"none of these weights is one of open_clip's {name}")
    for ours, (theirs, value) in placed.items():
        if not value.is_floating_point():
            raise ValueError(f"{theirs} holds {value.dtype}: expected floating-point weights")
        if value.shape != expected[ours].shape:
            raise ValueError(
                f"{theirs} has shape {list(value.shape)}, but open_clip's {name} needs {list(expected[ours].shape)}; "
                "is it another model's file?"
            )


_BLOCK = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.in_proj_": "attention.qkv.",
    "attn.out_proj": "attention.out",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
    # timm's names
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "mlp.fc1": "mlp.fc",
    "mlp.fc2": "mlp.proj",
}
_WHOLE = {
    "logit_scale": "head.log_scale",
    "logit_bias": "head.bias",
    "visual.class_embedding": "image_tower.class_token",
    "visual.positional_embedding": "image_tower.positions",
    "visual.conv1.weight": "image_tower.patches.weight",
    "visual.proj": "head.pooling.image_projection.weight",
    "visual.trunk.pos_embed": "image_tower.positions",
    "visual.trunk.attn_pool.latent": "head.pooling.image_pool.map.probe",
    "token_embedding.weight": "text_tower.tokens",
    "positional_embedding": "text_tower.positions",
    "text_projection": "head.pooling.text_projection.weight",
}
_PREFIX = {
    "visual.ln_pre.": "image_tower.pre_norm.",
    "visual.ln_post.": "image_tower.norm.",
    "visual.trunk.norm.": "image_tower.norm.",
    "visual.trunk.patch_embed.proj.": "image_tower.patches.",
    "visual.trunk.attn_pool.mlp.fc1.": "head.pooling.image_pool.map.mlp.fc.",
    "visual.trunk.attn_pool.mlp.fc2.": "head.pooling.image_pool.map.mlp.proj.",
    "visual.trunk.attn_pool.proj.": "head.pooling.image_pool.map.out.",
    "visual.trunk.attn_pool.": "head.pooling.image_pool.map.",
    "visual.trunk.blocks.": "image_tower.blocks.",
    "visual.transformer.resblocks.": "image_tower.blocks.",
    "transformer.resblocks.": "text_tower.blocks.",
    "ln_final.": "text_tower.norm.",
    "text_projection.": "head.pooling.text_projection.",
}


def place(theirs: str, value: Tensor) -> tuple[str | None, Tensor]:
    """Name in kiloword of a parameter of open_clip (None: unused), and its value or gradient in kiloword's shape."""
    plain = theirs.removeprefix("text.")  # open_clip has two layouts of its text tower
    return _name(plain), _reshape(plain, value)


def _name(theirs: str) -> str | None:
    if theirs in _WHOLE:
        return _WHOLE[theirs]
    for start, ours in _PREFIX.items():
        if theirs.startswith(start):
            rest = theirs.removeprefix(start)
            return ours + _block(rest) if ours.endswith("blocks.") else ours + rest
    return None


def _block(rest: str) -> str:
    """ "3.attn.in_proj_weight" -> "3.attention.qkv.weight"."""
    number, _, part = rest.partition(".")
    for theirs, ours in _BLOCK.items():
        if part.startswith(theirs):
            return f"{number}.{ours}{part.removeprefix(theirs)}"
    return rest


def _reshape(theirs: str, value: Tensor) -> Tensor:
    if theirs in ("logit_scale", "logit_bias"):
        return value.reshape(1)
    if theirs in ("visual.proj", "text_projection"):  # they multiply from the left
        return value.T.contiguous() if value.ndim == 2 else value
    if theirs in ("visual.conv1.weight", "visual.trunk.patch_embed.proj.weight"):
        return value.flatten(1)
    if theirs == "visual.trunk.pos_embed":
        return value[0]
    return value.flatten() if theirs == "visual.trunk.attn_pool.latent" else value


def main(name: str, path: Path, out: Path) -> None:
    """Write a model folder from a file of open_clip's weights, and print a report."""
    imported = import_state(name, read(path))
    folder.write(imported, path, out, f"open_clip {name}")
    folder.show(imported.report, out)
