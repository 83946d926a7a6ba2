"""CLIP and SigLIP as transformers saves them (`hf:FOLDER`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, TextConfig
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import Imported, import_as
from kiloword.interop.hf_folder import check_strangers, image_processor, json_object, preprocessing, weight_files

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
FIELDS = {  # of a tower there -> here
    "hidden_size": "width",
    "intermediate_size": "mlp",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
}
SIZES = {"image_size": "size", "patch_size": "patch", "vocab_size": "vocab", "max_position_embeddings": "context"}


def _usual(*values: Any, **sizes: int) -> dict[str, Any]:
    return dict(zip(FIELDS, values, strict=True)) | sizes


DEFAULTS = {  # which a config.json omits, of images and of texts
    "clip": (
        _usual(768, 3072, 12, 12, "quick_gelu", 1e-5, image_size=224, patch_size=32),
        _usual(512, 2048, 12, 8, "quick_gelu", 1e-5, vocab_size=49408, max_position_embeddings=77),
    ),
    "siglip": (
        _usual(768, 3072, 12, 12, "gelu_pytorch_tanh", 1e-6, image_size=224, patch_size=16),
        _usual(768, 3072, 12, 12, "gelu_pytorch_tanh", 1e-6, vocab_size=32000, max_position_embeddings=64),
    ),
}


def import_folder(folder: Path) -> tuple[Imported, Path]:
    """A CLIP or SigLIP of transformers, and the file of its weights (the first of several).

    Raises: ValueError for another model, for missing or damaged files, and for weights of other shapes.
    """
    config = json_object(folder / "config.json")
    kind = config.get("model_type")
    if kind not in DEFAULTS:
        raise ValueError(f"{folder} holds a {str(kind)[:60]!r} model: expected one of {' and '.join(DEFAULTS)}.")
    check_strangers(folder)
    files = weight_files(folder)
    try:
        model = _config(config, folder, kind)
        state = {name: value for file in files for name, value in read(file).items()}
        return import_as(model, f"{folder}'s config.json", state), files[0]
    except (KeyError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{folder} does not hold a {kind} that kiloword's towers can be: {error}"[:300]) from error


def _config(config: dict[str, Any], folder: Path, kind: str) -> ModelConfig:
    siglip = kind == "siglip"
    vision, text = (
        usual | (config.get(key) or {})
        for key, usual in zip(("vision_config", "text_config"), DEFAULTS[kind], strict=True)
    )
    size, shown = preprocessing(*image_processor(folder), clip=not siglip)
    if size != vision["image_size"]:
        raise ValueError(f"{folder} reads images of {size} pixels, but its model has {vision['image_size']}.")
    return ModelConfig(
        image=ImageConfig(**_tower(vision), class_token=not siglip, pre_norm=not siglip, stem_bias=siglip),
        text=TextConfig(**_tower(text), causal=not siglip, pad_to_context=siglip),
        head=HeadConfig(
            dim=vision["hidden_size"] if siglip else config.get("projection_dim", 512),
            image_pool="map" if siglip else "cls",
            image_projection=not siglip,
            text_projection_bias=siglip,
        ),
        preprocess=shown,
    )


def _tower(said: dict[str, Any]) -> dict[str, Any]:
    """Raises: ValueError for another activation."""
    tower = {ours: said[theirs] for theirs, ours in (FIELDS | SIZES).items() if theirs in said}
    if tower["activation"] not in ACTIVATIONS:
        raise ValueError(
            f"the activation {tower['activation']!r} is unknown: expected one of {', '.join(ACTIVATIONS)}."
        )
    return tower | {"activation": ACTIVATIONS[tower["activation"]]}
