"""Foreign weights -> a model folder of ours: what `kiloword import` does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kiloword.checkpoint.files import is_taken
from kiloword.checkpoint.lock import NAME, Lock
from kiloword.checkpoint.model_folder import check_finite, save_model, words_of
from kiloword.config.recipes import ModelConfig, ModelFile
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer, siglip_tokenizer
from kiloword.methods.registry import preset
from kiloword.model.model import Model, build
from kiloword.terminal import say
from kiloword.terminal.screen import Screen, plain_table

if TYPE_CHECKING:
    from kiloword.interop.open_clip import Imported, ImportReport

CLIP_VOCAB = 49408


def write(imported: Imported, weights: Path, out: Path, origin: str) -> None:
    """Save imported weights with the tokenizer they were trained with; goes on with what a killed import began.

    Args: weights: the file they came from; a SigLIP's tokenizer.json is looked for beside it; origin: what they are,
    "open_clip ViT-B-32".
    Raises: ValueError when `out` is in use or the tokenizer is missing.
    """
    file = ModelFile(method=imported.method, settings=imported.settings, model=imported.config, data=origin)
    own = words_of(tokenizer(imported.config, weights), file)
    if (out / NAME).is_file():  # of an import that was killed, or goes on
        Lock(out, "writing").release()
    _check_free(out, own)  # before the work, and before a lock is put there
    model, words = assemble(imported, weights)
    with Lock(out, "writing"):
        _check_free(out, own)
        save_model(out, model, words, file)


def _check_free(out: Path, own: dict[str, bytes]) -> None:
    if is_taken(out, own):
        raise ValueError(f"{out} exists and is not an empty folder; choose another --out, or remove it")


def assemble(imported: Imported, weights: Path) -> tuple[Model, Tokenizer]:
    """Imported weights as a model in memory, with the tokenizer they were trained with.

    Args: weights: the file they came from; a SigLIP's tokenizer.json is looked for beside it.
    Raises: ValueError when the tokenizer is missing, or weights are NaN or infinite.
    """
    words = tokenizer(imported.config, weights)
    model = build(imported.config, preset(imported.method, imported.settings), seed=0)
    check_finite(imported.state, str(weights))
    model.load_state_dict({**model.state_dict(), **imported.state})
    return model, words


def tokenizer(config: ModelConfig, weights: Path) -> Tokenizer:
    """The tokenizer that belongs to a configuration: CLIP's, or else SigLIP's from the tokenizer.json beside weights.

    Raises: ValueError when that is missing or damaged.
    """
    if CLIP_VOCAB <= config.text.vocab <= CLIP_VOCAB + 3:  # with rows for mask, class and uncertainty tokens
        return clip_tokenizer()
    found = weights.with_name("tokenizer.json")
    if not found.is_file():
        raise ValueError(
            f"a SigLIP needs its vocabulary: put the tokenizer.json that is published with the weights beside {weights}"
        )
    try:
        return siglip_tokenizer(found)
    except json.JSONDecodeError as error:
        raise ValueError(f"{found} is damaged ({error}); copy it again") from error


def show(report: ImportReport, out: Path) -> None:
    """Print what was loaded, what is new and what was left over, part by part."""
    table = plain_table("part", "loaded", "new")
    loaded, new = (Counter(_part(n) for n in names) for names in (report.loaded, report.new))
    for part in dict.fromkeys([*loaded, *new]):
        table.add_row(part, str(loaded[part]), str(new[part]))
    table.add_row("left over", str(len(report.left_over)), "")
    Screen().print(table)
    for title, names in (("new", report.new), ("left over", report.left_over)):
        say(*(f"{title}: {name}" for name in names))
    say(f"written: {out}")


def _part(name: str) -> str:
    """ "image_tower.blocks.3.mlp.fc.weight" -> "image_tower.blocks"."""
    return ".".join(name.split(".")[:2])
