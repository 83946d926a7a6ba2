"""Weights of the released Llip models. Source: the names of their public code; arXiv:2405.00740."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kiloword.config import papers
from kiloword.interop import folder
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import Imported
from kiloword.interop.state_dicts import fitted
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset

_TOKENS, _POSITIONS = "visual.class_embedding", "visual.positional_embedding"  # of tokens, then of patches


def import_state(recipe: papers.NamedRecipe, state: Mapping[str, Tensor]) -> Imported:
    """Translate a released state dict.

    Args: recipe: gives what the weights do not show, such as heads, temperature and activation.
    Raises: ValueError for a recipe of another method, and for weights that it does not fit.
    """
    if recipe.method != "llip":
        raise ValueError(f"{recipe.name} is a recipe of {recipe.method or 'no method'}: expected one of llip.")
    try:
        tokens, places, matrices = (state[name] for name in (_TOKENS, _POSITIONS, "k_proj"))
        k = len(tokens)
        extra = {"image_tower.extra_tokens": tokens + places[:k], _POSITIONS: places[k:]}
    except (KeyError, RuntimeError, IndexError, TypeError) as error:
        raise ValueError(f"these weights are no released Llip's: {str(error)[:200]} is wrong or missing.") from error
    every = {"patch_keys": len(matrices) > k, "per_patch_projections": len(matrices) > k + 1}
    settings = {**recipe.settings(), "k": k, "norms": "K_norm.weight" in state, **every}
    folded = {name: value for name, value in state.items() if name != _TOKENS} | extra
    model = papers.fill(default_recipe("llip", recipe.value("size", "tiny")), recipe).model
    config = preset("llip", settings).shape(model)
    weights, left = fitted(folded, folder.bare(config, "llip", settings), recipe.name)
    return Imported(config, "llip", weights, left, settings)


def main(name: str, path: Path, out: Path) -> None:
    """Write a model folder from released weights, and print a report. Args: name: a recipe, or its file.

    Raises: ValueError as `import_state`.
    """
    recipe = papers.read(Path(name)) if name.endswith((".toml", ".json")) else papers.load(name)
    folder.bring(import_state(recipe, read(path)), path, out, f"Llip {path.name}")
