"""What the json files of a transformers CLIP folder say about images and texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiloword.config.ranges import DEPTH
from kiloword.config.recipes import Preprocess
from kiloword.data.text import tokenizer_file

MOST = 1 << 22  # of any number in a config.json of transformers
_BICUBIC = 3  # Pillow's number, which `resample` holds


@dataclass(frozen=True)
class HfFolder:
    """How images and texts are prepared."""

    size: int
    resize: Any  # "shortest" or "squash"
    mean: Sequence[float]
    std: Sequence[float]
    context: int
    files: list[Path]


def read_folder(folder: Path) -> HfFolder:
    """Raises: ValueError when files are missing or damaged, or the model is no CLIP."""
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
    """Before transformers opens a folder: what its files declare.

    Raises: ValueError for a tokenizer.json that works too much (`tokenizer_file`), or towers beyond all limits.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer_file.read(folder / "tokenizer.json")
    for name, value in _numbers(_json(folder / "config.json")):
        most = DEPTH if "layers" in name or "depth" in name else MOST
        if not -MOST <= value <= most:  # False for NaN
            raise ValueError(f"{folder / 'config.json'} cannot be used: {name} is {value}: expected at most {most}.")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a json file with the names of their fields."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float):
        yield name, value


def _size(folder: Path, given: dict[str, Any]) -> tuple[int, str]:
    """Pixels a side, and how images come to it. Raises: ValueError for ways that are not offered here."""
    size, crop = _sides(given.get("size")), _sides(given.get("crop_size"))
    shortest = isinstance(given.get("size"), int) or "shortest_edge" in (given.get("size") or {})
    cropped = given.get("do_center_crop", True)
    same = size is not None and (size == crop or not cropped)
    if not same or (shortest and not cropped) or given.get("resample", _BICUBIC) != _BICUBIC:
        raise ValueError(
            f"{folder / 'preprocessor_config.json'} prepares images in a way that is not offered here: expected a "
            "bicubic resize of the shorter side and a centre crop of the same size, or a squash to a square."
        )
    assert size is not None
    return size, "shortest" if shortest else "squash"


def _sides(given: Any) -> int | None:
    """224, {"shortest_edge": 224} or {"height": 224, "width": 224} -> 224; None for anything else."""
    if isinstance(given, dict):
        values = set(given.values())
        given = values.pop() if len(values) == 1 else None
    return given if isinstance(given, int) else None


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
