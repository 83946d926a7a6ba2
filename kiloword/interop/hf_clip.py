"""CLIP, SigLIP, and models of transformers that are used whole (`hf:FOLDER`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, TextConfig, TrunkConfig
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import CLIP_VOCAB, Imported, import_as, import_whole, tokenizer, whole
from kiloword.interop.hf_folder import (
    check_strangers,
    image_processor,
    json_object,
    preprocessing,
    pretrained,
    weight_files,
)
from kiloword.model.trunks.bert import ACTIVATIONS
from kiloword.model.trunks.libraries import kept, transformers, unusable
from kiloword.model.trunks.library import HF, HF_WHOLE, hf_model, measured

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
    """A model of transformers, by kiloword's towers or whole, and the file of its weights (the first of several).

    Raises: ValueError for another model, for missing or damaged files, and for weights of other shapes.
    """
    config = json_object(folder / "config.json")
    kind, classes = str(config.get("model_type"))[:60], config.get("architectures") or ["BlipModel"]
    if kind not in (*DEFAULTS, *HF_WHOLE) or "auto_map" in config or (kind == "blip" and classes != ["BlipModel"]):
        raise ValueError(
            f"{folder} holds a {kind!r} model that kiloword cannot compute: expected one of "
            f"siglip, {', '.join(HF_WHOLE)} (BlipModel), without code of its own (auto_map). Choose one of them (of "
            "SigLIP 2 one whose images have one size), or import the model from open_clip."
        )
    check_strangers(folder)
    files = weight_files(folder)
    with unusable(f"the {kind} in {folder}"):
        if kind != "siglip" and (kind != "clip" or not _is_own(config, files[0])):
            return _whole(config, folder), files[0]
        model = _config(config, folder, kind)
        state = {name: value for file in files for name, value in read(file).items()}
        return replace(import_as(model, f"{folder}'s config.json", state), captions="lower"), files[0]


def _is_own(config: dict[str, Any], weights: Path) -> bool:
    """Whether kiloword's towers and tokenizers compute a CLIP, which reads texts at their end token."""
    try:
        words = tokenizer(_config(config, weights.parent, "clip"), weights, "lower")
    except (ValueError, KeyError):
        return False
    end = (config.get("text_config") or {}).get("eos_token_id", CLIP_VOCAB - 1)
    return words.roles.end == (words.plain_vocab - 1 if end == 2 else end)  # of old configs 2: the largest id


def _whole(config: dict[str, Any], folder: Path) -> Imported:
    with torch.device("meta"):
        net = hf_model(config)
    state, _ = pretrained(transformers().AutoModel, folder, net.config, net)
    text, limits = net.config.text_config, folder / "tokenizer_config.json"
    # XLM-R uses no positions before the one after its pad's
    places = text.max_position_embeddings - (text.pad_token_id + 1 if config["model_type"] == "altclip" else 0)
    longest = json_object(limits).get("model_max_length") if limits.is_file() else None
    size, shown = preprocessing(*image_processor(folder), clip=config["model_type"] not in ("blip", "clipseg"))
    trunk, _ = measured(TrunkConfig(name=HF, config=kept(config), whole=True), size)
    words = {"context": min(places, longest) if isinstance(longest, int) else places, "vocab": text.vocab_size}
    return import_whole(whole(trunk, size, shown, **words), f"{folder}'s config.json", state, "verbatim")


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
    """Raises: KeyError for another activation."""
    tower = {ours: said[theirs] for theirs, ours in (FIELDS | SIZES).items() if theirs in said}
    return tower | {"activation": ACTIVATIONS[tower["activation"]]}
