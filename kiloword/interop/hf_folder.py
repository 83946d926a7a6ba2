"""Folders of transformers: their JSON files and weights. No code of a folder runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kiloword.config.recipes import Preprocess
from kiloword.config.settings import check, parse
from kiloword.data.text.tokenizer import read_document
from kiloword.model.trunks.libraries import check_like, check_numbers, quiet, transformers

POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
LARGEST = 1 << 24  # bytes of a JSON file
BICUBIC = 3  # Pillow's number in `resample`
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")  # of a processor


class NoFile(ValueError):
    """A file of a folder that is missing."""


def read_sentence_folder(folder: Path) -> tuple[Literal["mean", "cls", "max"], list[Path]]:
    """How a folder of transformers or sentence-transformers pools tokens, by default by their mean; its files.

    Raises: ValueError when files are missing or damaged, or a module other than pooling and normalisation follows.
    """
    pooling: Any = "mean"
    names = ["config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json", "vocab.txt", "vocab.json"]
    if (folder / "modules.json").is_file():
        modules = json_object(folder / "modules.json", list)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules if isinstance(module, dict)]
        place = str(modules[1].get("path")) if kinds[:2] == ["Transformer", "Pooling"] else ""
        names.append(f"{place}/config.json")
        said = json_object(folder / names[-1]) if Path(place).name == place and place not in ("", "..") else {}
        chosen = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
        if kinds[2:] not in ([], ["Normalize"]) or len(chosen) != 1 or chosen[0] not in POOLINGS:
            raise ValueError(
                f"{folder} has the modules {', '.join(kinds)[:200]} {place[:60]}, and pools by "
                f"{', '.join(chosen) or 'nothing'}: "
                f"expected Transformer, Pooling by one of {', '.join(POOLINGS)}, and, possibly, Normalize."
            )
        pooling = POOLINGS[chosen[0]]
    return pooling, [*(folder / name for name in names if (folder / name).is_file()), *weight_files(folder)]


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
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file() and not (folder / names[0]).is_file():
        shards = json_object(index).get("weight_map")
        names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
    if missing := [name for name in names or [""] if Path(name).name != name or not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} has no {', '.join(missing[:3])}: copy the whole folder, or save the model with save_pretrained."
        )
    return [folder / name for name in names]


def pretrained(maker: Any, folder: Path, config: Any, part: torch.nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a part of a model that transformers reads, which knows the names of older versions; unused names.

    Raises: ValueError for a folder without safetensors, or whose weights are damaged or of another architecture.
    """
    weight_files(folder)
    more = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # those are named below
    net, info = opened(maker, folder, config=config, use_safetensors=True, dtype=torch.float32, **more)
    expected = part.state_dict()  # without a pooling, which some folders lack
    check_like(folder, info, expected, net.base_model_prefix)
    return {name: x for name, x in net.state_dict().items() if name in expected}, sorted(info["unexpected_keys"])


def opened(maker: Any, folder: Path, **more: Any) -> Any:
    """What a class of transformers reads from a folder, whose code never runs. Raises: ValueError where it cannot."""
    check_strangers(folder)
    try:
        with quiet(transformers()):
            return maker.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **more)
    except Exception as error:  # of many kinds, for damaged files
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} cannot be read by transformers ({reason[:200]}): copy it again.") from error


def image_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """How images are preprocessed, and the file that says it: preprocessor_config.json, or transformers 5's.

    Raises: ValueError where no file says it, or it is damaged.
    """
    path, newer = folder / "preprocessor_config.json", folder / "processor_config.json"
    settings = json_object(newer).get("image_processor") if newer.is_file() and not path.is_file() else None
    path, settings = (newer, settings) if isinstance(settings, dict) else (path, json_object(path))
    return path, {name: value for name, value in settings.items() if value is not None}


def preprocessing(path: Path, settings: dict[str, Any], clip: bool) -> tuple[int, Preprocess]:
    """Image size and preprocessing as the settings of an image processor's file say it.

    Args: clip: whether what they omit is as CLIP's processor has it, else as SigLIP's, unless they name another.
    Raises: ValueError for settings that `Preprocess` does not express.
    """
    processor = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    processor = str(processor or ("CLIP" if clip else "Siglip"))
    clip = "CLIP" in processor
    said = dict.fromkeys(_STEPS, True) | {"do_center_crop": clip, "rescale_factor": 1 / 255}
    said |= {"resample": BICUBIC if clip or "Siglip" in processor else None} | settings
    given = settings.get("size")
    shortest = clip if isinstance(given, int) else "shortest_edge" in (given or {})
    size = _side(given)
    crop = _side(settings.get("crop_size") or given) if said["do_center_crop"] else None
    steps = {name for name, value in said.items() if name.startswith("do_") and value}
    fits = crop == size or (crop is not None and size is not None and crop < size and shortest)
    if not said["do_center_crop"]:
        fits = not shortest
    if size is None or not fits or "do_resize" not in steps or steps - {*_STEPS} or said["resample"] != BICUBIC:
        listed = {name: value for name, value in said.items() if name.startswith(("do_", "size", "crop_", "resample"))}
        raise ValueError(
            f"{path} preprocesses images in an unsupported way ({str(listed)[:400]}): expected a bicubic resize of the "
            "shorter side and a centre crop, or a squash to a square."
        )
    usual = Preprocess() if clip else Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
    mean, std = settings.get("image_mean") or usual.mean, settings.get("image_std") or usual.std
    if not said["do_normalize"]:
        mean, std = [0.0] * 3, [1.0] * 3
    resize = "squash" if not shortest else "shortest" if crop == size else size
    try:
        unit = 255 * float(said["rescale_factor"]) if said["do_rescale"] else 255  # of a white pixel
        mean, std = ([x / unit for x in values] for values in (mean, std))
        check(shown := parse({"mean": mean, "std": std, "resize": resize}, Preprocess), "")
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} cannot be used: {str(error).rstrip('.')}.") from error
    return crop or size, shown


def _side(value: Any) -> int | None:
    """224, {"shortest_edge": 224} or {"height": 224, "width": 224} -> 224; None for anything else."""
    if isinstance(value, dict):
        values = set(value.values())
        value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


def json_object(path: Path, kind: type = dict) -> Any:
    """A JSON file of a kind of value. Raises: ValueError when it is missing, damaged, or larger than LARGEST."""
    if not path.is_file():
        raise NoFile(f"there is no {path}: expected a folder that transformers' save_pretrained wrote.")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: expected a description of at most {LARGEST:,}.")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"{path} is damaged: it is no json {kind.__name__}. Copy it again.")
    return value
