"""`kiloword import`: write weights of another library to a model folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from kiloword.config.recipes import ModelConfig, ModelFile
from kiloword.data.text.tokenizer import (
    Tokenizer,
    clip_tokenizer,
    siglip_tokenizer,
)
from kiloword.files import new_folder
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import check_finite, save_model
from kiloword.terminal import say
from kiloword.terminal.screen import say_table

CLIP_VOCAB = 49408


@dataclass(frozen=True)
class ImportReport:
    """The loaded, new and unused weights of an import."""

    loaded: dict[str, str]  # name in kiloword -> name in the file
    new: list[str]  # names in kiloword without a source, which keep initial values
    left_over: list[str]  # names in the file that are not used


@dataclass(frozen=True)
class Imported:
    """Translated weights of another library."""

    config: ModelConfig
    method: Literal["clip", "siglip", "prolip-released", "coca"]
    state: dict[str, Tensor]
    report: ImportReport
    settings: dict[str, Any] = field(default_factory=dict)  # of the method


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
    """Imported weights as a model in memory, with their tokenizer.

    Args: weights: their file; for SigLIP, tokenizer.json must be in its folder.
    Raises: ValueError when the tokenizer is missing, or weights are NaN or infinite.
    """
    words = tokenizer(imported.config, weights)
    model = build(imported.config, preset(imported.method, imported.settings), seed=0)
    check_finite(imported.state, str(weights))
    model.load_state_dict({**model.state_dict(), **imported.state})
    return model, words


def tokenizer(config: ModelConfig, weights: Path) -> Tokenizer:
    """The tokenizer of a configuration: CLIP's, else that of the tokenizer.json beside the weights.

    That is SigLIP's, or one of kiloword's own that was exported.

    Raises: ValueError when that is missing or damaged.
    """
    if CLIP_VOCAB <= config.text.vocab <= CLIP_VOCAB + 3:  # with rows for mask, class and uncertainty tokens
        return clip_tokenizer()
    path = weights.with_name("tokenizer.json")
    if not path.is_file():
        raise ValueError(
            f"a SigLIP needs its vocabulary: put the tokenizer.json that is published with the weights beside {weights}"
        )
    return siglip_tokenizer(path)


def show(report: ImportReport, out: Path) -> None:
    """Print the loaded, new and unused weights by part."""
    loaded, new = (Counter(_part(n) for n in names) for names in (report.loaded, report.new))
    rows = [(part, str(loaded[part]), str(new[part])) for part in dict.fromkeys([*loaded, *new])]
    say_table([*rows, ("left over", str(len(report.left_over)), "")], "part", "loaded", "new")
    for title, names in (("new", report.new), ("left over", report.left_over)):
        say(*(f"{title}: {name}" for name in names))
    say(f"written: {out}")


def _part(name: str) -> str:
    """ "image_tower.blocks.3.mlp.fc.weight" -> "image_tower.blocks"."""
    return ".".join(name.split(".")[:2])
