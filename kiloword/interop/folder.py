"""Weights of another library as a model, in memory or in a model folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig, ModelFile
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer, siglip_tokenizer
from kiloword.files import new_folder
from kiloword.interop.state_dicts import fitted
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import check_finite, save_model
from kiloword.terminal import say
from kiloword.terminal.screen import say_table

CLIP_VOCAB = 49408
MAX_SCALE = 100.0  # of CLIP


@dataclass(frozen=True)
class Imported:
    """Translated weights of another library."""

    config: ModelConfig
    method: Literal["clip", "siglip", "prolip-released", "coca"]
    state: dict[str, Tensor]
    left_over: list[str] = field(default_factory=list)  # names in the file that are not used
    settings: dict[str, Any] = field(default_factory=dict)  # of the method


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


def bare(config: ModelConfig, method: str, settings: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors of a model, without storage."""
    made = preset(method, settings or {})
    shaped = made.shape(config)
    with torch.device("meta"):
        return dict(
            Model(shaped, made.head(shaped), {n: make(shaped) for n, make in made.decoders.items()}).state_dict()
        )


def write(imported: Imported, weights: Path, out: Path, origin: str) -> None:
    """Save imported weights with their tokenizer.

    Args: weights: their file; for SigLIP, tokenizer.json must be in its folder; origin: text for config.json, such as
    "open_clip ViT-B-32".
    Raises: ValueError when `out` is in use or the tokenizer is missing.
    """
    file = ModelFile(method=imported.method, settings=imported.settings, model=imported.config, data=origin)
    with new_folder(out) as work:
        model, words = assemble(imported, weights)
        save_model(work, model, words, file)


def assemble(imported: Imported, weights: Path) -> tuple[Model, Tokenizer]:
    """Imported weights as a model in memory, with their tokenizer. Args, raises: as `write`."""
    words = tokenizer(imported.config, weights)
    model = build(imported.config, preset(imported.method, imported.settings), seed=0)
    check_finite(imported.state, str(weights))
    model.load_state_dict({**model.state_dict(), **imported.state})
    return model, words


def tokenizer(config: ModelConfig, weights: Path) -> Tokenizer:
    """CLIP's tokenizer, or that of the tokenizer.json beside the weights. Raises: ValueError when it is missing."""
    if CLIP_VOCAB <= config.text.vocab <= CLIP_VOCAB + 3:  # with rows for mask, class and uncertainty tokens
        return clip_tokenizer()
    path = weights.with_name("tokenizer.json")
    if not path.is_file():
        raise ValueError(f"these weights need their vocabulary: put the tokenizer.json published with them at {path}.")
    return siglip_tokenizer(path)


def bring(imported: Imported, weights: Path, out: Path, origin: str) -> None:
    """`write`, and print what was loaded and what was not."""
    write(imported, weights, out, origin)
    loaded = Counter(".".join(name.split(".")[:2]) for name in imported.state)
    say_table([*((part, str(n)) for part, n in loaded.items())], "part", "tensors")
    say(*(f"left over: {name}" for name in imported.left_over), f"written: {out}")
