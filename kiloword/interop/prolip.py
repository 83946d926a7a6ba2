"""Weights of the released ProLIP models, with the names of open_clip and a few more. Source: its public code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.data.text.tokenizer import Roles
from kiloword.interop import folder
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import Imported
from kiloword.interop.hf_folder import json_object
from kiloword.interop.open_clip_config import translate
from kiloword.interop.state_dicts import CLASS, TOKENS, fitted
from kiloword.methods.registry import preset

METHOD: Literal["prolip-released"] = "prolip-released"
APPENDED = 2  # [UNC] and [CLS], which its context does not count
_POSITIONS, _UNC = "visual.positional_embedding", "visual.unc_embedding"  # positions of [CLS], [UNC] and the patches
_ROWS = {"unc": "text.unc_emb", "cls": CLASS}  # tokens of the vocabulary in kiloword


def model_config(path: Path) -> ModelConfig:
    """The configuration of the towers of a published config.json, with the vocabulary that its weights have.

    Raises: ValueError when the file is missing, damaged, or describes unsupported towers.
    """
    if not path.is_file():
        raise ValueError(
            f"no {path}: weights do not show heads and activations; put the published config.json into the same folder."
        )
    raw = json_object(path)
    vision = {"embed_unc": None, **(raw.get("vision_cfg") or {})}  # by which `translate` knows a ProLIP
    config = translate(str(path), {**raw, "vision_cfg": vision})
    return replace(config, text=replace(config.text, context=config.text.context + APPENDED))


def import_state(config: ModelConfig, state: Mapping[str, Tensor], roles: Roles) -> Imported:
    """Translate a released state dict: [UNC] plus its position, and special text tokens into the vocabulary.

    Args: config: of `model_config`; roles: of the tokenizer, whose mask token the weights lack.
    Raises: ValueError when weights are missing or have another shape.
    """
    vocab = max(config.text.vocab, 1 + max(roles.ids().values()))
    try:
        if (rows := len(state[TOKENS])) != config.text.vocab:
            raise ValueError(f"{TOKENS} has {rows} rows, but config.json says {config.text.vocab}.")
        places, table = state[_POSITIONS], state[TOKENS]
        # tokens without an embedding (the mask) get the mean of all embeddings
        table = torch.cat([table, table.mean(0).expand(vocab - rows, -1)])
        for role, name in _ROWS.items():
            table[roles.ids()[role]] = state[name]
        folded = {name: value for name, value in state.items() if name not in _ROWS.values()}
        folded |= {_UNC: state[_UNC] + places[1], _POSITIONS: torch.cat([places[:1], places[2:]]), TOKENS: table}
    except (KeyError, RuntimeError, IndexError) as error:
        raise ValueError(f"these weights are no released ProLIP's: {str(error)[:200]} is wrong or missing.") from error
    shaped = preset(METHOD).shape(replace(config, text=replace(config.text, vocab=vocab, special=roles.ids())))
    expected = folder.bare(shaped, METHOD)
    twice = {name: value for name, value in expected.items() if name.startswith("head.pooling.norm.")}
    ours, left = fitted(folded, {n: x for n, x in expected.items() if n not in twice}, "config.json")
    ours |= {name: ours[name.replace("head.pooling", "image_tower")].clone() for name in twice}
    return Imported(shaped, METHOD, ours, left)


def main(path: Path, out: Path) -> None:
    """Write a model folder from released weights, and print a report.

    Args: path: of the weights; their config.json and SigLIP's tokenizer.json must be in the same folder.
    Raises: ValueError when one of the three is missing or does not fit the others.
    """
    state, config = read(path), model_config(path.with_name("config.json"))
    if config.text.vocab == folder.CLIP_VOCAB:
        raise ValueError(
            f"{path} has CLIP's vocabulary: which token its captions were padded with is not known, and the model sees "
            "its pads. Released models with SigLIP's vocabulary can be imported."
        )
    imported = import_state(config, state, folder.tokenizer(config, path).roles)
    folder.bring(imported, path, out, f"ProLIP {path.parent.name}")
