"""Preprocessing of images and texts from the JSON files of a folder of transformers: a CLIP, or a sentence encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from kiloword.config.recipes import Preprocess
from kiloword.config.settings import check, parse
from kiloword.data.text.tokenizer import read_document
from kiloword.model.trunks.libraries import check_numbers

TEXT_TYPES = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "albert", "electra", "deberta-v2")
"""Encoders of texts alone: their `model_type`."""
POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
LARGEST = 1 << 24  # bytes of a JSON file
_BICUBIC = 3  # Pillow's number in `resample`
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")  # of a processor
_NESTED = "image_processor"  # key of processor_config.json


def is_sentence_encoder(folder: Path) -> bool:
    """Whether a folder holds an encoder of texts alone. Raises: ValueError without a readable config.json."""
    return json_object(folder / "config.json").get("model_type") in TEXT_TYPES


def read_sentence_folder(folder: Path) -> tuple[Literal["mean", "cls", "max"], list[Path]]:
    """How a folder of transformers or sentence-transformers pools tokens, by default by their mean; its files.

    Raises: ValueError when files are missing or damaged, or a module other than pooling and normalisation follows.
    """
    pooling, read = _pooling(folder)
    names = ("modules.json", "sentence_bert_config.json", "tokenizer.json", "vocab.txt", "vocab.json")
    optional = [folder / name for name in names if (folder / name).is_file()]
    return pooling, [folder / "config.json", *optional, *read, *weight_files(folder)]


def _pooling(folder: Path) -> tuple[Any, list[Path]]:
    """The pooling that modules.json names, and the file that describes it."""
    if not (folder / "modules.json").is_file():
        return "mean", []
    modules = [module for module in _json_list(folder / "modules.json") if isinstance(module, dict)]
    names = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]):
        raise ValueError(
            f"{folder / 'modules.json'} has the modules {', '.join(names)[:200] or 'none'}: expected Transformer, "
            "Pooling and, possibly, Normalize."
        )
    place = str(modules[1].get("path", ""))
    if Path(place).name != place or place in ("", "..", "."):
        raise ValueError(f"{folder / 'modules.json'} names the folder {place[:60]!r}: expected one inside of it.")
    config = json_object(folder / place / "config.json")
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise ValueError(
            f"{folder / place / 'config.json'} pools by {', '.join(chosen) or 'nothing'}: expected one of "
            f"{', '.join(POOLINGS)}."
        )
    return POOLINGS[chosen[0]], [folder / place / "config.json"]


def check_strangers(folder: Path) -> None:
    """Check the files of a folder before transformers opens it.

    Raises: ValueError for a tokenizer.json that is too large or damaged, or for towers beyond all limits.
    """
    if (folder / "tokenizer.json").is_file():
        read_document(folder / "tokenizer.json")
    check_numbers(json_object(folder / "config.json"), str(folder / "config.json"))


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights: model.safetensors, else the files that model.safetensors.index.json names.

    Raises: ValueError where a file is missing.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        names = ["model.safetensors"]
    else:
        shards = json_object(index).get("weight_map")
        names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"{index} is damaged: expected the name of a file for each tensor. Copy it again.")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} has no {', '.join(missing[:3])}: copy the whole folder, or save the model with save_pretrained."
        )
    return [folder / name for name in names]


def processor_file(folder: Path) -> Path:
    """The file that says how images are preprocessed: processor_config.json where transformers 5 wrote it alone."""
    older, newer = folder / "preprocessor_config.json", folder / "processor_config.json"
    has_images = not older.is_file() and newer.is_file() and isinstance(json_object(newer).get(_NESTED), dict)
    return newer if has_images else older


def image_processor(folder: Path) -> dict[str, Any]:
    """How images are preprocessed. Raises: ValueError where no file says it, or it is damaged."""
    path = processor_file(folder)
    settings: dict[str, Any] = json_object(path)
    settings = settings[_NESTED] if path.name == "processor_config.json" else settings
    return {name: value for name, value in settings.items() if value is not None}


def preprocessing(folder: Path, settings: dict[str, Any], clip: bool) -> tuple[int, Preprocess]:
    """Image size and preprocessing as an image processor's settings say it.

    Args: clip: whether what they omit is as CLIP's processor has it, else as those of SigLIP and ViT.
    Raises: ValueError naming settings that `Preprocess` does not express.
    """
    on = {"do_resize": True, "do_center_crop": clip, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    on |= {name: bool(value) for name, value in settings.items() if name.startswith("do_") and value is not None}
    given = settings.get("size")
    size, crop = side_of(given), side_of(settings.get("crop_size") or given) if on["do_center_crop"] else None
    shortest = clip if isinstance(given, int) else "shortest_edge" in (given or {})
    resample = settings.get("resample", _BICUBIC)
    conditions = {
        "do_resize": not on["do_resize"],
        "do_center_crop": shortest and not on["do_center_crop"],
        f"resample {resample}": resample != _BICUBIC,
        "size": size is None,
        "crop_size": on["do_center_crop"] and (crop is None or crop > (size or 0) or (crop != size and not shortest)),
        **{name: on[name] for name in on if name not in _STEPS},
    }
    if foreign := [name for name, differs in conditions.items() if differs]:
        raise ValueError(
            f"{processor_file(folder)} preprocesses images in an unsupported way ({', '.join(foreign)[:200]}): "
            "expected a bicubic resize of the shorter side and a centre crop, or a squash to a square."
        )
    assert size is not None
    usual = Preprocess() if clip else Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
    mean, std = ([settings.get(f"image_{name}") or list(getattr(usual, name))][0] for name in ("mean", "std"))
    if not on["do_normalize"]:
        mean, std = [0.0] * 3, [1.0] * 3
    resize = "squash" if not shortest else "shortest" if crop == size else size
    try:
        unit = 255 * float(settings.get("rescale_factor", 1 / 255)) if on["do_rescale"] else 255  # of a white pixel
        mean, std = ([x / unit for x in values] for values in (mean, std))
        check(shown := parse({"mean": mean, "std": std, "resize": resize}, Preprocess), "")
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{processor_file(folder)} cannot be used: {str(error).rstrip('.')}.") from error
    return crop or size, shown


def side_of(value: Any) -> int | None:
    """224, {"shortest_edge": 224} or {"height": 224, "width": 224} -> 224; None for anything else."""
    if isinstance(value, dict):
        values = set(value.values())
        value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file with an object. Raises: ValueError when it is missing or damaged."""
    value = _load(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it is no json object. Copy it again.")
    return value


def _json_list(path: Path) -> list[Any]:
    value = _load(path)
    if not isinstance(value, list):
        raise ValueError(f"{path} is damaged: it is no json list. Copy it again.")
    return value


def _load(path: Path) -> Any:
    if path.is_file() and path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: expected a description of at most {LARGEST:,}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: expected a folder that transformers' save_pretrained wrote.") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: it is no json. Copy it again.") from None
