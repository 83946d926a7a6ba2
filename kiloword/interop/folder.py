"""Weights of another library as a model, in memory or in a model folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, ModelFile, Preprocess, TextConfig, TrunkConfig
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer, encoder_tokenizer, read_document, tokenizer_from
from kiloword.files import new_folder
from kiloword.interop.state_dicts import fitted
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import check_finite, save_model
from kiloword.terminal import say

Captions = Literal["canonical", "lower", "verbatim", "endless"]
"""How captions are read: as open_clip's CLIP and SigLIP do, lower-cased alone, as tokenizer.json says, or as it says
but with a pad in place of their end (CLIPA)."""
CLIP_VOCAB = 49408
MAX_SCALE = 100.0  # of CLIP


@dataclass(frozen=True)
class Imported:
    """Translated weights of another library."""

    config: ModelConfig
    method: Literal["clip", "siglip", "prolip-released", "coca", "llip"]
    state: dict[str, Tensor]
    left_over: list[str] = field(default_factory=list)  # names in the file that are not used
    settings: dict[str, Any] = field(default_factory=dict)  # of the method
    captions: Captions = "canonical"


def import_as(config: ModelConfig, origin: str, state: Mapping[str, Tensor], decoder_depth: int = 0) -> Imported:
    """Translate a state dict. A model with a bias becomes a siglip, one with a text decoder a coca, any other a clip.

    Args: origin: of the configuration, for messages; decoder_depth: blocks of a coca's text decoder.
    Raises: ValueError as `fitted`.
    """
    coca = config.head.image_pool == "attentional"
    siglip = config.head.image_pool == "map" or ("logit_bias" in state and not coca)
    settings = {"decoder_depth": decoder_depth} if coca and decoder_depth != config.text.depth else {}
    method: Literal["coca", "siglip", "clip"] = "coca" if coca else "siglip" if siglip else "clip"
    expected = bare(config, method, settings)
    limited = expected.pop("head.log_limit", None) is not None
    ours, left = fitted(state, expected, origin)
    if limited:
        ours["head.log_limit"] = ours["head.log_scale"].clamp(min=math.log(MAX_SCALE))  # a larger one is kept
    return Imported(config, method, ours, left, settings)


def whole(trunk: TrunkConfig, size: int, preprocess: Preprocess, **text: Any) -> ModelConfig:
    """The model of both towers of another library, used whole. Args: text: settings of the text tower."""
    towers: dict[str, Any] = {"trunk": replace(trunk, grid=1, whole=True), "width": trunk.width, "depth": 0}
    return ModelConfig(
        image=ImageConfig(**towers, size=size, patch=size, class_token=False),
        text=TextConfig(**towers, **text, causal=False),
        head=HeadConfig(dim=trunk.width, image_pool="mean", image_projection=False),
        preprocess=preprocess,
    )


def import_whole(config: ModelConfig, origin: str, state: Mapping[str, Tensor], captions: Captions) -> Imported:
    """As `import_as`, for a model that `whole` describes and tensors of open_clip or transformers."""
    ours = {"head.pooling.text_projection.weight": torch.eye(config.head.dim)}
    for name, value in state.items():
        tower = "image" if name.startswith("vis") else "text"
        inner = name.removeprefix("visual.").removeprefix("text.")
        ours[name if name.startswith("logit_") else f"{tower}_tower.trunk.net.{inner}"] = value
    return replace(import_as(config, origin, ours), captions=captions)


def bare(config: ModelConfig, method: str, settings: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors of a model, without storage."""
    with torch.device("meta"):
        return dict(build(config, preset(method, settings)).state_dict())


def write(imported: Imported, weights: Path, out: Path, origin: str) -> None:
    """Save imported weights with their tokenizer.

    Args: weights: their file; for SigLIP, tokenizer.json must be in its folder; origin: text for config.json, such as
    "open_clip ViT-B-32".
    Raises: ValueError when `out` is in use or the tokenizer is missing.
    """
    file = ModelFile(method=imported.method, settings=imported.settings, model=imported.config, data=origin)
    with new_folder(out) as work:
        words = tokenizer(imported.config, weights, imported.captions)
        model = build(imported.config, preset(imported.method, imported.settings))
        check_finite(imported.state, str(weights))
        model.load_state_dict({**model.state_dict(), **imported.state})
        save_model(work, model, words, file)


def tokenizer(config: ModelConfig, weights: Path, captions: Captions = "canonical") -> Tokenizer:
    """CLIP's tokenizer, or that of the tokenizer.json beside the weights. Raises: ValueError when it is missing."""
    path = weights.with_name("tokenizer.json")
    clip = CLIP_VOCAB <= config.text.vocab <= CLIP_VOCAB + 3  # with rows for mask, class and uncertainty tokens
    if clip and (captions == "canonical" or not path.is_file()):
        return clip_tokenizer()
    if not path.is_file():
        raise ValueError(f"these weights need their vocabulary: put the tokenizer.json published with them at {path}.")
    if captions in ("verbatim", "endless"):
        return encoder_tokenizer(read_document(path), config.text.vocab, ends=captions == "verbatim")
    return tokenizer_from(read_document(path), captions == "lower")


def bring(imported: Imported, weights: Path, out: Path, origin: str) -> None:
    """`write`, and print what was loaded and what was not."""
    write(imported, weights, out, origin)
    say(
        f"{len(imported.state)} tensors loaded",
        *(f"left over: {name}" for name in imported.left_over),
        f"written: {out}",
    )
