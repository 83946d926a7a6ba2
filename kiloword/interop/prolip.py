"""Weights of the released ProLIP models, whose names are those of open_clip and a few more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.data.text.tokenizer_file import Roles
from kiloword.interop import folder
from kiloword.interop.open_clip import Imported, ImportReport, place, read
from kiloword.interop.prolip_config import model_config
from kiloword.methods.registry import preset
from kiloword.model.model import Model

_TOKENS = "text.token_embedding.weight"
_POSITIONS = "visual.positional_embedding"  # of [CLS], [UNC] and the patches
_UNC = "visual.unc_embedding"
_ROWS = {"unc": "text.unc_emb", "cls": "text.cls_emb"}  # in kiloword tokens of the vocabulary
_MORE = {
    _UNC: "image_tower.uncertainty_token",
    "visual.uncertainty_proj.weight": "head.uncertainty.image_log_var.weight",
    "visual.uncertainty_proj.bias": "head.uncertainty.image_log_var.bias",
    "text.text_uncertainty_projection.weight": "head.uncertainty.mean_log_var.weight",
    "text.text_uncertainty_projection.bias": "head.uncertainty.mean_log_var.bias",
}


def import_state(config: ModelConfig, state: Mapping[str, Tensor], roles: Roles) -> Imported:
    """Translate a released state dict.

    Args: config: of `prolip_config.model_config`; roles: of the tokenizer, whose mask token the weights lack.
    Raises: ValueError when weights are missing or have another shape.
    """
    vocab = max(config.text.vocab, 1 + max(roles.ids().values()))
    method = preset("prolip-released")
    shaped = method.shape(replace(config, text=replace(config.text, vocab=vocab, special=roles.ids())))
    with torch.device("meta"):
        needed = {name: list(value.shape) for name, value in Model(shaped, method.head(shaped)).state_dict().items()}
    _check_folded(config, state)
    placed, unused = _named(_folded(state, roles, vocab), needed)
    _check(needed, placed)
    new = [f"text_tower.tokens[{i}]" for i in range(config.text.vocab, vocab) if i not in (roles.cls, roles.unc)]
    report = ImportReport({ours: theirs for ours, (theirs, _) in sorted(placed.items())}, new, unused)
    return Imported(shaped, "prolip-released", {ours: value for ours, (_, value) in placed.items()}, report)


def _check_folded(config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Check weights that `_folded` moves. Raises: ValueError naming missing ones, or those of another shape."""
    image, text = config.image.width, config.text.width
    places = (config.image.size // config.image.patch) ** 2 + 2
    shapes = {_TOKENS: [config.text.vocab, text], _POSITIONS: [places, image], _UNC: [image]}
    shapes |= {name: [text] for name in _ROWS.values()}
    missing = [name for name in shapes if name not in state]
    if missing:
        raise ValueError(f"these weights have no {' and no '.join(missing)}: are they a released ProLIP's?")
    for name, shape in shapes.items():
        if not state[name].is_floating_point():
            raise ValueError(f"{name} holds {state[name].dtype}: expected floating-point weights")
        if list(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(state[name].shape)}, but config.json says {shape}")


def _folded(state: Mapping[str, Tensor], roles: Roles, vocab: int) -> dict[str, Tensor]:
    """The weights in open_clip's layout: [UNC] plus its position, and special text tokens in the vocabulary.

    Tokens without an embedding (the mask) get the mean of all embeddings.
    """
    places, table = state[_POSITIONS], state[_TOKENS]
    table = torch.cat([table, table.mean(0).expand(vocab - len(table), -1)])
    for role, name in _ROWS.items():
        table[roles.ids()[role]] = state[name]
    rest = {name: value for name, value in state.items() if name not in _ROWS.values()}
    return {
        **rest,
        _UNC: state[_UNC] + places[1],
        _POSITIONS: torch.cat([places[:1], places[2:]]),
        _TOKENS: table,
    }


def _named(
    state: Mapping[str, Tensor], needed: Mapping[str, list[int]]
) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """Name in kiloword -> name in the file and value; and unused names. The final norm of images is used twice."""
    placed, unused = {}, []
    for theirs, value in state.items():
        ours, reshaped = (_MORE[theirs], value) if theirs in _MORE else place(theirs, value)
        if ours is None or ours not in needed:
            unused.append(theirs)
            continue
        placed[ours] = (theirs, reshaped)
        if ours.startswith("image_tower.norm."):
            placed[ours.replace("image_tower", "head.pooling")] = (theirs, reshaped.clone())
    return placed, sorted(unused)


def _check(needed: Mapping[str, list[int]], placed: Mapping[str, tuple[str, Tensor]]) -> None:
    """Raises: ValueError naming missing weights, or those of another shape."""
    missing = [name for name in needed if name not in placed]
    if missing:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"these weights lack what becomes {', '.join(missing[:3])}{rest}: does config.json fit them?")
    for ours, (theirs, value) in placed.items():
        if list(value.shape) != needed[ours]:
            raise ValueError(f"{theirs} becomes {ours} {list(value.shape)}, but config.json says {needed[ours]}")


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
    folder.write(imported, path, out, f"ProLIP {path.parent.name}")
    folder.show(imported.report, out)
