"""Preprocessing of images and texts from the JSON files of a CLIP folder of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiloword.config.recipes import DEPTH, Preprocess
from kiloword.data.text import tokenizer_file

MOST = 1 << 22  # limit of any number in a config.json of transformers
_BICUBIC = 3  # Pillow's number in `resample`


@dataclass(frozen=True)
class HfFolder:
    """Preprocessing of images and texts, and the files of the model."""

    size: int
    resize: Any  # "shortest" or "squash"
    mean: Sequence[float]
    std: Sequence[float]
    context: int
    files: list[Path]


def read_folder(folder: Path) -> HfFolder:
    """Raises: ValueError when files are missing or damaged, or the model is not a CLIP."""
    config = _json(folder / "config.json")
    if config.get("model_type") != "clip":
        raise ValueError(f"{folder} holds a {config.get('model_type')!r} model: expected a CLIP (model_type 'clip').")
    check_strangers(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder} has no .safetensors: save the model there with save_pretrained.")
    image = _json(folder / "preprocessor_config.json")
    size, resize = _size(folder, image)
    plain = Preprocess()
    extra = [p for p in (folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt") if p.is_file()]
    return HfFolder(
        size,
        resize,
        image.get("image_mean") or plain.mean,
        image.get("image_std") or plain.std,
        int((config.get("text_config") or {}).get("max_position_embeddings", 77)),
        [folder / "config.json", folder / "preprocessor_config.json", *weights, *extra],
    )


def check_strangers(folder: Path) -> None:
    """Check the files of a folder before transformers opens it.

    Raises: ValueError for a tokenizer.json that is not allowed (`tokenizer_file`), or for towers beyond all limits.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer_file.read(folder / "tokenizer.json")
    for name, value in _numbers(_json(folder / "config.json")):
        most = DEPTH if "layers" in name or "depth" in name else MOST
        if not -MOST <= value <= most:  # False for NaN
            raise ValueError(f"{folder / 'config.json'} cannot be used: {name} is {value}: expected at most {most}.")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a JSON value with the names of their fields."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float):
        yield name, value


def _size(folder: Path, preprocessor: dict[str, Any]) -> tuple[int, str]:
    """Size in pixels and resize mode. Raises: ValueError for unsupported preprocessing."""
    size, crop = _sides(preprocessor.get("size")), _sides(preprocessor.get("crop_size"))
    shortest = isinstance(preprocessor.get("size"), int) or "shortest_edge" in (preprocessor.get("size") or {})
    cropped = preprocessor.get("do_center_crop", True)
    same = size is not None and (size == crop or not cropped)
    if not same or (shortest and not cropped) or preprocessor.get("resample", _BICUBIC) != _BICUBIC:
        raise ValueError(
            f"{folder / 'preprocessor_config.json'} preprocesses images in an unsupported way: expected a "
            "bicubic resize of the shorter side and a centre crop of the same size, or a squash to a square."
        )
    assert size is not None
    return size, "shortest" if shortest else "squash"


def _sides(value: Any) -> int | None:
    """224, {"shortest_edge": 224} or {"height": 224, "width": 224} -> 224; None for anything else."""
    if isinstance(value, dict):
        values = set(value.values())
        value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: expected a folder that transformers' save_pretrained wrote.") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: it is no json. Copy it again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it is no json object. Copy it again.")
    return value
